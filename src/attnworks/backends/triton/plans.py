"""Tiles, warps and pipeline depth of the Triton kernels, and the reasons for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from attnworks.hardware import Hardware
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Problem

NAME = "triton"

# Schedules kept for comparison: standard attention and FlashAttention-1; "q_outer" is FlashAttention-2's.
OLDER = ("standard", "kv_outer")
# FlashAttention-2's with the query heads of a group as rows of one tile; "split_kv" also shares the keys out.
GROUPED = ("grouped", "split_kv")
SCHEDULES = ("q_outer", *GROUPED, *OLDER)

# Query rows for each KV head up to which reading the keys bounds the time: the heads of a group become rows of one
# tile, and programs share the keys out among them.
GROUPED_MAX_ROWS = 64
SPLIT_MIN_KEYS = 512
MAX_BLOCK = 512
MAX_SPLITS = 128

# Programs for each multiprocessor that a split should leave: two run at a time, and a few rounds even out.
SPLIT_PROGRAMS_PER_UNIT = 4

# isa of a plan: tiles come through tensor descriptors, that is by the copy engine of NVIDIA's cards from 9.0.
TMA = "tma"
# From which they do: a call takes up to 30 microseconds more of its host, which a tenth of a millisecond on the card
# hides; shorter loops were not measured.
TMA_MIN_FLOPS, TMA_MIN_LENGTH = 4e10, 1024
ALIGNMENT = 16  # bytes: of a described tensor's address and of its strides


def block(dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to on chip."""
    return max(16, 1 << (dim - 1).bit_length())


def columns(head_dim: int) -> tuple[int, int]:
    """How many columns of Q and K are held in one block, and how many in a second: MLA's 576 as 512 and 64."""
    first = min(head_dim, MAX_BLOCK)
    return first, head_dim - first


def padded(head_dim: int) -> int:
    """The columns of Q and K as they lie on chip."""
    first, rest = columns(head_dim)
    return block(first) + (block(rest) if rest else 0)


def few_rows(problem: Problem) -> bool:
    """Whether the query heads of a group become rows of one tile."""
    rows = problem.seq_q * problem.group
    return problem.form == "decode" or (
        problem.form == "dense" and rows <= GROUPED_MAX_ROWS and problem.seq_kv >= SPLIT_MIN_KEYS
    )


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    """Forward plans that fit the card's shared memory, the preferred one first; none where none fits."""
    listed = possible(problem, hardware)
    limit = hardware.block_bytes
    return [plan for plan in listed if limit is None or shared_bytes(problem, plan) <= limit]


def possible(problem: Problem, hardware: Hardware) -> list[Plan]:
    """Forward plans whatever shared memory they take, the last one the least."""
    if few_rows(problem):
        return _split_plans(problem, hardware)
    # H200: 128 columns gain 2 to 6 % but for full attention from 4k on, which stays as it is; 64 columns lose 3 to 9 %.
    wide = 64 < max(problem.head_dim, problem.head_dim_v) <= 128
    isa = TMA if wide and copies_tiles(problem, hardware) else ""
    return [
        Plan(
            NAME, "grouped" if packs_heads(problem, tile_q) else "q_outer", tile_q, tile_kv, isa=isa, warps=w, stages=s
        )
        for tile_q, tile_kv, w, s in _tiles(problem)
    ]


def copies_tiles(problem: Problem, hardware: Hardware) -> bool:
    """Whether the card has a copy engine, and the problem is large enough to use it and can."""
    p = problem
    major = re.match(r"(\d+)\.", hardware.capability or "")
    has_engine = torch.version.hip is None and major is not None and int(major[1]) >= 9
    flops = 2.0 * p.batch * p.heads_q * p.seq_q * p.seq_kv * (p.head_dim + p.head_dim_v)
    worth = min(p.seq_q, p.seq_kv) >= TMA_MIN_LENGTH and flops >= TMA_MIN_FLOPS
    return has_engine and worth and takes_tma(p)


def takes_tma(problem: Problem) -> bool:
    """Whether K and V can be read through tensor descriptors. Of packed sequences and caches they would read the rows
    past a sequence's end as well, whatever those hold."""
    p = problem
    if p.form != "dense" or p.dtype == torch.float32 or max(p.head_dim, p.head_dim_v) > 256:
        return False
    shape = (p.batch, p.heads_kv, p.seq_kv)
    return all(describable(p.element_size, shape, strides) for strides in (p.k_strides, p.v_strides))


