"""Tiles: cutting a problem into rows and keys, loading what a tile needs, and the scores of one tile.

Forward and backward both use these, as a kernel's do. ``load`` stands for the copy from slow to fast memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnworks.backends.reference.definitions import Positions, modify, positions, visible
from attnworks.masks import Bounds, MaskSpec
from attnworks.problem import Operands, Problem


def spans(length: int, tile: int) -> list[range]:
    """0..length cut into ranges of ``tile``; the last may be shorter."""
    return [range(start, min(start + tile, length)) for start in range(0, length, tile)]


def is_hidden(mask: MaskSpec, rows: range, keys: range, seq_q: int, seq_kv: int) -> bool:
    """Whether closed bounds hide every one of ``keys`` from every one of ``rows``, so that the tile is never loaded."""
    for term in mask:
        if isinstance(term, Bounds):
            shift = seq_kv - seq_q if term.align == "bottom-right" else 0
            if term.left is not None and keys[-1] < rows[0] + shift - term.left:
                return True
            if term.right is not None and keys[0] > rows[-1] + shift + term.right:
                return True
    return False


def kv_head(head: Tensor, group: int) -> Tensor:
    """The KV head of a query head: neighbours share."""
    return head // group


def load(x: Tensor, rows: range, tile: int, dtype: torch.dtype) -> Tensor:
    """Rows of x (batch, heads, length, columns), filled up with zeros to ``tile`` rows."""
    return pad(x[:, :, rows.start : rows.stop].to(dtype), (0, 0, 0, tile - len(rows)))


def load_shared(x: Tensor, rows: range, tile: int, dtype: torch.dtype, problem: Problem) -> Tensor:
    """``load`` for K and V (batch, heads_kv, ..): each query head gets its KV head's tile."""
    heads = torch.arange(problem.heads_q, device=x.device)
    return load(x, rows, tile, dtype)[:, kv_head(heads, problem.group)]


def tile_positions(
    problem: Problem, q: Tensor, k: Tensor, first: int, rows: range, keys: range, tile: int
) -> Positions:
    """Positions of a tile whose keys are filled up to ``tile``; the filling repeats the last key, safe to read."""
    seq_q, seq_kv = q.shape[2], k.shape[2]
    filled = range(keys.start, keys.start + tile)
    at = positions(first, q.shape[0], problem.heads_q, rows, filled, seq_q, seq_kv, q.device)
    return at._replace(k=at.k.clamp_max(seq_kv - 1))


def product(q_tile: Tensor, k_tile: Tensor, scale: float) -> Tensor:
    """scale · Q Kᵀ."""
    return scale * (q_tile @ k_tile.transpose(-1, -2))


def mask_tail(scores: Tensor, keys: int) -> Tensor:
    """Hide the columns from ``keys`` on: the filling of a short tile."""
    column = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(column < keys, scores, -torch.inf)


def finish_scores(problem: Problem, o: Operands, raw: Tensor, at: Positions, keys: int) -> Tensor:
    """Scores from their products: modified, masked, tail hidden."""
    scores = modify(problem.scores, o.scores, raw, at)
    if problem.mask:
        scores = torch.where(visible(problem.mask, o.mask, at), scores, -torch.inf)
    return mask_tail(scores, keys)


def tile_bytes(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """Bytes of what a step of the forward holds at once: tiles of Q, K, V and of the scores, and the state."""
    compute = torch.promote_types(problem.dtype, torch.float32).itemsize
    inputs = (tile_q + tile_kv) * problem.head_dim + tile_kv * problem.head_dim_v
    state = tile_q * (problem.head_dim_v + 2)
    return compute * (inputs + tile_q * tile_kv + state)
