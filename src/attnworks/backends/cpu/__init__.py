"""The CPU backend: Plans for the native C++ kernels, which ``attnworks._native`` holds.

Schedules: "tiled" (Q outer, KV inner, one task for tile_q rows of a head) and "split_kv" (few queries over many keys:
partial results every split_kv keys, merged by their LSE). Both are bitwise independent of the thread count. So is the
backward: one task for each tile of keys, which takes its turn where it adds to dQ.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnworks.backends import BackwardLauncher, Launcher, ReadsLengths
from attnworks.backends.cpu.modifiers import DTYPES, Modifiers, refusals
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.memory import empty_cpu
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, contiguous_strides
from attnworks.scores import ScoreTerm

NAME = "cpu"
ABI = 4  # of the native extension this file calls

MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512

# (tile_q, tile_kv). Measured interleaved on AVX2 (Zen 3): 96 x 128, 192 x 256 and 144 x 192 were 0 to 10 % slower for
# head_dim 64, 128 and 256. Other instruction sets are not tuned.
BACKWARD_TILES = 96, 256

# Few query rows for each KV head: reading the cache bounds the time, so the threads share it instead of the rows, and
# nothing is packed for rows that are not there (Zen 3, 4 rows in bf16: 0.4 ms against 0.6 at 256 keys, 0.5 against 1.5
# at 1024).
SPLIT_KV_MAX_ROWS = 16
SPLIT_KV_MIN_KEYS = 256
TILED_MIN_LENGTH = 32  # of fp32 and fp16: AMX instead of AVX-512 in what is no decode
TILED_MIN_ROWS = 4  # of bf16 that share a KV head: AMX instead of AVX-512 in decode


def _load() -> tuple[ModuleType | None, str]:
    """The native extension, or None and the reason why it cannot be used."""
    try:
        native = importlib.import_module("attnworks._native")
    except ImportError as error:
        return None, f"the native extension is not built ({error})"
    if native.ABI != ABI:
        return None, f"the native extension has ABI {native.ABI}, must have {ABI}: rebuild it"
    return native, ""


_native, _why_not = _load()
# The extension itself: its sources do not come with it.
KERNELS: tuple[Path, ...] = (Path(str(_native.__file__)),) if _native else ()


def isas() -> tuple[str, ...]:
    """Instruction sets the native kernels can use on this machine, best first; empty if the extension is missing."""
    return tuple(_native.supported_isas()) if _native else ()


def largest_tiles() -> tuple[int, int]:
    """(rows, keys) of the largest tiles; the native kernels cut larger ones to these."""
    assert _native is not None, "verdict() refuses before"
    return int(_native.MAX_TILE_Q), int(_native.MAX_TILE_KV)


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    reasons = []
    if not problem.device.startswith("cpu"):
        reasons.append(f"tensors are on {problem.device}, it runs on the CPU")
    if _native is None:
        reasons.append(_why_not)
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} (has float32, bfloat16, float16)")
    if problem.kv_dtype is not None:
        reasons.append(f"caches of {problem.kv_dtype}")
    if problem.differentiable and problem.form == "decode":
        reasons.append("an input requires grad, and it has no backward through caches")
    elif problem.differentiable:
        reasons += [
            f"score modifier {term.kind} requires grad" for term in problem.scores if _slopes_require_grad(term)
        ]
    if problem.transformed:
        reasons.append("forward-mode AD or a functorch transform must see torch operations")
    if problem.traced:
        reasons.append("a tracer or a tensor subclass must see torch operations")
    reasons += refusals(problem)
    if problem.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {problem.head_dim} (at most {MAX_HEAD_DIM})")
    if problem.head_dim_v > MAX_HEAD_DIM_V:
        reasons.append(f"head_dim_v {problem.head_dim_v} (at most {MAX_HEAD_DIM_V})")
    return Verdict(NAME, tuple(reasons))


def _slopes_require_grad(term: ScoreTerm) -> bool:
    return term.kind == "alibi" and term.operand is not None and term.operand.requires_grad


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    isa = isas()[0] if isas() else ""
    if problem.form == "decode" or _few_rows(problem):
        if isa == "amx_bf16" and not _worth_tiles(problem):
            isa = "avx512"  # where there is AMX, dot products of pairs run at half the FMA rate
        return [Plan(NAME, "split_kv", split_kv=_split_kv(problem), isa=isa)]
    if isa == "amx_bf16" and _short(problem):
        isa = "avx512"
    tile_q, tile_kv = _tiles(problem, isa)
    return [Plan(NAME, "tiled", tile_q=tile_q, tile_kv=tile_kv, isa=isa)]


def _worth_tiles(problem: Problem) -> bool:
    """Whether so many rows share a KV head that arithmetic bounds their decode, which tiles of bf16 do faster.

    Measured interleaved against AVX-512 (Xeon with AMX, head_dim 128, two threads): with 4 rows tiles are 3 to 8 %
    faster on dense caches of 4k to 64k keys, level with it on pages; with 8 as fast or faster everywhere, with 16 by a
    third to a half.
    """
    return problem.dtype == torch.bfloat16 and problem.seq_q * problem.group >= TILED_MIN_ROWS


def _short(problem: Problem) -> bool:
    """Whether a tile of AMX would be mostly empty while numbers that aren't bf16 are still to be taken apart. Measured
    interleaved against AVX-512 (Xeon with AMX, 1 and 8 heads of 64 and 128): 16 rows of fp32 and fp16 take 10 to 45 %
    longer in tiles, 32 the same, more than that less; of bf16 none takes longer."""
    return problem.dtype != torch.bfloat16 and min(problem.seq_q, problem.seq_kv) < TILED_MIN_LENGTH


def _tiles(problem: Problem, isa: str) -> tuple[int, int]:
    """(tile_q, tile_kv). Many rows share the cost of packing a tile of K and V, which weighs more the faster the
    products are; the native scheduler takes fewer where threads would be idle. A packed tile must leave room in L2.

    Measured interleaved against SDPA, N 1k to 8k, 2 threads: AVX2 (Zen 3, 512 KiB of L2) was best at 768 x 256 for
    head_dim 64, 384 x 256 for 128 and 256; AVX-512 (Xeon, 2 MiB) at 384 x 512. AMX (Xeon, 2 MiB): 1024 x 256 in bf16 is
    1 to 5 % faster than 768, x 384 and x 512 are not; of wider heads and other dtypes 768 (384: 4 to 14 % slower for
    256). Wider heads than 256 are not tuned.
    """
    width = problem.head_dim + problem.head_dim_v
    if isa == "amx_bf16":
        if width <= 256:
            return 1024 if problem.dtype == torch.bfloat16 else 768, 256
        return 768 if width <= 512 else 384, 256
    if isa.startswith("avx512"):
        return 384, 512 if width <= 256 else 256
    return 768 if width <= 128 else 384, 256 if width <= 512 else 128


def _few_rows(problem: Problem) -> bool:
    return (
        problem.form == "dense"
        and problem.seq_q * problem.group <= SPLIT_KV_MAX_ROWS
        and problem.seq_kv >= SPLIT_KV_MIN_KEYS
    )


def _split_kv(problem: Problem) -> int:
    """Keys of a task, a power of two: as many as leave a sequence 16 tasks, from 256 to 1024. Long tasks save up to
    10 % (Zen 3, 16k keys: fetching ahead starts anew in every task), short ones keep threads busy. Where the heads of a
    key lie side by side a task goes over all of them; elsewhere each head is a task of its own."""
    _, head, row = problem.k_strides
    heads_apart = problem.heads_kv if head > row else 1
    wanted = problem.seq_kv * heads_apart // 16
    return min(max(1 << wanted.bit_length() >> 1, 256), 1024)


def adapt(problem: Problem, plan: Plan, hardware: Hardware) -> Plan:
    return plan


def check_plan(problem: Problem, plan: Plan) -> None:
    if plan.schedule not in ("tiled", "split_kv"):
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be 'tiled' or 'split_kv' on backend 'cpu'")
    if plan.isa and plan.isa not in isas():
        raise ValueError(f"plan isa: was {plan.isa!r}, must be one of {isas()} on this machine")
    for name in ("warps", "stages", *(("split_kv",) if plan.schedule == "tiled" else ("tile_q", "tile_kv"))):
        size = getattr(plan, name)
        if size:
            raise ValueError(
                f"plan {name}: was {size}, must be 0: {plan.schedule!r} of backend 'cpu' has no such choice"
            )
    if plan.schedule == "tiled":
        if problem.form == "decode":
            raise ValueError("plan schedule: was 'tiled', must be 'split_kv' for a cache")
        if plan.tile_q < 1 or plan.tile_kv < 1:
            raise ValueError(f"plan tile_q, tile_kv: were {plan.tile_q}, {plan.tile_kv}, must be >= 1")
    else:
        if plan.visit_all:
            raise ValueError("plan visit_all: was True, must be False for schedule 'split_kv'")
        if problem.form == "varlen":
            raise ValueError("plan schedule: was 'split_kv', must be 'tiled' for packed sequences")
        if plan.split_kv < 1:
            raise ValueError(f"plan split_kv: was {plan.split_kv}, must be >= 1")


def resources(problem: Problem, plan: Plan) -> dict[str, int]:
    """Scratch that each thread keeps in its caches."""
    if not problem.heads_kv:
        return {"scratch": 0}
    return {"scratch": int(_kernel(problem, plan, Modifiers(problem, _native)).scratch_bytes())}


def prepare(problem: Problem, plan: Plan) -> Launcher:
    if not problem.heads_kv:
        return _empty_launcher(problem)
    modifiers = Modifiers(problem, _native)
    kernel = _kernel(problem, plan, modifiers)
    if problem.form == "varlen":
        return _varlen_launcher(problem, kernel, modifiers)
    if problem.form == "decode":
        return _DecodeLauncher(problem, kernel, modifiers)
    if plan.schedule == "split_kv":
        return _split_launcher(problem, kernel, modifiers)
    return _dense_launcher(problem, kernel, modifiers)


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher:
    """The backward has tiles of its own (``BACKWARD_TILES``); of the forward's plan it takes the instruction set."""
    from attnworks.backends.cpu.gradients import Backward  # with the first call whose inputs require grad

    isa = plan.isa or isas()[0]
    tile_q, tile_kv = BACKWARD_TILES
    tiled = Plan(NAME, "tiled", tile_q=tile_q, tile_kv=tile_kv, isa=isa)
    modifiers = Modifiers(problem, _native)
    forward = _kernel(problem, tiled, modifiers) if problem.heads_kv else None
    return Backward(problem, modifiers, _native, forward).run


