"""``attnworks history``: the runs that were measured."""

from __future__ import annotations

from pathlib import Path

import click
from rich.markup import escape

from attnworks.workbench import records
from attnworks.workbench.cli.output import in_seconds, json_option, print_json, print_notes, print_table, table
from attnworks.workbench.cli.stored import db_option, nothing, plan_in_words, problem_in_words
from attnworks.workbench.history import History, selection
from attnworks.workbench.providers import label
from attnworks.workbench.records import Record

NEWEST = 30


@click.command()
@click.argument("selected", metavar="[SELECTION]", required=False)
@click.option("--newest", type=click.IntRange(min=1), default=NEWEST, show_default=True, help="At most so many.")
@click.option(
    "--import",
    "imported",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="First take in the records of a file that `bench --save` wrote; may be repeated.",
)
@db_option
@json_option
def history(selected: str | None, newest: int, imported: tuple[Path, ...], db: Path | None, as_json: bool) -> None:
    """List measured runs, oldest first.

    SELECTION is an id, a commit, a provider, or filters between commas: "provider=sdpa,seq_q=4096,dtype=float16". They
    are id, session, commit, provider, machine, since, and the fields of problems and plans (seq_q, tile_kv, ...).
    """
    kept = History(db)
    for path in imported:
        ids = kept.add(records.load(path))
        click.echo(f"{path}: {len(ids)} records", err=True)
    found = kept.records(newest=newest, **selection(selected) if selected else {})
    if as_json:
        print_json({"path": str(kept.path), "records": {id_: record.to_json() for id_, record in found.items()}})
        return
    if not found:
        print_notes([nothing(kept, selected)])
        return
    columns = ("time", "commit", "kernel", "problem", "plan", "machine")
    made = table("id", *columns, "median", "P90", "error", text_columns=1 + len(columns))
    for id_, record in found.items():
        made.add_row(str(id_), *_row(record))
    print_table(f"{len(found)} runs", made)
    print_notes([f"error: the largest, as a share of what is allowed. {kept.path}"])


def _row(record: Record) -> tuple[str, ...]:
    return (
        record.when[:16].replace("T", " "),
        record.commit or "-",
        escape(label(record.provider)),
        escape(problem_in_words(record.problem)),
        plan_in_words(record),
        escape(str(record.machine["name"])),
        in_seconds(record.median),
        in_seconds(record.percentile_90),
        f"{record.check['worst_share_of_bound']:.3g}",
    )
