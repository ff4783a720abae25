"""The five functions' own contract: results, layouts, the LSE, gradients, prepared calls. Values on every backend."""

import gc
import inspect
import math
import weakref

import pytest
import torch

import attnworks
from attnworks import (
    Bias,
    Causal,
    Sink,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_decode,
    attention_varlen,
    explain,
    prepared,
)
from helpers import assert_close, causal, dense_oracle, or_skip, oracle, randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_the_public_names_fit_one_screen():
    assert sorted(attnworks.__all__) == attnworks.__all__
    assert all(hasattr(attnworks, name) for name in attnworks.__all__)
    assert len(attnworks.__all__) <= 24


def test_siblings_take_the_same_options_with_the_same_defaults():
    base = inspect.signature(attention).parameters
    for sibling, lacks in (
        (attention_varlen, {"layout"}),
        (attention_decode, {"layout", "deterministic"}),
        (explain, set()),
    ):
        theirs = inspect.signature(sibling).parameters
        for name, parameter in base.items():
            if name not in {"q", "k", "v"} | lacks:
                assert theirs[name].default == parameter.default, (sibling.__name__, name)
                assert theirs[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_four_keys_and_two_channels_by_hand(backend):
    """Q Kᵀ = [0, ln 2, ln 4, ln 8] at scale 1: probabilities 1/15, 2/15, 4/15, 8/15."""
    ln2 = math.log(2)
    q = torch.tensor([[1.0, 0.0]]).view(1, 1, 1, 2)
    k = torch.tensor([[0.0, 9.0], [ln2, -9.0], [2 * ln2, 5.0], [3 * ln2, 1.0]]).view(1, 1, 4, 2)
    v = torch.tensor([[15.0, 0.0], [0.0, 15.0], [15.0, 15.0], [-15.0, 30.0]]).view(1, 1, 4, 2)
    out, lse = or_skip(attention, q, k, v, scale=1.0, return_lse=True, backend=backend)
    assert_close(out.flatten(), torch.tensor([1 + 4 - 8, 2 + 4 + 16]))
    assert_close(lse.flatten(), torch.tensor([math.log(15)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_values_in_both_layouts_and_all_dtypes(backend, dtype, layout, heads):
    q, k = randn(2, heads[0], 5, 8, dtype=dtype), randn(2, heads[1], 7, 8, dtype=dtype)
    v = randn(2, heads[1], 7, 12, dtype=dtype)
    expected, expected_lse = dense_oracle(q, k, v, causal(5, 7))
    given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
    out, lse = or_skip(attention, *given, mask=Causal(), layout=layout, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(out if layout == "bhsd" else out.transpose(1, 2), expected)
    assert_close(lse, expected_lse, torch.promote_types(dtype, torch.float32))


def test_without_return_lse_the_result_is_the_same_out(backend):
    q = randn(1, 2, 9, 8)
    alone = attention(q, q, q, backend=backend)
    assert torch.equal(alone, attention(q, q, q, return_lse=True, backend=backend)[0])


def test_scale_is_used_as_given(backend):
    q, k, v = randn(1, 1, 3, 8), randn(1, 1, 4, 8), randn(1, 1, 4, 8)
    for scale in (0.0, 1, -0.5, 3.0):
        assert_close(attention(q, k, v, scale=scale, backend=backend), dense_oracle(q, k, v, scale=scale)[0])


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (4, 4), (1, 8), (8, 1)])
def test_masks_by_their_definition(backend, align, sizes):
    seq_q, seq_kv = sizes
    shift = seq_kv - seq_q if align == "bottom-right" else 0
    q, k, v = randn(1, 1, seq_q, 8), randn(1, 1, seq_kv, 8), randn(1, 1, seq_kv, 8)
    for mask, left, right in (
        (Causal(align), 99, 0),
        (Window(2, 0, align), 2, 0),
        (Window(None, 1, align), 99, 1),
        (Window(0, None, align), 0, 99),
        (Window(1, 1, align) & Causal(align), 1, 0),
    ):
        out, lse = attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        expected = dense_oracle(q, k, v, lambda i, j, n=left, m=right: i + shift - n <= j <= i + shift + m)
        assert_close(out, expected[0])
        assert_close(lse, expected[1])


def test_varlen_equals_each_sequence_by_itself(backend):
    lens_q, lens_kv = [3, 0, 5, 1], [4, 2, 0, 6]
    cu_q, cu_kv = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_kv))
    q, k, v = randn(sum(lens_q), 4, 8), randn(sum(lens_kv), 2, 8), randn(sum(lens_kv), 2, 6)
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, mask=Causal(), return_lse=True, backend=backend
    )
    assert lse.shape == (4, sum(lens_q))
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        for h in range(4):
            expected = oracle(q[rows, h], k[keys, h // 2], v[keys, h // 2], causal(lens_q[b], lens_kv[b]))
            assert_close(out[rows, h], expected[0])
            assert_close(lse[h, rows], expected[1])


@pytest.mark.parametrize("seq_q", [1, 3])
@pytest.mark.parametrize("page_size", [0, 1, 4, 7])
def test_decode_equals_attention_over_the_used_keys(backend, seq_q, page_size):
    lens = [1, 14, 0, 6]
    q, k, v = randn(4, seq_q, 4, 8), randn(4, 14, 2, 8), randn(4, 14, 2, 6)
    k_cache, v_cache, table = k, v, None
    if page_size:
        pages = -(-14 // page_size)
        table = torch.randperm(4 * pages).view(4, pages).int()
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - 14)) for x in (k, v)]
        k_cache, v_cache = (torch.empty(4 * pages, page_size, *x.shape[2:]) for x in padded)
        k_cache[table.long()] = padded[0].view(4, pages, page_size, 2, 8)
        v_cache[table.long()] = padded[1].view(4, pages, page_size, 2, 6)
    for mask, visible in ((None, None), (Causal(), causal)):
        out, lse = or_skip(
            attention_decode,
            q,
            k_cache,
            v_cache,
            kv_lens=torch.tensor(lens),
            page_table=table,
            mask=mask,
            return_lse=True,
            backend=backend,
        )
        assert out.shape == (4, seq_q, 4, 6)
        assert lse.shape == (4, 4, seq_q)
        for b, n in enumerate(lens):
            for h in range(4):
                sees = visible(seq_q, n) if visible else None
                expected = oracle(q[b, :, h], k[b, :n, h // 2], v[b, :n, h // 2], sees)
                assert_close(out[b, :, h], expected[0])
                assert_close(lse[b, h], expected[1])


def test_inputs_are_left_as_they_were(backend):
    q, k, v = randn(1, 2, 6, 8), randn(1, 2, 6, 8), randn(1, 2, 6, 8)
    before = [x.clone() for x in (q, k, v)]
    attention(q, k, v, mask=Causal(), backend=backend)
    assert all(torch.equal(x, old) for x, old in zip((q, k, v), before, strict=True))


def test_repeats_are_bitwise_equal(backend):
    q, k, v = randn(2, 4, 130, 16), randn(2, 2, 700, 16), randn(2, 2, 700, 16)
    first = attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    for _ in range(20):
        again = attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", range(1, 32))
def test_gradients_for_every_subset_of_inputs(needs):
    """gradcheck in fp64: q, k, v, bias and sink by each subset that requires grad, out and LSE both differentiated."""
    shapes = ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 3), (1, 2, 3, 5), (2,))
    tensors = [randn(*shape).double().requires_grad_(bool(needs >> i & 1)) for i, shape in enumerate(shapes)]

    def call(q, k, v, bias, sink):
        return attention(q, k, v, mask=Causal(), scores=(Bias(bias), Sink(sink)), return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


def test_auto_differentiates_where_the_native_backend_refuses():
    q = randn(1, 1, 4, 8).double().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"dtype torch\.float64"):
        attention(q, q, q, backend="cpu")
    attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_second_order_forward_mode_and_vmap():
    q, k, v = (randn(1, 1, 3, 4).double().requires_grad_() for _ in "qkv")
    assert torch.autograd.gradgradcheck(attention, (q, k, v))
    with torch.no_grad():
        tangent = torch.func.jvp(lambda x: attention(x, k, v), (q,), (torch.ones_like(q),))[1]
        step = (attention(q + 1e-6, k, v) - attention(q - 1e-6, k, v)) / 2e-6
        torch.testing.assert_close(tangent, step, atol=1e-8, rtol=1e-6)
        batched = randn(3, 1, 1, 3, 4).double()
        looped = torch.stack([attention(x, k, v) for x in batched])
        torch.testing.assert_close(torch.func.vmap(lambda x: attention(x, k, v))(batched), looped)


