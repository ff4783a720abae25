"""Every backend on the same named cases: against fp64, against torch's fused attention, and by its properties.

A backend is left out of a case only by its own verdict, which docs/support_matrix.md keeps; one runs each case.
"""

from collections.abc import Iterator

import pytest
import torch

from attnworks.backends import cpu, triton
from attnworks.workbench import catalogue, properties
from attnworks.workbench.cases import Case
from attnworks.workbench.subjects import BackendSubject, backend_subjects
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case, verify_properties

# Triton's kernels run on a CPU in the interpreter only: tests/triton_interpreter; on a GPU: tests/gpu.
SUBJECTS = tuple(subject for subject in backend_subjects() if subject.backend is not triton)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    with fresh_memory_poisoned():
        yield


# The reference's slow schedules run the quick cases, and of the properties what is short; everything else runs all.
QUICK = {case.name for case in catalogue.select(quick=True)}
FAST = {subject.name for subject in backend_subjects(quick=True)}
TRIED = [catalogue.BY_NAME[name] for name in properties.CASES]


def _in_its_threads(subject: BackendSubject) -> BackendSubject:
    """Two threads for the kernels that share work between them; the reference is operations of torch."""
    torch.set_num_threads(2 if subject.backend is cpu else 1)
    return subject


@pytest.mark.parametrize("case", catalogue.CASES, ids=[case.name for case in catalogue.CASES])
def test_values(case: Case) -> None:
    torch.set_num_threads(1)
    answers = Answers(case)
    answers.work_out()
    results = [
        result
        for subject in SUBJECTS
        if subject.name in FAST or case.name in QUICK
        for result in verify_case(_in_its_threads(subject), answers)
    ]
    assert [f"{r.subject}: {r.check}: {r.message}" for r in results if r.status == "failed"] == []
    assert any(r.status == "passed" for r in results)


@pytest.mark.parametrize("case", TRIED, ids=[case.name for case in TRIED])
def test_properties(case: Case) -> None:
    results = [
        result
        for subject in SUBJECTS
        if subject.name in FAST or case.seq_kv < 500
        for result in verify_properties(_in_its_threads(subject), case)
    ]
    assert [f"{r.subject}: {r.check}: {r.message}" for r in results if r.status == "failed"] == []
    assert any(r.status == "passed" for r in results)


def test_the_reference_refuses_nothing() -> None:
    reference = next(subject for subject in SUBJECTS if subject.name == "reference")
    short = [case for case in catalogue.CASES if case.seq_kv < 2000]
    assert [case.name for case in short if reference.reasons(case.outline(), case.gradients)] == []
