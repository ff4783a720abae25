"""The report of measured runs: one HTML page from any set of Records, with what they show in words at the top.

What is compared is what was interleaved: ratios are taken within a session, and "undecided" is said where noise does
not let one tell. Losing rows are in every table. Its look is ``page.py``'s, its plots are ``record_plots.py``'s.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from attnworks.workbench import page, record_plots, statistics
from attnworks.workbench.findings import (
    Comparison,
    commits_of,
    comparisons,
    findings,
    heat_maps,
    measured,
    problem_words,
    size_of,
    studies,
    without_lengths,
)
from attnworks.workbench.providers import label
from attnworks.workbench.record_plots import Point, Roof
from attnworks.workbench.records import Record

MOST_ROWS = 400
MOST_HEAT_MAPS = 12
LARGEST_BYTES = 2 << 20


@dataclass(frozen=True)
class Table:
    """Cells in words; columns from ``numbers_from`` on are numbers. Those from ``shown`` on are in the data alone."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers_from: int = 1
    shown: int | None = None

    @property
    def download(self) -> str:
        """The rows as a JSON file in a data URI."""
        held = json.dumps([dict(zip(self.columns, row, strict=True)) for row in self.rows], ensure_ascii=False)
        return "data:application/json;base64," + base64.b64encode(held.encode()).decode()


@dataclass(frozen=True)
class Plot:
    title: str
    text: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of the page: its plots with the numbers they show beside them."""

    id: str
    title: str
    text: str
    plots: tuple[Plot, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = field(default=())


def render(records: Sequence[Record], *, title: str, when: str, flow: str = "") -> str:
    """The page as a string. ``flow``: an HTML page or SVG to show in a frame of its own.

    Raises ``ModuleNotFoundError`` without jinja2 or matplotlib, ``ValueError`` for no records and where the page would
    be larger than 2 MB."""
    if not records:
        raise ValueError("records: were none, must be at least one")
    names = kernel_names(records)
    found = [_studies(records), _lengths(records, names), _rooflines(records, names), _errors(records, names),
             _sweeps(records), _history(records), _conditions(records)]  # fmt: skip
    made = page.render(
        "records.html.j2",
        title=title,
        when=when,
        count=len(records),
        machines=sorted({machine_of(record) for record in records}),
        findings=findings(records),
        sections=[section for section in found if section],
        flow=flow,
    )
    size = len(made.encode())
    if size > LARGEST_BYTES:
        raise ValueError(f"report: was {size} bytes, must be at most {LARGEST_BYTES}: choose fewer records")
    return made


def kernel_names(records: Iterable[Record]) -> list[str]:
    """Labels of all competitors, attnworks' own first, each with its colour on every plot."""
    found = dict.fromkeys(name for record in records if (name := label(record.provider)) == group_of(record))
    return sorted(found, key=lambda name: not name.startswith("attnworks"))


def machine_of(record: Record) -> str:
    return str(record.machine.get("name", "?"))


def group_of(record: Record) -> str:
    """By what name errors are told: plans of sweeps and case studies have none that says anything without the study."""
    if record.conditions.get("sweep"):
        return "swept plans"
    return "steps of case studies" if record.conditions.get("study") and record.plan else label(record.provider)


# ---- sections --------------------------------------------------------------------------------------------------------


