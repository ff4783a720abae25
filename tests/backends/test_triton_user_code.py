"""User-written masks and scores compile for a GPU that is not there."""

import os

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import expression_cases as cases
from attnworks.backends.triton.user_code import jit
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.source import operand_facts
from attnworks.expressions.tracing import MASK_INPUTS, SCORE_INPUTS, trace

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TYPES = {
    "torch.bool": "*i1",
    "torch.int8": "*i8",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
    "torch.float32": "*fp32",
    "torch.bfloat16": "*bf16",
}


@triton.jit
def kernel(out, s, mask_operands, score_operands, mask: tl.constexpr, score: tl.constexpr, slope: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    q, k = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    at = ((b * tl.num_programs(1) + h) * 16 + q) * 32 + k
    x = tl.load(s + at)
    y = score(x, b, h, q, k, b * 0, score_operands) + slope(x, b, h, q, k, b * 0, score_operands)
    tl.store(out + at, tl.where(mask(b, h, q, k, b * 0, mask_operands), y, float("-inf")))


def operand_types(expression):
    facts = ("i32" if number < 2**31 else "i64" for number in operand_facts(expression))
    return (*(TYPES[str(spec.dtype)] for spec in expression.operands), *facts)


def compiled(mask, score):
    functions = (jit(mask, "mask"), jit(score, "score"), jit(derivative(score), "score"))
    signature = {
        "out": "*fp32",
        "s": "*fp32",
        "mask_operands": operand_types(mask),
        "score_operands": operand_types(score),
    }
    signature |= dict.fromkeys(("mask", "score", "slope"), "constexpr")
    source = ASTSource(kernel, signature, {(4 + place,): function for place, function in enumerate(functions)})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        *(("document", "relative"), ("negative_divisors", "alibi"), ("negative_indices", "extremes")),
        *(("past_32_bits", "roots"), ("methods", "transcendental"), ("bools", "rounded"), ("functions", "softcap")),
    ],
)
def test_it_compiles_for_sm_90(mask, score):
    found = compiled(
        trace(cases.MASKS[mask], MASK_INPUTS).expression, trace(cases.SCORES[score], SCORE_INPUTS).expression
    )
    assert "st.global" in found.asm["ptx"]
    assert found.asm["cubin"]


def test_indices_stay_in_32_bits_where_they_may():
    """64-bit multiplications would cost a causal document mask its speed."""
    found = compiled(trace(cases.document, MASK_INPUTS).expression, trace(cases.alibi, SCORE_INPUTS).expression)
    assert "mul.lo.s64" not in found.asm["ptx"]


def test_the_key_of_tritons_disk_cache_goes_by_the_text_alone():
    """So that a later process finds what this one compiled: a function made anew has the key of the first."""
    expression = trace(cases.negative_divisors, MASK_INPUTS).expression
    again = jit.__wrapped__(expression, "mask")
    assert again is not jit(expression, "mask")
    assert again.cache_key == jit(expression, "mask").cache_key
    assert again.cache_key != jit(trace(cases.dilated, MASK_INPUTS).expression, "mask").cache_key
