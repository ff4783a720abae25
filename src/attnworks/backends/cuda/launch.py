"""A prepared forward call: tensor maps and arguments made once for a Problem, at each call given their addresses.

What a call changes in them is under a lock, as two threads may share a prepared call. The driver copies all of it
during the launch, so nothing here must outlive that, and captured graphs hold their own copy.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from attnworks.backends import Launcher, Unaligned
from attnworks.backends.cuda import extended, split
from attnworks.backends.cuda.compile import CompileError, cubin
from attnworks.backends.cuda.counters import counters
from attnworks.backends.cuda.driver import INVALID_CONTEXT, DriverError, LaunchConfig, driver
from attnworks.backends.cuda.maps import ADDRESS_MULTIPLE, Maps, describe
from attnworks.backends.cuda.plans import added, bounds, section, tiles_of, variant
from attnworks.backends.cuda.source import L2_SECTION_BYTES, text
from attnworks.memory import empty_cuda
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, contiguous_strides

LOG2E = 1.4426950408889634


class Params(ctypes.Structure):
    """``Params`` of schedule.cuh, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("out", "lse", "counter", "ends_q", "ends_kv", "sink")),
        *((name, c_int64) for name in ("out_batch", "out_head", "out_row", "lse_batch", "lse_head")),
        *((name, c_int) for name in ("batch", "heads", "group", "rows", "keys", "tiles", "section")),
        *((name, c_int) for name in ("total_q", "dim_v")),
        *((name, c_int) for name in ("low_bottom", "high_bottom", "low_top", "high_top")),
        *((name, c_float) for name in ("factor", "inner")),
        # What follows only the kernels read that are compiled for it.
        *((name, c_void_p) for name in ("map_rows", "map_tiles", "map_bits", "slopes", "bias")),
        *((name, c_int64) for name in ("bias_batch", "bias_head", "bias_row", "bias_key")),
        *((name, c_int) for name in ("map_batch", "map_head", "slopes_batch")),
        ("outer", c_float),
        *((name, c_void_p) for name in ("parts", "parts_lse")),
        *((name, c_int64) for name in ("first", "out_split", "lse_split")),
        *((name, c_int) for name in ("splits", "split_tiles")),
        ("stretches", split.Stretches),
    )


