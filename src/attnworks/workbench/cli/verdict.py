"""The verdict of a verification run in the terminal, readable at 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from attnworks.workbench import summary
from attnworks.workbench.cli import output
from attnworks.workbench.summary import Worst
from attnworks.workbench.sweep import Coverage
from attnworks.workbench.verify import Result

MOST_FAILURES = 25


def show(results: Sequence[Result], coverage: Sequence[Coverage] = ()) -> None:
    """Print errors beside their budgets, their distribution, what was skipped, the sweep's coverage, failures, and at
    the end, where it is seen, the verdict."""
    rows = summary.worst(results)
    for subject in summary.counts(results):
        _errors(subject, [row for row in rows if row.subject == subject])
    spreads = output.table("by", "group", "tensors", "median", "P90", "P99", "max", text_columns=2)
    for s in summary.distribution(results):
        shares = map(output.in_percent, (s.median, s.p90, s.p99, s.largest))
        spreads.add_row(s.by, escape(s.group), str(s.count), *shares)
    if rows:
        _table("Distribution of errors as shares of their budgets", spreads)
    _skipped(results)
    if coverage:
        covered = output.table("subject", "pairs", "of", "cases", "refused")
        for c in coverage:
            covered.add_row(escape(c.subject), *map(str, (c.pairs, c.legal, c.cases, c.refused)))
        _table("Sweep: pairs of levels covered", covered)
    _totals(results)
    _failures([result for result in results if result.status == "failed"], len(results))


def _errors(subject: str, rows: list[Worst]) -> None:
    """The tightest case of each dtype and tensor of one subject."""
    if not rows:
        return
    columns = ("dtype", "tensor", "error", "budget", "share", "relative", "yardstick", "eager")
    errors = output.table(*columns, text_columns=2)
    for row in sorted(rows, key=lambda row: row.dtype):
        m, check = row.measure, row.check
        numbers = (check.error, check.budget)
        errors.add_row(
            row.dtype, row.tensor, *map(_number, numbers), output.in_percent(check.share),
            *map(_number, (m.frobenius, m.yardstick, m.eager)),
            style=None if check.passed else "red",
        )  # fmt: skip
    output.print_table(f"{subject}: the tightest case of each dtype and tensor", errors)
    tightest = max(rows, key=lambda row: (not row.check.passed, row.check.share))
    where = f" ({tightest.check.where})" if tightest.check.where else ""
    output.print_notes(
        [f"tightest: {tightest.check.name} of {tightest.tensor} in {tightest.case}{where}, seed {tightest.seed}", ""]
    )


def _skipped(results: Sequence[Result]) -> None:
    reasons = summary.skipped(results)
    if not reasons:
        return
    listed = output.table("subject", "reason", "checks", text_columns=2)
    for (subject, reason), count in sorted(reasons.items()):
        listed.add_row(escape(subject), escape(reason), str(count))
    _table("Skipped, by the subject's own word", listed)


def _totals(results: Sequence[Result]) -> None:
    totals = output.table("subject", "passed", "failed", "skipped", "hand", "oracle", "fused", "property")
    for subject, by_status in summary.counts(results).items():
        layers = (str(by_status[f"{layer} passed"]) for layer in ("hand", "oracle", "fused", "property"))
        statuses = (str(by_status[status]) for status in ("passed", "failed", "skipped"))
        totals.add_row(escape(subject), *statuses, *layers)
    _table("Checks", totals)


def _table(title: str, made: Table) -> None:
    output.print_table(title, made)
    output.console().print()


def _failures(failed: list[Result], checks: int) -> None:
    console = output.console()
    for result in failed[:MOST_FAILURES]:
        text = f"FAILED {result.subject}: {result.check} of {result.case.name}: {result.message}"
        console.print(text, style="red", markup=False)
    if len(failed) > MOST_FAILURES:
        console.print(f"and {len(failed) - MOST_FAILURES} more failures (--json and --report list them all)")
    if failed:
        console.print(f"{len(failed)} of {checks} checks failed", style="bold red")
    else:
        console.print("all passed", style="bold green")


def _number(value: float) -> str:
    if math.isnan(value):
        return output.UNKNOWN
    return "0" if value == 0 else f"{value:.1e}"
