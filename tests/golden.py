"""The golden checkpoints and vectors in `tests/data` (see its README.md)."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np

import k3jax
from k3jax.language_model import LanguageModel
from k3jax.state import DecodeBatch, DecodeState, PrefillBatch, pool_dtype
from tests.checkpoints import tiny_checkpoint

DATA = pathlib.Path(__file__).parent / "data"
TINY = ("k3-tiny", "kimi-linear-tiny")
PAGE = 16


@functools.cache
def tiny_model(name: str, dtype: str = "float32") -> LanguageModel:
    """A golden checkpoint, loaded once."""
    return k3jax.load(tiny_checkpoint(name), dtype=dtype)


@functools.cache
def vectors(name: str, file: str) -> dict[str, np.ndarray]:
    """All arrays of one golden file."""
    with np.load(DATA / name / f"golden_{file}.npz") as arrays:
        return dict(arrays)


def new_state(lm: LanguageModel, *, slots: int = 3, pages: int = 40) -> DecodeState:
    """Empty pools with small pages."""
    return DecodeState.create(lm.config, num_slots=slots, num_pages=pages, dtype=pool_dtype(lm.dtype), page_size=PAGE)


def prefill_batch(lengths, *, context=None, slots=None, snapshots=(), max_pages: int = 16) -> PrefillBatch:
    """Packed sequences; sequence n has slot n + 1 and pages of its own unless told otherwise."""
    count = len(lengths)
    slots = range(1, count + 1) if slots is None else slots
    return PrefillBatch(
        cu_seqlens=jnp.array(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        slots=jnp.array([slot if length else 0 for slot, length in zip(slots, lengths)], jnp.int32),
        context_lens=jnp.array(context if context is not None else [0] * count, jnp.int32),
        page_table=page_table(slots, max_pages),
        snapshot_positions=jnp.array(snapshots, jnp.int32),
    )


def decode_batch(slots, context, *, max_pages: int = 16) -> DecodeBatch:
    """One token for each slot; slot 0 is an unused row."""
    return DecodeBatch(
        slots=jnp.array(slots, jnp.int32), context_lens=jnp.array(context, jnp.int32),
        page_table=page_table(slots, max_pages),
    )


def page_table(slots, max_pages: int):
    """Pages of slot s: 1 + (s - 1) * max_pages and on; zeros for slot 0."""
    rows = [np.arange(max_pages) + 1 + (slot - 1) * max_pages if slot else np.zeros(max_pages) for slot in slots]
    return jnp.array(np.stack(rows), jnp.int32)
