"""Backward calls: gradients of q, k, v, of biases and of a sink, each by a kernel that owns what it writes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnworks.backends import BackwardLauncher, Gradients, Needs
from attnworks.backends.triton.backward import grad_kv, grad_q, row_delta
from attnworks.backends.triton.calls import (
    PRECISION,
    Modifiers,
    bounds,
    dims,
    far_apart,
    map_arguments,
)
from attnworks.backends.triton.grad_bias import grad_bias
from attnworks.backends.triton.launch import Launch
from attnworks.backends.triton.plans import BackwardTiles, backward_tiles, block
from attnworks.backends.triton.user_code import jit
from attnworks.modifiers import grad_sink, slope_after
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, packed_strides, strides_of
from attnworks.scores import ScoreTerm

DELTA_ROWS = 64


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher:
    """The backward has tiles of its own (``plans.backward_tiles``); of the forward's plan it needs nothing."""
    return _through_pages(problem) if problem.page_size else _Backward(problem).run


def _through_pages(p: Problem) -> BackwardLauncher:
    """Pages are copied into the sequences they make up, and the gradients summed back into them in fp32, since several
    sequences may share a page."""
    strides = [(p.seq_kv * p.heads_kv * dim, dim, p.heads_kv * dim) for dim in (p.head_dim, p.head_dim_v)]
    backward = _Backward(replace(p, page_size=0, k_strides=strides[0], v_strides=strides[1]))

    def run(o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs) -> Gradients:
        assert o.page_table is not None and o.kv_lens is not None
        first_keys = torch.arange(o.page_table.shape[1], device=o.q.device) * p.page_size
        table = torch.where(first_keys < o.kv_lens[:, None], o.page_table, 0)  # unused entries may name no page
        k, v = (_sequences(x, table) for x in (o.k, o.v))
        found = backward.run(replace(o, k=k, v=v, page_table=None), out, lse, d_out, d_lse, needs)
        return found._replace(k=_into_pages(found.k, o.k, table), v=_into_pages(found.v, o.v, table))

    return run


def _sequences(pages: Tensor, table: Tensor) -> Tensor:
    """(batch, capacity, heads_kv, dim), contiguous."""
    held = pages if pages.shape[0] else pages.new_zeros(1, *pages.shape[1:])
    return held[table].flatten(1, 2)


def _into_pages(gradient: Tensor | None, pages: Tensor, table: Tensor) -> Tensor | None:
    if gradient is None or not pages.shape[0]:
        return None if gradient is None else torch.empty_like(pages)
    summed = torch.zeros(pages.shape, dtype=torch.float32, device=pages.device)
    summed.index_put_((table,), gradient.float().view(*table.shape, *pages.shape[1:]), accumulate=True)
    return torch.empty_like(pages).copy_(summed)


