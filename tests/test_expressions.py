"""Expressions: what is traced and refused, equality, evaluation, derivatives, when a function is traced anew."""

import copy
import functools
import gc
import pickle
import re
import types
import weakref

import pytest
import torch

import expression_cases as cases
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.evaluation import evaluate
from attnworks.expressions.source import to_source
from attnworks.expressions.tracing import MASK_INPUTS, SCORE_INPUTS, trace


def mask_of(function):
    traced = trace(function, MASK_INPUTS)
    assert traced.expression is not None, traced.why_not
    return traced


def score_of(function):
    traced = trace(function, SCORE_INPUTS)
    assert traced.expression is not None, traced.why_not
    return traced


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.MASKS)
def test_a_mask_evaluates_to_what_its_function_gives(name):
    traced = mask_of(cases.MASKS[name])
    found = evaluate(traced.expression, cases.indices(), traced.operands)
    assert found.dtype == torch.bool
    assert torch.equal(found.expand(cases.B, cases.H, cases.N, cases.M), cases.visible(cases.MASKS[name]))
    assert 0 < found.float().mean() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", cases.SCORES)
def test_a_score_evaluates_to_what_its_function_gives(name, dtype):
    function, at, s = cases.widened(cases.SCORES[name]), cases.indices(), cases.scores(dtype)
    traced = score_of(cases.SCORES[name])
    found = evaluate(traced.expression, at | {"s": s}, traced.operands)
    assert found.dtype == dtype
    torch.testing.assert_close(found, function(s, *at.values()).to(dtype))


