"""The reference's derivatives: every schedule by finite differences, every subset of inputs, higher order, vmap."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnworks import ALiBi, Bias, Causal, Plan, Sink, Softcap, Window
from helpers import assert_close
from reference_helpers import EAGER, STANDARD, TILED, all_schedules, grad, inputs, run, schedules, with_grad

f64 = torch.float64

# torch itself still scripts the decompositions that its forward mode loads.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

SCORES: dict[str, Any] = {
    "plain": lambda bias, sink, slopes: (),
    "softcap": lambda bias, sink, slopes: (Softcap(1.5),),
    "bias": lambda bias, sink, slopes: (Bias(bias),),
    "sink": lambda bias, sink, slopes: (Sink(sink),),
    "alibi": lambda bias, sink, slopes: (ALiBi(slopes),),
    "functions": lambda bias, sink, slopes: (
        lambda s, b, h, q, k: torch.tanh(s) * (1 + bias[b, h, 0, k]),
        Softcap(2.0),
        lambda s, b, h, q, k: s - slopes[b, h] * (q - k).abs(),
    ),
    "all": lambda bias, sink, slopes: (Bias(bias), Softcap(2.0), ALiBi(slopes), Bias(bias[:, :1]), Sink(sink)),
}
MASKS: dict[str, Any] = {
    "full": None,
    "causal": Causal(),
    "window": Window(1, 0),
    "empty rows": torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool),
}


@all_schedules
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", SCORES)
def test_gradcheck(plan: Plan, mask: str, kind: str) -> None:
    qkv = inputs(batch=1, heads_q=2, heads_kv=1, seq_q=3, seq_kv=3, dim=2, dim_v=1)
    operands = (torch.randn(1, 2, 1, 3, dtype=f64), torch.randn(2, dtype=f64), torch.rand(1, 2, dtype=f64))

    def call(q: Tensor, k: Tensor, v: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run(q, k, v, mask=MASKS[mask], scores=SCORES[kind](*operands), plan=plan)
        return out, torch.where(lse == -math.inf, 0, lse)

    assert torch.autograd.gradcheck(call, with_grad(*qkv, *operands))


@all_schedules
def test_gradients_for_every_subset(plan: Plan) -> None:
    """Of {q, k, v, bias, sink, LSE cotangent}: those asked for are what they are when all are asked for."""
    q, k, v = inputs()
    tensors = [q, k, v, torch.randn(1, 4, 5, 1, dtype=f64), torch.randn(4, dtype=f64)]
    weights, lse_weights = torch.randn(2, 4, 5, 3, dtype=f64), torch.randn(2, 4, 5, dtype=f64)

    def gradients(plan: Plan, wanted: int, through_lse: bool) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(bool(wanted >> n & 1)) for n, x in enumerate(tensors)]
        out, lse = run(*leaves[:3], mask=Causal(), scores=(Bias(leaves[3]), Sink(leaves[4])), plan=plan)
        loss = (out * weights).sum() + ((lse * lse_weights).sum() if through_lse else 0)
        if loss.requires_grad:
            loss.backward()
        return [leaf.grad for leaf in leaves]

    everything = {through_lse: gradients(EAGER, 31, through_lse) for through_lse in (False, True)}
    for needs, through_lse in itertools.product(range(1, 32), everything):
        found = gradients(plan, needs, through_lse)
        for n, (got, expected) in enumerate(zip(found, everything[through_lse], strict=True)):
            assert (got is not None) == bool(needs >> n & 1), needs
            if got is not None and expected is not None:
                assert_close(got, expected)
    assert gradients(plan, 0, True) == [None] * 5


EVERYTHING: Any = {"mask": Causal(), "scores": (Softcap(3.0), Sink(torch.zeros(2, dtype=f64)))}


@schedules(EAGER, STANDARD)
def test_double_backward(plan: Plan) -> None:
    q, k, v = inputs(batch=1, heads_q=2, heads_kv=1, seq_q=3, seq_kv=3, dim=2, dim_v=2)
    assert torch.autograd.gradgradcheck(lambda *x: run(*x, plan=plan, **EVERYTHING), with_grad(q, k, v))


@schedules(EAGER, STANDARD)
def test_forward_mode(plan: Plan) -> None:
    q, k, v = inputs(batch=1, heads_q=2)
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    _, (d_out, d_lse) = torch.func.jvp(lambda *x: run(*x, plan=plan, **EVERYTHING), (q, k, v), tangents)
    step = 1e-6
    moved = [
        run(*(x + sign * step * t for x, t in zip((q, k, v), tangents, strict=True)), **EVERYTHING) for sign in (1, -1)
    ]
    torch.testing.assert_close(d_out, (moved[0][0] - moved[1][0]) / (2 * step), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(d_lse, (moved[0][1] - moved[1][1]) / (2 * step), atol=1e-8, rtol=1e-6)


@schedules(EAGER, STANDARD)
def test_vmap_and_func_grad(plan: Plan) -> None:
    q, k, v = inputs()
    bias = torch.randn(3, 4, 5, 7, dtype=f64)

    def loss(bias: Tensor, q: Tensor) -> Tensor:
        out, lse = run(q, k, v, scores=(Bias(bias),), plan=plan)
        return out.sum() + lse.sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(bias, q)
    for n in range(3):
        (leaf,) = with_grad(bias[n])
        loss(leaf, q).backward()
        assert_close(mapped[n], grad(leaf))


@schedules(*TILED)
def test_what_the_tiled_backward_cannot_do_is_an_error(plan: Plan) -> None:
    q, k, v = inputs()
    (leaf,) = with_grad(q)
    out, _ = run(leaf, k, v, plan=plan)
    (gradient,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        (out.sum() + gradient.square().sum()).backward()
    with pytest.raises(ValueError, match=r"plan schedule: was '.*'eager', 'standard'.* forward-mode AD"):
        torch.func.jvp(lambda x: run(x, k, v, plan=plan)[0], (q,), (q,))
    with pytest.raises(ValueError, match=r"plan schedule: was '.*'eager', 'standard'.* functorch transform"):
        torch.func.vmap(lambda x: run(x, k, v, plan=plan)[0])(torch.stack([q, q]))
    with pytest.raises(ValueError, match=r"plan schedule: was '.*'eager', 'standard'"):
        run(leaf, k, v, scores=(lambda s, b, h, q, k: s + len(s),), plan=plan)


@all_schedules
def test_score_function_and_what_it_captures(plan: Plan) -> None:
    """A captured tensor gets its gradient wherever q, k and v need none; no schedule loses it silently."""
    q, k, v = inputs()
    (table,) = with_grad(torch.randn(11, dtype=f64))
    out, _ = run(q, k, v, scores=(lambda s, b, h, i, j: s + table[i - j + 6],), plan=plan)
    bias = torch.stack([torch.stack([table[i - j + 6] for j in range(7)]) for i in range(5)])
    expected = scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), bias)
    assert_close(out, expected)
    (mine,) = torch.autograd.grad(out.square().sum(), table)
    (theirs,) = torch.autograd.grad(expected.square().sum(), table)
    assert_close(mine, theirs)
