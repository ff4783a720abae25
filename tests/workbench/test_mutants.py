"""The checks pass the kernel without a fault; that they catch every one with a fault is in test_kills.py."""

import pytest

from attnworks.workbench import catalogue
from attnworks.workbench.hunt import kill_table
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_kernel_without_a_fault_passes() -> None:
    short = [case for case in catalogue.select(quick=True) if case.seq_kv < 2000]
    long = catalogue.BY_NAME["stress: few queries on 16k keys, bf16"]
    results = verify(subjects=[Mutant()], cases=[*short, long])
    asked = [r for r in results if r.layer != "property" or r.status != "skipped"]  # it claims no linear memory
    assert [f"{r.case.name}: {r.check}: {r.message}" for r in asked if r.status != "passed"] == []
    assert len(asked) > 200


def test_fp16_accumulation_is_caught_by_the_aggregate_test_alone() -> None:
    """Why there is an aggregate test: every element stays within its own bound."""
    (kill,) = kill_table(["fp16 accumulation"])
    assert kill.check == "out aggregate"
    assert "elementwise" not in kill.detail


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="fault: was 'no such'"):
        Mutant("no such")
