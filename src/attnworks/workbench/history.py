"""History: every measured run, in one SQLite file that several processes may use at once.

A record that ``add`` returned from is on disk: what kills the process later takes only the run in flight with it. Each
operation opens the file anew, so that a ``History`` may be shared by threads and survives a fork."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.records import Record

ENVIRONMENT = "ATTNWORKS_DB"
BUSY_SECONDS = 60.0  # for how long a writer waits for others


class HistoryError(ValueError):
    """A file that can't be read or written, is no history, or is that of a later attnworks."""


_COLUMN_FILTERS = {
    "id": "id = :id",
    "session": "substr(session, 1, length(:session)) = :session",
    "provider": "provider = :provider",
    "commit": "(source = :commit OR substr(source, 1, length(:commit)) = :commit AND source NOT LIKE '%-dirty')",
    "machine": "instr(lower(machine), lower(:machine)) > 0",
    "since": "time >= :since",
    "problem": "problem = :problem",
}
_FIELD_FILTERS = tuple(f.name for kind in (Problem, Plan) for f in fields(kind))
FILTERS = (*_COLUMN_FILTERS, *_FIELD_FILTERS)


def default_path() -> Path:
    """The file named by the environment variable ``ATTNWORKS_DB``, else ``history.db`` in the user's data folder."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("attnworks") / "history.db"


def selection(text: str) -> dict[str, Any]:
    """Filters of ``History.records`` as they are written on a command line: "provider=sdpa,seq_q=4096".

    A word without "=" is an id if it is a number of at most six digits, how a commit begins if it is at least seven
    hexadecimal digits, else a provider. Raises ``ValueError`` for anything else."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            name, value = _kind_of(name), name
        if name not in FILTERS or name == "problem" or not value:
            raise ValueError(
                f"selection: was {text!r}, must be an id, a commit, a provider or filters such as seq_q=4096 between "
                f"commas, of {', '.join(FILTERS)}"
            )
        found[name] = value
    return found


def _kind_of(word: str) -> str:
    if re.fullmatch(r"\d{1,6}", word):
        return "id"
    return "commit" if re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", word) else "provider"


