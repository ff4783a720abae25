"""``attnworks bench``: kernels measured against each other on a problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape

from attnworks.masks import Causal
from attnworks.problem import Problem
from attnworks.workbench import counters, environment, records
from attnworks.workbench.bench import Protocol, Result, measure
from attnworks.workbench.cli.counted import CPU_COUNTED, GPU_COUNTED, in_counts
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
from attnworks.workbench.cli.problems import TIME, given, problem_from, problem_options
from attnworks.workbench.cli.stored import db_option, keep, ready
from attnworks.workbench.conventions import BY_NAME
from attnworks.workbench.foreign import Foreign, verify_first
from attnworks.workbench.meters import Progress
from attnworks.workbench.providers import NAMES, Provider, by_name, describe, label
from attnworks.workbench.records import Record

DEFAULT_SEQ, GPU_SEQ = 1024, 4096
DEFAULT_PROVIDERS = ("attnworks", "attnworks-head-major", "sdpa", "sdpa-grouped", "sdpa-causal", "standard")
GPU_PROVIDERS = (
    *("attnworks", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-grouped", "flash-attn-3", "flash-attn-4", "standard"),
)
QUICK_SECONDS = 3.0
INTERRUPTED = 130  # as a shell has it
NOT_COUNTED = "profiling was interrupted"


@click.command()
@click.argument("targets", metavar="[TARGET]...", nargs=-1)
@problem_options(heads=8, seq=DEFAULT_SEQ, head_dim=64, dtype="float32")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1; in bfloat16 on a GPU.")
@click.option("--providers", help=f"Of {', '.join(NAMES)}.  [default: all of attnworks and torch that fit]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads for all of them.  [default: torch's]")
@click.option("--runs", type=click.IntRange(min=5), default=50, show_default=True, help="Timed runs of each, at least.")
@click.option(
    "--most-runs",
    type=click.IntRange(min=5),
    default=400,
    show_default=True,
    help="Where ratios are not yet within 2 %.",
)
@click.option(
    "--budget",
    type=TIME,
    default=30.0,
    show_default=True,
    help="Seconds for the timed runs of a problem.",
)
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS:g} seconds for a problem instead.")
@click.option("--seed", type=int, help="Of inputs and order.  [default: a new one each time]")
@click.option("--convention", type=click.Choice(list(BY_NAME)), help="How a TARGET is called.  [default: by its names]")
@click.option("--no-verify", is_flag=True, help="Check a TARGET on the problem itself only, not with verify --quick.")
@click.option(
    "--profile",
    "profiled",
    is_flag=True,
    help="Also count: on a GPU bytes, cycles and tensor cores with ncu, on a CPU by its hardware counters.",
)
@click.option("--save", type=click.Path(path_type=Path), help="Append the records to this file (JSON lines).")
@db_option
@click.option("--no-history", is_flag=True, help="Do not keep the records in the history.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context, /, targets: tuple[str, ...], device: str, providers: str | None, threads: int | None, runs: int,
    most_runs: int, budget: float, quick: bool, seed: int | None, convention: str | None, no_verify: bool,
    profiled: bool, save: Path | None, db: Path | None, no_history: bool, as_json: bool, **_: Any,
) -> None:  # fmt: skip
    """Time kernels against each other, interleaved, with intervals on the ratios.

    TARGET is any kernel, "package.module:function" or "path/file.py:function": it is timed beside attnworks, torch's
    SDPA and standard attention, once `verify --quick` finds nothing wrong with it. Without problem options: a prefill,
    a causal prefill and a decode step of grouped heads. Every run is kept in the history (see `attnworks history`).
    Exit code 1 if a kernel's results are wrong (it is not timed then).
    """
    place = environment.place(device)
    seconds, most = QUICK_SECONDS if quick else budget, max(runs, most_runs)
    protocol = Protocol(runs=runs, most_runs=most, budget_seconds=seconds, threads=threads, seed=seed)
    usual = DEFAULT_PROVIDERS if place == "cpu" else GPU_PROVIDERS
    names = usual if providers is None else tuple(name.strip() for name in providers.split(","))
    asked = [*(Foreign(target, convention) for target in targets), *map(by_name, names)]
    if not no_history:
        ready(db)
    if save:
        save.open("a").close()  # before anything is measured
    chosen, wrong = _verified(asked, place, no_verify)
    results, stopped = [], False
    for problem in _problems(ctx, place):
        with progress() as report:
            result = measure(problem, chosen, protocol, report)
            if not no_history:
                keep(db, result.records)
            if profiled:
                timed = result.records
                result, stopped = _profiled(problem, result, chosen, report)
                if not no_history:
                    keep(db, result.records, timed)
        result = replace(result, failed=wrong | result.failed)
        results.append(result)
        if save:
            records.save(save, result.records)
        if not as_json:
            _print(problem, result, tell_refusals=providers is not None, targets=targets)
        if stopped:
            break
    if as_json:
        print_json({"results": [result.to_json() for result in results]})
    if stopped:
        ctx.exit(INTERRUPTED)
    if any(result.failed for result in results):
        ctx.exit(1)


def _profiled(problem: Problem, result: Result, chosen: list[Provider], report: Progress) -> tuple[Result, bool]:
    """With what was counted of each, and whether somebody interrupted that: times are good without it."""
    by_names, counted, stopped = {provider.name: provider for provider in chosen}, list(result.records), False
    try:
        for done, one in enumerate(result.records):
            report(f"profiling {label(one.provider)}", done, len(counted))
            counted[done] = counters.with_profile(problem, one, by_names[one.provider])
    except KeyboardInterrupt:
        counted[done:] = [replace(one, notes=(*one.notes, NOT_COUNTED)) for one in counted[done:]]
        stopped = True
    return replace(result, records=tuple(counted)), stopped


def _verified(chosen: list[Provider], device: str, no_verify: bool) -> tuple[list[Provider], dict[str, str]]:
    """Those that may be timed, and what is wrong with the others."""
    wrong: dict[str, str] = {}
    for provider in chosen if not no_verify else ():
        if isinstance(provider, Foreign):
            with progress() as report:
                if complaint := verify_first(provider, device, report):
                    wrong[provider.name] = complaint
    return [provider for provider in chosen if provider.name not in wrong], wrong


def _problems(ctx: click.Context, device: str) -> list[Problem]:
    if device != "cpu" and "dtype" not in given(ctx):
        ctx.params["dtype"] = "bfloat16"
    if given(ctx):
        return [replace(problem_from(ctx, DEFAULT_SEQ if device == "cpu" else GPU_SEQ), device=device)]
    gpu = device != "cpu"
    seq, dtype, heads = (GPU_SEQ, torch.bfloat16, 16) if gpu else (DEFAULT_SEQ, torch.float32, 8)
    sizes = {"batch": 1, "heads_q": heads, "heads_kv": heads, "head_dim": 64, "head_dim_v": 64, "dtype": dtype}
    prefill = sizes | {"form": "dense", "seq_q": seq, "seq_kv": seq}
    decode = sizes | {"form": "decode", "seq_q": 1, "seq_kv": 8192, "heads_q": 32, "heads_kv": 8}
    decode |= {"head_dim": 128, "head_dim_v": 128}
    found = [describe(**prefill), describe(**prefill, mask=Causal()), describe(**decode)]
    return [replace(problem, device=device) for problem in found]


def _print(problem: Problem, result: Result, *, tell_refusals: bool, targets: tuple[str, ...]) -> None:
    p = problem.to_json()
    title = (
        f"{problem.form}: batch {problem.batch}, heads {problem.heads_q}/{problem.heads_kv}, "
        f"{problem.seq_q} queries x {problem.seq_kv} keys, head_dim {problem.head_dim}, {p['dtype']}, mask {p['mask']}"
    )
    own = result.records[0] if result.records else None
    gpu, counted = problem.device != "cpu", any(record.profile for record in result.records)
    host = ("host",) if gpu else ()
    columns = ("of matmul" if gpu else "of FMA peak", "of reads", "effective", "extra memory", "modelled bytes")
    more = (GPU_COUNTED if gpu else CPU_COUNTED) if counted else ()
    made = table("kernel", "median", "P90", *host, "ratio (99 %)" if own else "", *columns, *more)
    for record in result.records:
        ratio = "" if record is own or own is None else escape(str(own.ratio_to(record)))
        made.add_row(*_row(record, ratio, gpu), *(in_counts(record, gpu) if counted else ()))
    print_table(title, made)
    notes = [f"ratio: how many times as fast {label(own.provider)} is"] if own else []
    notes += [f"{label(record.provider)}: {record.form}" for record in result.records]
    told = (
        result.refused if tell_refusals else {name: result.refused[name] for name in targets if name in result.refused}
    )
    notes += [f"{label(name)}: not run, {reason}" for name, reason in told.items()]
    notes += list(dict.fromkeys(note for record in result.records for note in record.notes))
    print_notes(notes + ([f"times: {own.conditions['timed_by']}"] if own else []))
    for complaint in result.failed.values():
        console().print(complaint, style="bold red", markup=False)
    console().print()


def _row(record: Record, ratio: str, gpu: bool) -> tuple[str, ...]:
    return (
        escape(label(record.provider)),
        in_seconds(record.median),
        in_seconds(record.percentile_90),
        *([in_seconds(record.host_median)] if gpu else []),
        ratio,
        in_percent(record.share_of_peak_flops),
        in_percent(record.share_of_read_bandwidth),
        in_rate(record.flops_per_second, "FLOP/s"),
        in_bytes(record.peak_extra_bytes),
        in_bytes(record.modelled_bytes),
    )
