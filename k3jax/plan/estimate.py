"""What a step needs of one device, from the shapes and placements of its arguments and its traced program."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from k3jax.config import K3Config
from k3jax.memory import required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.plan.hardware import Device
from k3jax.plan.liveness import peak_bytes
from k3jax.plan.program import Program
from k3jax.weights import leaves

# First names of the parameter tree, in words. Those of "moe" are told apart by their last name.
_WEIGHT_KINDS = {
    "embeddings": "embeddings and head", "kda": "KDA", "mla": "MLA", "dense_mlp": "dense MLP",
    "layer_inputs": "norms and AttnRes", "output": "norms and AttnRes",
}
_STATE_KINDS = {"kda_state": "KDA states", "conv_tail": "conv tails", "mla_pages": "MLA cache"}

_LANES = 128  # of a TPU


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device.

    Attributes:
      weights: by kind.
      state: the pools, by kind; they come out of the step where they went in.
      inputs: token ids and tables.
      outputs: logits and snapshots.
      temporaries: values that live at the same time inside the step. A compiler may need less, because it fuses, or
        more, because it keeps copies in other tilings.
    """

    weights: Mapping[str, int]
    state: Mapping[str, int]
    inputs: int
    outputs: int = 0
    temporaries: int = 0

    @property
    def arguments(self) -> int:
        """Weights, state and inputs."""
        return sum((*self.weights.values(), *self.state.values(), self.inputs))

    @property
    def peak(self) -> int:
        """All together."""
        return self.arguments + self.outputs + self.temporaries


def estimate(program: Program, *, trace: bool = True) -> Estimate:
    """Counts a program.

    Args:
      program: the step.
      trace: also count its outputs and temporaries, which takes seconds.

    Raises:
      UserError: its mesh does not divide the model.
    """
    tokens, batch = program.inputs
    counted = Estimate(_weights(program.params), _state(program), required_bytes((tokens, batch)))
    if not trace:
        return counted
    return dataclasses.replace(
        counted,
        outputs=required_bytes(program.outputs),
        temporaries=peak_bytes(program.traced.jaxpr.jaxpr, _activation_bytes(program)),
    )


def _activation_bytes(program: Program) -> Callable[[Any], int]:
    """Bytes on a device of a value between projections, whose placement the compiler chooses: as its sizes tell.

    All have rows; the widths here are those that weights before them are split over.
    """
    config, layout = program.config, program.layout
    rows = layout.parts(program.inputs[1].row_axis)
    widths = {
        config.kda_num_heads: "kda_heads", config.kda_num_heads * config.kda_head_dim: "kda_channels",
        config.num_attention_heads: "mla_heads", config.num_attention_heads * config.v_head_dim: "mla_channels",
        config.intermediate_size: "mlp", config.num_shared_experts * config.moe_intermediate_size: "shared_mlp",
        config.vocab_size: "vocab",
    }

    def size(aval: Any) -> int:
        split = [layout.parts(widths[width]) for width in aval.shape[1:] if width in widths]
        return -(-math.prod(aval.shape) * aval.dtype.itemsize // (rows * max(split, default=1)))

    return size


def weight_kind(path: tuple[str, ...]) -> str:
    """What a parameter belongs to, in words."""
    if path[0] == "moe":
        return "routed experts" if path[-1].startswith("experts_") else "router, latent and shared experts"
    return _WEIGHT_KINDS[path[0]]


def _weights(params: Any) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        kind = weight_kind(tuple(key.key for key in path))
        kinds[kind] = kinds.get(kind, 0) + required_bytes(leaf)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _state(program: Program) -> dict[str, int]:
    pools = {name: getattr(program.state, name) for name in _STATE_KINDS}
    if program.platform == "tpu":
        # Pages have their axes in order there (see `DecodeState`), and rows of whole lanes.
        pages = pools["mla_pages"]
        lanes = -(-pages.shape[-1] // _LANES) * _LANES
        pools["mla_pages"] = pages.update(shape=(*pages.shape[:-1], lanes))
    return {kind: required_bytes(pools[name]) for name, kind in _STATE_KINDS.items()}


@dataclasses.dataclass(frozen=True)
class Floors:
    """Times in seconds that no implementation can beat; None where the hardware's rate is not known.

    Attributes:
      memory: to read what the step reads and write what it writes.
      compute: of its products.
      links: to receive what other devices send, one after the other.
    """

    memory: float | None
    compute: float | None
    links: float | None = None

    @property
    def step(self) -> float | None:
        """The longest."""
        return max((time for time in dataclasses.astuple(self) if time is not None), default=None)


def floors(program: Program, counted: Estimate, device: Device, received: int | None = None) -> Floors:
    """Floors of a step.

    Args:
      program: the step.
      counted: its estimate.
      device: the hardware.
      received: bytes that a device gets from others in a step, if they have been counted.
    """
    def seconds(amount: float | None, rate: float | None) -> float | None:
        return None if amount is None or rate is None else amount / rate

    return Floors(
        seconds(bytes_moved(program, counted), device.bandwidth),
        seconds(operations(program) / program.mesh.size, device.flops),
        seconds(received, device.link),
    )


def bytes_moved(program: Program, counted: Estimate) -> float:
    """What one device must read and write in a step.

    Every weight once, of the routed experts those that evenly chosen tokens hit; the states of the step's sequences in
    and out; their whole cache.
    """
    config, weights = program.config, counted.weights
    read = sum(weights.values()) - weights.get("embeddings and head", 0) // 2  # the embeddings are looked up
    if config.num_experts:
        missed = (1 - config.num_experts_per_token / config.num_experts) ** program.tokens
        read -= missed * weights["routed experts"]
    share = 1 if program.kind == "decode" else program.blocks / program.sequences
    states = counted.state["KDA states"] + counted.state["conv tails"]
    return read + share * (2 * states + counted.state["MLA cache"])


def operations(program: Program) -> float:
    """Multiplications and additions of a step in all: two for each parameter that a token uses, and MLA's."""
    config, tokens = program.config, program.tokens
    used = active_parameters(config) * tokens
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    # Decode meets the latent itself, prefill the keys and values made of it.
    per_key = config.mla_latent_size + config.kv_lora_rank if program.kind == "decode" else (
        nope + rope + config.v_head_dim
    )
    return 2 * used + 2 * tokens * program.workload.context * heads * per_key * len(config.layers_of("mla"))


def active_parameters(config: K3Config) -> float:
    """Parameters that a token is multiplied by."""
    total = 0.0
    for path, weight in leaves(K3ForCausalLM.weights(config)):
        share = config.num_experts_per_token / config.num_experts if path[-1].startswith("experts_") else 1
        if path[-1] != "embed_tokens":
            total += share * math.prod(weight.shape) * weight.parameters_per_element
    return total
