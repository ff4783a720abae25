"""The tables of ``attnworks verify``: they fit 80 columns; ``wide`` adds the columns that do not."""

from __future__ import annotations

from collections import Counter

from rich.markup import escape

from attnworks.workbench import summary
from attnworks.workbench.cli import output
from attnworks.workbench.probing import Prepared
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
    """For each subject the tightest case of each dtype and tensor."""
    rows = summary.worst(results)
    for subject in dict.fromkeys(row.subject for row in rows):
        more = ("test", "max abs", "rel. Frobenius", "yardstick", "cosine") if wide else ()
        errors = output.table("dtype", "tensor", "error", "budget", "share", *more, "tightest case", text_columns=2)
        for row in rows:
            if row.subject != subject:
                continue
            m, check = row.measure, row.check
            extra = (check.name, f"{m.max_abs:.1e}", f"{m.frobenius:.1e}", f"{m.yardstick:.1e}", f"{m.cosine:.6f}")
            errors.add_row(
                _SHORT.get(row.dtype, row.dtype), row.tensor, f"{check.error:.1e}", f"{check.budget:.1e}",
                output.in_percent(check.share), *(extra if wide else ()), escape(row.case),
            )  # fmt: skip
        errors.columns[-1].justify = "left"
        output.print_table(f"{subject}: errors beside their budgets", errors)


def print_distribution(results: list[Result]) -> None:
    spreads = output.table("by", "tensors", "median", "P90", "P99", "max")
    alone = len({result.subject for result in results}) == 1
    for s in summary.distribution(results):
        if alone and s.by == "backend":  # which is all of them
            continue
        shares = (f"{x:.3g}" for x in (s.median, s.p90, s.p99, s.largest))
        spreads.add_row(escape(f"{s.by}: {_SHORT.get(s.group, s.group)}"), str(s.count), *shares)
    output.print_table("Errors as shares of their budgets (1 would fail)", spreads)


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
        output.console().print(f"and {len(failed) - MOST_FAILURES} more: --json has all of them", style="red")
    if not failed:
        output.console().print("all passed", style="green")
