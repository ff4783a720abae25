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
        *(("numbered within their tile", way, "alibi, not causal") for way in (2, 4)),
        *(("numbered within their tile", way, "size: 97, causal, bf16") for way in (3, 5)),
        ("moved tile numbered as unmoved", 1, "causal bottom-right: 40 on 100"),
        *(("diagonal tile skipped", way, "causal bottom-right: 40 on 100") for way in range(4, 8)),
        *(("window by tile", way, "window 7, 5: 100 on 100") for way in range(1, 7)),
        ("empty rows give the mean", 1, "rows without keys, fp32"),
        *(("keys between splits left out", way, "stress: rising maximum, fp32") for way in (1, 4)),
        *(("splits overlap", way, "stress: rising maximum, fp32") for way in (0, 3)),
        *(("a split left out", way, "size: 513") for way in (4, 5)),
        ("sink without the maximum", 1, "sink, fp32"),
        ("sink scaled", 3, "sink, fp32"),
        *(("bias of head 0", way, "bias that hides") for way in (1, 2, 3)),
        *(("mask of head 0", way, "boolean mask bhqk") for way in (6, 7)),
        ("bias rounded", 1, "bias b1qk"),
        ("bias ignored", 1, "bias b1qk"),
        *(("alibi of the wrong head", way, "alibi, not causal") for way in (7, 8)),
        *(("scores scaled otherwise in backward", way, "hand: full") for way in (1, 2, 3)),
        *(("new keys for new values", way, "decode, append, fp32") for way in (1, 2)),
        ("delta missing in the last tile", 1, "size: 97"),
        *(("delta of another size", way, "hand: full") for way in (1, 2, 3)),
        ("heads mapped otherwise in backward", 1, "heads: 6/3"),
        *(("gradients of what is hidden unwritten", way, "causal top-left: 40 on 100") for way in (1, 2)),
        ("gradients of what is hidden unwritten", 3, "causal bottom-right: 100 on 40"),
        ("lse of some keys in backward", 1, "size: 97"),
        ("lse of one tile", 2, "size: 97"),
        ("lse of shifted scores", 3, "hand: full"),
        *(("backward in 16 bits", way, "hand: full") for way in (8, 9)),
        ("bias gradient not summed", 2, "bias b1qk"),
        *(("one page for a tile", way, "decode, 4 queries, causal, pages of 17") for way in (1, 2, 4, 5, 6)),
        *(("layouts confused", way, "decode, 4 queries, causal, pages of 17") for way in (10, 11, 12)),
        *(("pages of K and V differ", way, "decode, 4 queries, causal, pages of 17") for way in (6, 7, 8)),
        *(("sequences not apart", way, "varlen unequal, causal, fp32") for way in (11, 12)),
        ("window's last tile skipped", 1, "window 7, 5: 100 on 100"),
        *(("heads left out", way, "heads: 6/2 causal, fp32") for way in (4, 5)),
        *(("tail rows unwritten", way, case) for way, case in ((4, "varlen unequal, causal, fp32"), (5, "size: 256"))),
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
