"""The schedules that have names: of the papers, forward and backward, and of every plan that a backend runs.

Papers: FlashAttention-1 is arXiv:2205.14135, FlashAttention-2 arXiv:2307.08691. Their O, dQ and the rest are counted in
the input dtype, as in ``attnworks.traffic``; what the backends keep in fp32 is counted so in theirs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from attnworks.backends import cpu
from attnworks.hardware import Hardware
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.loops import Array, Pass, Schedule, pair_operands

LABELS = {
    "standard": "standard attention",
    "kv_outer": "FlashAttention-1: KV outer",
    "q_outer": "FlashAttention-2: Q outer",
}
BACKENDS = ("cpu", "triton", "cuda")
# In the backward of both it is the keys' tiles that are outside.
BACKWARD_LABELS = {"standard": "standard attention", "kv_outer": "FlashAttention-1", "q_outer": "FlashAttention-2"}

# ---- forward ---------------------------------------------------------------------------------------------------------

_ONLINE = (
    "S{i},{j} = scale · Q{i} K{j}ᵀ, on chip only. m rises to the largest score so far; alpha = exp(m before − m now) "
    "shrinks what was summed; l = alpha · l + rowsum(exp(S − m)); acc = alpha · acc + exp(S − m) V{j}."
)

STANDARD = Schedule(
    "standard",
    (
        Pass(
            "S = Q Kᵀ", outer="q", inner="kv", keeps=("q",), once=("k",), writes=("s",), skips=False, products=(1, 0),
            says=(
                "Load the tile Q{i} of queries.",
                "S{i},{j} = scale · Q{i} K{j}ᵀ, and written out: as a whole S is far too large to stay on chip. What "
                "the mask hides is computed all the same.",
                "The rows of S for Q{i} lie in slow memory.",
            ),
        ),
        Pass(
            "P = softmax(S)", outer="q", inner="kv", streams=("s",), writes=("p",), skips=False, registers=("m", "l"),
            says=(
                "Next rows of S: their largest score m and the sum l of exp(S − m).",
                "Read S{i},{j} back, hide what the mask hides, write P{i},{j} = exp(S − m) / l.",
                "The rows of P for Q{i} lie in slow memory.",
            ),
        ),
        Pass(
            "O = P V", outer="q", inner="kv", streams=("p",), once=("v",), leaves=("out",), skips=False,
            products=(0, 1), registers=("acc",),
            says=("acc = 0.", "Read P{i},{j} back: acc = acc + P{i},{j} V{j}.", "Write O{i} = acc, once."),
        ),
    ),
)  # fmt: skip

KV_OUTER = Schedule(
    "kv_outer",
    (
        Pass(
            "begin", outer="q", leaves=("out", "m", "l"), programs="head",
            says=("Nothing was seen yet.", "", "Write O{i} = 0, m = −∞, l = 0 (line 2 of the paper's algorithm 1)."),
        ),
        Pass(
            "forward", outer="kv", inner="q", keeps=("k", "v"), streams=("q",), updates=("out", "m", "l"),
            programs="head", fused=True, products=(1, 1), registers=("m", "l"),
            says=(
                "Load K{j} and V{j}: they stay on chip while all tiles of queries that see them go by.",
                "Load Q{i}, and O{i}, m, l as they are so far. " + _ONLINE.replace("acc", "O{i}")
                + " O{i} is divided by l, and O{i}, m, l are written back: the next tile of keys will want them again.",
                "K{j} and V{j} have met all their queries, and are never loaded again.",
            ),
        ),
    ),
)  # fmt: skip

Q_OUTER = Schedule(
    "q_outer",
    (
        Pass(
            "forward", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("out", "lse"), products=(1, 1),
            registers=("m", "l", "acc"),
            says=(
                "Load Q{i}: it stays on chip. m = −∞, l = 0, acc = 0, in registers.",
                "Load K{j} and V{j}. " + _ONLINE,
                "All keys were seen: write O{i} = acc / l and LSE = m + ln l, once.",
            ),
        ),
    ),
)  # fmt: skip

# ---- backward --------------------------------------------------------------------------------------------------------

STANDARD_BACKWARD = Schedule(
    "standard",
    (
        Pass(
            "dV = Pᵀ dO", outer="kv", inner="q", streams=("p",), once=("d_out",), leaves=("d_v",), skips=False,
            shared=True, products=(0, 1), registers=("d_v",),
            says=(
                "dV{j} = 0.",
                "Read P{i},{j}, which the forward kept: dV{j} = dV{j} + P{i},{j}ᵀ dO{i}.",
                "Write dV{j}.",
            ),
        ),
        Pass(
            "dP = dO Vᵀ", outer="q", inner="kv", keeps=("d_out",), once=("v",), writes=("d_p",), skips=False,
            products=(0, 1),
            says=("Load dO{i}.", "dP{i},{j} = dO{i} V{j}ᵀ, and written out.", "The rows of dP lie in slow memory."),
        ),
        Pass(
            "dS = P ∘ (dP − delta)", outer="q", inner="kv", streams=("p", "d_p"), writes=("d_s",), skips=False,
            registers=("delta",),
            says=(
                "Next rows: delta = rowsum(P ∘ dP), what the softmax's denominator takes back.",
                "Read P{i},{j} and dP{i},{j}, write dS{i},{j} = P ∘ (dP − delta).",
                "The rows of dS lie in slow memory.",
            ),
        ),
        Pass(
            "dQ = scale · dS K", outer="q", inner="kv", streams=("d_s",), once=("k",), leaves=("d_q",), skips=False,
            products=(1, 0), registers=("d_q",),
            says=("dQ{i} = 0.", "Read dS{i},{j}: dQ{i} = dQ{i} + scale · dS{i},{j} K{j}.", "Write dQ{i}."),
        ),
        Pass(
            "dK = scale · dSᵀ Q", outer="kv", inner="q", streams=("d_s",), once=("q",), leaves=("d_k",), skips=False,
            shared=True, products=(1, 0), registers=("d_k",),
            says=("dK{j} = 0.", "Read dS{i},{j} again: dK{j} = dK{j} + scale · dS{i},{j}ᵀ Q{i}.", "Write dK{j}."),
        ),
    ),
    backward=True,
)  # fmt: skip

_AGAIN = (
    "Compute P{i},{j} again from Q{i}, K{j} and the statistics of the row, rather than read it. dV{j} += Pᵀ dO{i}; "
    "dP = dO{i} V{j}ᵀ; dS = P ∘ (dP − delta); dK{j} += scale · dSᵀ Q{i}; dQ{i} += scale · dS K{j}"
)

KV_OUTER_BACKWARD = Schedule(
    "kv_outer",
    (
        Pass(
            "begin", outer="q", leaves=("d_q",), programs="head",
            says=("Nothing was added yet.", "", "Write dQ{i} = 0 (line 5 of the paper's algorithm 4)."),
        ),
        Pass(
            "backward", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "out", "d_out", "m", "l"),
            updates=("d_q",), leaves=("d_k", "d_v"), shared=True, programs="head", fused=True, products=(3, 2),
            registers=("d_k", "d_v"),
            says=(
                "Load K{j} and V{j}. dK{j} = dV{j} = 0, and stay on chip.",
                "Load Q{i}, O{i}, dO{i}, m, l and dQ{i} as it is so far. delta = rowsum(dO ∘ O), anew for every tile. "
                + _AGAIN + ", which is written back.",
                "Write dK{j} and dV{j}, once.",
            ),
        ),
    ),
    backward=True,
)  # fmt: skip

Q_OUTER_BACKWARD = Schedule(
    "q_outer",
    (
        Pass(
            "delta = rowsum(dO ∘ O)", outer="q", keeps=("out", "d_out"), leaves=("delta", "d_q"),
            says=("Load O{i} and dO{i}.", "", "Write delta, a number for each row, and dQ{i} = 0, to be added to."),
        ),
        Pass(
            "backward", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "d_out", "lse", "delta"),
            updates=("d_q",), leaves=("d_k", "d_v"), shared=True, products=(3, 2), registers=("d_k", "d_v"),
            says=(
                "Load K{j} and V{j}; in the backward it is the keys that own a program. dK{j} = dV{j} = 0.",
                "Load Q{i}, dO{i}, LSE and delta. " + _AGAIN + " in slow memory, since other programs add to it too.",
                "Write dK{j} and dV{j}, once.",
            ),
        ),
    ),
    backward=True,
)  # fmt: skip

FORWARD = {one.name: one for one in (STANDARD, KV_OUTER, Q_OUTER)}
BACKWARD = {one.name: one for one in (STANDARD_BACKWARD, KV_OUTER_BACKWARD, Q_OUTER_BACKWARD)}

NAMES = (*FORWARD, *BACKENDS)

# ---- the backends' plans ---------------------------------------------------------------------------------------------


def of_plan(p: Problem, plan: Plan) -> Schedule:
    """What a backend's forward plan moves. Raises ``ValueError`` for a schedule that is not described here."""
    name = {"tiled": "q_outer", "eager": "standard"}.get(plan.schedule, plan.schedule)
    made = Schedule(f"{plan.backend} {plan.schedule}", _forward_passes(p, plan, name), plan.tile_q or 64,
                    plan.tile_kv or 64, plan.split_kv)  # fmt: skip
    return _with_operands(p, made)


