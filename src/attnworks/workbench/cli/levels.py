"""Bytes by memory level, printed: what ``attnworks traffic --schedule`` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from attnworks.problem import Problem
from attnworks.workbench.cli.output import (
    UNKNOWN,
    console,
    in_bytes,
    in_rate,
    in_seconds,
    print_json,
    print_notes,
    print_table,
    table,
)
from attnworks.workbench.cli.posed import titled
from attnworks.workbench.levels import USABLE, Levels, Measured, compared

NOTES = (
    f"Programs: bytes they load and store, re-reads included; slow memory: of these what a cache of which {USABLE:.0%} "
    "is usable does not serve, cold before. docs/traffic.md has the model.",
)


def show(
    problem: Problem, found: Sequence[Levels], measured: Measured | None, as_json: bool, notes: Sequence[str]
) -> None:
    """Tables, or JSON. ``measured`` stands beside the first of ``found``."""
    beside = compared(found[0], measured) if measured else []
    if as_json:
        names = ("level", "predicted", "measured", "error")
        print_json(
            {
                "problem": problem.to_json(),
                "schedules": [one.to_json() for one in found],
                "compared": [dict(zip(names, row, strict=True)) for row in beside],
            }
        )
        return
    print_table(
        f"{titled(problem)}\non {found[0].machine}",
        _summary(found),
    )
    if len(found) == 1:
        console().print()
        console().print(_rows(found[0]))
    if beside:
        console().print()
        print_table("Predicted against measured", _beside(beside))
    print_notes([*NOTES, *notes])


def _summary(found: Sequence[Levels]) -> Table:
    made = table(
        "schedule", "bound by", "time", "slow memory", "read", "written", "takes", "programs", "FLOPs", "take",
        "on chip", text_columns=2,
    )  # fmt: skip
    for one in found:
        made.add_row(
            escape(one.schedule),
            one.bound or UNKNOWN,
            in_seconds(one.seconds),
            in_bytes(one.read + one.written),
            in_bytes(one.read),
            in_bytes(one.written),
            in_seconds(one.memory_seconds),
            in_bytes(one.cache),
            in_rate(one.flops, "FLOP"),
            in_seconds(one.compute_seconds),
            in_bytes(one.held_bytes),
        )
    return made


def _rows(one: Levels) -> Table:
    made = table("kernel", "matrix", "what the cache does", "programs", "read", "written", text_columns=3)
    last = ""
    for row in one.rows:
        sizes = (in_bytes(size) if size else "0" for size in (row.cache, row.read, row.written))
        made.add_row(escape(row.kernel) if row.kernel != last else "", escape(row.array), row.why, *sizes)
        last = row.kernel
    return made


def _beside(rows: Sequence[tuple[str, int, float | None, float | None]]) -> Table:
    made = table("level", "predicted", "measured", "error")
    for level, predicted, measured, error in rows:
        made.add_row(
            level, in_bytes(predicted), in_bytes(measured), UNKNOWN if error is None else f"{100 * error:+.1f} %"
        )
    return made
