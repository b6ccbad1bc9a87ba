"""Random MLA batches on shuffled pages, and the float64 definition of their result."""

from typing import NamedTuple

import numpy as np

LAYERS, NUM_PAGES, PAGE, MAX_PAGES = 2, 24, 8, 6
HEADS, NOPE, ROPE, VALUE, RANK = 2, 8, 4, 6, 16
LAYER = 1


class Batch(NamedTuple):
    """Arguments of `mla_prefill`, as numpy arrays."""

    q: np.ndarray
    latent: np.ndarray
    kv_b_proj: np.ndarray
    pages: np.ndarray
    layer: np.ndarray
    page_table: np.ndarray
    context_lens: np.ndarray
    cu_seqlens: np.ndarray


def make_batch(seed: int, contexts: list[int], lengths: list[int], padding: int = 0, page_size: int = PAGE) -> Batch:
    """Random sequences on shuffled pages; every position that no sequence has written holds NaN."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(lengths) + padding
    free = rng.permutation(np.arange(1, NUM_PAGES))
    pages = np.full((LAYERS, NUM_PAGES, page_size, RANK + ROPE), np.nan, np.float32)
    page_table = np.zeros((len(lengths), MAX_PAGES), np.int32)
    for n, (context, length) in enumerate(zip(contexts, lengths)):
        needed = -(-(context + length) // page_size)
        page_table[n, :needed], free = free[:needed], free[needed:]
        for position in range(context):
            row = rng.normal(size=(LAYERS, RANK + ROPE))
            pages[:, page_table[n, position // page_size], position % page_size] = row
    return Batch(
        q=rng.normal(size=(num_tokens, HEADS, NOPE + ROPE)).astype(np.float32),
        latent=rng.normal(size=(num_tokens, RANK + ROPE)).astype(np.float32),
        kv_b_proj=rng.normal(size=(LAYERS, HEADS, NOPE + VALUE, RANK)).astype(np.float32) / 4,
        pages=pages,
        layer=np.int32(LAYER),
        page_table=page_table,
        context_lens=np.array(contexts, np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
    )


def oracle(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Float64 definition, token by token: (out, pages, log-sum-exp of the scores)."""
    pages, page_size = batch.pages.copy(), batch.pages.shape[2]
    kv_b_proj = batch.kv_b_proj[batch.layer].astype(np.float64)
    out, lse = np.zeros((*batch.q.shape[:2], VALUE)), np.full(batch.q.shape[:2], -np.inf)
    for n, context in enumerate(batch.context_lens):
        for row in range(batch.cu_seqlens[n], batch.cu_seqlens[n + 1]):
            position = context + row - batch.cu_seqlens[n]
            pages[batch.layer, batch.page_table[n, position // page_size], position % page_size] = batch.latent[row]
            cached = np.concatenate(pages[batch.layer, batch.page_table[n]])[: position + 1].astype(np.float64)
            for h in range(HEADS):
                expanded = cached[:, :RANK] @ kv_b_proj[h].T
                keys = np.concatenate([expanded[:, :NOPE], cached[:, RANK:]], axis=1)
                scores = keys @ batch.q[row, h].astype(np.float64) / np.sqrt(NOPE + ROPE)
                weights = np.exp(scores - scores.max())
                out[row, h] = weights / weights.sum() @ expanded[:, NOPE:]
                lse[row, h] = np.log(weights.sum()) + scores.max()
    return out, pages, lse


def decode_arguments(batch: Batch) -> tuple:
    return batch[:-1]
