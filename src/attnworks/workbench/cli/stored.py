"""The history on the command line: where it lies, and how a record is told in a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from attnworks.workbench.history import ENVIRONMENT, History, HistoryError
from attnworks.workbench.records import Record

Command = TypeVar("Command", bound=Callable[..., Any])


def db_option(command: Command) -> Command:
    """``--db`` as the parameter ``db``, None for the usual file."""
    return click.option(
        "--db",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar=ENVIRONMENT,
        help="File of the history.  [default: history.db in the user's data folder]",
        show_envvar=True,
    )(command)


def keep(db: Path | None, records: Sequence[Record], before: Sequence[Record] = ()) -> None:
    """Add records to the history, or put them in the place of those that were kept ``before``, one for each. Where the
    usual file cannot be written, that is said on stderr and no error: the numbers that were asked for are there. Raises
    ``HistoryError`` for a file that was named."""
    kept = History(db)
    try:
        if before:
            kept.amend(zip(before, records, strict=True))
        else:
            kept.add(records)
    except HistoryError as error:
        if db is not None:
            raise
        click.echo(f"not kept in the history: {error}", err=True)


def ready(db: Path | None) -> None:
    """Before anything is measured: raises ``HistoryError`` where a named file cannot keep it."""
    if db is not None:
        History(db).add(())


def nothing(kept: History, selected: str | None) -> str:
    """Why there are no runs, and where they come from."""
    if not kept.path.exists():
        return f"no runs: {kept.path} does not exist. `attnworks bench` measures some and keeps them."
    if selected:
        return f"no runs of {selected!r} in {kept.path}"
    return f"no runs in {kept.path}. `attnworks bench` measures some and keeps them."


def apart(a: Mapping[int, Record], b: Mapping[int, Record]) -> None:
    """Raises ``click.UsageError`` where two selections have runs in common."""
    if common := sorted(a.keys() & b.keys()):
        ids = ", ".join(map(str, common[:5])) + (", ..." if len(common) > 5 else "")
        raise click.UsageError(f"both selections have runs {ids}: narrow one, a run says nothing against itself")


def problem_in_words(problem: dict[str, Any]) -> str:
    """The sizes that tell problems apart, e.g. "dense 1x8/2x1024x1024x64 float32 causal"."""
    p = problem
    dims = f"{p['head_dim']}" + ("" if p["head_dim"] == p["head_dim_v"] else f"/{p['head_dim_v']}")
    sizes = f"{p['batch']}x{p['heads_q']}/{p['heads_kv']}x{p['seq_q']}x{p['seq_kv']}x{dims}"
    modifiers = [str(p[name]) for name in ("mask", "scores") if p.get(name) not in (None, "", "none", [])]
    return " ".join([str(p["form"]), sizes, str(p["dtype"]), *modifiers])


def plan_in_words(record: Record) -> str:
    """What of a plan is chosen, e.g. "triton tiled 128x64 warps 4 stages 3"."""
    if not record.plan:
        return "-"
    plan = record.plan
    tiles = f"{plan['tile_q']}x{plan['tile_kv']}" if plan.get("tile_q") or plan.get("tile_kv") else ""
    others = [f"{name} {plan[name]}" for name in ("split_kv", "isa", "warps", "stages", "visit_all") if plan.get(name)]
    return " ".join(filter(None, (plan.get("backend", ""), plan["schedule"], tiles, *others)))
