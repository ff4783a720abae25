"""What the core tests share: an fp64 oracle written on its own, limits for comparing with it, and running a backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnworks import api
from attnworks.errors import UnsupportedError
from attnworks.problem import Problem

# The plain limits that are quoted for unit-normal inputs: (absolute, relative). The conformance suite has sharper ones.
LIMITS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float16: (1e-3, 1e-2),
}

Visible = Callable[[int, int], bool]


def oracle(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one query head and its KV head in fp64, by the definition, row by row: (out, lse).

    q (seq_q, head_dim), k (seq_kv, head_dim), v (seq_kv, head_dim_v). ``visible``: a function of (i, j), or a boolean
    (seq_q, seq_kv).
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    out, lse = (
        torch.zeros(len(q), v.shape[1], dtype=torch.float64),
        torch.full((len(q),), -math.inf, dtype=torch.float64),
    )
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if visible is None or (visible(i, j) if callable(visible) else visible[i, j])]
        if not keys:
            continue
        s = scale * (k[keys] * q[i]).sum(1)
        lse[i] = torch.logsumexp(s, 0)
        out[i] = (torch.exp(s - lse[i])[:, None] * v[keys]).sum(0)
    return out, lse


def dense_oracle(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``oracle`` for each batch and query head of "bhsd" tensors; consecutive query heads share a KV head."""
    group = q.shape[1] // max(k.shape[1], 1)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h], lse[b, h] = oracle(q[b, h], k[b, h // group], v[b, h // group], visible, scale)
    return out, lse


def causal(seq_q: int, seq_kv: int) -> Visible:
    """Bottom-right: the last query sees the last key."""
    return lambda i, j: j <= i + seq_kv - seq_q


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within the limits of ``dtype`` (default: got's own); infinities must match exactly."""
    absolute, relative = LIMITS[dtype or got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=absolute, rtol=relative)


def or_skip(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the call; skip the test only if the backend's own Verdict refuses it."""
    try:
        return call(*args, **kwargs)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def problem_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Problem:
    """The Problem that ``attention(q, k, v, **options)`` would pose."""
    return api.explain(q, k, v, **options).problem


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)