@pytest.mark.parametrize("name", cases.SCORES)
def test_a_derivative_is_autograds(name):
    function, at = cases.widened(cases.SCORES[name]), cases.indices()
    s = cases.scores(torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(function(s, *at.values()).nan_to_num(neginf=0).sum(), s)
    traced = score_of(cases.SCORES[name])
    slope = derivative(traced.expression)
    found = evaluate(slope, at | {"s": s.detach()}, traced.operands)
    torch.testing.assert_close(found.to(torch.float64).expand_as(s), expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^wrt: was 'q', must be 's'"):
        derivative(traced.expression, "q")


def test_derivatives_are_simple():
    def slope(function):
        return str(derivative(score_of(function).expression))

    assert slope(lambda s, b, h, q, k: s + q) == "1.0"
    assert slope(lambda s, b, h, q, k: s * 1.0 * q) == "float(q)"
    assert slope(lambda s, b, h, q, k: torch.where(q > k, s, 0.0)) == "where((q > k), 1.0, 0.0)"
    assert slope(lambda s, b, h, q, k: torch.exp(s)) == "exp(s)"
    assert slope(lambda s, b, h, q, k: torch.tanh(s)) == "1.0 - (tanh(s) * tanh(s))"
    assert slope(lambda s, b, h, q, k: q * 1.0) == "0.0"


def test_kinks_have_torchs_derivatives():
    for function in (
        lambda s, b, h, q, k: torch.maximum(s, 2 * s),
        lambda s, b, h, q, k: s.clamp(0, 0.5),
        lambda s, b, h, q, k: torch.relu(s),
        lambda s, b, h, q, k: s.abs(),
    ):
        s = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
        (expected,) = torch.autograd.grad(function(s, 0, 0, 0, 0).sum(), s)
        found = evaluate(derivative(score_of(function).expression), {"s": s.detach()}, ())
        assert torch.equal(found.double(), expected)


def test_captured_tensors_get_gradients_and_say_so():
    table = torch.randn(cases.H, cases.N, dtype=torch.float64, requires_grad=True)
    traced = score_of(lambda s, b, h, q, k: s * table[h, q])
    assert traced.expression.operands_require_grad
    assert not score_of(cases.alibi).expression.operands_require_grad
    s = cases.scores(torch.float64)
    evaluate(traced.expression, cases.indices() | {"s": s}, traced.operands).sum().backward()
    torch.testing.assert_close(table.grad, s.sum((0, 3)))


def test_operands_are_those_of_the_call_not_of_the_trace():
    traced = mask_of(lambda b, h, q, k: cases.FLAGS[k])
    found = evaluate(traced.expression, cases.indices(), (~cases.FLAGS,))
    assert torch.equal(found.flatten(), ~cases.FLAGS)


def test_an_index_outside_its_tensor_is_an_error():
    traced = mask_of(lambda b, h, q, k: cases.FLAGS[k + 1])
    with pytest.raises(IndexError):
        evaluate(traced.expression, cases.indices(), traced.operands)


# ---- equality --------------------------------------------------------------------------------------------------------


def test_functions_that_say_the_same_are_one_expression():
    window = 4
    first = mask_of(lambda b, h, q, k: (q >= k) & (q - k < window))
    second = mask_of(lambda batch, head, i, j: (i >= j) & (i - j < 4))
    assert first.expression is second.expression
    assert hash(first.expression) == hash(second.expression)


@pytest.mark.parametrize(
    "other",
    [
        lambda b, h, q, k: (q > k) & (q - k < 4),
        lambda b, h, q, k: (q >= k) & (q - k < 5),
        lambda b, h, q, k: (q >= k) & (q - k < 4.0),
        lambda b, h, q, k: (q >= k) | (q - k < 4),
        lambda b, h, q, k: (k >= q) & (q - k < 4),
    ],
)
def test_functions_that_say_something_else_are_another(other):
    assert mask_of(other).expression is not mask_of(lambda b, h, q, k: (q >= k) & (q - k < 4)).expression


def test_shape_strides_and_dtype_of_a_captured_tensor_are_part_of_it_but_not_its_values():
    def doc(tensor):
        return mask_of(lambda b, h, q, k: tensor[b, q] == tensor[b, k]).expression

    base = torch.zeros(2, 8, dtype=torch.int32)
    assert doc(base) is doc(base + 1)
    for other in (base.long(), torch.zeros(2, 9, dtype=torch.int32), torch.zeros(8, 2, dtype=torch.int32).T):
        assert doc(base) is not doc(other)


def test_shared_subexpressions_are_one_node_and_one_operand():
    traced = score_of(cases.shared)
    assert sum(node.op == "tanh" for node in traced.expression.nodes) == 1
    assert len(mask_of(cases.document).operands) == 1
    assert (
        sum(node.op == "load" for node in mask_of(lambda b, h, q, k: cases.FLAGS[k] | cases.FLAGS[k]).expression.nodes)
        == 1
    )


def test_unused_operations_leave_no_trace():
    def function(b, h, q, k):
        torch.exp(q * 7)
        return q >= k

    assert mask_of(function).expression is mask_of(cases.causal).expression


def test_expressions_survive_pickling_and_copying():
    expression = mask_of(cases.document).expression
    assert pickle.loads(pickle.dumps(expression)) is expression
    assert copy.deepcopy(expression) is expression
    assert str(expression) == "(q >= k) & (tensor0[b, q] == tensor0[b, k])"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda b, h, q, k: q >= k and k > 3, r"branches on q >= k .*torch.where, &, \| or ~"),
        (lambda b, h, q, k: q >= k if h == 0 else q < k, r"branches on h == 0"),
        (lambda b, h, q, k: 0 <= k < 5, r"branches on k >= 0"),
        (lambda b, h, q, k: not q >= k, r"branches on q >= k"),
        (lambda b, h, q, k: max(q, k) > 3, r"branches on k > q"),
        (lambda b, h, q, k: [True, False][h], r"needs a Python number for h"),
        (lambda b, h, q, k: float(q) > 3, r"needs a Python number for q"),
        (lambda b, h, q, k: q in (1, 2), r"branches on q == 1"),
        (lambda b, h, q, k: q - k, r"returns int, must return bool"),
        (lambda b, h, q, k: True, r"returns bool, not something made from its arguments"),
        (lambda b, h, q, k: None, r"returns NoneType"),
        (lambda b, h, q: q > 0, r"TypeError: .*takes 3 positional arguments but 4 were given"),
        (lambda b, h, q, k: torch.fmod(q, k) > 1, r"uses fmod"),
        (lambda b, h, q, k: q.sum() > 1, r"uses sum"),
        (lambda b, h, q, k: q @ k > 1, r"uses matmul"),
        (lambda b, h, q, k: q << 2 > k, r"uses lshift"),
        (lambda b, h, q, k: (q / 2) // 2 > k, r"uses // on a float: write torch.floor"),
        (lambda b, h, q, k: (q / 2) & 1, r"uses & on a float"),
        (lambda b, h, q, k: q**0.3 > k, r"uses \*\* 0.3: exponents are integers or 0.5"),
        (lambda b, h, q, k: q**k > k, r"uses \*\* k: exponents are constants"),
        (lambda b, h, q, k: q.half() > k, r"uses half"),
        (lambda b, h, q, k: q.to(torch.float16) > k, r"converts to torch.float16"),
        (lambda b, h, q, k: torch.where(q, k, 0) > 1, r"torch.where with a condition that is no bool"),
        (lambda b, h, q, k: torch.div(q, k, rounding_mode="floor") > 1, r"uses div with rounding_mode"),
        (lambda b, h, q, k: cases.DOC[b] == 1, r"uses eq with Row|returns bool"),
        (lambda b, h, q, k: torch.eq(cases.DOC[b], q), r"uses eq on a row of a captured tensor"),
        (lambda b, h, q, k: cases.DOC[b, q, k] == 1, r"of shape \(2, 18\) by 3 indices"),
        (lambda b, h, q, k: cases.DOC[b, :] == q, r"by slice.*must be an int inside it"),
        (lambda b, h, q, k: cases.DOC[b, 18] == q, r"a dimension of 18 of a captured tensor by 18"),
        (lambda b, h, q, k: cases.DOC[b, q > k] == q, r"by a bool"),
        (lambda b, h, q, k: cases.DOC[b, q / 2] == q, r"by a float"),
        (lambda b, h, q, k: cases.DOC.max() > q, r"computes max of a captured tensor: compute it outside"),
        (lambda b, h, q, k: int(cases.CAP) > q, r"computes int of a captured tensor"),
        (lambda b, h, q, k: cases.CAP.item() > q, r"computes item of a captured tensor"),
        (lambda b, h, q, k: cases.CAP + q > torch.rand(()), r"makes a tensor by rand"),
        (lambda b, h, q, k: torch.arange(18)[q] > k, r"makes a tensor by arange"),
        (lambda b, h, q, k: torch.zeros(0)[q] > k, r"makes a tensor by zeros"),
        (lambda b, h, q, k: q < 1 / 0, r"ZeroDivisionError: division by zero"),
        (lambda b, h, q, k: torch.vmap(lambda x: x > 3)(q), r"\w"),
    ],
)
def test_what_cannot_be_traced_says_why(function, why):
    traced = trace(function, MASK_INPUTS)
    assert traced.expression is None
    assert traced.operands == ()
    assert re.search(why, traced.why_not), traced.why_not