def _forward_passes(p: Problem, plan: Plan, name: str) -> tuple[Pass, ...]:
    leaves = ("out", "lse") if p.return_lse else ("out",)
    body, pages = Q_OUTER.passes[0], ("page_table",) if p.page_size else ()
    if name == "q_outer":
        return (replace(body, leaves=leaves, streams=body.streams + pages),)
    if name == "grouped":
        return (replace(body, leaves=leaves, streams=body.streams + pages, together=True),)
    if name == "split_kv":
        whole = replace(body, leaves=leaves, streams=body.streams + pages, together=True, splits=True)
        if not plan.split_kv or p.seq_kv <= plan.split_kv:
            return (whole,)
        parts = Pass("merge", outer="q", keeps=("part",), together=True, splits=True)
        return replace(whole, leaves=("part",)), parts, Pass("merge", outer="q", leaves=leaves, together=True)
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


def backward_of(p: Problem, backend: str) -> Schedule:
    """What a backend's backward moves. Raises ``ValueError`` for one that has none of its own."""
    if backend == "triton":
        return _with_operands(p, _triton_backward(p))
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
        return _with_operands(p, Schedule("cpu backward", passes, tile_q, tile_kv, backward=True))
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


def _with_operands(p: Problem, schedule: Schedule) -> Schedule:
    """Dense masks and biases are read in every visited tile by what computes S; so is an entry of the tile map of any
    mask that is more than closed bounds, whose hidden tiles the Problem alone doesn't tell."""
    operands = pair_operands(p)
    if p.form == "dense" and not all(isinstance(term, Bounds) for term in p.mask):
        operands += (Array("tile map", "kv", lambda _: 4 / schedule.tile_kv),)
    if not operands:
        return schedule
    names = tuple(array.name for array in operands)
    passes = tuple(
        replace(one, streams=one.streams + names) if one.inner and one.products[0] else one for one in schedule.passes
    )
    return replace(schedule, passes=passes, arrays=(*schedule.arrays, *operands))


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
    else:
        from attnworks.backends.cuda import CAPABILITY
        from attnworks.backends.cuda import plans as cuda_plans

        if p.form == "decode" or hardware.capability not in (CAPABILITY, None):
            raise ValueError(f"backend: 'cuda' runs no caches, and nothing but compute capability {CAPABILITY}")
        found = [cuda_plans.plan_for(p)]
    if not found:
        raise ValueError(f"backend: {backend!r} has no plan that fits {hardware.name}")
    return found[0]


def named(name: str, p: Problem, hardware: Hardware, *, backward: bool = False) -> Schedule:
    """A schedule of the papers, a backend's on ``hardware`` ("cpu", "triton", "cuda"), or one of a user's own
    ("FILE.py:NAME"). Raises ``ValueError`` for any other name."""
    papers = BACKWARD if backward else FORWARD
    if name in papers:
        return papers[name]
    if name in BACKENDS:
        return backward_of(p, name) if backward else of_plan(p, plan_on(p, name, hardware))
    return from_file(name)


def from_file(written: str) -> Schedule:
    """A schedule of a user's own: "path/to/file.py:NAME". Raises ``ValueError`` where there is none by that name."""
    path, _, name = written.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(
            f"schedule: was {named!r}, must be one that has a name or FILE.py:NAME with a file that exists"
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, Schedule):
        raise ValueError(f"schedule: {name!r} in {path} was {type(found).__name__}, must be a loops.Schedule")
    return found
