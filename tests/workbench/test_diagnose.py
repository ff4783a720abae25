"""diagnose(): the right fault is named, in kernels by other hands as well, and a right kernel is called right."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnworks.masks import Causal
from attnworks.workbench import catalogue
from attnworks.workbench.cli import main
from attnworks.workbench.diagnose import BY_CHECK, diagnose, symptoms
from attnworks.workbench.diagnose.answers import FAR
from attnworks.workbench.diagnose.causes import CAUSES
from attnworks.workbench.diagnose.explain import explain
from attnworks.workbench.diagnose.nearest import EXACT, Corpus, _conditional
from attnworks.workbench.diagnose.patterns import _about_weights, in_weights, on_which, tile_size, weights
from attnworks.workbench.diagnose.probes import Bench, Probe, probes
from attnworks.workbench.diagnose.reading import numbers
from attnworks.workbench.diagnose.script import standalone
from attnworks.workbench.diagnose.second_look import second_look
from attnworks.workbench.diagnose.shrink import shrink
from attnworks.workbench.diagnose.variants import SPLIT, TILED, WRITTEN
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.ways import NUMBERS, WAYS
from foreign_kernels import FOREIGN, Foreign, blocked, naive

DOCS = Path(__file__).parents[2] / "docs"
SHORT = ("square", "off the tile", "causal", "boolean mask", "8 heads on 2", "rising maximum")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def short() -> Corpus:
    """A few of the probes: what the faults below need."""
    return Corpus([probe for probe in probes() if probe.name in SHORT])


def _probe(name: str) -> Probe:
    return next(probe for probe in probes() if probe.name == name)


@pytest.mark.parametrize("fault", ["dq not scaled", "causal shows the next", "KV head by remainder", "lse in base 2"])
def test_a_mutant_is_named_first(short: Corpus, fault: str) -> None:
    found = diagnose(Mutant(fault, tile_kv=40, split_kv=0), corpus=short)
    assert found.candidates[0].fault == fault
    assert found.certainty == "sure"


@pytest.mark.parametrize(
    ("function", "fault", "tile"),
    [(blocked, "accumulator not rescaled", 50), (blocked, "sum not rescaled", 72), (naive, "scale twice", 0)],
)
def test_a_foreign_kernel_with_other_tiles_is_recognised(
    short: Corpus, function: object, fault: str, tile: int
) -> None:
    subject = Foreign(function, fault, **({"tile": tile} if tile else {}))  # type: ignore[arg-type]
    names = [candidate.fault for candidate in short.rank(short.observe(subject))[:2]]
    assert fault in names


def test_the_foreign_kernels_cover_forward_and_backward() -> None:
    assert {subject.function.__name__ for subject, _ in FOREIGN} == {"naive", "blocked", "split", "with_backward"}
    assert len(FOREIGN) > 80


def test_a_right_kernel_is_called_right(short: Corpus) -> None:
    observed = short.observe(Mutant())
    assert not any(seen.failed for seen in observed)
    assert short.rank(observed) == []


@pytest.mark.long
def test_the_tile_size_is_read_from_the_weights() -> None:
    subject = Foreign(blocked, "accumulator not rescaled", tile=56)
    corpus = Corpus([_probe("square"), _probe("rising maximum")])
    seen = corpus.observe(subject)
    assert tile_size(subject, corpus.benches, seen) == 56
    assert any("tiles of 56 keys" in pattern for pattern in in_weights(subject, corpus.benches, seen))
    corpus.try_size(56)
    nearest = corpus.rank(seen)[0]
    assert (nearest.fault, nearest.tile) == ("accumulator not rescaled", 56)
    assert 57 <= shrink(subject, _probe("square")).case.seq_kv < 80


@pytest.mark.parametrize("keys", [0, 1])
def test_weights_of_hardly_any_keys_say_nothing(keys: int) -> None:
    got, want = torch.full((1, 2, 3, keys), 0.5), torch.ones(1, 2, 3, keys)
    assert all("factor" not in said for said in _about_weights(got, want))


def test_patterns_say_what_is_special(short: Corpus) -> None:
    grouped = diagnose(Mutant("KV head by remainder"), corpus=short)
    assert "fails exactly with grouped heads" in grouped.patterns
    unscaled = diagnose(Mutant("dq not scaled"), corpus=short)
    assert any("dq is 8 times the right one, 1/scale" in pattern for pattern in unscaled.patterns)
    assert any(pattern.startswith("the output is right; wrong: dq") for pattern in unscaled.patterns)
    shows = diagnose(Mutant("causal shows the next"), corpus=short)
    assert any("hidden keys get weight: 1 in each row that has any" in pattern for pattern in shows.patterns)


def test_weights_are_read_out_by_identity_values() -> None:
    got, want = weights(Mutant(), _probe("off the tile").case)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


class _Packed(Mutant):
    """Takes packed sequences and caches only."""

    def reasons(self, inputs, differentiable=False):  # type: ignore[no-untyped-def]
        return () if inputs.case.form != "dense" and not differentiable else ("no",)


@pytest.fixture(scope="module")
def packed() -> Corpus:
    return Corpus([probe for probe in probes() if probe.name in ("varlen, grouped", "varlen, full", "pages of 16")])


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "way"),
    [("key offsets from queries", 2), ("sequences not apart", 2), ("stale page", 3), ("causal from other lengths", 2)],
)
def test_a_fault_is_known_in_whatever_way_it_is_made(packed: Corpus, fault: str, way: int) -> None:
    found = packed.rank(packed.observe(_Packed(fault, way=way)))
    assert (found[0].fault, round(found[0].distance, 2)) == (fault, 0)


@pytest.fixture(scope="module")
def by_sequence() -> Corpus:
    return Corpus([_probe("bias"), _probe("boolean mask"), Probe(catalogue.BY_NAME["alibi, not causal"])])


@pytest.mark.parametrize(
    ("fault", "way"), [("bias of sequence 0", 3), ("mask of head 0", 4), ("alibi of the wrong head", 1)]
)
def test_what_another_sequence_has_is_known(by_sequence: Corpus, fault: str, way: int) -> None:
    found = by_sequence.rank(by_sequence.observe(Mutant(fault, way=way)))
    assert (found[0].fault, round(found[0].distance, 2)) == (fault, 0)


class _OnOnePath(_Packed):
    """Has its fault in causal calls only."""

    def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
        fault, self.fault = self.fault, self.fault if inputs.masks == [Causal()] else ""
        try:
            return super().__call__(inputs, **options)
        finally:
            self.fault = fault


@pytest.mark.long
def test_a_fault_on_one_path_of_several_is_named_with_reserve(packed: Corpus) -> None:
    found = diagnose(_OnOnePath("scale twice"), corpus=packed)
    assert (found.candidates[0].fault, found.candidates[0].narrowed) == ("scale twice", True)
    assert found.certainty == "likely" and found.patterns[0] == "fails exactly with a causal mask"
    assert any("only the failing calls, rows or heads take" in line for _, lines in explain(found) for line in lines)


class _OfThreeHeads(_Packed):
    """Has its fault in caches with groups of 3 heads only."""

    def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
        fault, self.fault = self.fault, self.fault if inputs.case.heads_q == 3 * inputs.case.heads_kv else ""
        try:
            return super().__call__(inputs, **options)
        finally:
            self.fault = fault


def test_what_no_probe_shows_is_looked_for_a_second_time() -> None:
    found = diagnose(_OfThreeHeads("heads left out", way=4), corpus=Corpus([_probe("pages of 16")]))
    assert found.failing and all("6 heads" in name for name in found.failing)
    assert found.candidates[0].fault == "heads left out"
    assert second_look(Mutant(), 0) == []


@pytest.mark.long
def test_sizes_are_tried_where_no_probe_for_sizes_fails() -> None:
    corpus = Corpus([_probe("alibi"), _probe("alibi, not causal"), _probe("causal")])
    found = corpus.rank(corpus.observe(Mutant("numbered within their tile", tile_kv=24, way=2)))
    assert (found[0].fault, found[0].tile, round(found[0].distance, 2)) == ("numbered within their tile", 24, 0)


def test_what_comes_near_everywhere_yields_to_the_very_numbers_in_some_calls() -> None:
    same, near, far = _conditional(torch.tensor([0.0, 0.1, 1.0]), 0.3).tolist()
    assert same == pytest.approx(EXACT) and 0.3 < near < 0.4 and far == pytest.approx(1.0)


class _InPart(Mutant):
    """Has its fault in the last head's rows from 20 on alone."""

    def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
        wrong = super().__call__(inputs, **options)
        fault, self.fault = self.fault, ""
        right = super().__call__(inputs, **options)
        self.fault = fault
        results = [one.detach().clone() for one in right]
        for result, other in zip(results, wrong, strict=True):
            result[:, -1, 20:] = other.detach()[:, -1, 20:]
        return results[0], results[1]


