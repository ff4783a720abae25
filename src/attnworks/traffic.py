"""Traffic: the bytes that cross the slow memory and the FLOPs, for a problem under a schedule; and the time they take.

The model counts what a schedule must move when its tiles live on chip and nothing else is kept there:

- "standard": S and P written out. Q, K read, S written; S read, P written; P, V read, O written
  (FlashAttention, arXiv:2205.14135, algorithm 0).
- "kv_outer": FlashAttention-1 (algorithm 1): each KV tile is read once; for each, Q is read and O, m, l are read and
  written again.
- "q_outer": FlashAttention-2 (arXiv:2307.08691, section 3.2) and the CPU's "tiled": each Q tile is read once and its
  output written once; for each, the visible KV tiles are read.
- "split_kv": decode. K and V read once by each KV head's group of queries; fp32 partial results written and read.

Tiles that closed bounds hide are never loaded. Tiling saves bytes, not FLOPs: every schedule has the same products.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnworks.hardware import Hardware
from attnworks.masks import Bounds
from attnworks.problem import Problem

SCHEDULES = ("standard", "kv_outer", "q_outer")
_ALIASES = {"tiled": "q_outer", "eager": "standard"}

# Only to weigh bytes against FLOPs when plans for a machine without stated rates are compared; never shown as facts.
_NOMINAL_BANDWIDTH_PER_UNIT = 1e10
_NOMINAL_FLOPS_PER_UNIT = 5e10


@dataclass(frozen=True)
class Traffic:
    """Bytes across the slow memory by what they are, and the FLOPs, of one problem under one schedule.

    ``scores_and_probs``: S and P written and read (0 for tiled schedules). ``q``, ``kv``: inputs read, with re-reads.
    ``out``: output and LSE written. ``state``: running O, m, l or partial results read and written again.
    """

    schedule: str
    tile_q: int
    tile_kv: int
    q: int
    kv: int
    out: int
    state: int
    scores_and_probs: int
    flops: int
    minimum_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.q + self.kv + self.out + self.state + self.scores_and_probs

    def memory_seconds(self, hardware: Hardware) -> float | None:
        """Time the bytes take at the machine's bandwidth; None where that is unknown."""
        return self.total_bytes / hardware.bandwidth if hardware.bandwidth else None

    def compute_seconds(self, hardware: Hardware, dtype: torch.dtype) -> float | None:
        """Time the FLOPs take at the machine's peak for the dtype; None where that is unknown."""
        rate = hardware.flops_for(dtype)
        return self.flops / rate if rate else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}


def paper_tiles(problem: Problem, hardware: Hardware) -> tuple[int, int]:
    """(tile_q, tile_kv) of FlashAttention-1's algorithm 1, line 1: B_c = ceil(M / 4d), B_r = min(B_c, d), with M in
    elements of on-chip memory. Raises ``ValueError`` where the machine's on-chip memory is unknown."""
    if not hardware.on_chip_bytes:
        raise ValueError(f"machine: {hardware.name} states no on_chip_bytes, give tile_q and tile_kv instead")
    elements = hardware.on_chip_bytes // problem.element_size
    tile_kv = max(1, math.ceil(elements / (4 * max(problem.head_dim, 1))))
    return min(tile_kv, max(problem.head_dim, 1)), tile_kv


