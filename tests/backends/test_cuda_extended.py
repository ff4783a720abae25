"""Tile maps with bits, biases and slopes of the CUDA backend as its kernel is given them, read here as the kernel reads
them: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnworks import ALiBi, Bias, Causal, Softcap, Window, masks, scores, tilemap
from attnworks.backends import cuda
from attnworks.backends.cuda import extended, launch, plans
from attnworks.hardware import load
from attnworks.problem import Operands, Problem

BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 3, 300, 420
STRIDES = (HEADS * 512 * 64, 512 * 64, 64)
DOC = torch.randint(0, 4, (BATCH, SEQ_KV)).sort().values
TENSOR = torch.rand(BATCH, HEADS, SEQ_Q, SEQ_KV) < 0.01


def document(b, h, q, k):
    return DOC[b, q] == DOC[b, k]


def prefix(b, h, q, k):
    return (k <= q) | (k < 130)


def nothing(b, h, q, k):
    return k < q - 250


MASKS = {"document": document, "prefix": prefix, "rows without keys": nothing, "tensor": TENSOR,
         "by head": TENSOR[:1], "and bounds": Causal() & Window(90, None) & document}  # fmt: skip


def problem(mask=None, modifiers=(), **changes) -> Problem:
    fields = {
        "form": "dense", "batch": BATCH, "heads_q": HEADS, "heads_kv": HEADS, "seq_q": SEQ_Q, "seq_kv": SEQ_KV,
        "head_dim": 64, "head_dim_v": 64, "dtype": torch.bfloat16, "device": "cuda:0", "scale": 0.125,
        "q_strides": STRIDES, "k_strides": STRIDES, "v_strides": STRIDES, "mask": masks.split(mask)[0],
        "scores": scores.split(modifiers)[0],
    }  # fmt: skip
    return Problem(**fields | changes)


def operands(mask=None, modifiers=()) -> Operands:
    q = torch.zeros(1)
    return Operands(q, q, q, masks.split(mask)[1], scores.split(modifiers)[1])


def shown(p: Problem, found: extended.BitMap, tile_q: int, tile_kv: int) -> torch.Tensor:
    """What the kernel sees of a map, walked as it does: full tiles before ``whole``, then those with bits."""
    visible = torch.zeros(p.batch, p.heads_q, p.seq_q + tile_q, p.seq_kv + tile_kv, dtype=torch.bool)
    column = torch.arange(tile_kv)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    for b in range(p.batch):
        for h in range(p.heads_q):
            for row in range(-(-p.seq_q // tile_q)):
                first, last, whole, bits = found.rows[b * found.by_batch + h * found.by_head + row].tolist()
                assert first < last and first <= whole <= last, "the kernel visits at least one tile"
                for place in range(first, last):
                    at = found.tiles[place].item() * tile_kv
                    tile = visible[b, h, row * tile_q : (row + 1) * tile_q, at : at + tile_kv]
                    tile[:] = True if place < whole else (found.bits[place + bits][:, word] >> bit) & 1 == 1
    assert not visible[..., p.seq_kv :].any() and not visible[:, :, p.seq_q :].any(), "beyond the sequence"
    return visible[:, :, : p.seq_q, : p.seq_kv]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tiles", [(128, 128), (192, 80)])
def test_lists_and_bits_are_the_mask(name: str, tiles: tuple[int, int]) -> None:
    p, plan = problem(MASKS[name]), SimpleNamespace(tile_q=tiles[0], tile_kv=tiles[1])
    found = extended.bit_map(p, plan, operands(MASKS[name]))
    b, _, q, k = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
                  for axis, n in enumerate((BATCH, HEADS, SEQ_Q, SEQ_KV)))  # fmt: skip
    expected = {
        "document": lambda: DOC[b, q] == DOC[b, k],
        "prefix": lambda: (k <= q) | (k < 130),
        "rows without keys": lambda: k < q - 250,
        "tensor": lambda: TENSOR,
        "by head": lambda: TENSOR[:1],
        "and bounds": lambda: (DOC[b, q] == DOC[b, k]) & (k <= q + SEQ_KV - SEQ_Q) & (k >= q + SEQ_KV - SEQ_Q - 90),
    }[name]()
    assert torch.equal(shown(p, found, *tiles), expected.expand(BATCH, HEADS, -1, -1))
    assert (found.by_batch > 0) == (name not in ("prefix", "rows without keys", "by head"))
    assert (found.by_head > 0) == (name in ("tensor", "by head"))


def test_a_map_is_made_once_and_anew_when_its_mask_was_written_to() -> None:
    mask = TENSOR.clone()
    p, o = problem(mask), operands(mask)
    plan = plans.plan_for(p)
    first = extended.bit_map(p, plan, o)
    assert extended.bit_map(p, plan, o) is first
    mask[0, 0, 0] = True
    second = extended.bit_map(p, plan, o)
    assert second is not first and shown(p, second, plan.tile_q, plan.tile_kv)[0, 0, 0].all()
    sizes = {"batch": BATCH, "heads": HEADS, "seq_q": SEQ_Q, "seq_kv": SEQ_KV, "tile_q": plan.tile_q}
    other = tilemap.cached(p.mask, o.mask, **sizes, tile_kv=plan.tile_kv, device="cpu")
    assert isinstance(other, tilemap.TileMap), "what others keep of the same mask stays theirs"


@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "b11k", "hqk", "qk", "q1", "k", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_is_read_where_it_lies(shape: str, dtype: torch.dtype) -> None:
    sizes = {"b": BATCH, "h": HEADS, "q": SEQ_Q, "k": SEQ_KV, "1": 1}
    bias = torch.randn([2 * sizes[x] if x != "1" else 1 for x in shape]).to(dtype)
    bias = bias[tuple(slice(0, sizes[x]) for x in shape)]
    p, o = problem(None, (Bias(bias),)), operands(None, (Bias(bias),))
    fields = extended.given(p, plans.plan_for(p), o, 0).fields
    params = launch.params_of(p, plans.plan_for(p))
    assert fields == {"bias": bias.data_ptr()}
    steps = params.bias_batch, params.bias_head, params.bias_row, params.bias_key
    built = plans.variant(p, plans.plan_for(p))
    for at in ((0, 0, 0, 0), (1, 2, 299, 419), (1, 0, 7, 130)):
        element = sum(i * step for i, step in zip(at, steps, strict=True))
        wanted = bias.expand(BATCH, HEADS, SEQ_Q, SEQ_KV)[at]
        assert bias.as_strided((1,), (1,), element + bias.storage_offset()) == wanted
    assert built.bias == {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}[dtype]
    assert built.bias_keys == steps[3] == (shape[-1] == "k")
    assert built.bias_rows == ("q" in shape)
    strides_even = all(step % 2 == 0 for step in steps[:3])
    assert built.bias_pairs == (shape[-1] == "k" and strides_even)


def test_odd_strides_are_read_one_by_one() -> None:
    even, odd = (
        torch.randn(1, HEADS, SEQ_Q, SEQ_KV + 2)[..., :SEQ_KV],
        torch.randn(1, 1, SEQ_Q, SEQ_KV + 1)[..., :SEQ_KV],
    )
    for bias, pairs in ((even, True), (odd, False)):
        p = problem(None, (Bias(bias),))
        assert plans.variant(p, plans.plan_for(p)).bias_pairs == pairs


@pytest.mark.parametrize(("mask", "alibi"), [
    (None, 1), (Causal(), 2), (Causal("top-left"), 1), (Window(5, 0), 2), (Window(5, 3), 1), (Causal() & document, 2),
])  # fmt: skip
def test_slopes_are_linear_where_no_key_lies_ahead(mask: object, alibi: int) -> None:
    p = problem(mask, (ALiBi(torch.ones(HEADS)),))
    assert plans.variant(p, plans.plan_for(p)).alibi == alibi


def test_a_transposed_bias_has_a_step_between_keys() -> None:
    bias = torch.randn(SEQ_KV, SEQ_Q).t()
    p = problem(None, (Bias(bias),))
    params = launch.params_of(p, plans.plan_for(p))
    assert (params.bias_row, params.bias_key) == (1, SEQ_Q)
    assert plans.variant(p, plans.plan_for(p)).bias_keys == 2


@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS)])
def test_slopes_are_fp32_and_contiguous(shape: tuple[int, ...]) -> None:
    slopes = torch.randn(*shape[:-1], 2 * HEADS, dtype=torch.float64)[..., ::2]
    p, o = problem(None, (ALiBi(slopes),)), operands(None, (ALiBi(slopes),))
    given = extended.given(p, plans.plan_for(p), o, 0)
    (kept,) = given.tensors
    assert given.fields["slopes"] == kept.data_ptr() and kept.dtype == torch.float32 and kept.is_contiguous()
    assert launch.params_of(p, plans.plan_for(p)).slopes_batch == (HEADS if len(shape) == 2 else 0)
    assert torch.equal(kept, slopes.float())


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_scores_come_to_their_own_units_before_something_is_added(scale: float, cap: float | None) -> None:
    """exp2(factor · (outer · score(S) + bias)) is e^(capped scale · S + bias)."""
    modifiers = ((Softcap(cap),) if cap else ()) + (ALiBi(torch.ones(HEADS)),)
    p = problem(None, modifiers, scale=scale)
    params, built = launch.params_of(p, plans.plan_for(p)), plans.variant(p, plans.plan_for(p))
    s = torch.tensor([-300.0, -1.0, 0.0, 2.0, 500.0], dtype=torch.float64)
    mine = s if built.modifier == 0 else 1 - 2 / (torch.exp2(s * params.inner) + 1)
    wanted = scale * s if cap is None else cap * torch.tanh(scale * s / cap)
    assert built.modifier == (0 if cap is None else 2)
    in_base_2 = wanted / torch.tensor(2.0).double().log()
    torch.testing.assert_close(params.factor * (params.outer * mine), in_base_2, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("changes", "words"), [
    ({"modifiers": (lambda s, b, h, q, k: s + 1,)}, "score function <lambda>"),
    ({"modifiers": (ALiBi(torch.ones(3)), Softcap(2.0))}, "a softcap after ALiBi or a bias"),
    ({"modifiers": (Bias(torch.ones(1)), Bias(torch.ones(1)))}, "more than one bias"),
    ({"modifiers": (Bias(torch.ones(1, dtype=torch.float64)),)}, "bias of torch.float64"),
    ({"mask": lambda b, h, q, k: bool(k < q)}, "predicate <lambda> .not traced"),
    ({"mask": document, "form": "varlen", "total_q": 9, "total_kv": 9}, "each sequence would need a tile map"),
    ({"mask": document, "batch": 64, "seq_q": 2**15, "seq_kv": 2**15}, "may take 8589934592 bytes"),
])  # fmt: skip
def test_what_it_cannot_do_is_named(changes: dict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: "")
    (reason,) = cuda.verdict(problem(**changes), load("h200-sxm")).reasons
    assert words.replace(".", "") in reason.replace("(", "").replace(".", "")


@pytest.mark.parametrize("mask", [document, TENSOR, Causal() & prefix])
def test_masks_and_scores_that_it_has_are_not_refused(mask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: "")
    p = problem(mask, (Softcap(3.0), ALiBi(torch.ones(3)), Bias(torch.ones(1, 1, 1, SEQ_KV))))
    assert cuda.verdict(p, load("h200-sxm")).reasons == ()
    plans.check(p, plans.plan_for(p))
    with pytest.raises(ValueError, match="tile_kv: was 144, must be at most 128 for a mask with a tile map"):
        plans.check(p, plans.Plan("cuda", "q_outer", 128, 144, warps=12, stages=2))
