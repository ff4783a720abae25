"""The sweep on the device at hand: what is rejected, that it goes on where it was, and what becomes of the winner."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import attnworks
from attnworks import Plan, dispatch, tuned
from attnworks.backends import cpu, cuda, triton
from attnworks.hardware import detect, load
from attnworks.workbench import bench, counters, measured_sweep, profile, tile_sweep
from attnworks.workbench.cli import heat, main
from attnworks.workbench.history import History
from attnworks.workbench.measured_sweep import Grid, words
from attnworks.workbench.providers import describe
from record_helpers import RECORD

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the native extension is not built")

GRID = Grid((32, 64), (16, 32, 64))
SECONDS = {"64 x 16": 0.5, "32 x 64": 0.4}  # all others take 1 s


def problem(**changes):
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seq_q": 64, "seq_kv": 64, "head_dim": 16, "head_dim_v": 16}
    return describe(**({"form": "dense", "dtype": torch.float32} | sizes | changes))


@pytest.fixture
def scripted(monkeypatch):
    """Heats whose times are scripted; the names of what ran in each, and names whose results are wrong."""
    heats, wrong = [], set()

    def measure(posed, providers, protocol):
        names = [provider.name for provider in providers]
        heats.append(names)
        runs = [SECONDS.get(name, 1.0) * (1 + 0.001 * (turn % 3)) for name in names for turn in range(12)]
        records = [
            replace(RECORD, session=str(len(heats)), provider=provider.name, problem=posed.to_json(),
                    plan=provider.plan(posed).to_json(), seconds=tuple(runs[12 * place : 12 * place + 12]))
            for place, provider in enumerate(providers)
        ]  # fmt: skip
        kept = tuple(record for record in records if record.provider not in wrong)
        return bench.Result(kept, failed={name: f"{name}: wrong" for name in names if name in wrong})

    monkeypatch.setattr(bench, "measure", measure)
    return heats, wrong


def sweep(history, **options):
    return measured_sweep.sweep(problem(), history, **({"backend": "cpu", "grid": GRID, "seconds": 3600.0} | options))


def test_the_fastest_of_the_final_becomes_a_row_and_decides_calls(scripted, tmp_path):
    heats, _ = scripted
    found = sweep(History(tmp_path / "h.db"))
    choice = words(found.table)
    assert all(heat[0] == choice for heat in heats), "the backend's choice runs in every heat"
    assert heats[-1] == [choice, "32 x 64", "64 x 16", *heats[-1][3:]] and len(heats[-1]) == 4
    assert (words(found.best), round(found.ratio.value, 2)) == ("32 x 64", 2.5)
    assert found.row.kernels == tuned.kernels_hash(cpu.KERNELS) and found.row.plan == found.best
    key = tuned.key_of(found.problem, found.hardware, "cpu")
    tuned.write(tmp_path / tuned.file_name(found.hardware), found.hardware.name, {key: found.row})
    attnworks.use_plans(tmp_path)
    try:
        assert dispatch.explain(problem()).plan == found.best
        assert dispatch.explain(problem(seq_kv=640)).plan != found.best
    finally:
        attnworks.use_plans(None)


def test_a_choice_that_is_not_beaten_stays(scripted, tmp_path):
    found = sweep(History(tmp_path / "h.db"), grid=Grid((32,), (16, 32)))
    assert found.row is None and found.ratio.verdict == "undecided"
    assert "the backend's choice" in heat.outcome(found)[0]


def test_a_difference_within_noise_changes_no_plan(scripted, tmp_path, monkeypatch):
    monkeypatch.setitem(SECONDS, "32 x 16", 0.995)
    found = sweep(History(tmp_path / "h.db"), grid=Grid((32,), (16, 32)))
    assert words(found.best) == "32 x 16" and found.row is None
    assert "undecided (1.0" in heat.outcome(found)[0] and "the backend's choice stays" in heat.outcome(found)[0]


def test_wrong_results_are_rejected_with_the_reason(scripted, tmp_path):
    _, wrong = scripted
    wrong.add("32 x 64")
    found = sweep(History(tmp_path / "h.db"))
    [bad] = [one for one in found.standings if one.rejected]
    assert words(bad.plan) == "32 x 64" and bad.rejected == ("32 x 64: wrong",)
    assert words(found.best) == "64 x 16"


def test_it_goes_on_where_it_was(scripted, tmp_path, monkeypatch):
    heats, _ = scripted
    history = History(tmp_path / "h.db")
    run, ended = bench.measure, RuntimeError("killed")

    def killed(*arguments):
        if len(heats) == 1:
            raise ended
        return run(*arguments)

    bench.measure = killed
    with pytest.raises(RuntimeError, match="killed"):
        sweep(history)
    bench.measure = run
    first = heats.copy()
    found = sweep(history)
    again = heats[len(first) :]
    assert not {name for heat in first for name in heat[1:]} & {name for heat in again[:-1] for name in heat[1:]}
    assert words(found.best) == "32 x 64"
    count = len(heats)
    assert sweep(history).best == found.best and len(heats) == count, "nothing is left to run"
    sweep(history, again=True)
    assert len(heats) > count
    # Another problem, and other kernels, are other sweeps.
    assert measured_sweep.key_of(problem(head_dim=32), cpu, detect()) != found.key
    monkeypatch.setattr(cpu, "KERNELS", (tmp_path / "h.db",))
    assert measured_sweep.key_of(problem(), cpu, detect()) != found.key


def test_what_the_time_does_not_suffice_for_is_counted_and_nothing_decided(scripted, tmp_path):
    found = sweep(History(tmp_path / "h.db"), seconds=0.0)
    assert found.remaining == 6 and found.best is None and found.row is None
    assert "run the same command again" in heat.outcome(found)[0]


def test_tiles_that_the_kernel_would_cut_are_rejected_before_anything_runs():
    plans = [
        Plan("cpu", "tiled", rows, keys, isa=cpu.isas()[0]) for rows, keys in ((1024, 512), (1025, 512), (64, 513))
    ]
    small = replace(detect(), shared_cache_bytes=1 << 16)
    found = measured_sweep.reasons(problem(), plans, cpu, detect())
    assert [len(why) for why in found.values()] == [0, 1, 1]
    assert found[plans[1]] == ("tile_q 1025: the kernel cuts it to 1024",)
    (why,) = measured_sweep.reasons(problem(), plans[:1], cpu, small)[plans[0]]
    assert why.endswith("bytes of scratch for each of 2 threads, the last cache has 65536")


def test_plans_differ_from_the_choice_in_what_the_grid_says():
    table = Plan("cuda", "q_outer", 128, 128, warps=12, stages=2)
    h200, many = load("h200-sxm"), problem(batch=8, heads_q=64, heads_kv=64, dtype=torch.float16)
    found = measured_sweep.plans(many, table, Grid((128, 192), (96,), (0,), (3,)), cuda, h200)
    assert [(plan.tile_q, plan.warps, plan.stages) for plan in found] == [(128, 12, 2), (128, 12, 3), (192, 16, 3)]
    split = Plan("triton", "split_kv", 16, 64, 512, warps=4, stages=3)
    keys = [
        plan.split_kv for plan in measured_sweep.plans(many, split, Grid((64, 128), (48, 64), (4,), (3,)), triton, h200)
    ]
    assert keys == [512, 528]


def test_of_few_rows_each_tile_gets_parts_of_the_keys_that_fill_the_card():
    few = problem(seq_q=128, seq_kv=16384, heads_q=8, heads_kv=8, head_dim=128, head_dim_v=128, dtype=torch.float16)
    few, h200 = replace(few, device="cuda:0"), load("h200-sxm")
    table = cuda.candidates(few, h200)[0]
    found = measured_sweep.plans(few, table, Grid((128,), (96, 128), (0,), (2,)), cuda, h200)
    assert [plan.schedule for plan in found] == ["split_kv"] * 3
    assert [plan.split_kv % plan.tile_kv for plan in found] == [0, 0, 0]
    parts = [-(-few.seq_kv // plan.split_kv) for plan in found]
    assert parts == [15, 16, 16], "132 multiprocessors, 8 tiles of rows; whole tiles to a part"
    assert all(not tile_sweep.refusal(few, plan, cuda) for plan in found)


def test_the_command_measures_writes_and_is_not_harmed_by_a_kill(tmp_path, monkeypatch):
    """A real sweep, killed once its first heat is in the history."""
    db = tmp_path / "h.db"
    arguments = [
        "sweep",
        "--heads",
        "2",
        "--seq",
        "96",
        "--head-dim",
        "16",
        "--tile-q",
        "32,96",
        "--tile-kv",
        "16,32",
    ]
    arguments += ["--db", str(db), "--into", str(tmp_path), "--budget", "10"]
    code = (
        "from attnworks.workbench import bench, measured_sweep; from attnworks.workbench.cli import main\n"
        "measured_sweep.RACE = bench.Protocol(runs=5, flush=False)\n"
        "run, heats = bench.measure, []\n"
        "def measure(*arguments):\n"
        "    if heats:\n"
        "        import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
        "    heats.append(1)\n"
        "    return run(*arguments)\n"
        "bench.measure = measure\n"
        f"main({arguments!r})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    kept = History(db).records()
    assert len(kept) == measured_sweep.HEAT + 1
    monkeypatch.setattr(measured_sweep, "RACE", bench.Protocol(runs=5, flush=False))
    monkeypatch.setattr(measured_sweep, "FINAL", bench.Protocol(runs=10, flush=False))
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["remaining"] == 0 and found["best"] and len(found["candidates"]) == 5
    assert all(one["seconds"] > 0 and one["error"]["worst_share_of_bound"] <= 1 for one in found["candidates"])
    records = History(db).records()
    assert kept.keys() < records.keys()
    assert bool(found["row"]) == (tmp_path / tuned.file_name(detect())).exists()


@pytest.mark.usefixtures("scripted")
def test_the_command_says_what_became_of_the_file(tmp_path):
    asked = ["sweep", "--heads", "2", "--seq", "64", "--head-dim", "16", "--into", str(tmp_path)]
    file = tmp_path / tuned.file_name(detect())

    def told(db, *tiles):
        wide = CliRunner(env={"COLUMNS": "400"})  # no path is broken in two
        ran = wide.invoke(main, [*asked, "--tile-q", tiles[0], "--tile-kv", tiles[1], "--db", str(tmp_path / db)])
        assert ran.exit_code == 0, ran.output
        return " ".join(ran.output.split())

    assert file.name not in told("a.db", "32", "16,32") and not file.exists(), "nothing to say of"
    assert f"{file.name} has it" in told("b.db", "32,64", "16,64") and file.exists()
    assert "its row has gone" in told("c.db", "32", "16,32")
    assert "its row has gone" not in told("c.db", "32", "16,32"), "only once"


def test_options_that_do_not_go_together_are_refused():
    for arguments, told in (
        (["--device", "cpu", "--stages", "2"], "--stages: was given, but only kernels of GPUs"),
        (["--on", "t4", "--again"], "--again: was given, but --on measures nothing"),
        (
            ["--device", "cpu", "--backend", "reference"],
            "'reference' runs the problem, must be one of ('cpu', 'triton', 'cuda')",
        ),
    ):
        ran = CliRunner().invoke(main, ["sweep", *arguments])
        assert ran.exit_code != 0 and told in ran.output


def test_heat_maps_mark_the_choice_the_rejected_and_what_has_not_run(scripted, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = sweep(History(tmp_path / "h.db"), grid=Grid((32, 64), (16, 64, 600)))
    heat.print_found("title", found)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["32", "1.00", "2.50", "x"] for line in lines)
    assert any("tile_kv 600: the kernel cuts it to 512" in line for line in lines)
    assert any("1.00*" in line for line in lines)
    assert lines[-1].startswith("Fastest: 32 x 64, 400 ms, 2.50 (")


# ---- what a profiler counts of the finalists -------------------------------------------------------------------------

NAMES = ("ID", "Kernel Name", *counters.METRICS)
UNITS = ("", "", "byte", "byte", "byte", "cycle", "nsecond", "%", "", "")


def in_csv(conflicts):
    """What ncu writes of a kernel with so many bank conflicts."""
    row = ("0", "forward", "1,048,576", "262,144", "4,194,304", "2,500,000", "40,000", "55.5", conflicts, "1,000,000")
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in (NAMES, UNITS, row))


def test_bank_conflicts_of_the_finalists_stand_in_the_table(scripted, tmp_path, monkeypatch, capsys):
    found = replace(sweep(History(tmp_path / "h.db")), problem=replace(problem(), device="cuda:0"))
    asked = []

    def counted(provider, posed):
        asked.append(provider.name)
        return counters.Counted.of(profile.parse(in_csv("250,000" if provider.name == "32 x 64" else "n/a")))

    monkeypatch.setattr(counters, "count", counted)
    monkeypatch.setattr(counters, "detect", lambda device: load("h200-sxm"))
    monkeypatch.setenv("COLUMNS", "200")
    profiled = measured_sweep.profiled(found)
    finalists = [words(one.plan) for one in profiled.standings if one.final]
    assert asked == finalists and len(finalists) == 4
    heat.print_found("title", profiled)
    lines = capsys.readouterr().out.splitlines()
    names = ("finalist", "32 x 64", "64 x 16")
    rows = {name: next(line for line in lines if line.startswith(name)) for name in names}
    assert "bank conflicts" in rows["finalist"]
    assert rows["32 x 64"].split()[-2:] == ["2.5e+05", "(25%)"] and "1.25 MiB" in rows["32 x 64"]
    assert rows["64 x 16"].split()[-1] == "-", "unknown is not 0"
    told = {words(Plan(**one["plan"])): one["profile"] for one in profiled.to_json()["candidates"]}
    assert told["32 x 64"]["bank_conflicts"] == 250_000 and told["32 x 64"]["shared_turns"] == 1_000_000
    assert told["64 x 64"] is None or "64 x 64" in finalists


def test_why_nothing_was_counted_is_said_once(scripted, tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise profile.ProfilerError("no counters here")

    monkeypatch.setattr(counters.perf_events, "count", refused)
    profiled = measured_sweep.profiled(sweep(History(tmp_path / "h.db")))
    heat.print_found("title", profiled)
    out = capsys.readouterr().out
    assert out.count("no profile: no counters here") == 1 and "finalist" not in out
