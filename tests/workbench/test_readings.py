"""What diagnose reads from answers without a list of faults: which step is wrong, what stands in wrong rows, when."""

from __future__ import annotations

import pytest
import torch

from attnworks.masks import Causal, Window
from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose import (
    Candidate,
    _read_first,
    bounds,
    diagnose,
    moved,
    operands,
    patterns,
    reading,
    stages,
    tags,
)
from attnworks.workbench.diagnose.explain import _number, explain
from attnworks.workbench.diagnose.nearest import Corpus
from attnworks.workbench.diagnose.probes import probes
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.mutants import Mutant

pytestmark = pytest.mark.usefixtures("one_thread")


def _corpus(*names: str) -> Corpus:
    found = Corpus([probe for probe in probes() if probe.name in names])
    assert len(found.benches) == len(names)
    return found


class LaterLSE(Mutant):
    """Does not write the LSE from row 40 on."""

    def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
        out, lse = super().__call__(inputs, **options)
        lse = lse.clone()
        lse[..., 40:] = 0
        return out, lse


def _said(found: list[Reading]) -> str:
    return "; ".join(one.said for one in found)


@pytest.mark.parametrize(
    ("fault", "way", "words"),
    [
        ("rows of the output exchanged", 0, "out holds what belongs to another row, -1 away"),
        ("heads of the output exchanged", 1, "out holds what belongs to another head"),
        ("sequences exchanged", 2, "out holds what belongs to another sequence"),
        ("gradients in another place", 3, "holds what belongs to another row, -1 away"),
        ("sequences left out", 0, "out is 0 in sequences 1"),
        ("heads left out in backward", 0, "dq is 0 in heads 3"),
        ("lse of another row", 1, "the LSE holds the right numbers of other rows"),
        ("lse not written", -1, "the LSE is 0 in rows 40, 41, 42, 43, 44, 45 …"),
    ],
)
def test_what_stands_in_wrong_rows(fault: str, way: int, words: str) -> None:
    corpus, subject = _corpus("alibi"), Mutant(fault, way=way) if way >= 0 else LaterLSE()
    found = moved.in_rows(corpus.benches, corpus.observe(subject))
    assert words in _said(found)
    assert fault in found[0].faults


@pytest.mark.parametrize(
    ("fault", "way", "probe", "words"),
    [
        ("KV head by remainder", 0, "6 heads on 3", "head 1 reads KV head 1; head 2 reads KV head 2"),
        ("K and V heads differ", 3, "6 heads on 3", "head 2 reads K of KV head 1, V of 0"),
        ("K and V of sequence 0", 1, "lengths apart", "head 0 of sequence 0 reads KV head 0 of sequence 1"),
        ("batch and heads mixed", 0, "6 heads on 3", "of sequence"),
    ],
)
def test_which_keys_and_values_a_head_reads(fault: str, way: int, probe: str, words: str) -> None:
    corpus = _corpus(probe)
    (found,) = operands.sources(corpus.benches, corpus.observe(Mutant(fault, way=way)))
    assert words in found.said
    assert fault in found.faults


@pytest.mark.parametrize(
    ("fault", "way", "probe", "words"),
    [
        ("sequences not apart", 5, "varlen, full", "sequence 0 gives weight to keys of sequence 1"),
        ("one slot too many", 0, "cache", "gives weight to slots past its end"),
        ("longest length for all", 0, "cache", "gives weight to slots past its end"),
        ("page repeated", 0, "pages of 16", "gives none to page 3 of its own"),
        ("stale page", 0, "pages of 16", "gives weight to page 0 of sequence 3, gives none to page 3 of its own"),
        ("full last page left out", 0, "full pages", "gives none to page 2 of its own"),
    ],
)
def test_whose_values_are_read(fault: str, way: int, probe: str, words: str) -> None:
    corpus, subject = _corpus(probe), Mutant(fault, way=way)
    (found,) = tags.read(subject, corpus.benches, corpus.observe(subject))
    assert words in found.said
    assert fault in found.faults


def test_own_values_alone_are_no_reading() -> None:
    corpus, subject = _corpus("varlen, full", "cache", "pages of 16", "pages of 17"), Mutant("scale twice")
    assert tags.read(subject, corpus.benches, corpus.observe(subject)) == []


def test_no_keys_are_read_off_what_is_wrong_otherwise() -> None:
    corpus = _corpus("6 heads on 3", "square")
    assert operands.sources(corpus.benches, corpus.observe(Mutant("scale twice"))) == []
    assert operands.sources(corpus.benches, corpus.observe(Mutant())) == []


