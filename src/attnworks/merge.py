"""Merging partial results: attention over disjoint sets of keys, put together by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.problem import LAYOUTS, check_device


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the two partial results.

    ``out_*``: (batch, heads_q, seq_q, head_dim_v) for layout "bhsd", (batch, seq_q, heads_q, head_dim_v) for "bshd";
    three-dimensional outputs are packed, (total_q, heads_q, head_dim_v), with ``lse_*`` (heads_q, total_q).
    ``lse_*``: (batch, heads_q, seq_q), natural log, fp32. Returns (out, lse) in the same forms; out has out_a's dtype
    and is summed in fp32 (fp64 for fp64). Merging an empty partial result (lse -inf) returns the other unchanged; two
    empty ones give (0, -inf). Differentiable. Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.

    Raises ``TypeError`` for what is no floating tensor, ``ValueError`` for shapes, devices or layouts that do not fit.
    """
    _check(out_a, lse_a, out_b, lse_b, layout)
    heads_before_rows = out_a.dim() == 4 and layout == "bhsd"
    top = torch.maximum(lse_a, lse_b)
    # A finite stand-in only where both are empty (or a sink of +inf dominates): -inf - (-inf) must not be formed.
    pivot = torch.where(torch.isinf(top), torch.zeros_like(top), top).detach()
    weight_a, weight_b = torch.exp(lse_a - pivot), torch.exp(lse_b - pivot)
    total = weight_a + weight_b
    safe_total = torch.where(total == 0, torch.ones_like(total), total)
    lse = torch.where(total == 0, torch.full_like(total, -torch.inf), pivot + torch.log(safe_total))
    empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
    lse = torch.where(empty_a, lse_b, torch.where(empty_b, lse_a, lse))

    def rows(weights: Tensor) -> Tensor:
        return (weights if heads_before_rows else weights.transpose(-1, -2)).unsqueeze(-1)

    compute = torch.promote_types(out_a.dtype, torch.float32)
    a, b = out_a.to(compute), out_b.to(compute)
    out = a * rows(weight_a / safe_total) + b * rows(weight_b / safe_total)
    out = torch.where(rows(empty_a), b, torch.where(rows(empty_b), a, out))
    out = torch.where(rows(empty_a & empty_b), torch.zeros_like(out), out)
    return out.to(out_a.dtype), lse


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: was {layout!r}, must be one of {LAYOUTS}")
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            was = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: was {was}, must be a floating-point tensor")
        check_device(name, tensor, out_a, "out_a")
    if out_a.dim() not in (3, 4):
        raise ValueError(f"out_a: was of shape {tuple(out_a.shape)}, must have 4 dimensions (3 if packed)")
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b: was of shape {tuple(out_b.shape)}, must be {tuple(out_a.shape)} like out_a")
    *leading, first, second, _ = out_a.shape
    lse_shape = (*leading, first, second) if out_a.dim() == 4 and layout == "bhsd" else (*leading, second, first)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != lse_shape:
            raise ValueError(f"{name}: was of shape {tuple(lse.shape)}, must be {lse_shape} to fit out_a")
