"""The kernels' logic without a GPU: small cases of every kind against fp64 and torch's fused attention, and properties.

A case is skipped only by the backend's own verdict, and none of these is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from attnworks.workbench.cases import Case
from attnworks.workbench.subjects import BackendSubject
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case, verify_properties
from interpreter_cases import PAIRS, SMALL, TRIED
from interpreter_repairs import repair

# Triton 3.6 also turns arrays of one element into numbers in a way that NumPy 2.4 no longer has.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


repair()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    # NumPy, in which the interpreter computes, warns where a GPU doesn't: of log2(0) and of operations on NaN and inf.
    with fresh_memory_poisoned(), np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(("subject", "case"), PAIRS, ids=[f"{s.name}-{case.name}" for s, case in PAIRS])
def test_values(subject: BackendSubject, case: Case) -> None:
    results = verify_case(subject, Answers(case))
    assert [f"{r.check}: {r.status} {r.message}" for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("case", TRIED, ids=[case.name for case in TRIED])
def test_properties(case: Case) -> None:
    results = verify_properties(SMALL, case)
    assert results
    assert [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []
