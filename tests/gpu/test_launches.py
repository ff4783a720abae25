"""How calls reach the GPU: streams, graphs, the current device, alignment, and the same bits every time."""

import math
from dataclasses import replace

import pytest
import torch

from attnworks import Causal, attention, attention_decode, attention_varlen, explain, tilemap
from attnworks.plan import Plan
from gpu_helpers import assert_close, exact, gradients, randn

FP16, FP32 = torch.float16, torch.float32


def qkv(batch=2, heads=4, seq=300, dim=64, **options):
    return [randn(batch, heads, seq, dim, **options) for _ in "qkv"]


def decode_inputs(length=3000):
    q, k, v = randn(2, 1, 8, 64), randn(2, length, 2, 64), randn(2, length, 2, 64)
    return q, k, v, torch.tensor([length, length // 2], device="cuda", dtype=torch.int32)


def test_a_second_stream():
    """The inputs are made on the stream late: a kernel on another stream would read them too early."""
    stream = torch.cuda.Stream()
    made = qkv()
    expected = attention(*made, backend="triton")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in made]
        torch.cuda._sleep(50_000_000)
        for target, source in zip(late, made, strict=True):
            target.copy_(source)
        out = attention(*late, backend="triton")
    stream.synchronize()
    assert torch.equal(out, expected)


def test_two_streams_at_once():
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    problems = [qkv(seq=2048), qkv(seq=2048)]
    expected = [attention(*each, mask=Causal(), backend="triton") for each in problems]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(5):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(attention(*problems[number], mask=Causal(), backend="triton"))
    torch.cuda.synchronize()
    for outs, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    here = [x.requires_grad_() for x in qkv(dtype=FP16)]
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    results = []
    for leaves in (here, there):
        out = attention(*leaves, mask=Causal(), backend="triton")
        results.append([out, *gradients(out, leaves, torch.ones_like(out))])
    assert torch.cuda.current_device() == 0
    for one, other in zip(*results, strict=True):
        assert other.device.index == 1
        assert torch.equal(one.cpu(), other.cpu())


def captured(call, warm_up=3):
    """(the graph, what the call gave while it was captured)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.fixture
def plain_memory():
    """Graphs are captured as users capture them: fresh memory is not filled."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("plain_memory")
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "boolean mask"])
def test_a_graph_of_the_forward_replays_with_new_values(masked):
    q, k, v = qkv()
    mask = torch.rand(300, 300, device="cuda") < 0.5 if masked else Causal()
    graph, out = captured(lambda: attention(q, k, v, mask=mask, backend="triton"))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    expected = attention(q, k, v, mask=mask, backend="triton")
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("plain_memory")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_graph_outlives_the_mask_that_its_tile_map_was_made_of(backend):
    q, k, v = (x.bfloat16() for x in qkv())
    documents = torch.arange(300, device="cuda") // 70

    def same(b, h, i, j):
        return documents[i] == documents[j]

    chosen = explain(q, k, v, mask=same)
    if not next(verdict for verdict in chosen.verdicts if verdict.backend == backend).supported:
        pytest.skip(str(chosen))
    graph, out = captured(lambda: attention(q, k, v, mask=same, backend=backend))
    expected = attention(q, k, v, mask=same, backend=backend)
    tilemap._CACHE.clear()  # as happens when many masks have been met since
    kept = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for size in (*range(1, 4000, 7), 2**20)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and kept


@pytest.mark.usefixtures("plain_memory")
def test_a_graph_of_decode_replays_with_new_lengths():
    q, k, v, lens = decode_inputs()
    graph, out = captured(lambda: attention_decode(q, k, v, kv_lens=lens, backend="triton"))
    lens.copy_(torch.tensor([17, 2999]))
    graph.replay()
    expected = attention_decode(q, k, v, kv_lens=lens, backend="triton")
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("plain_memory")
def test_a_graph_of_forward_and_backward():
    leaves = [x.requires_grad_() for x in qkv()]
    d_out = torch.randn_like(leaves[0])

    def step():
        out = attention(*leaves, mask=Causal(), backend="triton")
        return out, *gradients(out, leaves, d_out)

    graph, results = captured(step)
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    expected = step()
    graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_thirty_runs_give_the_same_bits(mask):
    """fp16, B2 N1024 H12 D64, forward and backward."""
    leaves = [x.requires_grad_() for x in qkv(2, 12, 1024, dtype=FP16)]
    d_out = torch.randn_like(leaves[0])
    first = None
    for _ in range(30):
        out, lse = attention(*leaves, mask=mask, return_lse=True, deterministic=True, backend="triton")
        found = [out, lse, *gradients(out, leaves, d_out)]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))


