"""``attnworks casestudy``: long-sequence inference from standard attention to tiles that fit, one change at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.markup import escape

from attnworks import hardware
from attnworks.hardware import detect
from attnworks.masks import Causal
from attnworks.problem import Problem
from attnworks.workbench import casestudy as study
from attnworks.workbench import environment, porting
from attnworks.workbench.cli.output import (
    UNKNOWN,
    console,
    in_bytes,
    in_percent,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    table,
)
from attnworks.workbench.cli.problems import DTYPES, TIME, Numbers
from attnworks.workbench.cli.stored import db_option, keep, problem_in_words, ready
from attnworks.workbench.providers import describe


class Scenario(NamedTuple):
    lengths: tuple[int, ...]
    batch: int
    heads: int
    dtype: str


FULL = Scenario((4096, 8192), 8, 16, "float16")
# What 2 cores do in about two minutes. PyTorch multiplies 16-bit matrices many times as slowly where the CPU has no
# such instructions, which would say more of that than of attention.
ON_CPU = Scenario((4096,), 1, 2, "float32")
SIZE = click.IntRange(min=1)


@click.command()
@click.option("--lengths", type=Numbers(), help="N, between commas.  [default: 4096,8192; CPU: 4096]")
@click.option("--batch", type=SIZE, help=f"Sequences.  [default: {FULL.batch}; CPU: {ON_CPU.batch}]")
@click.option("--heads", type=SIZE, help=f"Heads.  [default: {FULL.heads}; CPU: {ON_CPU.heads}]")
@click.option("--head-dim", type=SIZE, default=128, show_default=True, help="Channels of q, k and v.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: float16; CPU: float32]")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: cuda where there is one]")
@click.option(
    "--on", "cards", default="t4", show_default=True, help="Cards to predict for, between commas; '' for none."
)
@click.option(
    "--budget",
    type=TIME,
    default=0.5,
    show_default=True,
    help="Minutes for the timed runs of a length.",
)
@db_option
@json_option
def casestudy(
    lengths: tuple[int, ...] | None, batch: int | None, heads: int | None, head_dim: int, dtype: str | None,
    device: str | None, cards: str, budget: float, db: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Causal inference over long sequences: a profile of standard attention, then relative times with it at 1.00.

    Tiles too large (rejected, with the reason), tiles of 64 x 64, the causal skip, the backend's own choice: each step
    is one change, its error against fp64 beside it. The same is predicted for cards elsewhere, at the full sizes.
    """
    place = environment.place(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = ON_CPU if place == "cpu" else FULL
    machines = [hardware.load(name.strip()) for name in cards.split(",") if name.strip()]
    for machine in machines:
        porting.check(machine)
    ready(db)
    protocol = replace(study.PROTOCOL, budget_seconds=60 * budget)
    found = []
    for n in lengths or usual.lengths:
        posed = _problem(batch or usual.batch, heads or usual.heads, n, head_dim, dtype or usual.dtype)
        with progress() as report:
            one = study.study(replace(posed, device=place), protocol, report)
        keep(db, one.records)
        found.append(one)
        if not as_json:
            _print(one)
    full = _problem(batch or FULL.batch, heads or FULL.heads, FULL.lengths[0], head_dim, dtype or FULL.dtype)
    guesses = {machine.name: study.predicted(full, machine) for machine in machines}
    if as_json:
        print_json({
            "studies": [one.to_json() for one in found],
            "predicted": {name: [guess.to_json() for guess in rows] for name, rows in guesses.items()},
        })  # fmt: skip
        return
    for name, rows in guesses.items():
        _print_guesses(full, name, rows)


def _problem(batch: int, heads: int, n: int, head_dim: int, dtype: str) -> Problem:
    return describe(
        form="dense", batch=batch, heads_q=heads, heads_kv=heads, seq_q=n, seq_kv=n, head_dim=head_dim,
        head_dim_v=head_dim, dtype=DTYPES[dtype], mask=Causal(),
    )  # fmt: skip


def _print(one: study.Study) -> None:
    p, profile = one.problem, one.profile
    title = f"{problem_in_words(p.to_json())} on {detect(p.device).name}"
    base = next((row.record for row in one.rows if row.step.plan is None), None)
    kernels = table("kernel of standard attention", "calls", "of its time")
    for kernel in profile.kernels:
        kernels.add_row(escape(kernel.name[:70]), str(kernel.calls), in_percent(kernel.share))
    print_table(f"{title}\nprofile of standard attention", kernels)
    print_notes([
        f"S and P take {in_bytes(profile.matrix_bytes)} each; inputs and output {in_bytes(profile.minimum_bytes)}.",
        f"It moves {in_bytes(profile.modelled_bytes)} (model) and holds "
        f"{in_bytes(base.peak_extra_bytes if base else None)} beside inputs and output (measured).",
    ])  # fmt: skip
    console().print()
    made = table("step", "relative time", "median", "error", "of bound", "modelled bytes", "change or reason")
    made.columns[-1].justify = "left"
    for row in one.rows:
        record = row.record
        cells = [UNKNOWN] * 5
        if record:
            error, share = record.check["largest_error"], record.check["worst_share_of_bound"]
            cells = [f"{row.share:.2f}" if row.share else UNKNOWN, in_seconds(record.median), f"{error:.2g}",
                     in_percent(share), in_bytes(record.modelled_bytes)]  # fmt: skip
        made.add_row(row.step.name, *cells, escape("; ".join(row.rejected) or row.step.change))
    print_table("one change at a time, standard attention at 1.00; error: the largest against fp64", made)
    print_notes(
        [*(f"{row.step.name}: {row.record.form}" for row in one.rows if row.record), *(base.notes if base else ())]
    )
    console().print()


def _print_guesses(problem: Problem, name: str, guesses: list[study.Guess]) -> None:
    made = table("step", "relative, at best", "without L2", "time", "bound by", "bytes", "change or reason")
    made.columns[-1].justify = "left"
    for guess in guesses:
        told = escape("; ".join(guess.rejected) or guess.step.change)
        if guess.prediction is None or guess.shares is None:
            made.add_row(guess.step.name, *[UNKNOWN] * 5, told)
            continue
        best, cold = guess.shares
        made.add_row(guess.step.name, f"{best:.2f}", f"{cold:.2f}", in_seconds(guess.prediction.seconds),
                     guess.prediction.bound, in_bytes(guess.prediction.bytes), told)  # fmt: skip
    print_table(f"predicted, nothing was run: {problem_in_words(problem.to_json())} on {name}", made)
    print_notes(
        ["At the card's full rates. “At best”: every re-read of a tile is found in the L2; “without L2”: none is."]
    )
