"""Chooses the next token of every row of a batch, on the device; each row has settings of its own.

The order is that of `SamplingParams`, which is Hugging Face's. Nothing sorts the vocabulary: top-k and top-p keep
every token down to some logit, and that logit is found exactly, two bits of its float32 value at a time. So equally
likely tokens are kept or dropped together, where a sort would cut between them.

A draw is the maximum of logits plus Gumbel noise. The noise of a token is a Threefry-2x32 word pair (Salmon et al.,
2011) with the request's seed as key and (position, token) as counter: it depends on nothing else, neither on the batch,
the row, the size of the vocabulary nor the configuration of JAX.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from k3jax.sampling.params import SamplingParams

IN_PROMPT, GENERATED = 1, 2
"""Bits of `seen`."""

_LARGEST_GAP = np.uint32(0xFF000000)
"""No two float32 numbers, infinities included, have more steps between them."""


@flax.struct.dataclass
class SamplingBatch:
    """`SamplingParams` of the rows, [B] each.

    Attributes:
      repetition_penalty, presence_penalty, temperature, top_p, min_p: float32.
      top_k: int32.
      seed: [B, 2] uint32, high word first.
    """

    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array

    @classmethod
    def pack(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> "SamplingBatch":
        """NumPy arrays of one row for each request; `seeds` stand in for those that requests leave open."""

        def column(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(row, name) for row in params], dtype)

        return cls(
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            seed=np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2),
        )


class Sample(NamedTuple):
    """What was chosen.

    Attributes:
      token_ids: [B] int32; -1 in a row whose logits hold NaN, +inf, or nothing above -inf.
      logprobs: [B] float32, of the chosen tokens under the model itself; None unless asked for.
      top_ids: [B, n] int32, the most likely tokens under the model itself; None unless asked for.
      top_logprobs: [B, n] float32, theirs.
    """

    token_ids: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def seen_in_prompt(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """A row of `seen` at the start of a request, [V] uint8."""
    row = np.zeros(vocab_size, np.uint8)
    row[np.asarray(token_ids, np.int64)] = IN_PROMPT
    return row


def mark_generated(seen: jax.Array, token_ids: jax.Array) -> jax.Array:
    """`seen` [B, V] with one more token a row, [B] int32; an id below 0 marks nothing. Donate `seen` under jit."""
    rows = jnp.arange(seen.shape[0])
    columns = jnp.where(token_ids < 0, seen.shape[1], token_ids)
    marks = seen.at[rows, columns].get(mode="fill", fill_value=0) | np.uint8(GENERATED)
    return seen.at[rows, columns].set(marks, mode="drop")


def sample(logits: jax.Array, settings: SamplingBatch, seen: jax.Array, positions: jax.Array, *,
           num_logprobs: int | None = None) -> Sample:
    """Chooses one token a row.

    Costs an argmax when every row is greedy; a penalty or filter costs something when some row uses it.

    Args:
      logits: [B, V] float32.
      settings: one row each.
      seen: [B, V] uint8, bit `IN_PROMPT` of a row's prompt tokens and `GENERATED` of its new ones.
      positions: [B] int32 tokens before the new one.
      num_logprobs: None, or how many of the most likely tokens to report beside the chosen one.
    """
    penalties = (settings.repetition_penalty != 1) | (settings.presence_penalty != 0)
    penalised = jax.lax.cond(jnp.any(penalties), penalise, lambda logits, *_: logits, logits, settings, seen)
    greedy = jnp.argmax(penalised, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(
        jnp.any(settings.temperature > 0), _draw, lambda *_: greedy, penalised, settings, positions
    )
    chosen = jnp.where(settings.temperature > 0, drawn, greedy)
    # A maximum is NaN if anything is.
    chosen = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), chosen, -1)
    if num_logprobs is None:
        return Sample(chosen)
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(logits, num_logprobs)
    logprobs = jnp.take_along_axis(logits, jnp.maximum(chosen, 0)[:, None], axis=-1) - norm
    return Sample(chosen, logprobs[:, 0], top_ids, top - norm)


def penalise(logits: jax.Array, settings: SamplingBatch, seen: jax.Array) -> jax.Array:
    """[B, V] float32 logits after both penalties."""
    factor = settings.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    presence = jnp.where(seen & GENERATED != 0, settings.presence_penalty[:, None], 0)
    return jnp.where(seen != 0, repeated, logits) - presence


def _draw(logits: jax.Array, settings: SamplingBatch, positions: jax.Array) -> jax.Array:
    """[B] int32 tokens drawn from what the filters keep; of greedy rows it is any token."""
    noise = _gumbel(settings.seed, positions, logits.shape[-1])
    return jnp.argmax(filter_logits(logits, settings) + noise, axis=-1).astype(jnp.int32)


def filter_logits(logits: jax.Array, settings: SamplingBatch) -> jax.Array:
    """[B, V] float32 logits over the temperature, 0 at the best and -inf where a filter drops the token.

    A softmax makes of them the probabilities that tokens are drawn with. A greedy row has temperature 1 here.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    drawn = settings.temperature > 0
    scaled = (logits - best) / jnp.where(drawn, settings.temperature, 1)[:, None]
    weights = jnp.exp(scaled)
    gaps = (_ordered(best) - _ordered(logits)).astype(jnp.uint32)
    largest = jnp.full(logits.shape[:1], _LARGEST_GAP)

    def top_k(limit: jax.Array) -> jax.Array:
        found = _smallest_gap(lambda gap: jnp.sum(gaps <= gap[:, None], axis=-1) >= settings.top_k, limit)
        return jnp.where(settings.top_k > 0, found, limit)

    def top_p(limit: jax.Array) -> jax.Array:
        left = jnp.where(gaps <= limit[:, None], weights, 0)
        target = settings.top_p * jnp.sum(left, axis=-1)
        found = _smallest_gap(lambda gap: jnp.sum(jnp.where(gaps <= gap[:, None], left, 0), axis=-1) >= target, limit)
        return jnp.where(settings.top_p < 1, found, limit)

    limit = jax.lax.cond(jnp.any(drawn & (settings.top_k > 0)), top_k, lambda limit: limit, largest)
    limit = jax.lax.cond(jnp.any(drawn & (settings.top_p < 1)), top_p, lambda limit: limit, limit)
    return jnp.where((gaps <= limit[:, None]) & (weights >= settings.min_p[:, None]), scaled, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 that orders the same, one step for each representable number; both zeros are 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, np.int32(-(2**31)) - bits, bits)


def _smallest_gap(enough: Callable[[jax.Array], jax.Array], limit: jax.Array) -> jax.Array:
    """[B] uint32: the smallest gap for which `enough`, [B] -> [B] bool, is true, as from there on; at most the limit.

    Settles two bits in a pass, from the top: three sums over the vocabulary cost little more than one.
    """

    def settle(number: jax.Array, found: jax.Array) -> jax.Array:
        # Nothing below `found` is enough.
        digit = jnp.uint32(1) << (30 - 2 * number).astype(jnp.uint32)
        short = [~enough(found + factor * digit - 1) for factor in (1, 2, 3)]
        return found + digit * sum(part.astype(jnp.uint32) for part in short)

    return jnp.minimum(jax.lax.fori_loop(0, 16, settle, jnp.zeros_like(limit)), limit)


def _gumbel(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """[B, V] float32 noise from seeds [B, 2] and positions [B].

    All 64 bits of a token count: with 32, tokens less likely than 2**-32 would never be drawn.
    """
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        high, low = threefry_2x32(seed, jnp.stack([jnp.full_like(tokens, position), tokens]))
        uniform = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 0.5) * 2.0**-64
        return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))

    return jax.vmap(row)(seeds, positions.astype(jnp.uint32))
