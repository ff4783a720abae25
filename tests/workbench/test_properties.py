"""Each property holds for a right kernel and catches the fault it is there for, which nothing else would see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnworks.workbench import exact, memory, properties
from attnworks.workbench.cases import Case
from attnworks.workbench.catalogue import BY_NAME
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.properties import PROPERTIES
from attnworks.workbench.subjects import Abilities, Outcome
from attnworks.workbench.verify import Answers, verify_case, verify_properties

BY_PROPERTY = {p.name: p for p in PROPERTIES}
CASES = [BY_NAME[name] for name in properties.CASES]
EPSILON = 2.0**-23


class Faulty(Mutant):
    """Right but for what ``change(inputs, out, lse, calls)`` does to its results."""

    abilities = Abilities()

    def __init__(self, change: Callable[[Inputs, torch.Tensor, Any, int], Outcome]) -> None:
        super().__init__()
        self.name, self._change, self._count = "faulty", change, 0

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        out, lse = super().__call__(inputs, return_lse=return_lse, **options)
        self._count += 1
        return self._change(inputs, out, lse, self._count)


def scaled_if(condition: bool, out: torch.Tensor) -> torch.Tensor:
    """One unit in the last place more, far inside every budget."""
    return out * (1 + torch.finfo(out.dtype).eps) if condition else out


def changes(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    return scaled_if(calls % 2 == 0, out), lse


def outside(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    guard = inputs.k.as_strided((1,), (1,), 0)  # in front of K
    return scaled_if(bool(guard.isnan().any()), out), lse


def sees_the_future(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    last = inputs.v.detach()[..., -1, :]
    return scaled_if(float(last.sum()) > 0, out), lse


def threads(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    return scaled_if(torch.get_num_threads() == 1, out), lse


def batch(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    return scaled_if(len(inputs.case.sequences) > 1, out), lse


def pages(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    """The bits of every sequence depend on where the page of the first one is."""
    assert inputs.page_table is not None
    return scaled_if(len(inputs.case.sequences) > 1 and int(inputs.page_table[0, 0]) % 2 == 0, out), lse


def floor(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    return out + 1e-9, lse


def last_key_wins(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    """Wrong where the first query likes the last key best."""
    scores = inputs.gather(inputs.q)[0][0, 0].double() @ inputs.gather(inputs.k, keys=True)[0][0].double().T
    return (out * 1.01 if int(scores.argmax()) == scores.numel() - 1 else out), lse


def overflows(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    return (out if lse is None or float(lse.detach().max()) < 80 else out * torch.nan), lse


def lse_of_first_half(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    """Wrong for few keys."""
    return out, lse if lse is None or inputs.k.shape[-2] > 60 else lse + 0.01


def unsteady_gradient(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    if out.requires_grad:
        out.register_hook(lambda grad: scaled_if(calls % 2 == 0, grad))
    return out, lse


def gradient_of_outside(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    guard = inputs.k.detach().as_strided((1,), (1,), 0)
    if out.requires_grad:
        out.register_hook(lambda grad: scaled_if(bool(guard.isnan().any()), grad))
    return out, lse


def writes_into_k(inputs: Inputs, out: torch.Tensor, lse: Any, calls: int) -> Outcome:
    inputs.k.data[..., :1].add_(1e-3)
    return out, lse


class Fused(Mutant):
    """torch's, whose memory grows with the length; or with scores written beside it."""

    linear_memory = True

    def __init__(self, writes_scores: bool = False) -> None:
        super().__init__()
        self._writes_scores = writes_scores

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        if return_lse:
            return super().__call__(inputs, return_lse=return_lse, **options)
        out = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
        return out + (0 * (inputs.q @ inputs.k.mT)[..., :1] if self._writes_scores else 0), None


