"""The CUDA backend on a GPU that it is for: the quick cases, and what only a GPU shows."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

import gpu_worker
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
    attention_varlen,
    explain,
)
from attnworks.backends import cuda
from attnworks.workbench import catalogue, properties
from gpu_guarded import guarded
from gpu_helpers import assert_close, assert_none_failed, exact, randn

QUICK = [case.name for case in catalogue.select(quick=True)]
JOBS = [*(("cuda", name, False) for name in QUICK), *(("cuda", name, True) for name in properties.CASES)]


@pytest.fixture(scope="module", autouse=True)
def here() -> None:
    """Skips where the backend does not run, by its own verdict."""
    from attnworks.hardware import detect
    from helpers import problem_of

    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
    verdict = cuda.verdict(problem_of(q, q, q), detect("cuda:0"))
    if not verdict.supported:
        pytest.skip(str(verdict))


@pytest.mark.parametrize("job", JOBS, ids=[f"{name}{'-properties' if p else ''}" for _, name, p in JOBS])
def test_case(job: gpu_worker.Job, results: dict[gpu_worker.Job, Future[gpu_worker.Found]]) -> None:
    assert_none_failed(results[job].result(timeout=120))


def qkv(batch=2, heads=4, seq=300, dim=128, dtype=torch.bfloat16):
    return [randn(batch, heads, seq, dim, dtype=dtype) for _ in "qkv"]


def test_auto_takes_it_and_goes_on_to_triton_where_it_refuses():
    q, k, v = qkv()
    assert explain(q, k, v).backend == "cuda"
    assert explain(q.float(), k.float(), v.float()).backend == "triton"
    assert explain(q.requires_grad_(), k, v).backend == "triton"


def test_unaligned_addresses_are_refused_by_name_and_go_elsewhere_by_auto():
    q, k, v = qkv(dim=64)
    expected = attention(q, k, v, backend="cuda")
    memory = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")
    shifted = memory[1:].view(k.shape).copy_(k)
    with pytest.raises(UnsupportedError, match="begins at an address"):
        attention(q, shifted, v, backend="cuda")
    assert_close(attention(q, shifted, v), expected)
    assert torch.equal(attention(q, k, v, backend="cuda"), expected)


@pytest.mark.parametrize("at_end", [False, True], ids=["beginning", "end"])
@pytest.mark.parametrize("dim", [128, 40])
def test_no_byte_outside_of_the_tensors_is_touched(dim, at_end):
    """Not even for what a copy finds outside of them; packed sequences shorter and longer than a tile, and empty."""
    ends = torch.tensor([0, 3, 3, 70, 400], device="cuda")
    plain = [randn(400, 2, dim) for _ in "qkv"]
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "mask": Causal(), "backend": "cuda"}
    expected = attention_varlen(*plain, **lengths)
    assert torch.equal(attention_varlen(*(guarded(x, at_end) for x in plain), **lengths), expected)
    dense = [x.transpose(0, 1)[None].contiguous() for x in plain]
    expected = attention(*dense, backend="cuda")
    assert torch.equal(attention(*(guarded(x, at_end) for x in dense), backend="cuda"), expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256), (40, 72)])
@pytest.mark.parametrize("mask", [None, Causal(), Window(50, 30)], ids=["full", "causal", "window"])
def test_packed_sequences_are_those_alone(dims, mask):
    """Rows past cu_seqlens[-1], between, and of other sequences hold NaN or nothing of this one."""
    dim, dim_v = dims
    ends_q = torch.tensor([0, 70, 70, 133, 500], device="cuda", dtype=torch.int32)
    ends_kv = torch.tensor([0, 90, 100, 100, 700], device="cuda", dtype=torch.int32)
    q, k, v = randn(520, 4, dim), randn(720, 2, dim), randn(720, 2, dim_v)
    q[500:], k[700:], v[700:], k[90:100], v[90:100] = (torch.nan,) * 5
    lengths = {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv, "max_seqlen_q": 367, "max_seqlen_kv": 600}
    out, lse = attention_varlen(q, k, v, **lengths, mask=mask, return_lse=True, backend="cuda")
    assert not out[500:].any() and (lse[:, 500:] == -torch.inf).all() and out.isfinite().all()
    for number in (0, 2, 3):
        rows, keys = (slice(*ends[number : number + 2].tolist()) for ends in (ends_q, ends_kv))
        alone = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        wanted, wanted_lse = attention(*alone, mask=mask, return_lse=True, backend="triton")
        assert_close(out[rows].transpose(0, 1)[None], wanted)
        torch.testing.assert_close(lse[:, rows][None], wanted_lse, atol=1e-4, rtol=1e-4)


def test_a_fused_buffer_is_read_in_place():
    q, k, v = qkv()
    expected = attention(q, k, v, mask=Causal(), backend="cuda")
    fused = torch.full((2, 300, 3, 5, 136), torch.nan, dtype=q.dtype, device="cuda")
    parts = [fused[:, :, i, :4, :128] for i in range(3)]
    for part, x in zip(parts, (q, k, v), strict=True):
        part.copy_(x.transpose(1, 2))
    before = torch.cuda.memory_allocated()
    out = attention(*parts, mask=Causal(), layout="bshd", backend="cuda")
    assert torch.cuda.memory_allocated() - before <= out.numel() * 2 + 512
    assert torch.equal(out.transpose(1, 2), expected)


# Those that long sequences get, which the conformance cases are too short for, and some that nobody gets.
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("plan", "dim"), [((192, 64, 3), 128), ((192, 80, 3), 128), ((192, 96, 3), 96), ((192, 96, 3), 80)]
)
@pytest.mark.parametrize("mask", [None, Causal(), Causal("top-left")], ids=["full", "causal", "top-left"])
@pytest.mark.parametrize("sizes", [(1, 1), (700, 1000), (192, 80), (193, 81), (1000, 300)])
def test_tiles_of_long_sequences(plan, dim, mask, sizes, packed):
    tile_q, tile_kv, stages = plan
    chosen = Plan("cuda", "q_outer", tile_q, tile_kv, warps=tile_q // 16 + 4, stages=stages)
    q, k, v = randn(2, 4, sizes[0], dim), randn(2, 2, sizes[1], dim), randn(2, 2, sizes[1], dim)
    wanted, wanted_lse = attention(q, k, v, mask=mask, return_lse=True, backend="triton")
    if packed:
        ends = [torch.tensor([0, n, 2 * n], device="cuda", dtype=torch.int32) for n in sizes]
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        lengths = {
            "cu_seqlens_q": ends[0],
            "cu_seqlens_kv": ends[1],
            "max_seqlen_q": sizes[0],
            "max_seqlen_kv": sizes[1],
        }
        out, lse = attention_varlen(*rows, **lengths, mask=mask, return_lse=True, plan=chosen)
        out, lse = out.unflatten(0, (2, -1)).transpose(1, 2), lse.unflatten(1, (2, -1)).transpose(0, 1)
    else:
        out, lse = attention(q, k, v, mask=mask, return_lse=True, plan=chosen)
    assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [96, 128])
def test_the_table_s_tiles_where_they_change(dim, mask):
    for seq in (4095, 6145, 8192):
        q, k, v = randn(1, 2, seq, dim), randn(1, 1, seq, dim), randn(1, 1, seq, dim)
        wanted = attention(q, k, v, mask=mask, backend="triton")
        assert_close(attention(q, k, v, mask=mask, backend="cuda"), wanted)
        ends = torch.tensor([0, seq], device="cuda", dtype=torch.int32)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        packed = attention_varlen(*rows, cu_seqlens_q=ends, cu_seqlens_kv=ends, mask=mask, backend="cuda")
        assert_close(packed.transpose(0, 1)[None], wanted)


# Tiles are walked from the last keys to the first: what grows towards those makes maxima rise, by more than fits fp32's
# exponent with 1000.
@pytest.mark.parametrize("rise", [1.5, 4, 30, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [40, 64, 96, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("mask", [None, Causal(), Window(300, 0)], ids=["full", "causal", "window"])
def test_maxima_that_rise_from_tile_to_tile(mask, dim, dtype, rise):
    dim, dim_v = dim if isinstance(dim, tuple) else (dim, dim)
    for seq in (900, 2304):
        q, k, v = randn(1, 2, seq, dim, dtype=dtype), randn(1, 2, seq, dim), randn(1, 2, seq, dim_v, dtype=dtype)
        k = (k * torch.linspace(rise, 0.1, seq, device="cuda")[:, None].to(k.dtype)).to(dtype)
        out, lse = attention(q, k, v, mask=mask, return_lse=True, backend="cuda")
        wanted, wanted_lse = attention(
            q.double(), k.double(), v.double(), mask=mask, return_lse=True, backend="reference"
        )
        assert_close(out, wanted.to(dtype))
        torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_a_row_whose_maximum_rises_leaves_others_as_they_are(mask, dim, backend):
    """Bit for bit, though a warp or a tile that has such a row is computed again."""
    q, k, v = (randn(1, 2, 2304, dim) for _ in "qkv")
    k[:, :, :1000] *= 3
    q *= 0.3
    quiet = attention(q, k, v, mask=mask, backend=backend)
    q[:, :, 5::16] *= 100
    loud = attention(q, k, v, mask=mask, backend=backend)
    others = torch.arange(2304, device="cuda") % 16 != 5
    assert torch.equal(quiet[:, :, others], loud[:, :, others]) and not torch.equal(quiet, loud)


@pytest.mark.parametrize("plan", [(128, 96, 2), (128, 64, 4), (192, 64, 2)])
def test_another_plan(plan):
    tile_q, tile_kv, stages = plan
    q, k, v = qkv(dim=64)
    chosen = Plan("cuda", "q_outer", tile_q, tile_kv, warps=tile_q // 16 + 4, stages=stages)
    assert_close(attention(q, k, v, mask=Causal(), plan=chosen), exact(q, k, v, causal=True))


def test_thirty_runs_give_the_same_bits():
    q, k, v = qkv(seq=2048)
    for mask in (None, Causal()):
        outs = [attention(q, k, v, mask=mask, backend="cuda") for _ in range(30)]
        assert all(torch.equal(outs[0], out) for out in outs)


def test_streams_at_once_and_a_graph():
    """Causal tiles are drawn from a counter, which launches that run at once must not share."""
    problems = [qkv(seq=2048) for _ in range(3)]
    expected = [attention(*each, mask=Causal(), backend="cuda") for each in problems]
    graph = torch.cuda.CUDAGraph()
    torch.use_deterministic_algorithms(False)
    with torch.cuda.graph(graph):
        captured = [attention(*each, mask=Causal(), backend="cuda") for each in problems]
    torch.cuda.synchronize()
    found = [[], [], []]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(5):
        graph.replay()
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[number].append(attention(*problems[number], mask=Causal(), backend="cuda"))
    torch.cuda.synchronize()
    for outs, replayed, wanted in zip(found, captured, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in (*outs, replayed))


def test_a_graph_replays_with_new_values():
    q, k, v = qkv()
    torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    attention(q, k, v, mask=Causal(), backend="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask=Causal(), backend="cuda")
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, mask=Causal(), backend="cuda"))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1), (1, 129), (129, 1), (0, 0)])
def test_sizes_of_zero_and_one(sizes):
    q, k, v = (randn(2, 3, n, 64) for n in (sizes[0], sizes[1], sizes[1]))
    out, lse = attention(q, k, v, return_lse=True, backend="cuda")
    assert_close(out, exact(q, k, v))
    assert sizes[1] or (lse == -torch.inf).all()


def test_more_heads_and_sequences_than_a_grid_has_room_for():
    q, k, v = (randn(1100, 64, n, 16) for n in (3, 5, 5))
    out = attention(q, k, v, mask=Causal(), backend="cuda")
    assert_close(out[-1:], exact(q[-1:], k[-1:], v[-1:], causal=True))
    ends = torch.arange(2**16 + 1, device="cuda", dtype=torch.int32)
    q, k, v = (randn(2**16, 2, 64) for _ in "qkv")
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 1, "max_seqlen_kv": 1}
    assert torch.equal(attention_varlen(q, k, v, **lengths, backend="cuda"), v), "one key gives its value"


def test_strides_past_two_to_the_31():
    far = 2**31 + 2**20
    huge = torch.empty(far + 2**16, dtype=torch.bfloat16, device="cuda")
    q, k, v = (randn(2, 2, 200, 64) for _ in "qkv")
    expected = attention(q, k, v, backend="cuda")
    for number in range(3):
        moved = [q, k, v]
        moved[number] = huge.as_strided(q.shape, (far, 200 * 64, 64, 1)).copy_(moved[number])
        assert torch.equal(attention(*moved, backend="cuda"), expected)


def test_softcap_and_sink_against_triton():
    q, k, v = (20 * x for x in qkv(dim=64))
    for scores in ((Softcap(5.0),), (Sink(torch.tensor([0.5, 100.0, -100.0, 3.0], device="cuda")),)):
        found = attention(q, k, v, mask=Causal(), scores=scores, return_lse=True, backend="cuda")
        wanted = attention(q, k, v, mask=Causal(), scores=scores, return_lse=True, backend="triton")
        assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-4)


def masks_of(seq_q, seq_kv):
    doc = torch.randint(0, 4, (2, seq_kv), device="cuda").sort().values
    tensor = torch.rand(2, 4, seq_q, seq_kv, device="cuda") < 0.02
    return {
        "document": lambda b, h, q, k: doc[b, q] == doc[b, k],
        "document, causal": Causal() & (lambda b, h, q, k: doc[b, q] == doc[b, k]),
        "prefix": lambda b, h, q, k: (k <= q) | (k < 200),
        "rows without keys": lambda b, h, q, k: k < q - 250,
        "blocks by head": lambda b, h, q, k: (q // 128 + k // 128 + h) % 3 == 0,
        "tensor": tensor,
        "padding": tensor[:, :1, :1],
    }


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256), (40, 72)])
def test_tile_maps_against_triton(dims):
    q, k, v = randn(2, 4, 700, dims[0]), randn(2, 2, 900, dims[0]), randn(2, 2, 900, dims[1])
    for name, mask in masks_of(700, 900).items():
        found = attention(q, k, v, mask=mask, return_lse=True, backend="cuda")
        wanted = attention(q, k, v, mask=mask, return_lse=True, backend="triton")
        assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-4, msg=name)
        again = attention(q, k, v, mask=mask, backend="cuda")
        assert torch.equal(again, found[0]), name


def test_tiles_that_a_map_hides_are_not_loaded():
    q, k, v = qkv(seq=1024)
    for x in (k, v):
        x[:, :, 512:] = torch.nan
    out = attention(q, k, v, mask=lambda b, h, q, k: k < 512, backend="cuda")
    assert_close(out, exact(q, k[:, :, :512], v[:, :, :512]))


def test_streams_share_a_map():
    q, k, v = qkv(seq=1024)
    doc = torch.arange(1024, device="cuda") // 300
    expected = None
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = attention(q, k, v, mask=lambda b, h, q, k: doc[q] == doc[k], backend="cuda")
        stream.synchronize()
        expected = out if expected is None else expected
        assert torch.equal(out, expected)


BIASES = {
    "bhqk": torch.bfloat16, "1hqk": torch.float16, "11qk": torch.float32, "b11k": torch.float32,
    "b1q1": torch.bfloat16, "1111": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256)])
def test_biases_and_slopes_against_triton(dims):
    sizes = {"b": 2, "h": 4, "q": 300, "k": 500, "1": 1}
    q, k, v = randn(2, 4, 300, dims[0]), randn(2, 2, 500, dims[0]), randn(2, 2, 500, dims[1])
    slopes = torch.tensor([0.5, 0.02, 0.0, -0.1], device="cuda")
    biases = [randn(*(sizes[x] for x in shape), dtype=dtype) for shape, dtype in BIASES.items()]
    biases.append(randn(500, 300, dtype=torch.float32).t())
    biases.append(
        randn(300, 500, dtype=torch.float32).masked_fill(torch.rand(300, 500, device="cuda") < 0.5, -torch.inf)
    )
    for mask in (None, Causal(), Window(60, 40)):
        for scores in ((ALiBi(slopes),), (ALiBi(slopes.expand(2, 4)), Bias(biases[0])), *((Bias(x),) for x in biases),
                       (Softcap(3.0), ALiBi(slopes), Bias(biases[1]), Sink(slopes))):  # fmt: skip
            found = attention(q, k, v, mask=mask, scores=scores, return_lse=True, backend="cuda")
            wanted = attention(q, k, v, mask=mask, scores=scores, return_lse=True, backend="triton")
            assert_close(found[0], wanted[0])
            torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("at_end", [False, True], ids=["beginning", "end"])
def test_no_byte_outside_of_a_bias_is_touched(at_end):
    q, k, v = qkv(seq=200)
    for bias in (randn(200, 200), randn(1, 4, 200, 200), randn(200)):
        expected = attention(q, k, v, scores=(Bias(bias),), backend="cuda")
        assert torch.equal(attention(q, k, v, scores=(Bias(guarded(bias, at_end)),), backend="cuda"), expected)
    torch.cuda.synchronize()


def test_a_bias_at_an_odd_address_is_read_in_place():
    q, k, v = qkv()
    wide = randn(300, 302)
    for first in (0, 1):
        bias = wide[:, first : first + 300]
        found = attention(q, k, v, scores=(Bias(bias),), backend="cuda")
        assert torch.equal(found, attention(q, k, v, scores=(Bias(bias.contiguous()),), backend="cuda"))


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (192, 128), (40, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_last_wave_is_shared(dims, dtype):
    """Few and many tiles of rows left over, whole and not; keys of whole tiles and not; a layout, grouped heads."""
    for batch, heads, group, seq_q, seq_kv in ((1, 16, 1, 1100, 4099), (3, 6, 2, 1000, 2048), (2, 8, 4, 4096, 700)):
        q, k, v = (
            randn(batch, n, h, d, dtype=dtype)
            for n, h, d in (
                (seq_q, heads, dims[0]),
                (seq_kv, heads // group, dims[0]),
                (seq_kv, heads // group, dims[1]),
            )
        )
        plan = explain(q, k, v, layout="bshd", backend="cuda").plan
        plan = replace(plan, schedule="stream_k", tile_q=128, warps=12, split_kv=0)
        found = attention(q, k, v, layout="bshd", return_lse=True, plan=plan)
        whole = attention(q, k, v, layout="bshd", return_lse=True, plan=replace(plan, schedule="q_outer"))
        assert_close(found[0], whole[0])
        torch.testing.assert_close(found[1], whole[1], atol=1e-3, rtol=1e-4)
        assert_close(found[0].transpose(1, 2), exact(*(x.transpose(1, 2) for x in (q, k, v))))
        assert torch.equal(attention(q, k, v, layout="bshd", plan=plan), found[0]), "twice the same"


def test_auto_shares_the_last_wave_where_much_of_the_card_would_wait():
    q, k, v = qkv(batch=1, heads=17, seq=8192)  # 1088 tiles of 128 rows: 8 waves of 132 and 32 tiles
    assert explain(q, k, v).plan.schedule == "stream_k"
    assert explain(q, k, v, mask=Causal()).plan.schedule == "q_outer"
    assert explain(q, k, v, batch_invariant=True).plan.schedule == "q_outer"


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (40, 72)])
@pytest.mark.parametrize("mask", [None, Causal(), Window(700, 20)], ids=["full", "causal", "window"])
def test_parts_of_the_keys_are_merged(dims, mask):
    """Few tiles of rows; among the parts are some in which a tile of rows sees no key."""
    sink = torch.tensor([0.5, 30.0, -100.0, 3.0], device="cuda")
    for seq_q, seq_kv in ((33, 5000), (300, 4500), (1500, 2100)):
        q, k, v = randn(1, 4, seq_q, dims[0]), randn(1, 2, seq_kv, dims[0]), randn(1, 2, seq_kv, dims[1])
        for scores in ((), (Sink(sink),)):
            split = explain(q, k, v, mask=mask, scores=scores, backend="cuda").plan
            assert split.schedule == "split_kv"
            found = attention(q, k, v, mask=mask, scores=scores, return_lse=True, backend="cuda")
            wanted = attention(q, k, v, mask=mask, scores=scores, return_lse=True, backend="triton")
            assert_close(found[0], wanted[0])
            torch.testing.assert_close(found[1], wanted[1], atol=1e-3, rtol=1e-4)
            assert torch.equal(attention(q, k, v, mask=mask, scores=scores, backend="cuda"), found[0])
            two = [torch.cat((torch.randn_like(x), x)) for x in (q, k, v)]
            assert torch.equal(attention(*two, mask=mask, scores=scores, plan=split)[1:], found[0]), "beside another"
