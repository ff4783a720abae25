import math

import pytest
import torch

from attnworks import ALiBi, Bias, Sink, Softcap, scores


def test_modifiers_keep_their_order_and_their_operands():
    slopes, bias, sink = torch.ones(2), torch.zeros(3, 4), torch.zeros(2)

    def double(s, b, h, q, k):
        return 2 * s

    spec, operands = scores.split((Bias(bias), Softcap(30), double, ALiBi(slopes), Sink(sink)))
    assert [term.kind for term in spec] == ["bias", "softcap", "function", "alibi", "sink"]
    assert operands == (bias, slopes, sink)
    assert [term.operand.index for term in spec if term.operand] == [0, 1, 2]
    assert scores.describe(spec) == "bias, softcap(30), function, alibi, sink"
    assert scores.describe(()) == "none"


def test_specs_are_hashable_and_hold_no_tensor():
    spec, _ = scores.split((Bias(torch.zeros(3, 4)), Softcap(1.0)))
    again, _ = scores.split([Bias(torch.ones(3, 4)), Softcap(1.0)])
    assert hash(spec) == hash(again)
    assert spec == again


def test_functions_that_say_the_same_are_equal_and_their_tensors_are_operands():
    bias, table = torch.zeros(3, 4), torch.zeros(5)
    spec, operands = scores.split((Bias(bias), lambda s, b, h, q, k: s + table[h], Softcap(2.0)))
    again, _ = scores.split((Bias(bias), lambda x, b, head, i, j: x + table[head], Softcap(2.0)))
    assert spec == again
    assert hash(spec) == hash(again)
    assert spec != scores.split((Bias(bias), lambda s, b, h, q, k: s - table[h], Softcap(2.0)))[0]
    assert spec[1].function is None
    assert operands[1] is spec[1].own(operands)[0] is table
    assert not spec[1].expression.operands_require_grad
    (term,), _ = scores.split((lambda s, b, h, q, k: s if len(s) else s + 1,))
    assert term.function is not None
    assert "needs a Python number for s" in term.why_not


@pytest.mark.parametrize("cap", [0, -1, math.inf, math.nan, "50", None])
def test_a_cap_is_finite_and_positive(cap):
    with pytest.raises(ValueError, match=r"Softcap cap: was .*, must be a finite number > 0"):
        Softcap(cap)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (Softcap(1.0), TypeError, r"scores: was Softcap"),
        (None, TypeError, r"scores: was None, must be a tuple"),
        (torch.zeros(2, 2), TypeError, r"scores: was tensor"),
        (iter([Softcap(1.0)]), TypeError, r"scores: was <list_iterator"),
        ((1.0,), TypeError, r"scores: held 1.0, must hold Softcap"),
        ((Softcap,), TypeError, r"scores: held <class"),
        ((Bias([1.0]),), TypeError, r"Bias tensor: was list, must be a floating-point tensor"),
        ((Bias(torch.zeros(2, dtype=torch.int32)),), TypeError, r"Bias tensor: was torch.int32"),
        ((ALiBi(0.5),), TypeError, r"ALiBi slopes: was float"),
        ((Sink(None),), TypeError, r"Sink logits: was NoneType"),
        ((Sink(torch.zeros(2)), Sink(torch.zeros(2))), ValueError, r"scores: held more than one Sink"),
    ],
)
def test_what_is_no_modifier_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        scores.split(wrong)
