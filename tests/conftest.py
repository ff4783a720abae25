"""Fixtures that every test gets: fresh memory that holds NaN, a fixed seed; and how a test names a backend."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

# Before torch loads OpenMP: threads that wait must sleep, not spin, or tests on a busy machine take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What commands measure in tests is no part of anybody's history.
os.environ["ATTNWORKS_DB"] = os.path.join(tempfile.mkdtemp(prefix="attnworks-tests-"), "history.db")
# Nor do a developer's own tuned plans decide what they run.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="attnworks-tests-")

import pytest
import torch
from hypothesis import HealthCheck, settings

from attnworks import dispatch
from attnworks.backends import cpu, cuda, triton
from attnworks.hardware import detect
from helpers import problem_of


def pytest_addoption(parser: pytest.Parser) -> None:
    if not find_spec("pytest_timeout"):  # pyproject.toml sets it, and a GPU's machine may well do without
        parser.addini("timeout", "seconds for a test, were pytest-timeout installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector, which measuring memory asks for again and again, skips it."""
    gc.collect()
    gc.freeze()


settings.register_profile("attnworks", deadline=None, derandomize=True, print_blob=True)
# Of tests/fuzz.py. That a busy machine takes long to draw inputs is no finding.
slow = [HealthCheck.too_slow]
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=300, suppress_health_check=slow)
settings.load_profile("attnworks")

# transformers, whose pinned release has given up Python 3.10, is not installed there.
collect_ignore = ["integrations/test_transformers.py"] if sys.version_info < (3, 11) else []

# Two threads wherever the tests run, so that the code that shares work between threads always runs.
torch.set_num_threads(2)
GPU = torch.cuda.is_available()
LONG = ("test_triton_interpreter.py", "test_kills.py")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN (the largest value for integers), so that an unwritten output cannot look right."""
    # Not torch.use_deterministic_algorithms: that imports the compiler, for seconds in every process.
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For kernels that are operations of torch on small tensors: a second thread makes them dearer by half."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def seed() -> None:
    # Not torch.manual_seed, which spends milliseconds on telling devices that are not there.
    torch.default_generator.manual_seed(20250101)
    if GPU:
        torch.cuda.manual_seed_all(20250101)


def _run_on_a_cpu() -> list[str]:
    """The backends that run on a CPU at all, by their own Verdict."""
    q = torch.zeros(1, 1, 1, 8)
    problem, here = problem_of(q, q, q), detect("cpu")
    on_gpus = [backend.NAME for backend in (cuda, triton) if not backend.verdict(problem, here).supported]
    return [name for name in dispatch.NAMES if name not in on_gpus]


@pytest.fixture(params=_run_on_a_cpu())
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that runs here, by its name."""
    return str(request.param)


@pytest.fixture(params=cpu.isas() or ["native extension missing"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine runs; skipped by the CPU backend's Verdict where it has none."""
    if not cpu.isas():
        q = torch.zeros(1, 1, 1, 8)
        pytest.skip(str(cpu.verdict(problem_of(q, q, q), detect("cpu"))))
    return str(request.param)
