"""Tiles judged by the compiler: what a forward kernel, of Triton or in CUDA C++, would take of a card that need not be
here.

What the backend would refuse is rejected before anything else. Every other candidate is compiled for the card's target;
one that takes more of the card than there is, spills registers or uses no matrix instruction is rejected with the
reason, and the rest are ranked by the traffic model. Nothing is timed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product
from multiprocessing import get_context
from typing import Any

from attnworks import traffic
from attnworks.backends import Backend, Compiled, cuda, triton
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.schedules import modelled_bytes

# CUDA keeps this much of a multiprocessor's shared memory for itself for each resident block, from capability 8.0 on.
_RESERVED_BYTES = 1024
# Registers are given to a thread in steps of so many; a multiprocessor is made of quarters with a share of them each.
_REGISTER_STEP = 8
_QUARTERS = 4

Progress = Callable[[str, int, int], None]
"""Called with what is being done, candidates done and candidates in all."""


@dataclass(frozen=True)
class Judged:
    """One candidate. ``rejected``: every reason why it is no good, empty if it is. ``programs``: how many of them a
    multiprocessor holds at a time, by shared memory, registers and warps; None where the card's file doesn't say.
    Bytes and seconds are the traffic model's."""

    plan: Plan
    compiled: Compiled
    rejected: tuple[str, ...]
    programs: int | None
    modelled_bytes: int
    modelled_seconds: float

    def to_json(self) -> dict[str, Any]:
        c = self.compiled
        return {
            "plan": self.plan.to_json(),
            "shared": None if c.error else c.shared,
            "registers": c.registers,
            "spills": c.spills,
            "matrix_instructions": c.matrix_instructions,
            "error": c.error,
            "rejected": list(self.rejected),
            "programs": self.programs,
            "modelled_bytes": self.modelled_bytes,
            "modelled_seconds": self.modelled_seconds,
        }


def candidates(
    tile_q: Sequence[int], tile_kv: Sequence[int], warps: Sequence[int], stages: Sequence[int]
) -> list[Plan]:
    """Every combination, as plans of the Triton backend's forward."""
    sizes = product(tile_q, tile_kv, warps, stages)
    return [Plan("triton", "q_outer", q, kv, warps=warp, stages=stage) for q, kv, warp, stage in sizes]


def target_of(machine: Hardware) -> tuple[str, int | str, int]:
    """(backend, architecture, warp size) by which Triton knows the card. Raises ``ValueError`` where its file names no
    architecture."""
    if machine.capability and machine.kind == "gpu" and not machine.arch:
        major, minor = machine.capability.split(".")
        return "cuda", int(major) * 10 + int(minor), 32
    if machine.arch:
        return "hip", machine.arch, machine.warp_size or 64
    raise ValueError(f"machine: was {machine.name}, must be a GPU whose file states its capability or arch")


def sweep(
    problem: Problem, plans: Sequence[Plan], machine: Hardware, *, jobs: int = 1, progress: Progress | None = None
) -> list[Judged]:
    """Every plan judged, the good ones first and among them those with the least modelled time.

    ``problem``: dense, with closed bounds and scores without operands; its device is not looked at. ``plans``: all of
    one backend, "triton" or "cuda". ``jobs``: processes that compile. Raises ``ValueError`` where the backend's
    compiler is missing, or Triton in its interpreter.
    """
    if not plans:
        raise ValueError("plans: were none, must be at least one")
    backend = cuda if plans[0].backend == cuda.NAME else triton
    if reason := cuda.missing() if backend is cuda else triton.cannot_compile():
        raise ValueError(f"sweep: {reason}")
    found, good = [], []
    for plan in plans:
        if why := refusal(problem, plan, backend):
            found.append(judge(problem, plan, Compiled(error=why), machine))
        else:
            good.append(plan)
    made = compile_all(target_of(machine), [(problem, plan) for plan in good], jobs)
    for done, (index, compiled) in enumerate(made, 1):
        found.append(judge(problem, good[index], compiled, machine))
        if progress:
            progress("compiling", done, len(good))
    return sorted(found, key=lambda one: (bool(one.rejected), one.modelled_seconds, -(one.programs or 0)))


def refusal(problem: Problem, plan: Plan, backend: Backend) -> str:
    """Why the backend would not take the plan, "" if it would."""
    try:
        backend.check_plan(problem, plan)
    except ValueError as error:
        return str(error)
    return ""


def judge(problem: Problem, plan: Plan, compiled: Compiled, machine: Hardware) -> Judged:
    """What the compiler said of a plan, held against the card."""
    shape = plan.schedule, plan.tile_q, plan.split_kv or plan.tile_kv
    bytes_, seconds = modelled_bytes(problem, plan, machine.units), traffic.modelled_seconds(problem, *shape, machine)
    programs = None if compiled.error else resident(plan, compiled, machine)
    return Judged(plan, compiled, _reasons(problem, compiled, machine, programs), programs, bytes_, seconds)