def _kernel(problem: Problem, plan: Plan, modifiers: Modifiers) -> Any:
    """The native kernel object with everything but the pointers filled in."""
    assert _native is not None, "verdict() refuses before"
    p = problem
    out_strides, lse_strides = p.result_strides()
    strides = (p.q_strides, p.k_strides, p.v_strides, out_strides, lse_strides)
    isa, dtype = plan.isa or isas()[0], DTYPES[p.dtype]
    if plan.schedule == "split_kv":
        # fmt: off
        made = _native.Decode(isa, dtype, p.batch, p.seq_q, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, *strides,
                              p.seq_kv, p.page_size, p.scale, *modifiers.bounds, plan.split_kv)
        # fmt: on
        return modifiers.modify(made)
    # fmt: off
    made = _native.Forward(isa, dtype, p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv, p.head_dim, p.head_dim_v,
                           *strides, p.scale, *modifiers.bounds, plan.tile_q, plan.tile_kv)
    # fmt: on
    if plan.visit_all:
        made.visit_all()
    return modifiers.modify(made)


def _empty_launcher(problem: Problem) -> Launcher:
    """Without heads there is nothing to compute; the native kernels divide by heads_kv."""
    out_shape, lse_shape = problem.result_shapes()

    def launch(o: Operands) -> tuple[Tensor, Tensor | None]:
        lse = torch.empty(lse_shape, dtype=torch.float32, device="cpu") if problem.return_lse else None
        return torch.empty(out_shape, dtype=problem.dtype, device="cpu"), lse

    return launch


