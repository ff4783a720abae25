"""The plots of the Records' report, each drawn on axes that ``page.figure`` gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attnworks.workbench.page import BAD, FAINT, SERIES, TEXT, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADE = "#2f6fdb"  # of heat maps: as strong as a cell is fast, on either theme
TERA = 1e12


class Point(NamedTuple):
    """``x`` and ``y`` with the range of ``y`` that noise leaves."""

    x: float
    y: float
    low: float
    high: float


class Roof(NamedTuple):
    """Measured ceilings: bytes/s and FLOP/s."""

    bandwidth: float
    peak: float


def colour(names: Sequence[str], name: str) -> str:
    return SERIES[list(names).index(name) % len(SERIES)]


def lengths(axes: Axes, lines: Mapping[str, Sequence[Point]], names: Sequence[str], unit: str) -> None:
    """Rates over N, a line for each kernel with the band from its P90 to its fastest tenth."""
    for name, points in lines.items():
        xs, shade = [p.x for p in points], colour(names, name)
        axes.plot(xs, [p.y for p in points], color=shade, marker="o", markersize=4, label=name)
        axes.fill_between(xs, [p.low for p in points], [p.high for p in points], color=shade, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    ticks = sorted({p.x for points in lines.values() for p in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N", color=TEXT)
    axes.set_ylabel(unit, color=TEXT)
    _legend(axes)
    plain(axes)


def roofline(axes: Axes, roof: Roof, points: Mapping[str, Sequence[tuple[float, float]]], names: Sequence[str]) -> None:
    """FLOP/s over FLOPs for each byte, under what the machine can do at best."""
    ridge = roof.peak / roof.bandwidth
    xs = [x for found in points.values() for x, _ in found]
    left, right = min([*xs, ridge]) / 2, max([*xs, ridge]) * 2
    unit, scale = rate_unit(roof.peak)
    roofs = [min(roof.peak, x * roof.bandwidth) / scale for x in (left, ridge, right)]
    axes.plot([left, ridge, right], roofs, color=TEXT, linewidth=1.2)
    for name, found in points.items():
        shade = colour(names, name)
        axes.scatter([x for x, _ in found], [y / scale for _, y in found], s=22, color=shade, label=name, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs for each byte that moves", color=TEXT)
    axes.set_ylabel(unit, color=TEXT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes)
    plain(axes)


def errors(axes: Axes, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """Every record's error as a share of what is allowed, a row for each kernel."""
    for row, (name, shares) in enumerate(groups.items()):
        spread = [row + 0.3 * ((index * 0.618) % 1 - 0.5) for index in range(len(shares))]
        axes.scatter([max(x, 1e-6) for x in shares], spread, s=14, alpha=0.7, color=colour(names, name))
    axes.axvline(1, color=BAD, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(groups)), [f"{name} ({len(shares)})" for name, shares in groups.items()])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlabel("error / bound", color=TEXT)
    plain(axes, "x")


def heat_map(
    axes: Axes, rows: Sequence[int], columns: Sequence[int], cells: Mapping[tuple[int, int], tuple[float | None, str]]
) -> None:
    """Cells of (ratio, text); the strongest colour is the fastest. None: rejected or not measured."""
    known = [ratio for ratio, _ in cells.values() if ratio is not None] or [1.0]
    fastest = max(known)
    for (row, column), (ratio, text) in cells.items():
        x, y = columns.index(column), rows.index(row)
        strength = 0.0 if ratio is None else max(0.06, 1 - 3 * (1 - ratio / fastest))
        axes.add_patch(_rectangle(x, y, strength))
        axes.text(x, y, text, ha="center", va="center", color=TEXT if strength < 0.6 else "#ffffff", fontsize=10)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(size) for size in columns])
    axes.set_yticks(range(len(rows)), [str(size or "") for size in rows])
    axes.set_xlabel("tile_kv" if any(rows) else "keys of a task", color=TEXT)
    if any(rows):
        axes.set_ylabel("tile_q", color=TEXT)
    plain(axes)
    axes.grid(visible=False)


def _rectangle(x: int, y: int, strength: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=SHADE, alpha=strength, edgecolor=FAINT)


def commits(axes: Axes, lines: Mapping[str, Sequence[tuple[int, Point]]], labels: Sequence[str]) -> None:
    """Times relative to the first commit, a line for each kernel and problem, oldest commit first."""
    for number, (name, points) in enumerate(lines.items()):
        xs, ys = [at for at, _ in points], [p.y for _, p in points]
        errors_ = [[max(p.y - p.low, 0) for _, p in points], [max(p.high - p.y, 0) for _, p in points]]
        shade = SERIES[number % len(SERIES)]
        axes.errorbar(xs, ys, yerr=errors_, color=shade, marker="o", markersize=4, capsize=3, label=name)
    axes.axhline(1, color=TEXT, linewidth=0.8)
    axes.set_xticks(range(len(labels)), list(labels), rotation=30, ha="right")
    axes.set_ylabel("time, first commit = 1", color=TEXT)
    _legend(axes, columns=1)
    plain(axes)


def steps(axes: Axes, names: Sequence[str], shares: Sequence[float]) -> None:
    """Times relative to a baseline, a bar for each step."""
    for row, share in enumerate(shares):
        axes.barh(row, share, color=SERIES[0], alpha=0.8, height=0.6)
        axes.text(share, row, f" {share:.2f}", va="center", color=TEXT)
    axes.axvline(1, color=TEXT, linewidth=0.8)
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("time, baseline = 1.00", color=TEXT)
    plain(axes, "x")


def _legend(axes: Axes, columns: int = 3) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=9, labelcolor=TEXT)


def rate_unit(largest: float) -> tuple[str, float]:
    """(unit, its size) in which FLOP/s read well."""
    return ("TFLOP/s", TERA) if largest >= TERA / math.sqrt(10) else ("GFLOP/s", 1e9)
