"""Tests that need a GPU; elsewhere all are collected and one is left to say that. ``make gpu-test`` runs them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's products warn without it, and warnings are errors

import pytest
import torch

import gpu_worker

PROCESSES = max(1, min(12, (os.cpu_count() or 2) - 2))
HERE = Path(__file__).parent
GPU = torch.cuda.is_available()
# Fresh memory is filled by torch's deterministic mode, which also warns of operations that have no such mode.
MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="PyTorch finds no GPU"),
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
    # A leaf that was differentiated on the capturing stream is differentiated again outside of it, on purpose.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        for mark in MARKS:
            item.add_marker(mark)
    if not GPU and len(ours) > 1:
        needless = set(ours[1:])
        items[:] = [item for item in items if item not in needless]
        config.hook.pytest_deselected(items=ours[1:])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[gpu_worker.Job, Future[gpu_worker.Found]]]:
    """Of the jobs of a module's tests that were asked for, begun in the order in which they wait; by one of several
    workers of pytest-xdist, which can't know which of them will be its own, each when its test asks for it."""
    here = (item for item in request.session.items if item.path == request.path and "job" in _parameters(item))
    wanted = [item.callspec.params["job"] for item in here]
    one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1 if one_of_several else PROCESSES, context, gpu_worker.start) as pool:
        found = _Found(pool)
        for job in [] if one_of_several else wanted:
            found[job]
        yield found
        pool.shutdown(cancel_futures=True)


class _Found(dict[gpu_worker.Job, "Future[gpu_worker.Found]"]):
    """What is found of each job, begun when it is asked for first."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        super().__init__()
        self.pool = pool

    def __missing__(self, job: gpu_worker.Job) -> Future[gpu_worker.Found]:
        self[job] = self.pool.submit(gpu_worker.check, *job)
        return self[job]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
