"""Porting to a card that need not be here: what does not fit, what must change, which tiles to try first, and how long
it will take at best.

All of it is arithmetic on the facts of ``machines/*.toml`` and on what instruction-set manuals state of the card's
matrix instructions; each finding names its source. Nothing is compiled or timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from attnworks import traffic
from attnworks.backends.triton import plans as triton_plans
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Problem

FIRST = 3  # tiles to try

ROWS_OF_A_WARP = 16
_FP32 = 4


@dataclass(frozen=True)
class Finding:
    """``topic``: "does not fit", "layout", "pipeline" or "rates"; ``source``: of the fact it follows from."""

    topic: str
    says: str
    source: str


@dataclass(frozen=True)
class Prediction:
    """The time of a plan on a card at its full rates: the longer of its bytes and its products, named by ``bound``.

    ``seconds``: every re-read of a tile comes from the slow memory. ``least``: each input is read once, as if all
    re-reads were found in the L2; for standard attention, whose S and P no L2 holds, the same. A real kernel lies
    between the two where it is bound by memory, and above them for whatever else it waits for."""

    seconds: float
    least: float
    bound: str
    bytes: int
    flops: int


@dataclass(frozen=True)
class Candidate:
    """A plan with what it takes by its declaration: bytes of shared memory, and registers of a thread for S and O in
    fp32 and P in the input dtype alone. ``programs``: how many of them a multiprocessor's shared memory holds."""

    plan: Plan
    shared: int
    registers: int
    programs: int
    prediction: Prediction


@dataclass(frozen=True)
class Porting:
    """The report. ``first``: tiles to try, the most promising first; ``rejected``: of all that were looked at, how many
    did not fit, by what they lacked. ``standard``: the time of standard attention there."""

    machine: Hardware
    findings: tuple[Finding, ...]
    first: tuple[Candidate, ...]
    rejected: dict[str, int]
    tried: int
    standard: Prediction | None

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "findings": [asdict(one) for one in self.findings],
            "first": [asdict(one) for one in self.first],
            "rejected": self.rejected,
            "tried": self.tried,
            "standard": asdict(self.standard) if self.standard else None,
        }


# ---- facts of instruction sets ---------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """Of matrix instructions whose shape begins so: channels that one of them contracts, and where P comes from."""

    begins: str
    depth: int
    says: str
    source: str


INSTRUCTIONS = (
    Instruction(
        "m64", 16,
        "K and V are read from shared memory by descriptor, Q too or from registers; P goes from S's accumulators to A "
        "operands in registers. Rows come in groups of 64 for each four warps.",
        "PTX ISA, wgmma.mma_async: register fragments and matrix descriptors",
    ),
    Instruction(
        "m16n8k16", 16,
        "Two neighbouring 16 x 8 accumulators of S are one 16 x 16 A operand of P V in the same registers: P needs no "
        "shared memory.",
        "PTX ISA, matrix fragments for mma.m16n8k16",
    ),
    Instruction(
        "m16n8k8", 8,
        "Half as deep as m16n8k16: twice as many instructions for the same product, head dims padded to 8 only. One "
        "16 x 8 accumulator of S is one A operand of P V in the same registers: P needs no shared memory.",
        "PTX ISA, matrix fragments for mma.m16n8k8 (f16)",
    ),
    Instruction(
        "32x32x8", 8,
        "A lane's accumulators lie along a column: compute S transposed (K Qᵀ), whose accumulators are then the B "
        "operands of Vᵀ Pᵀ in the same lanes; computed the other way round P must go through LDS.",
        "AMD Instinct MI100 ISA, V_MFMA_F32_32X32X8F16: operand and result layouts",
    ),
)  # fmt: skip
NO_INSTRUCTION = (
    "No matrix instructions: both products are multiply-adds of the vector units. Give each lane a block of S of "
    "several rows and keys, so that what it reads of Q and K from on-chip memory is used more than once."
)


class Since(NamedTuple):
    """What NVIDIA's cards have from a compute capability on, and what to do without."""

    capability: float
    topic: str
    says: str
    source: str