def params_of(p: Problem, plan: Plan) -> Params:
    """All but the addresses."""
    (out_batch, out_head, out_row), (lse_batch, lse_head, _) = p.result_strides()
    cap = next((term.cap for term in p.scores if term.kind == "softcap"), None)
    if added(p):  # outer takes what the kernel has of a score to the score itself
        factor, inner = LOG2E, 1.0 if cap is None else 2 * LOG2E * p.scale / cap
    elif cap is not None:  # cap · tanh(s · scale / cap), of which the kernel has e^2x = 2^(x · inner)
        factor, inner = cap * LOG2E, 2 * LOG2E * p.scale / cap
    elif p.scale > 0:
        factor, inner = p.scale * LOG2E, 1.0
    else:  # a row's largest score is not that of its largest product
        factor, inner = LOG2E, p.scale
    return Params(
        out_batch=out_batch, out_head=out_head, out_row=out_row, lse_batch=lse_batch, lse_head=lse_head,
        batch=p.batch, heads=p.heads_q, group=p.group, rows=p.seq_q, keys=p.seq_kv,
        tiles=-(-p.seq_q // plan.tile_q), section=section(p, L2_SECTION_BYTES), total_q=p.total_q, dim_v=p.head_dim_v,
        **bounds(p), factor=factor, inner=inner, outer=p.scale if cap is None else cap, **extended.strides(p),
    )  # fmt: skip


def prepare(problem: Problem, plan: Plan) -> Launcher:
    """Raises ``CompileError`` or ``DriverError``, with the plan, where the compiler or the driver refuses."""
    packed = problem.form == "varlen"
    rows, keys = (problem.total_q, problem.total_kv) if packed else (problem.seq_q, problem.seq_kv)
    if problem.batch and problem.heads_q and rows and keys:
        return Forward(problem, plan)
    return Empty(problem)


def _sink_of(p: Problem) -> int | None:
    """The place of the sink's logits among the scores' operands."""
    return next((term.operand.index for term in p.scores if term.kind == "sink" and term.operand), None)


class Empty:
    """No queries, or none that sees a key: nothing to launch."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._sink = problem, _sink_of(problem)

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        p = self._problem
        out_shape, lse_shape = p.result_shapes()
        out = torch.zeros(out_shape, dtype=p.dtype, device=o.q.device)
        if not p.return_lse:
            return out, None
        lse = torch.full(lse_shape, -torch.inf, dtype=torch.float32, device=o.q.device)
        if self._sink is not None:
            sink = o.scores[self._sink].float()
            if p.form == "dense":
                lse.copy_(sink[:, None].expand(lse_shape))
            elif o.cu_seqlens_q is not None:  # rows after the last sequence belong to none
                inside = torch.arange(p.total_q, device=o.q.device) < o.cu_seqlens_q[-1]
                lse.copy_(torch.where(inside, sink[:, None], -torch.inf))
        return out, lse


class Forward:
    """One kernel and its arguments on one device. Called with the operands: (out, lse)."""

    def __init__(self, problem: Problem, plan: Plan, *, bias_pairs: bool = True) -> None:
        p = self._problem = problem
        self._built = built = variant(p, plan)
        if not bias_pairs:
            self._built = built = replace(built, bias_pairs=False)
        self._plan = plan
        self._bias_pairs, self._extended = built.bias_pairs, built.extended
        device = torch.device(p.device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._dtype = p.dtype
        out, lse = ((shape, contiguous_strides(shape)) for shape in p.result_shapes())
        self._out, self._lse = out, lse if p.return_lse else None
        self._sink = _sink_of(p)
        self._parts: split.Partial | None = None
        self._lock = threading.Lock()
        with torch.cuda.device(self._index):
            try:
                self._context = driver().context()
                self._function = driver().function(cubin(text(built)), "forward", built.shared_bytes)
                units = torch.cuda.get_device_properties(self._index).multi_processor_count
                if built.partial:
                    self._parts = split.Partial(p, plan, units)
            except (CompileError, DriverError) as error:
                raise type(error)(f"{error}\nfor {plan}, compiled as {built}") from error
            self._counters = counters(self._index) if built.dynamic else None
            if self._counters is not None:
                self._counters.ready()
        # Of packed sequences the lengths, and so the tiles, are known on the device only.
        self._grid = units if built.varlen or built.stream_k else min(units, tiles_of(p, plan) * split.parts(p, plan))
        self._maps, self._params = Maps(p, describe(p, plan, out=built.bulk_store)), params_of(p, plan)
        if self._parts is not None:
            for name, value in self._parts.fields.items():
                setattr(self._params, name, value)
        q_map, k_map, v_map, *mapped = self._maps.places
        arguments = q_map, k_map, v_map, ctypes.addressof(self._params), *mapped
        self._arguments = (c_void_p * len(arguments))(*arguments)
        self._config = LaunchConfig(self._grid, 1, 1, built.threads, 1, 1, built.shared_bytes)
        places = ctypes.addressof(self._config), self._function, ctypes.addressof(self._arguments), None
        self._launch = partial(driver().launch, *places)

    @cached_property
    def _single(self) -> Forward:
        """The same for a bias that begins where two of its elements can't be read at once."""
        return Forward(self._problem, self._plan, bias_pairs=False)

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        index = self._index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(o)
        if self._bias_pairs and not extended.begins_with_a_pair(self._problem, o):
            return self._single(o)
        q, k, v = o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr()
        if (q | k | v) % ADDRESS_MULTIPLE:
            raise Unaligned
        out = empty_cuda(*self._out, self._dtype)
        lse = None if self._lse is None else empty_cuda(*self._lse, torch.float32)
        sink = None if self._sink is None else o.scores[self._sink].to(torch.float32).contiguous()
        stream = torch._C._cuda_getCurrentRawStream(index)
        more = extended.given(self._problem, self._plan, o, stream) if self._extended else None
        parts, params = self._parts, self._params
        held = None if parts is None else parts.empty()
        with self._lock:
            params.out = into = out.data_ptr()
            self._maps.point_to(q, k, v, into)
            if lse is not None:
                params.lse = lse.data_ptr()
            if held is not None:
                params.parts, params.parts_lse = held[0].data_ptr(), held[1].data_ptr()
            if self._counters is not None:
                params.counter = self._counters.take(stream)
            if sink is not None:
                params.sink = sink.data_ptr()
            if more is not None:
                more.put_into(params)
            if o.cu_seqlens_q is not None and o.cu_seqlens_kv is not None:
                params.ends_q, params.ends_kv = o.cu_seqlens_q.data_ptr(), o.cu_seqlens_kv.data_ptr()
            self._config.stream = stream
            status = self._launch()
            if status == INVALID_CONTEXT:  # a thread that has not used the device yet
                driver().make_current(self._context)
                status = self._launch()
            if held is not None and parts is not None and not status:
                parts.merge(held, out, lse, sink, stream)
        if status:
            driver().check(status, f"launching {self._grid} thread blocks for {self._plan}, compiled as {self._built}")
        return out, lse
