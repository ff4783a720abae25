"""The Triton backend: one family of portable GPU kernels, NVIDIA sm_80 and up, AMD, and whatever Triton adds.

Triton's interpreter runs the same kernels on a CPU (``TRITON_INTERPRET=1`` before Triton is imported), which is how
their logic is tested without a GPU; ``auto`` never takes it. Triton itself is imported once a call needs it.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from attnworks import masks
from attnworks.backends import Launcher
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import QUANTISED_DTYPES, Problem

NAME = "triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@cache
def _missing() -> str:
    return "" if find_spec("triton") else "triton is not installed"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    reasons = []
    if _missing():
        reasons.append(_missing())
    on_gpu = problem.device.startswith("cuda")
    if not on_gpu and not (_interpreted() and problem.device.startswith("cpu")):
        reasons.append(f"tensors are on {problem.device}, it runs on GPUs (on a CPU only in Triton's interpreter)")
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} (has float32, bfloat16, float16)")
    if problem.differentiable:
        reasons.append("an input requires grad, and it has no backward yet")
    if problem.traced:
        reasons.append("a tracer or a tensor subclass must see torch operations")
    if not all(isinstance(term, masks.Bounds) for term in problem.mask):
        reasons.append(f"mask {masks.describe(problem.mask)} (has causal and window)")
    reasons += [f"score modifier {kind}" for kind in sorted({t.kind for t in problem.scores} - {"sink"})]
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > MAX_HEAD_DIM:
            reasons.append(f"{name} {getattr(problem, name)} (at most {MAX_HEAD_DIM})")
    return Verdict(NAME, tuple(reasons))
