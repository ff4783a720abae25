"""Traffic: the bytes that cross the slow memory and the FLOPs, for a problem under a schedule; and the time they take.

The model counts what a schedule must move when its tiles live on chip and nothing else is kept there:

- "standard": S and P written out. Q, K read, S written; S read, P written; P, V read, O written (FlashAttention,
  arXiv:2205.14135, algorithm 0). It computes hidden scores too and masks them afterwards. Query heads that share a KV
  head are rows of one product, as in the reference's "standard", so K and V are read once for each KV head.
- "kv_outer": FlashAttention-1 (algorithm 1): O, m, l are written once to begin with (line 2); each KV tile is read
  once; for each Q tile that sees it, Q is read and O, m, l are read and written again (lines 8, 12 and 13).
- "q_outer": FlashAttention-2 (arXiv:2307.08691, algorithm 1) and the CPU's "tiled": each Q tile is read once and its
  output and LSE written once; for each, the KV tiles it sees are read.
- "grouped": FlashAttention-2 with the query heads of a group as rows of one tile, which reads their keys once.
- "split_kv": decode. The visible K and V read once by each KV head's group of queries; fp32 partial results written and
  read where there is more than one split.

"stream_k" counts as "q_outer" here: into how many parts its last tiles are cut depends on the machine, and what these
write and read is counted in ``workbench/schedules.py``.

In the other tiled schedules every query head reads its KV head's keys for itself, so GQA saves nothing of these
re-reads. Tiles that closed bounds hide are never loaded. Tiling saves bytes, not FLOPs: without a mask every schedule
has the same products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from attnworks.hardware import Hardware
from attnworks.masks import Bounds, DenseMask
from attnworks.problem import Problem

SCHEDULES = ("standard", "kv_outer", "q_outer")
_GROUPED = ("grouped", "split_kv")
ALIASES = {"tiled": "q_outer", "stream_k": "q_outer", "eager": "standard"}

Lengths = Sequence[tuple[int, int]]
"""(seq_q, seq_kv) of each sequence of the batch."""

# Only to weigh bytes against FLOPs when plans for a machine without stated rates are compared; never shown as facts.
_NOMINAL_BANDWIDTH_PER_UNIT = 1e10
_NOMINAL_FLOPS_PER_UNIT = 5e10
_FP32 = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes across the slow memory by what they are, and the FLOPs, of one problem under one schedule.

    ``q``, ``kv``: inputs read, with re-reads. ``out``: output written, with LSE or m and l. ``state``: running O, m, l
    or partial results read and written again. ``scores_and_probs``: S and P written and read (0 for tiled schedules).
    ``operands``: elements of a boolean mask or bias read. ``minimum_bytes``: q, k, v read and out written once.
    ``flops``: products of visible pairs, forward; ``executed_flops``: with the hidden pairs that the schedule computes
    all the same (whole tiles; all of them for "standard"). ``backward_flops``: products of visible pairs, backward;
    tiled schedules compute S again rather than read P, which makes five products of four.
    """

    schedule: str
    tile_q: int
    tile_kv: int
    q: int
    kv: int
    out: int
    state: int
    scores_and_probs: int
    operands: int
    minimum_bytes: int
    flops: int
    executed_flops: int
    backward_flops: int

    @property
    def total_bytes(self) -> int:
        return self.q + self.kv + self.out + self.state + self.scores_and_probs + self.operands

    def memory_seconds(self, hardware: Hardware) -> float | None:
        """Time the bytes take at the machine's bandwidth; None where that is unknown."""
        return self.total_bytes / hardware.bandwidth if hardware.bandwidth else None

    def compute_seconds(self, hardware: Hardware, dtype: torch.dtype) -> float | None:
        """Time the executed FLOPs take at the machine's peak for the dtype; None where that is unknown."""
        rate = hardware.flops_for(dtype)
        return self.executed_flops / rate if rate else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}


class _Rows(NamedTuple):
    """What one head of one sequence loads, counted in rows: ``q``, ``kv`` loads of rows of Q and K, ``visits`` rows of
    Q times the KV tiles they meet, ``pairs`` computed."""

    q: int
    kv: int
    visits: int
    pairs: int


def paper_tiles(problem: Problem, hardware: Hardware) -> tuple[int, int]:
    """(tile_q, tile_kv) of FlashAttention-1's algorithm 1, line 1: B_c = ceil(M / 4d), B_r = min(B_c, d), with M in
    elements of on-chip memory. Raises ``ValueError`` where the machine's on-chip memory is unknown."""
    if not hardware.on_chip_bytes:
        raise ValueError(f"machine: {hardware.name} states no on_chip_bytes, give tile_q and tile_kv instead")
    elements = hardware.on_chip_bytes // problem.element_size
    tile_kv = max(1, math.ceil(elements / (4 * max(problem.head_dim, 1))))
    return min(tile_kv, max(problem.head_dim, 1)), tile_kv


