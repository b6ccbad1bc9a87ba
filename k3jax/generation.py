"""Generation for one prompt."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from k3jax.errors import UserError
from k3jax.language_model import LanguageModel
from k3jax.memory import peak_memory_bytes
from k3jax.prompt import check_sampling, prompt_ids
from k3jax.sampling import SamplingParams, fresh_seed
from k3jax.sampling.sampler import Sample
from k3jax.session import Session
from k3jax.text_stream import TextStream


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one new token under the model itself: no penalty, temperature or filter applied.

    Attributes:
      logprob: of the token.
      top: (id, log-probability) of the most likely tokens, as many as were asked for, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
      token_ids: the new tokens, a stop token and those of a stop string included.
      text: their text, up to a stop string; None without a tokenizer.
      logprobs: one for each new token; None unless asked for.
      finish_reason: "stop" (stop token or string), "length" (`max_new_tokens`), or "interrupted" (Ctrl-C).
      stop_reason: the stop token or string; None for another finish.
      seed: that gives the same tokens again; None when nothing was drawn.
      usage: `prompt_tokens`, `completion_tokens`, `total_tokens`.
      timings: `load_s`, `compile_s`, `prefill_s`, `prefill_tokens_per_s`, `decode_s`, `decode_tokens_per_s` (of the
        tokens after the first), `peak_memory_bytes`.
    """

    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int | None
    usage: dict[str, int]
    timings: dict[str, float]


def generate(lm: LanguageModel, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *,
             max_new_tokens: int = 128, ignore_eos: bool = False, chunk: int = 512,
             on_text: Callable[[str], None] | None = None,
             on_logits: Callable[[int, np.ndarray], None] | None = None, progress: bool = False) -> Generation:
    """Continues a prompt.

    Args:
      lm: from `k3jax.load`.
      prompt: text, or token ids.
      sampling: how tokens are chosen and where to stop; None = as the checkpoint recommends, `lm.defaults.sampling`.
      max_new_tokens: most tokens to generate.
      ignore_eos: go on after the model's own stop tokens.
      chunk: most prompt tokens in one step.
      on_text: called with each piece of finished text as it comes.
      on_logits: called with (position of the first row, [rows, vocabulary] float32) for each chunk of the prompt.
      progress: show what takes long on stderr.

    Raises:
      UserError: an empty prompt, ids outside the vocabulary, limits below 1, more tokens than the model's context, text
        or stop strings without a tokenizer, not enough memory, or a model that gives no numbers.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
        if value < 1:
            raise UserError(f"{name} is {value}, expected at least 1")
    sampling = lm.defaults.sampling if sampling is None else sampling
    check_sampling(lm.description, sampling)
    ids = prompt_ids(lm.description, prompt, max_new_tokens)
    seed = fresh_seed() if sampling.seed is None else sampling.seed
    session = Session(
        lm, ids, sampling, seed, max_new_tokens=max_new_tokens, chunk=chunk, all_logits=on_logits is not None,
        progress=progress,
    )
    stop_token_ids = {*sampling.stop_token_ids, *(() if ignore_eos else lm.defaults.stop_token_ids)}
    text = TextStream(lm.tokenizer, sampling.stop) if lm.tokenizer else None
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if on_text and piece:
            on_text(piece)

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason, stop_reason = "length", None
    prefill_end = start = time.perf_counter()
    try:
        first = session.prefill(on_logits)
        prefill_end = time.perf_counter()
        for chosen in session.decode(first):
            token = int(chosen.token_ids[0])
            if token < 0:
                raise UserError(
                    f"the model gave no numbers for new token {len(token_ids) + 1}: its weights are damaged, or its "
                    "values are too large for the dtype"
                )
            token_ids.append(token)
            if sampling.logprobs is not None:
                logprobs.append(_token_logprobs(chosen))
            if token in stop_token_ids:
                finish_reason, stop_reason = "stop", token
                break
            if text:
                show(text.push(token))
                if text.stop is not None:
                    break
    except KeyboardInterrupt:
        finish_reason = "interrupted"
    end = time.perf_counter()
    if text:
        show(text.finish())
        if text.stop is not None and finish_reason == "length":
            finish_reason, stop_reason = "stop", text.stop
    return Generation(
        token_ids=tuple(token_ids),
        text="".join(shown) if text else None,
        logprobs=None if sampling.logprobs is None else tuple(logprobs),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        seed=None if sampling.greedy else seed,
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


def _token_logprobs(chosen: Sample) -> TokenLogprobs:
    top = zip(chosen.top_ids[0].tolist(), chosen.top_logprobs[0].tolist())
    return TokenLogprobs(float(chosen.logprobs[0]), tuple(top))


def _rate(count: int, seconds: float) -> float:
    """Per second; 0 when nothing was counted."""
    return count / seconds if count > 0 and seconds > 0 else 0.0
