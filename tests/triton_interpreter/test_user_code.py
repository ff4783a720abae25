"""Every mask, score and derivative as a Triton function, interpreted, against the expression's own values."""

import pytest
import torch
import triton
import triton.language as tl

import expression_cases as cases
from attnworks.backends.triton.user_code import jit
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.evaluation import evaluate
from attnworks.expressions.source import operand_facts
from attnworks.expressions.tracing import MASK_INPUTS, SCORE_INPUTS, trace

# NumPy computes what a GPU computes, but warns where it overflows or makes a NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS, KEYS = 16, 32  # tiles that reach past N and M


@triton.jit
def masked(out, operands, n: tl.constexpr, m: tl.constexpr, mask: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    q, k = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    inside = (q < n) & (k < m)
    at = ((b * tl.num_programs(1) + h) * n + q) * m + k
    tl.store(out + at, tl.broadcast_to(mask(b, h, q, k, b * 0, operands), (16, 32)), mask=inside)


@triton.jit
def scored(out, everywhere, s, operands, n: tl.constexpr, m: tl.constexpr, score: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    q, k = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    inside = (q < n) & (k < m)
    at = ((b * tl.num_programs(1) + h) * n + q) * m + k
    value = tl.broadcast_to(score(tl.load(s + at, mask=inside, other=1.0), b, h, q, k, b * 0, operands), (16, 32))
    tl.store(out + at, value, mask=inside)
    tl.store(everywhere + ((b * tl.num_programs(1) + h) * 16 + q) * 32 + k, value)


def run_score(expression, operands, s):
    out, everywhere = torch.empty_like(s), torch.empty(cases.B, cases.H, ROWS, KEYS)
    scored[cases.B, cases.H](
        out, everywhere, s, (*operands, *operand_facts(expression)), cases.N, cases.M, jit(expression, "score")
    )
    return out, everywhere


@pytest.mark.parametrize("name", cases.MASKS)
def test_masks(name):
    traced = trace(cases.MASKS[name], MASK_INPUTS)
    out = torch.zeros(cases.B, cases.H, cases.N, cases.M, dtype=torch.bool)
    operands = (*traced.operands, *operand_facts(traced.expression))
    masked[cases.B, cases.H](out, operands, cases.N, cases.M, jit(traced.expression, "mask"))
    assert torch.equal(out, evaluate(traced.expression, cases.indices(), traced.operands).expand_as(out))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", cases.SCORES)
def test_scores_and_their_derivatives(name, order):
    traced, s = trace(cases.SCORES[name], SCORE_INPUTS), cases.scores()
    expression = derivative(traced.expression) if order else traced.expression
    found, _ = run_score(expression, traced.operands, s)
    expected = evaluate(expression, cases.indices() | {"s": s}, traced.operands).expand_as(s)
    torch.testing.assert_close(found, expected.float(), atol=2e-6, rtol=2e-5)


def test_tanh_is_right_near_zero_and_at_its_limits():
    traced = trace(lambda s, b, h, q, k: torch.tanh(s), SCORE_INPUTS)
    special = [0.0, -0.0, 1e-30, 1e-4, -0.19, 0.2, 0.21, 1.0, -5.0, 60.0, -100.0, 1e30, float("inf"), -float("inf")]
    values = torch.cat((torch.tensor(special), torch.linspace(-3, 3, cases.B * cases.H * cases.N * cases.M - 14)))
    s = values.view(cases.B, cases.H, cases.N, cases.M)
    torch.testing.assert_close(run_score(traced.expression, (), s)[0], torch.tanh(s), atol=0, rtol=1e-6)


def test_nan_stays_nan():
    s = torch.full((cases.B, cases.H, cases.N, cases.M), float("nan"))
    for function in (
        lambda s, b, h, q, k: torch.maximum(s, s * 2),
        lambda s, b, h, q, k: s.clamp(-1, 1),
        lambda s, b, h, q, k: torch.relu(s),
        lambda s, b, h, q, k: torch.tanh(s),
    ):
        traced = trace(function, SCORE_INPUTS)
        assert evaluate(traced.expression, cases.indices() | {"s": s}, ()).isnan().all()
        assert run_score(traced.expression, (), s)[0].isnan().all()


@pytest.mark.parametrize("function", ["plain", "shifted"])
def test_lanes_outside_read_nothing_outside_a_captured_tensor(function):
    """The table lies in the middle of NaN; lanes past N and M and indices past its ends give one of its own values."""
    memory = torch.full((3, cases.H, 3 * cases.N, 3 * cases.M), float("nan"))
    table = memory[1, :, cases.N : 2 * cases.N, cases.M : 2 * cases.M]
    table[:] = torch.randn(table.shape)
    functions = {
        "plain": lambda s, b, h, q, k: table[h, q, k] + 0 * s,
        "shifted": lambda s, b, h, q, k: table[h, q - 1000, k * 3 - 40] + 0 * s,
    }
    traced = trace(functions[function], SCORE_INPUTS)
    found, everywhere = run_score(traced.expression, traced.operands, cases.scores())
    assert everywhere.isfinite().all()
    if function == "plain":
        assert torch.equal(found, table.expand_as(found))


def test_one_function_for_one_expression():
    first, second = (trace(cases.document, MASK_INPUTS).expression for _ in range(2))
    assert jit(first, "mask") is jit(second, "mask")
    with pytest.raises(ValueError, match=r"^kind: was 'score', but the expression is bool"):
        jit(first, "score")
