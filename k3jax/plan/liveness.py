"""How much memory a traced step needs for what it computes, if every value were made and freed in the order written."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Size = Callable[[Any], int]

# Compilers read their operand where it lies, or make their values on the fly inside what uses them.
_FREE = frozenset(
    "broadcast_in_dim convert_element_type copy dynamic_slice expand_dims iota reshape slice squeeze transpose".split()
)
_UPDATES = frozenset("dynamic_update_slice optimization_barrier scan scatter while".split())
_CALLS = frozenset("closed_call cond custom_jvp_call jit pjit shard_map".split())


def peak_bytes(jaxpr: Jaxpr, size: Size) -> int:
    """The most bytes alive at once, on one device, beside the arguments.

    A result with the shape of an operand that is not needed any more takes its place, unless it is a matrix product;
    pools, which are arguments, are updated where they lie.

    Args:
      jaxpr: of a step; inside a `shard_map` shapes are one device's already.
      size: bytes on one device of a value outside any `shard_map`.
    """
    return _measure(jaxpr, size)[0]


def _measure(jaxpr: Jaxpr, size: Size) -> tuple[int, list[int]]:
    """The peak, and the bytes of each result that do not lie in arguments."""
    last = {var: n for n, eqn in enumerate(jaxpr.eqns) for var in _variables(eqn.invars)}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    alive: dict[Any, int] = dict.fromkeys((*jaxpr.invars, *jaxpr.constvars), 0)
    peak = 0
    for n, eqn in enumerate(jaxpr.eqns):
        inner, sizes = _inside(eqn, size)
        operands = _variables(eqn.invars)
        ending = {var for var in operands if last[var] == n}
        name = eqn.primitive.name
        places = [
            var for var in operands
            if (alive[var] and var in ending and name != "dot_general") or (not alive[var] and name in _UPDATES)
        ]
        made, new = {}, 0
        for var, count in zip(eqn.outvars, sizes):
            place = next((other for other in places if _alike(other, var)), None)
            if place is None:
                made[var], new = count, new + count
            else:
                places.remove(place)
                made[var] = alive[place]
        peak = max(peak, sum(alive.values()) + max(inner, new))
        alive = {var: count for var, count in alive.items() if var not in ending}
        alive |= {var: count for var, count in made.items() if var in last}
    return peak, [0 if isinstance(var, Literal) else alive[var] for var in jaxpr.outvars]


def _inside(eqn: Any, size: Size) -> tuple[int, list[int]]:
    """What an equation needs while it runs, and the bytes of its results."""
    name = eqn.primitive.name
    sizes = [0 if name in _FREE else size(var.aval) for var in eqn.outvars]
    bodies = [_measure(body, _bytes if name == "shard_map" else size) for body in _bodies(eqn)]
    if name in _CALLS:
        # Of branches for different platforms, those for accelerators read weights where they lie.
        sizes = [min(counts) for counts in zip(*(results for _, results in bodies))]
    return max((peak for peak, _ in bodies), default=0), sizes


def _bodies(eqn: Any) -> Iterator[Jaxpr]:
    """The programs inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _variables(atoms: list[Any]) -> list[Any]:
    """Each variable once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def _alike(one: Any, other: Any) -> bool:
    return (one.aval.shape, one.aval.dtype) == (other.aval.shape, other.aval.dtype)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