@pytest.mark.parametrize("fault", ["scale twice", "V of another key", "boolean mask ignored"])
def test_a_fault_on_some_elements_is_named_with_reserve(short: Corpus, fault: str) -> None:
    found = short.rank(short.observe(_InPart(fault)))[0]
    assert (found.fault, found.narrowed) == (fault, True)
    assert found.distance < FAR


@pytest.mark.parametrize(
    ("fault", "way", "value", "probe"),
    [
        ("scale of another size", 0, 0.9, "square"),
        ("causal further by a number", 0, -3.0, "causal"),
        ("window of another size", 3, 2.0, "window"),
        ("window of another size", 4, -2.0, "window"),
        ("alibi scaled", 5, 0.5, "alibi"),
        ("bias scaled", 5, 0.3, "bias"),
        ("a gradient of another size", 1, 0.5, "square"),
        ("output of another size", 0, 1.1, "square"),
        ("lse scaled", 2, 1.1, "square"),
    ],
)
def test_a_fault_s_number_is_read_from_the_answers(fault: str, way: int, value: float, probe: str) -> None:
    corpus = Corpus([_probe(probe)])
    subject = Mutant(fault, way=way, value=value, tile_kv=40, split_kv=0)
    seen = corpus.observe(subject)
    found = [v for v in numbers(subject, corpus.benches, seen) if v.fault == fault]
    assert [v.value for v in found] == [pytest.approx(value, rel=1e-3)]
    corpus.try_numbers(found)
    assert corpus.rank(seen)[0].fault == fault


