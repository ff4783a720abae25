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
from gpu_mutant import FAULTS, PROBLEMS
from helpers import problem_of

SCRIPT = Path(__file__).parent.parent / "gpu_mutant.py"
LIMIT_SECONDS, PROCESSES = 90, 8


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