class History:
    """The records in one file, which is made when it is first written to. ``path``: None for ``default_path()``.

    All of it raises ``HistoryError``."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = default_path() if path is None else Path(path)

    def add(self, records: Iterable[Record]) -> list[int]:
        """Keep records, all of them or none; returns their ids. One that is there already keeps the id it has."""
        rows = [_row(record) for record in records]
        with self._open() as db, _transaction(db):
            return [_insert(db, row) for row in rows]

    def amend(self, changed: Iterable[tuple[Record, Record]]) -> None:
        """Put what a run turned out to be in the place of what was kept of it before, as (before, now): all or none.
        One that is not there is added."""
        rows = [(_row(before)["digest"], _row(now)) for before, now in changed]
        with self._open() as db, _transaction(db):
            for before, row in rows:
                if not _replace(db, before, row):
                    _insert(db, row)

    def records(self, *, newest: int | None = None, **where: Any) -> dict[int, Record]:
        """Records by their ids, oldest first; the ``newest`` so many if that is given.

        ``where``: ``id``, ``session`` and ``commit`` (or how they begin; a commit with changes on top goes by all of
        its name, which ends in "-dirty"), ``provider``, ``machine`` (a part of its name), ``since`` (an ISO date or
        time), ``problem`` (a ``Problem``, or a record's: this very one), and any field of ``Problem`` or ``Plan`` by
        its name, such as ``seq_q=4096, dtype="float16", tile_q=128``. Raises ``ValueError`` for other names."""
        if unknown := [name for name in where if name not in FILTERS]:
            raise ValueError(f"filter: was {unknown[0]!r}, must be one of {', '.join(FILTERS)}")
        if not self.path.exists():
            return {}
        query, values, wanted = _query(where)
        found: dict[int, Record] = {}
        with self._open() as db:
            for id_, problem, plan, body in db.execute(query, values):
                if len(found) == newest:
                    break
                if not wanted or _has(json.loads(problem) | (json.loads(plan) or {}), wanted):
                    found[id_] = Record.from_json(json.loads(body))
        return dict(reversed(found.items()))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: transactions begin and end where it stands here, not where the module guesses.
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
                _prepare(db, self.path)
                yield db
        except (OSError, sqlite3.OperationalError) as error:
            raise HistoryError(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise HistoryError(f"{self.path}: is no history of attnworks ({error})") from error


# ---- from records to rows and back -----------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """JSON by which equal values are equal texts."""
    return json.dumps(value, sort_keys=True)


def _row(record: Record) -> dict[str, str]:
    body = _text(record.to_json())
    return {
        "digest": hashlib.sha256(body.encode()).hexdigest(),
        "session": record.session,
        "time": record.when,
        "provider": record.provider,
        "source": record.commit or "",
        "machine": str(record.machine["name"]),
        "problem": _text(record.problem),
        "plan": _text(record.plan),
        "body": body,
    }


def _insert(db: sqlite3.Connection, row: dict[str, str]) -> int:
    places = ", ".join(f":{name}" for name in row)
    db.execute(f"INSERT INTO records ({', '.join(row)}) VALUES ({places}) ON CONFLICT (digest) DO NOTHING", row)
    (id_,) = db.execute("SELECT id FROM records WHERE digest = :digest", row).fetchone()
    return int(id_)


def _replace(db: sqlite3.Connection, digest: str, row: dict[str, str]) -> bool:
    """Whether there was a record of that digest, which is ``row`` now."""
    columns = ", ".join(f"{name} = :{name}" for name in row)
    return db.execute(f"UPDATE records SET {columns} WHERE digest = :before", row | {"before": digest}).rowcount > 0


def _query(where: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The SQL for the filters that are columns, newest first, its values, and the other filters."""
    values = {name: value for name, value in where.items() if name in _COLUMN_FILTERS}
    if "problem" in values:
        problem = values["problem"]
        values["problem"] = _text(problem.to_json() if isinstance(problem, Problem) else problem)
    tests = " AND ".join(_COLUMN_FILTERS[name] for name in values)
    query = (
        f"SELECT id, problem, plan, body FROM records {'WHERE ' + tests if tests else ''} ORDER BY time DESC, id DESC"
    )
    return query, values, {name: value for name, value in where.items() if name not in values}


def _has(fields_: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether all are there, as they are written: a command line has nothing but text."""
    return all(name in fields_ and _written(fields_[name]) == _written(value) for name, value in wanted.items())


def _written(value: Any) -> str:
    return str(value).removeprefix("torch.").lower()


# ---- the file --------------------------------------------------------------------------------------------------------


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or, once the connection is closed, nothing. IMMEDIATE: who reads first and then wants to write is
    refused at once where somebody else writes."""
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or bring those of an earlier attnworks up to date."""
    if _version(db, path) == SCHEMA:
        return
    _write_ahead(db)
    with _transaction(db):
        version = _version(db, path)  # somebody else may have been faster
        if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise HistoryError(f"{path}: is a database of something else, must be a history of attnworks")
        for step in _STEPS[version:]:
            step(db)
        db.execute(f"PRAGMA user_version = {SCHEMA}")


def _version(db: sqlite3.Connection, path: Path) -> int:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise HistoryError(f"{path}: was of schema {version}, must be at most {SCHEMA}: a later attnworks wrote it")
    return version


def _write_ahead(db: sqlite3.Connection) -> None:
    """Readers and a writer do not wait for each other then. SQLite does not wait for its turn to switch to it."""
    deadline = time.monotonic() + BUSY_SECONDS
    while not _switches(db):
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError(f"was locked by others for {BUSY_SECONDS:g} seconds")
        time.sleep(0.01)


def _switches(db: sqlite3.Connection) -> bool:
    try:
        db.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        return False
    return True


def _first_tables(db: sqlite3.Connection) -> None:
    db.execute(
        """CREATE TABLE records (
            id INTEGER PRIMARY KEY,
            digest TEXT NOT NULL UNIQUE, -- of the body: what is imported twice is kept once
            session TEXT NOT NULL,
            time TEXT NOT NULL,
            provider TEXT NOT NULL,
            source TEXT NOT NULL, -- the commit, "" where it is not known
            machine TEXT NOT NULL,
            problem TEXT NOT NULL, -- JSON with sorted keys, like the plan and the body, which is the whole record
            plan TEXT NOT NULL,
            body TEXT NOT NULL
        )"""
    )
    db.execute("CREATE INDEX records_session ON records (session)")
    db.execute("CREATE INDEX records_problem ON records (problem)")


def _current_records(db: sqlite3.Connection) -> None:
    """Records as this attnworks writes them, so that one that comes again is known by its digest."""
    for id_, body in db.execute("SELECT id, body FROM records").fetchall():
        row = _row(Record.from_json(json.loads(body)))
        db.execute("UPDATE records SET digest = :digest, body = :body WHERE id = :id", row | {"id": id_})


# Step n brings a file from schema n to n + 1; what is published here is never changed, only added to.
_STEPS: tuple[Callable[[sqlite3.Connection], None], ...] = (_first_tables, _current_records)
SCHEMA = len(_STEPS)
