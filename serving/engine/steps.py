"""What runs on the device: four functions from one state to the next, which take it over (donate it)."""

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.model import K3ForCausalLM
from k3jax.sampling import SamplingParams
from k3jax.sampling.sampler import Sample, SamplingBatch, mark_generated, sample
from k3jax.state import PAGE_SIZE, DecodeBatch, DecodeState, PrefillBatch, Snapshots


@flax.struct.dataclass
class EngineState:
    """All that steps read and write; everything but the model's pools has one row for each slot, dummy slot 0 included.

    Tokens stay here: a step takes what the one before has chosen, and nobody waits for the host.

    Attributes:
      model: the model's pools.
      page_table: [slots, max pages] int32.
      settings: how each slot's tokens are chosen.
      wants_logprobs: [slots] bool.
      seen: [slots, V] uint8, see `k3jax.sampling.sampler`.
      last_token: [slots] int32, chosen by the last step of the slot; -1 if its logits were no numbers.
    """

    model: DecodeState
    page_table: jax.Array
    settings: SamplingBatch
    wants_logprobs: jax.Array
    seen: jax.Array
    last_token: jax.Array

    @classmethod
    def create(cls, config: K3Config, *, num_slots: int, num_pages: int, max_pages: int, dtype) -> "EngineState":
        """Empty; `num_slots` and `num_pages` count the dummies."""
        greedy = SamplingBatch.pack([SamplingParams(temperature=0)] * num_slots, [0] * num_slots)
        return cls(
            model=DecodeState.create(config, num_slots=num_slots, num_pages=num_pages, dtype=dtype),
            page_table=jnp.zeros((num_slots, max_pages), jnp.int32),
            settings=jax.tree.map(jnp.asarray, greedy),
            wants_logprobs=jnp.zeros(num_slots, bool),
            seen=jnp.zeros((num_slots, config.vocab_size), jnp.uint8),
            last_token=jnp.zeros(num_slots, jnp.int32),
        )


@flax.struct.dataclass
class SlotContents:
    """A request's row of `EngineState`, in NumPy; `settings` have one row."""

    page_table: np.ndarray
    settings: SamplingBatch
    wants_logprobs: np.ndarray
    seen: np.ndarray


@flax.struct.dataclass
class PrefillInputs:
    """Chunks of several prompts, packed; see `PrefillBatch`.

    Attributes:
      tokens: [T] int32.
      cu_seqlens: [N + 1] int32.
      slots, context_lens: [N] int32.
      ends: [N] bool, whether the prompt ends with this chunk: the token after it is kept.
      snapshot_positions: [M] int32.
    """

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    ends: np.ndarray
    snapshot_positions: np.ndarray


@functools.partial(jax.jit, donate_argnames="state")
def admit_step(state: EngineState, slot: jax.Array, contents: SlotContents) -> EngineState:
    """Gives a slot to a request. The model's state in it needs no zeroing: nobody reads it at context 0."""

    def put(pool: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(pool, row, slot, 0)

    return state.replace(
        page_table=put(state.page_table, contents.page_table),
        settings=jax.tree.map(put, state.settings, jax.tree.map(lambda field: field[0], contents.settings)),
        wants_logprobs=put(state.wants_logprobs, contents.wants_logprobs),
        seen=put(state.seen, contents.seen),
    )


@functools.partial(jax.jit, donate_argnames="state")
def restore_step(state: EngineState, slot: jax.Array, snapshot: Snapshots) -> tuple[EngineState, jax.Array]:
    """Copies a cached snapshot, without the axis M, into a slot; returns (state, something that comes with it)."""

    def put(pool: jax.Array, kept: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(pool, kept, slot, 1)

    model = state.model
    return state.replace(model=model.replace(
        kda_state=put(model.kda_state, snapshot.kda_state), conv_tail=put(model.conv_tail, snapshot.conv_tail)
    )), slot + 1  # the state is donated to the next step: nobody can wait for it


@functools.partial(jax.jit, static_argnames=("model", "num_logprobs"), donate_argnames="state")
def prefill_step(params, state: EngineState, inputs: PrefillInputs, *, model: K3ForCausalLM,
                 num_logprobs: int) -> tuple[EngineState, Sample, tuple[Snapshots, ...]]:
    """Chunks of prompts; returns (state, what comes after each chunk, one array of its own for each snapshot)."""
    slots = inputs.slots
    batch = PrefillBatch(
        inputs.cu_seqlens, slots, inputs.context_lens, state.page_table[slots], inputs.snapshot_positions
    )
    out = model.apply({"params": params}, inputs.tokens, state.model, batch)
    positions = inputs.context_lens + jnp.diff(inputs.cu_seqlens)
    chosen = _sample(out.logits, state, jnp.where(inputs.ends, slots, 0), positions, num_logprobs)
    nobody = state.last_token.shape[0]
    last_token = state.last_token.at[jnp.where(inputs.ends, slots, nobody)].set(chosen.token_ids, mode="drop")
    snapshots = tuple(
        jax.tree.map(lambda kept, number=number: kept[:, number], out.snapshots)
        for number in range(inputs.snapshot_positions.shape[0])
    )
    return state.replace(model=out.state, last_token=last_token), chosen, snapshots


@functools.partial(jax.jit, static_argnames=("model", "num_logprobs"), donate_argnames="state")
def decode_step(params, state: EngineState, rows: jax.Array, *, model: K3ForCausalLM,
                num_logprobs: int) -> tuple[EngineState, Sample]:
    """One token for each row.

    Args:
      rows: [B, 3] int32: slot (0 = unused row), tokens before this one, page that this one goes to.
    """
    slots, context_lens, pages = rows[:, 0], rows[:, 1], rows[:, 2]
    page_table = state.page_table.at[slots, context_lens // PAGE_SIZE].set(pages)
    tokens = state.last_token[slots]
    seen = mark_generated(state.seen, jnp.full_like(state.last_token, -1).at[slots].set(tokens))
    state = state.replace(page_table=page_table, seen=seen)
    out = model.apply({"params": params}, tokens, state.model, DecodeBatch(slots, context_lens, page_table[slots]))
    chosen = _sample(out.logits, state, slots, context_lens + 1, num_logprobs)
    return state.replace(model=out.state, last_token=state.last_token.at[slots].set(chosen.token_ids)), chosen


def _sample(logits: jax.Array, state: EngineState, slots: jax.Array, positions: jax.Array, num_logprobs: int) -> Sample:
    """Chooses by the settings of these slots; log-probabilities are zeros unless somebody wants them."""
    settings = jax.tree.map(lambda pool: pool[slots], state.settings)
    seen, rows = state.seen[slots], slots.shape[0]

    def with_logprobs() -> Sample:
        return sample(logits, settings, seen, positions, num_logprobs=num_logprobs)

    def without() -> Sample:
        chosen = sample(logits, settings, seen, positions)
        none = jnp.zeros((rows, num_logprobs))
        return Sample(chosen.token_ids, jnp.zeros(rows), none.astype(jnp.int32), none)

    return jax.lax.cond(jnp.any(state.wants_logprobs[slots]), with_logprobs, without)


def slot_contents(pages: Sequence[int], max_pages: int, sampling: SamplingParams, seed: int,
                  seen: np.ndarray) -> SlotContents:
    """The row of one request."""
    table = np.zeros(max_pages, np.int32)
    table[: len(pages)] = pages
    return SlotContents(
        table, SamplingBatch.pack([sampling], [seed]), np.bool_(sampling.logprobs is not None), seen
    )
