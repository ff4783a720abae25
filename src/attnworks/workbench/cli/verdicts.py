"""The tables of ``attnworks verify``: they fit 80 columns; ``wide`` adds the columns that do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.markup import escape

from attnworks.workbench import summary
from attnworks.workbench.cli import output
from attnworks.workbench.probing import Prepared
from attnworks.workbench.sweep import Coverage
from attnworks.workbench.verify import Result

MOST_FAILURES = 20  # printed; all are in --json
MOST_CHARACTERS = 200  # of what a kernel raised
_SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


def print_kernel(prepared: Prepared, results: list[Result]) -> None:
    """What was found out about a kernel, and what of the cases it was therefore not given."""
    known, abilities = prepared.to_json(), prepared.subject.abilities
    listed = output.table("", "", text_columns=2)
    listed.show_header = False
    listed.add_row("kernel", escape(prepared.subject.name))
    listed.add_row("runs", f"isolated, {known['timeout']:g} s a call" if known["isolated"] else "in this process")
    if prepared.about:
        listed.add_row("convention", f"{known['convention']}: q, k, v {known['layout']}, causal {known['causal']}")
        listed.add_row("parameters", ", ".join(known["parameters"]))
    listed.add_row("dtypes", ", ".join(_SHORT.get(name, name) for name in known["abilities"]["dtypes"]))
    can = {
        "grouped heads": abilities.gqa,
        "head_dim_v of its own": abilities.unequal_dims,
        "LSE": abilities.lse,
        "gradients": abilities.gradients,
    }
    listed.add_row("can do", ", ".join(name for name, able in can.items() if able) or "none of what was tried")
    for number, (what, why) in enumerate(prepared.refused.items()):
        listed.add_row("" if number else "cannot do", escape(f"{_SHORT.get(what, what)}: {why[:MOST_CHARACTERS]}"))
    skipped = Counter(result.message for result in results if result.status == "skipped")
    for number, (reason, count) in enumerate(skipped.most_common()):
        listed.add_row("" if number else "not checked", escape(f"{count} checks: {reason}"))
    output.print_table("What is being verified", listed)


def print_errors(results: list[Result], wide: bool) -> None:
    """For each subject the tightest case of each dtype and tensor, and where the tightest of all is."""
    rows = sorted(summary.worst(results), key=lambda row: row.dtype)
    for subject in dict.fromkeys(row.subject for row in rows):
        own = [row for row in rows if row.subject == subject]
        more = ("test", "worst row", "max abs", "cosine", "case") if wide else ()
        columns = ("dtype", "tensor", "error", "budget", "share", "relative", "yardstick", "eager")
        errors = output.table(*columns, *more, text_columns=2)
        for row in own:
            m, check = row.measure, row.check
            extra = (check.name, _number(m.row_error), _number(m.max_abs), f"{m.cosine:.6f}", escape(row.case))
            errors.add_row(
                row.dtype, row.tensor, _number(check.error), _number(check.budget), output.in_percent(check.share),
                _number(m.frobenius), _number(m.yardstick), _number(m.eager), *(extra if wide else ()),
                style=None if check.passed else "red",
            )  # fmt: skip
        output.print_table(f"{subject}: errors beside their budgets, the tightest of each", errors)
        tightest = max(own, key=lambda row: (not row.check.passed, row.check.share))
        where = f" ({tightest.check.where})" if tightest.check.where else ""
        output.print_notes([f"tightest: {tightest.check.name} of {tightest.tensor} in {tightest.case}{where}"])


def print_gradients(results: list[Result], wide: bool) -> None:
    """For each subject the inputs on which each gradient came closest to its budget."""
    rows = summary.worst_gradients(results)
    for subject in dict.fromkeys(row.subject for row in rows):
        listed = output.table(
            "dtype", "gradient", "inputs", *(("case",) if wide else ()), "share", text_columns=3 + wide
        )
        for row in rows:
            if row.subject == subject:
                case = (escape(row.case),) if wide else ()
                listed.add_row(row.dtype, row.tensor, row.inputs, *case, output.in_percent(row.check.share))
        output.print_table(f"{subject}: the inputs on which each gradient is worst, by share of its budget", listed)


def _number(value: float) -> str:
    return output.UNKNOWN if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def print_distribution(results: list[Result]) -> None:
    spreads = output.table("by", "tensors", "median", "P90", "P99", "max")
    alone = len({result.subject for result in results}) == 1
    for s in summary.distribution(results):
        if alone and s.by == "subject":  # which is all of them
            continue
        shares = (f"{x:.3g}" for x in (s.median, s.p90, s.p99, s.largest))
        spreads.add_row(escape(f"{s.by}: {s.group}"), str(s.count), *shares)
    output.print_table("Errors as shares of their budgets (1 would fail)", spreads)


def print_coverage(coverage: Sequence[Coverage]) -> None:
    """What of the sweep each subject ran."""
    if coverage:
        listed = output.table("sweep of", "pairs of levels", "of", "cases", "refused")
        for c in coverage:
            listed.add_row(escape(c.subject), *map(str, (c.pairs, c.legal, c.cases, c.refused)))
        output.print_table("Covered by the sweep", listed)


def print_skipped(results: list[Result]) -> None:
    """Why subjects were not asked, where they were several."""
    reasons = summary.skipped(results)
    if reasons:
        listed = output.table("subject", "reason", "checks", text_columns=2)
        for (subject, reason), count in sorted(reasons.items()):
            listed.add_row(escape(subject), escape(reason), str(count))
        output.print_table("Skipped, by the subject's own verdict", listed)


def print_totals(results: list[Result]) -> None:
    totals = output.table("kernel", "passed", "failed", "skipped", "hand", "oracle", "fused", "property")
    for subject, by_status in summary.counts(results).items():
        layers = (str(by_status[f"{layer} passed"]) for layer in ("hand", "oracle", "fused", "property"))
        counts = (str(by_status[status]) for status in ("passed", "failed", "skipped"))
        totals.add_row(escape(subject), *counts, *layers)
    output.print_table("Checks (right: those passed, by layer)", totals)


def print_failures(failed: list[Result]) -> None:
    for result in failed[:MOST_FAILURES]:
        output.console().print(
            f"FAILED {result.subject}: {result.check} of {result.case.name}: {result.message}",
            style="red",
            markup=False,
        )
    if len(failed) > MOST_FAILURES:
        output.console().print(
            f"and {len(failed) - MOST_FAILURES} more: --json and --report have them all", style="red"
        )
    if not failed:
        output.console().print("all passed", style="green")
