"""The Triton backend on the GPU: every named case against fp64 and torch's fused attention, and the properties.

Answers are worked out on the CPU and kernels compiled there, a few hundred of each, so the cases are shared out among
processes; each test waits for its own. A case is skipped only by the backend's own verdict.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

import gpu_worker
from attnworks.workbench import catalogue, properties
from attnworks.workbench.subjects import TRITON_PLANS

PROCESSES = max(1, min(12, (os.cpu_count() or 2) - 2))
QUICK = {case.name for case in catalogue.select(quick=True)}
CASES = sorted((case.name for case in catalogue.CASES), key=lambda name: name not in QUICK)
# The backend's other plans run the quick cases.
PLANNED = [(f"triton, {plan}", name) for name in CASES if name in QUICK for plan in TRITON_PLANS]
JOBS = [
    *(("triton", name, False) for name in CASES if name in QUICK),
    *(("triton", name, True) for name in properties.CASES),
    *((subject, name, False) for subject, name in PLANNED),
    *(("triton", name, False) for name in CASES if name not in QUICK),
]
Job = tuple[str, str, bool]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[gpu_worker.Found]]]:
    """Of the tests that were asked for, begun in the order in which they wait."""
    wanted = [item.callspec.params["job"] for item in request.session.items if "job" in _parameters(item)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, gpu_worker.start) as pool:
        yield {job: pool.submit(gpu_worker.check, *job) for job in wanted}
        pool.shutdown(cancel_futures=True)


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.mark.parametrize("job", JOBS, ids=[f"{s}-{name}{'-properties' if p else ''}" for s, name, p in JOBS])
def test_case(job: Job, results: dict[Job, Future[gpu_worker.Found]]) -> None:
    found = results[job].result(timeout=280)
    assert [f"{check}: {message}" for status, check, message in found if status == "failed"] == []
    if found[0][0] == "skipped":
        pytest.skip(found[0][2])
