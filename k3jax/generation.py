"""Greedy generation for one prompt: chunked prefill, then one token a step with two steps in flight."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.errors import UserError
from k3jax.language_model import LanguageModel
from k3jax.memory import check_fits, peak_memory_bytes, required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.prompt import prompt_ids
from k3jax.state import PAGE_SIZE, DecodeBatch, DecodeState, PrefillBatch

SMALLEST_CHUNK = 64
STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
      token_ids: the new tokens, a stop token included.
      text: their text; None without a tokenizer.
      finish_reason: "stop" (stop token), "length" (`max_new_tokens`), or "interrupted" (Ctrl-C).
      usage: `prompt_tokens`, `completion_tokens`, `total_tokens`.
      timings: `load_s`, `compile_s`, `prefill_s`, `prefill_tokens_per_s`, `decode_s`, `decode_tokens_per_s` (of the
        tokens after the first), `peak_memory_bytes`.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    usage: dict[str, int]
    timings: dict[str, float]


def generate(lm: LanguageModel, prompt: str | Sequence[int], *, max_new_tokens: int = 128, ignore_eos: bool = False,
             chunk: int = 512, on_text: Callable[[str], None] | None = None,
             on_logits: Callable[[int, np.ndarray], None] | None = None) -> Generation:
    """Continues a prompt greedily.

    Args:
      lm: from `k3jax.load`.
      prompt: text, or token ids.
      max_new_tokens: most tokens to generate.
      ignore_eos: go on after the model's stop token.
      chunk: most prompt tokens in one step.
      on_text: called with each piece of finished text as it comes.
      on_logits: called with (position of the first row, [rows, vocabulary] float32) for each chunk of the prompt.

    Raises:
      UserError: an empty prompt, ids outside the vocabulary, limits below 1, more tokens than the model's context, text
        without a tokenizer, or not enough memory.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
        if value < 1:
            raise UserError(f"{name} is {value}, expected at least 1")
    ids = prompt_ids(lm.description, prompt, max_new_tokens)
    session = _Session(lm, ids, max_new_tokens, chunk, all_logits=on_logits is not None)
    eos = None if ignore_eos else lm.config.eos_token_id
    detokenizer = lm.tokenizer.detokenizer() if lm.tokenizer else None
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        if on_text and text:
            on_text(text)

    token_ids, finish_reason = [], "length"
    prefill_end = start = time.perf_counter()
    try:
        first = session.prefill(on_logits)
        first.block_until_ready()
        prefill_end = time.perf_counter()
        for token in session.decode(first):
            token_ids.append(token)
            if token == eos:
                finish_reason = "stop"
                break
            if detokenizer:
                emit(detokenizer.push(token))
    except KeyboardInterrupt:
        finish_reason = "interrupted"
    end = time.perf_counter()
    if detokenizer:
        emit(detokenizer.flush())
    return Generation(
        token_ids=tuple(token_ids),
        text="".join(pieces) if detokenizer else None,
        finish_reason=finish_reason,
        usage={
            "prompt_tokens": len(ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(ids) + len(token_ids),
        },
        timings={
            "load_s": lm.load_seconds,
            "compile_s": session.compile_seconds,
            "prefill_s": prefill_end - start,
            "prefill_tokens_per_s": _rate(len(ids), prefill_end - start),
            "decode_s": end - prefill_end,
            "decode_tokens_per_s": _rate(len(token_ids) - 1, end - prefill_end),
            "peak_memory_bytes": peak_memory_bytes(),
        },
    )


def _rate(count: int, seconds: float) -> float:
    """Per second; 0 when nothing was counted."""
    return count / seconds if count > 0 and seconds > 0 else 0.0


@functools.partial(jax.jit, static_argnames=("model", "all_logits"), donate_argnames=("state",))
def _prefill_step(params, tokens, state, batch, *, model: K3ForCausalLM, all_logits: bool):
    """One chunk of the prompt: ([1] greedy next token, logits of all rows or None, state)."""
    rows = jnp.arange(tokens.shape[0]) if all_logits else None
    out = model.apply({"params": params}, tokens, state, batch, rows)
    greedy = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    if all_logits:
        return greedy[batch.last_rows()], out.logits, out.state
    return greedy, None, out.state


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def _decode_step(params, tokens, state, batch, *, model: K3ForCausalLM):
    """One token: ([1] greedy next token, state, the batch moved on by a token)."""
    out = model.apply({"params": params}, tokens, state, batch)
    batch = batch.replace(context_lens=batch.context_lens + 1)
    return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.state, batch


class _Session:
    """Compiled steps and the state of one prompt, in slot 1 and pages 1, 2, ..."""

    def __init__(self, lm: LanguageModel, ids: list[int], max_new_tokens: int, chunk: int, all_logits: bool):
        self.lm, self.ids, self.max_new_tokens = lm, ids, max_new_tokens
        pages = _rounded_up(-(-(len(ids) + max_new_tokens) // PAGE_SIZE))
        self.page_table = np.arange(1, pages + 1, dtype=np.int32)[None]
        create = functools.partial(
            DecodeState.create, lm.config, num_slots=2, num_pages=pages + 1, dtype=lm.dtype
        )
        check_fits(required_bytes(jax.eval_shape(create)), f"the decode state of {pages * PAGE_SIZE} tokens")
        self.state = create()
        start = time.perf_counter()
        self.chunks = list(_chunks(len(ids), chunk))
        self.prefill_steps = {}
        for _, _, rows in self.chunks:
            if rows not in self.prefill_steps:
                self.prefill_steps[rows] = _prefill_step.lower(
                    lm.params, *self._prefill_inputs(0, 1, rows), model=lm.model, all_logits=all_logits
                ).compile()
                _check_temporaries(self.prefill_steps[rows], f"a prefill step of {rows} tokens")
        self.decode_step = None
        if max_new_tokens > 1:
            self.decode_step = _decode_step.lower(
                lm.params, jax.ShapeDtypeStruct((1,), jnp.int32), self.state, self._decode_batch(), model=lm.model
            ).compile()
            _check_temporaries(self.decode_step, "a decode step")
        self.compile_seconds = time.perf_counter() - start

    def _prefill_inputs(self, first: int, count: int, rows: int):
        """(tokens, state, batch) of prompt tokens first .. first + count - 1, padded to `rows`."""
        tokens = np.zeros(rows, np.int32)
        tokens[:count] = self.ids[first : first + count]
        batch = PrefillBatch(
            cu_seqlens=np.array([0, count], np.int32),
            slots=np.array([1], np.int32),
            context_lens=np.array([first], np.int32),
            page_table=self.page_table,
            snapshot_positions=np.zeros(0, np.int32),
        )
        return tokens, self.state, batch

    def _decode_batch(self) -> DecodeBatch:
        return DecodeBatch(
            slots=np.array([1], np.int32),
            context_lens=np.array([len(self.ids)], np.int32),
            page_table=self.page_table,
        )

    def prefill(self, on_logits: Callable[[int, np.ndarray], None] | None) -> jax.Array:
        """Runs the prompt; returns the first new token, [1] int32 on the device."""
        for first, count, rows in self.chunks:
            token, logits, self.state = self.prefill_steps[rows](
                self.lm.params, *self._prefill_inputs(first, count, rows)
            )
            if on_logits:
                on_logits(first, np.asarray(logits[:count]))
        return token

    def decode(self, token: jax.Array) -> Iterator[int]:
        """Yields new tokens; the device works ahead, so a token is read while the next is computed."""
        batch, waiting = jax.device_put(self._decode_batch()), collections.deque([token])
        for _ in range(self.max_new_tokens - 1):
            token, self.state, batch = self.decode_step(self.lm.params, token, self.state, batch)
            waiting.append(token)
            if len(waiting) > STEPS_IN_FLIGHT:
                yield int(waiting.popleft()[0])
        while waiting:
            yield int(waiting.popleft()[0])


def _check_temporaries(step: jax.stages.Compiled, what: str) -> None:
    """Refuses a step whose intermediates cannot fit beside weights and state."""
    analysis = step.memory_analysis()
    if analysis is not None:
        check_fits(analysis.temp_size_in_bytes, f"the intermediate results of {what}")


def _rounded_up(pages: int) -> int:
    """At most a quarter more, so that requests of similar length share compiled steps."""
    grain = max(1, 1 << (pages.bit_length() - 3)) if pages > 4 else 1
    return -(-pages // grain) * grain


def _chunks(length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(first token, tokens, rows of the step) of each chunk; the last is padded to a power of two."""
    for first in range(0, length, chunk):
        count = min(chunk, length - first)
        rows = min(chunk, max(SMALLEST_CHUNK, 1 << (count - 1).bit_length()))
        yield first, count, rows
