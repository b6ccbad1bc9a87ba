"""How the next token is chosen: the settings of one request."""

import dataclasses
import numbers
import secrets
from collections.abc import Iterable
from typing import Any

from k3jax.errors import UserError

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request; what applies, applies in this order (Hugging Face's).

    Temperature 1.0 and top-p 0.95 are what the Kimi K3 report recommends for reasoning; for code and agents it takes
    top-p 1.0.

    Attributes:
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that are in the prompt or
        have been generated; 1 = off, 0.01 to 100.
      presence_penalty: is subtracted from the logits of tokens that have been generated; 0 = off, -2 to 2.
      temperature: divides the logits; 0 = greedy: the most likely token, of equal ones the lowest id, and no filters.
      top_k: keeps the k most likely tokens, and what is as likely as the last of them; 0 = off.
      top_p: keeps the most likely of the tokens left that together have at least this probability among them, and
        what is as likely as the last of them; 1 = off, above 0.
      min_p: keeps tokens at least this fraction as likely as the most likely one; 0 = off, at most 1.
      seed: of the draws, 0 to 2**63 - 1; None = a fresh one each time. The same seed, prompt and settings give the
        same tokens, whatever else is computed beside them, as far as the logits are the same.
      stop: texts that end the generation where one is complete; none of it is shown. Markers are not text.
      stop_token_ids: tokens that end the generation, beside the model's own.
      logprobs: None = off; 0 = the log-probability of each new token; n = also the n most likely ones, at most 20.
        They are those of the model itself: no penalty, temperature or filter applied.

    Raises:
      UserError: a value is outside its range or of another type.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self):
        self._check("temperature", _is_number(self.temperature, 0, _MAX_FLOAT32), "a number of at least 0 (0 = greedy)")
        self._check("top_k", _is_whole(self.top_k, 0, MAX_TOP_K), f"a whole number from 0 (off) to {MAX_TOP_K}")
        self._check("top_p", _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and at most 1 (off)")
        self._check("min_p", _is_number(self.min_p, 0, 1), "a number from 0 (off) to 1")
        self._check(
            "repetition_penalty", _is_number(self.repetition_penalty, 0.01, 100), "a number from 0.01 to 100 (1 = off)"
        )
        self._check("presence_penalty", _is_number(self.presence_penalty, -2, 2), "a number from -2 to 2 (0 = off)")
        self._check(
            "seed", self.seed is None or _is_whole(self.seed, 0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}"
        )
        self._check(
            "logprobs", self.logprobs is None or _is_whole(self.logprobs, 0, MAX_LOGPROBS),
            f"a whole number from 0 to {MAX_LOGPROBS}",
        )
        self._become_tuple("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self._check("stop", all(map(_is_text, self.stop)), "texts of at least one character, in valid Unicode")
        self._become_tuple("stop_token_ids", self.stop_token_ids)
        self._check(
            "stop_token_ids", all(_is_whole(token, 0, MAX_TOP_K) for token in self.stop_token_ids),
            "token ids, whole numbers of at least 0",
        )

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"{field} is {getattr(self, field)!r}, expected {expected}")

    def _become_tuple(self, field: str, values: Iterable) -> None:
        self._check(field, isinstance(values, Iterable), "a list")
        object.__setattr__(self, field, tuple(values))

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def fresh_seed() -> int:
    """A seed that nobody can guess, and that every reader of JSON keeps exactly."""
    return secrets.randbelow(2**53)


def _is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is a number in range, which NaN is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(least <= value <= most)


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, numbers.Integral) and _is_number(value, least, most)


def _is_text(value: Any) -> bool:
    """Whether it is a string that can occur in text: one with half a surrogate pair cannot."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= character <= "\udfff" for character in value)