def test_keys_without_weight_are_found_in_caches_too() -> None:
    corpus, subject = _corpus("cache"), Mutant("last key dropped")
    found = patterns.in_weights(subject, corpus.benches, corpus.observe(subject))
    assert found[0] == "keys 199 of 200 get no weight in any row (cache, sequence 1)"


@pytest.mark.parametrize(
    ("fault", "way", "probe", "words"),
    [
        ("delta of other rows", 1, "square", "another delta, rowsum(dO ∘ O), and by nothing else"),
        ("delta missing", 0, "square", "another delta: delta missing"),
        ("lse cotangent of the wrong sign", 0, "gradient of the lse", "delta: lse cotangent of the wrong sign"),
        ("mask missing in backward", 0, "causal", "backward's P has weight at keys that are hidden"),
        ("last query tile missing in dk, dv", 0, "square", "weights that dV should have"),
        ("lse of the other base in backward", 0, "square", "a factor in each row: the LSE that it subtracts"),
        ("scale argument ignored in backward", 0, "scale 0.3", "backward's P has other weights"),
        ("dO of another place", 2, "square", "dV is not made of dO's own rows"),
        ("dv scaled", 0, "square", "a factor in each row"),
        ("lse of shifted scores", 0, "square", "-1 times scale · q · mean of K has been added"),
        ("lse is the maximum", 0, "square", "-1 times log of the sum has been added"),
        ("one added to the sum", 0, "square", "and so is the LSE: the sum is wrong"),
        ("not divided by the sum", 0, "square", "the LSE is right"),
    ],
)
def test_which_step_is_wrong(fault: str, way: int, probe: str, words: str) -> None:
    corpus, subject = _corpus(probe), Mutant(fault, way=way, split_kv=0)
    found = stages.read(subject, corpus.benches, corpus.observe(subject))
    assert words in _said(found)


def test_a_right_kernel_has_no_readings() -> None:
    corpus = _corpus("square", "causal", "alibi")
    seen = corpus.observe(Mutant())
    assert moved.in_rows(corpus.benches, seen) == stages.read(Mutant(), corpus.benches, seen) == []
    assert bounds.diagonals(Mutant(), corpus.benches, seen) == []


def test_an_error_in_dp_is_not_taken_for_a_delta() -> None:
    corpus, subject = _corpus("square"), Mutant("dP of some channels", way=2)
    assert stages.read(subject, corpus.benches, corpus.observe(subject)) == []


def test_a_diagonal_from_other_lengths_is_read_and_its_padding_found() -> None:
    corpus = _corpus("causal", "causal, few queries", "causal, rows without keys")
    subject = Mutant("causal from other lengths", way=4, value=32_016.0)
    seen = corpus.observe(subject)
    assert "causal's diagonal lies elsewhere" in _said(bounds.diagonals(subject, corpus.benches, seen))
    found = [v for v in reading.numbers(subject, corpus.benches, seen) if v.fault == "causal from other lengths"]
    assert [(v.way, v.value) for v in found] == [(4, 32_016.0)]
    corpus.try_numbers(found)
    assert corpus.rank(seen)[0].fault == "causal from other lengths"


def test_values_of_another_offset_are_no_diagonal() -> None:
    corpus, subject = _corpus("varlen"), Mutant("key offsets from queries", way=12)
    assert bounds.diagonals(subject, corpus.benches, corpus.observe(subject)) == []


def test_rows_that_are_alike_are_not_taken_for_each_other() -> None:
    corpus, subject = _corpus("cache, 8 heads on 2"), Mutant("partial results in 16 bits")
    assert moved.in_rows(corpus.benches, corpus.observe(subject)) == []


def test_rows_that_share_a_causal_bound_are_counted() -> None:
    corpus, subject = _corpus("causal", "causal, few queries"), Mutant("causal by tile", way=4, value=6.0)
    found = [v for v in reading.numbers(subject, corpus.benches, corpus.observe(subject)) if v.way == 4]
    assert [(v.fault, v.value) for v in found] == [("causal by tile", 6.0)]


def test_rows_that_are_not_stored_in_between_are_found_by_their_period() -> None:
    corpus, subject = _corpus("square"), Mutant("tail rows unwritten", way=3, value=6_005.0)
    found = [v for v in reading.numbers(subject, corpus.benches, corpus.observe(subject)) if v.way == 3]
    assert [v.value for v in found] == [6_005.0]


