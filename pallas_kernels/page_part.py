"""Pools whose pages are split over devices: each holds the same share of every page."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagePart:
    """Which share of every page the local pool holds.

    A page of `parts * size` tokens lies as `size` consecutive tokens on each of `parts` devices. Splitting inside pages
    leaves page tables as they are, and sequences of any length are balanced to `size` tokens.

    Attributes:
      index: int32 scalar, which share; may be traced.
      parts: number of shares, static.
    """

    index: jax.Array
    parts: int = dataclasses.field(metadata={"static": True})

    def offset(self, position: jax.Array, size: int) -> jax.Array:
        """Where a position lies in this part of its page: 0 .. size - 1 if it lies here."""
        return position % (self.parts * size) - self.index * size

    def count_before(self, position: jax.Array, size: int) -> jax.Array:
        """How many of the positions before `position` lie here; they are the first ones of the local order."""
        return position // (self.parts * size) * size + jnp.clip(self.offset(position, size), 0, size)


def page_tokens(pages: jax.Array, part: PagePart | None) -> int:
    """Tokens in a whole page of a pool [L, P, size, ...]."""
    return pages.shape[2] * (part.parts if part else 1)
