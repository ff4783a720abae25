"""verify(): results, skips by verdict only, failures that do not end the run, the command."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnworks.workbench import catalogue, summary
from attnworks.workbench.cli.verify import verify as command
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.subjects import Outcome, backend_subjects
from attnworks.workbench.verify import verify


class Broken(Mutant):
    """Raises on some cases."""

    name = "broken"

    def __init__(self) -> None:
        super().__init__()
        self.name = "broken"

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        return ("no gradients",) if differentiable else ()

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        if inputs.case.seq_q == 7:
            raise RuntimeError("seven")
        return super().__call__(inputs, return_lse=return_lse, **options)


def test_an_exception_is_a_finding_and_a_refusal_is_listed() -> None:
    results = verify(subjects=[Broken()], cases=["size: 7", "size: 15"])
    by_case = {(r.case.name, r.check): r for r in results}
    assert by_case["size: 7", "forward"].status == "failed"
    assert "RuntimeError: seven" in by_case["size: 7", "forward"].message
    assert by_case["size: 15", "forward"].status == "passed"
    assert by_case["size: 15", "gradients"].status == "skipped"
    assert summary.skipped(results)["broken", "no gradients"] == 2
    assert by_case["size: 15", "fused"].layer == "fused"


def test_results_are_json() -> None:
    results = verify(subjects=[Mutant()], cases=["hand: full", "heads: 8/2"])
    data = json.loads(json.dumps([result.to_json() for result in results]))
    assert {entry["layer"] for entry in data} == {"hand", "oracle", "fused", "property"}
    assert all(entry["status"] == "passed" for entry in data)
    assert {m["tensor"] for m in data[1]["measures"] + data[2]["measures"]} >= {"out", "lse", "dq", "dk", "dv"}


def test_same_seed_same_results() -> None:
    def numbers(seed: int) -> list[float]:
        found = verify(subjects=[Mutant()], cases=["size: 33"], seed=seed)
        return [m.max_abs for r in found for m in r.measures]

    assert numbers(1) == numbers(1) != numbers(2)


def test_fresh_memory_is_poisoned_only_inside() -> None:
    class Careless(Mutant):
        def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
            out, lse = super().__call__(inputs, return_lse=return_lse, **options)
            fresh = torch.empty_like(out)
            fresh[..., 1:] = out[..., 1:]  # one channel is never written
            return fresh, lse

    before = torch.are_deterministic_algorithms_enabled()
    (result, *_) = verify(subjects=[Careless()], cases=["size: 16"])
    assert result.status == "failed" and "non-finite" in result.message
    assert torch.are_deterministic_algorithms_enabled() == before


def test_distribution_covers_every_grouping() -> None:
    results = verify(subjects=[Mutant()], cases=["stress: normal, *", "size: 7"])
    spreads = summary.distribution(results)
    assert {spread.by for spread in spreads} == set(summary.GROUPINGS)
    assert all(0 <= s.median <= s.p90 <= s.p99 <= s.largest < 1 for s in spreads)


def test_worst_gradients_name_their_inputs() -> None:
    results = verify(subjects=[Mutant()], cases=["stress: normal, *", "stress: large scores, *"])
    rows = summary.worst_gradients(results)
    pairs = [(r, m) for r, m in summary.measures(results) if m.tensor in ("dq", "dk", "dv")]
    assert {(row.dtype, row.tensor) for row in rows} == {(summary.dtype_of(r), m.tensor) for r, m in pairs}
    for row in rows:
        own = [(r, m) for r, m in pairs if (summary.dtype_of(r), m.tensor) == (row.dtype, row.tensor)]
        worst, _ = max(own, key=lambda pair: summary.tightest(pair[1]).share)
        assert len({r.case.generator for r, _ in own}) == 2 and row.inputs == worst.case.generator


def test_subjects_cover_every_backend_and_schedule() -> None:
    names = [subject.name for subject in backend_subjects()]
    assert {"cpu", "reference", "reference, q_outer", "reference, kv_outer"} <= set(names)
    with pytest.raises(ValueError, match="backend: was 'nonsense'"):
        verify(backend="nonsense")


@pytest.mark.parametrize("as_json", [False, True])
def test_command_passes(as_json: bool) -> None:
    arguments = ["--backend", "reference", "--case", "hand: *", *(["--json"] if as_json else [])]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    if as_json:
        data = json.loads(result.stdout)
        assert data["passed"] and len(data["results"]) >= 2 * len(catalogue.select(["hand: *"]))
    else:
        assert "all passed" in result.output


def test_command_fails_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnworks.workbench.verify.backend_subjects", lambda quick, device: (Mutant("scale missing"),))
    result = CliRunner().invoke(command, ["--case", "hand: full"])
    assert result.exit_code == 1
    assert "FAILED mutant: scale missing" in result.output


def test_command_lists() -> None:
    result = CliRunner().invoke(command, ["--list", "--case", "model: *", "--json"])
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert listed and all(entry["source"] for entry in listed)
