"""``attnworks verify``: is it right?"""

from __future__ import annotations

import sys

import click

from attnworks.workbench import catalogue, mutants, summary
from attnworks.workbench.cli import output
from attnworks.workbench.verify import Result
from attnworks.workbench.verify import verify as run


@click.command()
@click.option("--backend", default="auto-all", show_default=True, help="Name of a backend, or of one of its plans.")
@click.option(
    "--case", "cases", multiple=True, help="Part of a name, glob pattern or tag (form, dtype); may be repeated."
)
@click.option("--quick", is_flag=True, help="One or two cases of every kind.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--list", "list_only", is_flag=True, help="List the cases and stop.")
@click.option(
    "--mutants", "run_mutants", is_flag=True, help="Prove that the checks bite: every wrong kernel must be caught."
)
@output.json_option
def verify(
    backend: str, cases: tuple[str, ...], quick: bool, seed: int, list_only: bool, run_mutants: bool, as_json: bool
) -> None:
    """Prove the backends right: hand-computed cases, fp64 on stress inputs, torch's fused attention, and properties.

    Every error is printed beside its budget. Exit code 1 if anything fails.
    """
    if list_only:
        _list(cases, quick, as_json)
    elif run_mutants:
        _mutants(seed, as_json)
    else:
        with output.progress() as report:
            results = run(backend=backend, cases=cases, quick=quick, seed=seed, progress=report)
        failed = [result for result in results if result.status == "failed"]
        if as_json:
            spreads = [spread.to_json() for spread in summary.distribution(results)]
            output.print_json(
                {"passed": not failed, "distribution": spreads, "results": [result.to_json() for result in results]}
            )
        else:
            _print(results, failed)
        sys.exit(1 if failed else 0)


def _list(patterns: tuple[str, ...], quick: bool, as_json: bool) -> None:
    chosen = catalogue.select(patterns, quick=quick)
    if as_json:
        output.print_json(
            [{"name": c.name, "stresses": c.stresses, "form": c.form, "source": c.source} for c in chosen]
        )
        return
    listed = output.table("case", "form", "stresses", "source", text_columns=4)
    for case in chosen:
        listed.add_row(case.name, case.form, case.stresses, case.source)
    output.print_table(f"{len(chosen)} cases", listed)


def _mutants(seed: int, as_json: bool) -> None:
    with output.progress() as report:
        kills = mutants.kill_table(seed=seed, progress=report)
    survivors = [kill for kill in kills if not kill.check]
    if as_json:
        output.print_json({"passed": not survivors, "kills": [kill.to_json() for kill in kills]})
    else:
        listed = output.table("fault", "caught by", "on", text_columns=3)
        for kill in kills:
            listed.add_row(kill.fault, kill.check or "nothing", kill.case)
        output.print_table(f"{len(kills) - len(survivors)} of {len(kills)} wrong kernels caught", listed)
    sys.exit(1 if survivors else 0)


def _print(results: list[Result], failed: list[Result]) -> None:
    errors = output.table("subject", "dtype", "tensor", "tightest test", "error", "budget", "share", "max abs",
                          "rel. Frobenius", "yardstick", "cosine", "case", text_columns=4)  # fmt: skip
    for row in summary.worst(results):
        m, check = row.measure, row.check
        errors.add_row(
            row.subject, row.dtype, row.tensor, check.name, f"{check.error:.2e}", f"{check.budget:.2e}",
            output.in_percent(check.share), f"{m.max_abs:.1e}", f"{m.frobenius:.1e}", f"{m.yardstick:.1e}",
            f"{m.cosine:.6f}", row.case,
        )  # fmt: skip
    output.print_table("Errors beside their budgets: the tightest case of each", errors)
    spreads = output.table("by", "group", "tensors", "median", "P90", "P99", "max", text_columns=2)
    for s in summary.distribution(results):
        shares = (f"{x:.3g}" for x in (s.median, s.p90, s.p99, s.largest))
        spreads.add_row(s.by, s.group, str(s.count), *shares)
    output.print_table("Distribution of errors as shares of their budgets", spreads)
    reasons = summary.skipped(results)
    if reasons:
        listed = output.table("subject", "reason", "checks", text_columns=2)
        for (subject, reason), count in sorted(reasons.items()):
            listed.add_row(subject, reason, str(count))
        output.print_table("Skipped, by the backend's own verdict", listed)
    totals = output.table("subject", "passed", "failed", "skipped", "hand", "oracle", "fused", "property")
    for subject, by_status in summary.counts(results).items():
        layers = (str(by_status[f"{layer} passed"]) for layer in ("hand", "oracle", "fused", "property"))
        totals.add_row(subject, str(by_status["passed"]), str(by_status["failed"]), str(by_status["skipped"]), *layers)
    output.print_table("Checks", totals)
    for result in failed:
        output.console().print(
            f"FAILED {result.subject}: {result.check} of {result.case.name}: {result.message}",
            style="red",
            markup=False,
        )
    if not failed:
        output.console().print("all passed", style="green")
