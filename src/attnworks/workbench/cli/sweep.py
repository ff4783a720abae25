"""``attnworks sweep``: tiles measured on the device at hand, or compiled and judged for a card elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape

from attnworks import hardware, prepared, tuned
from attnworks.backends import cuda, triton
from attnworks.errors import UnsupportedError
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench import environment, measured_sweep, porting, tile_sweep
from attnworks.workbench.cli import heat
from attnworks.workbench.cli.output import (
    UNKNOWN,
    console,
    in_bytes,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    table,
)
from attnworks.workbench.cli.problems import TIME, Numbers, problem_from, problem_options
from attnworks.workbench.cli.stored import db_option, problem_in_words
from attnworks.workbench.history import History
from attnworks.workbench.measured_sweep import Found, Grid

DEFAULT_SEQ = 4096
# What 2 cores can sweep in two minutes.
CPU_DEFAULTS = {"heads": 8, "seq": 1024, "head_dim": 64, "dtype": "float32"}
NOTE = "Nothing was timed: the order is the traffic model's. Measure before you believe it."
MEASURING = ("device", "threads", "budget", "again", "profile", "db", "into")
BETWEEN = (
    "Times at the card's full rates: with every re-read found in the L2, and with none. Measured ones will lie above "
    "the first."
)
SIZES = ("tile_q", "tile_kv", "warps", "stages")


@click.command()
@problem_options(heads=16, seq=DEFAULT_SEQ, head_dim=128, dtype="float16")
@click.option("--on", "card", help=f"Compile for a card instead: {', '.join(hardware.machines())}, or how one begins.")
@click.option("--tile-q", type=Numbers(), help="Rows of a Q tile.  [default: the backend's grid]")
@click.option("--tile-kv", type=Numbers(), help="Keys of a KV tile; of a cache on the CPU, of a task.")
@click.option("--warps", type=Numbers(), help="Warps of a program (Triton).")
@click.option("--stages", type=Numbers(), help="Depth of the software pipeline (GPUs).")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: cuda where there is one]")
@click.option("--backend", default="auto", show_default=True, help="Whose tiles: cpu, triton or cuda; --on: triton's.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU.  [default: torch's]")
@click.option("--budget", type=TIME, default=2.0, show_default=True, help="Minutes; run again to go on.")
@click.option("--again", is_flag=True, help="Measure anew what an earlier sweep measured.")
@click.option(
    "--profile",
    is_flag=True,
    help="Count what the finalists do: on a GPU bytes, cycles and bank conflicts with ncu, on a CPU its counters.",
)
@db_option
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), help="Folder of tuned plans.  [the user's]")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that compile.  [default: one for each core]")
@json_option
@click.pass_context
def sweep(
    ctx: click.Context, /, card: str | None, device: str | None, jobs: int | None, as_json: bool, **_: Any
) -> None:
    """Find the fastest tiles: measured on the device at hand, or with --on compiled and judged for a card elsewhere.

    Measured: what does not fit is rejected with the reason, the rest verified and timed against the backend's own
    choice in the same rounds. Each run is in the history at once: interrupted, it goes on where it was. The fastest
    plan, where it is faster beyond doubt, is written to the tuned plans that every call looks into.
    """
    jobs = jobs or os.cpu_count() or 1
    if card is not None:
        _refuse(ctx, MEASURING, "--on measures nothing")
        _compile(ctx, problem_from(ctx, DEFAULT_SEQ), card, jobs, as_json)
        return
    place = environment.place(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place == "cpu":
        _refuse(ctx, ("warps", "stages"), "only kernels of GPUs have such a choice")
        _take_defaults(ctx, CPU_DEFAULTS)
    _measure(ctx, replace(problem_from(ctx, DEFAULT_SEQ), device=place), jobs, as_json)


def _refuse(ctx: click.Context, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')}: was given, but {why}")


def _take_defaults(ctx: click.Context, defaults: dict[str, Any]) -> None:
    """In the place of the options' own."""
    for name, value in defaults.items():
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            ctx.params[name] = value


def _grid(ctx: click.Context, default: Grid) -> Grid:
    return Grid(*(ctx.params[name] or whole for name, whole in zip(SIZES, default, strict=True)))


# ---- measured --------------------------------------------------------------------------------------------------------


def _measure(ctx: click.Context, problem: Problem, jobs: int, as_json: bool) -> None:
    o = ctx.params
    if o["threads"]:
        torch.set_num_threads(o["threads"])
    backend = measured_sweep.backend_for(problem, o["backend"])
    with progress() as report:
        found = measured_sweep.sweep(
            problem, History(o["db"]), backend=backend, grid=_grid(ctx, measured_sweep.GRIDS[backend]),
            seconds=60 * o["budget"], jobs=jobs, again=o["again"], progress=report,
        )  # fmt: skip
        path = _write(found, o["into"])  # before what takes minutes on some GPUs
        if o["profile"]:
            found = measured_sweep.profiled(found, report)
    if as_json:
        print_json(found.to_json() | {"written": str(path) if path else None})
        return
    heat.print_found(_title(problem, found.hardware), found)
    if path:
        gone = "had a faster plan for calls like this one; its row has gone, the backend's choice is as good."
        print_notes([f"{path} has it: calls like this one take it from now on." if found.row else f"{path} {gone}"])


