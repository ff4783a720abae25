"""Masks as kernels keep them, a tile or a bit at a time, with what is got wrong in that: the ways of two faults."""

from __future__ import annotations

import torch
from torch import Tensor


def without_skipped(shown: Tensor, tile: int, way: int) -> Tensor:
    """(heads, rows, keys) of a tile of keys without blocks of rows that are skipped because a part of them that was
    asked sees nothing: their first row, their last row, their first key."""
    rows = torch.arange(shown.shape[1])
    first = rows - rows % tile
    last = (first + tile - 1).clamp(max=shown.shape[1] - 1)
    asked = shown[:, last if way == 1 else first].any(-1, keepdim=True)
    if way == 2:
        blocks = torch.zeros(shown.shape[0], len(rows), dtype=torch.int32)
        asked = (blocks.index_add(1, rows // tile, shown[..., 0].int()) > 0)[:, rows // tile, None]
    return shown & asked


def seen_in_blocks(shown: Tensor, tile: int) -> Tensor:
    """(heads, rows, 1): whether any row of a row's block sees any key of this tile."""
    blocks = torch.arange(shown.shape[1]) // tile
    seen = torch.zeros(shown.shape[0], shown.shape[1], dtype=torch.int32)
    return (seen.index_add(1, blocks, shown.any(-1).int()) > 0)[:, blocks, None]


def mirrored(whole: Tensor, bits: int) -> Tensor:
    """A boolean mask whose keys come in reverse in every ``bits``, as bits do that are read from the other end; what
    is added to fill the last word hides."""
    keys = torch.arange(whole.shape[-1])
    places = keys - keys % bits + bits - 1 - keys % bits
    wide = torch.cat((whole, whole.new_zeros(*whole.shape[:-1], bits)), -1)
    return wide[..., places]
