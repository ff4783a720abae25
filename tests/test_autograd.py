"""A backend's own backward joined for autograd, tested through the reference's tiled schedules."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnworks
from attnworks import Bias, Causal, Plan, Sink, attention, attention_decode, attention_varlen, autograd, prepared
from attnworks.backends import reference
from helpers import assert_close, randn

PLAN = Plan("reference", "q_outer", 4, 3)


def inputs(*needs: str, seq_q: int = 6, seq_kv: int = 7):
    shapes = {
        "q": (2, 4, seq_q, 8),
        "k": (2, 2, seq_kv, 8),
        "v": (2, 2, seq_kv, 5),
        "bias": (1, 4, 1, seq_kv),
        "sink": (4,),
    }
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    return [made[name].requires_grad_(name in needs or not needs) for name in shapes]


def run(q, k, v, bias, sink, plan=PLAN, **options):
    return attention(q, k, v, mask=Causal(), scores=(Bias(bias), Sink(sink)), plan=plan, **options)


def expected(*cotangents, **options):
    """The eager reference's gradients of all five inputs."""
    tensors = inputs()
    out = run(*tensors, plan=Plan("reference", "eager"), return_lse=True, **options)
    return torch.autograd.grad(out[: len(cotangents)], tensors, cotangents)


def same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want)


def cotangent(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()


# ---- what is asked of a backend --------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What the backend's backward was called with."""
    calls = []
    original = reference.prepare_backward

    def prepare_backward(problem, plan):
        launch = original(problem, plan)

        def spy(*args):
            calls.append((problem, *args))
            return launch(*args)

        return launch and spy

    monkeypatch.setattr(reference, "prepare_backward", prepare_backward)
    prepared.forget()
    yield calls
    prepared.forget()


def test_only_what_requires_grad_is_asked_for_and_the_lse_is_there_unasked(asked):
    tensors = inputs("v", "sink")
    out = run(*tensors)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    problem, _, saved_out, lse, d_out, d_lse, needs = asked[0]
    assert needs == (False, False, True, False, True)
    assert d_lse is None
    assert lse.shape == (2, 4, 6)
    assert torch.equal(saved_out, out)
    assert d_out.stride(-1) == 1
    assert problem.differentiable and not problem.return_lse
    assert [x.grad is not None for x in tensors] == list(needs)


def test_a_cotangent_of_the_lse_alone(asked):
    tensors = inputs()
    d_lse = cotangent(2, 4, 6)
    _, lse = run(*tensors, return_lse=True)
    found = torch.autograd.grad(
        lse, tensors, d_lse.transpose(1, 2).contiguous().transpose(1, 2), materialize_grads=True
    )
    assert asked[0][5].is_contiguous()
    same(found, expected(torch.zeros(2, 4, 6, 5).double(), d_lse))


@pytest.mark.parametrize("how", ["expanded", "strided", "last dimension strided"])
def test_a_cotangent_of_any_strides(asked, how):
    d_out = {
        "expanded": cotangent(1).expand(2, 4, 6, 5),
        "strided": cotangent(2, 6, 4, 5).transpose(1, 2),
        "last dimension strided": cotangent(2, 4, 5, 6).transpose(2, 3),
    }[how]
    tensors = inputs()
    same(torch.autograd.grad(run(*tensors), tensors, d_out), expected(d_out))
    assert asked[0][4].stride(-1) == 1


def test_torchs_switch_and_the_argument_ask_for_a_deterministic_backward(asked):
    for switch, argument in ((True, False), (False, True), (False, False)):
        torch.use_deterministic_algorithms(switch)
        run(*inputs(), deterministic=argument).sum().backward()
        assert asked[-1][0].deterministic == (switch or argument)


def test_problems_under_a_transform_are_not_joined():
    q = randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"plan schedule: was 'q_outer'.*functorch transform"):
        torch.func.vmap(lambda x: attention(x, x, x, plan=PLAN))(torch.stack([q, q]))


# ---- what autograd does with a graph ---------------------------------------------------------------------------------


def test_saved_tensors_may_come_back_with_other_strides(asked):
    """As hooks that move them to another device bring them back: packed densely, bias and mask too."""
    d_out = cotangent(2, 6, 4, 5)
    sees = (torch.arange(7)[:, None] <= torch.arange(6)).T  # strides (1, 6)

    def densely(x):
        return x.clone(memory_format=torch.contiguous_format)

    def gradients(hooked):
        q, k, v, bias, sink = inputs()
        wide = torch.cat([k, k], -1)
        tensors = [q.transpose(1, 2), wide[..., :8].transpose(1, 2), v.transpose(1, 2), bias.expand(2, 4, 6, 7), sink]
        hooks = torch.autograd.graph.saved_tensors_hooks(densely, lambda x: x) if hooked else nullcontext()
        with hooks:
            out = attention(*tensors[:3], mask=sees, scores=(Bias(tensors[3]), Sink(sink)), layout="bshd", plan=PLAN)
        return torch.autograd.grad(out, (q, k, v, bias, sink), d_out)

    plain = gradients(False)
    strides = asked[-1][0].k_strides
    same(gradients(True), plain)
    assert asked[-1][0].k_strides != strides, "the hooks changed nothing, so nothing was tested"


def test_a_saved_input_changed_in_place_is_noticed():
    for position in range(5):
        tensors = inputs()
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        used = [x.clone() for x in leaves]
        out = run(*used)
        with torch.no_grad():
            used[position].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_retain_graph_and_checkpoint():
    tensors, d_out = inputs(), cotangent(2, 4, 6, 5)
    wanted = expected(d_out)
    out = run(*tensors)
    for _ in range(2):
        same(torch.autograd.grad(out, tensors, d_out, retain_graph=True), wanted)
    same(torch.autograd.grad(checkpoint(run, *tensors, use_reentrant=False), tensors, d_out), wanted)
    out = run(*tensors)
    torch.autograd.grad(out, tensors, d_out)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, tensors, d_out)


