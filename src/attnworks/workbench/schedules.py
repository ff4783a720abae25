"""Schedules by name: the papers' (``papers.py``), and of every plan that a backend runs what it moves.

What the backends keep in fp32 is counted so.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnworks.backends import cpu
from attnworks.expressions import OperandSpec
from attnworks.hardware import Hardware
from attnworks.masks import Bounds, DenseMask
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.traffic import ALIASES, Traffic, estimate
from attnworks.workbench import counting
from attnworks.workbench.grid import Maps
from attnworks.workbench.loops import Array, Pass, Schedule
from attnworks.workbench.papers import (
    BACKWARD,
    DECODE,
    FORWARD,
    KV_OUTER,
    Q_OUTER,
    Q_OUTER_BACKWARD,
    SPLIT_KV,
    STANDARD,
)

BACKENDS = ("cpu", "triton", "cuda")
NAMES = (*FORWARD, SPLIT_KV.name, *BACKENDS)

# ---- the backends' plans ---------------------------------------------------------------------------------------------


def of_plan(p: Problem, plan: Plan, units: int = 0) -> Schedule:
    """What a backend's forward plan moves; that of "stream_k" depends on the machine's ``units``. Raises ``ValueError``
    for a schedule that is not described here."""
    name = ALIASES.get(plan.schedule, plan.schedule)
    passes = _forward_passes(p, plan, name)
    if plan.schedule == "stream_k":
        passes = _stream_k(p, plan, passes[0], units)
    if plan.backend == "cuda":
        passes = (_persistent(p, plan, passes[0]), *passes[1:])
    if plan.visit_all:
        passes = tuple(replace(one, skips=False) for one in passes)
    made = Schedule(f"{plan.backend} {plan.schedule}", passes, plan.tile_q or 64, plan.tile_kv or 64, plan.split_kv)
    return _with_operands(p, made, plan.backend)


def _forward_passes(p: Problem, plan: Plan, name: str) -> tuple[Pass, ...]:
    leaves = ("out", "lse") if p.return_lse else ("out",)
    body, pages = Q_OUTER.passes[0], ("page_table",) if p.page_size else ()
    if name == "q_outer":
        return (replace(body, leaves=leaves, streams=body.streams + pages),)
    if name == "grouped":
        return (replace(body, leaves=leaves, streams=body.streams + pages, together=True),)
    if name == "split_kv":
        together = plan.backend != "cuda"
        whole = replace(body, leaves=leaves, streams=body.streams + pages, together=together, splits=True)
        if not plan.split_kv or p.seq_kv <= plan.split_kv:
            return (whole,)
        share, parts, last = SPLIT_KV.passes
        share = replace(share, streams=whole.streams, together=together)
        return share, replace(parts, together=together), replace(last, leaves=leaves, together=together)
    if name == "kv_outer":
        begin, main = KV_OUTER.passes
        running = ("acc", "m", "l")  # O in fp32, which a last pass rounds
        words = ("Load the finished O{i}, m and l.", "", "Write O{i}, rounded, and what else is asked for.")
        last = Pass("end", outer="q", keeps=running, leaves=leaves, programs="head", fused=True, says=words)
        return replace(begin, leaves=running), replace(main, updates=running), last
    if name == "standard":
        scores, softmax, values = STANDARD.passes
        if plan.backend != "triton":
            return scores, softmax, values
        # Neither K nor V stays on chip; the cache before the slow memory serves what is read again.
        return (
            replace(scores, keeps=(), streams=("q", "k"), once=()),
            replace(softmax, leaves=("lse",) if p.return_lse else (), tile_q=1),
            replace(values, streams=("p", "v"), once=()),
        )
    raise ValueError(f"plan schedule: was {plan.schedule!r}, which has no description of what it moves")


def _stream_k(p: Problem, plan: Plan, whole: Pass, units: int) -> tuple[Pass, ...]:
    """With the tiles of the last wave cut as the launch cuts them. Raises ``ValueError`` without ``units``."""
    from attnworks.backends.cuda import split

    if units < 1:
        raise ValueError(f"units: was {units}, must be the machine's multiprocessors, on which 'stream_k' depends")
    found = split.stretches(p, plan, units)
    begins = [found.begin(worker) for worker in range(found.workers)]
    cuts = tuple(
        tuple(begin - tile for begin in begins if tile < begin < tile + found.kv_tiles)
        for tile in range(0, found.steps, max(found.kv_tiles, 1))
    )
    if not cuts:
        return (whole,)
    begin, visit, _ = whole.says
    end = "This part of the keys was seen: write what was summed, acc / l, and its LSE = m + ln l, in fp32; where all "
    end += "keys were seen, O{i} = acc / l, once."
    words = (
        SPLIT_KV.passes[1].says[0].replace("share", "part"),
        "",
        "All parts were summed: write O{i} = acc / l, once.",
    )
    merge = Pass(
        "merge", outer="q", keeps=("part",), leaves=whole.leaves, cuts=cuts, registers=("m", "l", "acc"), says=words
    )
    return replace(whole, cuts=cuts, parts=("part",), says=(begin, visit, end)), merge


def _persistent(p: Problem, plan: Plan, one: Pass) -> Pass:
    """A thread block on each multiprocessor, which works through tiles of rows as the kernel orders them."""
    from attnworks.backends.cuda import plans, source

    ordered = plans.variant(p, plan).longest_first
    return replace(one, resident=1, section=(lambda q: plans.section(q, source.L2_SECTION_BYTES)) if ordered else None)


def modelled_bytes(p: Problem, plan: Plan, units: int) -> int:
    """What a backend's forward plan moves with nothing but its tiles on chip: the papers' bill of its schedule, with
    FlashAttention-1's running O counted in fp32, in which backends keep it, and the pass at the end that rounds it; and
    of "stream_k" with the parts' results. ``units``: the machine's."""
    if plan.schedule not in ("kv_outer", "stream_k"):
        tile_kv = plan.split_kv if plan.schedule == "split_kv" else plan.tile_kv
        return estimate(p, plan.schedule, plan.tile_q, tile_kv).total_bytes
    moved = counting.count(p, of_plan(replace(p, return_lse=True), plan, units))
    return sum(one.loaded + one.stored for one in moved)


def backward_of(p: Problem, backend: str) -> Schedule:
    """What a backend's backward moves. Raises ``ValueError`` for one that has none of its own."""
    if backend == "triton":
        return _with_operands(p, _triton_backward(p), backend)
    if backend == "cpu":
        tile_q, tile_kv = cpu.BACKWARD_TILES
        delta, main = Q_OUTER_BACKWARD.passes
        words = ("Load dQ{i}, summed up in fp32.", "", "Write dQ{i}, rounded.")
        last = Pass("dQ", outer="q", keeps=("d_q_sum",), leaves=("d_q",), says=words)
        passes = (
            replace(delta, leaves=("delta", "d_q_sum")),
            replace(main, updates=("d_q_sum",)),
            last,
        )
        return _with_operands(p, Schedule("cpu backward", passes, tile_q, tile_kv, backward=True), backend)
    raise ValueError(f"backend: was {backend!r}, must be 'triton' or 'cpu', which have a backward of their own")