def _lengths(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    compared = comparisons(records)
    alone = [record for record in measured(records) if record.session not in {c.own.session for c in compared}]
    if not compared and not alone:
        return None
    families: dict[str, dict[str, dict[int, Record]]] = {}
    for record in measured(records):
        lines = families.setdefault(without_lengths(record), {})
        lines.setdefault(label(record.provider), {})[size_of(record)] = record
    plots: list[Plot] = []
    for words, lines in families.items():
        if max(len(found) for found in lines.values()) < 2:
            continue
        unit, scale = record_plots.rate_unit(
            max(r.flops_per_second for found in lines.values() for r in found.values())
        )
        points = {name: [_rate(found[n], n, scale) for n in sorted(found)] for name, found in lines.items()}
        svg = page.figure(f"n{len(plots)}", partial(record_plots.lengths, lines=points, names=names, unit=unit), 3.6)
        text = "Effective rate: only visible pairs count. Lines are medians, bands reach from P90 to P10."
        plots.append(Plot(words, text, svg))
    columns = ("problem", "N", "kernel", "median", "P90", "times as fast", "rate", "of peak", "extra memory", "call")
    rows = [_row(c.own, "") for c in compared if c.first] + [_row(c.other, str(c.ratio), c) for c in compared]
    rows += [_row(record, "") for record in alone]
    rows.sort(key=lambda row: (row[0], int(row[1])))
    text = (
        "Every competitor ran once in each round, in random order, in its best known form, which stands below "
        "the numbers. “Times as fast” says how attnworks compares with that row, with the interval that noise leaves."
    )
    table = Table(columns, tuple(rows[:MOST_ROWS]), 3, shown=len(columns) - 1)
    calls = dict.fromkeys(f"{row[2]}: {row[-1]}" for row in table.rows)
    return Section("lengths", "Against its peers", text, tuple(plots), table, tuple(calls))


def _rate(record: Record, n: int, scale: float) -> Point:
    slow, fast = statistics.percentile_90(record.seconds), sorted(record.seconds)[len(record.seconds) // 10]
    return Point(n, *(record.flops / seconds / scale for seconds in (record.median, slow, fast)))


def _row(record: Record, ratio: str, comparison: Comparison | None = None) -> tuple[str, ...]:
    peak, unit = record.share_of_peak_flops, record_plots.rate_unit(record.flops_per_second)
    extra = record.peak_extra_bytes
    return (
        without_lengths(record),
        str(size_of(record)),
        label(record.provider),
        duration(record.median),
        duration(record.percentile_90),
        ratio,
        f"{record.flops_per_second / unit[1]:.3g} {unit[0]}",
        page.percent(peak) if peak else "–",
        "–" if extra is None else f"{extra / 2**20:.1f} MiB",
        record.form,
    )


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _rooflines(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in measured(records):
        if all(record.ceilings.get(name) for name in ("read_bytes_per_second", "flops_per_second")):
            groups.setdefault((machine_of(record), str(record.problem["dtype"])), []).append(record)
    plots: list[Plot] = []
    rows: list[tuple[str, ...]] = []
    for (machine, dtype), found in groups.items():
        roof = Roof(*(_ceiling(found, name) for name in ("read_bytes_per_second", "flops_per_second")))
        points: dict[str, list[tuple[float, float]]] = {}
        for record in found:
            moved, source = _moved(record)
            at = (record.flops / max(moved, 1), record.flops_per_second)
            points.setdefault(label(record.provider), []).append(at)
            share = record.flops_per_second / min(roof.peak, at[0] * roof.bandwidth)
            rows.append((problem_words(record), label(record.provider), f"{at[0]:.3g}", f"{at[1] / 1e9:.4g}",
                         page.percent(share), source))  # fmt: skip
        svg = page.figure(f"r{len(plots)}", partial(record_plots.roofline, roof=roof, points=points, names=names), 3.8)
        text = f"Measured between the runs: {roof.bandwidth / 1e9:.3g} GB/s read, {roof.peak / 1e9:.4g} GFLOP/s."
        plots.append(Plot(f"{machine}, {dtype}", text, svg))
    if not plots:
        return None
    text = (
        "The roof is what this machine reached in the same minutes: plain reads, multiply-adds in registers. Bytes are "
        "the traffic model's where the plan is known, else those of inputs and outputs: those points lie too far right."
    )
    columns = ("problem", "kernel", "FLOPs/byte", "GFLOP/s", "of the roof", "bytes from")
    return Section("roofline", "Roofline", text, tuple(plots), Table(columns, tuple(rows[:MOST_ROWS]), 2))


def _moved(record: Record) -> tuple[int, str]:
    """Bytes, and where the number is from."""
    if record.measured_bytes:
        return record.measured_bytes, "profiler"
    if record.modelled_bytes:
        return record.modelled_bytes, "model"
    return record.minimum_bytes, "inputs and outputs"


def _ceiling(found: Sequence[Record], name: str) -> float:
    return statistics.median([value for record in found if (value := record.ceilings[name])])


def _errors(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    groups: dict[str, list[Record]] = {}
    for record in records:
        if "worst_share_of_bound" in record.check:
            groups.setdefault(group_of(record), []).append(record)
    if not groups:
        return None
    known = [*names, *(name for name in groups if name not in names)]
    shares = {name: [record.check["worst_share_of_bound"] for record in found] for name, found in groups.items()}
    svg = page.figure("errors", partial(record_plots.errors, groups=shares, names=known), 1.0 + 0.42 * len(groups))
    rows = tuple(
        (name, str(len(found)), page.number(statistics.median(shares[name])), page.number(max(shares[name])),
         page.number(max(record.check.get("largest_error", float("nan")) for record in found)))
        for name, found in groups.items()
    )  # fmt: skip
    text = (
        "Each kernel was held against fp64 on the very problem that was timed; the line at 1 is the bound that every "
        "correct kernel keeps."
    )
    table = Table(("kernel", "runs", "median share", "largest share", "largest absolute error"), rows)
    return Section("errors", "Errors", text, (Plot("Share of the bound", "A dot for each run.", svg),), table)


def _sweeps(records: Sequence[Record]) -> Section | None:
    plots: list[Plot] = []
    rows: list[tuple[str, ...]] = []
    for found in heat_maps(records)[-MOST_HEAT_MAPS:]:
        sizes = [tuple(sorted({place[axis] for place in found.cells})) for axis in (0, 1)]
        cells = {place: (cell.ratio.value, f"{cell.ratio.value:.2f}") for place, cell in found.cells.items()}
        draw = partial(record_plots.heat_map, rows=sizes[0], columns=sizes[1], cells=cells)
        svg = page.figure(f"h{len(plots)}", draw, 1.0 + 0.45 * len(sizes[0]), width=1.6 + 0.85 * len(sizes[1]))
        plots.append(Plot(found.title, f"Times as fast as {found.choice}, the backend's choice.", svg))
        for cell in found.cells.values():
            ratio = "its choice" if cell.plan == found.choice else str(cell.ratio)
            share = page.number(cell.record.check["worst_share_of_bound"])
            rows.append((found.title, cell.plan, duration(cell.record.median), ratio, share))
    if not plots:
        return None
    table = Table(
        ("sweep", "plan", "median", "times as fast as the backend's choice", "error / bound"),
        tuple(rows[:MOST_ROWS]),
        2,
    )
    text = "Tiles raced in heats with the backend's choice in the same rounds. What was rejected is not drawn."
    return Section("sweeps", "Tiles", text, tuple(plots), table)


def _studies(records: Sequence[Record]) -> Section | None:
    plots: list[Plot] = []
    rows: list[tuple[str, ...]] = []
    for steps in studies(records):
        words, base = problem_words(steps[0]), steps[0]
        names = [str(step.conditions["study"]) for step in steps]
        shares = [1 / step.ratio_to(base).value for step in steps]
        draw = partial(record_plots.steps, names=names, shares=shares)
        svg = page.figure(f"s{len(plots)}", draw, 1 + 0.4 * len(steps))
        plots.append(Plot(words, "Time relative to the first row.", svg))
        for name, step, share in zip(names, steps, shares, strict=True):
            ratio = "" if step is base else str(step.ratio_to(base))
            error = page.number(step.check["largest_error"])
            rows.append((words, name, duration(step.median), f"{share:.2f}", ratio, error))
    if not plots:
        return None
    columns = ("problem", "step", "median", "relative time", "times as fast as the baseline", "largest error")
    text = "One change at a time, its time and its numerical error beside it."
    return Section("study", "Case study", text, tuple(plots), Table(columns, tuple(rows[:MOST_ROWS]), 2))


def _history(records: Sequence[Record]) -> Section | None:
    changes = commits_of(records)
    if not changes:
        return None
    commits = list(dict.fromkeys(commit for change in changes for commit in change.order))
    lines = {
        change.words: [(commits.index(commit), _relative(change.runs[commit], change.first)) for commit in change.order]
        for change in changes[: len(page.SERIES)]
    }
    svg = page.figure("commits", partial(record_plots.commits, lines=lines, labels=commits), 4.2)
    rows = tuple(
        (change.words, before, after, duration(change.runs[before].median), duration(change.runs[after].median),
         str(change.runs[after].ratio_to(change.runs[before])))
        for change in changes for before, after in zip(change.order, change.order[1:], strict=False)
    )  # fmt: skip
    columns = ("kernel and problem", "from", "to", "before", "after", "times as fast")
    text = "The newest run of each commit; runs of different sessions are compared by their medians, with their spread."
    plot = Plot("Time over commits", f"The first {len(lines)} of {len(changes)}.", svg)
    return Section("history", "Over commits", text, (plot,), Table(columns, rows[:MOST_ROWS], 3))


def _relative(record: Record, first: Record) -> Point:
    ratio = first.ratio_to(record)  # how many times as fast the first was: time relative to it
    return Point(0, ratio.value, ratio.low, ratio.high)


def _conditions(records: Sequence[Record]) -> Section:
    notes: dict[str, list[str]] = {}
    for note in sorted({note for record in records for note in record.notes}):
        notes.setdefault(re.sub(r"\d[\d.]*", "#", note), []).append(note)  # those that differ in numbers alone
    facts: dict[tuple[str, ...], int] = {}
    for record in records:
        said = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        row = (machine_of(record), str(record.conditions.get("threads", "–")), said, record.commit or "–")
        facts[row] = facts.get(row, 0) + 1
    rows = tuple((*row, str(count)) for row, count in sorted(facts.items()))
    table = Table(("machine", "threads", "versions", "commit", "runs"), rows[:MOST_ROWS], 4)
    shown = tuple(
        found[-1] + (f" (and {len(found) - 1} more like it)" if len(found) > 1 else "") for found in notes.values()
    )[:40]
    return Section(
        "conditions", "Under which conditions", "What a reader must know beside the numbers.", (), table, shown
    )