def test_thirty_decodes_give_the_same_bits():
    q, k, v, lens = decode_inputs(16_391)
    outs = [attention_decode(q, k, v, kv_lens=lens, backend="triton") for _ in range(30)]
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_pointers_of_any_alignment(dtype):
    """One compiled kernel must not serve pointers of both kinds: aligned, then one element on, then aligned again."""
    made = [x.requires_grad_() for x in qkv(seq=100, dtype=dtype)]
    d_out = torch.randn_like(made[0])
    shifted = []
    for x in made:
        memory = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")
        shifted.append(memory[1:].view(x.shape).copy_(x.detach()).requires_grad_())
    results = []
    for leaves in (made, shifted, made, [made[0], shifted[1], made[2]]):
        out = attention(*leaves, backend="triton")
        results.append([out, *gradients(out, leaves, d_out)])
    expected = exact(*(x.detach() for x in made))
    for found in results:
        assert_close(found[0], expected)
        for one, other in zip(results[0], found, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


DESCRIBED = Plan("triton", "q_outer", 64, 64, isa="tma", warps=4, stages=3)


def described_as(kind, x):
    """``x`` (batch, heads, rows, dim) in other memory, NaN around it."""
    batch, heads, rows, dim = x.shape
    if kind == "row-major":
        place = torch.full((batch, rows + 7, heads, dim), math.nan, dtype=x.dtype, device="cuda")[:, :rows].transpose(
            1, 2
        )
    elif kind == "a longer one":
        place = torch.full((batch, heads, rows + 64, dim), math.nan, dtype=x.dtype, device="cuda")[:, :, :rows]
    else:  # an address that no descriptor can have: the call goes without
        place = torch.full((x.numel() + 8,), math.nan, dtype=x.dtype, device="cuda")[1 : x.numel() + 1].view(x.shape)
    return place.copy_(x.detach()).requires_grad_()


@pytest.mark.parametrize("kind", ["row-major", "a longer one", "an address between"])
def test_memory_that_tiles_are_described_in(kind):
    made = [randn(2, heads, 333, 64).requires_grad_() for heads in (4, 2, 2)]
    d_out = torch.randn_like(made[0])
    results = []
    for leaves, plan in ((made, replace(DESCRIBED, isa="")), ([described_as(kind, x) for x in made], DESCRIBED)):
        out = attention(*leaves, mask=Causal(), plan=plan)
        results.append([out, *gradients(out, leaves, d_out)])
    assert_close(results[0][0], exact(*(x.detach() for x in made), causal=True))
    assert torch.equal(results[1][0], results[0][0])
    for one, other in zip(*results, strict=True):
        assert_close(other, one.double())


@pytest.mark.parametrize("scale", [None, 4.0], ids=["usual", "maxima that rise"])
@pytest.mark.parametrize("sizes", [(333, 333), (64, 1000), (1, 65)])
@pytest.mark.parametrize("dim", [80, 128])
def test_queries_held_in_registers_give_the_same_bits(dim, sizes, scale):
    q, k, v = randn(2, 4, sizes[0], dim), *(randn(2, 2, sizes[1], dim) for _ in "kv")
    found, expected = (attention(q, k, v, scale=scale, plan=plan) for plan in (DESCRIBED, replace(DESCRIBED, isa="")))
    assert torch.equal(found, expected)
    if scale is None:
        assert_close(found, exact(q, k, v))


def test_a_gradient_that_is_one_number_is_described_by_nothing():
    """Its strides are 0."""
    leaves = [randn(2, 4, 333, 64).requires_grad_() for _ in "qkv"]
    out = attention(*leaves, mask=Causal(), plan=DESCRIBED)
    found = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for one, other in zip(found, gradients(out, leaves, torch.ones_like(out)), strict=True):
        assert_close(one, other.double())


def test_rows_that_begin_at_odd_addresses():
    """Head dim 63: every second row is unaligned, though the tensor is not."""
    q, k, v = qkv(seq=100, dim=63, dtype=FP16)
    assert_close(attention(q, k, v, mask=Causal(), backend="triton"), exact(q, k, v, causal=True))


def test_lengths_one_after_another_share_no_wrong_kernel():
    """Triton specialises on sizes of 1 and multiples of 16: a launch prepared for one must not run another."""
    for seq_q, seq_kv in ((16, 16), (17, 17), (1, 16), (16, 1), (1, 1), (32, 33), (33, 32)):
        q, k, v = randn(1, 2, seq_q, 64), randn(1, 2, seq_kv, 64), randn(1, 2, seq_kv, 64)
        assert_close(attention(q, k, v, backend="triton"), exact(q, k, v))


@pytest.mark.parametrize("empty", ["batch", "heads", "seq_q", "seq_kv"])
def test_empty_tensors(empty):
    sizes = {"batch": 2, "heads": 3, "seq_q": 5, "seq_kv": 6, empty: 0}
    q = randn(sizes["batch"], sizes["heads"], sizes["seq_q"], 64).requires_grad_()
    k, v = (randn(sizes["batch"], sizes["heads"], sizes["seq_kv"], 64).requires_grad_() for _ in "kv")
    out, lse = attention(q, k, v, return_lse=True, backend="triton")
    assert out.shape == q.shape and not out.any()
    assert (lse == -torch.inf).all()
    assert all(not grad.any() for grad in gradients(out, [q, k, v], torch.ones_like(out)))


def test_packed_tokens_past_the_last_sequence():
    """Rows past cu_seqlens[-1] hold NaN; they come out as 0, in the gradients too."""
    ends = torch.tensor([0, 70, 70, 133], device="cuda", dtype=torch.int32)
    leaves = [randn(200, 2, 64) for _ in "qkv"]
    for x in leaves:
        x[133:] = torch.nan
        x.requires_grad_()
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 70, "max_seqlen_kv": 70}
    out, lse = attention_varlen(*leaves, **lengths, mask=Causal(), return_lse=True, backend="triton")
    d_out = torch.randn_like(out)
    d_out[133:] = torch.nan
    grads = gradients(out, leaves, d_out)
    for tensor in (out, *grads):
        assert not tensor[133:].any()
        assert tensor.isfinite().all()
    assert (lse[:, 133:] == -torch.inf).all()
    for first, last in ((0, 70), (70, 133)):
        part = [x.detach()[first:last].transpose(0, 1)[None] for x in leaves]
        assert_close(out[first:last].transpose(0, 1)[None], exact(*part, causal=True))