def describable(itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor descriptor can have these dimensions beside the last one; ``itemsize`` in bytes."""
    moving = [stride * itemsize for size, stride in zip(shape, strides, strict=True) if size > 1]
    return 0 not in shape and all(0 < stride < 2**40 and stride % ALIGNMENT == 0 for stride in moving)


def packs_heads(problem: Problem, tile_q: int) -> bool:
    """Whether short sequences fill tiles so badly that the query heads of a group, as rows of one tile, take at most
    three quarters as many. A mask by tiles has a map for each head, or would be evaluated in every tile."""
    p = problem
    rows = math.ceil(p.total_q / max(p.batch, 1)) if p.form == "varlen" else p.seq_q
    together, alone = math.ceil(rows * p.group / tile_q), p.group * math.ceil(rows / tile_q)
    return 4 * together <= 3 * alone and all(isinstance(term, Bounds) for term in p.mask) and alone > 0


def _tiles(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(tile_q, tile_kv, warps, stages), the preferred one first.

    H200, bf16 (docs/results): 64 x 64 with 4 warps and 3 stages was best or near it for head dims 64 and 128, causal or
    not. Two such programs share a multiprocessor, so that one's softmax runs beside the other's products; of 128 x 128
    with 8 warps there is one at a time. Tile pairs that need more registers than there are (255 a thread) spill.
    """
    width = max(padded(problem.head_dim), block(problem.head_dim_v))
    if problem.dtype == torch.float32:  # products without tensor cores, whose operands live in registers
        return [(32, 32, 4, 2)] if width <= 128 else [(16, 32, 4, 1), (16, 16, 4, 1)]
    if width <= 128:
        return [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2)]
    if width <= 256:
        return [(64, 64, 8, 2), (128, 64, 8, 2), (64, 32, 4, 2)]
    return [(32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1)]


def register_limit(problem: Problem, plan: Plan) -> dict[str, int]:
    """Launch options that keep four programs of four warps on a multiprocessor (65,536 registers) where a narrow head
    needs hardly more than a quarter of them: left alone the compiler takes 168, which leaves room for three. NVIDIA's
    alone."""
    if torch.version.hip is not None:
        return {}
    narrow = max(block(problem.head_dim), block(problem.head_dim_v)) <= 64
    plain = not problem.scores and problem.dtype != torch.float32
    return {"maxnreg": 128} if narrow and plain and plan.warps == 4 and plan.tile_q * plan.tile_kv <= 64 * 64 else {}


def keeps_maximum(problem: Problem, plan: Plan) -> bool:
    """Whether the first tile's maximum serves for all (``attend_with_one_maximum``). Few queries read memory, which
    hides the search for one, and splits are short. Times as fast with it (H200, bf16, 2026-12-01): D=128 at 512, 1k,
    4k, 16k 1.09 1.10 1.12 1.16, causal and a window 1.08; D=64 at 512, 1k, 4k 1.03 1.09 1.12 to 1.16, causal 1.16, a
    window 1.07. On AMD it was not measured, and takes registers that there are not (gfx1100: 5 kB spilled for 0.4)."""
    return torch.version.hip is None and problem.form != "decode" and not plan.split_kv


def holds_q(problem: Problem, plan: Plan, capability: tuple[int, int]) -> bool:
    """Whether Q stays in registers, not in shared memory, as an operand of Hopper's matrix products. A product of 64
    rows and 64 keys reads as many bytes of Q as of K there: without them a KV tile of D=128 takes 512 cycles of the
    shared memory (copies 256, K 128, V 128) where it took 640, while the products' own are 512. Times as fast (H200,
    bf16, 2026-12-01): D=128 without a mask at 1k, 4k, 16k 1.01 1.03 1.04; under a causal one 0.99 1.01 0.98, a window
    0.98, documents 0.98, as the registers are needed. With tiles of 128 rows the products wait for each other; D=64,
    whose exponentials are the limit, 0.92, with more registers 0.88."""
    plain = not problem.mask and not problem.scores and problem.dtype != torch.float32
    hopper = torch.version.hip is None and capability[0] == 9
    return hopper and plain and block(problem.head_dim) == 128 and plan.isa == TMA and plan.tile_q == 64


