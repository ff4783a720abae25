"""Fixtures that every test gets: fresh memory that holds NaN, a fixed seed; and how a test names a backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

# Before torch loads OpenMP: threads that wait must sleep, not spin, or tests on a busy machine take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

from attnworks import dispatch
from attnworks.backends import cpu, cuda, triton
from attnworks.hardware import detect
from helpers import problem_of


def pytest_addoption(parser: pytest.Parser) -> None:
    if not find_spec("pytest_timeout"):  # pyproject.toml sets it, and a GPU's machine may well do without
        parser.addini("timeout", "seconds for a test, were pytest-timeout installed")


settings.register_profile("attnworks", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("attnworks")

# Two threads wherever the tests run, so that the code that shares work between threads always runs.
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN (the largest value for integers), so that an unwritten output cannot look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20250101)


@pytest.fixture(params=dispatch.NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend's name. A test runs on all of them that run on a CPU at all, by their own Verdict."""
    if request.param in ("cuda", "triton"):
        q = torch.zeros(1, 1, 1, 8)
        verdict = (cuda if request.param == "cuda" else triton).verdict(problem_of(q, q, q), detect("cpu"))
        if not verdict.supported:
            pytest.skip(str(verdict))
    return str(request.param)


@pytest.fixture(params=cpu.isas() or ["native extension missing"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine runs; skipped by the CPU backend's Verdict where it has none."""
    if not cpu.isas():
        q = torch.zeros(1, 1, 1, 8)
        pytest.skip(str(cpu.verdict(problem_of(q, q, q), detect("cpu"))))
    return str(request.param)
