"""Faults put into the CUDA kernels' text, one at a time: each must show in the results on the card."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attnworks.backends import cuda
from attnworks.hardware import detect
from gpu_mutant import PROBLEMS
from helpers import problem_of

SCRIPT = Path(__file__).parent.parent / "gpu_mutant.py"
LIMIT_SECONDS, PROCESSES = 90, 8
FAULTS = {
    "second half of the columns from the first": (
        "full",
        "epilogue.cuh",
        "stage + c * STAGE_CHUNK, 64 * c",
        "stage, 64 * c",
    ),
    "results of another head": ("full", "epilogue.cuh", "64 * c, to.row, to.head,", "64 * c, to.row, to.head ^ 1,"),
    "results laid down without the swizzle": (
        "full",
        "epilogue.cuh",
        "(lane / 16 ^ lane % 8) << 4",
        "(lane / 16) << 4",
    ),
    "owed results to where the last ones went": ("full", "forward.cuh", "owed = true, owed_to = to;", "owed = true;"),
    "O not begun anew behind owed results": ("full", "forward.cuh", "i > 0 || !anew", "1"),
    "a tile of rows never drawn": ("causal", "forward.cuh", "1u) + gridDim.x)", "1u) + gridDim.x + 1)"),
    "the counter left where it is": ("causal", "forward.cuh", "p.counter[0] = 0, p.counter[1] = 0", "p.counter[1] = 0"),
    "the first head of a section for all": ("causal", "schedule.cuh", "section + (r - x * inside)", "section"),
    "long tiles of another section": ("causal", "schedule.cuh", "s = n / per,", "s = 0,"),
    "a maximum kept though it is too low": (
        "rising",
        "softmax.cuh",
        "if (__any_sync(~0u, over[0] || over[1])) {",
        "if (0) {",
    ),
    "rows with too low a maximum not raised": (
        "rising",
        "softmax.cuh",
        "OVER ? signbit(rows.sum[r]) :",
        "OVER ? false :",
    ),
    "sums left with a minus": ("rising", "softmax.cuh", "if (OVER) rows.sum[r] = fabsf(rows.sum[r]);", ""),
    "maxima raised by a neighbour": ("rising", "softmax.cuh", ", over[r]) >> (threadIdx.x & 28) & 15", ", over[r])"),
    "scores again of another tile": ("rising", "forward.cuh", "s.k + k_ring.stage * K_BYTES, warp", "s.k, warp"),
    "scores again of another warp's rows": ("rising", "forward.cuh", "Q_CHUNK, 16 * warp + lane", "Q_CHUNK, lane"),
    "scores again without the swizzle": ("rising", "forward.cuh", "((chunk ^ (line % 8)) << 4)", "(chunk << 4)"),
    "scores again on top of what was there": (
        "rising",
        "forward.cuh",
        "for (int i = 0; i < TILE_KV / 2; i++) S[i] = 0;",
        "",
    ),
    "a KV tile between two stretches": (
        "shared",
        "schedule.cuh",
        "begin = edge, shared++",
        "begin = edge + 1, shared++",
    ),
    "a stretch goes on into the next": ("shared", "schedule.cuh", "end = min(end, edge);", "end = edge;"),
    "keys of a part counted from its first": ("shared", "forward.cuh", "(before + tile) * TILE_KV", "tile * TILE_KV"),
    "one part merged": (
        "shared",
        "merge.cuh",
        "stretch_of(s, (tile + 1) * s.kv_tiles - 1)",
        "stretch_of(s, tile * s.kv_tiles)",
    ),
    "parts merged without their weights": (
        "shared",
        "merge.cuh",
        "exp2_fast((weight[t] - shift) * LOG2E)",
        "weight[t] > -INFINITE ? 1.f : 0.f",
    ),
    "parts merged before they are there": ("shared", "merge.cuh", "  await_kernel_before();", ""),
    "O of a part not cleared for the next": (
        "shared",
        "forward.cuh",
        "begin_rows();\n        clear();",
        "begin_rows();",
    ),
}


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Future[str]]]:
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
    verdict = cuda.verdict(problem_of(q, q, q), detect("cuda:0"))
    if not verdict.supported:
        pytest.skip(str(verdict))
    jobs = {name: (name,) for name in PROBLEMS} | FAULTS
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield {name: pool.submit(_said, *job) for name, job in jobs.items()}


def _said(*arguments: str) -> str:
    path = os.pathsep.join([str(SCRIPT.parent), *filter(None, (os.environ.get("PYTHONPATH"),))])
    try:
        ran = subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "never ended"
    return ran.stdout.strip() or ran.stderr[-500:]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_a_fault_all_is_right(problem: str, said: dict[str, Future[str]]) -> None:
    assert said[problem].result() == "right"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, said: dict[str, Future[str]]) -> None:
    found = said[fault].result()
    assert found != "right" and "AssertionError" not in found, found
