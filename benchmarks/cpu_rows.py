"""The rows that cpu.py prints: as a table for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


def markdown(rows: list[Row], header: dict[str, Any]) -> str:
    machine = header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    text = [
        f"# CPU bars, {header['when']}",
        "",
        f"{machine['name']}, {header['threads']} threads, kernels {machine['isas'][0] if machine['isas'] else 'none'}; "
        f"{versions}; commit {header['commit']}. Ratios are how many times as fast attnworks is: medians of "
        "interleaved runs, with a 99 % interval (`benchmarks/cpu.py`, protocol in `docs/benchmarking.md`).",
    ]
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
