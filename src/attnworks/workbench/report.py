"""The report of a verification run: one HTML page that needs nothing else, neither network nor other files.

Its look, its numbers and the drawing of its plots are ``page.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from attnworks.workbench import environment, hand, page, summary
from attnworks.workbench.metrics import Measure
from attnworks.workbench.page import BAD, BEST, OURS, TEXT, WARN, plain
from attnworks.workbench.sweep import Coverage
from attnworks.workbench.verify import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CASES = 100
LEAST_SHARE = 1e-6  # what is closer to exact is drawn here


@dataclass(frozen=True)
class Run:
    """How a run was made: the command, its seed, budget (minutes) and duration (seconds), and when it ended."""

    command: str = "attnworks verify"
    seed: int = 0
    budget: float | None = None
    seconds: float = 0.0
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))


def render(results: Sequence[Result], run: Run, coverage: Sequence[Coverage] = ()) -> str:
    """The page as a string. Raises ``ModuleNotFoundError`` that names the extra to install, without jinja2 or
    matplotlib."""
    failed = [result for result in results if result.status == "failed"]
    return page.render(
        "report.html.j2",
        run=run,
        failed=failed,
        totals=_totals(results),
        subjects=_subjects(results),
        worst=_worst(results),
        spreads=summary.distribution(results),
        plots=_plots(results),
        skipped=sorted(summary.skipped(results).items()),
        hand=_hand_cases(results),
        coverage=coverage,
        cases=_cases(results),
        machine=environment.machine(),
        versions=environment.versions(),
        commit=environment.commit(),
    )


# ---- what the page shows ---------------------------------------------------------------------------------------------


def _totals(results: Sequence[Result]) -> dict[str, int]:
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for result in results:
        found[result.status] += 1
    return found


def _subjects(results: Sequence[Result]) -> list[dict[str, Any]]:
    layers = ("hand", "oracle", "fused", "property")
    return [
        {
            "name": name,
            "layers": [(layer, counts[f"{layer} passed"], counts[f"{layer} failed"]) for layer in layers],
            **{status: counts[status] for status in ("passed", "failed", "skipped")},
        }
        for name, counts in summary.counts(results).items()
    ]


def _worst(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """By subject, one row for each dtype and tensor."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(summary.worst(results), key=lambda row: row.dtype):
        cells = {name: getattr(row, name) for name in ("dtype", "tensor", "case", "check")}
        bar = min(100.0, 100 * row.check.share)
        found.setdefault(row.subject, []).append(cells | {"m": row.measure, "bar": bar})
    return found


