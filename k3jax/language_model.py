"""Loading a model by name: a checkpoint directory, the demo, or random weights."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from k3jax.catalog import Description, describe
from k3jax.checkpoint import Repository, detect_expert_format, load_params, random_params
from k3jax.checkpoint.orbax.manifest import is_converted
from k3jax.config import K3Config
from k3jax.errors import UserError, users_mistake
from k3jax.model import K3ForCausalLM
from k3jax.sampling.defaults import GenerationDefaults
from k3jax.tokenizer import Tokenizer
from sharding import MESH_AXES, ONE_DEVICE, STRATEGIES, Layout, make_mesh

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its parameters and tokenizer.

    Attributes:
      config: the architecture.
      model: the Flax module.
      params: its parameters, as `model.apply({"params": params}, ...)` takes them.
      tokenizer: None when the checkpoint has no tokenizer files.
      defaults: settings for generation, from the checkpoint's `generation_config.json` where it has one.
      dtype: of activations.
      load_seconds: time that loading took.
      layout: where parameters and state lie.
    """

    config: K3Config
    model: K3ForCausalLM
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    dtype: Any
    load_seconds: float
    layout: Layout = ONE_DEVICE

    @property
    def description(self) -> Description:
        """The model without its weights."""
        return Description(self.config, self.tokenizer, None, self.defaults)


def load(checkpoint: str | pathlib.Path = "demo", *, dtype: str = "bfloat16",
         mesh: Mesh | Mapping[str, int] | None = None, strategy: str = "decode", seed: int = 0,
         progress: bool = False) -> LanguageModel:
    """Loads a model.

    Args:
      checkpoint: a Hugging Face directory of Kimi K3 or Kimi-Linear, or what `python -m k3jax.convert` made of it;
        `demo`, a small model with random weights; or `random:PRESET[:layers]`, random weights in the true layout.
      dtype: "float32" or "bfloat16", of activations and of the weights that are bfloat16 in the checkpoint. Weights in
        float32 and MXFP4 stay what they are.
      mesh: devices to spread the model over, or sizes of mesh axes such as `{"expert": 4, "tensor": 2}`; None = the
        default device.
      strategy: which table of `sharding/rules.py` says how: "decode", "prefill" or "train".
      seed: of random weights.
      progress: show progress on stderr.

    Raises:
      UserError: the checkpoint is missing, damaged or of another architecture, does not fit into memory, or does not
        divide over the mesh; or there are too few devices for the mesh.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    layout = _layout(mesh, strategy)
    start = time.perf_counter()
    real_dtype = DTYPES[dtype]
    config, tokenizer, directory, defaults = describe(checkpoint)
    if directory is None:
        params = random_params(config, real_dtype, seed, layout=layout, progress=progress)
    elif is_converted(directory):
        # Importing Orbax takes a second, which other checkpoints need not wait for.
        from k3jax.checkpoint.orbax.loading import load_converted

        params = load_converted(config, directory, real_dtype, layout=layout, progress=progress)
    else:
        repository = Repository.open(directory)
        config = dataclasses.replace(config, expert_format=detect_expert_format(repository))
        params = load_params(config, repository, real_dtype, layout=layout, progress=progress)
    model = K3ForCausalLM(config, real_dtype, layout)
    return LanguageModel(
        config, model, params, tokenizer, defaults, real_dtype, time.perf_counter() - start, layout
    )


def _layout(mesh: Mesh | Mapping[str, int] | None, strategy: str) -> Layout:
    if strategy not in STRATEGIES:
        raise UserError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if mesh is None:
        return ONE_DEVICE
    if isinstance(mesh, Mesh) and not set(mesh.axis_names) <= set(MESH_AXES):
        raise UserError(f"the mesh has axes {', '.join(mesh.axis_names)}, expected some of {', '.join(MESH_AXES)}")
    with users_mistake():
        return Layout(mesh if isinstance(mesh, Mesh) else make_mesh(mesh), STRATEGIES[strategy])
