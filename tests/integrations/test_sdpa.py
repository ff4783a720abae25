"""attnworks.sdpa and replace_sdpa against torch's own scaled_dot_product_attention."""

import contextlib
import itertools
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before

from attnworks import UnsupportedError, replace_sdpa, sdpa
from helpers import LIMITS, randn

torch_sdpa = F.scaled_dot_product_attention

# (query, key, value) without their last two dimensions
LEADING = {
    "2-D": ((), (), ()),
    "3-D": ((4,), (4,), (4,)),
    "4-D": ((2, 4), (2, 4), (2, 4)),
    "5-D": ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "broadcast batch": ((2, 4), (1, 4), (1, 4)),
    "broadcast heads": ((2, 4), (2, 1), (2, 1)),
    "fewer dimensions": ((2, 4), (4,), ()),
    "query broadcast": ((1, 4), (2, 4), (2, 1)),
}
MASKS = {
    "none": None,
    "(seq_q, seq_kv)": (5, 7),
    "one row": (1, 7),
    "one column": (5, 1),
    "3-D": (4, 5, 7),
    "3-D, heads broadcast": (1, 5, 7),
    "4-D": (2, 4, 5, 7),
    "4-D, batch broadcast": (1, 4, 1, 7),
    "4-D, heads broadcast": (2, 1, 5, 7),
    "5-D": (2, 1, 4, 5, 7),
}


def qkv(leading, dtype=torch.float32, seq_q=5, seq_kv=7):
    sizes = ((seq_q, 8), (seq_kv, 8), (seq_kv, 6))
    return [randn(*lead, *size, dtype=dtype) for lead, size in zip(leading, sizes, strict=True)]


def made(shape, kind):
    if shape is None:
        return None
    if kind == "bool":
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
        return mask
    return randn(*shape)


def close(got, want, dtype=torch.float32):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=LIMITS[dtype][0], rtol=LIMITS[dtype][1])


def fits(lead, mask):
    rank = max(len(part) for part in lead)
    return mask is None or (len(mask) - 2 <= rank and (rank < 3 or len(mask) != 4 or mask[0] == 1))


GRID = [
    (lead, mask, kind)
    for lead, mask, kind in itertools.product(LEADING, MASKS, ("bool", "float"))
    if fits(LEADING[lead], MASKS[mask]) and not (mask == "none" and kind == "float")
]


@pytest.mark.parametrize(("lead", "mask", "kind"), GRID)
def test_values_and_gradients_for_every_broadcast(lead, mask, kind):
    inputs, attn_mask = qkv(LEADING[lead]), made(MASKS[mask], kind)
    results = []
    for function in (sdpa, torch_sdpa):
        leaves = [x.clone().requires_grad_() for x in inputs]
        bias = attn_mask.clone().requires_grad_() if kind == "float" and attn_mask is not None else attn_mask
        out = function(*leaves, attn_mask=bias)
        out.square().sum().backward()
        results.append(
            [out.detach(), *(x.grad for x in leaves), bias.grad if bias is not None and kind == "float" else None]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (1, 6), (4, 4)])
def test_causal_is_top_left_in_every_dtype(dtype, sizes):
    q, k, v = qkv(LEADING["4-D"], dtype, *sizes)
    for options in ({"is_causal": True}, {"is_causal": True, "scale": 0.3}, {"scale": 0.0}):
        close(sdpa(q, k, v, **options), torch_sdpa(q.double(), k.double(), v.double(), **options).to(dtype), dtype)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (6, 3, 2), (4, 4, 4)])
def test_grouped_heads(heads):
    for batch in ((2,), (), (2, 3)):
        inputs = qkv([(*batch, n) for n in heads])
        close(sdpa(*inputs, enable_gqa=True), torch_sdpa(*inputs, enable_gqa=True))
    for function, error in ((sdpa, ValueError), (torch_sdpa, RuntimeError)):
        with pytest.raises(error):
            function(*qkv([(2, 4), (2, 2), (2, 2)]))
        with pytest.raises(error):
            function(*qkv([(2, 4), (2, 3), (2, 3)]), enable_gqa=True)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv(LEADING["4-D"])
    sees = torch.ones(5, 7, dtype=torch.bool)
    sees[2] = False
    assert not sdpa(q, k, v, sees)[:, :, 2].any()
    close(sdpa(q, k, v, sees), torch_sdpa(q, k, v, sees))


