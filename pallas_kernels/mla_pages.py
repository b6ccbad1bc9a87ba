"""What the two MLA ops share: latents in pages, the kv up-projection, the online softmax and the checks of values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import checks, stacks
from pallas_kernels.page_part import PagePart, page_tokens


class MlaOutput(NamedTuple):
    """Result of an MLA op.

    Attributes:
      out: [rows, H, V] attention output, before the output gate and `o_proj`; zero for rows without a page. With a
        `part` it is float32 and over that part's keys only, zero where it has none.
      pages: the pool with the new tokens' latents.
      lse: with a `part` [rows, H] float32, log of the sum of exponentials of the scores seen, -inf where there are
        none: a softmax over the parts' gives the weights that merge them. None without.
    """

    out: jax.Array
    pages: jax.Array
    lse: jax.Array | None


class Dims(NamedTuple):
    """Widths that the shapes imply: `R`, `Dr`, `Dn` and `V` of docs/design.md."""

    latent: int
    rope: int
    nope: int
    value: int

    @classmethod
    def of(cls, q: jax.Array, kv_b_proj: jax.Array, pages: jax.Array) -> "Dims":
        latent = kv_b_proj.shape[-1]
        rope = pages.shape[-1] - latent
        nope = q.shape[-1] - rope
        return cls(latent, rope, nope, kv_b_proj.shape[2] - nope)

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Einsum with a float32 result: true float32 for float32 operands, float32 accumulation for bfloat16 ones."""

    def native(a, b):
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)

    def widened(a, b):
        return native(a.astype(jnp.float32), b.astype(jnp.float32))

    if a.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
        return native(a, b)
    precision = jax.lax.Precision.DEFAULT
    # XLA's CPU backend refuses some batched bfloat16 products with a float32 result.
    return jax.lax.platform_dependent(a, b, cpu=widened, default=native)


