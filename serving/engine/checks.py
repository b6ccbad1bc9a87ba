"""Refuses requests that could never run."""

import numpy as np

from k3jax.errors import UserError
from serving.engine.request import Request


def prompt_tokens(request: Request, *, vocab_size: int, context: int, num_logprobs: int) -> np.ndarray:
    """[n] int32 tokens of a request that was checked.

    Args:
      request: what was asked for.
      vocab_size: of the model.
      context: most tokens, new ones included.
      num_logprobs: most of the most likely tokens.

    Raises:
      UserError: says which value is wrong.
    """
    tokens = np.asarray(request.token_ids)
    if tokens.ndim != 1 or not tokens.size:
        raise UserError("the prompt is empty; give at least one token")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"token_ids are {tokens.dtype}, expected whole numbers")
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        raise UserError(f"token id {tokens[wrong.argmax()]} is outside the vocabulary, 0..{vocab_size - 1}")
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {request.max_new_tokens}, expected at least 1")
    total = tokens.size + request.max_new_tokens
    if total > context:
        raise UserError(
            f"{tokens.size} prompt tokens and {request.max_new_tokens} new ones are {total}, beyond the context of "
            f"{context}; shorten the prompt or ask for fewer new tokens"
        )
    for token in request.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"stop token id {token} is outside the vocabulary, 0..{vocab_size - 1}")
    for position in request.breakpoints:
        if not 0 <= position <= tokens.size:
            raise UserError(f"breakpoint {position} does not lie in the prompt of {tokens.size} tokens")
    logprobs = request.sampling.logprobs
    if logprobs is not None and logprobs > num_logprobs:
        raise UserError(f"logprobs is {logprobs}, and this engine was started with num_logprobs {num_logprobs}")
    return tokens.astype(np.int32)
