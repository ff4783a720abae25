"""Printing: tables and notes for people, JSON for programs, progress on stderr, numbers with their units."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

Command = TypeVar("Command", bound=Callable[..., Any])

UNKNOWN = "-"
SECONDS_BETWEEN_LINES = 10.0  # of progress that nobody watches
WRAPPED_TEXT = 24  # characters to which a column of text may be narrowed


def json_option(command: Command) -> Command:
    """``--json`` as the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")(command)


def console() -> Console:
    # A console made at import would keep the stdout of that moment.
    return Console(highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(title: str, made: Table) -> None:
    """Print a table; one too wide for the terminal in parts below each other, each with the first column."""
    # Not rich's own title: that is wrapped to the table's width.
    console().print(title, style="bold", markup=False)
    for number, part in enumerate(_parts(made)):
        if number:
            console().print()
        console().print(part)


def _parts(made: Table) -> list[Table]:
    first, *rest = made.columns
    found, group = [], [first]
    for column in rest:
        if len(group) > 1 and sum(map(_width, [*group, column])) + 2 * len(group) > console().width:
            found.append(_of_columns(group, made.show_header))
            group = [first]
        group.append(column)
    return [*found, _of_columns(group, made.show_header)]


def _width(column: Column) -> int:
    """What a column needs: numbers are not broken, text may be wrapped."""
    wanted = max(cell_len(Text.from_markup(str(cell)).plain) for cell in (column.header, *column.cells))
    return wanted if column.justify == "right" else min(wanted, WRAPPED_TEXT)


def _of_columns(columns: list[Column], show_header: bool) -> Table:
    part = Table(header_style="bold", box=None, pad_edge=False, show_header=show_header)
    for column in columns:
        part.add_column(column.header, justify=column.justify, overflow=column.overflow)
    for row in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*row)
    return part


def print_notes(notes: list[str] | tuple[str, ...]) -> None:
    for note in notes:
        console().print(note, style="dim", markup=False)


def table(*columns: str, text_columns: int = 1) -> Table:
    """A table whose first ``text_columns`` columns are text and the others numbers."""
    made = Table(header_style="bold", box=None, pad_edge=False, show_header=any(columns))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    return made


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, a line now and then where that is no terminal; yields what reports (what is being done,
    rounds done, rounds in all)."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield _lines(errors)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield report


def _lines(errors: Console) -> Callable[[str, int, int], None]:
    """A log of what takes long stays short, and that of a quick command empty."""
    last = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            errors.print(f"{what} {done}/{total}" if total else what, markup=False, highlight=False)

    return report


# ---- numbers ---------------------------------------------------------------------------------------------------------


def in_bytes(size: float | None) -> str:
    if size is None:
        return UNKNOWN
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def in_seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def in_rate(rate: float | None, unit: str) -> str:
    """A rate or count with a decimal prefix, as hardware is described: "2 TB/s", "8.6 GFLOP"."""
    if rate is None:
        return UNKNOWN
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= scale:
            return f"{rate / scale:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"


def in_percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"
