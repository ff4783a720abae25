"""Problems whose tiles of rows leave the card idle, all along as there are few ("split_kv") or in the last wave
("stream_k"): keys are cut into parts, each with a result of its own, in fp32, and a second kernel puts the parts
together, weighed by their LSE.

Which keys make a part is the plan's ``split_kv``, so for one plan a row's bits depend on nothing else in the batch; or,
of "stream_k", follows from the number of tiles and of multiprocessors.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from attnworks.backends.cuda.compile import cubin
from attnworks.backends.cuda.driver import PROGRAMMATIC_STREAM_SERIALIZATION, LaunchAttribute, LaunchConfig, driver
from attnworks.backends.cuda.plans import MOST_PARTS, tiles_of
from attnworks.backends.cuda.source import merge_text
from attnworks.memory import empty_cuda
from attnworks.plan import Plan
from attnworks.problem import Problem, contiguous_strides

WARPS = 4  # of a thread block, a row each: merge.cuh
LEAST_STEPS = 4  # KV tiles of a stretch


class Stretches(ctypes.Structure):
    """``Stretches`` of stream_k.cuh, field by field; all 0 where nothing is cut into them."""

    _fields_ = tuple((name, c_int) for name in ("whole", "kv_tiles", "steps", "workers"))

    def begin(self, worker: int) -> int:
        """The first KV tile of a stretch, of all shared tiles of rows in a row (``stretch_begin``)."""
        return int(worker * self.steps // self.workers)

    def _of(self, step: int) -> int:
        """The stretch that has a KV tile of the shared tiles of rows."""
        return int(((step + 1) * self.workers - 1) // self.steps)

    def parts_of(self, tile: int) -> int:
        """Stretches that a shared tile of rows lies in."""
        return self._of((tile + 1) * self.kv_tiles - 1) - self._of(tile * self.kv_tiles) + 1


class MergeParams(ctypes.Structure):
    """``MergeParams`` of merge.cuh, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("parts", "parts_lse", "out", "lse", "sink")),
        *((name, c_int64) for name in ("out_batch", "out_head", "out_row", "out_split", "lse_split", "first", "end")),
        *((name, c_int) for name in ("heads", "rows", "splits", "dim_v", "tile_q", "tiles")),
        ("stretches", Stretches),
    )


def parts(p: Problem, plan: Plan) -> int:
    """Of the keys; 1 where they are not split."""
    return max(1, math.ceil(p.seq_kv / plan.split_kv)) if plan.split_kv else 1


def stretches(p: Problem, plan: Plan, units: int) -> Stretches:
    """Of the tiles of rows that are left over when ``units`` multiprocessors have had as many as each other."""
    if plan.schedule != "stream_k":
        return Stretches()
    tiles, kv_tiles = tiles_of(p, plan), math.ceil(p.seq_kv / plan.tile_kv)
    shared = tiles % units
    steps = shared * kv_tiles
    most = min(units, steps // LEAST_STEPS, (MOST_PARTS - 2) * shared)
    return Stretches(tiles - shared, kv_tiles, steps, max(most, shared))


class Partial:
    """Where the parts' results lie, and the second kernel, on the current device. Raises ``CompileError`` or
    ``DriverError``."""

    def __init__(self, p: Problem, plan: Plan, units: int) -> None:
        rows = p.batch * p.heads_q * p.seq_q
        cut = stretches(p, plan, units)
        tiles = math.ceil(p.seq_q / plan.tile_q)
        first = cut.whole // tiles * p.seq_q + cut.whole % tiles * plan.tile_q
        if cut.workers:
            splits, most = 0, max(map(cut.parts_of, range(cut.steps // cut.kv_tiles)), default=0)
        else:
            splits = most = parts(p, plan)
        held, dim = rows - first, p.head_dim_v
        self._shapes = (most, held, dim), (most, held)
        self.fields = {
            "first": first, "out_split": held * dim, "lse_split": held, "splits": splits, "stretches": cut,
            "split_tiles": plan.split_kv // plan.tile_kv,
        }  # fmt: skip
        (batch, head, row), _ = p.result_strides()
        self._params = MergeParams(
            out_batch=batch, out_head=head, out_row=row, out_split=held * dim, lse_split=held, first=first, end=rows,
            heads=p.heads_q, rows=p.seq_q, splits=splits, dim_v=dim, tile_q=plan.tile_q, tiles=tiles, stretches=cut,
        )  # fmt: skip
        self._function = driver().function(cubin(merge_text(bf16=p.dtype == torch.bfloat16)), "merge", 0)
        self._arguments = (c_void_p * 1)(ctypes.addressof(self._params))
        # Its thread blocks come as the forward kernel's end and wait for all of its parts themselves.
        self._early = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = LaunchConfig(math.ceil(held / WARPS), 1, 1, 32 * WARPS, 1, 1, 0)
        self._config.attributes, self._config.attribute_count = ctypes.addressof(self._early), 1

    def empty(self) -> tuple[Tensor, Tensor]:
        """Memory for the parts' O and LSE, on the current device."""
        out, lse = (empty_cuda(shape, contiguous_strides(shape), torch.float32) for shape in self._shapes)
        return out, lse

    def merge(
        self, held: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None, sink: Tensor | None, stream: int
    ) -> None:
        """On ``stream``, after the forward kernel. Raises ``DriverError``."""
        if not self._config.grid_x:  # of "stream_k" where every multiprocessor has as many tiles as the others
            return
        params = self._params
        params.parts, params.parts_lse = (x.data_ptr() for x in held)
        params.out, params.lse = out.data_ptr(), None if lse is None else lse.data_ptr()
        params.sink = None if sink is None else sink.data_ptr()
        self._config.stream = stream
        config, arguments = ctypes.addressof(self._config), ctypes.addressof(self._arguments)
        driver().check(driver().launch(config, self._function, arguments, None), "merging results of parts of the keys")
