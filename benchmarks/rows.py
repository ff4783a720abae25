"""The rows that the scripts here print: as a table for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line: what was measured against what, the number, its bar, and whether it holds (None: no bar here, and
    why). ``calls``: how each of those that were timed was called."""

    section: str
    problem: str
    against: str
    value: str
    bar: str
    passed: bool | None
    detail: str = ""
    calls: tuple[str, ...] = ()


VERDICTS = {True: "pass", False: "FAIL", None: ""}
COLUMNS = ("problem", "against", "measured", "bar", "", "detail")


def _cells(row: Row) -> tuple[str, ...]:
    return row.problem, row.against, row.value, row.bar, VERDICTS[row.passed], row.detail


def _calls(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(call for row in rows for call in row.calls))


def print_section(rows: list[Row]) -> None:
    lines = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    print(f"\n{rows[0].section}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    for call in _calls(rows):
        print(f"called: {call}", flush=True)


def markdown(rows: list[Row], title: str, introduction: str) -> str:
    text = [f"# {title}", "", introduction]
    for section in dict.fromkeys(row.section for row in rows):
        text += [
            "",
            f"## {section}",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "| " + " | ".join("---" for _ in COLUMNS) + " |",
        ]
        own = [row for row in rows if row.section == section]
        text += ["| " + " | ".join(_cells(row)) + " |" for row in own]
        text += ["", *(f"- called: {call}" for call in _calls(own))] if _calls(own) else []
    return "\n".join(text) + "\n"


def show(
    sections: dict[str, Callable[[], Iterator[Row]]],
    asked: Iterable[str],
    *,
    as_json: bool,
    path: Path | None,
    title: str,
    introduction: str,
) -> list[Row]:
    """Make the sections asked for, telling each row on stderr; print their tables, and write them to ``path``, if
    given, as Markdown after each section, so that a later one that fails costs no rows. Returns all rows."""
    found: list[Row] = []
    for name in asked:
        rows = []
        for row in sections[name]():
            rows.append(row)
            print(f"{row.section}: {row.problem}: {row.against} {row.value}; {row.detail}", file=sys.stderr, flush=True)
        found += rows
        if not as_json:
            for section in dict.fromkeys(row.section for row in rows):
                print_section([row for row in rows if row.section == section])
        if path:
            path.write_text(markdown(found, title, introduction), encoding="utf-8")
    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    return found
