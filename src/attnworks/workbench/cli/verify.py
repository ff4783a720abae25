"""``attnworks verify``: is it right?"""

from __future__ import annotations

import faulthandler
import shlex
import sys
import time
from pathlib import Path

import click

from attnworks.workbench import catalogue, summary
from attnworks.workbench.cli import output, verdicts
from attnworks.workbench.conventions import BY_NAME
from attnworks.workbench.hunt import kill_table
from attnworks.workbench.isolation import TIMEOUT
from attnworks.workbench.probing import Prepared, prepare
from attnworks.workbench.sweep import Coverage
from attnworks.workbench.verify import Ahead, Result, chosen_subjects
from attnworks.workbench.verify import verify as run

IN_PROCESS = """A crash of the kernel will end this run, which is in its process.
Without --in-process it is a failure like any other."""


@click.command()
@click.argument("target", required=False)
@click.option("--backend", default="auto-all", show_default=True, help="Name of a backend, or of one of its plans.")
@click.option("--device", default="cpu", show_default=True, help="Where backends run: cpu, cuda or cuda:1.")
@click.option(
    "--convention", type=click.Choice(list(BY_NAME)), help="How TARGET is called.  [default: by its parameters' names]"
)
@click.option("--in-process", is_flag=True, help="Run TARGET in this process: faster, but a crash ends the run.")
@click.option("--timeout", default=TIMEOUT, show_default=True, help="Seconds for a call of TARGET, then it is killed.")
@click.option(
    "--case", "cases", multiple=True, help="Part of a name, glob pattern or tag (form, dtype); may be repeated."
)
@click.option("--quick", is_flag=True, help="One or two cases of every kind.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs and of the sweep.")
@click.option("--list", "list_only", is_flag=True, help="List the cases and stop.")
@click.option(
    "--mutants", "run_mutants", is_flag=True, help="Prove that the checks bite: every wrong kernel must be caught."
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Begin no check after this long; what finds most comes first, and time left goes to further seeds.",
)
@click.option("--report", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write an HTML page.")
@click.option("--wide", is_flag=True, help="More columns than 80 characters hold.")
@output.json_option
@click.pass_context
def verify(
    ctx: click.Context,
    target: str | None,
    backend: str,
    device: str,
    convention: str | None,
    in_process: bool,
    timeout: float,
    cases: tuple[str, ...],
    quick: bool,
    seed: int,
    list_only: bool,
    run_mutants: bool,
    budget: float | None,
    report: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """Prove a kernel right: hand-computed cases, fp64 on stress inputs, torch's fused attention, and properties.

    TARGET is any kernel, "package.module:function" or "path/file.py:function"; without one, attnworks' own backends.
    Every error is printed beside its budget. Exit code 1 if anything fails, or if nothing could be checked.
    """
    if target is None and (convention or in_process):
        raise click.UsageError("--convention and --in-process are about a TARGET, which is missing")
    if target is not None and ctx.get_parameter_source("backend") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--backend names one of attnworks' own kernels: it cannot be given beside a TARGET")
    if target is not None and device != "cpu":
        raise click.UsageError("--device is about attnworks' own kernels: a TARGET gets tensors on the CPU")
    if list_only:
        _list(cases, quick, wide, as_json)
    elif run_mutants:
        _mutants(seed, as_json)
    else:
        if in_process:
            # Nothing can be said once it has happened; Python's own handler then shows where.
            if not faulthandler.is_enabled():
                faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
            click.echo(IN_PROCESS, err=True)
        with Ahead() as ahead, output.progress() as progress:
            prepared = None
            if target is not None:
                if not cases and not in_process:  # the other process takes seconds to load torch
                    ahead.guess(catalogue.select(quick=True, seed=seed))
                prepared = prepare(target, convention, isolated=not in_process, timeout=timeout)
            subjects = chosen_subjects(backend, quick, device) if prepared is None else (prepared.subject,)
            started = time.monotonic()
            results = run(
                subjects=subjects, cases=cases, quick=quick, seed=seed, budget=budget, progress=progress, ahead=ahead
            )
        coverage = summary.coverage(subjects, results)
        if report:
            _report(report, results, coverage, seed, budget, time.monotonic() - started)
        failed = [result for result in results if result.status == "failed"]
        if as_json:
            _print_json(prepared, results, coverage, failed)
        else:
            _print(prepared, results, coverage, failed, wide)
        if prepared is not None:
            prepared.close()
        sys.exit(1 if failed or summary.nothing_checked(results) else 0)


def _list(patterns: tuple[str, ...], quick: bool, wide: bool, as_json: bool) -> None:
    chosen = catalogue.select(patterns, quick=quick)
    if as_json:
        output.print_json(
            [{"name": c.name, "stresses": c.stresses, "form": c.form, "source": c.source} for c in chosen]
        )
        return
    listed = output.table("case", "stresses", *(("form", "source") if wide else ()), text_columns=4)
    for case in chosen:
        listed.add_row(case.name, case.stresses, *((case.form, case.source) if wide else ()))
    output.print_table(f"{len(chosen)} cases", listed)


def _mutants(seed: int, as_json: bool) -> None:
    with output.progress() as report:
        kills = kill_table(seed=seed, progress=report)
    survivors = [kill for kill in kills if not kill.check]
    if as_json:
        output.print_json({"passed": not survivors, "kills": [kill.to_json() for kill in kills]})
    else:
        listed = output.table("fault", "caught by", "on", text_columns=3)
        for kill in kills:
            listed.add_row(kill.fault, kill.check or "nothing", kill.case)
        output.print_table(f"{len(kills) - len(survivors)} of {len(kills)} wrong kernels caught", listed)
    sys.exit(1 if survivors else 0)


def _report(
    path: str, results: list[Result], coverage: list[Coverage], seed: int, budget: float | None, seconds: float
) -> None:
    from attnworks.workbench import report  # plots and templates: only where a page is asked for

    command = shlex.join(["attnworks", *sys.argv[1:]])
    page = report.render(results, report.Run(command, seed, budget, seconds), coverage)
    Path(path).write_text(page, encoding="utf-8")
    click.echo(f"report: {path}", err=True)


def _print_json(
    prepared: Prepared | None, results: list[Result], coverage: list[Coverage], failed: list[Result]
) -> None:
    kernel = {} if prepared is None else {"kernel": prepared.to_json()}
    spreads = [spread.to_json() for spread in summary.distribution(results)]
    gradients = [row.to_json() for row in summary.worst_gradients(results)]
    found = {
        "distribution": spreads,
        "worst_gradients": gradients,
        "coverage": [covered.to_json() for covered in coverage],
    }
    listed = [result.to_json() for result in results]
    passed = not failed and not summary.nothing_checked(results)
    output.print_json({"passed": passed, **kernel, **found, "results": listed})


def _print(
    prepared: Prepared | None, results: list[Result], coverage: list[Coverage], failed: list[Result], wide: bool
) -> None:
    if prepared is not None:
        verdicts.print_kernel(prepared, results)
    verdicts.print_errors(results, wide)
    verdicts.print_gradients(results, wide)
    verdicts.print_distribution(results)
    if prepared is None:
        verdicts.print_skipped(results)
    verdicts.print_coverage(coverage)
    verdicts.print_totals(results)
    if summary.nothing_checked(results):
        output.console().print("nothing was checked: the reasons are listed above", style="red")
    else:
        verdicts.print_failures(failed)
