"""Records: written and read back without loss, one schema, derived numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnworks.workbench import environment, records
from attnworks.workbench.records import Record
from record_helpers import RECORD


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.save(path, [RECORD])
    records.save(path, [replace(RECORD, provider="sdpa")])
    assert records.load(path) == [RECORD, replace(RECORD, provider="sdpa")]


def test_json_holds_the_derived_numbers() -> None:
    values = json.loads(json.dumps(RECORD.to_json()))
    assert values["median"] == 0.25
    assert values["percentile_90"] == pytest.approx(0.45)
    assert values["flops_per_second"] == 4000
    assert values["share_of_read_bandwidth"] == 0.5
    assert values["share_of_peak_flops"] is None
    assert Record.from_json(values) == RECORD


def test_another_schema_and_missing_fields_are_refused() -> None:
    for schema in (0, records.SCHEMA + 1, None):
        with pytest.raises(ValueError, match="schema"):
            Record.from_json(RECORD.to_json() | {"schema": schema})
    values = RECORD.to_json()
    del values["seconds"]
    with pytest.raises(ValueError, match="seconds"):
        Record.from_json(values)


def test_records_of_the_first_schema_are_read() -> None:
    first = RECORD.to_json() | {"schema": 1}
    for name in ("host_seconds", "state", "profile", "host_median", "host_bound", "measured_bytes"):
        del first[name]
    assert Record.from_json(first) == RECORD


def test_the_host_is_the_limit_where_it_takes_longer_than_the_device() -> None:
    assert RECORD.host_median is None and not RECORD.host_bound
    assert replace(RECORD, host_seconds=(0.3, 0.2, 0.3)).host_bound
    assert not replace(RECORD, host_seconds=(0.1, 0.2, 0.3)).host_bound


def test_measured_bytes_come_from_the_profile() -> None:
    assert RECORD.measured_bytes is None
    assert replace(RECORD, profile={"dram_bytes": 7}).to_json()["measured_bytes"] == 7


def test_rounds_are_paired_only_inside_a_session() -> None:
    assert RECORD.ratio_to(RECORD).paired
    assert not RECORD.ratio_to(replace(RECORD, session="another")).paired


def test_the_environment_is_json_ready() -> None:
    load = environment.LoadMeter().read()
    found = json.dumps([environment.machine(), environment.versions(), environment.commit(), load.to_json()])
    assert "torch" in found


def test_others_work_marks_a_run_as_busy() -> None:
    assert environment.Load(0.5, 0.0, 1.0).busy
    assert environment.Load(0.0, 0.5, 1.0).busy
    assert not environment.Load(0.05, 0.01, 1.0).busy
    assert not environment.Load(None, None, None).busy
