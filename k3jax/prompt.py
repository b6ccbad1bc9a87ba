"""Checks a request against a model, weights or not."""

from collections.abc import Sequence

from k3jax.catalog import Description
from k3jax.errors import UserError
from k3jax.sampling import SamplingParams


def prompt_ids(description: Description, prompt: str | Sequence[int], max_new_tokens: int,
               markup: bool = False) -> list[int]:
    """Token ids of a prompt, checked against the model.

    Args:
      description: the model.
      prompt: text, or a sequence of token ids.
      max_new_tokens: how many will follow.
      markup: names of special tokens in text stand for these tokens.

    Raises:
      UserError: an empty prompt, text without a tokenizer, ids outside the vocabulary, or more tokens than the context.
    """
    config, tokenizer = description.config, description.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("this checkpoint has no tokenizer files (tiktoken.model); give the prompt as token ids")
        prompt = tokenizer.encode(prompt, markup)
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


def check_sampling(description: Description, sampling: SamplingParams) -> None:
    """Refuses settings that this model cannot follow.

    Raises:
      UserError: stop strings without a tokenizer, or stop tokens outside the vocabulary.
    """
    vocab_size = description.config.vocab_size
    if sampling.stop and description.tokenizer is None:
        raise UserError("this checkpoint has no tokenizer files (tiktoken.model); stop at token ids, not at strings")
    for token in sampling.stop_token_ids:
        if token >= vocab_size:
            raise UserError(f"stop token id {token} is outside the vocabulary, 0..{vocab_size - 1}")
