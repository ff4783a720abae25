"""The reference backend: attention written to be read and to be trusted, in fp64 for fp64 inputs.

Schedules, each in a file of its own:

- "eager" (the default): all scores written out in fp32, differentiable by autograd to any order. It can do all of the
  contract and is the oracle that the others are judged by.
- "standard": the baseline everybody compares with, S and P written out in the input dtype.
- "kv_outer", "q_outer": the online softmax in the loop orders of FlashAttention-1 and FlashAttention-2, with the tiled
  backward that recomputes P from the saved LSE. ``docs/maths.md`` derives them.

The schedules are imported once one is run: most programs never do, and all of them import this package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attnworks.backends import BackwardLauncher, Gradients, Launcher, Needs
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem

NAME = "reference"
KERNELS: tuple[Path, ...] = ()

WRITTEN_OUT = ("eager", "standard")
TILED = ("kv_outer", "q_outer")
SCHEDULES = (*WRITTEN_OUT, *TILED)


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    return Verdict(NAME)


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    """Only the oracle: the other schedules are run by those who ask for them by name."""
    return [Plan(NAME, "eager")]


def adapt(problem: Problem, plan: Plan, hardware: Hardware) -> Plan:
    return plan


def check_plan(problem: Problem, plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be one of {SCHEDULES} on backend 'reference'")
    for name in ("split_kv", "isa", "warps", "stages", "visit_all"):
        if getattr(plan, name):
            raise ValueError(f"plan {name}: was {getattr(plan, name)!r}, but backend 'reference' has no such choice")
    for name in ("tile_q", "tile_kv"):
        size = getattr(plan, name)
        if plan.schedule in WRITTEN_OUT and size:
            raise ValueError(f"plan {name}: was {size}, must be 0 for schedule {plan.schedule!r}, which has no tiles")
        if plan.schedule in TILED and not size:
            raise ValueError(f"plan {name}: was 0, must be >= 1 for schedule {plan.schedule!r}")
    if plan.schedule in TILED and problem.transformed:
        raise ValueError(
            f"plan schedule: was {plan.schedule!r}, must be one of {WRITTEN_OUT} under forward-mode AD or a functorch "
            "transform: the tiled backward is a first derivative in reverse mode"
        )
    if plan.schedule in TILED and problem.differentiable:
        for term in problem.scores:
            if term.function is not None:
                raise ValueError(
                    f"plan schedule: was {plan.schedule!r}, must be one of {WRITTEN_OUT} for score function "
                    f"{term.name}: the tiled backward does not know its derivative ({term.why_not})"
                )


def resources(problem: Problem, plan: Plan) -> dict[str, int]:
    if plan.schedule in WRITTEN_OUT:
        return {}
    from attnworks.backends.reference.tiles import tile_bytes

    return {"tiles": tile_bytes(problem, plan.tile_q, plan.tile_kv)}


def prepare(problem: Problem, plan: Plan) -> Launcher:
    from attnworks.backends.reference import eager, forms, online, standard

    if plan.schedule in WRITTEN_OUT:
        core: forms.Core = eager.attention if plan.schedule == "eager" else standard.attention
    else:
        core = partial(online.LOOPS[plan.schedule], tile_q=plan.tile_q, tile_kv=plan.tile_kv)
    form, plain = forms.FORMS[problem.form], _without_autocast(problem)

    def launch(operands: Operands) -> tuple[Tensor, Tensor | None]:
        with plain():
            out, lse = form(core, problem, operands)
        return out, lse if problem.return_lse else None

    return launch


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher | None:
    """The tiled schedules' own; the others are differentiated by autograd."""
    if plan.schedule in WRITTEN_OUT:
        return None
    from attnworks.backends.reference.gradients import gradients

    plain = _without_autocast(problem)

    def launch(o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs) -> Gradients:
        with plain():
            return gradients(problem, o, out, lse, d_out, d_lse, needs, tile_q=plan.tile_q, tile_kv=plan.tile_kv)

    return launch


def _without_autocast(problem: Problem) -> Callable[[], AbstractContextManager[object]]:
    """Autocast would turn the oracle's fp32 products into 16-bit ones; a device such as "meta" has none."""
    device = torch.device(problem.device).type
    return partial(torch.autocast, device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext
