"""The compiled steps and the state of one prompt: chunked prefill, then a token a step with two steps in flight."""

import collections
import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.errors import UserError
from k3jax.language_model import LanguageModel
from k3jax.memory import check_fits, required_bytes
from k3jax.model import K3ForCausalLM
from k3jax.progress import human_tokens, reporting, waiting
from k3jax.sampling import SamplingParams
from k3jax.sampling.sampler import Sample, SamplingBatch, mark_generated, sample, seen_in_prompt
from k3jax.state import PAGE_SIZE, DecodeBatch, DecodeState, PrefillBatch, pool_dtype
from sharding import Layout

SMALLEST_CHUNK = 64
STEPS_IN_FLIGHT = 2


def _prefill_step(params, tokens, state, batch, settings, seen, *, model: K3ForCausalLM, num_logprobs: int | None,
                  all_logits: bool):
    """One chunk of the prompt: (the `Sample` after it, logits of all rows or None, state)."""
    rows = jnp.arange(tokens.shape[0]) if all_logits else None
    out = model.apply({"params": params}, tokens, state, batch, rows)
    logits = out.logits[batch.last_rows()] if all_logits else out.logits
    positions = batch.context_lens + jnp.diff(batch.cu_seqlens)
    chosen = sample(logits, settings, seen, positions, num_logprobs=num_logprobs)
    return chosen, out.logits if all_logits else None, out.state


def _decode_step(params, tokens, state, batch, settings, seen, *, model: K3ForCausalLM, num_logprobs: int | None):
    """One token: (the next `Sample`, state, the batch moved on by a token, `seen` with the token that came in)."""
    out = model.apply({"params": params}, tokens, state, batch)
    batch = batch.replace(context_lens=batch.context_lens + 1)
    seen = mark_generated(seen, tokens)
    chosen = sample(out.logits, settings, seen, batch.context_lens, num_logprobs=num_logprobs)
    return chosen, out.state, batch, seen


@functools.cache
def _jitted_steps(layout: Layout, pools: DecodeState | None):
    """The prefill and the decode step; on a mesh the state stays as `pools` says, and everybody has the rest."""
    prefill = {"static_argnames": ("model", "num_logprobs", "all_logits"), "donate_argnames": ("state",)}
    decode = {"static_argnames": ("model", "num_logprobs"), "donate_argnames": ("state", "seen")}
    if layout.mesh is not None:
        everywhere = layout.sharding(())
        prefill["out_shardings"] = (everywhere, everywhere, pools)
        decode["out_shardings"] = (everywhere, pools, everywhere, everywhere)
    return jax.jit(_prefill_step, **prefill), jax.jit(_decode_step, **decode)