def _triton_backward(p: Problem) -> Schedule:
    """Three kernels: delta; dQ by tiles of queries; dK and dV by tiles of keys. S is computed in both of the latter."""
    from attnworks.backends.triton import plans

    for_kv, for_q = plans.backward_tiles(p)
    delta = Pass(
        "delta", outer="q", keeps=("out", "d_out", "lse"), leaves=("delta", "lse"), tile_q=64, tile_kv=for_q.tile_kv,
        says=("Load O{i}, dO{i} and LSE.", "", "Write delta = rowsum(dO ∘ O), and LSE in base 2."),
    )  # fmt: skip
    grad_q = Pass(
        "dQ", outer="q", inner="kv", keeps=("q", "d_out", "lse", "delta"), streams=("k", "v"), leaves=("d_q",),
        products=(2, 1), registers=("d_q",), tile_q=for_q.tile_q, tile_kv=for_q.tile_kv,
        says=(
            "Load Q{i}, dO{i}, LSE and delta. dQ{i} = 0.",
            "Load K{j} and V{j}. P{i},{j} = exp(S − LSE) anew; dP = dO{i} V{j}ᵀ; dS = P ∘ (dP − delta); "
            "dQ{i} += dS K{j}. No other program adds to it.",
            "Write dQ{i} · scale, once.",
        ),
    )  # fmt: skip
    grad_kv = Pass(
        "dK and dV", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "d_out", "lse", "delta"),
        leaves=("d_k", "d_v"), shared=True, products=(2, 2), registers=("d_k", "d_v"),
        tile_q=for_kv.tile_q, tile_kv=for_kv.tile_kv,
        says=(
            "Load K{j} and V{j}. dK{j} = dV{j} = 0.",
            "Load Q{i}, dO{i}, LSE and delta. P{i},{j} and dS once more, which saves adding to dQ in slow memory: "
            "dV{j} += Pᵀ dO{i}; dK{j} += dSᵀ Q{i}.",
            "Write dK{j} · scale and dV{j}, once.",
        ),
    )  # fmt: skip
    return Schedule("triton backward", (delta, grad_q, grad_kv), for_q.tile_q, for_q.tile_kv, backward=True)


