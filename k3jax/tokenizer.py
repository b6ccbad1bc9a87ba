"""Text to token ids and back."""

import abc
import base64
import binascii
import codecs
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import tiktoken

from k3jax.errors import UserError

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


class IncrementalDetokenizer:
    """Turns tokens into text as they come, never emitting half a character.

    The bytes of an incomplete character (at most three) are held back while they can still become valid; bytes that
    cannot become valid turn into U+FFFD at once. Special tokens give no text of their own and end what was held back.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known; often empty inside a multi-byte character."""
        if self._tokenizer.is_special(token_id):
            return self.flush()
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        held, _ = self._decoder.getstate()
        # Python also waits for the last byte of a surrogate, which UTF-8 forbids.
        return text + self.flush() if held[:1] == b"\xed" and held[1:] >= b"\xa0" else text

    def flush(self) -> str:
        """The bytes held back, as U+FFFD; call it after the last token."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(abc.ABC):
    """What generation needs of a vocabulary.

    Attributes:
      vocab_size: number of ids, special ones included.
    """

    vocab_size: int

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: what looks like a special token stays text, and none is added at either end."""

    @abc.abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether the id is a marker rather than text."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; of a special token, those of its name.

        Raises:
          UserError: there is no such id.
        """

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all tokens, special ones by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh converter for one stream of tokens."""
        return IncrementalDetokenizer(self)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise UserError(f"token id {token_id} is outside the vocabulary, 0..{self.vocab_size - 1}")


class ByteTokenizer(Tokenizer):
    """One token a byte, and special tokens after them: the vocabulary of the demo model."""

    def __init__(self, vocab_size: int = 256 + NUM_SPECIAL_TOKENS):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def token_bytes(self, token_id: int) -> bytes:
        self._check_id(token_id)
        return bytes([token_id]) if token_id < 256 else _reserved_name(token_id).encode()


class TiktokenTokenizer(Tokenizer):
    """Byte-pair vocabulary of a checkpoint that ships `tiktoken.model`.

    Args:
      ranks: bytes of each base token -> its id, 0 and up without a hole.
      special_names: id -> name, for the named ones of the special slots behind the base tokens.
    """

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str]):
        self.num_base_tokens = len(ranks)
        self.vocab_size = self.num_base_tokens + NUM_SPECIAL_TOKENS
        slots = range(self.num_base_tokens, self.vocab_size)
        self.special_tokens = {special_names.get(slot) or _reserved_name(slot): slot for slot in slots}
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
        ranks = _parse_ranks(directory / "tiktoken.model")
        return cls(ranks, _parse_special_names(directory / "tokenizer_config.json", first=len(ranks)))

    def encode(self, text: str) -> list[int]:
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.num_base_tokens

    def token_bytes(self, token_id: int) -> bytes:
        self._check_id(token_id)
        return self._encoding.decode_single_token_bytes(token_id)


def _reserved_name(token_id: int) -> str:
    return f"<|reserved_token_{token_id}|>"


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


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; a tokenizer needs this file") from error


def _parse_ranks(path: pathlib.Path) -> dict[bytes, int]:
    """Base tokens: a line for each, `base64(bytes) rank`."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if not token or token in ranks or int(rank) != number - 1:
                raise ValueError
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path} line {number} is {line[:40]!r}, expected the base64 of a new token and its rank {number - 1}"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path} has no token for byte {missing[0]:#04x}; all 256 single bytes must be there")
    return ranks


def _parse_special_names(path: pathlib.Path, first: int) -> dict[int, str]:
    """Names in `added_tokens_decoder`, which must lie in the special slots from `first` on."""
    data = _read(path)
    try:
        entries = json.loads(data)["added_tokens_decoder"]
        names = {int(token_id): entry["content"] for token_id, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} has no readable added_tokens_decoder; expected {{id: {{content: name}}}}") from None
    slots = range(first, first + NUM_SPECIAL_TOKENS)
    owner: dict[str, int] = {}
    for token_id, name in names.items():
        if token_id not in slots:
            raise UserError(f"{path} names special token {token_id}, outside the slots {first}..{slots[-1]}")
        if not isinstance(name, str) or not name or owner.setdefault(name, token_id) != token_id:
            raise UserError(f"{path} calls special token {token_id} {name!r}; each needs a name of its own")
    return names
