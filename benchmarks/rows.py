"""The rows that cpu.py and gpu.py print: as a table for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: what was measured against what, the number, its bar, and whether it holds (None: no bar here, and
    why)."""

    section: str
    problem: str
    against: str
    value: str
    bar: str
    passed: bool | None
    detail: str = ""


VERDICTS = {True: "pass", False: "FAIL", None: ""}
COLUMNS = ("problem", "against", "measured", "bar", "", "detail")


def _cells(row: Row) -> tuple[str, ...]:
    return row.problem, row.against, row.value, row.bar, VERDICTS[row.passed], row.detail


def print_section(rows: list[Row]) -> None:
    lines = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    print(f"\n{rows[0].section}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


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
        text += ["| " + " | ".join(_cells(row)) + " |" for row in rows if row.section == section]
    return "\n".join(text) + "\n"
