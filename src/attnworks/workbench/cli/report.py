"""``attnworks report``: one HTML page from any set of measured runs."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import click

from attnworks.workbench import records
from attnworks.workbench.cli.output import in_bytes, json_option, print_json
from attnworks.workbench.cli.stored import db_option, nothing
from attnworks.workbench.findings import findings
from attnworks.workbench.history import History, selection
from attnworks.workbench.records import Record

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("selected", metavar="[SELECTION]", required=False)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="report.html", show_default=True)
@click.option("--records", "given", type=FILE, multiple=True, help="JSON lines of `bench --save`, not the history.")
@click.option("--newest", type=click.IntRange(min=1), default=500, show_default=True, help="At most so many runs.")
@click.option("--title", default="Attention, measured", show_default=True, help="The page's heading.")
@click.option("--flow", type=FILE, help="An HTML page or SVG to show in a frame.")
@db_option
@json_option
def report(
    selected: str | None, out: Path, given: tuple[Path, ...], newest: int, title: str, flow: Path | None,
    db: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write an HTML page of measured runs: findings in words, then plots with their numbers beside them.

    One file of at most 2 MB that needs nothing else and prints well. SELECTION as in `attnworks history`.
    """
    from attnworks.workbench import record_report  # plots and templates: only where a page is asked for

    found = _records(given, selected, newest, db)
    if not found:
        raise click.ClickException(nothing(History(db), selected) if not given else "no runs in the files of --records")
    shown = flow.read_text(encoding="utf-8") if flow else ""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    try:
        page = record_report.render(found, title=title, when=when, flow=shown)
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    out.write_text(page, encoding="utf-8")
    size = len(page.encode())
    if as_json:
        print_json({"path": str(out), "runs": len(found), "bytes": size, "findings": findings(found)})
    else:
        click.echo(f"{out}: {len(found)} runs, {in_bytes(size)}")


def _records(given: tuple[Path, ...], selected: str | None, newest: int, db: Path | None) -> list[Record]:
    if given and selected:
        raise click.UsageError("SELECTION: was given beside --records, but it selects from the history")
    if given:
        return [record for path in given for record in records.load(path)][-newest:]
    return list(History(db).records(newest=newest, **selection(selected) if selected else {}).values())
