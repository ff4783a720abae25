"""History: nothing lost to kill -9, four writers at once, filters, files of an earlier, a later and no attnworks."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnworks.workbench import history, records
from attnworks.workbench.history import History, HistoryError, default_path, selection
from attnworks.workbench.providers import describe
from attnworks.workbench.records import Record
from record_helpers import RECORD

PROBLEM = describe(
    form="dense", batch=1, heads_q=2, heads_kv=2, seq_q=64, seq_kv=64, head_dim=16, head_dim_v=16, dtype=torch.float16
)
# A child only writes to the file and ends without Python's clean-up, so that a fork of many threads is no danger.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def numbered(number: int) -> Record:
    return replace(RECORD, session=f"s{number}", when=f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}+00:00")


def sql(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(statement).fetchall()


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


# ---- kept and found --------------------------------------------------------------------------------------------------


def test_what_is_added_is_what_is_found(tmp_path: Path) -> None:
    kept = History(tmp_path / "deep" / "history.db")
    assert kept.records() == {}
    assert kept.add([numbered(2), numbered(1)]) == [1, 2]
    assert kept.records() == {2: numbered(1), 1: numbered(2)}, "by time"
    assert kept.records(newest=1) == {1: numbered(2)}


def test_the_same_record_is_kept_once_however_it_comes(tmp_path: Path) -> None:
    kept, lines = History(tmp_path / "history.db"), tmp_path / "records.jsonl"
    kept.add([numbered(1)])
    records.save(lines, [numbered(1), numbered(2)])
    assert kept.add(records.load(lines)) == [1, 2]
    assert len(kept.records()) == 2


def test_a_record_is_amended_in_its_place(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.db")
    kept.add([numbered(1), numbered(2)])
    counted = replace(numbered(1), profile={"cycles": 1}, notes=("counted",))
    kept.amend([(numbered(1), counted), (numbered(3), numbered(4))])
    assert kept.records() == {1: counted, 2: numbered(2), 3: numbered(4)}
    kept.amend([(counted, counted)])
    assert kept.add([counted]) == [1] and len(kept.records()) == 3


def test_filters(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.db")
    tiles = {"backend": "triton", "schedule": "tiled", "tile_q": 128}
    kept.add(
        [
            replace(numbered(1), commit="abc123", problem=PROBLEM.to_json(), plan=tiles),
            replace(numbered(2), provider="sdpa", machine={"name": "NVIDIA H200"}, plan=None),
            replace(numbered(3), commit="abd456"),
        ]
    )
    tried = {
        "id": (2, {2}),
        "session": ("s3", {3}),
        "commit": ("abc", {1}),
        "provider": ("attnworks", {1, 3}),
        "machine": ("h200", {2}),
        "since": ("2026-01-01T00:00:02", {2, 3}),
        "problem": (PROBLEM, {1}),
        "seq_q": (64, {1}),
        "dtype": (torch.float16, {1}),
        "tile_q": ("128", {1}),
        "backend": ("cpu", set()),
    }
    for name, (value, expected) in tried.items():
        assert set(kept.records(**{name: value})) == expected, name
    assert set(kept.records(seq_q=64, provider="sdpa")) == set(), "all of them must hold"
    assert set(kept.records(newest=1, provider="attnworks")) == {3}
    assert set(kept.records(problem=PROBLEM.to_json())) == {1}
    with pytest.raises(ValueError, match=r"'tile'.*tile_q"):
        kept.records(tile=128)


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNWORKS_DB", str(tmp_path / "mine.db"))
    assert History().path == default_path() == tmp_path / "mine.db"
    monkeypatch.delenv("ATTNWORKS_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path().name == "history.db"
    assert "attnworks" in default_path().parts


# ---- killed, and shared ----------------------------------------------------------------------------------------------


@FORKS
def test_nothing_but_the_run_in_flight_is_lost_to_kill_9(tmp_path: Path) -> None:
    kept, told = History(tmp_path / "history.db"), tmp_path / "told"

    def write_for_ever() -> None:
        with told.open("w", buffering=1) as file:
            for number in range(100_000):
                (id_,) = kept.add([numbered(number)])
                file.write(f"{id_}\n")

    child = in_child(write_for_ever)
    deadline = time.monotonic() + 60
    while not told.exists() or told.stat().st_size < 60:
        assert time.monotonic() < deadline, "the child writes nothing"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    ids = [int(line) for line in told.read_text().split()]
    found = kept.records()
    assert found.keys() >= set(ids)
    assert len(found) <= len(ids) + 1, "the one in flight may have been kept"
    assert [record.session for record in found.values()] == [f"s{number}" for number in range(len(found))]
    assert sql(kept.path, "PRAGMA integrity_check") == [("ok",)]
    assert len(kept.add([numbered(100_000)])) == 1, "and goes on"


@FORKS
def test_four_writers_at_once_who_also_make_the_file(tmp_path: Path) -> None:
    kept, each = History(tmp_path / "history.db"), 25

    def write(writer: int) -> None:
        for number in range(each):
            kept.add([numbered(writer * each + number)])
            kept.records(newest=1)

    children = [in_child(lambda writer=writer: write(writer)) for writer in range(4)]  # type: ignore[misc]
    for child in children:
        os.waitpid(child, 0)
    assert {record.session for record in kept.records().values()} == {f"s{number}" for number in range(4 * each)}


def test_all_records_of_an_add_or_none(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.db")
    kept.add([numbered(1)])
    refuse = "CREATE TRIGGER t BEFORE INSERT ON records WHEN new.session = 's3' BEGIN SELECT RAISE(ABORT, 'x'); END"
    sql(kept.path, refuse)
    with pytest.raises(HistoryError, match="x"):
        kept.add([numbered(2), numbered(3)])
    assert set(kept.records()) == {1}


def test_selections_as_they_are_written_on_a_command_line() -> None:
    assert selection("12") == {"id": "12"}
    assert selection("0401865ab") == {"commit": "0401865ab"}
    assert selection("sdpa") == {"provider": "sdpa"}
    assert selection("tile_q=64, machine=H200 SXM") == {"tile_q": "64", "machine": "H200 SXM"}
    assert selection("attnworks,seq_q=64") == {"provider": "attnworks", "seq_q": "64"}
    for wrong in ("tile=64", "", "=3"):
        with pytest.raises(ValueError, match="selection"):
            selection(wrong)


# ---- other files -----------------------------------------------------------------------------------------------------


def test_a_file_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """As the first attnworks with a history wrote it."""
    kept = History(tmp_path / "history.db")
    added = ("host_seconds", "state", "profile", "host_median", "host_bound", "measured_bytes")
    body = {name: value for name, value in RECORD.to_json().items() if name not in added} | {"schema": 1}
    columns = "digest, session, time, provider, source, machine, problem, plan, body"
    with closing(sqlite3.connect(kept.path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"CREATE TABLE records (id INTEGER PRIMARY KEY, {columns}, UNIQUE (digest))")
        db.execute("PRAGMA user_version = 1")
        row = ("old", "s", RECORD.when, "attnworks", "", "cpu", '{"form": "dense"}', "null", json.dumps(body))
        db.execute(f"INSERT INTO records ({columns}) VALUES ({', '.join('?' * len(row))})", row)
    assert kept.records(form="dense") == {1: RECORD}
    assert sql(kept.path, "PRAGMA user_version") == [(history.SCHEMA,)]
    assert kept.add([RECORD, numbered(2)]) == [1, 2], "known again"


def test_a_later_schema_and_foreign_files_are_refused(tmp_path: Path) -> None:
    later = History(tmp_path / "later.db")
    later.add([RECORD])
    sql(later.path, "PRAGMA user_version = 99")
    with pytest.raises(HistoryError, match=f"schema 99, must be at most {history.SCHEMA}"):
        later.records()
    text = tmp_path / "text.db"
    text.write_text("no database at all " * 100)
    with pytest.raises(HistoryError, match="is no history"):
        History(text).records()
    foreign = tmp_path / "foreign.db"
    sql(foreign, "CREATE TABLE songs (name TEXT)")
    with pytest.raises(HistoryError, match="something else"):
        History(foreign).add([RECORD])
    with pytest.raises(HistoryError, match="unable to open"):
        History(tmp_path).records()