def test_a_second_derivative_is_an_error_that_names_the_way(asked):
    tensors = inputs("q")
    out = run(*tensors)
    (gradient,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    message = r"no derivative of its own: .*backend='reference', plan=Plan\('reference', 'eager'\)"
    with pytest.raises(NotImplementedError, match=message):
        gradient.square().sum().backward()


def test_gradcheck_in_fp64_and_out_in_both_layouts():
    tensors = inputs(seq_q=2, seq_kv=3)
    assert torch.autograd.gradcheck(lambda *x: run(*x, return_lse=True), tensors, fast_mode=True)
    q, k, v = tensors[:3]
    found = torch.autograd.grad(attention(q, k, v, plan=PLAN).sum(), (q, k, v))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    same(torch.autograd.grad(attention(*turned, layout="bshd", plan=PLAN).sum(), (q, k, v)), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_their_inputs_dtypes_and_broadcast_ones_are_summed(dtype):
    q, k, v, bias, sink = (x.detach().to(dtype).requires_grad_() for x in inputs())
    small = bias.detach()[0, :1, 0].float().requires_grad_()  # (1, seq_kv), another dtype than q's
    out = attention(q, k, v, scores=(Bias(small), Sink(sink)), plan=PLAN)
    out.float().square().sum().backward()
    for x in (q, k, v, small, sink):
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
    other = small.detach().clone().requires_grad_()
    attention(q.double(), k.double(), v.double(), scores=(Bias(other), Sink(sink))).square().sum().backward()
    assert_close(small.grad, other.grad, dtype)


# ---- packed sequences and caches -------------------------------------------------------------------------------------


def test_packed_sequences():
    """Empty sequences, unused rows at the end, which get gradient 0."""
    cu_q, cu_kv = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 0, 4, 9])
    q, k, v = (torch.randn(n, h, d).double().requires_grad_() for n, h, d in ((8, 4, 6), (10, 2, 6), (10, 2, 5)))
    bias = torch.randn(3, 1, 1, 5).double().requires_grad_()
    d_out, d_lse = torch.randn(8, 4, 5).double(), torch.randn(4, 8).double()

    def gradients(plan):
        out, lse = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            mask=Causal(),
            scores=(Bias(bias),),
            return_lse=True,
            plan=plan,
        )
        lse = torch.where(lse.isinf(), 0, lse)
        return torch.autograd.grad((out, lse), (q, k, v, bias), (d_out, d_lse))

    found = gradients(PLAN)
    same(found, gradients(Plan("reference", "eager")))
    assert not found[0][7:].any() and not found[1][9:].any()


@pytest.mark.parametrize("paged", [False, True])
def test_caches(paged):
    """Gradients are 0 past the lengths and summed where two sequences share a page."""
    shape = (4, 3, 2, 6) if paged else (2, 7, 2, 6)
    q, k, v = torch.randn(2, 2, 4, 6).double(), torch.randn(shape).double(), torch.randn(shape).double()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table = torch.tensor([[0, 1, 99], [0, 3, 2]]) if paged else None

    def gradients(plan):
        out = attention_decode(q, k, v, kv_lens=torch.tensor([4, 7]), page_table=table, mask=Causal(), plan=plan)
        return torch.autograd.grad(out.square().sum(), leaves)

    found = gradients(PLAN)
    same(found, gradients(Plan("reference", "eager")))
    assert not (found[1][1, 1:] if paged else found[1][0, 4:]).any()


def test_a_scale_that_requires_grad_is_refused():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    cache, scale = torch.ones(1, 3, 2, 4).to(torch.int8), torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="k_scale, v_scale: required grad"):
        attention_decode(q, cache, cache, kv_lens=torch.tensor([3]), k_scale=scale, v_scale=scale, plan=PLAN)


# ---- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_brings_mixed_dtypes_together_and_leaves_equal_ones():
    q, k, v = randn(1, 2, 5, 8), randn(1, 2, 5, 8, dtype=torch.bfloat16), randn(1, 2, 5, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"k: was torch.bfloat16, must be torch.float32 like q"):
        attention(q, k, v)
    leaf = q.clone().requires_grad_()
    cu = torch.tensor([0, 2, 5])
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(leaf, k, v)
        assert out.dtype == torch.bfloat16
        assert_close(out, attention(q.bfloat16(), k, v))
        assert attention(q, q, q).dtype == torch.float32
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        assert attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_kv=cu).dtype == torch.bfloat16
        caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
        before = caches[0].data_ptr()
        new = {"k_new": q[:, :, :1].transpose(1, 2), "v_new": q[:, :, :1].transpose(1, 2)}
        decoded = attention_decode(q[:, :, :1].transpose(1, 2), *caches, kv_lens=torch.tensor([3]), **new)
        assert decoded.dtype == torch.bfloat16
        assert torch.equal(caches[0][0, 3], q[0, :, 0].bfloat16()) and caches[0].data_ptr() == before
        with pytest.raises(TypeError, match="float64"):
            attention(q.double(), k, v)
        assert attnworks.explain(q, k, v).problem.dtype == torch.bfloat16
    out.sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_a_joined_call_keeps_no_tensor_alive():
    def call():
        tensors = inputs()
        run(*tensors).sum().backward()
        return [weakref.ref(x) for x in tensors]

    references = call()
    gc.collect()
    assert all(reference() is None for reference in references)
    assert any(isinstance(launch, autograd.Joined) for launch in prepared.CALLS.values())
