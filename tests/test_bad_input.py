"""Every argument wrong in every way: the error names the argument, what it was and what it must be, on every backend
alike, before any work: a cache is not written, no output is made."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnworks import (
    ALiBi,
    Bias,
    Causal,
    Plan,
    Rotary,
    Sink,
    attention,
    attention_decode,
    attention_varlen,
    dispatch,
    explain,
)
from helpers import randn

BACKENDS = (
    "auto",
    *(name for name in dispatch.NAMES if name not in ("cuda", "triton")),
)  # which take no tensors on a CPU
f32, f16, f64, i32 = torch.float32, torch.float16, torch.float64, torch.int32


@dataclasses.dataclass(frozen=True)
class Wrong:
    """One wrong argument: its name, its value, and the error with a pattern that its message must match."""

    argument: str
    value: Any
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return self.message.removeprefix("^").replace("\\", "")  # the test's name: "k: was torch.float16, must be ..."


def sparse(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to_sparse()


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


FLAGS = [
    Wrong(flag, value, TypeError, rf"^{flag}: was {value!r}, must be a bool")
    for flag in ("return_lse", "deterministic", "batch_invariant", "validate")
    for value in (1, 0, None, "yes")
]

# For q (2, 4, 6, 8), k (2, 2, 9, 8), v (2, 2, 9, 5) in "bhsd".
DENSE = [
    Wrong("q", None, TypeError, r"^q: was NoneType, must be a torch.Tensor"),
    Wrong("q", np.zeros((2, 4, 6, 8)), TypeError, r"^q: was ndarray, must be a torch.Tensor"),
    Wrong("k", [1.0], TypeError, r"^k: was list, must be a torch.Tensor"),
    Wrong("v", "v", TypeError, r"^v: was str, must be a torch.Tensor"),
    Wrong("q", sparse(2, 4, 6, 8), TypeError, r"^q: was a tensor of layout torch.sparse_coo, must be torch.strided"),
    Wrong("k", sparse(2, 2, 9, 8), TypeError, r"^k: was a tensor of layout torch.sparse_coo"),
    Wrong("v", sparse(2, 2, 9, 5), TypeError, r"^v: was a tensor of layout torch.sparse_coo"),
    Wrong("q", torch.zeros(2, 4, 6, 8, dtype=i32), TypeError, r"^q: was torch.int32, must be one of float64"),
    Wrong("q", torch.zeros(2, 4, 6, 8, dtype=torch.bool), TypeError, r"^q: was torch.bool, must be one of"),
    Wrong("q", torch.zeros(2, 4, 6, 8, dtype=torch.complex64), TypeError, r"^q: was torch.complex64"),
    Wrong("q", torch.zeros(2, 4, 6, 8).to(torch.float8_e4m3fn), TypeError, r"^q: was torch.float8_e4m3fn"),
    Wrong("k", torch.zeros(2, 2, 9, 8, dtype=f16), TypeError, r"^k: was torch.float16, must be torch.float32 like q"),
    Wrong("v", torch.zeros(2, 2, 9, 5, dtype=f64), TypeError, r"^v: was torch.float64, must be torch.float32 like q"),
    Wrong("k", torch.zeros(2, 2, 9, 8, device="meta"), ValueError, r"^k: was on meta, must be on cpu like q"),
    Wrong("v", torch.zeros(2, 2, 9, 5, device="meta"), ValueError, r"^v: was on meta, must be on cpu like q"),
    Wrong("q", torch.tensor(1.0), ValueError, r"^q: was of shape \(\), must be \(batch, heads_q, seq_q, head_dim\)"),
    Wrong("q", randn(4, 6, 8), ValueError, r"^q: was of shape \(4, 6, 8\), must be \(batch, heads_q, seq_q, head_dim"),
    Wrong("k", randn(9, 8), ValueError, r"^k: was of shape \(9, 8\), must be \(batch, heads_kv, seq_kv, head_dim\)"),
    Wrong("v", randn(1, 2, 2, 9, 5), ValueError, r"^v: was of shape \(1, 2, 2, 9, 5\), must be \(batch"),
    Wrong("k", randn(3, 2, 9, 8), ValueError, r"^k: was of shape \(3, 2, 9, 8\), must have batch = 2"),
    Wrong("k", randn(2, 2, 9, 7), ValueError, r"^k: was of shape \(2, 2, 9, 7\), must have head_dim = 8"),
    Wrong("v", randn(1, 2, 9, 5), ValueError, r"^v: was of shape \(1, 2, 9, 5\), must have batch = 2"),
    Wrong("v", randn(2, 1, 9, 5), ValueError, r"^v: was of shape \(2, 1, 9, 5\), must have heads_kv = 2"),
    Wrong("v", randn(2, 2, 8, 5), ValueError, r"^v: was of shape \(2, 2, 8, 5\), must have seq_kv = 9"),
    Wrong("v", randn(2, 2, 9, 0), ValueError, r"^v: had head_dim_v 0, must be at least 1"),
    Wrong("q", randn(2, 3, 6, 8), ValueError, r"^q: had 3 heads, must have a multiple of the 2 heads of k and v"),
    Wrong("q", randn(2, 33, 6, 8), ValueError, r"^q: had 33 heads, must have a multiple of the 2"),
    Wrong("q", randn(2, 1, 6, 8), ValueError, r"^q: had 1 heads, must have a multiple of the 2"),
    Wrong("layout", "sbhd", ValueError, r"^layout: was 'sbhd', must be one of \('bhsd', 'bshd'\)"),
    Wrong("layout", ["bhsd"], ValueError, r"^layout: was \['bhsd'\], must be one of"),
    Wrong("layout", None, ValueError, r"^layout: was None, must be one of"),
]
MODIFIERS = [
    Wrong("scale", "1", TypeError, r"^scale: was '1', must be None or a number"),
    Wrong("scale", True, TypeError, r"^scale: was True, must be None or a number"),
    Wrong("scale", [1.0], TypeError, r"^scale: was \[1.0\], must be None or a number"),
    Wrong("scale", np.float32(1), TypeError, r"^scale: was np.float32\(1.0\), must be None or a number \(a Python int"),
    Wrong("scale", torch.tensor(1.0), TypeError, r"^scale: was tensor\(1.\), must be None or a number"),
    Wrong("scale", math.nan, ValueError, r"^scale: was nan, must be finite"),
    Wrong("scale", -math.inf, ValueError, r"^scale: was -inf, must be finite"),
    Wrong("scale", 1e39, ValueError, r"^scale: was 1e\+39, must be finite in float32"),
    Wrong("scale", 10**400, ValueError, r"^scale: was 1000.*, must be finite in float32"),
    Wrong("mask", "causal", TypeError, r"^mask: was 'causal', must be None, Causal\(\)"),
    Wrong("mask", Causal, TypeError, r"^mask: was <class .*Causal'>, must be None, Causal\(\)"),
    Wrong("mask", True, TypeError, r"^mask: was True, must be None"),
    Wrong("mask", np.ones((6, 9), dtype=bool), TypeError, r"^mask: was array"),
    Wrong("mask", torch.zeros(6, 9), TypeError, r"^mask: was a tensor of dtype torch.float32, must be torch.bool"),
    Wrong("mask", torch.ones(6, 8, dtype=torch.bool), ValueError, r"^mask: was of shape \(6, 8\), must broadcast to"),
    Wrong("mask", torch.ones(1, 1, 1, 6, 9, dtype=torch.bool), ValueError, r"^mask: was of shape \(1, 1, 1, 6, 9\)"),
    Wrong("mask", torch.ones(1, 9, dtype=torch.bool, device="meta"), ValueError, r"^mask: was on meta, must be on cpu"),
    Wrong("mask", sparse(6, 9).bool(), TypeError, r"^mask: was a tensor of layout torch.sparse_coo, must be torch.str"),
    Wrong(
        "mask",
        torch.nested.nested_tensor([torch.ones(6, 9) > 0], layout=torch.jagged),
        TypeError,
        r"^mask: was a nested tensor, must be",
    ),
    Wrong("scores", (Bias(sparse(6, 9)),), TypeError, r"^Bias tensor: was a tensor of layout torch.sparse_coo, must"),
    Wrong("scores", (ALiBi(sparse(4)),), TypeError, r"^ALiBi slopes: was a tensor of layout torch.sparse_coo, must"),
    Wrong("scores", (Sink(sparse(4)),), TypeError, r"^Sink logits: was a tensor of layout torch.sparse_coo, must be"),
    Wrong("scores", None, TypeError, r"^scores: was None, must be a tuple such as"),
    Wrong("scores", torch.zeros(6, 9), TypeError, r"^scores: was tensor"),
    Wrong("scores", Bias(randn(6, 9)), TypeError, r"^scores: was Bias"),
    Wrong("scores", {"bias": 1}, TypeError, r"^scores: was {'bias': 1}"),
    Wrong("scores", (3.0,), TypeError, r"^scores: held 3.0, must hold Softcap"),
    Wrong("scores", (Bias(randn(7, 9)),), ValueError, r"^scores bias: was of shape \(7, 9\), must broadcast to"),
    Wrong("scores", (Bias(torch.zeros(1, device="meta")),), ValueError, r"^scores bias: was on meta, must be on cpu"),
    Wrong("scores", (ALiBi(randn(3)),), ValueError, r"^scores alibi: was of shape \(3,\), must be \(4,\) or \(2, 4\)"),
    Wrong("scores", (Sink(randn(2, 4)),), ValueError, r"^scores sink: was of shape \(2, 4\), must be \(4,\)"),
    Wrong("backend", "gpu", ValueError, r"^backend: was 'gpu', must be 'auto' or one of"),
    Wrong("backend", {"cpu"}, ValueError, r"^backend: was {'cpu'}, must be 'auto' or one of"),
    Wrong("plan", {"tile_q": 3}, TypeError, r"^plan: was {'tile_q': 3}, must be None or a Plan"),
    Wrong("plan", Plan("abacus", "beads"), ValueError, r"^plan: named backend 'abacus', must name"),
]
# For q (8, 4, 8), k (11, 2, 8), v (11, 2, 5), two sequences.
VARLEN = [
    Wrong("q", None, TypeError, r"^q: was NoneType"),
    Wrong("q", randn(1, 8, 4, 8), ValueError, r"^q: was of shape \(1, 8, 4, 8\), must be \(total_q, heads_q, head_dim"),
    Wrong("q", torch.zeros(8, 4, 8, dtype=i32), TypeError, r"^q: was torch.int32"),
    Wrong("q", randn(8, 3, 8), ValueError, r"^q: had 3 heads"),
    Wrong("k", randn(11, 2, 7), ValueError, r"^k: was of shape \(11, 2, 7\), must have head_dim = 8"),
    Wrong("k", randn(11, 2, 8, dtype=f16), TypeError, r"^k: was torch.float16, must be torch.float32 like q"),
    Wrong("v", randn(10, 2, 5), ValueError, r"^v: was of shape \(10, 2, 5\), must have total_kv = 11"),
    Wrong("v", randn(11, 1, 5), ValueError, r"^v: was of shape \(11, 1, 5\), must have heads_kv = 2"),
    Wrong("v", randn(11, 2, 0), ValueError, r"^v: had head_dim_v 0"),
    *(
        case
        for name, rows, length in (("cu_seqlens_q", 8, 8), ("cu_seqlens_kv", 11, 11))
        for case in (
            Wrong(name, None, TypeError, rf"^{name}: was NoneType, must be a torch.int32 or torch.int64 tensor"),
            Wrong(name, [0, 3, rows], TypeError, rf"^{name}: was list"),
            Wrong(name, torch.tensor([0.0, 3, rows]), TypeError, rf"^{name}: was torch.float32"),
            Wrong(name, torch.tensor([0, 3, rows], dtype=torch.int16), TypeError, rf"^{name}: was torch.int16"),
            Wrong(name, torch.tensor(0), ValueError, rf"^{name}: was of shape \(\), must be \(sequences \+ 1,\)"),
            Wrong(name, torch.zeros(0, dtype=i32), ValueError, rf"^{name}: was of shape \(0,\)"),
            Wrong(name, torch.zeros(1, 3, dtype=i32), ValueError, rf"^{name}: was of shape \(1, 3\)"),
            Wrong(name, torch.tensor([1, 3, rows]), ValueError, rf"^{name}: began with 1, must begin with 0"),
            Wrong(name, torch.tensor([-1, 3, rows]), ValueError, rf"^{name}: began with -1"),
            Wrong(name, torch.tensor([0, 5, 3]), ValueError, rf"^{name}: was \[0, 5, 3\], must never fall"),
            Wrong(name, torch.tensor([0, 3, rows + 1]), ValueError, rf"^{name}: ended with {rows + 1}, must end"),
            Wrong(name, torch.tensor([0, 2**62, 2**63 - 1]), ValueError, rf"^{name}: ended with 9223372036854775807"),
            Wrong(name, torch.tensor([0, 2**62, -(2**62)]), ValueError, rf"^{name}: was .*, must never fall"),
            Wrong(name, torch.zeros(3, dtype=i32, device="meta"), ValueError, rf"^{name}: was on meta, must be on cpu"),
        )
    ),
    Wrong("cu_seqlens_kv", torch.tensor([0, 11]), ValueError, r"^cu_seqlens_kv: had 2 entries, must have 3 like"),
    Wrong("max_seqlen_q", 4, ValueError, r"^max_seqlen_q: was 4, must be at least the longest sequence, 5"),
    Wrong("max_seqlen_q", -1, ValueError, r"^max_seqlen_q: was -1, must be at least"),
    Wrong("max_seqlen_kv", 5.0, TypeError, r"^max_seqlen_kv: was 5.0, must be None or an int"),
    Wrong("max_seqlen_kv", True, TypeError, r"^max_seqlen_kv: was True, must be None or an int"),
    Wrong(
        "mask",
        torch.ones(6, 6, dtype=torch.bool),
        ValueError,
        r"^mask: was of shape \(6, 6\), must broadcast to .*5, 7",
    ),
]
# For q (2, 1, 4, 8), caches (2, 12, 2, 8) and (2, 12, 2, 5), lengths [3, 10].
DECODE = [
    Wrong("q", None, TypeError, r"^q: was NoneType"),
    Wrong(
        "q", randn(2, 4, 8), ValueError, r"^q: was of shape \(2, 4, 8\), must be \(batch, seq_q, heads_q, head_dim\)"
    ),
    Wrong("q", randn(2, 1, 3, 8), ValueError, r"^q: had 3 heads, .* 2 heads of k_cache and v_cache, their third dim"),
    Wrong("q", torch.zeros(2, 1, 4, 8, dtype=i32), TypeError, r"^q: was torch.int32"),
    Wrong("k_cache", None, TypeError, r"^k_cache: was NoneType, must be a \(strided\) torch.Tensor"),
    Wrong("k_cache", sparse(2, 12, 2, 8), TypeError, r"^k_cache: was .*must be a \(strided\)"),
    Wrong("k_cache", randn(3, 12, 2, 8), ValueError, r"^k_cache: was of shape \(3, 12, 2, 8\), must have batch = 2"),
    Wrong("k_cache", randn(2, 12, 2, 7), ValueError, r"^k_cache: was of shape .*, must have head_dim = 8"),
    Wrong("k_cache", randn(2, 12, 8), ValueError, r"^k_cache: was of shape \(2, 12, 8\), must be \(batch, capacity"),
    Wrong("k_cache", randn(2, 12, 2, 8, dtype=f16), TypeError, r"^k_cache: was torch.float16, must be torch.float32"),
    Wrong("v_cache", randn(2, 11, 2, 5), ValueError, r"^v_cache: was of shape .*, must have capacity = 12"),
    Wrong("v_cache", randn(2, 12, 1, 5), ValueError, r"^v_cache: was of shape .*, must have heads_kv = 2"),
    Wrong("v_cache", randn(2, 12, 2, 0), ValueError, r"^v_cache: had head_dim_v 0, must be at least 1"),
    Wrong("v_cache", torch.zeros(2, 12, 2, 5, dtype=torch.int8), TypeError, r"^v_cache: was torch.int8, must be torch"),
    Wrong("v_cache", torch.zeros(2, 12, 2, 5, device="meta"), ValueError, r"^v_cache: was on meta, must be on cpu"),
    Wrong("kv_lens", None, TypeError, r"^kv_lens: was NoneType, must be a torch.int32 or torch.int64 tensor"),
    Wrong("kv_lens", 3, TypeError, r"^kv_lens: was int"),
    Wrong("kv_lens", torch.tensor([3.0, 4.0]), TypeError, r"^kv_lens: was torch.float32"),
    Wrong("kv_lens", torch.tensor([3]), ValueError, r"^kv_lens: was of shape \(1,\), must have batch = 2"),
    Wrong("kv_lens", torch.tensor([[3, 4]]), ValueError, r"^kv_lens: was of shape \(1, 2\), must be \(batch\)"),
    Wrong("kv_lens", torch.tensor([3, 13]), ValueError, r"^kv_lens: ranged from 3 to 13, must lie in 0..12"),
    Wrong("kv_lens", torch.tensor([-1, 3]), ValueError, r"^kv_lens: ranged from -1 to 3, must lie in 0..12"),
    Wrong("kv_lens", torch.tensor([0, 2**63 - 1]), ValueError, r"^kv_lens: ranged from 0 to 9223372036854775807"),
    Wrong("page_table", [[0]], ValueError, r"^page_table: was list, must be a tensor \(batch, pages_per_sequence\)"),
    Wrong("page_table", table([0], [0])[0], ValueError, r"^page_table: was \(1,\), must be a tensor"),
    Wrong("k_new", randn(2, 1, 2, 8), TypeError, r"^v_new: was NoneType, must be a torch.Tensor where the other is"),
    Wrong("v_new", randn(2, 1, 2, 5), TypeError, r"^k_new: was NoneType, must be a torch.Tensor where the other is"),
    Wrong("k_scale", torch.ones(1), ValueError, r"^k_scale: was given, must be None for caches of q's dtype"),
    Wrong("v_scale", torch.ones(1), ValueError, r"^v_scale: was given, must be None for caches of q's dtype"),
    Wrong("rotary", (1, 2), TypeError, r"^rotary: was \(1, 2\), must be None or Rotary\(cos, sin\)"),
    Wrong("rotary", Rotary(None, randn(12, 4)), TypeError, r"^rotary cos: was NoneType, must be a floating-point"),
    Wrong("rotary", Rotary(randn(12, 4).int(), randn(12, 4)), TypeError, r"^rotary cos: was torch.int32, must be"),
    Wrong("rotary", Rotary(randn(12, 4), randn(12, 3)), ValueError, r"^rotary sin: was of shape \(12, 3\), must be"),
    Wrong("rotary", Rotary(randn(4), randn(4)), ValueError, r"^rotary cos: was of shape \(4,\), must be \(positions"),
    Wrong("rotary", Rotary(randn(12, 5), randn(12, 5)), ValueError, r"^rotary cos: had 5 columns, must have at most"),
    Wrong("rotary", Rotary(randn(6, 4), randn(6, 4)), ValueError, r"^rotary cos: had 6 positions, must have at least"),
]


def assert_refused(wrong: Wrong, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    with pytest.raises(wrong.error, match=wrong.message):
        function(**(arguments | {wrong.argument: wrong.value}))


def dense_arguments(backend: str) -> dict[str, Any]:
    return {"q": randn(2, 4, 6, 8), "k": randn(2, 2, 9, 8), "v": randn(2, 2, 9, 5), "backend": backend}


@pytest.mark.parametrize("wrong", DENSE + MODIFIERS + FLAGS, ids=str)
def test_dense(wrong):
    for backend in BACKENDS:
        for function in (attention, explain):
            assert_refused(wrong, function, dense_arguments(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_after_a_good_call_prepared_it(backend):
    """The way from a key to a prepared call is no way around the checks: 1 == True, and an operand may have moved."""
    good = dense_arguments(backend)
    for prepared in (
        {},
        {"scale": 1.0, "return_lse": True, "deterministic": True, "batch_invariant": True},
        {"mask": torch.ones(1, 9, dtype=torch.bool), "backend": "reference"},
        {"scores": (Bias(torch.zeros(1)),), "backend": "reference"},
    ):
        attention(**(good | prepared))
    everything = {"scale": 1.0, "return_lse": True, "deterministic": True, "batch_invariant": True}
    for wrong in DENSE + MODIFIERS + FLAGS:
        assert_refused(wrong, attention, good)
        assert_refused(wrong, attention, good | everything)


@pytest.mark.parametrize("wrong", VARLEN + [w for w in MODIFIERS if w.argument != "mask"] + FLAGS, ids=str)
def test_varlen(wrong):
    for backend in BACKENDS:
        good = {"q": randn(8, 4, 8), "k": randn(11, 2, 8), "v": randn(11, 2, 5), "backend": backend}
        good |= {"cu_seqlens_q": torch.tensor([0, 3, 8]), "cu_seqlens_kv": torch.tensor([0, 7, 11])}
        attention_varlen(**good)
        assert_refused(wrong, attention_varlen, good)


def decode_arguments(backend: str) -> dict[str, Any]:
    caches = {"k_cache": randn(2, 12, 2, 8), "v_cache": randn(2, 12, 2, 5)}
    return {"q": randn(2, 1, 4, 8), "kv_lens": torch.tensor([3, 10]), "backend": backend} | caches


@pytest.mark.parametrize(
    "wrong",
    DECODE + [w for w in MODIFIERS if w.argument != "mask"] + [w for w in FLAGS if w.argument != "deterministic"],
    ids=str,
)
def test_decode(wrong):
    for backend in BACKENDS:
        good = decode_arguments(backend)
        attention_decode(**good)
        assert_refused(wrong, attention_decode, good)


# For pages (5, 4, 2, dim), lengths [3, 6], one new key, a table of two pages for each sequence.
PAGED = [
    Wrong("page_table", table([0, 1], [2, 5]), ValueError, r"^page_table: entry \[1, 1\] was 5, must lie in 0..4"),
    Wrong("page_table", table([-1, 1], [2, 3]), ValueError, r"^page_table: entry \[0, 0\] was -1, must lie in 0..4"),
    Wrong("page_table", table([0, 1], [2, 2**62]), ValueError, r"^page_table: entry \[1, 1\] was 4611686018427387904"),
    Wrong("page_table", table([0, 1]), ValueError, r"^page_table: was of shape \(1, 2\), must have batch = 2"),
    Wrong("page_table", torch.zeros(2, 2), TypeError, r"^page_table: was torch.float32, must be a torch.int32 or"),
    Wrong("page_table", torch.zeros(2, 0, dtype=i32), ValueError, r"^kv_lens: ranged from 3 to 6, must lie in"),
    Wrong("kv_lens", torch.tensor([3, 8]), ValueError, r"^kv_lens: ranged from 3 to 8, must lie in 0..7"),
    Wrong("k_cache", randn(5, 0, 2, 8), ValueError, r"^v_cache: was of shape .* must have page_size = 0"),
    Wrong("k_cache", randn(5, 3, 2, 8), ValueError, r"^v_cache: was of shape .* must have page_size = 3"),
    Wrong("v_cache", randn(4, 4, 2, 5), ValueError, r"^v_cache: was of shape .* must have pages = 5"),
    Wrong("k_new", randn(2, 1, 1, 8), ValueError, r"^k_new: was of shape .* must have heads_kv = 2"),
    Wrong("k_new", randn(2, 1, 2, 7), ValueError, r"^k_new: was of shape .* must have dim = 8"),
    Wrong("k_new", randn(2, 1, 2, 8, dtype=f16), TypeError, r"^k_new: was torch.float16, must be torch.float32 like"),
    Wrong("k_new", randn(2, 1, 2, 8).requires_grad_(), ValueError, r"^k_new: required grad"),
    Wrong("v_new", randn(2, 2, 2, 5), ValueError, r"^v_new: had seq_new 2, must have 1 like k_new"),
    Wrong("v_new", randn(1, 1, 2, 5), ValueError, r"^v_new: was of shape .* must have batch = 2"),
    *(w for w in MODIFIERS if w.argument != "mask"),
    *(w for w in DECODE if w.argument in ("q", "rotary")),
]


@pytest.mark.parametrize("wrong", PAGED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_is_not_written_when_a_check_fails(wrong, backend):
    good = decode_arguments(backend) | {"k_cache": randn(5, 4, 2, 8), "v_cache": randn(5, 4, 2, 5)}
    good |= {"kv_lens": torch.tensor([3, 6]), "page_table": table([0, 1], [2, 3])}
    good |= {"k_new": randn(2, 1, 2, 8), "v_new": randn(2, 1, 2, 5)}
    attention_decode(**good)
    caches = (good | {wrong.argument: wrong.value})["k_cache"], (good | {wrong.argument: wrong.value})["v_cache"]
    before = [cache.clone() for cache in caches]
    assert_refused(wrong, attention_decode, good | {"k_new": good["k_new"] + 1})
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


QUANTISED = [
    Wrong("k_scale", None, TypeError, r"^k_scale: was NoneType, must be a float32 tensor for torch.int8 caches"),
    Wrong("v_scale", 0.5, TypeError, r"^v_scale: was float, must be a float32 tensor"),
    Wrong("k_scale", torch.ones(1, dtype=f16), TypeError, r"^k_scale: was torch.float16, must be a float32 tensor"),
    Wrong("k_scale", torch.ones(4), ValueError, r"^k_scale: was of shape \(4,\), must have 1 element or"),
    Wrong("v_scale", torch.ones(1, device="meta"), ValueError, r"^v_scale: was on meta"),
    Wrong("v_cache", torch.zeros(2, 12, 2, 5), TypeError, r"^v_cache: was torch.float32, must be torch.int8 like"),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_quantised_caches(backend):
    good = decode_arguments(backend) | {"k_scale": torch.ones(1), "v_scale": torch.ones(2)}
    good |= {"k_cache": torch.ones(2, 12, 2, 8, dtype=torch.int8), "v_cache": torch.ones(2, 12, 2, 5, dtype=torch.int8)}
    attention_decode(**good)
    for wrong in QUANTISED:
        assert_refused(wrong, attention_decode, good)


def test_every_argument_has_a_wrong_value_here():
    """A parameter that is added to a function without a wrong value in these lists fails here."""
    for function, lists in (
        (attention, (DENSE, MODIFIERS, FLAGS)),
        (attention_varlen, (VARLEN, MODIFIERS, FLAGS)),
        (attention_decode, (DECODE, PAGED, QUANTISED, MODIFIERS, FLAGS)),
    ):
        covered = {wrong.argument for wrongs in lists for wrong in wrongs}
        assert set(inspect.signature(function).parameters) <= covered, function.__name__