def estimate(problem: Problem, schedule: str, tile_q: int = 0, tile_kv: int = 0) -> Traffic:
    """Bytes and FLOPs of ``problem`` under ``schedule``. Raises ``ValueError`` for an unknown schedule or missing tiles."""
    model = _ALIASES.get(schedule, schedule)
    if model not in (*SCHEDULES, "split_kv"):
        raise ValueError(f"schedule: was {schedule!r}, must be one of {(*SCHEDULES, 'split_kv', *_ALIASES)}")
    if model in ("kv_outer", "q_outer") and (tile_q < 1 or tile_kv < 1):
        raise ValueError(f"tile_q, tile_kv: were {tile_q}, {tile_kv}, must be >= 1 for schedule {schedule!r}")
    p, size = problem, problem.element_size
    kv_size = (p.kv_dtype or p.dtype).itemsize
    heads = p.batch * p.heads_q
    q_once = heads * p.seq_q * p.head_dim * size
    out_once = heads * p.seq_q * p.head_dim_v * size
    lse = heads * p.seq_q * 4
    kv_row = (p.head_dim + p.head_dim_v) * kv_size
    kv, q, out, state, scores = heads * p.seq_kv * kv_row, q_once, out_once, 0, 0
    if model == "standard":
        # A query head reads its KV head's keys by itself: nothing on chip is shared between the separate products.
        scores = 4 * heads * p.seq_q * p.seq_kv * size
    elif model == "q_outer":
        out += lse
        kv = heads * _tile_rows(problem, tile_q, tile_kv)[0] * kv_row
    elif model == "kv_outer":
        visits = _tile_rows(problem, tile_q, tile_kv)[1]
        q = heads * visits * p.head_dim * size
        # O, m and l are read and written at every visit; the last write is the output.
        state = heads * visits * 2 * (p.head_dim_v * size + 8) - out
    else:
        kv = p.batch * p.heads_kv * p.seq_kv * kv_row
        splits = math.ceil(p.seq_kv / tile_kv) if tile_kv else 1
        out += lse
        state = 2 * heads * p.seq_q * splits * (p.head_dim_v + 2) * 4 if splits > 1 else 0
    return Traffic(schedule, tile_q, tile_kv, q, kv, out, max(state, 0), scores, p.flops(), p.minimum_bytes())


def modelled_seconds(problem: Problem, schedule: str, tile_q: int, tile_kv: int, hardware: Hardware) -> float:
    """Time by which plans are compared: bytes and products at the machine's rates, stretched by units left idle in the
    last wave of tasks. Where the machine states no rates, nominal ones weigh the two; compare, don't quote."""
    moved = estimate(problem, schedule, tile_q, tile_kv)
    units = max(hardware.units, 1)
    memory = moved.total_bytes / (hardware.bandwidth or _NOMINAL_BANDWIDTH_PER_UNIT * units)
    compute = moved.flops / (hardware.flops_for(problem.dtype) or _NOMINAL_FLOPS_PER_UNIT * units)
    tasks = problem.batch * problem.heads_q * math.ceil(problem.seq_q / tile_q) if tile_q else units
    waves = math.ceil(tasks / units)
    return (memory + compute) * (waves * units / tasks if tasks else 1.0)


def _tile_rows(problem: Problem, tile_q: int, tile_kv: int) -> tuple[int, int]:
    """(rows of K read by all Q tiles, rows of Q visited by all KV tiles) of one head, hidden tiles left out."""
    starts = torch.arange(0, problem.seq_q, tile_q, dtype=torch.int64)
    rows = (problem.seq_q - starts).clamp_max(tile_q)
    low = torch.zeros_like(starts)
    high = torch.full_like(starts, problem.seq_kv)
    for term in problem.mask:
        if not isinstance(term, Bounds):
            continue
        origin = starts + (problem.seq_kv - problem.seq_q if term.align == "bottom-right" else 0)
        if term.left is not None:
            low = torch.maximum(low, origin - term.left)
        if term.right is not None:
            high = torch.minimum(high, origin + rows + term.right)
    first = low.clamp(0, problem.seq_kv) // tile_kv
    last = (high.clamp(0, problem.seq_kv) + tile_kv - 1) // tile_kv
    tiles = torch.where(high > low, (last - first).clamp_min(0), 0)
    kv_rows = (torch.minimum(last * tile_kv, torch.tensor(problem.seq_kv)) - first * tile_kv).clamp_min(0)
    return int(torch.where(tiles > 0, kv_rows, 0).sum()), int((tiles * rows).sum())
