"""The text printed for CUDA, compiled as plain C++ with CUDA's few words defined, against the expressions' values."""

import ctypes
import shutil
import subprocess

import pytest
import torch

import expression_cases as cases
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.evaluation import evaluate
from attnworks.expressions.source import PRELUDES, to_source
from attnworks.expressions.tracing import MASK_INPUTS, SCORE_INPUTS, trace

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HEAD = """
#include <cmath>
#include <cstdlib>
#include <cstring>
using namespace std;
#define __device__ static
#define __forceinline__ inline
static float __int_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static float rsqrt(float x) { return 1.0f / sqrt(x); }
struct __nv_bfloat16 {
    unsigned short bits;
    explicit operator float() const { return __int_as_float(static_cast<unsigned>(bits) << 16); }
};
"""
LOOP = """
extern "C" void run_{name}({result}* out, const float* s, void** operand) {{
    for (int b = 0; b < {B}; ++b) for (int h = 0; h < {H}; ++h) for (int q = 0; q < {N}; ++q)
        for (int k = 0; k < {M}; ++k) {{
            const int at = ((b * {H} + h) * {N} + q) * {M} + k;
            out[at] = {name}({arguments});
        }}
}}
"""
SIZES = {"B": cases.B, "H": cases.H, "N": cases.N, "M": cases.M}


def expressions():
    for name, function in cases.MASKS.items():
        yield name, trace(function, MASK_INPUTS)
    for name, function in cases.SCORES.items():
        traced = trace(function, SCORE_INPUTS)
        yield name, traced
        yield f"{name}_slope", traced._replace(expression=derivative(traced.expression))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    text = HEAD + PRELUDES["cuda"]
    for name, traced in expressions():
        source = to_source(traced.expression, "cuda", name)
        pointers = [part.rsplit(" ", 1)[0] for part in source[: source.index(")")].split(", ") if "operand" in part]
        arguments = ["s[at]"] if traced.expression.kind == "float" else []
        arguments += ["b", "h", "q", "k", "0", *(f"({pointer})operand[{i}]" for i, pointer in enumerate(pointers))]
        result = traced.expression.kind
        text += source + LOOP.format(name=name, result=result, arguments=", ".join(arguments), **SIZES)
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "all.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-o", str(folder / "all.so"), str(folder / "all.cpp")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.parametrize("name", [name for name, _ in expressions()])
def test_values(library, name):
    traced, s = dict(expressions())[name], cases.scores()
    expected = evaluate(traced.expression, cases.indices() | {"s": s}, traced.operands).expand_as(s)
    out = torch.empty(s.shape, dtype=torch.bool if expected.dtype == torch.bool else torch.float32)
    pointers = (ctypes.c_void_p * max(len(traced.operands), 1))(*(t.data_ptr() for t in traced.operands))
    getattr(library, f"run_{name}")(*(ctypes.c_void_p(t.data_ptr()) for t in (out, s)), pointers)
    if out.dtype == torch.bool:
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=2e-5)
