"""``attnworks sweep``: tiles of the Triton kernel compiled for a card that need not be here, and judged."""

from __future__ import annotations

import os
from typing import Any

import click
from rich.markup import escape

from attnworks import hardware
from attnworks.hardware import Hardware
from attnworks.problem import Problem
from attnworks.workbench import tile_sweep
from attnworks.workbench.cli.output import (
    UNKNOWN,
    in_bytes,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    table,
)
from attnworks.workbench.cli.problems import Numbers, problem_from, problem_options

DEFAULT_SEQ = 4096
NOTE = "Nothing was timed: the order is the traffic model's. Measure before you believe it."


@click.command()
@problem_options(heads=16, seq=DEFAULT_SEQ, head_dim=128, dtype="float16")
@click.option("--on", "card", required=True, help=f"The card: {', '.join(hardware.machines())}, or how one begins.")
@click.option("--tile-q", type=Numbers(), default="64,128", show_default=True, help="Rows of a Q tile.")
@click.option("--tile-kv", type=Numbers(), default="32,64,128", show_default=True, help="Keys of a KV tile.")
@click.option("--warps", type=Numbers(), default="4,8", show_default=True, help="Warps of a program.")
@click.option("--stages", type=Numbers(), default="2,3", show_default=True, help="Depth of the software pipeline.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile.  [default: one for each core]")
@json_option
@click.pass_context
def sweep(
    ctx: click.Context, /, card: str, tile_q: Any, tile_kv: Any, warps: Any, stages: Any, jobs: int | None,
    as_json: bool, **_: Any,
) -> None:  # fmt: skip
    """Compile the Triton kernel's tiles for a card that need not be here: what they take, which are no good and why.

    The forward of dense problems with closed masks; seconds for each candidate.
    """
    problem = problem_from(ctx, DEFAULT_SEQ)
    names = find_machines(card)
    machine = hardware.load(names[0])
    plans = tile_sweep.candidates(tile_q, tile_kv, warps, stages)
    with progress() as report:
        judged = tile_sweep.sweep(problem, plans, machine, jobs=jobs or os.cpu_count() or 1, progress=report)
    notes = [*tile_sweep.statements(judged, machine), NOTE]
    if len(names) > 1:
        notes.append(f"--on {card} begins {', '.join(names)}: this is {names[0]}.")
    if as_json:
        found = {"problem": problem.to_json(), "machine": names[0], "candidates": [one.to_json() for one in judged]}
        print_json(found | {"notes": notes})
    else:
        _print(problem, machine, judged, notes)


def find_machines(begins: str) -> list[str]:
    """The machine of that name, or all whose names begin so. Raises ``ValueError`` for none."""
    if begins in hardware.machines():
        return [begins]
    found = [name for name in hardware.machines() if name.startswith(begins)]
    if not found:
        raise ValueError(f"--on: was {begins!r}, must be, or begin, one of {', '.join(hardware.machines())}")
    return found


def _print(problem: Problem, machine: Hardware, judged: list[tile_sweep.Judged], notes: list[str]) -> None:
    p = problem
    title = f"{p.heads_q} heads, N {p.seq_q} x {p.seq_kv}, d {p.head_dim}/{p.head_dim_v}, {p.to_json()['dtype']}"
    columns = ("shared", "registers", "spilled", "matrix instr.", "programs/unit", "modelled", "bytes", "rejected")
    made = table("tile_q x tile_kv, warps, stages", *columns)
    made.columns[-1].justify = "left"
    for one in judged:
        c, plan = one.compiled, one.plan
        facts = (c.registers, c.spills, c.matrix_instructions, one.programs)
        made.add_row(
            f"{plan.tile_q} x {plan.tile_kv}, {plan.warps}, {plan.stages}",
            in_bytes(c.shared) if not c.error else UNKNOWN,
            *(UNKNOWN if fact is None else str(fact) for fact in facts),
            in_seconds(one.modelled_seconds) if machine.bandwidth else UNKNOWN,
            in_bytes(one.modelled_bytes),
            escape("; ".join(one.rejected)),
        )
    good = sum(not one.rejected for one in judged)
    limit = f", at most {in_bytes(machine.block_bytes)} of shared memory a program" if machine.block_bytes else ""
    print_table(f"{title}\non {machine.name}{limit}: {good} of {len(judged)} candidates are good", made)
    print_notes(notes)