def test_a_right_kernel_shows_no_numbers(short: Corpus) -> None:
    assert numbers(Mutant(), short.benches, short.observe(Mutant())) == []


def test_a_number_that_makes_a_named_fault_is_not_listed_beside_it() -> None:
    corpus = Corpus([_probe("square")])
    found = diagnose(Mutant("dq not scaled"), corpus=corpus)
    assert found.certainty == "sure"
    assert [one.fault for one in found.candidates if one.number is not None] == []


def test_rows_that_belong_to_nobody_are_seen() -> None:
    corpus = Corpus([_probe("varlen")])
    found = diagnose(Mutant("rows past the end unwritten"), corpus=corpus)
    assert (found.candidates[0].fault, found.certainty) == ("rows past the end unwritten", "sure")
    assert "packed rows that belong to no sequence are not 0" in found.patterns


@pytest.mark.long
def test_what_only_checks_of_verify_see_is_not_called_right() -> None:
    found = diagnose(Mutant("batch changes the tiles"), corpus=Corpus([_probe("square")]))
    assert not found.right and not found.failing
    assert (found.candidates[0].fault, found.certainty) == ("batch changes the tiles", "likely")
    assert any(line.startswith("verify: ") for _, lines in explain(found) for line in lines)


def test_a_result_that_is_wrong_once_changes_from_call_to_call() -> None:
    class Once(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            out, lse = super().__call__(inputs, **options)
            return out * (1 + (self._calls == 1)), lse

    corpus = Corpus([_probe("falling maximum"), _probe("large scores"), _probe("softcap, causal")])
    assert diagnose(Once(), corpus=corpus).candidates[0].fault == "changes from call to call"


def test_patterns_name_the_head_dim() -> None:
    class Narrow(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            inputs.q = inputs.q.clone()
            inputs.q[..., 128:] = 0
            return super().__call__(inputs, **options)

    corpus = Corpus(
        [_probe("square"), _probe("causal"), _probe("8 heads on 2"), Probe(catalogue.BY_NAME["head dim: 160"])]
    )
    assert on_which(corpus.benches, corpus.observe(Narrow())) == ["fails exactly with a head_dim above 128"]


def test_a_second_fault_is_suspected(short: Corpus) -> None:
    class Two(Mutant):
        def has(self, fault: str) -> bool:
            return fault in ("scale missing", "causal shows the next")

    found = diagnose(Two(), corpus=short)
    assert found.candidates[0].fault == "scale missing" and found.candidates[0].second_fault
    assert found.certainty == "likely"
    assert any("second fault is likely" in line for _, lines in explain(found) for line in lines)
    assert not diagnose(Mutant("scale missing", tile_kv=40, split_kv=0), corpus=short).candidates[0].second_fault


def test_something_unknown_is_not_named(short: Corpus) -> None:
    class Nonsense(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            out, lse = super().__call__(inputs, **options)
            return torch.cos(37 * out), lse

    found = diagnose(Nonsense(), corpus=short)
    assert not found.right
    assert found.certainty == ""
    assert any("None of the known faults" in line for _, lines in explain(found) for line in lines)


@pytest.mark.parametrize(
    "fault", ["causal ignored", "softcap ignored", "dk, dv of one query head", "empty rows give NaN"]
)
def test_the_script_fails_and_passes_without_the_fault(fault: str, tmp_path: Path) -> None:
    names = {"softcap ignored": "softcap", "causal ignored": "causal", "empty rows give NaN": "boolean mask"}
    smallest = shrink(Mutant(fault), _probe(names.get(fault, "8 heads on 2")))
    assert Bench(smallest).observe(Mutant(fault)).failed
    assert smallest.case.seq_q <= 4 and smallest.case.head_dim <= 4
    for kernel, status in ((fault, 1), ("", 0)):
        script = tmp_path / f"repro{status}.py"
        script.write_text(standalone(Mutant(kernel), smallest.case), encoding="utf-8")
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(script))
        assert done.value.code == status


def test_the_script_of_a_kernel_needs_torch_alone(tmp_path: Path) -> None:
    script = standalone(Mutant("scale twice"), _probe("rising maximum").case, "kernel.py:attention")
    assert "runpy.run_path('kernel.py')['attention']" in script
    assert "attnworks." not in script.replace("attnworks diagnose", "")


def test_a_script_needs_a_dense_case() -> None:
    with pytest.raises(ValueError, match="case: was of form decode, must be dense"):
        standalone(Mutant(), _probe("cache").case)


def test_an_infinity_of_the_wrong_sign_is_wrong() -> None:
    class Above(Mutant):
        def __call__(self, inputs, **options):  # type: ignore[no-untyped-def]
            out, lse = super().__call__(inputs, **options)
            return out, lse.abs()

    bench = Bench(_probe("causal, rows without keys"))
    assert bench.observe(Above()).answers["lse"].wrong.any()


def test_every_fault_has_a_cause_and_the_sizes_name_faults() -> None:
    assert list(CAUSES.keys() - FAULTS.keys()) == list(FAULTS.keys() - CAUSES.keys()) == []
    assert {*TILED, *SPLIT, *WRITTEN, *WAYS, *NUMBERS, *BY_CHECK.values()} <= set(FAULTS)


def test_the_page_of_symptoms_is_up_to_date() -> None:
    assert (DOCS / "symptoms.md").read_text(encoding="utf-8") == symptoms.page()


def test_the_command_lists_mutants_and_wants_one_kernel() -> None:
    listed = CliRunner().invoke(main, ["diagnose", "--mutant", "list"])
    assert listed.output.splitlines() == list(FAULTS)
    for wrong in ([], ["a.b:c", "--mutant", "scale twice"]):
        refused = CliRunner().invoke(main, ["diagnose", *wrong])
        assert refused.exit_code == 2
        assert "name either a kernel" in refused.output
