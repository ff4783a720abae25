"""Every backend on the same named cases: against fp64, against torch's fused attention, and by its properties.

A case is skipped only by the backend's own verdict.
"""

from collections.abc import Iterator

import pytest

from attnworks.backends import triton
from attnworks.workbench import catalogue, properties
from attnworks.workbench.cases import Case
from attnworks.workbench.subjects import BackendSubject, backend_subjects
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case, verify_properties

# Triton's kernels run on a CPU in the interpreter only: tests/triton_interpreter; on a GPU: tests/gpu.
SUBJECTS = tuple(subject for subject in backend_subjects() if subject.backend is not triton)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    with fresh_memory_poisoned():
        yield


@pytest.fixture(scope="module")
def answers() -> dict[str, Answers]:
    """Of the case at hand: tests run case by case, and no two need be kept."""
    return {}


def _answers(kept: dict[str, Answers], case: Case) -> Answers:
    if case.name not in kept:
        kept.clear()
        kept[case.name] = Answers(case)
    return kept[case.name]


# The reference's slow schedules run the quick cases, and of the properties what is short; everything else runs all.
QUICK = {case.name for case in catalogue.select(quick=True)}
FAST = {subject.name for subject in backend_subjects(quick=True)}
PAIRS = [(s, case) for case in catalogue.CASES for s in SUBJECTS if s.name in FAST or case.name in QUICK]
TRIED = [catalogue.BY_NAME[name] for name in properties.CASES]
PROPERTY_PAIRS = [(s, case) for case in TRIED for s in SUBJECTS if s.name in FAST or case.seq_kv < 1000]


@pytest.mark.parametrize(("subject", "case"), PAIRS, ids=[f"{s.name}-{case.name}" for s, case in PAIRS])
def test_values(subject: BackendSubject, case: Case, answers: dict[str, Answers]) -> None:
    results = verify_case(subject, _answers(answers, case))
    assert [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []
    if results[0].status == "skipped":
        pytest.skip(results[0].message)


@pytest.mark.parametrize(
    ("subject", "case"), PROPERTY_PAIRS, ids=[f"{s.name}-{case.name}" for s, case in PROPERTY_PAIRS]
)
def test_properties(subject: BackendSubject, case: Case) -> None:
    results = verify_properties(subject, case)
    assert [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []
    if not results:
        pytest.skip("; ".join(subject.reasons(case.build())))


def test_the_reference_refuses_nothing() -> None:
    reference = next(subject for subject in SUBJECTS if subject.name == "reference")
    short = [case for case in catalogue.CASES if case.seq_kv < 2000]
    assert [case.name for case in short if reference.reasons(case.build(), case.gradients)] == []