class Session:
    """Generation for one prompt, in slot 1 and pages 1, 2, ...

    Args:
      lm: the model.
      ids: tokens of the prompt.
      sampling: how tokens are chosen.
      seed: of the draws.
      max_new_tokens: most tokens to generate.
      chunk: most prompt tokens in one step.
      all_logits: keep those of every prompt position for `prefill`'s `on_logits`.
      progress: report on standard error.

    Attributes:
      compile_seconds: time that compiling took.

    Raises:
      UserError: there is not enough memory, or the mesh splits sequences, of which there is one.
    """

    def __init__(self, lm: LanguageModel, ids: list[int], sampling: SamplingParams, seed: int, *, max_new_tokens: int,
                 chunk: int, all_logits: bool, progress: bool):
        self._lm, self._ids, self._max_new_tokens, self._progress = lm, ids, max_new_tokens, progress
        pages = _rounded_up(-(-(len(ids) + max_new_tokens) // PAGE_SIZE))
        self._page_table = np.arange(1, pages + 1, dtype=np.int32)[None]
        if blocks := lm.layout.over("sequences"):
            raise UserError(
                f"the mesh splits sequences over {' and '.join(blocks)}, but generation has one; use seq and tensor"
            )
        pools = {"num_slots": 2, "num_pages": pages + 1, "dtype": pool_dtype(lm.dtype), "layout": lm.layout}
        devices = None if lm.layout.mesh is None else lm.layout.mesh.devices.flat
        check_fits(
            required_bytes(DecodeState.abstract(lm.config, **pools)) * lm.layout.num_devices,
            f"the decode state of {pages * PAGE_SIZE} tokens", devices,
        )
        self._state = DecodeState.create(lm.config, **pools)
        self._settings, self._seen = jax.device_put(
            (SamplingBatch.pack([sampling], [seed]), seen_in_prompt(ids, lm.config.vocab_size)[None]),
            lm.layout.sharding(()),
        )
        self._chunks = list(_chunks(len(ids), chunk))
        start = time.perf_counter()
        with waiting(progress, "compiling"):
            self._compile(sampling.logprobs, all_logits)
        self.compile_seconds = time.perf_counter() - start

    def _compile(self, num_logprobs: int | None, all_logits: bool) -> None:
        static = {"model": self._lm.model, "num_logprobs": num_logprobs}
        layout = self._lm.layout
        formats = None if layout.mesh is None else jax.tree.map(lambda pool: pool.format, self._state)
        prefill_step, decode_step = _jitted_steps(layout, formats)
        self._prefill_steps = {}
        for rows in {rows for _, _, rows in self._chunks}:
            step = prefill_step.lower(*self._prefill_inputs(0, 1, rows), **static, all_logits=all_logits).compile()
            _check_temporaries(step, f"a prefill step of {rows} tokens")
            self._prefill_steps[rows] = step
        self._decode_step = None
        if self._max_new_tokens > 1:
            token = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=layout.sharding(()))
            self._decode_step = decode_step.lower(
                self._lm.params, token, self._state, self._decode_batch(), self._settings, self._seen, **static
            ).compile()
            _check_temporaries(self._decode_step, "a decode step")

    def _prefill_inputs(self, first: int, count: int, rows: int):
        """Arguments for prompt tokens first .. first + count - 1, padded to `rows`."""
        tokens = np.zeros(rows, np.int32)
        tokens[:count] = self._ids[first : first + count]
        batch = PrefillBatch(
            cu_seqlens=np.array([0, count], np.int32),
            slots=np.array([1], np.int32),
            context_lens=np.array([first], np.int32),
            page_table=self._page_table,
            snapshot_positions=np.zeros(0, np.int32),
        )
        return self._lm.params, tokens, self._state, batch, self._settings, self._seen

    def _decode_batch(self) -> DecodeBatch:
        return DecodeBatch(
            slots=np.array([1], np.int32),
            context_lens=np.array([len(self._ids)], np.int32),
            page_table=self._page_table,
        )

    def prefill(self, on_logits: Callable[[int, np.ndarray], None] | None) -> Sample:
        """Runs the prompt and waits for it; returns what it gives as the first new token, on the device."""
        with reporting(self._progress, len(self._ids), "reading the prompt", human_tokens) as advance:
            chosen, read = None, 0
            for first, count, rows in self._chunks:
                before = chosen
                chosen, logits, self._state = self._prefill_steps[rows](*self._prefill_inputs(first, count, rows))
                if on_logits:
                    on_logits(first, np.asarray(logits[:count]))
                if before is not None:  # waited for while the device has the next chunk
                    before.token_ids.block_until_ready()
                    advance(first - read)
                    read = first
            chosen.token_ids.block_until_ready()
            advance(len(self._ids) - read)
        return chosen

    def decode(self, chosen: Sample) -> Iterator[Sample]:
        """Yields new tokens, in NumPy, from the first on; the device works ahead while they are read."""
        batch = jax.device_put(self._decode_batch(), self._lm.layout.sharding(()))
        waiting_samples = collections.deque([chosen])
        for _ in range(self._max_new_tokens - 1):
            chosen, self._state, batch, self._seen = self._decode_step(
                self._lm.params, chosen.token_ids, self._state, batch, self._settings, self._seen
            )
            waiting_samples.append(chosen)
            if len(waiting_samples) > STEPS_IN_FLIGHT:
                yield jax.device_get(waiting_samples.popleft())
        while waiting_samples:
            yield jax.device_get(waiting_samples.popleft())


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