def split_kv_b_proj(kv_b_proj: jax.Array, layer: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """One layer's key and value up-projections, [H, Dn, R] and [H, V, R]."""
    weight = stacks.read(kv_b_proj, layer)
    return weight[:, : dims.nope], weight[:, dims.nope :]


def locate(page_table: jax.Array, sequence: jax.Array, position: jax.Array, page_size: int) -> jax.Array:
    """[rows] int32: page of each row's position in its sequence, 0 beyond the page table [N, max_pages]."""
    return page_table.at[sequence, position // page_size].get(mode="fill", fill_value=0)


def prefill_positions(
    sequence: jax.Array, context_lens: jax.Array, cu_seqlens: jax.Array, num_tokens: int
) -> jax.Array:
    """[T] int32: absolute position of each packed row in its sequence; meaningless for padding rows."""
    return context_lens[sequence] + jnp.arange(num_tokens, dtype=jnp.int32) - cu_seqlens[sequence]


def write_latents(
    pages: jax.Array, layer: jax.Array, latent: jax.Array, page: jax.Array, position: jax.Array, part: PagePart | None
) -> jax.Array:
    """Stores one latent a row, in place when the pool is donated.

    Args:
      pages: [L, P, page_size, R + Dr].
      layer: int32 scalar.
      latent: [rows, R + Dr].
      page: [rows] int32; rows with page 0 write nothing.
      position: [rows] int32 in their sequences.
      part: rows that lie on another one write nothing; None = whole pages.
    """
    page_size = pages.shape[2]
    if part:
        offset = part.offset(position, page_size)
        page = jnp.where((offset >= 0) & (offset < page_size), page, 0)
    else:
        offset = position % page_size
    return stacks.write(pages, layer, (page, offset), latent, page > 0)


class KeyTile(NamedTuple):
    """Latents of consecutive positions of one or more sequences.

    Attributes:
      latents: [..., tile, R + Dr]; zero where not readable.
      positions: [tile] int32.
      readable: [..., tile] bool: before the sequence's end, and on a page.
    """

    latents: jax.Array
    positions: jax.Array
    readable: jax.Array


class PagedKeys(NamedTuple):
    """Reads the latents of one layer in tiles of whole pages, at fixed absolute positions.

    Attributes:
      pages: [L, P, page_size, R + Dr].
      layer: int32 scalar.
      page_table: [..., max_pages] int32, padded to a multiple of `pages_per_tile` with page 0.
      pages_per_tile: static.
      dtype: of what is read.
    """

    pages: jax.Array
    layer: jax.Array
    page_table: jax.Array
    pages_per_tile: int
    dtype: Any

    @classmethod
    def tiled(cls, pages: jax.Array, layer: jax.Array, page_table: jax.Array, key_tile: int, dtype) -> "PagedKeys":
        """Tiles of about `key_tile` positions, at least one page."""
        max_pages = page_table.shape[-1]
        pages_per_tile = min(max(1, key_tile // pages.shape[2]), max_pages)
        page_table = jnp.pad(page_table, ((0, 0), (0, -max_pages % pages_per_tile)))
        return cls(pages, layer, page_table, pages_per_tile, dtype)

    @property
    def tile(self) -> int:
        return self.pages_per_tile * self.pages.shape[2]

    def num_tiles(self, end: jax.Array) -> jax.Array:
        """Tiles that hold the positions before `end`."""
        return -(-end // self.tile)

    def read(self, number: jax.Array, end: jax.Array) -> KeyTile:
        """Tile `number` of every sequence of the page table; `end` [...] is where each sequence ends."""
        page_size = self.pages.shape[2]
        first = number * self.pages_per_tile
        page = jax.lax.dynamic_slice_in_dim(self.page_table, first, self.pages_per_tile, axis=-1)
        page_start = (first + jnp.arange(self.pages_per_tile, dtype=jnp.int32)) * page_size
        page = jnp.where(page_start < end[..., None], page, 0)
        latents = stacks.read(self.pages, self.layer, page).astype(self.dtype)
        latents = latents.reshape(*page.shape[:-1], self.tile, latents.shape[-1])
        positions = number * self.tile + jnp.arange(self.tile, dtype=jnp.int32)
        readable = (positions < end[..., None]) & jnp.repeat(page > 0, page_size, axis=-1)
        # Unwritten positions may hold anything, NaN included, and a zero probability times NaN is NaN.
        return KeyTile(jnp.where(readable[..., None], latents, 0), positions, readable)


class OnlineSoftmax(NamedTuple):
    """Softmax-weighted sum over keys that arrive in tiles; all float32.

    Attributes:
      maximum: [...] of the scores so far.
      total: [...] sum of exp(score - maximum).
      weighted: [..., width] sum of exp(score - maximum) * value.
    """

    maximum: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def empty(cls, *shape: int) -> "OnlineSoftmax":
        """Before the first key; `shape` is that of `weighted`."""
        # A finite start keeps exp(maximum - maximum) from being NaN while every key is masked.
        maximum = jnp.full(shape[:-1], jnp.finfo(jnp.float32).min, jnp.float32)
        return cls(maximum, jnp.zeros_like(maximum), jnp.zeros(shape, jnp.float32))

    def add(self, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> "OnlineSoftmax":
        """Adds a tile of keys.

        Args:
          scores: [..., keys] float32, -inf for masked keys.
          weigh: maps [..., keys] float32 probabilities (not normalised) to [..., width] weighted values.
        """
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=-1))
        decay = jnp.exp(self.maximum - maximum)
        probability = jnp.exp(scores - maximum[..., None])
        return OnlineSoftmax(
            maximum,
            self.total * decay + jnp.sum(probability, axis=-1),
            self.weighted * decay[..., None] + weigh(probability),
        )

    def result(self) -> jax.Array:
        """[..., width] float32; zero where every key was masked."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1)[..., None]

    def log_sum_exp(self) -> jax.Array:
        """[...] float32 of the scores; -inf where every key was masked."""
        return self.maximum + jnp.log(self.total)


def require_consistent(op: str, q, latent, kv_b_proj, pages, page_table, context_lens, part) -> None:
    """Raises ValueError unless widths, dtypes and the part fit together; the shapes have been bound before."""
    if part and part.parts < 1:
        raise ValueError(f"{op}: part is one of {part.parts} parts, expected at least 1")
    dims = Dims.of(q, kv_b_proj, pages)
    if dims.rope < 0 or dims.nope <= 0 or dims.value <= 0:
        raise ValueError(
            f"{op}: q width {q.shape[-1]}, latent width {pages.shape[-1]} and kv_b_proj {tuple(kv_b_proj.shape)} "
            "do not fit; expected Dn + Dr, R + Dr and [L, H, Dn + V, R]"
        )
    checks.require_dtype(op, "q", q, jnp.float32, jnp.bfloat16)
    for name, array in {"latent": latent, "kv_b_proj": kv_b_proj}.items():
        checks.require_dtype(op, name, array, q.dtype)
    checks.require_dtype(op, "pages", pages, q.dtype, jnp.float32)
    for name, array in {"page_table": page_table, "context_lens": context_lens}.items():
        checks.require_dtype(op, name, array, jnp.int32)


def page_checks(
    pages: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    new_lens: jax.Array,
    sequence: jax.Array,
    position: jax.Array,
    written: jax.Array,
    part: PagePart | None,
) -> list[checks.Check]:
    """Conditions on the values of page tables and lengths.

    Args:
      pages: the pool, for its shape.
      page_table: [N, max_pages] int32.
      context_lens: [N] int32.
      new_lens: [N] int32, tokens that this call adds.
      sequence: [rows] int32, the sequence of each new token.
      position: [rows] int32, its absolute position.
      written: [rows] bool, false for padding and unused rows.
      part: which share of the pages the pool holds.
    """
    num_pages, page_size = pages.shape[1], page_tokens(pages, part)
    max_pages = page_table.shape[1]
    end = context_lens + new_lens
    fits = end <= max_pages * page_size
    inside = (page_table >= 0) & (page_table < num_pages)
    needed = jnp.arange(max_pages, dtype=jnp.int32) * page_size < end[:, None]
    present = jnp.all((page_table > 0) | ~needed | (new_lens == 0)[:, None], axis=1)

    page = jnp.where(written, locate(page_table, sequence, position, page_size), 0)
    order = jnp.argsort(page)
    page, owner = page[order], (sequence * max_pages + position // page_size)[order]
    single = (page[1:] != page[:-1]) | (page[1:] == 0) | (owner[1:] == owner[:-1])
    single = jnp.append(single, True)
    return [
        checks.Check(
            jnp.all(context_lens >= 0),
            "context_lens has {value}, expected the number of cached tokens, at least 0",
            {"value": checks.first_bad(context_lens >= 0, context_lens)},
        ),
        checks.Check(
            jnp.all(fits),
            f"a sequence grows to {{value}} tokens, but a row of page_table has room for {max_pages * page_size}; "
            "give it more pages",
            {"value": checks.first_bad(fits, end)},
        ),
        checks.Check(
            jnp.all(inside),
            f"page_table names page {{value}}, expected 0 .. {num_pages - 1}",
            {"value": checks.first_bad(inside.ravel(), page_table.ravel())},
        ),
        checks.Check(
            jnp.all(present),
            "page_table row {value} has page 0, the dummy, among the pages of its tokens; allocate pages first",
            {"value": jnp.argmin(present)},
        ),
        checks.Check(
            jnp.all(single),
            "page {value} would be written for two sequences or positions of one call; copy a shared page first",
            {"value": checks.first_bad(single, page)},
        ),
        *([checks.Check(
            (part.index >= 0) & (part.index < part.parts),
            f"part {{value}} does not exist, expected 0 .. {part.parts - 1}",
            {"value": part.index},
        )] if part else []),
    ]
