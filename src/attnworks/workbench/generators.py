"""Stress inputs: named generators of q, k and v, each made to break one kind of wrong kernel.

A generator fills the tensors of one sequence: q (heads_q, seq_q, head_dim), k (heads_kv, seq_kv, head_dim) and
v (heads_kv, seq_kv, head_dim_v), in fp64; the case rounds them to its dtype. V is zero-mean wherever it can be, so that
zeros, constants and shuffled rows cannot pass for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Extents(NamedTuple):
    """The sizes of one sequence and the scale its scores will be multiplied by."""

    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    scale: float


Triple = tuple[Tensor, Tensor, Tensor]
Generator = Callable[[torch.Generator, Extents], Triple]

# Beyond this no fp16 input of the sizes used here overflows, and first-order error bounds in fp32 still mean something.
LARGEST_SCORE = 1e4


def _randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def normal(rng: torch.Generator, e: Extents) -> Triple:
    """Unit normal: what everybody tests."""
    q = _randn(rng, e.heads_q, e.seq_q, e.head_dim)
    k = _randn(rng, e.heads_kv, e.seq_kv, e.head_dim)
    return q, k, _randn(rng, e.heads_kv, e.seq_kv, e.head_dim_v)


def large_scores(rng: torch.Generator, e: Extents) -> Triple:
    """|q k^T| up to 1e4: exponentials overflow unless the maximum is subtracted."""
    q, k, v = normal(rng, e)
    products = q @ k.repeat_interleave(e.heads_q // max(e.heads_kv, 1), 0).transpose(-1, -2)
    largest = float(products.abs().max()) if products.numel() else 1.0
    factor = (LARGEST_SCORE / max(largest, 1e-3)) ** 0.5
    return q * factor, k * factor, v


def one_hot_rows(rng: torch.Generator, e: Extents) -> Triple:
    """Each query matches one key: softmax rows are almost one-hot, and rescaling factors almost 0."""
    _, k, v = normal(rng, e)
    k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6) * e.head_dim**0.5
    q = torch.zeros(e.heads_q, e.seq_q, e.head_dim, dtype=torch.float64)
    if e.seq_kv and e.heads_kv:
        chosen = torch.randint(e.seq_kv, (e.heads_q, e.seq_q), generator=rng)
        heads = torch.arange(e.heads_q)[:, None] // (e.heads_q // e.heads_kv)
        q = k[heads, chosen] * (40 / (e.scale * e.head_dim))
    return q, k, v


def constant_rows(rng: torch.Generator, e: Extents) -> Triple:
    """Every row of q, k and v holds one number."""
    q, k, v = normal(rng, e)
    return q[..., :1].expand_as(q), k[..., :1].expand_as(k), v[..., :1].expand_as(v)


def identical_queries(rng: torch.Generator, e: Extents) -> Triple:
    """All queries of a head equal: without a mask all rows must come out alike."""
    q, k, v = normal(rng, e)
    return (q[:, :1].expand_as(q) if e.seq_q else q), k, v


def similar_query(rng: torch.Generator, e: Extents) -> Triple:
    """The first query is similar to every key: its scores are large and nearly equal."""
    q, k, v = normal(rng, e)
    direction = _unit(rng, e.head_dim)
    k = 0.2 * k + 4 * direction
    if e.seq_q:
        q[:, 0] = 6 * direction
    return q, k, v


def rising_maximum(rng: torch.Generator, e: Extents) -> Triple:
    """Scores rise with the key: the running maximum changes in every tile, for every row."""
    q, k, v = normal(rng, e)
    direction = _unit(rng, e.head_dim)
    ramp = torch.linspace(-30, 30, max(e.seq_kv, 1), dtype=torch.float64)[: e.seq_kv]
    q = 0.1 * q + direction
    return q, 0.1 * k + (ramp / e.scale)[:, None] * direction, v


def falling_maximum(rng: torch.Generator, e: Extents) -> Triple:
    """Scores fall with the key: everything that counts is in the first tile."""
    q, k, v = rising_maximum(rng, e)
    return q, k.flip(1), v


def common_offset(rng: torch.Generator, e: Extents) -> Triple:
    """Keys share an offset, which softmax does not see but the scores do."""
    q, k, v = normal(rng, e)
    return q, k + 24 * _unit(rng, e.head_dim), v


def outlier_channels(rng: torch.Generator, e: Extents) -> Triple:
    """A few channels are 30 times the others, as in trained models."""
    q, k, v = normal(rng, e)
    for tensor in (q, k, v):
        tensor[..., :: max(tensor.shape[-1] // 2, 1)] *= 30
    return q, k, v


def strongly_negative(rng: torch.Generator, e: Extents) -> Triple:
    """All scores near -1e4: below finite stand-ins for -inf, and far below padding that scores 0."""
    q, k, v = normal(rng, e)
    direction = _unit(rng, e.head_dim)
    size = (LARGEST_SCORE / e.scale) ** 0.5
    return size * direction + 0.02 * q, -size * direction + 0.02 * k, v


def tiny(rng: torch.Generator, e: Extents) -> Triple:
    """Values of 1e-4: subnormal in fp16, where a relative error means nothing."""
    q, k, v = normal(rng, e)
    return q * 1e-4, k * 1e-4, v * 1e-4


def nan_query(rng: torch.Generator, e: Extents) -> Triple:
    """One query is NaN: its row stays NaN, no other does."""
    q, k, v = normal(rng, e)
    q[:, _middle(e.seq_q)] = torch.nan
    return q, k, v


def nan_key(rng: torch.Generator, e: Extents) -> Triple:
    """One channel of one key is NaN: every row that sees it is NaN."""
    q, k, v = normal(rng, e)
    k[:, _middle(e.seq_kv), 0] = torch.nan
    return q, k, v


def nan_value(rng: torch.Generator, e: Extents) -> Triple:
    """One channel of one value is NaN: that channel is NaN in every row that sees it."""
    q, k, v = normal(rng, e)
    v[:, _middle(e.seq_kv), 0] = torch.nan
    return q, k, v


def minus_infinity(rng: torch.Generator, e: Extents) -> Triple:
    """A key whose scores are all -inf is hidden."""
    q, k, v = normal(rng, e)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, _middle(e.seq_kv), 0] = -torch.inf
    return q, k, v


# Small integers whose answers can be worked out by hand (``hand.py``): Q and dO for two heads, K and V for one.
HAND_Q = (((1, 0), (0, 1), (1, 1), (2, -1)), ((0, -1), (1, -1), (-1, 0), (1, 2)))
HAND_K = ((1, 1), (0, 1), (1, 0), (-1, 2))
HAND_V = ((1, 2), (3, -1), (-2, 4), (0, -3))
HAND_D_OUT = (((1, 0), (0, 1), (1, -1), (2, 1)), ((-1, 1), (1, 2), (0, 1), (1, 0)))


def hand(rng: torch.Generator, e: Extents) -> Triple:
    """The integers of the hand-computed cases, as many as the sizes ask for."""
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in (HAND_Q, (HAND_K,), (HAND_V,)))
    return q[: e.heads_q, : e.seq_q], k[:, : e.seq_kv], v[:, : e.seq_kv]


def _middle(rows: int) -> slice:
    """The row in the middle, or none of no rows."""
    return slice(rows // 2, rows // 2 + 1)


def _unit(rng: torch.Generator, size: int) -> Tensor:
    direction = _randn(rng, size)
    length: Tensor = direction.norm().clamp_min(1e-6)
    return direction / length


GENERATORS: dict[str, Generator] = {
    function.__name__.replace("_", " "): function
    for function in (
        normal,
        large_scores,
        one_hot_rows,
        constant_rows,
        identical_queries,
        similar_query,
        rising_maximum,
        falling_maximum,
        common_offset,
        outlier_channels,
        strongly_negative,
        tiny,
        nan_query,
        nan_key,
        nan_value,
        minus_infinity,
        hand,
    )
}
