"""What the tests of the reference backend share: its schedules, small fp64 inputs, and a call that returns the LSE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnworks import Plan, attention

EAGER = Plan("reference", "eager")
STANDARD = Plan("reference", "standard")
TILED = (Plan("reference", "q_outer", 2, 3), Plan("reference", "kv_outer", 3, 2))


def schedules(*plans: Plan) -> pytest.MarkDecorator:
    """Run the test under each plan, named by its schedule."""
    return pytest.mark.parametrize("plan", plans, ids=lambda plan: plan.schedule)


all_schedules = schedules(EAGER, STANDARD, *TILED)


def inputs(
    batch: int = 2, heads_q: int = 4, heads_kv: int = 2, seq_q: int = 5, seq_kv: int = 7, dim: int = 4, dim_v: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads_q, seq_q, dim, dtype=torch.float64)
    k = torch.randn(batch, heads_kv, seq_kv, dim, dtype=torch.float64)
    return q, k, torch.randn(batch, heads_kv, seq_kv, dim_v, dtype=torch.float64)


def with_grad(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def run(*qkv: Tensor, plan: Plan = EAGER, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = attention(*qkv, return_lse=True, backend="reference", plan=plan, **options)
    return out, lse
