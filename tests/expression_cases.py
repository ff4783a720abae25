"""Masks and scores as users write them: what expressions, their evaluation and every printed form are tested on.

Index tensors and captured tensors are of sizes B, H, N, M; captured values come from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

B, H, N, M = 2, 3, 12, 18

_rng = torch.Generator().manual_seed(7)
DOC = torch.randint(0, 3, (B, M), generator=_rng, dtype=torch.int32)
LENGTHS = torch.tensor([11, 18])
OFFSETS = torch.tensor([-4, 3, -7], dtype=torch.int8)
FLAGS = torch.rand(M, generator=_rng) < 0.5
TABLE = torch.randn(H, N, M, generator=_rng).transpose(1, 2).contiguous().transpose(1, 2)  # strides of its own
SLOPES = torch.rand(H, generator=_rng).bfloat16()
CAP = torch.tensor(2.5)
BIG = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
EMPTY_ROW = torch.full((3, 1), -2, dtype=torch.int64)


def causal(b, h, q, k):
    return q >= k


def document(b, h, q, k):
    return (q >= k) & (DOC[b, q] == DOC[b, k])


def row_by_row(b, h, q, k):
    return DOC[b][q] == DOC[b][k]


def prefix(b, h, q, k):
    return (k < LENGTHS[b]) | (k <= q)


def dilated(b, h, q, k):
    return ((q - k) % 3 == 0) & ((q - k) // 4 > -2)


def negative_divisors(b, h, q, k):
    return ((q - k) // OFFSETS[h]) % -3 < -1


def negative_indices(b, h, q, k):
    return FLAGS[k - M] ^ FLAGS[-1] ^ FLAGS[q - 5]


def past_32_bits(b, h, q, k):
    return (q * 2**20 * k * 2**20 + BIG[b] + 1) % 7 < 3


def wide_sum(b, h, q, k):
    return BIG[b] + BIG[b] - k > q


def functions(b, h, q, k):
    return torch.logical_or(torch.abs(q - k) <= 2, torch.logical_not(torch.minimum(q, k) >= 4)) & (k != 3)


def methods(b, h, q, k):
    return ((q - k).abs().clamp(min=2, max=5) >= 3) ^ (q.float() / (k + 1) < 0.5) | (k**2 - q > 60)


def bools(b, h, q, k):
    return ((q > k) + (k > 5) * (q < 9)) & ((q > 3) == (k > 3)) | ((q > k) * 2 + h > 3)


def single_column(b, h, q, k):
    return EMPTY_ROW[h, 0] + k >= q


MASKS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(causal, document, row_by_row, prefix, dilated, negative_divisors, negative_indices, past_32_bits, wide_sum),
        *(functions, methods, bools, single_column),
    )
}


def softcap(s, b, h, q, k):
    return CAP * torch.tanh(s / CAP)


def alibi(s, b, h, q, k):
    return s - SLOPES[h] * (q - k).abs()


def relative(s, b, h, q, k):
    return s + TABLE[h, q, k] * 0.5


def hide_far(s, b, h, q, k):
    return torch.where((q - k).abs() > 6, torch.tensor(float("-inf")), s)


def polynomial(s, b, h, q, k):
    return s**3 - 2 * s**2 + (1 - s) / (2 + s**2) - s**-2.0


def transcendental(s, b, h, q, k):
    return torch.exp(-s.abs()) + torch.log(1 + s * s) + torch.sin(s) * torch.cos(s) + torch.sigmoid(s) + torch.exp2(s)


def extremes(s, b, h, q, k):
    return torch.maximum(s, 0.1 * s) + torch.minimum(s, q - k) + torch.relu(s - 1) + s.clamp(-1.5, 1.5)


def roots(s, b, h, q, k):
    return torch.sqrt(s * s + 1) - torch.rsqrt(s * s + 2) + (s * s + 3) ** 0.5 + torch.log2(s * s + 1) + torch.erf(s)


def rounded(s, b, h, q, k):
    return torch.floor(s) + torch.ceil(s / 2) + (s > 0) * s + (-s).to(torch.float32) + (s > 1).float()


def shared(s, b, h, q, k):
    t = torch.tanh(s + SLOPES[h])
    return t * t + t


SCORES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(softcap, alibi, relative, hide_far, polynomial, transcendental, extremes, roots, rounded, shared),
    )
}


def indices() -> dict[str, Tensor]:
    """b, h, q, k as the reference has them: int64 with four dimensions."""
    sizes = {"b": B, "h": H, "q": N, "k": M}
    return {
        name: torch.arange(size).view([-1 if d == place else 1 for d in range(4)])
        for place, (name, size) in enumerate(sizes.items())
    }


def visible(function: Callable[..., Any]) -> Tensor:
    """A mask's value for each (b, h, q, k), asked for one at a time."""
    function = widened(function)
    points = torch.cartesian_prod(*(torch.arange(size) for size in (B, H, N, M)))
    return torch.stack([function(*point) for point in points]).view(B, H, N, M)


def scores(dtype: torch.dtype = torch.float32) -> Tensor:
    return 2 * torch.randn(B, H, N, M, generator=torch.Generator().manual_seed(3), dtype=dtype)


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its captured tensors widened, as expressions read them."""
    wide = {torch.bfloat16: torch.float32, torch.int32: torch.int64, torch.int8: torch.int64}
    space = {
        name: value.to(wide.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value
        for name, value in function.__globals__.items()
    }
    return type(function)(function.__code__, space, function.__name__)