def test_autocast_casts_everything_as_torch_does():
    inputs, bias = qkv(LEADING["4-D"]), randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = sdpa(*inputs, bias), torch_sdpa(*inputs, bias)
        mixed = sdpa(inputs[0], inputs[1].bfloat16(), inputs[2])
    close(got, want, torch.bfloat16)
    assert mixed.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, r"dropout_p: was 0.1, must be 0"),
        ({"attn_mask": torch.ones(5, 7), "is_causal": True}, ValueError, "attn_mask: was given, must be None"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.int32)}, TypeError, "attn_mask: was torch.int32, must be bool"),
        ({"attn_mask": torch.ones(5, 7).double()}, TypeError, "attn_mask: was torch.float64"),
        ({"attn_mask": torch.ones(7)}, ValueError, r"attn_mask: was of shape \(7,\), must have at least two"),
        ({"attn_mask": torch.ones(5, 6)}, ValueError, r"\(5, 6\), must broadcast"),
        ({"query": torch.ones(8)}, ValueError, r"query: was of shape \(8,\)"),
        ({"query": "q"}, TypeError, "query: was str"),
        ({"key": torch.ones(3, 7, 8)}, ValueError, "query, key, value: had leading dimensions"),
        ({"key": torch.ones(2, 4, 7, 8).double()}, TypeError, "k: was torch.float64, must be torch.float32 like q"),
    ],
)
def test_what_it_does_not_take_is_named(change, error, message):
    given = dict(zip(("query", "key", "value"), qkv(LEADING["4-D"]), strict=True)) | change
    with pytest.raises(error, match=message):
        sdpa(**given)


# ---- in the place of torch's own -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The backends that calls were routed with."""
    from attnworks.integrations import sdpa as module

    calls, original = [], module.attention

    def spy(*args, **options):
        calls.append(options["backend"])
        return original(*args, **options)

    monkeypatch.setattr(module, "attention", spy)
    return calls


def test_it_replaces_every_name_of_the_function_and_gives_it_back(asked):
    inputs = qkv(LEADING["4-D"])
    with replace_sdpa():
        close(F.scaled_dot_product_attention(*inputs), torch_sdpa(*inputs))
        imported_before(*inputs)
        torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert asked == ["auto"] * 4
    F.scaled_dot_product_attention(*inputs)
    assert len(asked) == 4


def test_blocks_nest_and_end_with_exceptions(asked):
    inputs = qkv(LEADING["4-D"])
    with replace_sdpa("reference"):
        with contextlib.suppress(KeyError), replace_sdpa():
            F.scaled_dot_product_attention(*inputs)
            raise KeyError
        F.scaled_dot_product_attention(*inputs)
    F.scaled_dot_product_attention(*inputs)
    assert asked == ["auto", "reference"]


def test_a_call_it_cannot_take_is_an_error_and_not_torchs():
    inputs = qkv(LEADING["4-D"])
    with replace_sdpa(), pytest.raises(ValueError, match="dropout_p"):
        F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
    with replace_sdpa("cpu"), pytest.raises(UnsupportedError):
        F.scaled_dot_product_attention(*(x.double() for x in inputs))


def test_other_threads_keep_torchs(asked):
    inputs = qkv(LEADING["4-D"])
    with replace_sdpa():
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(*inputs))
        thread.start()
        thread.join()
    assert asked == []


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_layer_trains_alike(masked, asked):
    """Forward and a training step of torch's own module, with a causal mask and with padding."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = randn(3, 9, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9) if masked else None
    padding = -1e9 * (torch.arange(9) >= torch.tensor([9, 6, 4])[:, None]).float() if masked else None

    def step():
        layer.zero_grad()
        out = layer(x, src_mask=mask, src_key_padding_mask=padding)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in layer.parameters())]

    want = step()
    assert not asked
    with replace_sdpa():
        got = step()
    assert asked
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    layer.eval()
    asked.clear()
    with torch.no_grad():
        want_eval = layer(x, src_mask=mask)
        with replace_sdpa():
            torch.testing.assert_close(layer(x, src_mask=mask), want_eval, atol=1e-5, rtol=1e-4)
    assert asked, "torch's fused inference path would have gone by"


def test_multi_head_attention(asked):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    q, k = randn(2, 5, 32), randn(2, 7, 32)
    want, _ = module(q, k, k, need_weights=False)
    with replace_sdpa():
        got, _ = module(q, k, k, need_weights=False)
    assert asked
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_under_torch_compile():
    torch._dynamo.reset()
    inputs = qkv(LEADING["4-D"])

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with replace_sdpa():
        close(torch.compile(call, fullgraph=True, backend="eager")(*inputs), sdpa(*inputs, is_causal=True))
    torch._dynamo.reset()