# ---- prepared calls --------------------------------------------------------------------------------------------------


def test_a_prepared_call_is_used_again_only_for_the_same_question():
    prepared.forget()
    q, other = randn(1, 1, 4, 8), randn(1, 1, 5, 8)
    attention(q, q, q)
    attention(q + 1, q, q)
    assert len(prepared.CALLS) == 1
    for change in (
        {"mask": Causal()},
        {"mask": Causal("top-left")},
        {"scale": 1.0},
        {"return_lse": True},
        {"layout": "bshd"},
        {"backend": "reference"},
        {"scores": (Softcap(3.0),)},
    ):
        before = len(prepared.CALLS)
        attention(q, q, q, **change)
        assert len(prepared.CALLS) == before + 1, change
    attention(other, q, q)
    attention(q.transpose(2, 3).contiguous().transpose(2, 3)[:, :, :, :4], q[..., :4], q)


def test_a_prepared_decode_reads_lengths_and_pages_anew():
    prepared.forget()
    q, pages = randn(2, 1, 2, 8), randn(6, 4, 2, 8)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]])

    def run(lens, table=table, **new):
        return attention_decode(q, pages, pages, kv_lens=torch.tensor(lens), page_table=table, **new)

    assert not torch.equal(run([3, 9]), run([12, 9]))
    assert not torch.equal(run([3, 9]), run([3, 9], table.flip(1)))
    assert len(prepared.CALLS) == 1
    for wrong, message in (([13, 9], "kv_lens"), ([-1, 9], "kv_lens"), ([12, 9, 1], "kv_lens")):
        with pytest.raises(ValueError, match=message):
            run(wrong)
    with pytest.raises(ValueError, match="page_table"):
        run([12, 9], table + 1)
    assert torch.equal(run([12, 3], torch.tensor([[0, 1, 2], [3, 99, -7]])), run([12, 3]))  # nobody follows those
    with pytest.raises(ValueError, match="kv_lens"):
        run([12, 9], k_new=randn(2, 1, 2, 8), v_new=randn(2, 1, 2, 8))
    with pytest.raises(TypeError, match="k_scale"):
        attention_decode(q, pages.to(torch.int8), pages.to(torch.int8), kv_lens=torch.tensor([1, 1]), page_table=table)


