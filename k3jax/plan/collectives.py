"""What the devices of a mesh send each other in a step: counted in a compiled program."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Of one kind.

    Attributes:
      count: how often a step runs one.
      bytes: that a device gets out of them.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Collectives") -> "Collectives":
        return Collectives(self.count + other.count, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Collectives":
        return Collectives(self.count * times, self.bytes * times)


Totals = Mapping[str, Collectives]


def count_collectives(hlo: str) -> dict[str, Collectives]:
    """Collectives of each kind in an optimised HLO module, `compiled.as_text()`.

    A loop counts as often as it turns; one whose turns depend on data counts once, and of branches the one that sends
    the most.
    """
    computations, entry = _computations(hlo)

    @functools.cache
    def of(name: str) -> Totals:
        return _totals(computations.get(name, ()), of)

    return {kind: of(entry)[kind] for kind in KINDS if kind in of(entry)}


def _totals(lines: Iterable[str], of: Callable[[str], Totals]) -> Totals:
    """Of one computation; `of` gives those of the computations that it calls."""
    totals: dict[str, Collectives] = collections.defaultdict(Collectives)

    def add(other: Totals, times: int = 1) -> None:
        for kind, collectives in other.items():
            totals[kind] += collectives * times

    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        shape, name = match.groups()
        if name in KINDS:
            totals[name] += Collectives(1, _size(shape))
        elif name == "while":
            trips = _TRIPS.search(line)
            body = re.search(r"body=%?([\w.\-]+)", line).group(1)
            add(of(body), int(trips.group(1)) if trips else 1)
        elif name == "conditional":
            add(max((of(branch) for branch in _branches(line)), key=_sent))
        elif name in ("call", "fusion"):
            add(of(_CALLED.search(line).group(1)))
    return totals


def _branches(line: str) -> Iterator[str]:
    for listed, single in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in (listed or single).split(","))


def _sent(totals: Totals) -> int:
    return sum(collectives.bytes for collectives in totals.values())


def _size(shape: str) -> int:
    """Bytes of an HLO shape or tuple of shapes."""
    return sum(
        _BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _ARRAY.findall(shape)
    )


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the first one to run."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = match.group(2)
            lines[name] = []
            entry = name if match.group(1) else entry
        elif line.startswith("}"):
            name = ""
        elif name:
            lines[name].append(line)
    return lines, entry
