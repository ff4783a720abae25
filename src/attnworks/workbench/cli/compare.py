"""``attnworks compare``: two sets of runs against each other."""

from __future__ import annotations

from pathlib import Path

import click
from rich.markup import escape

from attnworks.workbench.cli.output import console, in_seconds, json_option, print_json, print_notes, print_table, table
from attnworks.workbench.cli.stored import apart, db_option, nothing, problem_in_words
from attnworks.workbench.comparison import Compared, Comparison
from attnworks.workbench.comparison import compare as run
from attnworks.workbench.history import History, selection
from attnworks.workbench.providers import label


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--control", help="A kernel of the same sessions that did not change; times are taken in units of its own."
)
@db_option
@json_option
def compare(a: str, b: str, control: str | None, db: Path | None, as_json: bool) -> None:
    """Compare runs A with runs B: how many times as fast B is, and whether its errors are others.

    A and B are selections as in `attnworks history`: ids, commits, providers, or filters such as "tile_q=64" or
    "machine=H200,dtype=float16". The same problems, machines, kernels and plans are compared; where each side has one
    and they differ, that is the change.
    """
    history = History(db)
    before, after = (history.records(**selection(text)) for text in (a, b))
    for text, side in ((a, before), (b, after)):
        if not side:
            raise click.ClickException(nothing(history, text))
    apart(before, after)
    found = run(history, before, after, control)
    if as_json:
        print_json(found.to_json())
    else:
        print_compared(found, control)
    if not found.comparisons:
        raise click.ClickException("; ".join(found.unmatched))


def print_compared(found: Compared, control: str | None) -> None:
    """``control``: the one that was asked for."""
    columns = ("A", "B", "B is as fast (99 %)", "error of A", "of B", "B/A", "runs")
    made = table("kernel", "problem", *columns, text_columns=2)
    for comparison in found.comparisons:
        made.add_row(*_row(comparison))
    if found.comparisons:
        print_table("A against B", made)
        print_notes(_notes(found))
        if control and not any(one.control for one in found.comparisons):
            print_notes(
                [f"plain times: not every session has {control!r} beside the others, or both sides share rounds"]
            )
    for lost in found.lost:
        console().print(f"B has no {lost}: failed, or refused", style="bold red", markup=False)
    print_notes([f"not compared: {reason}" for reason in found.unmatched])


def _row(comparison: Comparison) -> tuple[str, ...]:
    before, after = comparison.a[0], comparison.b[0]
    names = dict.fromkeys((label(before.provider), label(after.provider)))
    old, new = comparison.relative_errors
    grown = (
        f"{new / old:.2f}" + ("" if comparison.numerics == "same" else f" {comparison.numerics}") if old and new else ""
    )
    return (
        escape(" -> ".join(names)),
        escape(problem_in_words(after.problem)),
        *map(in_seconds, comparison.seconds),
        str(comparison.ratio) + (" slower" if comparison.ratio.verdict == "slower" else ""),
        *("-" if error is None else f"{error:.2g}" for error in (old, new)),
        grown,
        "/".join(str(sum(len(record.seconds) for record in side)) for side in (comparison.a, comparison.b)),
    )


def _notes(found: Compared) -> list[str]:
    notes: list[str] = []
    for comparison in found.comparisons:
        notes += [f"changed: {change}" for change in comparison.changes]
        notes += [f"{label(side[0].provider)}: {side[0].form}" for side in (comparison.a, comparison.b)]
        if comparison.control:
            notes.append(f"in units of {label(comparison.control)}'s time in the same rounds")
        if not comparison.ratio.paired and comparison.ratio.smallest > 0.01:
            notes.append(
                f"few sessions: differences under {comparison.ratio.smallest:.0%} are not told from those of sessions"
            )
    return list(dict.fromkeys(notes))