def test_prepared_packed_sequences_read_their_offsets_anew():
    prepared.forget()
    q = randn(7, 2, 8)

    def run(*offsets):
        return attention_varlen(q, q, q, cu_seqlens_q=torch.tensor(offsets), cu_seqlens_kv=torch.tensor(offsets))

    assert not torch.equal(run(0, 3, 7), run(0, 4, 7))
    assert len(prepared.CALLS) == 1
    for wrong in ((0, 4, 8), (1, 4, 7), (0, 5, 4)):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            run(*wrong)


def test_the_number_of_prepared_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 8)
    for n in range(1, 30):
        q = randn(1, 1, n, 4)
        attention(q, q, q)
        assert len(prepared.CALLS) <= max(8, 1)


def test_prepared_calls_keep_no_tensor_and_no_user_function_alive():
    class Captured:
        pass

    def call():
        q, bias, captured = randn(1, 1, 4, 8), randn(4, 4), Captured()
        attention(q, q, q, scores=(Bias(bias), lambda s, b, h, q, k: s + 0 * len(str(captured))))
        attention(q, q, q, mask=lambda b, h, q, k: (k <= q) & (captured is not None))
        return [weakref.ref(x) for x in (q, bias, captured)]

    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_functions_that_say_the_same_share_a_prepared_call_but_not_what_they_captured():
    prepared.forget()
    q = randn(1, 2, 6, 8)
    documents = torch.tensor([[[0, 0, 0, 1, 1, 1]], [[0, 0, 1, 1, 2, 2]]])
    for doc in documents:
        found = attention(q, q, q, mask=Causal() & (lambda b, h, i, j, doc=doc: doc[b, i] == doc[b, j]))
        expected = dense_oracle(q, q, q, lambda i, j, doc=doc: j <= i and bool(doc[0, i] == doc[0, j]))
        assert_close(found, expected[0])
    for factor in (1.0, -2.0):
        slope = torch.tensor(factor)
        found = attention(q, q, q, scores=(lambda s, b, h, i, j, slope=slope: s * slope,))
        assert_close(found, dense_oracle(q, q, q, scale=factor / math.sqrt(8))[0])
    assert len(prepared.CALLS) == 2


