"""The command line: JSON alone on stdout, the well-known bill, clear errors, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result

import attnworks
from attnworks import dispatch
from attnworks.hardware import detect
from attnworks.workbench import catalogue, ceilings, records
from attnworks.workbench.cli import COMMANDS, main, output
from attnworks.workbench.history import History
from attnworks.workbench.providers import Provider, Sdpa
from record_helpers import RECORD

TINY = ("--seq", "24", "--heads", "2", "--runs", "5", "--budget", "0", "--threads", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"COLUMNS": "200"}, prog_name="attnworks")


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_LARGEST_FLUSH_BYTES", 1 << 20)


def test_version_and_help() -> None:
    assert attnworks.__version__ in run("--version").stdout
    listed = run("--help").stdout
    assert all(name in listed for name in ("bench", "traffic", "explain", "devices"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if main.get_command(None, name)])  # type: ignore[arg-type]
def test_every_command_speaks_json(name: str) -> None:
    assert "--json" in run(name, "--help").stdout


# ---- traffic ---------------------------------------------------------------------------------------------------------


def test_traffic_prints_the_well_known_bill() -> None:
    found = run_json("traffic")
    assert found["matrix_bytes"] == 32 * 2**20
    assert found["scores_and_probs_bytes"] == 134_217_728
    assert found["flops"] == 8_589_934_592
    assert found["scores_and_probs_seconds"] == pytest.approx(67e-6, abs=0.5e-6)
    assert found["flops_seconds"] == pytest.approx(86e-6, abs=0.5e-6)
    assert found["statement"].startswith("Tiling saves bytes, not FLOPs")
    assert [bill["schedule"] for bill in found["schedules"]] == ["standard", "kv_outer", "q_outer"]
    text = run("traffic").stdout
    for words in ("32 MiB", "134,217,728 bytes", "67.1 µs", "8.59 GFLOP", "85.9 µs", "saves bytes, not FLOPs"):
        assert words in text


def test_traffic_takes_problems_tiles_and_machines() -> None:
    found = run_json("traffic", "--causal", "--tile-q", "64", "--tile-kv", "32", "--machine", "t4", "--heads", "4")
    assert found["machine"]["name"] == "NVIDIA T4"
    assert {(bill["tile_q"], bill["tile_kv"]) for bill in found["schedules"]} == {(64, 32)}
    assert found["schedules"][1]["executed_flops"] < found["schedules"][0]["executed_flops"]
    assert "hides whole tiles saves both" in run("traffic", "--causal").stdout
    decode = run_json("traffic", "--decode", "--heads", "8", "--heads-kv", "2")
    assert decode["problem"]["form"] == "decode"
    assert [bill["schedule"] for bill in decode["schedules"]] == ["standard", "q_outer", "split_kv"]


def test_traffic_on_this_machine() -> None:
    found = run_json("traffic", "--machine", "cpu", "--seq", "128")
    assert (found["machine"]["bandwidth"] is None) == ceilings.native_missing()
    assert run("traffic", "--machine", "cpu", "--seq", "128").exit_code == 0


# ---- problems --------------------------------------------------------------------------------------------------------


def test_problem_options_become_the_problem() -> None:
    found = run_json(
        *("explain", "--batch", "3", "--heads", "6", "--heads-kv", "2", "--seq", "10", "--seq-kv", "20"),
        *("--head-dim", "8", "--head-dim-v", "4", "--dtype", "bf16", "--causal", "--window", "5,-"),
    )["problem"]
    named = {"batch": 3, "heads_q": 6, "heads_kv": 2, "seq_q": 10, "seq_kv": 20, "head_dim": 8, "head_dim_v": 4}
    assert {name: found[name] for name in named} == named
    assert (found["dtype"], found["mask"]) == ("bfloat16", "window(5, 0)")


def test_cases_are_problems_too() -> None:
    shape = run_json("explain", "--case", "Llama-3-8B", "--dtype", "fp16", "--batch", "2")["problem"]
    assert (shape["batch"], shape["heads_q"], shape["heads_kv"], shape["seq_q"]) == (2, 32, 8, 8192)
    assert run_json("explain", "--case", "empty: seq_kv")["problem"]["seq_kv"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "--heads", "3", "--heads-kv", "2"), "multiple"),
        (("explain", "--window", "5"), "L,R"),
        (("explain", "--case", "Llama-3-8B", "--seq", "5"), "--seq"),
        (("explain", "--case", "no such case"), "no such case"),
        (("explain", "--case", "decode"), "must name one"),
        (("explain", "--backend", "gpu"), "backend"),
        (("traffic", "--machine", "abacus"), "must be cpu or one of"),
        (("flow", "--out", "no/such/folder/page.html"), "page.html: No such file or directory"),
        (("bench", "--budget", "-1"), "--budget"),
        (("bench", "--save", "no/such/folder/runs.jsonl"), "runs.jsonl: No such file or directory"),
        (("bench", "--db", f"{__file__}/such.db"), "such.db"),
        (("casestudy", "--on", "textbook"), "must be a GPU whose file states"),
        (("compare", "sdpa", "attnworks", "--db", "no.db"), "no.db does not exist"),
        (("traffic", "--mask", "nowhere.py:MINE"), "FILE.py:NAME"),
        (("bench", "--providers", "fastest"), "fastest"),
        (("fly",), "fly"),
    ],
)
def test_mistakes_are_named_without_a_traceback(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


# ---- explain, devices ------------------------------------------------------------------------------------------------


def test_explain_gives_every_verdict() -> None:
    found = run_json("explain", "--dtype", "fp64")
    assert found["backend"] == "reference"
    verdicts = {verdict["backend"]: verdict for verdict in found["verdicts"]}
    assert verdicts["reference"]["supported"]
    assert any("float64" in reason for reason in verdicts["cpu"]["reasons"])
    assert "float64" in run("explain", "--dtype", "fp64").stdout


def test_devices_describe_the_machine() -> None:
    found = run_json("devices")
    assert found["cpu"]["torch_threads"] == torch.get_num_threads()
    assert "textbook" in found["machine_files"]
    assert "ceilings" not in found
    assert found["cpu"]["name"] in run("devices").stdout


class OneGpu:
    """What PyTorch says of a machine with one GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, major: int, minor: int) -> None:
        facts = SimpleNamespace(
            name="a card", multi_processor_count=40, major=major, minor=minor,
            max_threads_per_multi_processor=2048, warp_size=32,
        )  # fmt: skip
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        # Of machines at hand there is one; this one must not be remembered.
        patch.setattr(dispatch, "detect", detect.__wrapped__)
        patch.setattr("attnworks.hardware.detect", detect.__wrapped__)


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize(("capability", "words"), [((7, 5), "compute capability 7.5"), ((9, 0), "runs")])
def test_devices_and_explain_say_what_runs_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], words: str
) -> None:
    OneGpu(monkeypatch, *capability)
    assert words in run("devices").stdout
    (gpu,) = run_json("devices")["gpus"]
    assert bool(gpu["triton"]) == (words != "runs")
    found = run_json("explain", "--device", "cuda", "--dtype", "bf16")
    assert found["problem"]["device"] == "cuda:0"
    assert found["backend"] == next((name for name in ("cuda", "triton") if not gpu[name]), "reference")
    reasons = {verdict["backend"]: verdict["reasons"] for verdict in found["verdicts"]}
    assert all(reasons[name] == gpu[name] for name in ("cuda", "triton"))