def default_lengths(problem: Problem) -> Lengths:
    """What the Problem alone says of the lengths: caches filled to capacity, packed rows dealt out as evenly as they
    can be. Where the true lengths are known, pass them to ``estimate``."""
    p = problem
    if p.form != "varlen":
        return [(p.seq_q, p.seq_kv)] * p.batch
    return list(zip(_deal(p.total_q, p.batch), _deal(p.total_kv, p.batch), strict=True))


def estimate(
    problem: Problem, schedule: str, tile_q: int = 0, tile_kv: int = 0, *, lengths: Lengths | None = None
) -> Traffic:
    """Bytes and FLOPs of ``problem`` under ``schedule``.

    ``tile_kv`` of "split_kv" is the keys of a split (0: one split). ``lengths``: (seq_q, seq_kv) of each sequence of a
    varlen or decode problem, by default ``default_lengths``. Raises ``ValueError`` for an unknown schedule, missing
    tiles or a wrong number of lengths.
    """
    model = ALIASES.get(schedule, schedule)
    if model not in (*SCHEDULES, *_GROUPED):
        raise ValueError(f"schedule: was {schedule!r}, must be one of {(*SCHEDULES, *_GROUPED, *ALIASES)}")
    if model in ("kv_outer", "q_outer", "grouped") and (tile_q < 1 or tile_kv < 1):
        raise ValueError(f"tile_q, tile_kv: were {tile_q}, {tile_kv}, must be >= 1 for schedule {schedule!r}")
    lengths = default_lengths(problem) if lengths is None else lengths
    if len(lengths) != problem.batch:
        raise ValueError(f"lengths: had {len(lengths)} sequences, must have the problem's batch, {problem.batch}")
    total = dict.fromkeys(("q", "kv", "out", "state", "scores_and_probs", "operands", "minimum_bytes"), 0)
    visible = executed = 0
    for (seq_q, seq_kv), count in Counter(lengths).items():
        one = replace(problem, seq_q=seq_q, seq_kv=seq_kv)
        moved, pairs = _sequence_bytes(one, model, tile_q, tile_kv)
        for name, size in moved.items():
            total[name] += count * size
        visible += count * problem.heads_q * one.visible_pairs()
        executed += count * problem.heads_q * pairs
    d, d_v = problem.head_dim, problem.head_dim_v
    backward = 2 * visible * ((2 if model == "standard" else 3) * d + 2 * d_v)
    flops, executed_flops = (2 * pairs * (d + d_v) for pairs in (visible, executed))
    return Traffic(
        schedule, tile_q, tile_kv, **total, flops=flops, executed_flops=executed_flops, backward_flops=backward
    )


def modelled_seconds(problem: Problem, schedule: str, tile_q: int, tile_kv: int, hardware: Hardware) -> float:
    """Time by which plans are compared: bytes and products at the machine's rates, stretched by units left idle in the
    last wave of tasks, which "stream_k" leaves none of. Where the machine states no rates, nominal ones weigh the two;
    compare, don't quote."""
    moved = estimate(problem, schedule, tile_q, tile_kv)
    units = max(hardware.units, 1)
    memory = moved.total_bytes / (hardware.bandwidth or _NOMINAL_BANDWIDTH_PER_UNIT * units)
    compute = moved.flops / (hardware.flops_for(problem.dtype) or _NOMINAL_FLOPS_PER_UNIT * units)
    tasks = (
        problem.batch * problem.heads_q * math.ceil(problem.seq_q / tile_q)
        if tile_q and schedule != "stream_k"
        else units
    )
    waves = math.ceil(tasks / units)
    return (memory + compute) * (waves * units / tasks if tasks else 1.0)


# ---- one sequence ----------------------------------------------------------------------------------------------------