FAULTS = {
    "repeatable": (changes, "heads: 8/2"),
    "ignores what is outside": (outside, "strides: gapped, bshd"),
    "changes no input": (writes_into_k, "heads: 8/2"),
    "causal": (sees_the_future, "heads: 6/2 causal, fp32"),
    "ignores threads": (threads, "heads: 8/2"),
    "batch invariant": (batch, "strides: gapped, bshd"),
    "scales with V": (floor, "heads: 8/2"),
    "permutation of keys": (last_key_wins, "heads: 8/2"),
    "shift invariance": (overflows, "heads: 8/2"),
    "merges": (lse_of_first_half, "heads: 8/2"),
    "gradients repeatable": (unsteady_gradient, "heads: 8/2"),
    "gradients ignore what is outside": (gradient_of_outside, "strides: gapped, bshd"),
}


def test_every_property_has_a_fault_and_a_case() -> None:
    assert {*FAULTS, "memory growth"} == set(BY_PROPERTY)
    for prop in PROPERTIES:
        assert any(prop.applies(case) for case in CASES), prop.name
    quick = {case.form for case in CASES}
    assert quick == {"dense", "varlen", "decode"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_catches_what_values_do_not_show(name: str) -> None:
    change, case_name = FAULTS[name]
    case = BY_NAME[case_name]
    assert BY_PROPERTY[name].applies(case)
    values = verify_case(Faulty(change), Answers(case))
    assert [result.message for result in values if result.status == "failed"] == []
    assert BY_PROPERTY[name].holds(Faulty(change), case) != ""
    assert BY_PROPERTY[name].holds(Mutant(), case) == ""


@pytest.mark.skipif(not memory.measurable(), reason="no high-water mark here")
def test_memory_that_grows_with_the_square_is_seen() -> None:
    case = BY_NAME[properties.MEMORY_CASE]
    assert properties.memory_growth(Fused(), case) == ""
    assert "grows with the square" in properties.memory_growth(Fused(writes_scores=True), case)
    (result,) = (r for r in verify_properties(Mutant(), case) if r.check == "memory growth")
    assert (result.status, result.message) == ("skipped", "memory linear in the length is not declared")


def test_batch_invariance_is_also_that_of_pages() -> None:
    assert "pages" in exact.batch_invariant(Faulty(pages), BY_NAME["decode, pages of 16, bf16"])


SHORT = [case for case in CASES if case.seq_kv < 2000]  # the mutants' kernel is slow


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_a_right_kernel_has_them_all(case: Case) -> None:
    results = verify_properties(Mutant(), case)
    assert results and [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []


def test_causality_holds_in_every_form() -> None:
    forms = {case.form for case in CASES if BY_PROPERTY["causal"].applies(case)}
    assert forms == {"dense", "varlen", "decode"}


@pytest.mark.parametrize("name", ["varlen unequal, causal, fp32", "decode, 4 queries, causal, pages of 17"])
@pytest.mark.parametrize("fault", ["causal shows the next", "causal ignored"])
def test_a_causal_fault_is_seen_in_packed_sequences_and_pages(name: str, fault: str) -> None:
    assert "changed" in exact.causal(Mutant(fault), BY_NAME[name])


def test_without_an_lse_the_output_is_judged_alone() -> None:
    silent = Faulty(lambda inputs, out, lse, calls: (out, None))
    silent.abilities = Abilities(lse=False)
    for case in (BY_NAME["heads: 8/2"], BY_NAME["varlen ragged"], BY_NAME["decode, pages of 16, bf16"]):
        results = verify_properties(silent, case)
        assert results and [f"{r.check}: {r.message}" for r in results if r.status == "failed"] == []
    skipped = {r.check for r in verify_properties(silent, BY_NAME["heads: 8/2"]) if r.status == "skipped"}
    assert skipped == {"merges"}
    assert exact.repeatable(Faulty(lambda inputs, out, lse, n: (changes(inputs, out, lse, n)[0], None)), case)


def test_what_is_not_claimed_is_not_asked() -> None:
    class Modest(Mutant):
        batch_invariant = False

    case = BY_NAME["strides: gapped, bshd"]
    results = {r.check: r for r in verify_properties(Modest("batch changes the tiles"), case)}
    assert results["batch invariant"].status == "skipped"
    assert results["batch invariant"].message == "batch invariance is not declared"
    claimed = {r.check: r for r in verify_properties(Mutant("batch changes the tiles"), case)}
    assert claimed["batch invariant"].status == "failed"