def _cases(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every measured case with its tightest test, those nearest to a budget first."""
    rows = [(result, measure, summary.tightest(measure)) for result, measure in summary.measures(results)]
    rows.sort(key=lambda row: (row[2].passed, -row[2].share))
    return [{"result": result, "m": measure, "check": check} for result, measure, check in rows[:MOST_CASES]]


def _hand_cases(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The hand-computed cases with their inputs, what was worked out and what each subject gave."""
    found = []
    for case_hand in hand.HAND:
        case = case_hand.case
        got: dict[str, list[Measure]] = {}
        for result in results:
            if result.case.name == case.name:
                got.setdefault(result.subject, []).extend(m for m in result.measures if m.numbers)
        if not got:
            continue
        inputs = case.build().values[0]
        written = {"out": case_hand.out, "softmax sum": case_hand.total, "dQ / ln 2": case_hand.dq,
                   "dK / ln 2": case_hand.dk, "dV": case_hand.dv, "dSink": case_hand.dsink}  # fmt: skip
        found.append(
            {
                "name": case.name.removeprefix("hand: "),
                "inputs": {name: _matrix(getattr(inputs, name.lower()).tolist()) for name in ("Q", "K", "V")},
                "written": {name: text.replace("|", " | ") for name, text in written.items() if text},
                "got": {subject: _last_of_each(measures) for subject, measures in got.items()},
            }
        )
    return found


def _last_of_each(measures: Iterable[Measure]) -> list[dict[str, Any]]:
    """One row for each tensor: what was wanted, what came, whether it passed."""
    rows = {}
    for measure in measures:
        assert measure.numbers is not None
        want, got = (_matrix(side[0]) for side in measure.numbers)
        rows[measure.tensor] = {"tensor": measure.tensor, "want": want, "got": got, "passed": measure.passed}
    return list(rows.values())


def _matrix(values: Any) -> str:
    """Nested lists on one line, as in the hand cases: rows separated by ";", heads by "|"."""
    if not isinstance(values, list):
        return f"{values:.7g}"
    depth, inner = 0, values
    while inner and isinstance(inner, list):
        depth, inner = depth + 1, inner[0]
    return {1: ", ", 2: "; ", 3: " | "}.get(depth, " ").join(map(_matrix, values))


# ---- plots -----------------------------------------------------------------------------------------------------------


def _plots(results: Sequence[Result]) -> list[dict[str, str]]:
    pairs = summary.measures(results)
    if not pairs:
        return []
    kinds = _by_kind(pairs)
    compared = page.figure("compared", partial(_compare, groups=kinds), 1.1 + 0.68 * len(kinds))
    text = (
        "Relative Frobenius error of every tensor in all cases: the subject's beside that of the yardstick (a flash "
        "kernel at the same precision) and of eager attention in the input dtype. Boxes are quartiles, whiskers P1 to "
        "P99, dots the largest."
    )
    found = [{"title": "As good as can be?", "svg": compared, "text": text}]
    for by, grouping in summary.GROUPINGS.items():
        groups: dict[str, list[float]] = {}
        for result, measure in pairs:
            groups.setdefault(grouping(result), []).append(summary.tightest(measure).share)
        if by == "subject" and len(groups) < 2:
            continue
        svg = page.figure(by, partial(_shares, groups=_ordered(by, groups)), 1.1 + 0.34 * len(groups))
        text = f"Error as a share of its tightest budget, which is the line at 1; below {LEAST_SHARE:g} all is alike."
        found.append({"title": f"By {by}", "svg": svg, "text": text})
    return found


def _ordered(by: str, groups: dict[str, list[float]]) -> dict[str, list[float]]:
    order = [name for _, _, name in summary.LENGTH_BANDS] if by == "length" else sorted(groups)
    return {name: groups[name] for name in order if name in groups}


def _by_kind(pairs: Sequence[tuple[Result, Measure]]) -> dict[str, list[Measure]]:
    """Measures by dtype and tensor."""
    groups: dict[str, list[Measure]] = {}
    for result, measure in pairs:
        groups.setdefault(f"{summary.dtype_of(result)} {measure.tensor}", []).append(measure)
    return dict(sorted(groups.items()))


def _compare(axes: Axes, groups: dict[str, list[Measure]]) -> None:
    """For each group three boxes: the subject's errors, the yardstick's, eager's."""
    sources: tuple[tuple[str, str, Callable[[Measure], float]], ...] = (
        ("subject", OURS, lambda m: m.frobenius),
        ("yardstick", BEST, lambda m: m.yardstick),
        ("eager", WARN, lambda m: m.eager),
    )
    for place, (label, colour, value) in enumerate(sources):
        values = [[x for x in map(value, ms) if math.isfinite(x) and x > 0] or [1e-12] for ms in groups.values()]
        _boxes(axes, values, [y + 0.27 * (place - 1) for y in range(len(groups))], colour, width=0.2)
        axes.plot([], [], color=colour, linewidth=6, label=label)
    _finish(axes, list(groups), "relative Frobenius error")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.5 / len(groups)), ncols=3, frameon=False,
                fontsize=9, labelcolor=TEXT)  # fmt: skip


def _shares(axes: Axes, groups: dict[str, list[float]]) -> None:
    values = [[max(LEAST_SHARE, min(share, 1e6)) for share in shares] for shares in groups.values()]
    _boxes(axes, values, list(range(len(groups))), OURS, width=0.5)
    axes.axvline(1, color=BAD, linewidth=1.5)
    _finish(axes, [f"{name} ({len(shares)})" for name, shares in groups.items()], "error / budget")


def _boxes(axes: Axes, values: list[list[float]], at: Sequence[float], colour: str, width: float) -> None:
    axes.boxplot(
        values, positions=list(at), widths=width, orientation="horizontal", whis=(1, 99), showfliers=False,
        manage_ticks=False, patch_artist=True,
        boxprops={"facecolor": colour, "edgecolor": colour, "alpha": 0.45}, medianprops={"color": TEXT},
        whiskerprops={"color": colour}, capprops={"color": colour},
    )  # fmt: skip
    tops = [max(group) for group in values]
    axes.scatter(tops, list(at), s=14, color=colour, zorder=3)


def _finish(axes: Axes, labels: list[str], title: str) -> None:
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(title, color=TEXT)
    plain(axes, "x")
