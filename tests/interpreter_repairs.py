"""What Triton 3.6's interpreter does not do as a GPU does, repaired: ``repair()`` once in the tests' process.

bf16: it multiplies the bits as integers, and truncates fp32 where hardware rounds to nearest even. Speed: every call of
a jitted function inside a kernel looks through all of ``triton.language`` for what the kernel's own call has replaced.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert, _patch = interpreter._convert_float, interpreter._patch_lang
_dot = interpreter.InterpreterBuilder.create_dot


@cache
def repair() -> None:
    interpreter._convert_float = _converted
    interpreter._patch_lang = _patched_once
    interpreter.InterpreterBuilder.create_dot = _product


def _converted(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return (data.astype(np.uint32) << 16).view(np.float32)
    return _convert(data, source, target, rounding)


def _product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        a, b = (interpreter.TensorHandle(_converted(x.data, tl.bfloat16, tl.float32, None), tl.float32) for x in (a, b))
    return _dot(self, a, b, *rest)


def _patched_once(function: Any) -> Any:
    """Kernels see ``triton.language``, its own functions (``tl.max``) its ``core``: two modules, each patched once."""
    seen = [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]
    return (
        _patch(function) if any(tl.core.is_builtin(module.load) for module in seen) else interpreter._LangPatchScope()
    )