def _addresses(o: Operands) -> tuple[int, int, int]:
    q, k, v = o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr()
    # 0 where a tensor is empty; or torch left out its memory, as it does where forward AD meets 0.
    if not (q and k and v):
        for name, tensor in (("q", o.q), ("k", o.k), ("v", o.v)):
            if tensor._is_zerotensor():
                raise ValueError(f"{name}: was a zero tensor without memory, must have memory: clone() it")
    return q, k, v


def _dense_launcher(problem: Problem, kernel: Any, modifiers: Modifiers) -> Launcher:
    out_shape, lse_shape = problem.result_shapes()
    out_strides, lse_strides = contiguous_strides(out_shape), contiguous_strides(lse_shape)
    dtype, return_lse, threads = problem.dtype, problem.return_lse, torch.get_num_threads

    def launch(o: Operands) -> tuple[Tensor, Tensor | None]:
        out = empty_cpu(out_shape, out_strides, dtype)
        lse = empty_cpu(lse_shape, lse_strides, torch.float32) if return_lse else None
        lse_pointer = 0 if lse is None else lse.data_ptr()
        reads, _alive = modifiers.operands(o)
        kernel(*_addresses(o), out.data_ptr(), lse_pointer, threads(), reads)
        return out, lse

    return launch


def _split_launcher(problem: Problem, kernel: Any, modifiers: Modifiers) -> Launcher:
    """Dense with few query rows: every sequence is a cache filled to the end."""
    run = _DecodeLauncher(problem, kernel, modifiers)
    lens = torch.full((problem.batch,), problem.seq_kv, dtype=torch.int64, device="cpu")

    def launch(o: Operands) -> tuple[Tensor, Tensor | None]:
        o.kv_lens = lens
        return run(o)

    return launch


