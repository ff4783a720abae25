"""Who watches a call besides its caller: autograd, a transform, a tracer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

Watchers = tuple[bool, bool, bool, bool]
NOBODY: Watchers = False, False, False, False

# Found once, not in every call: on a call's way every lookup counts, most of all when nothing of it is in the caches.
_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack


def watched(q: Tensor, k: Tensor, v: Tensor, operands: tuple[Tensor, ...]) -> Watchers:
    """Who watches a call besides its caller: Problem's ``differentiable``, ``transformed`` and ``traced``; and whether
    torch's own switch asks that the backward be deterministic."""
    differentiable = _grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (operands != () and _any_requires_grad(operands))
    )
    transformed = forward_ad._current_level >= 0 or _functorch_active()
    traced = _dispatch_modes() > 0 or not (type(q) is type(k) is type(v) is Tensor or _plain(q, k, v))
    return differentiable, transformed, traced, differentiable and torch.are_deterministic_algorithms_enabled()


def _any_requires_grad(operands: tuple[Tensor, ...]) -> bool:
    return any(operand.requires_grad for operand in operands)


def _plain(*tensors: Tensor) -> bool:
    return all(type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ for tensor in tensors)
