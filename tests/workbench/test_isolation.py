"""Isolation: whatever a kernel does to its process is a finding, and the next call runs."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernel_helpers as kernels
from attnworks.workbench import catalogue, isolation
from attnworks.workbench.cases import Case, PredicateRule
from attnworks.workbench.isolation import Isolated
from attnworks.workbench.subjects import Declined
from attnworks.workbench.verify import verify

FAULTY = f"{kernels.__file__}:faulty"


def case_of(fault: str) -> Case:
    return replace(catalogue.BY_NAME["size: 97"], scale=kernels.scale_of(fault))


@pytest.fixture(scope="module")
def isolated() -> Iterator[Isolated]:
    with Isolated(FAULTY, timeout=20) as subject:
        subject.abilities = replace(subject.abilities, lse=False, lse_gradients=False)
        directory = subject._directory
        assert directory.exists()
        yield subject
    assert not directory.exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("segfault", r"crashed with SIGSEGV in string_at \(__init__.py:\d+\)"),
        ("hang", r"hung: no answer in 0.5 s, killed in faulty \(kernel_helpers.py:\d+\)"),
        ("exit", "ended its process with exit code 3"),
        ("raise", r"raised RuntimeError: out of luck \(kernel_helpers.py:\d+\)"),
        ("shape", r"out was of shape \(1, 2, 97, 63\), must be \(1, 2, 97, 64\)"),
        ("dtype", "out was of dtype torch.float64, must be torch.float32"),
        ("device", "out was on device meta, must be on cpu like q"),
        ("layout", "out was of layout torch.sparse_coo, must be torch.strided"),
        ("killed", "crashed with SIGKILL, as where memory runs out"),
        ("no tensor", "returned str, must return a tensor"),
        ("writes behind", "wrote up to 100 bytes after the memory of k"),
        ("writes into q", "changed its input q"),
        ("writes into a gap", "wrote 8 bytes between the rows of, or beside, k"),
        ("writes in backward", "in backward changed its input k"),
    ],
)
def test_a_fault_is_a_failed_check_and_not_the_end(
    isolated: Isolated, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    if fault == "hang":
        isolated(case_of("none").build())  # not to count the start of a process
        monkeypatch.setattr(isolated, "timeout", 0.5)
    case = replace(case_of(fault), gradients=fault == "writes in backward")
    results = verify(subjects=[isolated], cases=[case])
    failed = [result.message for result in results if result.status == "failed"]
    assert failed
    assert any(re.search(message, text) for text in failed), failed


def test_the_next_call_is_right_with_gradients(isolated: Isolated) -> None:
    results = verify(subjects=[isolated], cases=[case_of("none"), case_of("prints")])
    assert not [result for result in results if result.status == "failed"]
    assert {"forward", "gradients", "fused"} <= {result.check for result in results if result.status == "passed"}


def test_a_declined_case_is_skipped(isolated: Isolated) -> None:
    (result, *_) = verify(subjects=[isolated], cases=[replace(case_of("declines"), gradients=False)])
    assert result.status == "skipped" and "not for this scale" in result.message


def test_functions_of_a_case_travel(isolated: Isolated) -> None:
    limit = torch.tensor(9)
    rule = PredicateRule(lambda b, h, q, k: (k <= q) & (k < limit))
    case = replace(case_of("none"), mask=(rule,), name="a predicate", seq_q=15, seq_kv=15)
    results = verify(subjects=[isolated], cases=[case])
    assert results[0].status == "passed", results[0].message


def test_a_kernel_that_keeps_dying_is_not_called_for_ever(isolated: Isolated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MOST_DEATHS", isolated.deaths)
    inputs = case_of("none").build()
    assert "not called any more" in isolated.reasons(inputs)[0]
    with pytest.raises(Declined, match="crashed or hung"):
        isolated(inputs)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos.abort()\n")
    with pytest.raises(ValueError, match=r"crashed with SIGABRT in <module> .*while it was loaded"):
        Isolated(f"{broken}:f")
