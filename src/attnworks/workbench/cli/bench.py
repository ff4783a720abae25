"""``attnworks bench``: kernels measured against each other on a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape

from attnworks.masks import Causal
from attnworks.problem import Problem
from attnworks.workbench import records
from attnworks.workbench.bench import Protocol, Result, measure
from attnworks.workbench.cli.output import (
    console,
    in_bytes,
    in_percent,
    in_rate,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    table,
)
from attnworks.workbench.cli.problems import given, problem_from, problem_options
from attnworks.workbench.cli.stored import db_option, keep
from attnworks.workbench.providers import NAMES, by_name, describe, label
from attnworks.workbench.records import Record

DEFAULT_SEQ = 1024
DEFAULT_PROVIDERS = ("attnworks", "attnworks-head-major", "sdpa", "sdpa-grouped", "sdpa-causal", "standard")
QUICK_SECONDS = 3.0


@click.command()
@problem_options(heads=8, seq=DEFAULT_SEQ, head_dim=64, dtype="float32")
@click.option("--providers", help=f"Of {', '.join(NAMES)}.  [default: all of attnworks and torch that fit]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads for all of them.  [default: torch's]")
@click.option("--runs", type=click.IntRange(min=5), default=50, show_default=True, help="Timed runs of each.")
@click.option("--budget", type=float, default=30.0, show_default=True, help="Seconds for the timed runs of a problem.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS:g} seconds for a problem instead.")
@click.option("--seed", type=int, help="Of inputs and order.  [default: a new one each time]")
@click.option("--save", type=click.Path(path_type=Path), help="Append the records to this file (JSON lines).")
@db_option
@click.option("--no-history", is_flag=True, help="Do not keep the records in the history.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    providers: str | None,
    threads: int | None,
    runs: int,
    budget: float,
    quick: bool,
    seed: int | None,
    save: Path | None,
    db: Path | None,
    no_history: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Time attnworks against torch SDPA and standard attention, interleaved, with intervals on the ratios.

    Without problem options: a prefill, a causal prefill and a decode step of grouped heads. Every run is kept in the
    history (see `attnworks history`). Exit code 1 if a kernel's results are wrong (it is not timed then).
    """
    protocol = Protocol(runs=runs, budget_seconds=QUICK_SECONDS if quick else budget, threads=threads, seed=seed)
    names = DEFAULT_PROVIDERS if providers is None else [name.strip() for name in providers.split(",")]
    chosen = [by_name(name) for name in names]
    results = []
    for problem in [problem_from(ctx, DEFAULT_SEQ)] if given(ctx) else _default_problems():
        with progress() as report:
            result = measure(problem, chosen, protocol, report)
        results.append(result)
        if not no_history:
            keep(db, result.records)
        if save:
            records.save(save, result.records)
        if not as_json:
            _print(problem, result, tell_refusals=providers is not None)
    if as_json:
        print_json({"results": [result.to_json() for result in results]})
    if any(result.failed for result in results):
        ctx.exit(1)


def _default_problems() -> list[Problem]:
    sizes = {"batch": 1, "heads_q": 8, "heads_kv": 8, "head_dim": 64, "head_dim_v": 64, "dtype": torch.float32}
    prefill = sizes | {"form": "dense", "seq_q": DEFAULT_SEQ, "seq_kv": DEFAULT_SEQ}
    decode = sizes | {"form": "decode", "seq_q": 1, "seq_kv": 8192, "heads_q": 32, "head_dim": 128, "head_dim_v": 128}
    return [describe(**prefill), describe(**prefill, mask=Causal()), describe(**decode)]


def _print(problem: Problem, result: Result, *, tell_refusals: bool) -> None:
    p = problem.to_json()
    title = (
        f"{problem.form}: batch {problem.batch}, heads {problem.heads_q}/{problem.heads_kv}, "
        f"{problem.seq_q} queries x {problem.seq_kv} keys, head_dim {problem.head_dim}, {p['dtype']}, mask {p['mask']}"
    )
    columns = ("of FMA peak", "of reads", "effective", "extra memory", "modelled bytes")
    own = result.records[0] if result.records else None
    made = table("kernel", "median", "P90", "ratio (99 %)" if own else "", *columns)
    for record in result.records:
        ratio = "" if record is own or own is None else escape(str(own.ratio_to(record)))
        made.add_row(*_row(record, ratio))
    print_table(title, made)
    notes = [f"ratio: how many times as fast {label(own.provider)} is"] if own else []
    notes += [f"{label(record.provider)}: {record.form}" for record in result.records]
    if tell_refusals:
        notes += [f"{label(name)}: not run, {reason}" for name, reason in result.refused.items()]
    print_notes(notes + (list(own.notes) if own else []))
    for complaint in result.failed.values():
        console().print(complaint, style="bold red", markup=False)
    console().print()


def _row(record: Record, ratio: str) -> tuple[str, ...]:
    return (
        label(record.provider),
        in_seconds(record.median),
        in_seconds(record.percentile_90),
        ratio,
        in_percent(record.share_of_peak_flops),
        in_percent(record.share_of_read_bandwidth),
        in_rate(record.flops_per_second, "FLOP/s"),
        in_bytes(record.peak_extra_bytes),
        in_bytes(record.modelled_bytes),
    )
