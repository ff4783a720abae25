"""The CPU backend's scores and masks: every form on every instruction set, tile maps and when they are made anew."""

from collections.abc import Callable

import pytest
import torch

from attnworks import (
    ALiBi,
    Bias,
    Causal,
    Plan,
    Sink,
    Softcap,
    Window,
    attention,
    attention_decode,
    attention_varlen,
)
from attnworks import tilemap as tilemaps
from attnworks.backends import cpu
from attnworks.backends.cpu import maps as cpu_maps
from attnworks.backends.cpu import modifiers as cpu_modifiers
from helpers import assert_close, problem_of, randn

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the cpu backend's verdict: native extension not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def documents(length: int, each: int) -> Callable[..., torch.Tensor]:
    document = torch.arange(length) // each
    return lambda b, h, q, k: document[q] == document[k]


def scores_of(batch: int, heads: int, dtype: torch.dtype) -> list[tuple[object, ...]]:
    slopes = torch.rand(batch, heads)
    return [
        (Softcap(2.0),),
        (ALiBi(slopes[0]), Sink(randn(heads, dtype=dtype))),
        (Bias(randn(batch, 1, 1, 1, dtype=dtype)), Softcap(3.0), ALiBi(slopes.to(dtype)), Sink(randn(heads))),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_in_every_form(isa, dtype):
    tiled, split = Plan("cpu", "tiled", tile_q=96, tile_kv=128, isa=isa), Plan("cpu", "split_kv", split_kv=96, isa=isa)
    q, k, v = randn(2, 4, 130, 40, dtype=dtype), randn(2, 2, 200, 40, dtype=dtype), randn(2, 2, 200, 24, dtype=dtype)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q[:, :, :65], k[:, :, :90], v[:, :, :90])]
    cu = {"cu_seqlens_q": torch.tensor([0, 60, 130]), "cu_seqlens_kv": torch.tensor([0, 61, 180])}
    lens = {"kv_lens": torch.tensor([200, 131])}
    cache = (q[:, :, :5].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    for scores in scores_of(2, 4, dtype):
        for mask in (documents(200, 70), Causal("top-left") & (lambda b, h, q, k: (q + k + b) % (h + 2) != 0)):
            asked = {"mask": mask, "scores": scores}
            for call, tensors, lengths, plan in (
                (attention, (q, k, v), {}, tiled),
                (attention, (q[:, :, :5], k, v), {}, split),
                (attention_varlen, flat, cu, tiled),
                (attention_decode, cache, lens, split),
            ):
                out, lse = call(*tensors, **lengths, **asked, return_lse=True, plan=plan)
                wide = [x.double() for x in tensors]
                expected, expected_lse = call(*wide, **lengths, **asked, return_lse=True, backend="reference")
                assert_close(out, expected)
                assert_close(lse, expected_lse)


BROADCASTS = [(130, 200), (2, 1, 1, 200), (1, 4, 130, 1), (2, 4, 130, 200), (4, 1, 1), (200,), (1,), ()]


@pytest.mark.parametrize("shape", BROADCASTS)
def test_a_bias_and_a_mask_of_every_shape(shape):
    q, k = randn(2, 4, 130, 32), randn(2, 2, 200, 32)
    turned = randn(*shape[::-1]).permute(tuple(range(len(shape)))[::-1])
    for bias in (randn(*shape), randn(*shape).double(), randn(*shape).bfloat16(), turned):
        out = attention(q, k, k, scores=(Bias(bias),), mask=bias > 0, backend="cpu")
        assert_close(out, attention(q.double(), k.double(), k.double(), scores=(Bias(bias),), mask=bias > 0))


def test_operands_are_read_in_place():
    """A bias and a mask that are views with gaps of NaN, and of True, around every row."""
    q, k = randn(1, 2, 70, 16), randn(1, 2, 90, 16)
    bias, mask = torch.full((2, 72, 99), NAN), torch.ones(2, 72, 99, dtype=torch.bool)
    bias[:, 1:71, 5:95], mask[:, 1:71, 5:95] = randn(2, 70, 90), randn(2, 70, 90) > 0
    bias, mask = bias[:, 1:71, 5:95], mask[:, 1:71, 5:95]
    out = attention(q, k, k, scores=(Bias(bias),), mask=mask, backend="cpu")
    assert torch.equal(out, attention(q, k, k, scores=(Bias(bias.clone()),), mask=mask.clone(), backend="cpu"))
    assert_close(out, attention(q.double(), k.double(), k.double(), scores=(Bias(bias),), mask=mask))


@pytest.mark.parametrize("rows", [2048, 3])
def test_hidden_tiles_are_never_loaded(rows):
    """Tiles that a predicate hides hold NaN, between visible ones: not even as 0 times NaN do they reach a row."""
    q, k = randn(1, 1, rows, 32), randn(1, 1, 2048, 32)
    poisoned = k.clone()
    for start in range(64, 2048, 192):
        poisoned[:, :, start : start + 128] = NAN

    def mask(b, h, q, k):
        return k // 64 % 3 == 0

    out = attention(q, poisoned, poisoned, mask=mask, backend="cpu")
    assert torch.equal(out, attention(q, k, k, mask=mask, backend="cpu"))
    assert out.isfinite().all()
    in_cache = [x.transpose(1, 2) for x in (q[:, :, :3], poisoned, poisoned)]
    assert attention_decode(*in_cache, kv_lens=torch.tensor([2000]), mask=mask, backend="cpu").isfinite().all()


def test_threads_and_tasks_change_no_bit():
    q = randn(1, 3, 500, 32)
    outs = []
    for tile_q, threads in ((1, 1), (100, 2), (960, 5)):
        torch.set_num_threads(threads)
        plan = Plan("cpu", "tiled", tile_q=tile_q, tile_kv=128)
        outs.append(attention(q, q, q, mask=documents(500, 130), scores=(Softcap(3.0),), plan=plan))
    torch.set_num_threads(2)
    assert all(torch.equal(outs[0], out) for out in outs)


# ---- maps ------------------------------------------------------------------------------------------------------------


def counted(monkeypatch) -> list[int]:
    """Grows with every tile map that is made."""
    made: list[int] = []
    build = cpu_maps.Map._build
    monkeypatch.setattr(cpu_maps.Map, "_build", lambda self, operands: made.append(1) or build(self, operands))
    return made


def test_a_map_is_made_once_and_anew_when_its_operands_change(monkeypatch):
    made, document = counted(monkeypatch), torch.arange(200) // 50
    q = randn(1, 2, 200, 16)

    def mask(b, h, q, k):
        return document[q] == document[k]

    for scale in (1.0, 2.0):
        attention(q * scale, q, q, mask=mask, backend="cpu")
    assert len(made) == 1
    document[:] = torch.arange(200) // 20
    assert_close(attention(q, q, q, mask=mask, backend="cpu"), attention(q.double(), q.double(), q.double(), mask=mask))
    assert len(made) == 2


def test_a_map_of_many_blocks(monkeypatch):
    """Evaluated some rows of one head at a time, and put together."""
    q = randn(2, 3, 300, 16)

    def mask(b, h, q, k):
        return (q * 3 + k * (b + 1)) % (h + 3) > 1

    tensor = randn(2, 1, 300, 300) > 0
    whole = [attention(q, q, q, mask=one, backend="cpu") for one in (mask, tensor)]
    monkeypatch.setattr(cpu_maps, "BLOCK", 1000)
    tilemaps._CACHE.clear()
    assert torch.equal(whole[0], attention(q, q, q, mask=mask, backend="cpu"))
    assert torch.equal(whole[1], attention(q, q, q, mask=tensor, backend="cpu"))


def test_what_a_predicate_captured_need_not_reach_past_the_lengths():
    """A kernel's map covers the capacity of a cache; a mask over the keys in it is right all the same."""
    seen = torch.arange(150) % 3 == 0
    q, k = randn(1, 2, 4, 16), randn(1, 400, 2, 16)
    asked = {"kv_lens": torch.tensor([150]), "mask": lambda b, h, q, k: seen[k]}
    out = attention_decode(q, k, k, **asked, backend="cpu")
    assert_close(out, attention_decode(q.double(), k.double(), k.double(), **asked))


def test_bounds_of_both_alignments():
    q, k = randn(1, 2, 150, 16), randn(1, 2, 230, 16)
    for mask in (Causal() & Window(30, 60, "top-left"), Causal("top-left") & Window(9, None)):
        out = attention(q, k, k, mask=mask, backend="cpu")
        assert_close(out, attention(q.double(), k.double(), k.double(), mask=mask))


# ---- the verdict -----------------------------------------------------------------------------------------------------


def refused(**asked) -> list[str]:
    q = randn(1, 4, 64, 32)
    return cpu_modifiers.refusals(problem_of(q, q, q, **asked))


def test_what_it_cannot_do_it_says():
    assert refused(mask=lambda b, h, q, k: q >= k and k > 3)[0].startswith("mask <lambda>: branches on q >= k")
    assert refused(scores=(lambda s, b, h, q, k: s * 2,)) == [
        "score function <lambda> (has softcap, ALiBi, bias and sink)"
    ]
    assert refused(scores=(Softcap(2.0),) * 9) == ["9 score modifiers (at most 8)"]
    assert refused(scores=(Softcap(2.0),) * 8, mask=lambda b, h, q, k: q % 2 == k % 2) == []