def test_odd_tensors_are_refused():
    for tensor, why in (
        (torch.zeros(18, dtype=torch.complex64), "captures a tensor of torch.complex64"),
        (torch.zeros(18).to_sparse(), "captures a tensor of layout"),
        (torch.zeros(0), "indexes a dimension of 0"),
        (torch._neg_view(torch.ones(18)), "captures a tensor that torch negates lazily"),
    ):
        assert why in trace(lambda b, h, q, k, t=tensor: t[k] == 1, MASK_INPUTS).why_not


def test_changing_a_score_in_place_is_refused():
    def scaled(s, b, h, q, k):
        s.mul_(2)
        return s

    assert trace(scaled, SCORE_INPUTS).why_not == "changes s in place by mul_"
    assert "changes s in place by relu_" in trace(lambda s, b, h, q, k: torch.relu_(s), SCORE_INPUTS).why_not
    assert trace(lambda s, b, h, q, k: torch.add(s, s, out=s), SCORE_INPUTS).expression is None


def test_a_score_returns_a_float():
    assert "returns bool, must return float" in trace(lambda s, b, h, q, k: s > 0, SCORE_INPUTS).why_not


# ---- tracing once ----------------------------------------------------------------------------------------------------


def test_a_function_is_called_once():
    memory = torch.zeros(())  # a list would be seen to change, and have the function traced at every call

    def mask(b, h, q, k):
        with torch._C.DisableTorchFunction():
            memory.add_(1)
        return q >= k

    first = mask_of(mask)
    assert mask_of(mask) is first
    assert memory == 1
    memory = torch.zeros(())
    assert mask_of(mask) is not first


def test_a_changed_closure_is_traced_anew():
    window = 3

    def mask(b, h, q, k):
        return q - k < window

    first = mask_of(mask).expression
    window = 5
    assert mask_of(mask).expression is mask_of(lambda b, h, q, k: q - k < 5).expression
    assert mask_of(mask).expression is not first


