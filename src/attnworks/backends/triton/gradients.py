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
    kv_describers,
    map_arguments,
)
from attnworks.backends.triton.grad_bias import grad_bias
from attnworks.backends.triton.launch import Launch, aligned, describer, describer_of_rows
from attnworks.backends.triton.plans import TMA, BackwardTiles, backward_tiles, block, copies_tiles, describable
from attnworks.backends.triton.user_code import jit
from attnworks.hardware import detect
from attnworks.modifiers import grad_sink, slope_after
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, packed_strides, strides_of
from attnworks.scores import ScoreTerm

# Rows of a program of ``row_delta``, and what sequences are padded to in what it gives: a multiple of every tile_q of
# ``backward_tiles`` for dK and dV.
DELTA_ROWS = 64


def prepare_backward(problem: Problem, plan: Plan) -> BackwardLauncher:
    """The backward has tiles of its own (``plans.backward_tiles``). A forward's plan that asks for the copy engine has
    it used here too, however small the problem."""
    if problem.page_size:
        return _through_pages(problem)
    here = problem.device != "meta" and copies_tiles(problem, detect(problem.device))
    return _Backward(problem, copies=plan.isa == TMA or here).run


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


def _padded_rows(p: Problem) -> tuple[int, ...]:
    """The shape of what ``row_delta`` gives for each row."""
    if p.form == "varlen":
        return p.heads_q, (p.total_q // DELTA_ROWS + p.batch) * DELTA_ROWS
    return p.batch, p.heads_q, math.ceil(p.seq_q / DELTA_ROWS) * DELTA_ROWS


class _Backward:
    def __init__(self, problem: Problem, copies: bool = False) -> None:
        self.problem = problem
        self.modifiers = Modifiers(problem)
        self.slope = self.modifiers.slope()
        self.for_kv, self.for_q = backward_tiles(problem, copies)
        # Launches by the strides of what autograd hands over, which the problem doesn't know.
        self.launches: dict[Any, Launch] = {}
        self.row_shape = _padded_rows(problem)

    def run(
        self, o: Operands, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
    ) -> Gradients:
        p = self.problem
        delta, lse2 = (torch.empty(self.row_shape, dtype=torch.float32, device=lse.device) for _ in range(2))
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
                scores[index] = grad_sink(o.scores[index], lse, self._like_lse(delta, o))
            else:
                scores[index] = self._grad_bias(o, d_out, lse2, delta, place, term)
        return Gradients(d_q, d_k if needs[1] else None, d_v if needs[2] else None, tuple(scores))

    def _row_strides(self) -> tuple[int, int]:
        *batch, heads, rows = self.row_shape
        return (heads * rows, rows) if batch else (0, rows)

    def _like_lse(self, delta: Tensor, o: Operands) -> Tensor:
        """``delta`` without the padding."""
        p = self.problem
        if o.cu_seqlens_q is None:
            return delta[..., : p.seq_q]
        rows = torch.arange(p.total_q, device=delta.device)
        sequence = torch.bucketize(rows, o.cu_seqlens_q[1:], right=True)
        first = o.cu_seqlens_q[sequence.clamp_max(p.batch - 1)]
        places = (first // DELTA_ROWS + sequence) * DELTA_ROWS + rows - first
        # Rows of no sequence have an LSE of -inf, and with it no part in what this is for.
        return delta[:, torch.where(sequence < p.batch, places, 0)]

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
                "row_strides": self._row_strides(), "batch": p.batch, "heads": p.heads_q, "seq_q": p.seq_q,
                "TILE_Q": DELTA_ROWS, "DIM": p.head_dim_v, "BLOCK": block(p.head_dim_v), "PAD": DELTA_ROWS,
            }  # fmt: skip
            grid = math.ceil(p.seq_q / DELTA_ROWS) * p.heads_q * p.batch
            self.launches[key] = Launch(row_delta, (grid,), fixed, num_warps=4)
        self.launches[key](out, d_out, d_lse, lse, delta, lse2, o.cu_seqlens_q)

    def _common(self, tiles: BackwardTiles, d_out: Tensor) -> dict[str, Any]:
        """What the kernels of dQ, of dK and dV, and of a bias are all given."""
        p = self.problem
        return {
            "q_strides": p.q_strides, "k_strides": p.k_strides, "v_strides": p.v_strides,
            "grad_out_strides": self._strides(d_out), "row_strides": self._row_strides(), "PAD": DELTA_ROWS,
            "batch": p.batch, "group": p.group, "seq_q": p.seq_q, "seq_kv": p.seq_kv, "scale": p.scale, **bounds(p),
            "TILE_Q": tiles.tile_q, "TILE_KV": tiles.tile_kv, **dims(p),
            "SCORE": self.modifiers.score, "SCORE_GRAD": self.slope, "MASK": self.modifiers.mask,
            "PRECISION": PRECISION,
        }  # fmt: skip

    def _grad_q(self, o: Operands, d_out: Tensor, lse2: Tensor, delta: Tensor, d_q: Tensor) -> None:
        p, tiles = self.problem, self.for_q
        described = tiles.isa == TMA and aligned(o.k, o.v)
        key = ("q", self._strides(d_out), self._strides(d_q), described)
        if key not in self.launches:
            packed = p.form == "varlen"
            row_tiles = max(math.ceil(p.seq_q / tiles.tile_q), int(packed))
            fixed = self._common(tiles, d_out) | {
                "grad_q_strides": self._strides(d_q), "heads": p.heads_q, "total_q": p.total_q,
                "WIDE": far_apart(tiles.tile_kv, p.k_strides, p.v_strides),
                "TAIL": p.form != "dense" or p.seq_kv % tiles.tile_kv != 0, "DESCRIBED": described,
            }  # fmt: skip
            grid = row_tiles * p.heads_q * (p.batch + packed)
            self.launches[key] = Launch(grad_q, (grid,), fixed, num_warps=tiles.warps, num_stages=tiles.stages)
        found = self.modifiers.tile_map(o, tiles.tile_q, tiles.tile_kv) if self.modifiers.mapped else None
        k, v = o.k, o.v
        if described:
            describe_k, describe_v = kv_describers(p, tiles.tile_kv)
            k, v = describe_k(k), describe_v(v)
        # fmt: off
        self.launches[key](o.q, k, v, d_out, lse2, delta, d_q, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens,
                           None if found is None else map_arguments(found),
                           self.modifiers.score_operands(o), self.modifiers.mask_operands(o))
        # fmt: on

    def _grad_kv(self, o: Operands, d_out: Tensor, lse2: Tensor, delta: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        p, tiles = self.problem, self.for_kv
        given = self._strides(d_out)
        shape = (p.batch, p.heads_q, p.seq_q)
        described = (
            tiles.isa == TMA
            and aligned(o.q, d_out)
            and all(describable(p.element_size, shape, strides) for strides in (p.q_strides, given))
        )
        key = ("kv", given, self._strides(d_k), self._strides(d_v), described)
        if key not in self.launches:
            packed = p.form == "varlen"
            kv_tiles = max(math.ceil(p.seq_kv / tiles.tile_kv), int(packed))
            fixed = self._common(tiles, d_out) | {
                "grad_k_strides": self._strides(d_k), "grad_v_strides": self._strides(d_v),
                "heads_kv": p.heads_kv, "total_kv": p.total_kv,
                "WIDE": far_apart(tiles.tile_q, p.q_strides, given),
                "TAIL": packed or p.seq_q % tiles.tile_q != 0, "DESCRIBED": described,
            }  # fmt: skip
            grid = kv_tiles * p.heads_kv * (p.batch + packed)
            options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
            if described and tiles.registers:
                options["maxnreg"] = tiles.registers
            self.launches[key] = Launch(grad_kv, (grid,), fixed, **options)
        found = self.modifiers.tile_map(o, tiles.tile_q, tiles.tile_kv) if self.modifiers.mapped else None
        q = o.q
        if described:
            q = describer_of_rows(shape, p.head_dim, p.q_strides, tiles.tile_q)(q)
            d_out = describer_of_rows(shape, p.head_dim_v, given, tiles.tile_q)(d_out)
            describe = describer(self.row_shape, self._row_strides(), (1, 1, tiles.tile_q))
            lse2, delta = describe(lse2), describe(delta)
        # fmt: off
        self.launches[key](q, o.k, o.v, d_out, lse2, delta, d_k, d_v, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens,
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
