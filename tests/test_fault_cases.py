"""Inputs of the kinds that have made real fused-attention implementations go wrong, each with its right value.

A GPU's own kinds (streams, graphs, launch grids, several devices) have no place here; where their rule also holds on a
CPU it is checked at a small size. The sections are the kinds of fault.
"""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attnworks import (
    ALiBi,
    Bias,
    Causal,
    Plan,
    Sink,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_decode,
    attention_varlen,
    merge,
    prepared,
)
from helpers import assert_close, causal, dense_oracle, or_skip, oracle, randn

LOW = [torch.bfloat16, torch.float16]


# ---- rows without a visible key, empty states ------------------------------------------------------------------------


def test_a_wholly_masked_row_is_zero_and_its_gradients_too():
    q, k, v = randn(1, 2, 6, 8), randn(1, 2, 10, 8), randn(1, 2, 10, 8)
    mask = torch.ones(6, 10, dtype=torch.bool)
    mask[-1] = False
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*tensors, mask=mask, return_lse=True)
    assert torch.equal(out[:, :, -1], torch.zeros(1, 2, 8))
    assert (lse[:, :, -1] == -math.inf).all()
    assert_close(out[:, :, :-1], dense_oracle(*(x.detach() for x in (q[:, :, :-1], k, v)))[0])
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)
    assert torch.equal(q.grad[:, :, -1], torch.zeros(1, 2, 8))


def test_a_nan_in_the_queries_stays_nan(backend):
    q, k = torch.full((2, 4, 16, 8), math.nan), randn(2, 4, 16, 8)
    assert attention(q, k, k, backend=backend).isnan().all()
    q = randn(2, 4, 16, 8)
    q[1, 2, 3, 4] = math.nan
    nans = attention(q, k, k, backend=backend).isnan()
    assert nans[1, 2, 3].all()
    assert nans.sum() == 8, "a NaN in one row reached another"


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_in_a_visible_key_go_where_eager_lets_them(backend, operand, value):
    q, k, v = randn(1, 1, 5, 8), randn(1, 1, 9, 8), randn(1, 1, 9, 8)
    {"k": k, "v": v}[operand][0, 0, 4, 3] = value
    out = attention(q, k, v, backend=backend)
    eager = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v
    assert torch.equal(out.isnan() | out.isinf(), eager.isnan() | eager.isinf())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_queries_than_keys_leave_the_first_rows_empty(backend, dtype):
    q, k = randn(1, 2, 11, 8, dtype=dtype), randn(1, 2, 4, 8, dtype=dtype)
    out, lse = attention(q, k, k, mask=Causal(), return_lse=True, backend=backend)
    assert torch.equal(out[:, :, :7], torch.zeros(1, 2, 7, 8, dtype=dtype))
    assert (lse[:, :, :7] == -math.inf).all()
    assert_close(out[:, :, 7:], dense_oracle(q[:, :, 7:], k, k, causal(4, 4))[0])


def test_paged_prefill_with_more_queries_than_keys(backend):
    q, cache = randn(1, 7, 2, 8), torch.full((3, 2, 1, 8), math.nan)
    cache[2], cache[0, 0] = randn(2, 1, 8), randn(1, 8)
    out, lse = attention_decode(
        q,
        cache,
        cache,
        kv_lens=torch.tensor([3]),
        page_table=torch.tensor([[2, 0]]),
        mask=Causal(),
        return_lse=True,
        backend=backend,
    )
    assert torch.equal(out[0, :4], torch.zeros(4, 2, 8))
    assert (lse[0, :, :4] == -math.inf).all()
    keys = torch.cat((cache[2], cache[0, :1]))[:, 0]
    for h in range(2):
        expected = oracle(q[0, :, h], keys, keys, causal(7, 3))
        assert_close(out[0, :, h], expected[0])
        assert_close(lse[0, h], expected[1])


def test_merging_empty_states():
    out, lse = torch.zeros(1, 1, 1, 64), torch.full((1, 1, 1), -math.inf)
    both = merge(out, lse, out, lse)
    assert torch.equal(both[0], out)
    assert torch.equal(both[1], lse)
    state = randn(1, 1, 1, 64), randn(1, 1, 1)
    for merged in (merge(*state, out, lse), merge(out, lse, *state)):
        assert torch.equal(merged[0], state[0])
        assert torch.equal(merged[1], state[1])


# ---- causal alignment ------------------------------------------------------------------------------------------------


def test_one_query_sees_all_keys_bottom_right_and_one_top_left(backend):
    q, k, v = randn(1, 1, 1, 8), randn(1, 1, 8, 8), randn(1, 1, 8, 8)
    assert_close(attention(q, k, v, mask=Causal(), backend=backend), dense_oracle(q, k, v)[0])
    assert_close(attention(q, k, v, mask=Causal("top-left"), backend=backend), v[:, :, :1])


def test_three_queries_on_128_keys(backend):
    q, k, v = randn(1, 1, 3, 128), randn(1, 1, 128, 128), randn(1, 1, 128, 128)
    out = attention(q, k, v, mask=Causal(), backend=backend)
    assert_close(out, dense_oracle(q, k, v, causal(3, 128))[0])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("j", [0, 1, 7, 31, 32, 62, 63])
def test_a_later_key_changes_no_bit_of_an_earlier_row(backend, dtype, j):
    q, k, v = randn(1, 4, 64, 64, dtype=dtype), randn(1, 4, 64, 64, dtype=dtype), randn(1, 4, 64, 64, dtype=dtype)
    before = attention(q, k, v, mask=Causal(), backend=backend)
    k[:, :, j], v[:, :, j] = 100, -100
    after = attention(q, k, v, mask=Causal(), backend=backend)
    assert torch.equal(before[:, :, :j], after[:, :, :j])
    assert not torch.equal(before[:, :, j], after[:, :, j])


