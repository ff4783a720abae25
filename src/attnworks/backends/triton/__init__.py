"""The Triton backend: one family of portable GPU kernels, NVIDIA sm_80 and up, AMD, and whatever Triton adds.

Triton's interpreter runs the same kernels on a CPU (``TRITON_INTERPRET=1`` before Triton is imported), which is how
their logic is tested without a GPU; ``auto`` never takes it. Triton itself is imported once a call needs it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from attnworks.backends import BackwardLauncher, Launcher
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.masks import Predicate
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.scores import ScoreTerm

NAME = "triton"
KERNELS = tuple(Path(__file__).parent / name for name in ("forward.py", "parts.py"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIMS = {"head_dim": 576, "head_dim_v": 512}  # MLA's
MAX_HEAD_DIM_BACKWARD = 256


@cache
def _missing() -> str:
    return "" if find_spec("triton") else "triton is not installed"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cannot_compile() -> str:
    """Why kernels can't be compiled in this process for any card, "" if they can."""
    if _missing():
        return _missing()
    return "TRITON_INTERPRET=1 makes Triton interpret kernels: run without it to compile them" if _interpreted() else ""


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    reasons = []
    if _missing():
        reasons.append(_missing())
    reasons += _device_reasons(problem, hardware)
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} (has float32, bfloat16, float16)")
    if problem.transformed:
        reasons.append("forward-mode AD or a functorch transform must see torch operations")
    if problem.traced:
        reasons.append("a tracer or a tensor subclass must see torch operations")
    if problem.differentiable and problem.kv_dtype is not None:
        reasons.append(f"an input requires grad, and it has no backward through caches of {problem.kv_dtype}")
    predicates = [term for term in problem.mask if isinstance(term, Predicate)]
    reasons += [f"mask {term.name}: {term.why_not}" for term in predicates if term.function is not None]
    reasons += [f"score modifier {t.name}: {t.why_not}" for t in problem.scores if t.function is not None]
    if problem.differentiable:
        reasons += [
            f"score modifier {term.kind} requires grad" for term in problem.scores if _wants_unknown_gradient(term)
        ]
    for name, most in MAX_DIMS.items():
        limit = MAX_HEAD_DIM_BACKWARD if problem.differentiable else most
        if getattr(problem, name) > limit:
            reasons.append(f"{name} {getattr(problem, name)} (at most {limit})")
    if not reasons:
        from attnworks.backends.triton import plans

        reasons += [reason for reason in (plans.why_none_fits(problem, hardware),) if reason]
    return Verdict(NAME, tuple(reasons))


def _device_reasons(problem: Problem, hardware: Hardware) -> list[str]:
    if problem.device.startswith("cpu") and _interpreted():
        return []
    if not problem.device.startswith("cuda"):
        return [f"tensors are on {problem.device}, it runs on GPUs (on a CPU only in Triton's interpreter)"]
    reasons = []
    capability = tuple(int(part) for part in (hardware.capability or "0.0").split("."))
    if torch.version.hip is None and capability < (8, 0):
        reasons.append(f"compute capability {hardware.capability} (from 8.0: below, Triton uses no tensor cores)")
    elif torch.version.hip is None and problem.kv_dtype == torch.float8_e4m3fn and capability < (8, 9):
        reasons.append(f"caches of {problem.kv_dtype} on compute capability {hardware.capability} (from 8.9)")
    return reasons


def _wants_unknown_gradient(term: ScoreTerm) -> bool:
    """Of a tensor other than a bias or a sink."""
    if term.kind == "alibi":
        return term.operand is not None and term.operand.requires_grad
    return term.expression is not None and term.expression.operands_require_grad


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    from attnworks.backends.triton import plans

    # The first: traffic alone, by which plans are ranked, would prefer large tiles that leave too few registers.
    return plans.candidates(problem, hardware)[:1]


def adapt(problem: Problem, plan: Plan, hardware: Hardware) -> Plan:
    from attnworks.backends.triton import plans

    # Tensors of the same sizes may have strides that a descriptor can't have.
    return replace(plan, isa="") if plan.isa == plans.TMA and not plans.takes_tma(problem) else plan


def check_plan(problem: Problem, plan: Plan) -> None:
    from attnworks.backends.triton import plans

    plans.check(problem, plan)


def resources(problem: Problem, plan: Plan) -> dict[str, int]:
    from attnworks.backends.triton import plans

    return {"shared": plans.shared_bytes(problem, plan)}


def prepare(problem: Problem, plan: Plan) -> Launcher:
    from attnworks.backends.triton import plans

    if plan.schedule in plans.OLDER:
        from attnworks.backends.triton import generations

        return generations.prepare(problem, plan)
    from attnworks.backends.triton import calls

    return calls.prepare(problem, plan)


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher | None:
    from attnworks.backends.triton import gradients

    return gradients.prepare_backward(problem, plan)
