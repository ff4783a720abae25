"""Which tiles a problem gets on Hopper, and what a kernel is compiled for: one table, a line for each choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from attnworks.backends.cuda.source import BIAS_ELEMENTS, SHARED_LIMIT, Variant
from attnworks.expressions import OperandSpec
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Problem

NAME = "cuda"
MAP_KEYS = 128  # of a tile: four lanes share a row of a map's bits, 32 each
# Of a part, and of the keys. µs on an H200 (2026-11-30), whole, then in 2, 4, 8 and 16 parts: 1k keys 17.9 18.8 17.8 (4
# heads, full) and 18.8 19.6 18.0 (causal); 2k 30.0 27.6 30.6 (4 heads, causal); 4k 49.1 39.0 41.4 (2 heads, full) and
# 52.1 34.9 25.0 27.1 (one head of 64, causal); 16k 173 95 56 38.6 38.5 (8 heads, 128 queries, causal).
LEAST_KEYS, MOST_PARTS = 1024, 128
# Query heads of a section. Times as fast as FlashAttention-3, causal: D=128 with 32, 64, 128 heads at N=512 1.15 1.12
# 1.07, with 16, 32, 64 at 1k 1.06 1.04 1.04; D=256 with 16, 32, 64 at 512 1.00 1.00 0.97, with 8, 16, 32 at 1k 1.00
# 1.02 1.03 (H200, 2026-11-30).
SECTION_HEADS = 32
# The last wave is shared ("stream_k") from so much on of (share of the multiprocessors that it leaves idle) · keys ·
# (head_dim + head_dim_v), for head dims up to 128 and above: what is saved against storing, merging, one more launch.
# Times as fast, and this number in thousands (H200, 2026-11-30). Heads of 128: 17 of 1k rows on 1k keys (254) 0.95, on
# 2k (508) 1.18, on 4k 1.35; 34 of 512 on 8k 1.55; 25 of 1k on 2k (254) 0.92, on 4k (508) 1.04; 9 of 2k on 2k (477)
# 1.16; 16k tokens of 2k (254) 0.99, 4k (508) 1.02, 8k and 16k 1.03. Heads of 256: 17 of 1k on 1k (508) 0.98; 16k tokens
# of 4k (510) 0.98, 8k (1020) 1.00, 16k 1.02; 192/128: of 4k (635) 0.98, 8k (1270) 1.00, 16k 1.01
LEAST_SHARED, LEAST_SHARED_WIDE = 400_000, 1_200_000
SHARED_TILES = (128,)  # tile_q: of 192 rows it does not compile without spills
# tile_kv, at most: beside FlashAttention-3 at 4k, 8k, 16k with 128 keys 1.05 1.04 1.04, 144 1.03 1.04 1.04, 160 1.03
# 1.03 1.04 (H200, 2026-11-30)
SHARED_KEYS = 128
FAR = 2**29  # longer than any sequence that is taken: "no limit" for a diagonal, three of which fit 32 bits


class Line(NamedTuple):
    """For head dims up to these, a kind of kernel ("" is any) and at least so many keys (of the longest sequence):
    tiles and stages. Kinds: "bias" and "map", which take registers, else by the bounds "full", "causal" and "window";
    "packed" is "full" of packed sequences. ``rows``: at least so many queries, as few would leave much of a tile
    empty."""

    head_dim: int
    head_dim_v: int
    kind: str
    keys: int
    tile_q: int
    tile_kv: int
    stages: int
    rows: int = 0


# The first line that fits. TFLOP/s of a prototype of this kernel, bf16, 16k tokens, heads · head_dim = 2048, one H200
# (2026-11-29), at N = 512, 1k, 2k, 4k, 8k, 16k; "not measured" where it had no such variant. Where it says "this
# kernel", the prototype's choice lost in two interleaved runs (2026-11-30).
TABLE = (
    # not measured: the most keys whose S leaves registers for a bias, and for a map
    Line(128, 128, "bias", 0, 128, 128, 2),
    Line(192, 128, "bias", 0, 128, 96, 2),
    Line(192, 192, "bias", 0, 128, 80, 2),
    Line(256, 256, "bias", 0, 128, 64, 2),
    Line(64, 64, "map", 0, 128, 128, 3),
    Line(128, 128, "map", 0, 128, 128, 2),
    Line(192, 128, "map", 0, 128, 128, 2),
    Line(192, 192, "map", 0, 128, 96, 2),
    Line(256, 256, "map", 0, 128, 64, 2),
    # 517 538 575 575
    Line(64, 64, "full", 2048, 192, 128, 3),
    # this kernel at 512: 382 against 371 for three groups; at 1k level with them or 1-2 % faster
    Line(64, 64, "full", 0, 128, 128, 3),
    # this kernel, three groups beside two, causal at 2k, 4k, 8k, 16k, 32k: 0.94 0.97 1.04 1.06 1.09 (2026-12-01)
    Line(64, 64, "causal", 6144, 192, 128, 3),
    # 254 350 428 against 222 296 413 for three groups: shorter tiles leave less of the triangle's edge unused
    Line(64, 64, "", 0, 128, 128, 3),
    # this kernel with 192 x 96 beside 128 x 128 (2026-12-01): causal at 1k, 2k 0.89 1.03, full at 1k, 2k, 8k 0.95 1.07
    # 1.08; before tiles kept their maximum, causal at 8k, 16k 1.06 1.09, heads of 80 at 16k 1.06
    Line(96, 96, "causal", 2048, 192, 96, 3, rows=1024),
    Line(96, 96, "full", 2048, 192, 96, 3, rows=1024),
    # this kernel, three groups beside two, 192 x 64 beside 128 x 128 (2026-12-01): causal at 2k, 4k, 8k, 32k 0.97 0.96
    # 1.02 1.04, packed up to 4k, 7.6k, 16k 1.00 1.05 1.03; packed without a mask up to 512, 1k, 2k, 4k, 7.6k, 16k 1.05
    # 1.06 1.05 1.07 1.06 1.04, but all of 1000 0.96 (six tiles for 5.2). With 80 keys the same or 1-2 % less, causal
    # and short 3 % less. A window of 1k: 0.89
    Line(128, 128, "causal", 6144, 192, 64, 3, rows=1024),
    Line(128, 128, "packed", 2048, 192, 64, 3, rows=1024),
    # this kernel at 2k, 4k, 8k, 16k, times as fast as FlashAttention-3: 1.04 1.04 1.03 1.04; with 128 keys 1.05 1.03
    # 1.02 1.01, with 144 1.00 1.02 1.02 1.02, with 176 0.98 0.98 0.99 0.99. Heads of 96: not measured
    Line(128, 128, "full", 4096, 128, 160, 2),
    # this kernel, causal, at 2k, 4k, 8k, 16k: 1.02 1.02 1.00 0.99; with 144 and 160 keys 0.97 0.99 0.98 0.99, with 176
    # less
    Line(128, 128, "", 0, 128, 128, 2),
    # others not measured: the most keys whose two stages fit shared memory (192, 256) or whose S fits beside O (128)
    Line(192, 128, "", 0, 128, 128, 2),
    Line(192, 192, "", 0, 128, 96, 2),
    Line(256, 256, "full", 0, 128, 80, 2),
    # this kernel, causal, at 512, 1k, 4k, 16k, times as fast as FlashAttention-3: 1.00 1.03 1.02 1.01; with 64 keys,
    # which leave less of the triangle's edge unused, 1.05 1.04 1.02 1.01
    Line(256, 256, "", 2048, 128, 80, 2),
    Line(256, 256, "", 0, 128, 64, 2),
)


def bounds(p: Problem) -> dict[str, int]:
    """The closed bounds as diagonals: query i sees keys from i + low to i + high, for either alignment. Limits beyond
    all keys are left out, so that a window wider than the sequence costs nothing."""
    found = {"low_bottom": -FAR, "high_bottom": FAR, "low_top": -FAR, "high_top": FAR}
    for term in p.mask:
        if not isinstance(term, Bounds):
            continue
        bottom = term.align == "bottom-right"
        side, shift = ("bottom", p.seq_kv - p.seq_q) if bottom else ("top", 0)
        known = p.form == "dense"  # packed sequences each have a shift of their own
        if term.left is not None and not (known and p.seq_q - 1 + shift - term.left <= 0):
            found[f"low_{side}"] = -min(term.left, FAR)
        if term.right is not None and not (known and shift + term.right >= p.seq_kv - 1):
            found[f"high_{side}"] = min(term.right, FAR)
    return found


def mapped(p: Problem) -> bool:
    """Whether the mask is more than closed bounds: a tile map then says all of it."""
    return not all(isinstance(term, Bounds) for term in p.mask)


def limited(p: Problem) -> tuple[bool, bool]:
    """Whether the kernel has bounds that hide keys to the left, and to the right."""
    if mapped(p):
        return False, False
    found = bounds(p)
    left = max(found["low_bottom"], found["low_top"]) > -FAR
    return left, min(found["high_bottom"], found["high_top"]) < FAR


def plan_for(p: Problem, units: int = 0) -> Plan:
    """The table's plan; on so many multiprocessors with its keys split where that fills them."""
    left, right = limited(p)
    bounded = "window" if left else "causal" if right else "full"
    kinds = ["", "bias" if bias_of(p)[0] else "map" if mapped(p) else bounded]
    if p.form == "varlen" and kinds[1] == "full":
        kinds.append("packed")
    for line in TABLE:
        fits = p.head_dim <= line.head_dim and p.head_dim_v <= line.head_dim_v
        if fits and p.seq_kv >= line.keys and p.seq_q >= line.rows and line.kind in kinds:
            plan = Plan(NAME, "q_outer", line.tile_q, line.tile_kv, warps=line.tile_q // 16 + 4, stages=line.stages)
            return stream_k(p, split_over(p, plan, units), units)
    raise ValueError(f"head_dim, head_dim_v: were {p.head_dim}, {p.head_dim_v}, must be at most 256")


def adapt(p: Problem, plan: Plan, units: int) -> Plan:
    """The tiles of a measured plan, with keys split and the last wave shared as fills the multiprocessors for this
    problem."""
    tiles = replace(plan, schedule="q_outer", split_kv=0)
    return stream_k(p, split_over(p, tiles, units), units, most_keys=plan.tile_kv)


def can_split(p: Problem) -> bool:
    """Whether keys may be split at all. How many parts fill the card depends on the rest of the batch, so not where
    bits must not."""
    return p.form == "dense" and not mapped(p) and not p.batch_invariant


def split_over(p: Problem, plan: Plan, units: int) -> Plan:
    """The plan with as many parts of the keys as fill the multiprocessors once, if at least two do."""
    tiles = tiles_of(p, plan)
    most = min(units // max(tiles, 1), p.seq_kv // LEAST_KEYS, MOST_PARTS)
    if most < 2 or not can_split(p):
        return plan
    keys = math.ceil(p.seq_kv / most / plan.tile_kv) * plan.tile_kv
    return replace(plan, schedule="split_kv", split_kv=keys)


def can_share(p: Problem) -> bool:
    """Whether the last tiles of rows may be shared by all thread blocks: of full attention alone, as those of other
    masks are drawn by whoever is free. Which ones are shared depends on the rest of the batch."""
    masked = mapped(p) or any(limited(p))
    return p.form == "dense" and not (masked or p.scores or p.batch_invariant or p.scale <= 0)


def stream_k(p: Problem, plan: Plan, units: int, most_keys: int = SHARED_KEYS) -> Plan:
    """The plan with the tiles of its last wave shared, where enough multiprocessors would be idle for long enough."""
    if units < 1 or plan.schedule != "q_outer" or plan.tile_q not in SHARED_TILES or not can_share(p):
        return plan
    tiles = tiles_of(p, plan)
    saved = -tiles % units / units * p.seq_kv * (p.head_dim + p.head_dim_v)
    if tiles < units or saved < (LEAST_SHARED if p.head_dim <= 128 else LEAST_SHARED_WIDE):
        return plan
    return replace(plan, schedule="stream_k", tile_kv=min(plan.tile_kv, most_keys))


def variant(p: Problem, plan: Plan) -> Variant:
    """What the kernel of a problem and its plan is compiled for."""
    left, right = limited(p)
    kinds = {term.kind for term in p.scores}
    biased, steps = bias_of(p)
    return Variant(
        bf16=str(p.dtype) == "torch.bfloat16",
        head_dim=16 * math.ceil(p.head_dim / 16),
        head_dim_v=32 * math.ceil(p.head_dim_v / 32),
        tile_q=plan.tile_q,
        tile_kv=plan.tile_kv,
        stages=plan.stages,
        left=left,
        right=right,
        varlen=p.form == "varlen",
        partial_v=p.head_dim_v % 32 != 0,
        modifier=2 if "softcap" in kinds else 0 if p.scale > 0 or added(p) else 1,
        sink="sink" in kinds and not plan.split_kv,
        mapped=mapped(p),
        alibi=0 if "alibi" not in kinds else 2 if none_ahead(p) else 1,
        bias=BIAS_ELEMENTS.index(biased) if biased in BIAS_ELEMENTS else 0,
        bias_keys=min(steps[3], 2),
        bias_rows=steps[2] > 0,
        bias_pairs=steps[3] == 1 and not any(step % 2 for step in steps[:3]),
        split=plan.split_kv > 0,
        stream_k=plan.schedule == "stream_k",
    )


def added(p: Problem) -> bool:
    """Whether something is added to scores, which are then taken to their own units first."""
    return any(term.kind in ("alibi", "bias") for term in p.scores)


def none_ahead(p: Problem) -> bool:
    """Whether every key that a query sees lies behind it, or beside it, as ALiBi counts distances."""
    return any(isinstance(term, Bounds) and (term.right, term.align) == (0, "bottom-right") for term in p.mask)


def bias_of(p: Problem) -> tuple[torch.dtype | None, tuple[int, int, int, int]]:
    """The bias's element, None if there is no bias, and its strides along batch, head, query and key."""
    for term in p.scores:
        if term.kind == "bias" and term.operand:
            return term.operand.dtype, broadcast_strides(term.operand)
    return None, (0, 0, 0, 0)


def broadcast_strides(operand: OperandSpec) -> tuple[int, int, int, int]:
    """Strides along batch, head, query and key of an operand that broadcasts to them: 0 where it has one element."""
    found = [0 if size == 1 else step for size, step in zip(operand.shape, operand.strides, strict=True)]
    batch, head, query, key = [*[0] * (4 - len(found)), *found]
    return batch, head, query, key


def tiles_of(p: Problem, plan: Plan) -> int:
    """Tiles of rows, of all heads and sequences."""
    return math.ceil(p.seq_q / plan.tile_q) * p.batch * p.heads_q


def check(p: Problem, plan: Plan) -> None:
    """Raises ``ValueError`` naming the field that the kernel can't be compiled for or run with."""
    if plan.schedule not in ("q_outer", "split_kv", "stream_k"):
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be 'q_outer', 'split_kv' or 'stream_k'")
    if plan.tile_q not in (128, 192):
        raise ValueError(f"plan tile_q: was {plan.tile_q}, must be 128 or 192: two or three warpgroups of 64 rows")
    if plan.tile_kv % 16 or not 16 <= plan.tile_kv <= 256:
        raise ValueError(f"plan tile_kv: was {plan.tile_kv}, must be a multiple of 16 in 16..256")
    if plan.warps != plan.tile_q // 16 + 4:
        raise ValueError(f"plan warps: was {plan.warps}, must be {plan.tile_q // 16 + 4} for tile_q {plan.tile_q}")
    if mapped(p) and plan.tile_kv > MAP_KEYS:
        raise ValueError(f"plan tile_kv: was {plan.tile_kv}, must be at most {MAP_KEYS} for a mask with a tile map")
    if not 2 <= plan.stages <= 4:
        raise ValueError(f"plan stages: was {plan.stages}, must be in 2..4")
    for name in ("isa", "visit_all"):
        if getattr(plan, name):
            raise ValueError(f"plan {name}: was {getattr(plan, name)!r}, must be left out, the kernel has none")
    _check_split(p, plan)
    built = variant(p, plan)
    if built.shared_bytes > SHARED_LIMIT:
        raise ValueError(
            f"plan tile_q, tile_kv, stages: took {built.shared_bytes} bytes of shared memory, must take at most "
            f"{SHARED_LIMIT}"
        )
    if built.accumulators > built.most_accumulators:
        raise ValueError(
            f"plan tile_kv: was {plan.tile_kv}, must leave S, P and O at most {built.most_accumulators} registers of a "
            f"thread, took {built.accumulators}"
        )


def _check_split(p: Problem, plan: Plan) -> None:
    if plan.schedule != "split_kv":
        if plan.split_kv:
            raise ValueError(f"plan split_kv: was {plan.split_kv}, must be 0 for schedule {plan.schedule!r}")
        if plan.schedule == "stream_k" and not (can_share(p) and plan.tile_q in SHARED_TILES):
            raise ValueError(
                "plan schedule: was 'stream_k', must be 'q_outer' where there is a mask, scores, packed sequences, "
                f"batch_invariant, a scale of 0 or less, or a tile_q that is not one of {SHARED_TILES}"
            )
    elif p.form != "dense" or mapped(p):
        raise ValueError("plan schedule: was 'split_kv', must be 'q_outer' for packed sequences and tile maps")
    elif plan.split_kv < 1 or plan.split_kv % plan.tile_kv or plan.split_kv * MOST_PARTS < p.seq_kv:
        raise ValueError(
            f"plan split_kv: was {plan.split_kv}, must be a multiple of tile_kv = {plan.tile_kv} that makes at most "
            f"{MOST_PARTS} parts"
        )


def section(p: Problem, l2_bytes: int) -> int:
    """Query heads that are worked on together: K and V of so many lie in so much of the L2, at most ``SECTION_HEADS``.
    Of the sizes from that down to its half, the one that leaves the last section the fewest heads short: where that has
    few, its long tiles begin when there is nothing else left to do."""
    bytes_of_head = max(1, p.seq_kv * (p.head_dim + p.head_dim_v) * p.element_size)
    most = max(1, min(l2_bytes // bytes_of_head, SECTION_HEADS // p.group))
    if p.form == "varlen":  # whose kernel finds it for each sequence (find in schedule.cuh)
        return min(p.heads_q, max(1, l2_bytes // bytes_of_head) * p.group)
    heads = p.batch * p.heads_kv
    return min(heads, min(range(most, most // 2, -1), key=lambda size: -heads % size)) * p.group
