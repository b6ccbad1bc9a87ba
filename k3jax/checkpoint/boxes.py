"""Boxes: rectangular parts of an array, `((begin, end), ...)` for each axis, and their bytes in a row-major file."""

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """The box that slices (of step 1) cut out of an array."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """How many elements it holds."""
    return math.prod(extents(box))


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box around all."""
    return tuple((min(begin for begin, _ in axis), max(end for _, end in axis)) for axis in zip(*boxes))


def intersection(a: Box, b: Box) -> Box:
    """What two boxes share; they must overlap."""
    return tuple((max(begin, low), min(end, high)) for (begin, end), (low, high) in zip(a, b))


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that cut `box` out of an array which holds `outer`."""
    return tuple(slice(begin - low, end - low) for (begin, end), (low, _) in zip(box, outer))


def blocks(box: Box, max_volume: int) -> Iterator[Box]:
    """The box in order, cut along its first axis so that a block holds about `max_volume` elements."""
    if not box:
        yield box
        return
    (begin, end), rest = box[0], box[1:]
    rows = max(1, max_volume // max(1, volume(rest)))
    for low in range(begin, end, rows):
        yield (low, min(low + rows, end)), *rest


def runs(box: Box, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """The contiguous pieces of a box in a row-major array of `shape`.

    Returns:
      Elements of a piece, and the position of each piece's first element, in row-major order.
    """
    split = len(shape)
    while split > 0 and (split == len(shape) or box[split] == (0, shape[split])):
        split -= 1
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    inner = sum(begin * stride for (begin, _), stride in zip(box[split:], strides[split:]))
    outer = itertools.product(*(
        range(begin * stride, end * stride, stride) for (begin, end), stride in zip(box[:split], strides)
    ))
    return volume(box[split:]), (sum(position) + inner for position in outer)
