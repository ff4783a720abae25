"""Conventions: inferred from names, expressed rightly, refused with reasons; what a kernel declares is respected."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnworks as aw
import kernel_helpers as kernels
from attnworks.workbench import catalogue
from attnworks.workbench.conventions import CONVENTIONS, as_subject, infer, load_subject, parameters_of
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.probing import prepare, prepare_function
from attnworks.workbench.subjects import Declined, Finding, Raised, Subject
from attnworks.workbench.verify import verify

INFERRED = {
    "sdpa": scaled_dot_product_attention,
    "flash": kernels.flash_attn_func,
    "flash_varlen": kernels.flash_attn_varlen_func,
    "flash_kvcache": kernels.flash_attn_with_kvcache,
    "attnworks": aw.attention,
    "attnworks_varlen": aw.attention_varlen,
    "attnworks_decode": aw.attention_decode,
}


@pytest.mark.parametrize("name", INFERRED)
def test_the_convention_is_inferred_from_names(name: str) -> None:
    assert infer(parameters_of(INFERRED[name])).name == name


def test_flex_is_inferred() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    assert infer(parameters_of(flex_attention)).name == "flex"


def test_an_unclear_signature_lists_the_conventions() -> None:
    def unclear(q: Any, k: Any, v: Any) -> None: ...

    with pytest.raises(ValueError, match="fit no convention") as error:
        as_subject(unclear)
    assert all(f"{convention.name}: " in str(error.value) for convention in CONVENTIONS)
    assert "softmax_scale" in str(error.value) and "--convention" in str(error.value)

    def both(q: Any, k: Any, v: Any, attn_mask: Any = None, softmax_scale: Any = None) -> None: ...

    with pytest.raises(ValueError, match="fit sdpa and flash"):
        as_subject(both)
    assert as_subject(both, "flash").reasons(catalogue.BY_NAME["size: 7"].build()) == ()
    with pytest.raises(ValueError, match="convention: was 'nonsense'"):
        as_subject(both, "nonsense")


def ran(subject: Subject, *patterns: str) -> tuple[set[str], list[str]]:
    """Names of the cases whose forward passed, and messages of whatever failed."""
    results = verify(subjects=[subject], cases=patterns, quick=True)
    passed = {r.case.name for r in results if r.status == "passed" and r.check == "forward"}
    return passed, [f"{r.check} of {r.case.name}: {r.message}" for r in results if r.status == "failed"]


def test_sdpa_gets_masks_bias_and_alibi_and_either_layout() -> None:
    subject = prepare_function(scaled_dot_product_attention).subject
    patterns = ("causal *", "window*", "boolean*", "alibi*", "bias*", "heads: 8*", "strides: gapped, bshd", "hand: *")
    passed, failed = ran(subject, *patterns)
    assert not failed
    assert {"causal bottom-right: 40 on 100", "causal top-left: 40 on 100", "alibi", "bias that hides"} <= passed
    assert {"boolean mask bhqk", "strides: gapped, bshd", "heads: 8/2"} <= passed and "hand: sink" not in passed


def test_flash_gets_windows_softcap_and_alibi() -> None:
    subject = prepare_function(kernels.flash_attn_func).subject
    passed, failed = ran(
        subject, "causal *", "window*", "softcap*", "alibi*", "rows without keys*", "strides*", "hand*"
    )
    assert not failed
    assert {"causal bottom-right: 40 on 100", "window 7, 5: 100 on 100", "softcap 2", "alibi"} <= passed
    assert "causal top-left: 40 on 100" not in passed  # it has no such alignment
    inputs = catalogue.BY_NAME["causal top-left: 40 on 100"].build()
    assert subject.reasons(inputs) == ("the convention aligns masks bottom-right only",)
    inputs = catalogue.BY_NAME["bias bhqk"].build()
    assert subject.reasons(inputs) == ("the convention has no bias",)


@pytest.mark.parametrize("function", [kernels.flash_attn_varlen_func, aw.attention_varlen])
def test_packed_sequences(function: Any) -> None:
    passed, failed = ran(prepare_function(function).subject, "varlen*")
    assert not failed and {"varlen with empty", "varlen unequal, causal, bf16"} <= passed


@pytest.mark.parametrize("function", [kernels.flash_attn_with_kvcache, aw.attention_decode])
def test_caches(function: Any) -> None:
    passed, failed = ran(prepare_function(function).subject, "decode, append*", "decode, 4*", "decode, grouped, fp32")
    assert not failed
    assert {"decode, append, pages of 16, fp32", "decode, 4 queries, causal, pages of 17"} <= passed


def test_the_wrong_convention_does_not_pass() -> None:
    """The layout and the alignment are part of a convention: taken for another one, the kernel is wrong."""
    flash = prepare_function(kernels.flash_attn_func, "sdpa").subject
    assert ran(flash, "size: 97")[1]


def test_what_is_missing_is_found_by_trying() -> None:
    prepared = prepare_function(kernels.no_groups)
    assert set(prepared.refused) == {"float16", "grouped heads", "LSE", "gradients"}
    assert "RuntimeError: not that" in prepared.refused["grouped heads"]
    results = verify(subjects=[prepared.subject], cases=["size: 97", "heads: 8/2", "rows without keys, fp16"])
    by_case = {(r.case.name, r.check): (r.status, r.message) for r in results}
    assert by_case["heads: 8/2", "forward"] == ("skipped", "grouped heads")
    assert by_case["rows without keys, fp16", "forward"] == ("skipped", "dtype float16")
    assert by_case["size: 97", "forward"][0] == "passed" and by_case["size: 97", "fused"][0] == "passed"
    assert by_case["size: 97", "lse"] == ("skipped", "it returns no LSE")
    assert by_case["size: 97", "gradients"] == ("skipped", "gradients")


def test_a_crash_when_tried_is_no_refusal() -> None:
    def partly_dead(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        if query.dtype == torch.float16:
            raise Finding("crashed with SIGABRT")  # as Isolated says it
        if query.dtype == torch.bfloat16:
            raise Raised("raised RuntimeError: no bf16")
        return scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)

    prepared = prepare_function(partly_dead)
    assert prepared.refused == {"bfloat16": "raised RuntimeError: no bf16", "LSE": "it returns none"}
    case = replace(catalogue.BY_NAME["size: 7"], gradients=False)
    results = verify(subjects=[prepared.subject], cases=[replace(case, dtype=torch.float16), case])
    forward = [(r.status, r.message) for r in results if r.check == "forward"]
    assert forward == [("failed", "crashed with SIGABRT"), ("passed", "")]


def test_raising_where_nothing_is_to_be_worked_out_is_listed() -> None:
    def own(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        if query.shape[1] == 0 or key.shape[2] == 0:
            raise ZeroDivisionError("modulo by zero\nfar below")
        return scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)

    prepared = prepare_function(own)
    assert prepared.refused["no heads"] == "raised ZeroDivisionError: modulo by zero\nfar below"
    assert prepared.subject.abilities.empty == ("batch", "queries")
    cases = [replace(catalogue.BY_NAME[f"empty: {what}"], gradients=False) for what in ("heads_q", "seq_q", "seq_kv")]
    results = verify(subjects=[prepared.subject], cases=cases)
    forward = [(r.case.name, r.status, r.message[:10]) for r in results if r.check == "forward"]
    assert forward == [
        ("empty: heads_q", "skipped", "no heads"),
        ("empty: seq_q", "passed", ""),
        ("empty: seq_kv", "failed", "raised Zer"),  # rows without keys have a result
    ]


def test_a_backward_that_raises_without_heads_is_listed_too() -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            ctx.save_for_backward(query, key, value)
            return scaled_dot_product_attention(query, key, value)

        @staticmethod
        def backward(ctx: Any, d_out: Any) -> Any:
            tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            if tensors[0].shape[1] == 0:
                raise RuntimeError("cannot reshape")
            with torch.enable_grad():
                return torch.autograd.grad(scaled_dot_product_attention(*tensors), tensors, d_out)

    def own(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        return Squared.apply(query, key, value)  # type: ignore[no-untyped-call]

    assert prepare_function(own).refused["no heads"] == "backward raised RuntimeError: cannot reshape"


def test_declared_abilities_are_not_tried() -> None:
    def own(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
        assert query.shape[1] == key.shape[1], "asked for grouped heads"
        return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal)

    own.declares = {"dtypes": ["fp32"], "fp64": True, "gqa": False, "masks": ["causal"], "head_dims": [64]}  # type: ignore[attr-defined]
    prepared = prepare_function(own)
    assert prepared.refused == {"LSE": "it returns none"}
    reasons = {name: prepared.subject.reasons(catalogue.BY_NAME[name].build()) for name in (
        "double precision, fp64", "heads: 8/2", "window 7, 5: 100 on 100", "head dim: 80", "size: 513, causal, bf16",
    )}  # fmt: skip
    assert list(reasons.values()) == [(), ("grouped heads",), ("mask window",), ("head dim 80",), ("dtype bfloat16",)]
    own.declares = {"colour": "red"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'colour', must hold only dtypes"):
        as_subject(own)
    own.declares = {"masks": ["causel"]}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="masks: held 'causel', must hold only causal, window"):
        as_subject(own)


def test_invariance_is_only_asked_where_it_is_declared() -> None:
    def own(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Any:
        wobble = 1 + 1e-7 * query.shape[0] * torch.get_num_threads()
        return scaled_dot_product_attention(query, key, value, attn_mask) * wobble

    def statuses() -> dict[str, str]:
        case = catalogue.BY_NAME["heads: 8/2"]
        results = verify(subjects=[prepare_function(own).subject], cases=[replace(case, heads_kv=8, gradients=False)])
        return {r.check: r.status for r in results if r.layer == "property"}

    assert {statuses()[name] for name in ("batch invariant", "ignores threads")} == {"skipped"}
    own.declares = {"batch_invariant": True, "thread_invariant": True}  # type: ignore[attr-defined]
    assert {statuses()[name] for name in ("batch invariant", "ignores threads")} == {"failed"}


def test_a_subject_of_ones_own() -> None:
    def kernel(nonsense: Any) -> None: ...

    kernel.attnworks_subject = Mutant  # type: ignore[attr-defined]
    inputs: Inputs = catalogue.BY_NAME["size: 7"].build()
    for found in (kernel, Mutant(), Mutant):
        subject = as_subject(found)
        assert subject.name == "mutant: none" and subject.reasons(inputs) == ()
        assert subject(inputs)[0].shape == inputs.q.shape


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_anywhere:f", "no module 'no_such_module_anywhere'"),
        ("attnworks:no_such", "attnworks has no 'no_such', only"),
        ("nonsense", "must be package.module:function"),
        ("no_such_file.py:f", "no file no_such_file.py"),
        ("attnworks:__version__", "must be a function or a Subject"),
    ],
)
def test_targets_that_are_not_there(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_subject(target)


def test_targets_by_module_and_by_path() -> None:
    assert load_subject("torch.nn.functional:scaled_dot_product_attention").name == "scaled_dot_product_attention"
    assert load_subject(f"{kernels.__file__}:flash_attn_func").name == "flash_attn_func"
    in_process = prepare(f"{kernels.__file__}:flash_attn_func", isolated=False)
    assert in_process.to_json()["convention"] == "flash" and not in_process.to_json()["isolated"]


def test_what_a_kernel_raises_or_returns() -> None:
    subject = as_subject(kernels.faulty)
    case = catalogue.BY_NAME["size: 7"]
    with pytest.raises(Declined, match="not for this scale"):
        subject(replace(case, scale=kernels.scale_of("declines")).build())
    for fault, message in (
        ("shape", r"out was of shape \(1, 2, 7, 63\), must be \(1, 2, 7, 64\)"),
        ("dtype", "out was of dtype torch.float64, must be torch.float32"),
        ("no tensor", "returned str, must return a tensor"),
    ):
        with pytest.raises(Finding, match=message):
            subject(replace(case, scale=kernels.scale_of(fault)).build())