FEATURES = (
    Since(
        8.0, "pipeline",
        "No asynchronous copy to shared memory: tiles pass through registers, so each tile in flight takes registers, "
        "too. Begin with one stage.",
        "PTX ISA, cp.async: requires sm_80",
    ),
    Since(9.0, "pipeline", "No bulk copies of tiles by TMA: warps compute addresses and copy themselves (cp.async).",
          "PTX ISA, cp.async.bulk.tensor: requires sm_90"),
)  # fmt: skip


# ---- the report ------------------------------------------------------------------------------------------------------


def report(problem: Problem, machine: Hardware) -> Porting:
    """What running ``problem`` on ``machine`` asks for. Raises ``ValueError`` as ``check`` does."""
    check(machine)
    assert machine.block_bytes and machine.on_chip_bytes
    tried = candidates(problem, stages=(1,) if _before(machine, 8.0) or machine.arch else (2, 3))
    fitting: list[Candidate] = []
    rejected: dict[str, int] = {}
    for plan in tried:
        shared, registers = triton_plans.shared_bytes(problem, plan), registers_of(problem, plan, machine)
        if _why_not(shared, registers, machine):
            kind = "shared memory" if shared > machine.block_bytes else "registers"
            rejected[kind] = rejected.get(kind, 0) + 1
            continue
        guess = predict(problem, plan, machine)
        if guess:
            fitting.append(Candidate(plan, shared, registers, machine.on_chip_bytes // shared, guess))
    first: dict[tuple[int, int], Candidate] = {}  # of each pair of tiles the best
    for one in sorted(fitting, key=lambda one: _promise(problem, one, machine)):
        first.setdefault((one.plan.tile_q, one.plan.tile_kv), one)
    found = (*_fit(problem, machine), *_layout(problem, machine), *_pipeline(machine), *_rates(problem, machine))
    return Porting(machine, found, tuple(first.values())[:FIRST], rejected, len(tried),
                   predict(problem, Plan("reference", "standard"), machine))  # fmt: skip


def check(machine: Hardware) -> None:
    """Raises ``ValueError`` for a machine that is no GPU, or whose file states no shared memory of a program."""
    if machine.kind != "gpu" or not machine.block_bytes or not machine.on_chip_bytes:
        raise ValueError(f"machine: was {machine.name}, must be a GPU whose file states block_bytes and on_chip_bytes")


def candidates(problem: Problem, stages: Sequence[int]) -> list[Plan]:
    """Tiles of FlashAttention-2's loop that are looked at; a warp has 16 rows at least, those of one instruction."""
    sizes = product((16, 32, 64, 128), (16, 32, 64, 128), (1, 2, 4, 8), stages)
    return [Plan("triton", "q_outer", q, kv, warps=w, stages=s) for q, kv, w, s in sizes if q >= ROWS_OF_A_WARP * w]


def registers_of(problem: Problem, plan: Plan, machine: Hardware) -> int:
    """Registers of a thread that S and O in fp32 and P in the input dtype take between them."""
    pairs, outputs = plan.tile_q * plan.tile_kv, plan.tile_q * triton_plans.block(problem.head_dim_v)
    held = pairs + outputs + pairs * problem.element_size / _FP32
    return math.ceil(held / (plan.warps * (machine.warp_size or 32)))


def predict(problem: Problem, plan: Plan, machine: Hardware) -> Prediction | None:
    """The time of a plan; None where the machine states no bandwidth or no rate for the dtype."""
    seen = replace(problem, mask=()) if plan.visit_all else problem
    bill = traffic.estimate(seen, plan.schedule, plan.tile_q, plan.tile_kv)
    memory, compute = bill.memory_seconds(machine), bill.compute_seconds(machine, problem.dtype)
    if memory is None or compute is None:
        return None
    bound = "memory" if memory > compute else "products"
    once = memory if bill.scores_and_probs else memory * bill.minimum_bytes / max(bill.total_bytes, 1)
    return Prediction(max(memory, compute), max(once, compute), bound, bill.total_bytes, bill.executed_flops)


def why_not(problem: Problem, plan: Plan, machine: Hardware) -> str:
    """Why a tiled plan cannot fit the card, "" if it may."""
    return _why_not(triton_plans.shared_bytes(problem, plan), registers_of(problem, plan, machine), machine)


def _why_not(shared: int, registers: int, machine: Hardware) -> str:
    assert machine.block_bytes
    if shared > machine.block_bytes:
        return f"{shared} bytes of shared memory, the card gives a program {machine.block_bytes}"
    if machine.thread_registers and registers > machine.thread_registers:
        return f"S, P and O alone take {registers} registers a thread, which has {machine.thread_registers}"
    return ""


def _promise(problem: Problem, one: Candidate, machine: Hardware) -> tuple[bool, float, int, int]:
    """Two programs to a multiprocessor, so that one's softmax runs beside the other's products; then modelled time,
    few steps over the keys (each rescales O), few registers."""
    plan = one.plan
    seconds = traffic.modelled_seconds(problem, plan.schedule, plan.tile_q, plan.tile_kv, machine)
    return one.programs < 2, seconds, -plan.tile_kv, one.registers


def _before(machine: Hardware, capability: float) -> bool:
    return machine.capability is not None and float(machine.capability) < capability


def _fit(problem: Problem, machine: Hardware) -> list[Finding]:
    """The plan of the Triton backend's table, which was measured on an H200."""
    assert machine.block_bytes
    usual = triton_plans.possible(problem, machine)[0]
    shared = triton_plans.shared_bytes(problem, usual)
    fits = "fits" if shared <= machine.block_bytes else "does not fit"
    said = (
        f"The usual tiles, {usual.tile_q} x {usual.tile_kv} with {usual.stages} stages, take {shared} bytes of shared "
        f"memory: that {fits} the {machine.block_bytes} that a program may have here."
    )
    return [Finding("does not fit" if shared > machine.block_bytes else "fits", said, _source(machine, "block_bytes"))]


def _layout(problem: Problem, machine: Hardware) -> list[Finding]:
    if not machine.matrix_shapes:
        return [Finding("layout", NO_INSTRUCTION, _source(machine, "matrix_flops"))]
    found = []
    for known in INSTRUCTIONS:
        shape = next((shape for shape in machine.matrix_shapes if shape.startswith(known.begins)), None)
        if shape is None:
            continue
        found.append(
            Finding("layout", f"{shape}: {known.says}", f"{_source(machine, 'matrix_shapes')}; {known.source}")
        )
        if problem.head_dim % known.depth:
            padded = -(-problem.head_dim // known.depth) * known.depth
            found.append(Finding("layout", f"head_dim {problem.head_dim} is padded to {padded} on chip.", known.source))
        break  # the most capable comes first
    if machine.warp_size == 64:
        said = (
            "Wavefronts of 64 lanes: reductions over the keys of a row span twice as many lanes as on NVIDIA's cards."
        )
        found.append(Finding("layout", said, _source(machine, "warp_size")))
    return found


def _pipeline(machine: Hardware) -> list[Finding]:
    missing = (one for one in FEATURES if _before(machine, one.capability))
    return [Finding(one.topic, one.says, one.source) for one in missing][:1]  # the first implies the others


def _rates(problem: Problem, machine: Hardware) -> list[Finding]:
    dtype = str(problem.dtype).removeprefix("torch.")
    rate = machine.flops_for(problem.dtype)
    if rate is None:
        if problem.dtype == torch.bfloat16 and machine.matrix_flops.get("float16"):
            said = "No rate for bfloat16: use float16, and mind its range (65,504)."
            return [Finding("rates", said, _source(machine, "matrix_flops"))]
        return [Finding("rates", f"No rate for {dtype}: nothing can be predicted.", _source(machine, "matrix_flops"))]
    if not machine.bandwidth:
        return []
    ridge = rate / machine.bandwidth
    bill = traffic.estimate(problem, "q_outer", 64, 64)
    have = bill.executed_flops / max(bill.total_bytes, 1)
    bound = "bandwidth" if have < ridge else "products"
    said = (
        f"Below {ridge:.0f} FLOPs for each byte the card is bound by its bandwidth. Tiles of 64 x 64 reach {have:.0f}: "
        f"bound by {bound}, were nothing found in the L2."
    )
    return [Finding("rates", said, f"{_source(machine, 'bandwidth')}; {_source(machine, 'matrix_flops')}")]


def _source(machine: Hardware, fact: str) -> str:
    return machine.sources.get(fact, machine.sources.get("all", f"machines: {machine.name}"))