def _with_operands(p: Problem, schedule: Schedule, backend: str) -> Schedule:
    """Biases are read in every visited tile by what computes S, and so are boolean masks. Where backends have a tile
    map, each tile of rows reads where its entries begin, and for every visited tile its entry, and what it shows in
    part: by ``cuda`` and ``cpu`` as the map's own bits, by ``triton`` as the mask."""
    mapped = p.form == "dense" and not all(isinstance(term, Bounds) for term in p.mask)
    masks = _pair_operands("mask", [term.operand for term in p.mask if isinstance(term, DenseMask)], partial=mapped)
    if mapped and backend in ("cpu", "cuda"):
        # cuda: four words of 32 bits for each row of a tile, whatever its width; cpu: one of 64 for 64 keys.
        bits = 16 / schedule.tile_kv if backend == "cuda" else 1 / 8
        masks = (Array("mask bits", "pair", lambda _: bits, partial=True),)
    biases = [term.operand for term in p.scores if term.kind == "bias" and term.operand is not None]
    operands = (*masks, *_pair_operands("bias", biases))
    lists: tuple[Array, ...] = ()
    if mapped:
        operands += (Array("tile map", "kv", lambda _: 4 / schedule.tile_kv),)
        words = 4 if backend == "cuda" else 2  # of 32 bits
        lists = (Array("tile map rows", "q", lambda _: 4 * words / schedule.tile_q),)
    if not operands:
        return schedule
    names, rows = tuple(array.name for array in operands), tuple(array.name for array in lists)
    passes = tuple(
        replace(one, streams=one.streams + names, keeps=one.keeps + (rows if one.outer == "q" else ()))
        if one.inner and one.products[0]
        else one
        for one in schedule.passes
    )
    return replace(schedule, passes=passes, arrays=(*schedule.arrays, *operands, *lists))


def _pair_operands(name: str, found: Sequence[OperandSpec], *, partial: bool = False) -> tuple[Array, ...]:
    """Those with an element for each pair; broadcast ones stay on chip."""
    return tuple(
        Array(f"{name} {number}", "pair", lambda _, size=spec.dtype.itemsize: size, partial=partial)  # type: ignore[misc]
        for number, spec in enumerate(found)
        if len(spec.shape) >= 2 and min(spec.shape[-2:]) > 1
    )


