"""The Triton backend on the GPU: every named case against fp64 and torch's fused attention, and the properties.

Answers are worked out on the CPU and kernels compiled there, a few hundred of each, so the cases are shared out among
processes; each test waits for its own. A case is skipped only by the backend's own verdict.
"""

from concurrent.futures import Future

import pytest

import gpu_worker
from attnworks.workbench import catalogue, properties
from attnworks.workbench.subjects import TRITON_PLANS
from gpu_helpers import assert_none_failed

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


@pytest.mark.parametrize("job", JOBS, ids=[f"{s}-{name}{'-properties' if p else ''}" for s, name, p in JOBS])
def test_case(job: gpu_worker.Job, results: dict[gpu_worker.Job, Future[gpu_worker.Found]]) -> None:
    assert_none_failed(results[job].result(timeout=280))