class _Backward:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modifiers = Modifiers(problem)
        self.slope = self.modifiers.slope()
        self.for_kv, self.for_q = backward_tiles(problem)
        # Launches by the strides of what autograd hands over, which the problem doesn't know.
        self.launches: dict[Any, Launch] = {}

    def run(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        p = self.problem
        delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
        self._row_delta(o, out, lse, d_out, d_lse, delta, lse2)
        d_q = d_k = d_v = None
        if needs[0]:
            d_q = torch.empty_like(o.q)
            self._grad_q(o, d_out, lse2, delta, d_q)
        if needs[1] or needs[2]:
            like = torch.zeros_like if p.form == "decode" else torch.empty_like  # keys past a length are nobody's
            d_k, d_v = like(o.k), like(o.v)
            self._grad_kv(o, d_out, lse2, delta, d_k, d_v)
        scores: list[Tensor | None] = [None] * len(o.scores)
        for place, term in enumerate(p.scores):
            index = None if term.operand is None else term.operand.index
            if index is None or not needs[3 + index]:
                continue
            if term.kind == "sink":
                scores[index] = grad_sink(o.scores[index], lse, delta)
            else:
                scores[index] = self._grad_bias(o, d_out, lse2, delta, place, term)
        return Gradients(d_q, d_k if needs[1] else None, d_v if needs[2] else None, tuple(scores))

    def _strides(self, tensor: Tensor) -> tuple[int, int, int]:
        return packed_strides(tensor) if self.problem.form == "varlen" else strides_of(tensor, self.problem.layout)

    def _row_delta(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, delta: Tensor, lse2: Tensor
    ) -> None:
        p, given = self.problem, self._strides(d_out)
        key = ("delta", given)
        if key not in self.launches:
            out_strides, lse_strides = p.result_strides()
            fixed = {
                "out_strides": out_strides, "grad_strides": given, "lse_strides": lse_strides,
                "batch": p.batch, "heads": p.heads_q, "seq_q": p.seq_q,
                "TILE_Q": DELTA_ROWS, "DIM": p.head_dim_v, "BLOCK": block(p.head_dim_v),
            }  # fmt: skip
            grid = math.ceil(p.seq_q / DELTA_ROWS) * p.heads_q * p.batch
            self.launches[key] = Launch(row_delta, (grid,), fixed, num_warps=4)
        self.launches[key](out, d_out, d_lse, lse, delta, lse2, o.cu_seqlens_q)

    def _common(self, tiles: BackwardTiles, d_out: Tensor) -> dict[str, Any]:
        """What the kernels of dQ, of dK and dV, and of a bias are all given."""
        p = self.problem
        return {
            "q_strides": p.q_strides, "k_strides": p.k_strides, "v_strides": p.v_strides,
            "grad_out_strides": self._strides(d_out), "lse_strides": p.result_strides()[1],
            "batch": p.batch, "group": p.group, "seq_q": p.seq_q, "seq_kv": p.seq_kv, "scale": p.scale, **bounds(p),
            "TILE_Q": tiles.tile_q, "TILE_KV": tiles.tile_kv, **dims(p),
            "SCORE": self.modifiers.score, "SCORE_GRAD": self.slope, "MASK": self.modifiers.mask,
            "PRECISION": PRECISION,
        }  # fmt: skip

    def _grad_q(self, o: Operands, d_out: Tensor, lse2: Tensor, delta: Tensor, d_q: Tensor) -> None:
        p, tiles = self.problem, self.for_q
        key = ("q", self._strides(d_out), self._strides(d_q))
        if key not in self.launches:
            packed = p.form == "varlen"
            row_tiles = max(math.ceil(p.seq_q / tiles.tile_q), int(packed))
            fixed = self._common(tiles, d_out) | {
                "grad_q_strides": self._strides(d_q), "heads": p.heads_q, "total_q": p.total_q,
                "WIDE": far_apart(tiles.tile_kv, p.k_strides, p.v_strides),
                "TAIL": p.form != "dense" or p.seq_kv % tiles.tile_kv != 0,
            }  # fmt: skip
            grid = row_tiles * p.heads_q * (p.batch + packed)
            self.launches[key] = Launch(grad_q, (grid,), fixed, num_warps=tiles.warps, num_stages=tiles.stages)
        found = self.modifiers.tile_map(o, tiles.tile_q, tiles.tile_kv) if self.modifiers.mapped else None
        # fmt: off
        self.launches[key](o.q, o.k, o.v, d_out, lse2, delta, d_q, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens,
                           None if found is None else map_arguments(found),
                           self.modifiers.score_operands(o), self.modifiers.mask_operands(o))
        # fmt: on

    def _grad_kv(self, o: Operands, d_out: Tensor, lse2: Tensor, delta: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        p, tiles = self.problem, self.for_kv
        given = self._strides(d_out)
        key = ("kv", given, self._strides(d_k), self._strides(d_v))
        if key not in self.launches:
            packed = p.form == "varlen"
            kv_tiles = max(math.ceil(p.seq_kv / tiles.tile_kv), int(packed))
            fixed = self._common(tiles, d_out) | {
                "grad_k_strides": self._strides(d_k), "grad_v_strides": self._strides(d_v),
                "heads_kv": p.heads_kv, "total_kv": p.total_kv,
                "WIDE": far_apart(tiles.tile_q, p.q_strides, given),
                "TAIL": packed or p.seq_q % tiles.tile_q != 0,
            }  # fmt: skip
            grid = kv_tiles * p.heads_kv * (p.batch + packed)
            self.launches[key] = Launch(grad_kv, (grid,), fixed, num_warps=tiles.warps, num_stages=tiles.stages)
        found = self.modifiers.tile_map(o, tiles.tile_q, tiles.tile_kv) if self.modifiers.mapped else None
        # fmt: off
        self.launches[key](o.q, o.k, o.v, d_out, lse2, delta, d_k, d_v, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens,
                           None if found is None else map_arguments(found.transposed),
                           self.modifiers.score_operands(o), self.modifiers.mask_operands(o))
        # fmt: on

    def _grad_bias(
        self, o: Operands, d_out: Tensor, lse2: Tensor, delta: Tensor, place: int, term: ScoreTerm
    ) -> Tensor:
        """In the bias's own shape: what it was broadcast along is summed within one program, always in one order."""
        p, tiles = self.problem, self.for_q
        bias = o.scores[term.operand.index] if term.operand else o.q
        shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        summed = torch.empty(shape, dtype=torch.float32, device=bias.device)
        key = ("bias", place, self._strides(d_out))
        if key not in self.launches:
            # A dimension that the bias has alone is not summed, even if its size is 1.
            over = [size == 1 for size in shape]
            tiles_q, tiles_kv = math.ceil(p.seq_q / tiles.tile_q), math.ceil(p.seq_kv / tiles.tile_kv)
            grid = [1 if one else size for one, size in zip(over, (p.batch, p.heads_q, tiles_q, tiles_kv), strict=True)]
            fixed = self._common(tiles, d_out) | {
                "bias_strides": summed.stride(), "heads": p.heads_q, "tiles_q": tiles_q, "tiles_kv": tiles_kv,
                "SLOPE": jit(slope_after(p.scores, place), "score"),
                "OVER_B": over[0], "OVER_H": over[1], "OVER_Q": over[2], "OVER_K": over[3],
            }  # fmt: skip
            del fixed["SCORE_GRAD"]
            self.launches[key] = Launch(grad_bias, (math.prod(grid),), fixed, num_warps=4, num_stages=1)
        # fmt: off
        self.launches[key](o.q, o.k, o.v, d_out, lse2, delta, summed, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens,
                           self.modifiers.score_operands(o), self.modifiers.mask_operands(o))
        # fmt: on
        return summed.to(bias.dtype).reshape(bias.shape)
