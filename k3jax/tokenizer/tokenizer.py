"""Text to token ids and back."""

import abc
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import tiktoken

from k3jax.errors import UserError
from k3jax.tokenizer.detokenizer import IncrementalDetokenizer
from k3jax.tokenizer.family import FAMILIES, family_of
from k3jax.tokenizer.files import read_ranks, read_special_names, reserved_name

NUM_SPECIAL_TOKENS = 256
"""Special slots after the base vocabulary, named or not."""

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Splits text before byte-pair merging, in the order tried: runs of Han, words, digits by three, marks, white space."""

# The models' own tokenizer cuts very long input like this; other cuts would give other ids and miss a prefix cache.
_SLICE_CHARACTERS = 400_000
_RUN_CHARACTERS = 25_000


class Tokenizer(abc.ABC):
    """Base tokens, which stand for bytes, and special ones in `NUM_SPECIAL_TOKENS` slots behind them.

    Attributes:
      num_base_tokens: ids below are text.
      vocab_size: number of ids, special ones included.
      special_tokens: name -> id of every special slot.
      family: whose chat format the names belong to, "kimi-k3" or "kimi-k2" (also Kimi-Linear); None for neither's.
    """

    def __init__(self, num_base_tokens: int, special_names: Mapping[int, str]):
        self.num_base_tokens = num_base_tokens
        self.vocab_size = num_base_tokens + NUM_SPECIAL_TOKENS
        slots = range(num_base_tokens, self.vocab_size)
        self.special_tokens = {special_names.get(slot) or reserved_name(slot): slot for slot in slots}
        self.family = family_of(self.special_tokens, num_base_tokens)

    def encode(self, text: str, markup: bool = False) -> list[int]:
        """Token ids of a text; nothing is added at either end.

        Args:
          text: any string. Halves of surrogate pairs become their character, or U+FFFD when alone.
          markup: names of special tokens stand for these tokens. Without it they are text like any other, so that
            nobody can write a marker into a prompt.
        """
        text = _well_formed(text)
        if not markup:
            return self._encode_plain(text)
        # Names first, so that no cut of a long text breaks one; the pieces between them are texts of their own.
        pieces = self._special_pattern.split(text)
        return [
            token
            for number, piece in enumerate(pieces)
            for token in ([self.special_tokens[piece]] if number % 2 else self._encode_plain(piece))
        ]

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a marker rather than text."""
        return token_id >= self.num_base_tokens

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; of a special token, those of its name.

        Raises:
          UserError: there is no such id.
        """
        if not 0 <= token_id < self.vocab_size:
            raise UserError(f"token id {token_id} is outside the vocabulary, 0..{self.vocab_size - 1}")
        return self._special_bytes[token_id] if self.is_special(token_id) else self._base_bytes(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all tokens, special ones by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh converter for one stream of tokens."""
        return IncrementalDetokenizer(self)

    @abc.abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of a text without surrogates, base tokens only."""

    @abc.abstractmethod
    def _base_bytes(self, token_id: int) -> bytes:
        """The bytes of a base token."""

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern:
        """Matches a special token's name; where one name begins another, the longer."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})")

    @functools.cached_property
    def _special_bytes(self) -> dict[int, bytes]:
        return {token_id: name.encode() for name, token_id in self.special_tokens.items()}


class ByteTokenizer(Tokenizer):
    """One token a byte, and Kimi K3's markers: the vocabulary of the demo model."""

    def __init__(self):
        super().__init__(256, {256 + offset: name for name, offset in FAMILIES["kimi-k3"].items()})

    def _encode_plain(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _base_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class TiktokenTokenizer(Tokenizer):
    """Byte-pair vocabulary of a checkpoint that ships `tiktoken.model`.

    Args:
      ranks: bytes of each base token -> its id, 0 and up without a hole.
      special_names: id -> name, for the named ones of the special slots behind the base tokens.
    """

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str]):
        super().__init__(len(ranks), special_names)
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.special_tokens
        )

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> "TiktokenTokenizer":
        """Reads `tiktoken.model` and `tokenizer_config.json` of a checkpoint directory.

        Raises:
          UserError: a file is missing or not what its name says.
        """
        directory = pathlib.Path(directory)
        ranks = read_ranks(directory / "tiktoken.model")
        slots = range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS)
        return cls(ranks, read_special_names(directory / "tokenizer_config.json", slots))

    def _encode_plain(self, text: str) -> list[int]:
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _base_bytes(self, token_id: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token_id)


def _well_formed(text: str) -> str:
    """The text as UTF-8 can say it: JSON escapes may leave surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> Iterator[str]:
    """Cuts text into slices, and each slice inside its overlong runs of space or of non-space characters."""
    for start in range(0, len(text), _SLICE_CHARACTERS):
        part = text[start : start + _SLICE_CHARACTERS]
        cuts = [0, len(part)]
        if len(part) > _RUN_CHARACTERS:
            for run in re.finditer(r"\s+|\S+", part):
                cuts[-1:-1] = range(run.start() + _RUN_CHARACTERS, run.end(), _RUN_CHARACTERS)
        for begin, end in zip(cuts, cuts[1:]):
            yield part[begin:end]
