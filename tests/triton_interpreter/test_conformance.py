"""The kernels' logic without a GPU: small cases of every kind against fp64 and torch's fused attention, and properties.

A case is skipped only by the backend's own verdict, and none of these is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnworks import Causal, Plan, attention, prepared
from attnworks.backends.triton import calls
from attnworks.workbench.cases import Case
from attnworks.workbench.subjects import BackendSubject
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case, verify_properties
from interpreter_cases import BY_NAME, PAIRS, SMALL, TRIED
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


RUNNING = (
    "no mask", "causal", "rows without keys", "window", "two alignments", "boolean mask", "predicate", "alibi", "sink",
    "softcap, sink, bf16", "rising maximum", "strongly negative", "minus infinity", "head dim 520", "varlen, causal",
)  # fmt: skip


@pytest.mark.parametrize("name", RUNNING)
def test_values_with_a_running_maximum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other cards than NVIDIA's have it, and decode everywhere."""
    monkeypatch.setattr(calls, "keeps_maximum", lambda *_: False)
    prepared.forget()
    results = verify_case(SMALL, Answers(BY_NAME[name]))
    prepared.forget()
    assert [f"{r.check}: {r.status} {r.message}" for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("case", TRIED, ids=[case.name for case in TRIED])
def test_properties(case: Case) -> None:
    results = verify_properties(SMALL, case)
    assert results
    assert [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []


def test_a_row_out_of_range_leaves_others_as_they_are() -> None:
    """Bit for bit, though the tile of rows is computed again with another number in that row's maximum's place."""
    q, k, v = (torch.randn(1, 1, 48, 16) for _ in "qkv")
    k[:, :, 20:] *= 4
    plan = Plan("triton", "q_outer", 16, 16, warps=4, stages=1)
    quiet = attention(q * 0.3, k, v, mask=Causal(), plan=plan)
    q = q * 0.3
    q[:, :, 40] *= 50
    loud = attention(q, k, v, mask=Causal(), plan=plan)
    torch.testing.assert_close(loud, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    others = torch.arange(48) != 40
    assert torch.equal(quiet[:, :, others], loud[:, :, others]) and not torch.equal(quiet, loud)