def test_gradients_without_the_causal_mask_are_those_of_full_attention():
    tensors = [randn(1, 1, 12, 4).double().requires_grad_() for _ in "qkv"]
    attention(*tensors).square().sum().backward()
    copies = [x.detach().clone().requires_grad_() for x in tensors]
    q, k, v = copies
    (torch.softmax(q @ k.mT / 2, -1) @ v).square().sum().backward()
    for x, copy in zip(tensors, copies, strict=True):
        assert_close(x.grad, copy.grad)


# ---- lengths of zero and one -----------------------------------------------------------------------------------------


def test_keys_of_an_empty_query_sequence_get_gradient_zero():
    cu_q, cu_kv = torch.tensor([0, 0, 12, 20, 20]), torch.tensor([0, 25, 42, 51, 81])
    q = randn(20, 4, 256).requires_grad_()
    k, v = randn(81, 1, 256).requires_grad_(), randn(81, 1, 256).requires_grad_()
    out = attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, mask=Causal())
    out.sum().backward()
    for grad in (k.grad, v.grad):
        assert torch.equal(grad[:25], torch.zeros(25, 1, 256))
        assert torch.equal(grad[51:], torch.zeros(30, 1, 256))
        assert grad.isfinite().all()


@pytest.mark.parametrize("lens_q", [[1, 0, 1], [0, 0, 0, 0, 1], [0], [0, 0], [1]])
def test_varlen_with_empty_sequences(backend, lens_q):
    lens_kv = [3 + n for n in range(len(lens_q))]
    cu_q, cu_kv = (torch.tensor([0, *lens]).cumsum(0) for lens in (lens_q, lens_kv))
    q, k = randn(sum(lens_q), 4, 8), randn(sum(lens_kv), 2, 8)
    out, lse = attention_varlen(
        q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, mask=Causal(), return_lse=True, backend=backend
    )
    assert out.shape == (sum(lens_q), 4, 8)
    for b, h in itertools.product(range(len(lens_q)), range(4)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        expected = oracle(q[rows, h], k[keys, h // 2], k[keys, h // 2])
        assert_close(out[rows, h], expected[0])
        assert_close(lse[h, rows], expected[1])


def test_one_sequence_keeps_its_dimensions(backend):
    q = randn(5, 8, 16, dtype=torch.float16)
    cu = torch.tensor([0, 5])
    assert attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend).shape == (5, 8, 16)
    assert attention(q[None, :1], q[None, :1], q[None, :1], layout="bshd", backend=backend).shape == (1, 1, 8, 16)


@pytest.mark.parametrize("zero", ["batch", "heads", "seq_q", "seq_kv"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_sizes_of_zero(backend, zero, layout):
    sizes = {"batch": 2, "heads": 2, "seq_q": 3, "seq_kv": 4} | {zero: 0}
    q = randn(sizes["batch"], sizes["heads"], sizes["seq_q"], 8)
    k = randn(sizes["batch"], sizes["heads"], sizes["seq_kv"], 8)
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    out, lse = attention(q, k, k, layout=layout, mask=Causal(), return_lse=True, backend=backend)
    assert out.shape == q.shape
    assert torch.equal(out, torch.zeros(q.shape))
    assert torch.equal(lse, torch.full((sizes["batch"], sizes["heads"], sizes["seq_q"]), -math.inf))


@pytest.mark.parametrize("batch", [0, 2])
def test_decode_with_nothing_to_do(backend, batch):
    cache = randn(batch, 0, 2, 8)
    lens = torch.zeros(batch, dtype=torch.int64)
    out = attention_decode(randn(batch, 1, 4, 8), cache, cache, kv_lens=lens, backend=backend)
    assert torch.equal(out, torch.zeros(batch, 1, 4, 8))
    assert attention_decode(randn(batch, 0, 4, 8), cache, cache, kv_lens=lens, backend=backend).shape == (
        batch,
        0,
        4,
        8,
    )


def test_one_of_everything(backend):
    q, k, v = randn(1, 1, 1, 1), randn(1, 1, 1, 1), randn(1, 1, 1, 1)
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert_close(out, v)
    assert_close(lse, (q * k)[..., 0])


# ---- memory that is not in the problem -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_what_lies_past_the_lengths_of_a_cache_changes_no_bit(backend, dtype):
    q, k, v = randn(2, 1, 1, 64, dtype=dtype), randn(2, 3, 1, 64, dtype=dtype), randn(2, 3, 1, 64, dtype=dtype)
    results = []
    for filler in (0.0, math.nan, math.inf, 1e4):
        k[0, 1:], v[0, 1:] = filler, filler
        results.append(
            attention_decode(q, k, v, kv_lens=torch.tensor([1, 3]), mask=Causal(), return_lse=True, backend=backend)
        )
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_strong_negative_scores_off_the_tile_keep_gradients_finite():
    """N = 704 = 5 * 128 + 64 under an all-True mask, every row's LSE below -88.7: exp(0 - lse) would overflow."""
    q = torch.full((1, 1, 704, 64), 4.0, dtype=torch.bfloat16)
    k = -q + 0.01 * randn(1, 1, 704, 64, dtype=torch.bfloat16)
    tensors = [x.requires_grad_() for x in (q, k, randn(1, 1, 704, 64, dtype=torch.bfloat16))]
    out, lse = attention(*tensors, mask=torch.ones(704, 704, dtype=torch.bool), return_lse=True)
    assert (lse < -88.7).all()
    out.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("seq", [1, 15, 16, 17, 63, 64, 65, 127, 129, 191, 192, 193])
def test_lengths_off_every_tile(backend, seq):
    q, k, v = randn(1, 2, seq, 16), randn(1, 1, seq + 3, 16), randn(1, 1, seq + 3, 16)
    out = attention(q, k, v, mask=Causal(), backend=backend)
    s = (q.double() @ k.double().mT) / 4
    s = s.masked_fill(torch.ones(seq, seq + 3).triu(4).bool(), -math.inf)
    assert_close(out, torch.softmax(s, -1) @ v.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_past_the_last_sequence_are_zero_also_in_gradients(backend, dtype):
    cu = torch.tensor([0, 3, 5])
    packed = torch.full((9, 2, 8), math.nan, dtype=dtype)
    packed[:5] = randn(5, 2, 8, dtype=dtype)
    out, lse = attention_varlen(
        packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, return_lse=True, backend=backend
    )
    assert torch.equal(out[5:], torch.zeros(4, 2, 8, dtype=dtype))
    assert (lse[:, 5:] == -math.inf).all()
    assert not out.isnan().any()
    alone = attention_varlen(packed[:5], packed[:5], packed[:5], cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend)
    assert torch.equal(out[:5], alone)
    if backend == "reference":
        packed.requires_grad_()
        attention_varlen(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_kv=cu).float().sum().backward()
        assert torch.equal(packed.grad[5:], torch.zeros(4, 2, 8, dtype=dtype))
        assert packed.grad.isfinite().all()


def test_deterministic_algorithms_change_no_gradient():
    """Block-diagonal lengths 64 and 60 in bf16: with the flag on, fresh memory holds NaN."""
    cu = torch.tensor([0, 64, 124])
    grads = []
    for flag in (True, False):
        torch.use_deterministic_algorithms(flag)
        torch.manual_seed(1)
        tensors = [randn(124, 12, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        attention_varlen(*tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu).float().sum().backward()
        grads.append([x.grad for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# ---- large indices: the rule at a small size; tests/test_large.py has extents past 2^31 ------------------------------


def test_v_as_a_view_into_a_fused_buffer(backend):
    fused = randn(1, 40, 3 * 7 * 8).view(1, 40, 3, 7, 8)
    q, k, v = (fused[:, :, part].transpose(1, 2) for part in range(3))
    out = attention(q, k, v, mask=Causal(), backend=backend)
    assert torch.equal(out, attention(q.contiguous(), k.contiguous(), v.contiguous(), mask=Causal(), backend=backend))


def test_an_append_changes_only_the_addressed_rows(backend):
    layers = randn(5, 3, 2, 16, 2, 8)  # batch, layer, K and V, capacity, heads, dim
    k_cache, v_cache = layers[:, 1, 0], layers[:, 1, 1]
    before = layers.clone()
    new = randn(5, 1, 2, 8), randn(5, 1, 2, 8)
    lens = torch.tensor([0, 15, 3, 7, 9])
    attention_decode(randn(5, 1, 2, 8), k_cache, v_cache, kv_lens=lens, k_new=new[0], v_new=new[1], backend=backend)
    for b in range(5):
        before[b, 1, 0, lens[b]], before[b, 1, 1, lens[b]] = new[0][b, 0], new[1][b, 0]
    assert torch.equal(layers, before)


def test_sequence_major_keys(backend):
    k = randn(24, 3, 128, dtype=torch.bfloat16).transpose(0, 1).unsqueeze(1)
    q = randn(3, 1, 9, 128, dtype=torch.bfloat16)
    assert_close(attention(q, k, k, backend=backend), dense_oracle(q, k, k)[0])


@pytest.mark.parametrize("batch", [65_535, 65_536, 70_000])
def test_more_batches_than_a_launch_grid_has_rows(backend, batch):
    """Multi-head latent attention: one query on one key in each batch. One key gives V, whatever the score."""
    q, k = randn(batch, 1, 2, 12, dtype=torch.bfloat16), randn(batch, 1, 1, 12, dtype=torch.bfloat16)
    out = attention(q, k, k[..., :8], layout="bshd", backend=backend)
    assert torch.equal(out, k[..., :8].expand(batch, 1, 2, 8))
    lens = torch.ones(batch, dtype=torch.int32)
    if backend != "reference":  # it takes one sequence at a time
        decoded = attention_decode(q, k, k[..., :8], kv_lens=lens, backend=backend)
        assert torch.equal(decoded, out)


# ---- strides, layouts, broadcasts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_last_dimension_that_is_not_contiguous(backend, which):
    tensors = [randn(2, 2, 7, 8) for _ in "qkv"]
    expected = attention(*tensors, backend=backend)
    tensors[which] = tensors[which].transpose(2, 3).contiguous().transpose(2, 3)
    assert tensors[which].stride(-1) != 1
    assert torch.equal(attention(*tensors, backend=backend), expected)


def test_a_permutation_of_84_3_3_64(backend):
    x = randn(84, 3, 3, 64).permute(0, 2, 1, 3)
    assert torch.equal(attention(x, x, x, backend=backend), attention(*[x.contiguous()] * 3, backend=backend))


@pytest.mark.parametrize("pattern", list(itertools.product([False, True], repeat=4)))
def test_every_broadcast_of_a_mask_and_a_bias(pattern):
    full = (2, 4, 8, 9)
    shape = tuple(size if keep else 1 for size, keep in zip(full, pattern, strict=True))
    q, k, v = randn(2, 4, 8, 16), randn(2, 2, 9, 16), randn(2, 2, 9, 16)
    mask, bias = torch.rand(shape) < 0.7, randn(*shape)
    for given, whole in (
        ({"mask": mask}, {"mask": mask.expand(full).contiguous()}),
        ({"scores": (Bias(bias),)}, {"scores": (Bias(bias.expand(full).contiguous()),)}),
    ):
        assert torch.equal(attention(q, k, v, **given), attention(q, k, v, **whole))
    s = (q @ k.repeat_interleave(2, 1).mT) / 4 + bias
    expected = torch.softmax(s.double(), -1) @ v.repeat_interleave(2, 1).double()
    assert_close(attention(q, k, v, scores=(Bias(bias),)), expected)


def test_a_mask_that_lacks_leading_dimensions():
    q, k = randn(2, 3, 4, 8), randn(2, 3, 5, 8)
    mask = torch.rand(4, 5) < 0.6
    expected = dense_oracle(q, k, k, lambda i, j: bool(mask[i, j]))[0]
    assert_close(attention(q, k, k, mask=mask), expected)
    assert torch.equal(attention(q, k, k, mask=torch.tensor(True)), attention(q, k, k))


def test_saved_tensors_packed_by_hooks():
    """Hooks that move saved tensors away and back do not preserve strides; backward must not rely on them."""
    q, k, v = (randn(1, 8, 9, 16).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for _ in "qkv")
    bias = randn(1, 8, 1, 9).requires_grad_()

    def gradients():
        out = attention(q, k, v, scores=(Bias(bias),))
        return torch.autograd.grad(out.square().sum(), (q, k, v, bias))

    plain = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().numpy(), torch.from_numpy):
        hooked = gradients()
    for a, b in zip(plain, hooked, strict=True):
        assert_close(a, b)


def test_the_gradient_of_the_output_may_have_any_strides():
    q = randn(2, 2, 49, 32).requires_grad_()
    grad = randn(2, 2, 49, 32)
    plain = torch.autograd.grad(attention(q, q, q), q, grad)[0]
    strided = torch.autograd.grad(attention(q, q, q), q, grad.transpose(1, 3).contiguous().transpose(1, 3))[0]
    assert_close(plain, strided)


def negated(x):
    """x by another way: torch keeps -x and a bit that says so, as in ``y.conj().imag``. Memory and pointer know nothing
    of the bit."""
    return torch._neg_view(-x)


def test_tensors_that_torch_negates_lazily(backend):
    q, k, v, d_out = randn(2, 4, 5, 8), randn(2, 2, 9, 8), randn(2, 2, 9, 8), randn(2, 4, 5, 8)
    bias, slopes, sink, d_lse = randn(5, 9), randn(4), randn(4), randn(2, 4, 5)

    def dense(view):
        tensors = [x.clone().requires_grad_() for x in (q, k, v, bias, sink)]
        seen = [view(x) for x in tensors]
        scores = (Bias(seen[3]), ALiBi(view(slopes)), Sink(seen[4]))
        out, lse = attention(*seen[:3], scores=scores, return_lse=True, backend=backend)
        return out, lse, *torch.autograd.grad((out, lse), tensors, (view(d_out), view(d_lse)))

    offsets = {"cu_seqlens_q": torch.tensor([0, 2, 5]), "cu_seqlens_kv": torch.tensor([0, 4, 9])}

    def packed(view):
        rows = [view(x[0].transpose(0, 1).contiguous()) for x in (q, k, v)]
        return (attention_varlen(*rows, **offsets, backend=backend),)

    def cached(view, gap=0):
        # With a gap between its rows a copy of the cache has other strides than the cache.
        k_cache, v_cache = (view(torch.zeros(2, 12, 2 + gap, 8))[:, :, :2] for _ in "kv")
        new = {"k_new": view(k.transpose(1, 2).contiguous()), "v_new": view(v.transpose(1, 2).contiguous())}
        lens = {"kv_lens": torch.tensor([0, 2]), "backend": backend}
        out = attention_decode(view(q.transpose(1, 2).contiguous()), k_cache, v_cache, **lens, **new)
        return out, k_cache, v_cache

    for call in (dense, packed, cached, lambda view: cached(view, gap=1)):
        for plain, other in zip(call(lambda x: x), call(negated), strict=True):
            assert torch.equal(plain, other)
    expected = attention(q, k, v, backend=backend)
    for tensors in ((negated(q), k, v), (q, negated(k), v), (q, k, negated(v))):
        assert torch.equal(attention(*tensors, backend=backend), expected)


def test_a_zero_tensor_without_memory_is_no_null_pointer(backend):
    """Forward-mode AD makes such zeros of what does not depend on its input."""
    x, zero = randn(1, 2, 3, 8), torch._efficientzerotensor((1, 2, 3, 8))
    for name, tensors in {"q": (zero, x, x), "k": (x, zero, x), "v": (x, x, zero)}.items():
        if backend == "cpu":
            with pytest.raises(ValueError, match=f"^{name}: was a zero tensor without memory, must have memory"):
                attention(*tensors, backend=backend)
        else:
            assert_close(attention(*tensors, backend=backend), dense_oracle(*tensors)[0])
    sink = Sink(torch._efficientzerotensor((2,)))
    assert torch.equal(
        attention(x, x, x, scores=(sink,), backend=backend),
        attention(x, x, x, scores=(Sink(torch.zeros(2)),), backend=backend),
    )


@pytest.mark.parametrize("heads_q", [33, 3])
def test_heads_that_do_not_divide(backend, heads_q):
    with pytest.raises(ValueError, match=f"q: had {heads_q} heads, must have a multiple of the 2 heads"):
        attention(randn(1, heads_q, 4, 8), randn(1, 2, 4, 8), randn(1, 2, 4, 8), backend=backend)


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", ["dense", "varlen", "decode"])
def test_one_key_gives_v_however_large_its_score(backend, dtype, sign, form):
    """|q| about 450, |k| about 1900: a finite stand-in for -inf as the first maximum would win against the score."""
    q, k = torch.full((1, 1, 2, 128), 40.0, dtype=dtype), torch.full((1, 1, 1, 128), sign * 168.0, dtype=dtype)
    v = randn(1, 1, 1, 128, dtype=dtype)
    if form == "dense":
        out, lse = attention(q.transpose(1, 2), k, v, return_lse=True, backend=backend)
    elif form == "varlen":
        one = torch.tensor([0, 1])
        out, lse = attention_varlen(
            q[0], k[0], v[0], cu_seqlens_q=one, cu_seqlens_kv=one, mask=Causal(), return_lse=True, backend=backend
        )
    else:
        out, lse = attention_decode(q, k, v, kv_lens=torch.tensor([1]), return_lse=True, backend=backend)
    assert_close(out.flatten().view(2, 128), v[0, 0].expand(2, 128))
    assert_close(lse.flatten(), torch.full((2,), sign * 40.0 * 168 * math.sqrt(128)), torch.float32)


@pytest.mark.parametrize("cap", [50.0, 1.0])
def test_softcap_saturates(cap):
    """One key, so that the LSE is the capped score itself. tanh from two exponentials would be inf/inf."""
    for score in (5000.0, 10_000.0, -10_000.0, 4400.0):
        q, k = torch.full((1, 1, 1, 1), score), torch.ones(1, 1, 1, 1)
        out, lse = attention(q, k, k, scale=1.0, scores=(Softcap(cap),), return_lse=True)
        assert lse.item() == math.copysign(cap, score)
        assert out.item() == 1.0


def test_the_lse_is_natural(backend):
    q = torch.zeros(1, 1, 3, 8)
    lse = attention(q, torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 10, 8), return_lse=True, backend=backend)[1]
    assert_close(lse, torch.full((1, 1, 3), math.log(10)))


# ---- gradients: subsets, GQA, unequal head dims ----------------------------------------------------------------------


def test_a_bias_that_alone_requires_grad():
    q, bias = randn(1, 1, 64, 16), randn(1, 1, 64, 64).requires_grad_()
    attention(q, q, q, scores=(Bias(bias),)).square().sum().backward()
    copy = bias.detach().clone().requires_grad_()
    (torch.softmax(q @ q.mT / 4 + copy, -1) @ q).square().sum().backward()
    assert_close(bias.grad, copy.grad)
    assert bias.grad.abs().max() > 0


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (4, 1)])
@pytest.mark.parametrize("dims", [(8, 8), (8, 12), (12, 8)])
def test_gqa_values_and_gradients(backend, heads, dims):
    q, k = randn(2, heads[0], 5, dims[0]), randn(2, heads[1], 7, dims[0])
    v = randn(2, heads[1], 7, dims[1])
    assert_close(attention(q, k, v, backend=backend), dense_oracle(q, k, v)[0])
    if backend == "reference":
        group = heads[0] // heads[1]
        tensors = [x.double().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(attention(*tensors).square().sum(), tensors)
        q, k, v = tensors
        s = q @ k.repeat_interleave(group, 1).mT / math.sqrt(dims[0])
        eager = torch.softmax(s, -1) @ v.repeat_interleave(group, 1)
        for got, expected in zip(grads, torch.autograd.grad(eager.square().sum(), tensors), strict=True):
            assert_close(got, expected)


def test_key_blocks_that_few_rows_see():
    """A mask of blocks with small windows inside: keys that hardly any row reads still get their gradient."""
    i = torch.arange(96)
    mask = (i[:, None] // 32 == i // 32) & (i[:, None] - i >= 0) & (i[:, None] - i < 4)
    tensors = [randn(1, 1, 96, 8).double().requires_grad_() for _ in "qkv"]
    grads = torch.autograd.grad(attention(*tensors, mask=mask).square().sum(), tensors)
    q, k, v = tensors
    eager = torch.softmax((q @ k.mT / math.sqrt(8)).masked_fill(~mask, -math.inf), -1) @ v
    for got, expected in zip(grads, torch.autograd.grad(eager.square().sum(), tensors), strict=True):
        assert_close(got, expected)


def test_a_gradient_penalty_is_not_silently_zero(backend):
    """Where a backend has no second derivatives it says so, and names the plan that has."""
    q, k, v = (randn(2, 2, 8, 16).requires_grad_() for _ in "qkv")
    plan = Plan("reference", "eager") if backend == "reference" else None
    out = attention(q, k, v, backend=backend, plan=plan)
    gradient = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    if plan is None:
        with pytest.raises(NotImplementedError, match=r"second derivatives .*plan=Plan\('reference', 'eager'"):
            torch.autograd.grad(gradient.square().sum(), k)
        return
    second = torch.autograd.grad(gradient.square().sum(), k)[0]
    q2, k2, v2 = (x.detach().clone().requires_grad_() for x in (q, k, v))
    eager = torch.softmax(q2 @ k2.mT / 4, -1) @ v2
    gradient2 = torch.autograd.grad(eager.square().sum(), q2, create_graph=True)[0]
    expected = torch.autograd.grad(gradient2.square().sum(), k2)[0]
    assert expected.abs().max() > 0
    assert_close(second, expected)


def test_vmap_with_a_mapped_bias_and_an_unmapped_mask():
    q, mask, bias = randn(3, 1, 2, 6, 8), torch.rand(6, 6) < 0.8, randn(3, 6, 6)

    def loss(x, b):
        return attention(x, x, x, mask=mask, scores=(Bias(b),)).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, bias)
    for i in range(3):
        one = torch.func.grad(loss, argnums=(0, 1))(q[i], bias[i])
        assert_close(mapped[0][i], one[0])
        assert_close(mapped[1][i], one[1])


# ---- determinism and batch invariance --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
def test_thirty_repeats_are_bitwise_equal(backend, dtype):
    q = randn(1, 4, 512, 64, dtype=dtype)
    first = attention(q, q, q, backend=backend)
    assert all(torch.equal(first, attention(q, q, q, backend=backend)) for _ in range(30))


def test_a_rows_bits_do_not_depend_on_the_rest_of_the_batch(backend):
    """One of two packed sequences grows by a row: the other's bits stay. Then a decode alone, in a batch, and moved."""
    k = randn(1900, 2, 64, dtype=torch.bfloat16)
    q = randn(12, 14, 64, dtype=torch.bfloat16)
    cu_kv = torch.tensor([0, 1800, 1900])
    rows = [
        attention_varlen(
            q[:n],
            k,
            k,
            cu_seqlens_q=torch.tensor([0, 1, n]),
            cu_seqlens_kv=cu_kv,
            batch_invariant=True,
            backend=backend,
        )[0]
        for n in (10, 11, 12)
    ]
    assert all(torch.equal(rows[0], row) for row in rows)

    cache = randn(4, 3000, 2, 64, dtype=torch.bfloat16)
    queries, lens = randn(4, 1, 4, 64, dtype=torch.bfloat16), torch.tensor([2999, 17, 1024, 2048])

    def decode(*order):
        return attention_decode(
            queries[list(order)],
            cache[list(order)],
            cache[list(order)],
            kv_lens=lens[list(order)],
            batch_invariant=True,
            backend=backend,
        )

    together = decode(0, 1, 2, 3)
    assert torch.equal(decode(3, 2, 1, 0).flip(0), together)
    assert all(torch.equal(decode(b)[0], together[b]) for b in range(4))


def test_the_order_of_pages_changes_no_bit(backend):
    pages = randn(12, 16, 2, 64)
    q = randn(2, 1, 4, 64)
    table = torch.arange(12).view(2, 6)
    first = attention_decode(q, pages, pages, kv_lens=torch.tensor([90, 33]), page_table=table, backend=backend)
    order = torch.randperm(12)
    moved = torch.empty_like(pages)
    moved[order] = pages
    lens = torch.tensor([90, 33])
    assert torch.equal(first, attention_decode(q, moved, moved, kv_lens=lens, page_table=order[table], backend=backend))


# ---- paged caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal_mask", [None, Causal()])
@pytest.mark.parametrize("seq_q", [1, 4])
def test_the_tail_of_the_last_page_changes_no_bit(backend, causal_mask, seq_q):
    k, v = randn(6, 16, 2, 32), randn(6, 16, 2, 32)
    q, table, lens = randn(2, seq_q, 4, 32), torch.tensor([[5, 1, 3], [0, 2, 4]]), torch.tensor([35, 17])
    results = []
    for filler in (0.0, math.nan, math.inf):
        for x in (k, v):
            x[3, 3:], x[2, 1:], x[4] = filler, filler, filler
        results.append(attention_decode(q, k, v, kv_lens=lens, page_table=table, mask=causal_mask, backend=backend))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("junk", [-1, 2**40, -(2**63)])
def test_unused_table_entries_are_never_read(backend, junk):
    """The table's used part ends its allocation (an out-of-range read has nothing behind it); the rest may be junk."""
    pages = randn(3, 16, 1, 8)
    q, lens = randn(2, 1, 1, 8), torch.tensor([17, 16])
    tight = torch.tensor([[2, 0], [1, junk]])
    wide = torch.tensor([[2, 0, junk, junk], [1, junk, junk, junk]])
    results = [
        attention_decode(q, pages, pages, kv_lens=lens, page_table=table, backend=backend) for table in (tight, wide)
    ]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("page_size", [1, 2, 16, 128, 1000])
def test_the_page_size_changes_no_value(backend, page_size):
    length, dim = 1500, 256
    k, v = randn(length, 2, dim, dtype=torch.bfloat16), randn(length, 2, dim, dtype=torch.bfloat16)
    q = randn(1, 1, 8, dim, dtype=torch.bfloat16)
    dense = attention_decode(q, k[None], v[None], kv_lens=torch.tensor([length]), backend=backend)
    count = -(-length // page_size)
    table = torch.randperm(count)[None]
    caches = []
    for x in (k, v):
        padded = torch.full((count * page_size, 2, dim), math.nan, dtype=x.dtype)
        padded[:length] = x
        cache = torch.empty(count, page_size, 2, dim, dtype=x.dtype)
        cache[table[0]] = padded.view(count, page_size, 2, dim)
        caches.append(cache)
    out = attention_decode(q, *caches, kv_lens=torch.tensor([length]), page_table=table, backend=backend)
    assert_close(out, dense)


def test_keys_and_values_as_halves_of_one_buffer(backend):
    buffer = randn(5, 2, 4, 2, 8)
    q, table, lens = randn(2, 1, 2, 8), torch.tensor([[4, 0], [3, 1]]), torch.tensor([7, 5])
    views = buffer[:, 0], buffer[:, 1]
    assert views[0].stride(0) == 2 * 4 * 2 * 8
    copies = [x.contiguous() for x in views]
    results = [
        attention_decode(q, *caches, kv_lens=lens, page_table=table, backend=backend) for caches in (views, copies)
    ]
    assert torch.equal(results[0], results[1])


# ---- split KV and combine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_q", [1, 2, 5])
@pytest.mark.parametrize("mask", [None, Causal()])
def test_several_splits_of_several_sequences(backend, seq_q, mask):
    """Lengths around the split's own size, more than one query, both layouts of the query's memory."""
    lens = [1023, 1024, 1025, 2500]
    k, v = randn(4, 2500, 1, 16), randn(4, 2500, 1, 16)
    q = randn(4, seq_q, 4, 16)
    out = attention_decode(q, k, v, kv_lens=torch.tensor(lens), mask=mask, backend=backend)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    again = attention_decode(transposed, k, v, kv_lens=torch.tensor(lens), mask=mask, backend=backend)
    assert torch.equal(out, again)
    for b, n in enumerate(lens):
        s = (q[b].transpose(0, 1).double() @ k[b, :n, 0].double().T) / 4
        if mask is not None:
            s = s.masked_fill(torch.ones(seq_q, n).triu(n - seq_q + 1).bool(), -math.inf)
        expected = torch.softmax(s, -1) @ v[b, :n, 0].double()
        assert_close(out[b].transpose(0, 1), expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("seq_q", [1, 3])
def test_few_dense_queries_on_many_keys(backend, layout, seq_q):
    q, k, v = randn(2, 4, seq_q, 16), randn(2, 2, 5000, 16), randn(2, 2, 5000, 16)
    given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(*given, layout=layout, mask=Causal(), return_lse=True, backend=backend)
    s = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 4
    s = s.masked_fill(torch.ones(seq_q, 5000).triu(5001 - seq_q).bool(), -math.inf)
    expected = torch.softmax(s, -1) @ v.double().repeat_interleave(2, 1)
    assert_close(out if layout == "bhsd" else out.transpose(1, 2), expected)
    assert_close(lse, torch.logsumexp(s, -1))


# ---- quantised caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
def test_quantised_caches_equal_attention_over_their_values(backend, dtype, per_head, page_size):
    stored_k, stored_v = (randn(3, 8, 2, 16).mul(20).round().clamp(-100, 100).to(dtype) for _ in "kv")
    k_scale, v_scale = torch.tensor([0.25, 0.0625])[: 1 + per_head], torch.tensor([0.5, 0.125])[: 1 + per_head]
    q, lens = randn(3, 2, 4, 16, dtype=torch.bfloat16), torch.tensor([8, 3, 6])
    caches, table = [stored_k, stored_v], None
    if page_size:
        table = torch.arange(6).view(3, 2)
        caches = [x.view(6, 4, 2, 16) for x in caches]
    out = or_skip(
        attention_decode,
        q,
        *caches,
        kv_lens=lens,
        page_table=table,
        k_scale=k_scale,
        v_scale=v_scale,
        mask=Causal(),
        backend=backend,
    )
    k, v = stored_k.float() * k_scale.view(-1, 1), stored_v.float() * v_scale.view(-1, 1)
    for b, h in itertools.product(range(3), range(4)):
        n = int(lens[b])
        assert_close(out[b, :, h], oracle(q[b, :, h], k[b, :n, h // 2], v[b, :n, h // 2], causal(2, n))[0])


# ---- windows, ALiBi, sinks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [8, 9, 10])
def test_a_window_of_w_tokens_is_oneself_and_w_minus_one_others(backend, seq):
    width = 8
    q = randn(1, 1, seq, 8)
    out = attention(q, q, q, mask=Window(width - 1, 0), backend=backend)
    assert_close(out, dense_oracle(q, q, q, lambda i, j: j <= i and i - j < width)[0])
    assert torch.equal(out, attention(q, q, q, mask=Causal(), backend=backend)) == (seq <= width)


@pytest.mark.parametrize("huge", [30, 2**31, 2**40, 2**62, 2**70])
def test_a_window_larger_than_everything_is_no_window(backend, huge):
    q, k = randn(1, 1, 9, 8), randn(1, 1, 4, 8)
    none = attention(q, k, k, backend=backend)
    assert torch.equal(attention(q, k, k, mask=Window(huge, huge), backend=backend), none)
    assert torch.equal(
        attention(q, k, k, mask=Window(huge, 0), backend=backend), attention(q, k, k, mask=Causal(), backend=backend)
    )


def test_alibi_of_one_distance_is_one_bias_in_every_form():
    """A training call, a packed one and a decode call: same slopes, same distances, same result."""
    k, v, slopes = randn(2, 1, 6, 8), randn(2, 1, 6, 8), torch.tensor([0.5, 0.25])
    q = randn(2, 2, 3, 8)
    scores = (ALiBi(slopes),)
    distance = (torch.arange(3)[:, None] + 3 - torch.arange(6)).abs()
    s = (q.double() @ k.double().mT) / math.sqrt(8) - slopes.view(2, 1, 1) * distance
    expected = torch.softmax(s, -1) @ v.double()
    assert_close(attention(q, k, v, scores=scores), expected)
    packed = attention_varlen(
        q.transpose(1, 2).flatten(0, 1),
        k.transpose(1, 2).flatten(0, 1),
        v.transpose(1, 2).flatten(0, 1),
        cu_seqlens_q=torch.tensor([0, 3, 6]),
        cu_seqlens_kv=torch.tensor([0, 6, 12]),
        scores=scores,
    )
    assert_close(packed.view(2, 3, 2, 8).transpose(1, 2), expected)
    decoded = attention_decode(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), kv_lens=torch.tensor([6, 6]), scores=scores
    )
    assert_close(decoded.transpose(1, 2), expected)
    by_batch = attention(q, k, v, scores=(ALiBi(slopes.expand(2, 2)),))
    assert_close(by_batch, expected)


def test_a_sink_without_keys_and_a_sink_far_above_the_scores():
    q, cache = randn(1, 1, 2, 8), randn(1, 4, 2, 8)
    sink = (Sink(torch.tensor([0.5, 100.0])),)
    out, lse = attention_decode(q, cache, cache, kv_lens=torch.tensor([0]), scores=sink, return_lse=True)
    assert torch.equal(out, torch.zeros(1, 1, 2, 8))
    assert torch.equal(lse.flatten(), torch.tensor([0.5, 100.0]))
    out, lse = attention_decode(q, cache, cache, kv_lens=torch.tensor([4]), scores=sink, return_lse=True)
    assert lse[0, 1, 0].item() == pytest.approx(100.0, abs=1e-5)
    assert out[0, 0, 1].abs().max() < 1e-30
    s = (cache[0, :, 0].double() @ q[0, 0, 0].double()) / math.sqrt(8)
    weights = torch.softmax(torch.cat((s, torch.tensor([0.5]))), 0)[:4]
    assert_close(out[0, 0, 0], weights @ cache[0, :, 0].double())


# ---- unequal head dims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(128, 512), (64, 128), (192, 128), (576, 512), (512, 512), (1, 3), (3, 1), (255, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_values_head_dim(backend, dims, dtype):
    q, k = randn(1, 2, 5, dims[0], dtype=dtype), randn(1, 1, 70, dims[0], dtype=dtype)
    v = randn(1, 1, 70, dims[1], dtype=dtype)
    out = or_skip(attention, q, k, v, mask=Causal(), backend=backend)
    assert out.shape == (1, 2, 5, dims[1])
    assert_close(out, dense_oracle(q, k, v, causal(5, 70))[0])
    decoded = or_skip(
        attention_decode,
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        kv_lens=torch.tensor([70]),
        mask=Causal(),
        backend=backend,
    )
    assert_close(decoded.transpose(1, 2), dense_oracle(q, k, v, causal(5, 70))[0])


@pytest.mark.parametrize("page_size", [0, 16])
def test_values_as_a_view_of_the_keys(backend, page_size):
    """Multi-head latent attention: one cache, whose first 512 channels are also the values."""
    cache = randn(2, 48, 1, 576, dtype=torch.bfloat16)
    q, lens = randn(2, 1, 16, 576, dtype=torch.bfloat16), torch.tensor([48, 19])
    table = torch.arange(6).view(2, 3) if page_size else None
    k_cache = cache.view(6, 16, 1, 576) if page_size else cache
    out = or_skip(attention_decode, q, k_cache, k_cache[..., :512], kv_lens=lens, page_table=table, backend=backend)
    for b in range(2):
        keys = cache[b, : lens[b], 0]
        expected = torch.stack([oracle(q[b, :, h], keys, keys[:, :512])[0] for h in range(16)], 1)
        assert_close(out[b], expected)


# ---- fresh state, wrappers, meta -------------------------------------------------------------------------------------


def test_the_first_call_equals_the_second(backend):
    for seq in (1, 33, 200, 2100):
        q = randn(1, 1, seq, 24)
        prepared.CALLS.clear()
        assert torch.equal(attention(q, q, q, backend=backend), attention(q, q, q, backend=backend))


def test_packed_sequences_do_not_see_each_other_by_default(backend):
    q = randn(10, 1, 8)
    cu = torch.tensor([0, 4, 10])
    before = attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend)
    k = q.clone()
    k[4:] = 9.0
    after = attention_varlen(q, k, k, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_fewer_packed_keys_than_queries(backend):
    """Thousands of queries on a few hundred keys: each side is unpacked by its own lengths."""
    lens_q, lens_kv = [900, 300], [64, 190]
    cu_q, cu_kv = (torch.tensor([0, *lens]).cumsum(0) for lens in (lens_q, lens_kv))
    q, k = randn(1200, 1, 8), randn(254, 1, 8)
    out = attention_varlen(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, backend=backend)
    for b in range(2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        s = (q[rows, 0].double() @ k[keys, 0].double().T) / math.sqrt(8)
        assert_close(out[rows, 0], torch.softmax(s, -1) @ k[keys, 0].double())


def test_autocast_changes_nothing(backend):
    q = randn(1, 2, 6, 8)
    expected = attention(q, q, q, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, q, q, backend=backend), expected)


def test_meta_tensors_give_meta_results():
    q = torch.empty(65_536, 4, 3, 8, device="meta")
    out, lse = attention(q, q, q, mask=Causal(), return_lse=True)
    real = attention(*[torch.zeros(2, 4, 3, 8)] * 3, return_lse=True)
    assert out.device.type == "meta"
    assert out.shape == q.shape
    assert lse.shape == (65_536, 4, 3)
    assert (out.dtype, lse.dtype) == (real[0].dtype, real[1].dtype)


@pytest.mark.parametrize("fake", [False, True])
def test_packed_sequences_and_caches_without_values_give_results_without_values(fake):
    """Lengths cannot be read there, and need not be: the results' shapes do not depend on them."""
    with FakeTensorMode() if fake else torch.device("meta"):
        lens, table = torch.empty(2, dtype=torch.int64), torch.empty(2, 3, dtype=torch.int32)
        q, k = torch.empty(7, 4, 8, requires_grad=True), torch.empty(9, 2, 8)
        bounds = torch.empty(3, dtype=torch.int64)
        packed = attention_varlen(q, k, k, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, mask=Causal(), return_lse=True)
        (grad,) = torch.autograd.grad(packed[0], q, torch.empty(7, 4, 8))
        new, cache, step = torch.empty(2, 1, 2, 8), torch.empty(6, 4, 2, 8), torch.empty(2, 1, 4, 8)
        paged = {"kv_lens": lens, "page_table": table, "k_new": new, "v_new": new[..., :5]}
        cached = attention_decode(step, cache, cache[..., :5], **paged, return_lse=True)
        with pytest.raises(UnsupportedError, match=r"on meta|a tracer or a tensor subclass"):
            attention_decode(step, cache, cache, **{**paged, "v_new": new}, backend="cpu")
    assert [x.shape for x in (*packed, grad)] == [(7, 4, 8), (4, 7), (7, 4, 8)]
    assert [x.shape for x in cached] == [(2, 1, 4, 5), (2, 4, 1)]
    for tensor in (*packed, *cached, grad):
        assert tensor.dtype == torch.float32
        assert isinstance(tensor, FakeTensor) if fake else tensor.is_meta