def bill(p: Problem, name: str, tile_q: int, tile_kv: int, maps: Maps) -> Traffic:
    """What ``traffic.estimate`` says of a schedule of the papers, where ``maps`` say which tiles are hidden."""
    schedule = _with_operands(p, FORWARD[name].with_tiles(tile_q, tile_kv), "")
    operands = {array.name for array in schedule.arrays}
    parts: Counter[str] = Counter()
    for moved in counting.count(p, schedule, maps):
        parts["operands" if moved.array in operands else moved.part] += moved.loaded + moved.stored
    names, pairs = ("q", "kv", "out", "state", "scores_and_probs", "operands"), maps.visible_pairs
    backward = 2 * pairs * ((2 if name == "standard" else 3) * p.head_dim + 2 * p.head_dim_v)
    return Traffic(
        name, tile_q, tile_kv, **{part: parts[part] for part in names},
        minimum_bytes=replace(p, return_lse=False).minimum_bytes(), flops=2 * pairs * (p.head_dim + p.head_dim_v),
        executed_flops=counting.executed_flops(p, schedule, maps), backward_flops=backward,
    )  # fmt: skip


def plan_on(p: Problem, backend: str, hardware: Hardware) -> Plan:
    """The plan that ``backend`` would choose on ``hardware``, which need not be here. Raises ``ValueError`` where it
    has none."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: was {backend!r}, must be one of {BACKENDS}")
    if (backend == "cpu") != (hardware.kind == "cpu"):
        raise ValueError(f"backend: {backend!r} does not run on {hardware.name}")
    if backend == "cpu":
        found = cpu.candidates(p, hardware)
    elif backend == "triton":
        from attnworks.backends.triton import plans

        found = plans.candidates(p, hardware)
        if not found:
            raise ValueError(f"backend: 'triton' has no plan for {hardware.name}: {plans.why_none_fits(p, hardware)}")
    else:
        from attnworks.backends.cuda import CAPABILITY, DTYPES
        from attnworks.backends.cuda import plans as cuda_plans

        if p.form == "decode" or hardware.capability not in (CAPABILITY, None):
            raise ValueError(f"backend: 'cuda' runs no caches, and nothing but compute capability {CAPABILITY}")
        if p.dtype not in DTYPES:
            raise ValueError(f"backend: 'cuda' runs bfloat16 and float16, not {str(p.dtype).removeprefix('torch.')}")
        found = [cuda_plans.plan_for(p, hardware.units)]
    if not found:
        raise ValueError(f"backend: {backend!r} has no plan that fits {hardware.name}")
    return found[0]


def named(name: str, p: Problem, hardware: Hardware, *, backward: bool = False) -> Schedule:
    """A schedule of the papers, a backend's on ``hardware`` ("cpu", "triton", "cuda"), or one of a user's own
    ("FILE.py:NAME"). Raises ``ValueError`` for any other name."""
    papers = BACKWARD if backward else FORWARD | DECODE
    if name in papers:
        return papers[name]
    if name in BACKENDS:
        return backward_of(p, name) if backward else of_plan(p, plan_on(p, name, hardware), hardware.units)
    return from_file(name)


def from_file(written: str) -> Schedule:
    """A schedule of a user's own: "path/to/file.py:NAME". Raises ``ValueError`` where there is none by that name."""
    found = loaded(written, f"schedule: was {written!r}, must be one of {', '.join(NAMES)} or FILE.py:NAME")
    if not isinstance(found, Schedule):
        raise ValueError(f"schedule: {written!r} was {type(found).__name__}, must be a loops.Schedule")
    return found


def loaded(written: str, wrong: str) -> Any:
    """What "path/to/file.py:NAME" names, None where the file has no such name. Raises ``ValueError`` with the text
    ``wrong`` for what is not so written or names no file, and for a file that cannot be run."""
    path, _, name = written.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"{wrong} with a file that exists")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{wrong} with a file of Python")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise ValueError(f"{path}: raised {type(error).__name__} when it was run: {error}") from error
    return getattr(module, name, None)
