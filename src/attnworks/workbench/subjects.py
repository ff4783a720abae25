"""Subjects: what is being verified. A backend under a plan, or anything else that answers the same calls.

A subject is called with a case's ``Inputs`` and returns what the user's function returns. Gradients are asked of it by
autograd, so a subject has no method for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

import attnworks
from attnworks import dispatch
from attnworks.backends import Backend, cpu, reference
from attnworks.hardware import detect
from attnworks.plan import Plan
from attnworks.workbench.inputs import Inputs

Outcome = tuple[Tensor, Tensor | None]


class Subject(Protocol):
    """Something that computes attention."""

    @property
    def name(self) -> str: ...

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        """Every reason why it does not run the case; empty if it does."""

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        """(out, lse) of the case, lse None unless asked for. ``options``: ``batch_invariant`` and ``plan``."""


@dataclass(frozen=True)
class BackendSubject:
    """One backend of attnworks, through the public functions. ``change`` turns its preferred plan into the one to
    verify (None: whatever the backend picks by itself). ``only_fp32``: its 16-bit results are not meant to be
    precise. ``linear_memory``: it claims that its memory grows with the length, not with its square."""

    name: str
    backend: Backend
    change: Callable[[Plan], Plan | None] | None = None
    only_fp32: bool = False
    linear_memory: bool = False

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        problem = inputs.problem(differentiable=differentiable)
        found = self.backend.verdict(problem, detect(problem.device)).reasons
        if self.only_fp32 and problem.dtype.itemsize < 4:
            return (
                *found,
                "it rounds S to the input dtype, which is not the precision that budgets are made for",
            )
        if found or self.change is None:
            return found
        plan = self.plan(inputs, differentiable)
        if plan is None:
            return ("the plan is the one verified without it",)
        try:
            self.backend.check_plan(problem, plan)
        except ValueError as error:
            return (str(error),)
        return ()

    def plan(self, inputs: Inputs, differentiable: bool = False) -> Plan | None:
        """The plan to verify the case under."""
        problem = inputs.problem(differentiable=differentiable)
        preferred = self.backend.candidates(problem, detect(problem.device))[0]
        return preferred if self.change is None else self.change(preferred)

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        call: Any = {
            "dense": attnworks.attention,
            "varlen": attnworks.attention_varlen,
            "decode": attnworks.attention_decode,
        }[inputs.case.form]
        if self.change is not None and "plan" not in options:
            options["plan"] = self.plan(inputs, inputs.q.requires_grad)
        result = call(**inputs.kwargs(), backend=self.backend.NAME, return_lse=return_lse, **options)
        return result if return_lse else (result, None)


def backend_subjects(*, quick: bool = False) -> tuple[BackendSubject, ...]:
    """Every backend as it is, and under the plans that its own choice would not reach on this machine: the CPU backend
    with each other instruction set, with small tiles and with short splits; the reference's other schedules (they are
    slow, so not if ``quick``)."""
    found = [BackendSubject(backend.NAME, backend, linear_memory=backend is cpu) for backend in dispatch.BACKENDS]
    found += [BackendSubject(f"cpu, {isa}", cpu, _with(isa=isa)) for isa in cpu.isas()[1:]]
    if cpu.isas():
        found.append(BackendSubject("cpu, small tiles", cpu, _small_tiles))
        found.append(BackendSubject("cpu, short splits", cpu, lambda plan: Plan("cpu", "split_kv", split_kv=48)))
    for schedule in () if quick else ("standard", "kv_outer", "q_outer"):
        tiles = {} if schedule == "standard" else {"tile_q": 40, "tile_kv": 56}
        change = _with(schedule=schedule, **tiles)
        found.append(BackendSubject(f"reference, {schedule}", reference, change, only_fp32=schedule == "standard"))
    return tuple(found)


def _with(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **fields)


def _small_tiles(plan: Plan) -> Plan | None:
    return replace(plan, tile_q=20, tile_kv=40) if plan.schedule == "tiled" else None