def generation(problem: Problem, schedule: str) -> Plan:
    """The plan by which ``attnworks generations`` shows a schedule of ``OLDER`` or "q_outer"."""
    if schedule == "q_outer":
        tile_q, tile_kv, warps, stages = _tiles(problem)[0]
        return Plan(NAME, schedule, tile_q, tile_kv, warps=warps, stages=stages)
    if problem.dtype == torch.float32:
        return Plan(NAME, schedule, 32, 32, warps=4, stages=1)
    width = max(block(problem.head_dim), block(problem.head_dim_v))
    if width > 128:
        return Plan(NAME, schedule, 32, 32, warps=8, stages=1)
    if schedule == "standard":
        return Plan(NAME, schedule, 128, 64, warps=4, stages=3)
    # The larger the KV tile, the fewer the passes over O, m and l.
    return Plan(NAME, schedule, 64, 128, warps=8, stages=2)


def _split_plans(problem: Problem, hardware: Hardware) -> list[Plan]:
    """A tile of all rows of a KV head, and as many keys to a program as leave the card full."""
    rows = max(problem.seq_q * problem.group, 1)
    found = []
    for most_rows, tile_kv, stages in _split_tiles(problem):
        tile_q = min(max(16, 1 << (rows - 1).bit_length()), most_rows)
        # Of wide heads O alone takes 256 registers a thread in four warps.
        warps = 8 if tile_q > 16 and block(problem.head_dim_v) > 256 and problem.dtype != torch.float32 else 4
        programs = max(problem.batch * problem.heads_kv * math.ceil(rows / tile_q), 1)
        wanted = max(1, SPLIT_PROGRAMS_PER_UNIT * max(hardware.units, 1) // programs)
        splits = min(wanted, MAX_SPLITS, math.ceil(problem.seq_kv / SPLIT_MIN_KEYS))
        split_kv = math.ceil(math.ceil(problem.seq_kv / max(splits, 1)) / tile_kv) * tile_kv
        found.append(
            Plan(NAME, "split_kv", tile_q, tile_kv, max(split_kv, tile_kv), warps=warps, stages=stages),
        )
    return found


def _split_tiles(problem: Problem) -> list[tuple[int, int, int]]:
    """(most rows, tile_kv, stages), the preferred one first."""
    if problem.dtype == torch.float32:
        return [(64, 32, 1), (16, 32, 1), (16, 16, 1)]
    if max(padded(problem.head_dim), block(problem.head_dim_v)) > 256:
        return [(64, 32, 2), (64, 32, 1), (16, 32, 1), (16, 16, 1)]
    return [(64, 64, 3), (64, 64, 2), (64, 32, 2), (64, 32, 1), (16, 32, 1)]


def _causal_only(problem: Problem) -> bool:
    bounded = [isinstance(term, Bounds) and term.left is None and term.right is not None for term in problem.mask]
    return bool(bounded) and all(bounded) and not problem.scores


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of one backward kernel. ``registers``: at most so many of a thread; 0: the compiler's choice."""

    tile_q: int
    tile_kv: int
    warps: int
    stages: int
    isa: str = ""
    registers: int = 0


def backward_tiles(problem: Problem, copies: bool = False) -> tuple[BackwardTiles, BackwardTiles]:
    """(for dK and dV, for dQ): the first owns tile_kv keys and walks over tiles of queries, the second the reverse.
    ``copies``: whether those they walk over may come by the copy engine.

    Best of 106 pairs on an H200, bf16 (docs/results): the third stage lets Q and dO (K and V) of the next tile arrive
    during four products. For head_dim 64 half as many warps hold all they need. The copy engine gains dQ 5 to 12 % for
    head_dim 128 and 4 to 6 % for 64 without a mask; dK and dV nothing, but under a causal bound it leaves 64 columns
    few enough registers for three programs on a multiprocessor, which gain 11 to 14 %.
    """
    width = max(block(problem.head_dim), block(problem.head_dim_v))
    if problem.dtype == torch.float32:
        small = BackwardTiles(16, 16, 4, 1) if width > 128 else BackwardTiles(32, 32, 4, 1)
        return small, small
    if width <= 64:
        three = copies and _causal_only(problem)
        for_kv = BackwardTiles(64, 64, 4, 3, TMA, 168) if three else BackwardTiles(64, 64, 4, 3)
        return for_kv, BackwardTiles(128, 64, 4, 3, TMA if copies and not problem.mask else "")
    if width <= 128:
        return BackwardTiles(64, 128, 8, 3), BackwardTiles(128, 64, 8, 3, TMA if copies else "")
    return BackwardTiles(32, 64, 8, 1), BackwardTiles(64, 32, 8, 1)


def check(problem: Problem, plan: Plan) -> None:
    """Raise ``ValueError`` naming the field of a caller's plan that cannot run the problem."""
    if plan.schedule not in SCHEDULES:
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be one of {SCHEDULES} on backend {NAME!r}")
    _check_isa(problem, plan)
    for name in ("tile_q", "tile_kv"):
        size = getattr(plan, name)
        if size < 16 or size & (size - 1):
            raise ValueError(f"plan {name}: was {size}, must be a power of two, at least 16")
    if plan.warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"plan warps: was {plan.warps}, must be 1, 2, 4, 8 or 16")
    if plan.visit_all and plan.schedule != "q_outer":
        raise ValueError(f"plan visit_all: was True, must be False for schedule {plan.schedule!r}")
    if plan.stages < 1:
        raise ValueError(f"plan stages: was {plan.stages}, must be >= 1")
    if plan.schedule != "split_kv":
        if problem.form == "decode" and plan.schedule != "grouped":
            raise ValueError(f"plan schedule: was {plan.schedule!r}, must be one of {GROUPED} for a cache")
        if plan.split_kv:
            raise ValueError(f"plan split_kv: was {plan.split_kv}, must be 0 for schedule {plan.schedule!r}")
        if plan.schedule in OLDER:
            _check_older(problem, plan)
    else:
        if problem.form == "varlen":
            raise ValueError("plan schedule: was 'split_kv', must be 'q_outer' or 'grouped' for packed sequences")
        if plan.split_kv < 1 or plan.split_kv % plan.tile_kv:
            raise ValueError(f"plan split_kv: was {plan.split_kv}, must be a multiple of tile_kv = {plan.tile_kv}")


