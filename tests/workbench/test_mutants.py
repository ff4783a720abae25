"""The checks pass the kernel without a fault; that they catch every one with a fault is in test_kills.py."""

import pytest

from attnworks.workbench import catalogue
from attnworks.workbench.hunt import kill_table
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify, verify_case

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


@pytest.mark.parametrize(
    ("fault", "way", "case"),
    [
        ("strides ignored", 1, "unequal dims: 192/128, fp32"),
        ("strides ignored", 2, "strides: gapped, bhsd"),
        ("sink left out of the lse", 1, "sink and rows without keys"),
        ("window's first tile skipped", 1, "varlen, strided, window, 80/72"),
        *(("key offsets from queries", way, "varlen unequal") for way in (10, 11, 12, 13)),
        *(("mask or bias at another address", way, "boolean mask bhqk") for way in (8, 9)),
        ("causal from other lengths", 4, "varlen unequal, causal, fp32"),
        ("causal by tile", 4, "hand: causal"),
        ("tail rows unwritten", 3, "size: 97"),
        *(("state of the rows before", way, "size: 97") for way in (1, 2)),
        ("partial results in 16 bits", 1, "stress: normal, fp32"),
        *(("window size 0 taken for none", way, "window 0, 0: 100 on 100") for way in (1, 2)),
        *(("window size held to a length", way, "window 400, 400: 70 on 130") for way in (1, 2)),
        *(("open window end taken for a number", way, "window None, 2: 100 on 100") for way in (1, 3)),
        ("open window end taken for a number", 2, "window 15, None: 100 on 100"),
        *(("visible tiles of a mask skipped", way, "window 0, 0: 70 on 130") for way in (1, 2)),
        *(("lse of another maximum", way, "stress: rising maximum, fp32") for way in range(1, 5)),
        ("lse of shifted scores", 1, "hand: full"),
        ("lse of shifted scores", 2, "alibi"),
        ("stores reach the next sequence", 1, "varlen unequal"),
        ("8-bit cache in another format", 1, "decode, float8_e4m3fn cache"),
        ("8-bit cache in another format", 2, "decode, float8_e5m2 cache"),
        *(("dO of another place", way, "heads: 8/2") for way in range(1, 5)),
        *(("K or V of another tile in backward", way, "size: 97") for way in range(1, 6)),
        ("dk, dv miss rows of the window", 1, "window 7, 5: 100 on 100"),
    ],
)
def test_a_further_way_is_caught(fault: str, way: int, case: str) -> None:
    answers = Answers(catalogue.BY_NAME[case])
    with fresh_memory_poisoned():
        results = verify_case(Mutant(fault, way=way), answers)
    assert any(result.status == "failed" for result in results)


@pytest.mark.parametrize(
    "case", ["window 0, 5: 100 on 100", "window None, 2: 100 on 100", "window 15, None: 100 on 100"]
)
def test_windows_of_0_and_open_ones_are_quick_cases(case: str) -> None:
    assert case in {one.name for one in catalogue.select(quick=True)}