def test_devices_and_explain_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    OneGpu(monkeypatch, 9, 0)
    monkeypatch.setattr("attnworks.backends.triton._missing", lambda: "triton is not installed")
    assert run_json("devices")["gpus"][0]["triton"] == ["triton is not installed"]
    found = run_json("explain", "--device", "cuda:0", "--dtype", "bf16")
    assert found["backend"] != "triton"
    assert any("triton is not installed" in verdict["reasons"] for verdict in found["verdicts"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_commands_without_a_gpu() -> None:
    assert "PyTorch finds no GPU" in run("devices").stdout
    for arguments in (("explain", "--device", "cuda"), ("verify", "--device", "cuda:3", "--quick")):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert "PyTorch finds no GPU here" in result.stderr


def test_devices_measure() -> None:
    found = run_json("devices", "--measure", "--threads", "1")["ceilings"]
    if ceilings.native_missing():
        assert found is None
    else:
        assert found["threads"] == 1
        assert found["read_bytes_per_second"] > 1e8


# ---- bench -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_flush")
def test_bench_gives_records_and_ratios(tmp_path: Any) -> None:
    path = tmp_path / "records.jsonl"
    (result,) = run_json("bench", *TINY, "--save", str(path))["results"]
    assert [record["provider"] for record in result["records"]] == ["attnworks", "sdpa", "standard"]
    assert set(result["ratios"]) == {"attnworks/sdpa", "attnworks/standard"}
    assert len(path.read_text().splitlines()) == 3
    text = run("bench", *TINY, "--providers", "attnworks,sdpa,sdpa-grouped", "--no-history").stdout
    assert "torch SDPA" in text
    assert "F.scaled_dot_product_attention(q, k, v)" in text
    assert "5 runs instead of" not in text
    assert "no shared KV heads" in text


@pytest.mark.usefixtures("small_flush")
def test_bench_keeps_its_records_and_history_lists_them(tmp_path: Path) -> None:
    db, lines = ("--db", str(tmp_path / "history.db")), tmp_path / "records.jsonl"
    run("bench", *TINY, *db, "--save", str(lines))
    run("bench", *TINY, *db, "--no-history")
    assert len(run_json("history", *db)["records"]) == 3
    chosen = run_json("history", "provider=sdpa,seq_q=24", *db, "--import", str(lines))["records"]
    assert [record["provider"] for record in chosen.values()] == ["sdpa"]
    text = run("history", *db).stdout
    assert "dense 1x2/2x24x24x64 float32" in text
    assert "torch SDPA" in text
    assert "seq=3" in run("history", "seq=3", *db).output


@pytest.mark.usefixtures("small_flush")
def test_bench_prints_its_numbers_where_no_history_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("attnworks.workbench.history.default_path", lambda: blocked / "history.db")
    monkeypatch.delenv("ATTNWORKS_DB")
    result = run("bench", *TINY)
    assert result.exit_code == 0
    assert "not kept in the history" in result.stderr
    assert "torch SDPA" in result.stdout
    from attnworks.workbench.cli import bench as module

    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("measured before the file was tried"))
    assert run("bench", *TINY, "--db", str(blocked / "history.db")).exit_code == 1


@pytest.mark.usefixtures("small_flush")
def test_who_interrupts_a_profile_keeps_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnworks.workbench.cli import bench as module

    kept, seen = History(tmp_path / "history.db"), []

    def count(problem: Any, record: Any, provider: Any) -> Any:
        seen.append(len(kept.records()))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return replace(record, profile={"cycles": 7})

    monkeypatch.setattr(module.counters, "with_profile", count)
    lines = tmp_path / "records.jsonl"
    result = run("bench", *TINY, "--profile", "--db", str(kept.path), "--save", str(lines))
    assert result.exit_code == 130 and "torch SDPA" in result.stdout and "profiling was interrupted" in result.stdout
    assert seen == [3, 3], "kept before the profiler runs"
    for found in (list(kept.records().values()), records.load(lines)):
        assert [(one.provider, one.profile, "profiling was interrupted" in one.notes) for one in found] == [
            ("attnworks", {"cycles": 7}, False), ("sdpa", None, True), ("standard", None, True),
        ]  # fmt: skip
    assert all(len(one.seconds) >= 5 for one in kept.records().values())


@pytest.mark.usefixtures("small_flush")
def test_bench_of_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnworks.workbench.cli import bench as module

    class Zeros(Sdpa):
        def bind(self, problem: Any, inputs: Any) -> Any:
            bound = super().bind(problem, inputs)
            return bound._replace(run=lambda: torch.zeros_like(bound.run()))

    def wrong(name: str) -> Provider:
        return Zeros()

    monkeypatch.setattr(module, "by_name", wrong)
    result = run("bench", *TINY, "--providers", "sdpa")
    assert result.exit_code == 1
    assert "not benchmarked" in result.stdout


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_carry_their_units() -> None:
    assert output.in_bytes(None) == output.in_rate(None, "B/s") == output.in_seconds(None) == "-"
    assert output.in_bytes(33_554_432) == "32 MiB"
    assert output.in_bytes(1_070_000_000) == "1020 MiB"
    assert output.in_bytes(12) == "12 B"
    assert output.in_seconds(67.1e-6) == "67.1 µs"
    assert output.in_seconds(5e-9) == "5 ns"
    assert output.in_rate(2e12, "B/s") == "2 TB/s"
    assert output.in_rate(8_589_934_592, "FLOP") == "8.59 GFLOP"
    assert output.in_percent(0.815) == "82 %"


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_too_wide_for_the_terminal_comes_in_parts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    wide = output.table("kernel", *(f"column {n}" for n in range(12)))
    wide.add_row("one kernel", *(f"value {n}" for n in range(12)))
    result = CliRunner().invoke(click.command()(lambda: output.print_table("title", wide)))
    lines = result.stdout.splitlines()
    assert all(len(line) <= width for line in lines)
    for n in range(12):  # no cell is broken, and each stands under its header, beside its row's name
        ((place, header),) = [(i, line) for i, line in enumerate(lines) if f"column {n} " in f"{line} "]
        row = lines[place + 1]
        assert row.startswith("one kernel")
        end = header.index(f"column {n}") + len(f"column {n}")
        assert row[:end].endswith(f"value {n}")


def test_an_empty_history_says_where_runs_come_from(tmp_path: Path) -> None:
    none, some = tmp_path / "none.db", tmp_path / "some.db"
    assert "none.db does not exist" in " ".join(run("history", "--db", str(none)).stdout.split())
    assert not none.exists(), "reading makes no file"
    run("history", "--db", str(some), "--import", str(_records(tmp_path)))
    said = " ".join(run("history", "--db", str(some), "seq_q=77").stdout.split())
    assert said.startswith("no runs of 'seq_q=77' in") and "id time" not in said
    nothing = run("regress", "--db", str(none), "--json")
    assert nothing.exit_code == 2 and "has no records" in json.loads(nothing.stdout)["nothing_to_compare"]


def _records(folder: Path) -> Path:
    lines = folder / "runs.jsonl"
    records.save(lines, [RECORD])
    return lines


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    lines = _records(tmp_path)
    for wrong, words in (("{", "Expecting"), ("[1]", "was list, must be an object"), ('{"schema": 1}', "lacked")):
        (tmp_path / "more.jsonl").write_text(lines.read_text() + "\n" + wrong + "\n")
        result = run("history", "--db", str(tmp_path / "h.db"), "--import", str(tmp_path / "more.jsonl"))
        assert result.exit_code == 1 and "more.jsonl, line 3: is no record" in result.stderr and words in result.stderr


def test_cases_bring_their_masks_and_lengths() -> None:
    prefix = json.loads(run("traffic", "--case", "predicate: prefix", "--schedule", "q_outer", "--json").stdout)
    assert prefix["problem"]["mask"].startswith("predicate")
    assert prefix["schedules"][0]["flops"] == 2 * 2 * 20 * 20 * (64 + 64), "one tile, seen in part"
    packed = run("traffic", "--case", "varlen unequal", "--schedule", "q_outer", "--json")
    told = json.loads(packed.stdout)
    case = catalogue.BY_NAME["varlen unequal"]
    assert told["problem"]["batch"] == len(case.lengths)
    assert told["schedules"][0]["held_bytes"] and told["problem"]["seq_kv"] == max(keys for _, keys in case.lengths)


def test_progress_that_nobody_watches_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.progress() as report:
        for done in range(25):
            report("timing", done, 25)
            now[0] += 1.0
    said = capsys.readouterr()
    assert said.err == "timing 10/25\ntiming 20/25\n" and said.out == ""
