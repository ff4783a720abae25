"""Problems with so few tiles of rows that they leave the card idle: their keys are cut into parts, each with a result
of its own, in fp32, and a second kernel puts the parts together, weighed by their LSE.

Which keys make a part is the plan's ``split_kv``, so for one plan a row's bits depend on nothing else in the batch.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from attnworks.backends.cuda.compile import cubin
from attnworks.backends.cuda.driver import LaunchConfig, driver
from attnworks.backends.cuda.source import merge_text
from attnworks.plan import Plan
from attnworks.problem import Problem

WARPS = 4  # of a thread block, a row each: merge.cuh


class MergeParams(ctypes.Structure):
    """``MergeParams`` of merge.cuh, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("parts", "parts_lse", "out", "lse", "sink")),
        *((name, c_int64) for name in ("out_batch", "out_head", "out_row", "out_split", "lse_split")),
        *((name, c_int) for name in ("heads", "rows", "splits", "dim_v")),
    )


def parts(p: Problem, plan: Plan) -> int:
    """Of the keys; 1 where they are not split."""
    return max(1, math.ceil(p.seq_kv / plan.split_kv)) if plan.split_kv else 1


def sizes(p: Problem, plan: Plan) -> dict[str, int]:
    """Fields of the forward kernel's ``Params``."""
    if not plan.split_kv:
        return {}
    out, lse = (math.prod(shape) for shape in p.result_shapes())
    tiles = plan.split_kv // plan.tile_kv
    return {"splits": parts(p, plan), "split_tiles": tiles, "out_split": out, "lse_split": lse}


class Merge:
    """The second kernel, on the current device. Raises ``CompileError`` or ``DriverError``."""

    def __init__(self, p: Problem, plan: Plan) -> None:
        self._shapes = [(parts(p, plan), *shape) for shape in p.result_shapes()]
        out, lse = (math.prod(shape) for shape in p.result_shapes())
        (batch, head, row), _ = p.result_strides()
        self._params = MergeParams(
            out_batch=batch, out_head=head, out_row=row, out_split=out, lse_split=lse, heads=p.heads_q, rows=p.seq_q,
            splits=parts(p, plan), dim_v=p.head_dim_v,
        )  # fmt: skip
        self._function = driver().function(cubin(merge_text(bf16=p.dtype == torch.bfloat16)), "merge", 0)
        self._arguments = (c_void_p * 1)(ctypes.addressof(self._params))
        self._config = LaunchConfig(math.ceil(lse / WARPS), 1, 1, 32 * WARPS, 1, 1, 0)

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for the parts' O and LSE."""
        out, lse = (torch.empty(shape, dtype=torch.float32, device=device) for shape in self._shapes)
        return out, lse

    def launch(
        self, out_parts: Tensor, lse_parts: Tensor, out: Tensor, lse: Tensor | None, sink: Tensor | None, stream: int
    ) -> None:
        """On ``stream``, after the forward kernel. Raises ``DriverError``."""
        params = self._params
        params.parts, params.parts_lse, params.out = out_parts.data_ptr(), lse_parts.data_ptr(), out.data_ptr()
        params.lse = None if lse is None else lse.data_ptr()
        params.sink = None if sink is None else sink.data_ptr()
        self._config.stream = stream
        config, arguments = ctypes.addressof(self._config), ctypes.addressof(self._arguments)
        driver().check(driver().launch(config, self._function, arguments, None), f"merging {self._params.splits} parts")