def _check_isa(problem: Problem, plan: Plan) -> None:
    if plan.isa not in ("", TMA):
        raise ValueError(f"plan isa: was {plan.isa!r}, must be '' or {TMA!r} on backend {NAME!r}")
    if plan.isa and plan.schedule not in ("q_outer", "grouped"):
        raise ValueError(f"plan isa: was {plan.isa!r}, must be '' for schedule {plan.schedule!r}")
    if plan.isa and not takes_tma(problem):
        raise ValueError(
            f"plan isa: was {plan.isa!r}, must be '' for other than dense 16-bit tensors of at most 256 columns whose "
            f"strides are multiples of {ALIGNMENT} bytes"
        )


def _check_older(problem: Problem, plan: Plan) -> None:
    if problem.head_dim > MAX_BLOCK:
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be 'q_outer' for head_dim {problem.head_dim}")
    if problem.form == "varlen":
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be 'q_outer' or 'grouped' for packed sequences")
    if problem.differentiable:
        raise ValueError(
            f"plan schedule: was {plan.schedule!r}, must be 'q_outer' where an input requires grad: only that has a "
            "backward"
        )


def shared_bytes(problem: Problem, plan: Plan) -> int:
    """Shared memory of a program: a tile of Q, and ``stages`` tiles of K and V; of 8-bit ones also one of each in the
    products' own dtype."""
    size, kv_size = problem.element_size, (problem.kv_dtype or problem.dtype).itemsize
    d, d_v = padded(problem.head_dim), block(problem.head_dim_v)
    widened = size if kv_size < size else 0
    return plan.tile_q * d * size + plan.tile_kv * (d + d_v) * (plan.stages * kv_size + widened)


def why_none_fits(problem: Problem, hardware: Hardware) -> str:
    """In numbers; "" where a plan fits the card."""
    if candidates(problem, hardware):
        return ""
    least = min(shared_bytes(problem, plan) for plan in possible(problem, hardware))
    return (
        f"head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}, {problem.dtype}: a program takes at least "
        f"{least} bytes of shared memory, the card has {hardware.block_bytes}"
    )