def _sequence_bytes(p: Problem, model: str, tile_q: int, tile_kv: int) -> tuple[dict[str, int], int]:
    """Bytes of one sequence by what they are, and the pairs that one head of it computes."""
    size, kv_size = p.element_size, (p.kv_dtype or p.dtype).itemsize
    q_row, out_row = p.head_dim * size, p.head_dim_v * size
    kv_row = (p.head_dim + p.head_dim_v) * kv_size
    out_once = p.heads_q * p.seq_q * out_row
    state = scores = 0
    if model == "split_kv":
        rows, keys = _split_rows(p)
        splits = math.ceil(keys / tile_kv) if tile_kv else 1
        out = out_once + p.heads_q * p.seq_q * _FP32
        state = 2 * p.heads_q * p.seq_q * splits * (p.head_dim_v + 1) * _FP32 if splits > 1 else 0
        q, kv = p.heads_q * rows.q * q_row, p.heads_kv * rows.kv * kv_row
    elif model == "standard":
        rows = _Rows(p.seq_q, p.seq_kv, 0, p.seq_q * p.seq_kv)
        q, kv, out = p.heads_q * rows.q * q_row, p.heads_kv * rows.kv * kv_row, out_once
        scores = 4 * p.heads_q * rows.pairs * size
    else:
        group = p.group if model == "grouped" else 1
        rows = _tile_rows(p, max(tile_q // group, 1), tile_kv, kv_outer=model == "kv_outer")
        q, kv = p.heads_q * rows.q * q_row, p.heads_q // group * rows.kv * kv_row
        out = out_once + p.heads_q * p.seq_q * _FP32
        if model == "kv_outer":
            out += p.heads_q * p.seq_q * _FP32  # m and l rather than one LSE
            state = 2 * p.heads_q * rows.visits * (out_row + 2 * _FP32)
    minimum = p.heads_q * p.seq_q * (q_row + out_row) + p.heads_kv * p.seq_kv * kv_row
    moved = {"q": q, "kv": kv, "out": out, "state": state, "scores_and_probs": scores, "minimum_bytes": minimum}
    return moved | {"operands": p.heads_q * rows.pairs * _operand_bytes(p)}, rows.pairs


def _deal(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _operand_bytes(p: Problem) -> int:
    """Bytes read for each pair: boolean masks and biases with an element for each. Broadcast ones stay on chip."""
    terms = [term.operand for term in p.mask if isinstance(term, DenseMask)]
    terms += [term.operand for term in p.scores if term.kind == "bias" and term.operand is not None]
    return sum(spec.dtype.itemsize for spec in terms if len(spec.shape) >= 2 and min(spec.shape[-2:]) > 1)


def visible_range(p: Problem, first: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[low, high): the keys that queries first .. first + rows - 1 see between them, clamped to the sequence."""
    low = torch.zeros_like(first)
    high = torch.full_like(first, p.seq_kv)
    for term in p.mask:
        if not isinstance(term, Bounds):
            continue
        origin = first + (p.seq_kv - p.seq_q if term.align == "bottom-right" else 0)
        if term.left is not None:
            low = torch.maximum(low, origin - term.left)
        if term.right is not None:
            high = torch.minimum(high, origin + rows + term.right)
    return low.clamp(0, p.seq_kv), high.clamp(0, p.seq_kv)


def _tile_rows(p: Problem, tile_q: int, tile_kv: int, *, kv_outer: bool) -> _Rows:
    """Loads of one head under a tiled schedule; two tiles meet if a visible key of the Q tile lies in the KV tile."""
    starts = torch.arange(0, p.seq_q, tile_q, dtype=torch.int64, device="cpu")
    rows = (p.seq_q - starts).clamp_max(tile_q)
    low, high = visible_range(p, starts, rows)
    first = low // tile_kv
    last = torch.where(high > low, (high + tile_kv - 1) // tile_kv, first)
    tiles = last - first
    keys = ((last * tile_kv).clamp_max(p.seq_kv) - first * tile_kv).clamp_min(0)
    visits, pairs = int((tiles * rows).sum()), int((keys * rows).sum())
    if not kv_outer:
        return _Rows(int(rows[tiles > 0].sum()), int(keys.sum()), visits, pairs)
    met = torch.zeros(math.ceil(p.seq_kv / tile_kv) + 1, dtype=torch.int64, device="cpu")
    met.index_add_(0, first[tiles > 0], torch.ones_like(first[tiles > 0]))
    met.index_add_(0, last[tiles > 0], -torch.ones_like(last[tiles > 0]))
    tile = torch.nonzero(met.cumsum(0)[:-1] > 0).flatten()
    loaded = int((p.seq_kv - tile * tile_kv).clamp_max(tile_kv).sum())
    return _Rows(visits, loaded, visits, pairs)


def _split_rows(p: Problem) -> tuple[_Rows, int]:
    """Loads of one head where all queries go through the cache together, and the keys they see between them."""
    if p.seq_q == 0:
        return _Rows(0, 0, 0, 0), 0
    low, high = visible_range(p, torch.tensor([0], device="cpu"), torch.tensor([p.seq_q], device="cpu"))
    keys = max(int(high - low), 0)
    return _Rows(p.seq_q if keys else 0, keys, 0, p.seq_q * keys), keys