@pytest.mark.parametrize("held", [0.0, 1.0, float("nan")])
def test_memory_that_nobody_wrote_may_hold_anything(held: float) -> None:
    class Unwritten(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            out, lse = super().__call__(inputs, **options)
            out = out.clone()
            out[:, :, inputs.case.seq_q // 32 * 32 :] = held
            return out, lse

    found = diagnose(Unwritten(), corpus=_corpus("square", "off the tile")).candidates[0]
    assert (found.fault, found.tile) == ("tail rows unwritten", 32)
    assert found.distance < 0.1


def test_when_is_told_by_two_features_where_one_does_not() -> None:
    window, causal, grouped = (Window(7, 5),), (Causal(),), {"heads_q": 4, "heads_kv": 2}
    failing = [Case("a", "", mask=window, **grouped)]
    passing = [Case("b", "", mask=window), Case("c", "", mask=causal, **grouped)]
    assert patterns.told_apart(failing, passing) == ["fails exactly with a window and with grouped heads"]


def test_a_fault_on_one_path_comes_with_the_condition() -> None:
    class In16Bits(Mutant):
        def reasons(self, inputs, differentiable=False):  # type: ignore[no-untyped-def]
            return ("gradients",) if differentiable else ()

        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            fault, self.fault = self.fault, self.fault if inputs.case.dtype != torch.float32 else ""
            try:
                return super().__call__(inputs, **options)
            finally:
                self.fault = fault

    corpus = _corpus("square", "off the tile", "fp16", "bf16", "8 heads on 2", "causal")
    found = diagnose(In16Bits("scale twice"), corpus=corpus)
    assert (found.candidates[0].fault, found.candidates[0].narrowed) == ("scale twice", True)
    assert found.conditions == ["fails exactly in 16 bits"]
    assert (
        "Of the calls in which it would show, this one fails exactly in 16 bits."
        in dict(explain(found))["most likely cause"]
    )


def test_a_fault_on_some_rows_comes_with_the_rows() -> None:
    class LaterRows(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            wrong, self.fault = super().__call__(inputs, **options)[0], ""
            right, lse = super().__call__(inputs, **options)
            self.fault = "V of another key"
            return torch.cat((right[:, :, :96].detach(), wrong[:, :, 96:].detach()), 2), lse

    found = diagnose(LaterRows("V of another key"), corpus=_corpus("square", "off the tile"))
    assert (found.candidates[0].fault, found.candidates[0].narrowed) == ("V of another key", True)
    lines = dict(explain(found))["most likely cause"]
    assert any(line.startswith("Within a call: out is wrong in rows 96-") for line in lines)


def test_a_reading_comes_first_only_where_nothing_is_near() -> None:
    near, far, family = (Candidate(name, at, 0, 1, 1, 0) for name, at in (("a", 0.2), ("b", 0.6), ("c", 0.7)))
    read = [Reading("", ("c", "d"))]
    assert _read_first([near, family], read) == [near, family]
    first, second = _read_first([far, family], read)
    assert (first.fault, first.distance, second) == ("c", 0.4, far)
    assert _read_first([far], [Reading("", ())]) == [far]
    assert _read_first([far], read)[0].fault == "c"


def test_numbers_that_are_made_of_two_are_put_in_words() -> None:
    words = [_number(fault, value) for fault, value in (("causal from other lengths", 64_016.0),
                                                        ("tail rows unwritten", 6_005.0), ("causal by tile", 4.0),
                                                        ("scale of another size", 0.88))]  # fmt: skip
    assert words == [
        "lengths rounded up fit: keys to a multiple of 64, queries of 16",
        "of every 6 rows those from 5 on",
        "4 rows share the bound of the last of them",
        "its number is 0.88",
    ]


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (
            Mutant("lse of shifted scores"),
            "The output is right, the LSE is wrong in every call: the LSE alone is wrong: -1 times",
        ),
        (
            Mutant("one added to the sum"),
            "The output is wrong, the LSE with it, in every call: rows of the output are right",
        ),
        (
            Mutant("KV head by remainder"),
            "The output is wrong, the LSE with it, exactly with grouped heads: head 1 reads",
        ),
        (
            Mutant("delta missing"),
            "The output is right, dQ and dK are wrong in every call: dQ is off as by another delta",
        ),
    ],
)
def test_a_sentence_says_which_when_and_what(subject: Mutant, words: str) -> None:
    corpus = _corpus("square", "8 heads on 2", "head_dim 40")
    found = diagnose(subject, corpus=corpus)
    assert found.sentence.startswith(words)
    assert found.sentence in dict(explain(found))["what is seen"]
    assert found.to_json()["sentence"] == found.sentence
