"""The CUDA backend: CUDA C++ compiled at run time, for NVIDIA's Hopper (compute capability 9.0), whose copy engine and
asynchronous matrix products Triton leaves in part unused.

The kernel is ``forward.cuh`` and the parts beside it. NVRTC compiles it when a call first needs a variant; nothing of
CUDA is loaded before.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from attnworks.backends import BackwardLauncher, Launcher
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.masks import Predicate, describe
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.scores import ScoreTerm

NAME = "cuda"
KERNELS = (*sorted(Path(__file__).parent.glob("*.cuh")), Path(__file__).parent / "source.py")
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = "9.0"
MAX_HEAD_DIM = 256
# So few tiles of rows leave most of the card without work, which many keys make long.
FEW_TILES_SHARE, MANY_KEYS = 4, 4096
# So few rows of a group of query heads are better off as rows of one tile, which loads their keys once. Measured: 55 µs
# in four parts against 32 of Triton's (H200, 32 query heads, 8 KV heads, 1 and 16 queries on 16k keys, 2026-11-30).
FEW_GROUPED_ROWS = 64


@cache
def missing() -> str:
    """Why nothing can be compiled in this process, "" if it can."""
    from attnworks.backends.cuda.compile import library_path

    return "" if library_path() else "NVRTC is not installed (pip package nvidia-cuda-nvrtc, which PyTorch brings)"


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    if not problem.device.startswith("cuda"):
        return Verdict(NAME, (f"tensors are on {problem.device}, it runs on NVIDIA GPUs",))
    reasons = _device_reasons(hardware)
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} (has bfloat16, float16)")
    if problem.form == "decode":
        reasons.append("caches")
    if problem.differentiable:
        reasons.append("an input requires grad, and it has no backward")
    if problem.transformed:
        reasons.append("forward-mode AD or a functorch transform must see torch operations")
    if problem.traced:
        reasons.append("a tracer or a tensor subclass must see torch operations")
    reasons += _mask_reasons(problem) + _score_reasons(problem.scores)
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > MAX_HEAD_DIM:
            reasons.append(f"{name} {getattr(problem, name)} (at most {MAX_HEAD_DIM})")
    if problem.head_dim_v % 8:
        reasons.append(f"head_dim_v {problem.head_dim_v} (a multiple of 8: it writes 16 bytes at a time)")
    return Verdict(NAME, tuple(reasons + _layout_reasons(problem, hardware)))


def _device_reasons(hardware: Hardware) -> list[str]:
    reasons = [missing()] if missing() else []
    if torch.version.hip is not None:
        reasons.append("an AMD GPU, it runs on NVIDIA GPUs")
    elif hardware.capability != CAPABILITY:
        reasons.append(f"compute capability {hardware.capability} (its kernels are for {CAPABILITY})")
    return reasons


def _mask_reasons(problem: Problem) -> list[str]:
    from attnworks.backends.cuda import extended, plans

    if not plans.mapped(problem):
        return []
    if problem.form != "dense":
        return [f"mask {describe(problem.mask)} where each sequence would need a tile map (has causal and window)"]
    if any(isinstance(term, Predicate) and term.expression is None for term in problem.mask):
        return [f"mask {describe(problem.mask)}"]
    bits = extended.most_bits_bytes(problem)
    if bits > extended.MOST_BITS_BYTES:
        return [
            f"mask {describe(problem.mask)}, whose tile map may take {bits} bytes (at most {extended.MOST_BITS_BYTES})"
        ]
    return []


def _score_reasons(scores: tuple[ScoreTerm, ...]) -> list[str]:
    from attnworks.backends.cuda.source import BIAS_ELEMENTS

    kinds = [term.kind for term in scores]
    functions = [term.name for term in scores if term.kind == "function"]
    reasons = [f"score function {name} (has softcap, ALiBi, bias and sink)" for name in functions]
    reasons += [f"more than one {kind}" for kind in ("softcap", "alibi", "bias") if kinds.count(kind) > 1]
    if "softcap" in kinds and any(kind in ("alibi", "bias") for kind in kinds[: kinds.index("softcap")]):
        reasons.append("a softcap after ALiBi or a bias (it caps first)")
    for term in scores:
        if term.kind == "bias" and term.operand and term.operand.dtype not in BIAS_ELEMENTS:
            reasons.append(f"bias of {term.operand.dtype} (has float32, bfloat16, float16)")
    return reasons


def _layout_reasons(problem: Problem, hardware: Hardware) -> list[str]:
    """What of sizes, strides and addresses it can't take."""
    from attnworks.backends.cuda import maps, plans

    p = problem
    reasons = maps.stride_reasons(p)
    if max(p.seq_q, p.seq_kv, p.total_q, p.total_kv) >= plans.FAR:
        reasons.append(f"sequences of {max(p.seq_q, p.seq_kv, p.total_q, p.total_kv)} (less than 2^29)")
    tiles = -(-p.seq_q // 128) * p.batch * p.heads_q
    if tiles >= 2**30:
        reasons.append(f"{tiles} tiles of rows (less than 2^30)")
    few = p.form == "dense" and 0 < tiles * FEW_TILES_SHARE <= hardware.units and p.seq_kv >= MANY_KEYS
    if few and not plans.can_split(p):
        why = "under a tile map" if plans.mapped(p) else "where batch_invariant is asked for"
        reasons.append(
            f"{tiles} tiles of rows for {hardware.units} multiprocessors and {p.seq_kv} keys, which it does not split "
            f"{why}"
        )
    elif few and p.group > 1 and p.seq_q * p.group <= FEW_GROUPED_ROWS:
        reasons.append(
            f"{p.seq_q} queries of {p.group} heads that share {p.seq_kv} keys, which it loads for each of the heads"
        )
    return reasons


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    from attnworks.backends.cuda import plans

    return [plans.plan_for(problem, hardware.units)]


def adapt(problem: Problem, plan: Plan, hardware: Hardware) -> Plan:
    from attnworks.backends.cuda import plans

    return plans.adapt(problem, plan, hardware.units)


def check_plan(problem: Problem, plan: Plan) -> None:
    from attnworks.backends.cuda import plans

    plans.check(problem, plan)


def resources(problem: Problem, plan: Plan) -> dict[str, int]:
    from attnworks.backends.cuda import plans

    return {"shared": plans.variant(problem, plan).shared_bytes}


def prepare(problem: Problem, plan: Plan) -> Launcher:
    from attnworks.backends.cuda import launch

    return launch.prepare(problem, plan)


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher | None:
    raise NotImplementedError("the verdict refuses problems that need a backward")
