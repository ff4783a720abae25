"""benchmarks/traffic.py: what ncu wrote is held against the prediction, case by case."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from attnworks import hardware
from attnworks.backends.cuda import plans
from attnworks.plan import Plan
from attnworks.workbench import levels, profile, schedules

FILE = Path(__file__).parents[2] / "benchmarks" / "traffic.py"
H200 = hardware.load("h200-sxm")
MIB = 2**20
WHERE = '"7","python3","127.0.0.1"'
PLACE = '"1","7","(128, 1, 1)","(2048, 1, 1)","0","9.0"'
# Of nothing; of the Triton forward; of standard attention; each with what emptied the caches after it.
LAUNCHES = [
    ("void at::native::reduce_kernel<512, 1>", 512 * MIB, 20 * MIB, 512 * MIB),
    ("forward", 200 * MIB, 20 * MIB, 4200 * MIB),
    ("void at::native::reduce_kernel<512, 1>", 512 * MIB, 46 * MIB, 512 * MIB),
    ("write_scores", 130 * MIB, 1000 * MIB, 5000 * MIB),
    ("write_probs", 1000 * MIB, 1024 * MIB, 2050 * MIB),
    ("weigh_values", 1090 * MIB, 40 * MIB, 1600 * MIB),
    ("void at::native::reduce_kernel<512, 1>", 512 * MIB, 50 * MIB, 512 * MIB),
]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("traffic_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(launches) -> str:
    names = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC", *profile.BYTES)  # fmt: skip
    rows = [",".join(f'"{name}"' for name in names), ",".join(['""'] * 11 + ['"byte"'] * 3)]
    rows += [
        f'"{n}",{WHERE},"{name}",{PLACE},' + ",".join(f'"{size:,}"' for size in sizes)
        for n, (name, *sizes) in enumerate(launches)
    ]
    said = [f'==PROF== Profiling "{name}" - {n}: 0%....50%....100% - 1 pass' for n, (name, *_) in enumerate(launches)]
    return "\n".join([*said, *rows])


@pytest.fixture
def cases(benchmark, monkeypatch):
    asked = [
        {"subject": "triton forward", "n": 2048, "causal": False},
        {"subject": "cuda", "n": 2048, "causal": True},
        {"subject": "standard", "n": 2048, "causal": False},
    ]

    def under_ncu(command, metrics, timeout):
        order = Path(command[-1])
        told = json.loads(order.read_text())
        told[1]["error"] = "UnsupportedError: no Hopper"
        order.write_text(json.dumps(told))
        return profile.parse(table_of(LAUNCHES))

    monkeypatch.setattr(profile, "profile", under_ncu)
    return benchmark.counted(asked, profile.BYTES)


def test_launches_go_to_their_cases(cases):
    assert [len(case.get("kernels", ())) for case in cases] == [2, 0, 4]
    assert cases[1]["error"] == "UnsupportedError: no Hopper"


def test_errors_are_those_of_the_model(benchmark, cases):
    forward, refused, standard = (benchmark.row_of(case, H200) for case in cases)
    levels = {level["level"]: level for level in forward["levels"]}
    assert levels["slow memory, read"]["predicted"] == pytest.approx(3 * 64 * MIB, rel=1e-3)
    assert levels["slow memory, read"]["error"] == pytest.approx(192 / 200 - 1, abs=1e-3)
    assert levels["slow memory, written"]["measured"] == 66 * MIB, "with what the call left in the cache"
    assert levels["shared cache"]["measured"] == 4200 * MIB, "without the reading of the buffer"
    assert refused["error"]
    both = {level["level"]: level for level in standard["levels"]}["slow memory"]
    assert abs(both["error"]) < 0.1 and both["measured"] == (130 + 1000 + 1090 + 1000 + 1024 + 40 + 50) * MIB
    assert forward["warm"] == []


def test_the_model_is_within_a_tenth_of_what_was_counted(benchmark):
    """On an H200, from 2k keys on: the bytes of its memory, of every row of the tables of 2026-11-30. The rows without
    a plan are older than the sharing of the last wave, and than causal tiles of 192 rows."""
    rows = json.loads((FILE.parents[1] / "docs" / "results" / "2026-11-30-traffic-h200.json").read_text())
    errors = []
    for row in rows:
        p = benchmark.problem_of(row)
        if row["subject"] == "cuda":
            older = Plan("cuda", "q_outer", 128, 128, warps=12, stages=2) if row["causal"] else plans.plan_for(p)
            plan = Plan(**row["plan"]) if "plan" in row else older
            schedule = schedules.of_plan(p, plan, H200.units)
        else:
            schedule = benchmark.schedule_of(row, H200)
        found = levels.levels(p, schedule, H200)
        errors.append((found.read + found.written) / row["measured"]["slow memory"] - 1)
    assert len(rows) == 44 and sum(row.get("plan", {}).get("schedule") == "stream_k" for row in rows) == 5
    assert max(map(abs, errors)) < 0.1


def test_the_kernel_that_merges_finds_most_of_the_parts_in_the_cache(benchmark):
    """What the kernel that merges reads of the memory, as a share of the parts' bytes: next to nothing where K and V
    of the last heads leave room, and at most half."""
    rows = json.loads((FILE.parents[1] / "docs" / "results" / "2026-11-30-traffic-h200.json").read_text())
    for row in (row for row in rows if row.get("plan", {}).get("schedule") == "stream_k"):
        p = benchmark.problem_of(row)
        found = levels.levels(p, schedules.of_plan(p, Plan(**row["plan"]), H200.units), H200)
        [part] = [one for one in found.rows if (one.kernel, one.array) == ("merge", "part")]
        [merge] = [kernel for kernel in row["kernels"] if kernel["name"] == "merge"]
        counted = merge["dram__bytes_read.sum"] / part.cache
        assert part.read / part.cache < 0.05 and counted < (0.05 if row["head_dim"] < 256 else 0.5)


def test_the_table_is_markdown_on_demand(benchmark, cases):
    cells = benchmark.table([benchmark.row_of(case, H200) for case in cases])
    text = benchmark.printed(cells, markdown=True)
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert "| triton forward | 2048 | none | 192, 200, -4.0 % |" in text
    assert "no Hopper" in benchmark.printed(cells, markdown=False)
