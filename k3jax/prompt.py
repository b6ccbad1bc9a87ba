"""Checks a prompt against a model, weights or not."""

from collections.abc import Sequence

from k3jax.catalog import Description
from k3jax.errors import UserError


def prompt_ids(description: Description, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
    """Token ids of a prompt, checked against the model.

    Args:
      description: the model.
      prompt: text, or a sequence of token ids.
      max_new_tokens: how many will follow.

    Raises:
      UserError: an empty prompt, text without a tokenizer, ids outside the vocabulary, or more tokens than the context.
    """
    config, tokenizer, _ = description
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files (tiktoken.model); give the prompt as token ids")
        prompt = tokenizer.encode(prompt)
    ids = list(prompt)
    if not ids:
        raise UserError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise UserError(f"token id {token} is outside the vocabulary, 0..{config.vocab_size - 1}")
    total, limit = len(ids) + max_new_tokens, config.max_position_embeddings
    if total > limit:
        raise UserError(
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones are {total}, beyond the context of {limit}; "
            "shorten the prompt or ask for fewer new tokens"
        )
    return ids
