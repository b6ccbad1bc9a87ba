"""Chooses experts for tokens (Kimi K3 technical report, eq. 13)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import bind_shapes


class Routing(NamedTuple):
    """Chosen experts, by decreasing selection value.

    Attributes:
      ids: [T, k] int32.
      weights: [T, k] float32.
      scores: [T, E] float32, the unbiased sigmoid scores.
    """

    ids: jax.Array
    weights: jax.Array
    scores: jax.Array


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    """Sigmoid scores, a choice by biased score, weights from the unbiased ones.

    All in true float32: bfloat16 logits change one choice in twenty. Equal values go to the lowest expert index.

    Args:
      x: [T, D] normed hidden state of full width, any float dtype.
      weight: [E, D] router weight, any float dtype.
      bias: [E] float32 correction, read for the choice only.
      top_k: experts for each token.
      renormalize: whether the weights of a token are divided by their sum; has no effect on a single expert.
      scaling_factor: multiplies the weights last.
      num_groups: groups of consecutive experts; with more than `topk_groups` of them only the groups with the largest
        sum of their two best values take part.
      topk_groups: groups that take part.

    Raises:
      ValueError: shapes disagree or the numbers do not fit each other.
    """
    num_experts = bind_shapes("route", x=(x, "T D"), weight=(weight, "E D"), bias=(bias, "E"))["E"]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"route: top_k is {top_k}, expected 1 .. {num_experts}, the number of experts")

    logits = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    choice = scores + bias.astype(jnp.float32)
    if num_groups > topk_groups:
        choice = _keep_best_groups(choice, num_groups, topk_groups, top_k)
    ids = jax.lax.top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * scaling_factor, scores)


def _keep_best_groups(choice: jax.Array, num_groups: int, topk_groups: int, top_k: int) -> jax.Array:
    """Sets the values outside the best groups to -inf."""
    num_tokens, num_experts = choice.shape
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2:
        raise ValueError(f"route: num_groups is {num_groups}, expected equal groups of >= 2 of {num_experts} experts")
    if topk_groups * size < top_k:
        raise ValueError(f"route: topk_groups is {topk_groups}: {topk_groups * size} experts cannot fill top_k {top_k}")
    grouped = choice.reshape(num_tokens, num_groups, size)
    group_value = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    best = jax.lax.top_k(group_value, topk_groups)[1]
    kept = jnp.any(jnp.arange(num_groups) == best[..., None], axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
