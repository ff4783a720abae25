"""What the GPU tests share: attention by its definition in fp64 on the GPU, and inputs there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker import Found

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Of (batch, heads, rows, dim) tensors, bottom-right causal; 0 where a row sees no key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def assert_close(got: Tensor, expected: Tensor) -> None:
    limit = LIMIT[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=limit, rtol=limit)


def gradients(out: Tensor, leaves: list[Tensor], d_out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, d_out)


def assert_none_failed(found: Found) -> None:
    """Of a job's results; skips where the backend's own verdict did."""
    assert [f"{check}: {message}" for status, check, message in found if status == "failed"] == []
    if found[0][0] == "skipped":
        pytest.skip(found[0][2])