def _write(found: Found, into: Path | None) -> Path | None:
    """Keep the plan of a sweep that is decided; where the backend's own choice is as good, an older row goes. Returns
    the file if it was changed."""
    if found.best is None:
        return None
    path = (into or tuned.users_folder()) / tuned.file_name(found.hardware)
    key = tuned.key_of(found.problem, found.hardware, found.table.backend)
    if not found.row and key not in tuned.read(path, found.hardware.name):
        return None
    tuned.write(path, found.hardware.name, {key: found.row})
    prepared.forget()
    return path


def _title(problem: Problem, machine: Hardware) -> str:
    return f"{problem_in_words(problem.to_json())} on {machine.name}"


# ---- compiled --------------------------------------------------------------------------------------------------------


def _compile(ctx: click.Context, problem: Problem, card: str, jobs: int, as_json: bool) -> None:
    names = find_machines(card)
    machine = hardware.load(names[0])
    plans = _candidates(ctx, problem, machine)
    with progress() as report:
        judged = tile_sweep.sweep(problem, plans, machine, jobs=jobs, progress=report)
    # Which cards the cuda backend is for leaves nothing to port.
    ported = porting.report(problem, machine) if plans[0].backend == triton.NAME else None
    notes = [*tile_sweep.statements(judged, machine), NOTE]
    if ported and cuda.verdict(replace(problem, device="cuda"), machine).supported:
        notes.append("Calls there would take backend cuda, whose tiles --backend cuda judges.")
    if len(names) > 1:
        notes.append(f"--on {card} begins {', '.join(names)}: this is {names[0]}.")
    if as_json:
        found = {"problem": problem.to_json(), "machine": names[0], "candidates": [one.to_json() for one in judged]}
        print_json(found | {"porting": ported.to_json() if ported else None, "notes": notes})
    else:
        _print(problem, machine, judged, notes)
        if ported:
            _print_porting(ported)


def _candidates(ctx: click.Context, problem: Problem, machine: Hardware) -> list[Plan]:
    """Raises ``UnsupportedError`` for a card or a problem that the cuda backend refuses."""
    name = ctx.params["backend"]
    if name in ("auto", triton.NAME):
        return tile_sweep.candidates(*_grid(ctx, measured_sweep.GRIDS[triton.NAME]))
    if name != cuda.NAME:
        raise click.UsageError(f"--backend: was {name!r}, must be 'auto', 'triton' or 'cuda' with --on")
    _refuse(ctx, ("warps",), "those of backend cuda follow from the rows of its tiles")
    verdict = cuda.verdict(replace(problem, device="cuda"), machine)
    if not verdict.supported:
        raise UnsupportedError([verdict], name)
    table = cuda.candidates(problem, machine)[0]
    return measured_sweep.plans(problem, table, _grid(ctx, measured_sweep.GRIDS[name]), cuda, machine)


def find_machines(begins: str) -> list[str]:
    """The machine of that name, or all whose names begin so. Raises ``ValueError`` for none."""
    if begins in hardware.machines():
        return [begins]
    found = [name for name in hardware.machines() if name.startswith(begins)]
    if not found:
        raise ValueError(f"--on: was {begins!r}, must be, or begin, one of {', '.join(hardware.machines())}")
    return found


def _print(problem: Problem, machine: Hardware, judged: list[tile_sweep.Judged], notes: list[str]) -> None:
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
    limit = f"at most {in_bytes(machine.block_bytes)} of shared memory a program: " if machine.block_bytes else ""
    print_table(f"{_title(problem, machine)}\n{limit}{good} of {len(judged)} candidates are good", made)
    print_notes(notes)


def _print_porting(ported: porting.Porting) -> None:
    console().print()
    console().print(f"Porting to {ported.machine.name}", style="bold", markup=False)
    for one in ported.findings:
        console().print(f"{one.topic}: {one.says}", markup=False)
        console().print(f"  [{one.source}]", style="dim", markup=False)
    for why, count in ported.rejected.items():
        console().print(f"rejected: {count} of {ported.tried} tile plans for their {why}", markup=False)
    made = table("try first", "shared", "registers >=", "programs/unit", "at best", "without L2", "bound by")
    for tried in ported.first:
        guess = tried.prediction
        made.add_row(measured_sweep.words(tried.plan), in_bytes(tried.shared), str(tried.registers),
                     str(tried.programs), *_times(guess))  # fmt: skip
    if ported.standard:
        made.add_row("standard attention", *[UNKNOWN] * 3, *_times(ported.standard))
    print_table("", made)
    print_notes([BETWEEN])


def _times(guess: porting.Prediction) -> tuple[str, str, str]:
    return in_seconds(guess.least), in_seconds(guess.seconds), guess.bound
