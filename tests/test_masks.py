import pytest
import torch

from attnworks import Causal, Window, masks
from attnworks.masks import AllOf, Bounds, DenseMask, Predicate


def test_causal_is_a_window_without_left_limit():
    assert masks.split(Causal()) == ((Bounds(None, 0, "bottom-right"),), ())
    assert masks.split(Causal("top-left")) == ((Bounds(None, 0, "top-left"),), ())


def test_no_mask_and_an_unlimited_window_hide_nothing():
    assert masks.split(None) == ((), ())
    assert masks.split(Window()) == ((), ())
    assert masks.split(Window(2**40, 2**70)) == ((), ())


def test_bounds_of_one_alignment_are_intersected():
    spec, _ = masks.split(Causal() & Window(5, 7) & Window(9, None))
    assert spec == (Bounds(5, 0, "bottom-right"),)
    assert masks.closed_bounds(spec) == Bounds(5, 0, "bottom-right")


def test_bounds_of_two_alignments_stay_apart():
    spec, _ = masks.split(Causal() & Window(5, 7, "top-left"))
    assert set(spec) == {Bounds(None, 0, "bottom-right"), Bounds(5, 7, "top-left")}
    assert masks.closed_bounds(spec) is None


def test_tensors_become_operands_and_functions_predicates():
    tensor = torch.ones(3, 4, dtype=torch.bool)

    def even(b, h, q, k):
        return k % 2 == 0

    spec, operands = masks.split(AllOf((tensor, AllOf((even, Causal())))))
    assert operands == (tensor,)
    assert [type(term) for term in spec] == [Bounds, DenseMask, Predicate]
    assert masks.closed_bounds(spec) is None
    assert masks.describe(spec) == "causal & boolean tensor (3, 4) & predicate even"


def test_and_takes_a_mask_on_either_side():
    def even(b, h, q, k):
        return k % 2 == 0

    assert masks.split(Causal() & even) == masks.split(even & Causal())


def test_predicates_that_say_the_same_are_equal_and_hold_no_function():
    doc = torch.zeros(2, 9, dtype=torch.int32)

    def document(b, h, q, k):
        return doc[b, q] == doc[b, k]

    spec, operands = masks.split(Causal() & document)
    again, _ = masks.split(Causal() & (lambda b, h, i, j: doc[b, i] == doc[b, j]))
    assert spec == again
    assert hash(spec) == hash(again)
    assert operands == (doc,)
    assert spec[1].function is None
    assert masks.split(Causal() & (lambda b, h, q, k: doc[b, q] == doc[b, q]))[0] != spec


def test_a_predicates_operands_are_found_among_the_masks():
    tensor, first, second = torch.ones(9, 9, dtype=torch.bool), torch.zeros(2, 9), torch.ones(2, 9)
    spec, operands = masks.split(
        masks.AllOf((tensor, lambda b, h, q, k: first[b, q] == second[b, k], lambda b, h, q, k: second[b, q] > 0))
    )
    assert spec[0].operand.index == 0
    assert [len(term.own(operands)) for term in spec[1:]] == [2, 1]
    assert spec[1].own(operands)[0] is first
    assert spec[2].own(operands)[0] is second


def test_a_predicate_that_cannot_be_traced_is_its_function_and_says_why():
    def branching(b, h, q, k):
        return q >= k if len(k) else k < q

    (term,), operands = masks.split(branching)
    assert (term.function, term.expression, operands) == (branching, None, ())
    assert "needs a Python number for k" in term.why_not
    assert masks.split(branching) == masks.split(branching)
    assert masks.split(branching) != masks.split(lambda b, h, q, k: q >= k if len(k) else k < q)


def test_masks_are_described_in_words():
    for mask, words in (
        (None, "none"),
        (Causal(), "causal"),
        (Causal("top-left"), "causal top-left"),
        (Window(5, None), "window(5, None)"),
    ):
        assert masks.describe(masks.split(mask)[0]) == words


@pytest.mark.parametrize("wrong", [3, "causal", Causal, object(), torch.zeros(2, 2), [Causal()]])
def test_what_is_no_mask_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^mask: was .*must be"):
        masks.split(wrong)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Causal("bottom"), ValueError, r"Causal align: was 'bottom', must be one of"),
        (lambda: Causal(None), ValueError, r"Causal align: was None"),
        (lambda: Window(-1, 0), ValueError, r"Window left: was -1, must be None \(unlimited\) or >= 0"),
        (lambda: Window(0, -1), ValueError, r"Window right: was -1"),
        (lambda: Window(1.5), TypeError, r"Window left: was 1.5, must be None or an int"),
        (lambda: Window(True), TypeError, r"Window left: was True"),
        (lambda: Window(0, 0, "left"), ValueError, r"Window align: was 'left'"),
    ],
)
def test_wrong_parameters_name_themselves(make, error, message):
    with pytest.raises(error, match=message):
        make()