class _DecodeLauncher(ReadsLengths):
    def __init__(self, problem: Problem, kernel: Any, modifiers: Modifiers) -> None:
        self._out_shape, self._lse_shape = problem.result_shapes()
        self._out_strides, self._lse_strides = map(contiguous_strides, (self._out_shape, self._lse_shape))
        self._dtype, self._return_lse = problem.dtype, problem.return_lse
        self._kernel, self._modifiers = kernel, modifiers

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        assert o.kv_lens is not None
        out = empty_cpu(self._out_shape, self._out_strides, self._dtype)
        lse = empty_cpu(self._lse_shape, self._lse_strides, torch.float32) if self._return_lse else None
        lse_pointer = 0 if lse is None else lse.data_ptr()
        reads, _alive = self._modifiers.operands(o)
        table = (0, 0) if o.page_table is None else (o.page_table.data_ptr(), o.page_table.stride(0))
        lens, threads = o.kv_lens.data_ptr(), torch.get_num_threads()
        self._kernel(*_addresses(o), out.data_ptr(), lse_pointer, lens, *table, threads, reads)
        return out, lse


def _varlen_launcher(problem: Problem, kernel: Any, modifiers: Modifiers) -> Launcher:
    out_shape, lse_shape = problem.result_shapes()

    def launch(o: Operands) -> tuple[Tensor, Tensor | None]:
        assert o.cu_seqlens_q is not None and o.cu_seqlens_kv is not None
        out = torch.empty(out_shape, dtype=problem.dtype, device="cpu")
        lse = torch.empty(lse_shape, dtype=torch.float32, device="cpu") if problem.return_lse else None
        used = int(o.cu_seqlens_q[-1])
        if used < problem.total_q:
            out[used:] = 0
            if lse is not None:
                lse[:, used:] = -math.inf
        lse_pointer = 0 if lse is None else lse.data_ptr()
        reads, _alive = modifiers.operands(o)
        # fmt: off
        kernel.run_varlen(o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr(), out.data_ptr(), lse_pointer,
                          o.cu_seqlens_q.data_ptr(), o.cu_seqlens_kv.data_ptr(), torch.get_num_threads(), reads)
        # fmt: on
        return out, lse

    return launch
