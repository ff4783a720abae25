"""Causal as loops over tiles of keys get it wrong: where the mask is missing, and where the loop ends.

``origin``: (heads, rows, 1), the last key that each row sees; ``j``: the keys of a tile; ``way``: of two faults
(``ways.WAYS``)."""

from __future__ import annotations

import torch
from torch import Tensor


def by_tile(origin: Tensor, j: Tensor, tile: int, way: int, together: int) -> Tensor:
    """Causal whose mask is missing in tiles that the diagonal crosses: in all; in all but that with the number of
    the row's own tile; in all but the last one of a block of two or four tiles' rows. Or with one bound for rows that
    go ``together``, that of the last of them."""
    if not way:
        return origin // tile >= j // tile
    rows = torch.arange(origin.shape[1]).view(1, -1, 1)
    if way == 4:  # a few rows have the bound of the last of them
        return j <= origin - rows + (rows // together + 1) * together - 1
    size = (1, 2, 4)[way - 1] * tile
    last = (origin - rows + ((rows // size + 1) * size).clamp(max=origin.shape[1]) - 1) // tile
    masked = rows // tile if way == 1 else last
    return (j // tile <= last) & ((j // tile != masked) | (j <= origin))


def loop_end(origin: Tensor, tile: int, way: int) -> Tensor:
    """Where a causal loop over keys ends for each row that ends too early: at the tile that holds the diagonal; at
    the last whole tile before a block's end; a tile later for each block of rows twice as long; where it would with as
    many keys as queries; or where the first row of a block of one, two, three or four tiles needs no more."""
    rows = torch.arange(origin.shape[1]).view(1, -1, 1)
    if way == 0:
        return torch.where(origin < tile, tile, origin // tile * tile)
    if way == 1:
        block = (rows // (2 * tile) + 1) * 2 * tile
        return (origin - rows + block.clamp(max=origin.shape[1])) // tile * tile
    if way == 2:
        return (rows // (2 * tile) + 1) * tile
    if way == 3:
        return (rows // tile + 1) * tile
    first = origin - rows % ((way - 3) * tile)
    return (first // tile + 1) * tile