def test_a_changed_closure_or_tensor_is_seen_by_the_next_call():
    q, window, doc = randn(1, 1, 6, 8), 1, torch.zeros(1, 6)

    def mask(b, h, i, j):
        return ((i - j).abs() <= window) & (doc[b, i] == doc[b, j])

    def expect(visible):
        assert_close(attention(q, q, q, mask=mask), dense_oracle(q, q, q, visible)[0])

    expect(lambda i, j: abs(i - j) <= 1)
    window = 3
    expect(lambda i, j: abs(i - j) <= 3)
    doc[0, 3:] = 1
    expect(lambda i, j: abs(i - j) <= 3 and (i < 3) == (j < 3))
    doc = torch.zeros(1, 6)
    expect(lambda i, j: abs(i - j) <= 3)


def test_a_function_that_cannot_be_traced_is_called_as_before():
    prepared.forget()
    q = randn(1, 1, 6, 8)
    found = attention(q, q, q, mask=lambda b, h, i, j: j <= i if len(i.shape) == 4 and i.numel() else j < 0)
    assert_close(found, dense_oracle(q, q, q, causal(6, 6))[0])
    mapped = attention(q, q, q, mask=lambda b, h, i, j: torch.vmap(lambda row: row >= j[0, 0, 0])(i[0, 0, :, 0]))
    assert_close(mapped, dense_oracle(q, q, q, causal(6, 6))[0])
    assert not prepared.CALLS


def test_a_captured_tensor_on_another_device_is_named():
    q, table = randn(1, 1, 6, 8), torch.zeros(6, device="meta")

    def by_table(b, h, i, j):
        return table[i] == 0

    with pytest.raises(ValueError, match=r"^mask: a tensor captured by by_table: was on meta, must be on cpu like q"):
        attention(q, q, q, mask=by_table)
    with pytest.raises(ValueError, match=r"^scores: a tensor captured by <lambda>: was on meta"):
        attention(q, q, q, scores=(lambda s, b, h, i, j: s + table[j],))


def test_gradients_reach_what_a_function_captured():
    q = randn(1, 2, 3, 4).double()
    for needs in ((True, False), (False, True), (True, True)):
        table, scale = randn(2, 3).double().requires_grad_(needs[0]), randn(2).double().requires_grad_(needs[1])

        def call(table, scale):
            return attention(q, q, q, mask=Causal(), scores=(lambda s, b, h, i, j: s * scale[h] + table[h, j],))

        assert torch.autograd.gradcheck(call, (table, scale))


def test_memory_does_not_grow_from_call_to_call(backend):
    """Objects alive after 500 calls are those alive after a hundred; freed results leave no tensor behind."""
    q = randn(1, 2, 9, 8)

    def run(calls):
        for _ in range(calls):
            attention(q, q, q, mask=Causal(), return_lse=True, backend=backend)
        gc.collect()
        return len(gc.get_objects())

    run(100)
    assert run(500) - run(100) <= 4
