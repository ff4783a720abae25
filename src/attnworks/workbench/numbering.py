"""The numbers that rows and keys have where masks and scores are worked out, and what is got wrong in them: a switch
for each fault and the ways it is made (``ways.WAYS``)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Numbers = tuple[Tensor, Tensor]


def numbers(
    has: Callable[[str], bool], way: int, tile: int, i: Tensor, j: Tensor, seq_q: int
) -> tuple[Numbers, Numbers]:
    """(rows, keys) as masks take them, and as scores do, of the keys ``j`` of a tile."""
    own = i, j
    first = int(j.min())
    if (first > 0 or seq_q > tile) and has("numbered within their tile"):  # in both, or in one of them
        wrong = (i % tile, j) if way in (1, 4, 5) else (i, j - first)
        return own if way in (2, 4) else wrong, own if way in (3, 5) else wrong
    if seq_q > 8 and has("moved tile numbered as unmoved"):  # the last rows, moved back to be a whole tile
        moved = i + (i >= seq_q - tile) * (-seq_q % tile) * (seq_q > tile)
        return (moved, j), own if way else (moved, j)
    return own, own