def test_a_changed_helper_default_code_or_global_is_traced_anew():
    space = {"LIMIT": 3}
    exec(
        "def helper(x, far=2):\n    return x < LIMIT + far\n"
        "def mask(b, h, q, k, *, more=0):\n    return (lambda x: helper(x + more))(q - k)\n",
        space,
    )
    mask, seen = space["mask"], []

    def look():
        seen.append(mask_of(mask).expression)
        assert mask_of(mask).expression is seen[-1]

    look()
    space["LIMIT"] = 4
    look()
    space["helper"].__defaults__ = (9,)
    look()
    mask.__kwdefaults__["more"] = 7
    look()
    mask.__kwdefaults__ = {"more": 8}
    look()
    space["helper"] = lambda x: x > 1
    look()
    mask.__code__ = (lambda b, h, q, k, *, more=0: q > k).__code__
    look()
    assert len(set(seen)) == len(seen)


def test_another_captured_tensor_is_read_and_a_changed_one_too():
    doc = torch.zeros(2, 18, dtype=torch.int64)

    def mask(b, h, q, k):
        return doc[b, q] == doc[b, k]

    first = mask_of(mask)
    doc[0, 3] = 1
    assert mask_of(mask).operands[0] is first.operands[0] is doc
    doc = doc.clone()
    assert mask_of(mask).operands[0] is doc
    doc.data = torch.zeros(2, 20, dtype=torch.int64)
    assert mask_of(mask).expression.operands[0].shape == (2, 20)


def test_a_mutable_object_is_read_at_every_call():
    class Config:
        window = 3

    settings, sizes = Config(), [3]
    method = types.MethodType(lambda self, b, h, q, k: q - k < self.window, settings)
    partial = functools.partial(lambda n, b, h, q, k: q - k < n[0], sizes)
    functions = (lambda b, h, q, k: q - k < settings.window, lambda b, h, q, k: q - k < sizes[0], method, partial)
    three, five = (mask_of(lambda b, h, q, k, n=n: q - k < n).expression for n in (3, 5))
    assert all(mask_of(function).expression is three for function in functions)
    settings.window = sizes[0] = 5
    assert all(mask_of(function).expression is five for function in functions)


def test_what_is_known_of_a_function_is_not_taken_for_its_wrapper():
    def wrap(function):
        @functools.wraps(function)
        def wrapper(b, h, q, k):
            return function(b, h, k, q)

        return wrapper

    once = wrap(cases.causal)
    mask_of(cases.causal)
    assert str(mask_of(once).expression) == "k >= q"
    assert str(mask_of(wrap(once)).expression) == "q >= k"


def test_one_function_may_be_a_mask_and_fail_as_a_score():
    def function(*indices):
        return indices[-1] > 2

    mask = mask_of(function).expression
    assert trace(function, SCORE_INPUTS).expression is None
    assert mask_of(function).expression is mask


def test_nothing_outlives_a_function():
    def make():
        doc = torch.zeros(2, 18)

        def mask(b, h, q, k):
            return doc[b, q] == doc[b, k]

        expression = mask_of(mask).expression
        return weakref.ref(mask), weakref.ref(doc), weakref.ref(expression)

    gc.disable()
    try:
        assert [reference() for reference in make()] == [None, None, None]
    finally:
        gc.enable()


# ---- printed ---------------------------------------------------------------------------------------------------------


def test_the_triton_text_reads_like_a_function():
    assert to_source(mask_of(cases.document).expression, "triton") == (
        "def mask(b, h, q, k, shift, operands):\n"
        "    x0 = tl.load(operands[0]"
        " + tl.minimum(b, operands[1] - 1) * operands[2] + tl.minimum(q, operands[3] - 1))\n"
        "    x1 = tl.load(operands[0]"
        " + tl.minimum(b, operands[1] - 1) * operands[2] + tl.minimum(k, operands[3] - 1))\n"
        "    return (q >= k) & (x0 == x1)\n"
    )


def test_the_cuda_text_reads_like_a_function():
    assert to_source(score_of(cases.alibi).expression, "cuda", "user_score") == (
        "__device__ __forceinline__ float user_score(float s, int b, int h, int q, int k, int shift,"
        " const __nv_bfloat16* operand0) {\n"
        "    const auto x0 = static_cast<float>(operand0[minimum(h, 2)]);\n"
        "    return s - (x0 * abs(q - k));\n"
        "}\n"
    )