def _reasons(problem: Problem, c: Compiled, machine: Hardware, programs: int | None) -> tuple[str, ...]:
    if c.error:
        return (c.error.strip().splitlines()[-1] if "\n" in c.error else c.error,)
    reasons = []
    if machine.block_bytes is not None and c.shared > machine.block_bytes:
        reasons.append(f"{c.shared} bytes of shared memory, the card gives a program {machine.block_bytes}")
    elif programs == 0:
        reasons.append(f"{c.registers} registers a thread, the card holds not one such program")
    if c.warning:
        reasons.append(c.warning.splitlines()[0])
    if c.spills:
        reasons.append(f"{c.spills} bytes of registers spilled to memory")
    if machine.matrix_shapes and problem.element_size == 2 and c.matrix_instructions == 0:
        reasons.append("no matrix instructions")
    return tuple(reasons)


def resident(plan: Plan, c: Compiled, machine: Hardware) -> int | None:
    """Programs that a multiprocessor holds at a time; None where a fact is missing."""
    if None in (machine.on_chip_bytes, machine.unit_registers, machine.unit_warps, machine.warp_size, c.registers):
        return None
    assert machine.on_chip_bytes and machine.unit_registers and machine.unit_warps and machine.warp_size
    registers = -(-max(c.registers or 0, 1) // _REGISTER_STEP) * _REGISTER_STEP
    reserved = _RESERVED_BYTES if machine.capability and float(machine.capability) >= 8 else 0
    warps = machine.unit_registers // _QUARTERS // (registers * machine.warp_size) * _QUARTERS
    by_shared = machine.on_chip_bytes // max(c.shared + reserved, 1)
    return min(by_shared, min(warps, machine.unit_warps) // plan.warps)


def statements(judged: Sequence[Judged], machine: Hardware) -> list[str]:
    """What Triton's candidates show between them, in sentences."""
    if any(one.plan.backend != triton.NAME for one in judged):
        return []
    compiled = [one for one in judged if not one.compiled.error]
    arch = target_of(machine)[1]
    name = f"sm_{arch}" if isinstance(arch, int) else arch
    if not compiled:
        return [f"Triton {metadata.version('triton')} compiled none of {len(judged)} candidates for {name}."]
    if machine.matrix_shapes and not any(one.compiled.matrix_instructions for one in compiled):
        return [
            f"Triton {metadata.version('triton')} emitted no matrix instruction for {name} in any of {len(compiled)} "
            f"compiled candidates, though the card has them ({', '.join(machine.matrix_shapes)})."
        ]
    return []


# ---- compiling -------------------------------------------------------------------------------------------------------


def compile_all(
    target: tuple[str, int | str, int], asked: Sequence[tuple[Problem, Plan]], jobs: int
) -> Iterator[tuple[int, Compiled]]:
    """(place, what the compiler made of the forward kernel), as they are done. A compiler that crashes takes its
    process along: those that were in it are compiled again, each in a process of its own."""
    crashed = []
    if not asked:
        return
    with _processes(min(jobs, len(asked))) as pool:
        futures: dict[Future[Compiled], int] = {
            pool.submit(_compile, target, *one): index for index, one in enumerate(asked)
        }
        for future in as_completed(futures):
            if isinstance(future.exception(), BrokenProcessPool):
                crashed.append(futures[future])
            else:
                yield futures[future], future.result()
    for index in crashed:
        with _processes(1) as pool:
            future = pool.submit(_compile, target, *asked[index])
            if isinstance(future.exception(), BrokenProcessPool):
                yield index, Compiled(error="the compiler crashed")
            else:
                yield index, future.result()


def _processes(count: int) -> ProcessPoolExecutor:
    # spawn: a forked child would inherit the locks of torch's threads as they happen to stand.
    return ProcessPoolExecutor(max(count, 1), get_context("spawn"))


def _compile(target: tuple[str, int | str, int], problem: Problem, plan: Plan) -> Compiled:
    """In a process of its own."""
    if plan.backend == cuda.NAME:
        from attnworks.backends.cuda import plans, source
        from attnworks.backends.cuda.compile import judged

        built = plans.variant(problem, plan)
        return judged(source.text(built), built.shared_bytes)
    return _compile_triton(target, problem, plan)


def _compile_triton(target: tuple[str, int | str, int], problem: Problem, plan: Plan) -> Compiled:
    """Its stderr is taken: the compiler's words belong to the result, not into the progress bar."""
    from triton.backends.compiler import GPUTarget

    from attnworks.backends.triton.compile import compile_plan

    with tempfile.TemporaryFile("w+") as words:
        os.dup2(words.fileno(), 2)
        try:
            (_, compiled), *_ = compile_plan(GPUTarget(*target), problem, plan)  # the other one merges splits
        except (RuntimeError, ValueError) as error:  # before compiling: a target or an option that Triton doesn't know
            return Compiled(error=f"{type(error).__name__}: {error}")
        words.seek(0)
        said = [line.split("error: ", 1)[1] for line in words if "error: " in line]
    if compiled.error and said:
        compiled = replace(compiled, error=f"{compiled.error}: {said[0].strip()}")
    return replace(compiled, asm=None)