@pytest.mark.parametrize("page_size", [1, 16, 17, 64, 256])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pages_whose_tails_hold_garbage_in_halves_of_one_buffer(page_size, value):
    """Page stride twice the dense one; tails and unused pages hold NaN; the table's row is just long enough."""
    length = 150
    used = -(-length // page_size)
    buffer = torch.full((used + 2, 2, page_size, 2, 64), value, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(used + 2)[:used]
    k, v, q = randn(length, 2, 64), randn(length, 2, 64), randn(1, 1, 8, 64)
    for number, page in enumerate(order.tolist()):
        for half, values in enumerate((k, v)):
            rows = values[number * page_size : (number + 1) * page_size]
            buffer[page, half, : len(rows)] = rows
    table = order[None].to("cuda", torch.int32)
    lens = torch.tensor([length], device="cuda", dtype=torch.int32)
    out = attention_decode(q, buffer[:, 0], buffer[:, 1], kv_lens=lens, page_table=table, backend="triton")
    expected = exact(q.transpose(1, 2), *(x.transpose(0, 1)[None] for x in (k, v)))
    assert_close(out.transpose(1, 2), expected)


def test_a_cache_whose_tail_holds_nan():
    q, k, v, _ = decode_inputs(300)
    lens = torch.tensor([1, 77], device="cuda", dtype=torch.int32)
    zero = [x.clone() for x in (k, v)]
    for b, length in enumerate((1, 77)):
        for x, clean in zip((k, v), zero, strict=True):
            x[b, length:], clean[b, length:] = torch.nan, 0
    out = attention_decode(q, k, v, kv_lens=lens, backend="triton")
    assert torch.equal(out, attention_decode(q, *zero, kv_lens=lens, backend="triton"))
    assert out.isfinite().all()
