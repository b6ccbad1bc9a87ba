"""Text to token ids and back."""

from k3jax.tokenizer.detokenizer import IncrementalDetokenizer
from k3jax.tokenizer.family import check_tokenizer
from k3jax.tokenizer.tokenizer import NUM_SPECIAL_TOKENS, ByteTokenizer, TiktokenTokenizer, Tokenizer

__all__ = [
    "NUM_SPECIAL_TOKENS", "ByteTokenizer", "IncrementalDetokenizer", "TiktokenTokenizer", "Tokenizer", "check_tokenizer"
]
