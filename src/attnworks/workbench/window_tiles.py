"""Windows as loops over tiles of keys get them wrong: an end that is asked in one tile only, though a block of rows
crosses it in more. ``origin``: (heads, rows, 1), each row's own key; ``j``: the keys of a tile."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCKS = (1, 2, 4)  # tiles of rows in a block, by the way


def from_first_tile(origin: Tensor, j: Tensor, begin: Tensor, tile: int, way: int) -> Tensor:
    """Keys from the left end on: in whole tiles, or asked in the first tile only of those that a block of rows goes
    through."""
    if way == 0:
        return j >= begin.div(tile, rounding_mode="floor") * tile
    if way > 3:
        return j >= begin
    rows = torch.arange(origin.shape[1]).view(1, -1, 1)
    size = _BLOCKS[way - 1] * tile
    first = (begin - rows % size).clamp(min=0) // tile
    return (j // tile >= first) & ((j // tile > first) | (j >= begin))


def up_to_last_tile(origin: Tensor, j: Tensor, end: Tensor, tile: int, way: int) -> Tensor:
    """Keys up to the right end, asked in the last tile only of those that a block of rows goes through."""
    rows = torch.arange(origin.shape[1]).view(1, -1, 1)
    size = _BLOCKS[way - 4] * tile
    last = (end - rows + ((rows // size + 1) * size).clamp(max=origin.shape[1]) - 1) // tile
    return (j // tile <= last) & ((j // tile < last) | (j <= end))


def last_tile_end(end: Tensor, tile: int, way: int) -> Tensor:
    """Where a loop over keys ends that goes no further than the tile in which the first row's window ends, or than the
    last whole tile before the end of the last row's, in a block of a tile's rows."""
    rows = torch.arange(end.shape[1]).view(1, -1, 1)
    if way == 0:
        return ((end - rows % tile) // tile + 1) * tile
    return (end - rows + ((rows // tile + 1) * tile).clamp(max=end.shape[1])) // tile * tile
