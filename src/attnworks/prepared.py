"""Prepared calls: launchers by the key of everything they depend on, so that a second call of a kind builds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor

from attnworks import dispatch, masks
from attnworks.autograd import Joined
from attnworks.backends import Backend, Launcher
from attnworks.hardware import detect
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem

# Emptied when full rather than evicted one by one: a program that meets this many distinct problems has no working set
# worth an LRU's cost on every hit.
CALLS: dict[Hashable, Launcher] = {}
LIMIT = 4096


def lookup(key: Hashable) -> Launcher | None:
    """The launcher of an earlier call with an equal key."""
    try:
        return CALLS.get(key)
    except TypeError:  # an argument that cannot be hashed is a wrong one: the checks that follow name it
        return None


def prepare(key: Hashable, problem: Problem, backend: str, plan: Plan | None) -> Launcher:
    """Choose backend and plan, prepare the launcher, keep it for the key. Raises what ``dispatch.choose`` raises."""
    chosen, best, verdicts = dispatch.choose(problem, backend, plan)
    if backend == "auto" and plan is None:
        dispatch.warn_if_quadratic(problem, chosen, verdicts)
    launch = joined(problem, chosen, best) if problem.differentiable else chosen.prepare(problem, best)
    unaligned = dataclasses.replace(problem, aligned=False)
    if not chosen.verdict(unaligned, detect(problem.device)).supported:
        launch = _WhereAligned(launch, unaligned, backend, plan)
    # A function that is called would be kept alive, with all it captured, for a key that a fresh one never meets again.
    if not _holds_functions(problem):
        if len(CALLS) >= LIMIT:
            CALLS.clear()
        CALLS[key] = launch
    return launch


class _WhereAligned:
    """The launcher of a backend that needs aligned addresses, which are in no key. A call whose tensors lie elsewhere
    gets what is chosen for a problem that says so: another backend, or the refusal of the one that was named."""

    def __init__(self, launch: Launcher, unaligned: Problem, backend: str, plan: Plan | None) -> None:
        self._launch, self._choice = launch, (unaligned, backend, plan)
        self._elsewhere: Launcher | None = None

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        if (o.q.data_ptr() | o.k.data_ptr() | o.v.data_ptr()) & 15 == 0:
            return self._launch(o)
        if self._elsewhere is None:
            problem, backend, plan = self._choice
            chosen, best, _ = dispatch.choose(problem, backend, plan)
            self._elsewhere = chosen.prepare(problem, best)
        return self._elsewhere(o)


def joined(problem: Problem, backend: Backend, plan: Plan) -> Launcher:
    """The launcher of a differentiable problem, joined to the backend's own backward where it has one."""
    backward = None if problem.transformed else backend.prepare_backward(problem, plan)
    if backward is None:
        return backend.prepare(problem, plan)
    forward = backend.prepare(dataclasses.replace(problem, return_lse=True), plan)
    return Joined(problem, backend, plan, forward, backward)


def _holds_functions(problem: Problem) -> bool:
    return any(isinstance(term, masks.Predicate) and term.function is not None for term in problem.mask) or any(
        term.function is not None for term in problem.scores
    )


# ---- what a key is made of -------------------------------------------------------------------------------------------


def signature(*tensors: Tensor | None) -> tuple[Hashable, ...] | None:
    """What the checks of shapes, dtypes and devices look at; None if something is no tensor, which they will name."""
    try:
        return tuple(
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.layout) for t in tensors
        )
    except (AttributeError, RuntimeError):
        return None


Watchers = tuple[bool, bool, bool, bool]


def watched(q: Tensor, k: Tensor, v: Tensor, operands: tuple[Tensor, ...]) -> Watchers:
    """Who watches a call besides its caller: Problem's ``differentiable``, ``transformed`` and ``traced``; and whether
    torch's own switch asks that the backward be deterministic."""
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(operand.requires_grad for operand in operands)
    )
    transformed = torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
    plain = Tensor.__torch_dispatch__
    traced = (
        torch._C._len_torch_dispatch_stack() > 0
        or type(q).__torch_dispatch__ is not plain
        or type(k).__torch_dispatch__ is not plain
        or type(v).__torch_dispatch__ is not plain
    )
    return differentiable, transformed, traced, differentiable and torch.are_deterministic_algorithms_enabled()
