"""Forward calls: a Problem and its Plan turned into the arguments of the forward kernel, and of the one that merges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnworks import tilemap
from attnworks.backends import Launcher
from attnworks.backends.triton import parts
from attnworks.backends.triton.forward import combine, forward
from attnworks.backends.triton.launch import Described, Launch, aligned, describer_of_rows
from attnworks.backends.triton.plans import GROUPED, TMA, block, columns, holds_q, keeps_maximum, register_limit
from attnworks.backends.triton.user_code import jit
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.source import operand_facts
from attnworks.masks import UNLIMITED, Bounds
from attnworks.modifiers import mask_expression, score_expression
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, Strides

FAR = parts.FAR.value


class Modifiers:
    """What the kernels are built with for a problem's scores and mask, and what they are given for them at a call."""

    def __init__(self, problem: Problem, grouped: bool = False, visit_all: bool = False) -> None:
        self.problem = problem
        self._expression = score_expression(problem.scores)
        mask = mask_expression(problem.mask, bounds=visit_all)
        self.score = None if self._expression is None else jit(self._expression, "score")
        self.mask = None if mask is None else jit(mask, "mask")
        self._score_facts = () if self._expression is None else operand_facts(self._expression)
        self._mask_facts = () if mask is None else operand_facts(mask)
        self._sink = next((t.operand.index for t in problem.scores if t.kind == "sink" and t.operand), None)
        # Packed sequences and caches would need a map for each length, heads that are rows of one tile a map for all of
        # them: there the mask is evaluated in every tile.
        self.mapped = mask is not None and problem.form == "dense" and not grouped and not visit_all

    def slope(self) -> Any:
        """The derivative of ``score`` by the score it is given; None where there is none."""
        return None if self._expression is None else jit(derivative(self._expression), "score")

    def sink(self, o: Operands) -> Tensor | None:
        return None if self._sink is None else o.scores[self._sink]

    def score_operands(self, o: Operands) -> tuple[Any, ...]:
        return (*o.scores, *self._score_facts) if self.score is not None else ()

    def mask_operands(self, o: Operands) -> tuple[Any, ...]:
        return (*o.mask, *self._mask_facts) if self.mask is not None else ()

    def tile_map(self, o: Operands, tile_q: int, tile_kv: int) -> tilemap.TileMap:
        p = self.problem
        return tilemap.cached(
            p.mask, o.mask, batch=p.batch, heads=p.heads_q, seq_q=p.seq_q, seq_kv=p.seq_kv,
            tile_q=tile_q, tile_kv=tile_kv, device=o.q.device,
        )  # fmt: skip


def map_arguments(found: tilemap.TileMap) -> tuple[Any, ...]:
    """The list of a tile map, and how many of its rows lie between batches and between heads (0 if they share)."""
    by_batch, by_head = found.tiles_q * found.heads, found.tiles_q
    return (*found.visited, by_batch if found.batch > 1 else 0, by_head if found.heads > 1 else 0)


def bounds(problem: Problem) -> dict[str, Any]:
    """The closed bounds as diagonals: query i sees keys from i + low to i + high, for either alignment."""
    found = {"low_bottom": -FAR, "high_bottom": FAR, "low_top": -FAR, "high_top": FAR}
    for term in problem.mask:
        if isinstance(term, Bounds):
            side = "bottom" if term.align == "bottom-right" else "top"
            if term.left is not None and term.left < UNLIMITED:
                found[f"low_{side}"] = -min(term.left, FAR)
            if term.right is not None and term.right < UNLIMITED:
                found[f"high_{side}"] = min(term.right, FAR)
    left = max(found["low_bottom"], found["low_top"]) > -FAR
    right = min(found["high_bottom"], found["high_top"]) < FAR
    return found | {"LEFT": left, "RIGHT": right}


def dims(p: Problem) -> dict[str, int]:
    first, _ = columns(p.head_dim)
    return {
        "HEAD_DIM": first, "HEAD_DIM_V": p.head_dim_v, "BLOCK_D": block(first), "BLOCK_DV": block(p.head_dim_v),
    }  # fmt: skip


def far_apart(tile: int, *strides: Strides) -> bool:
    """Whether the rows of one tile lie so far apart that their offsets need 64 bits."""
    return (tile - 1) * max(row for _, _, row in strides) >= 2**31


def kv_describers(p: Problem, tile_kv: int) -> tuple[Callable[[Tensor], Described], Callable[[Tensor], Described]]:
    """Of K and of V, for kernels that read tiles of ``tile_kv`` rows (``plans.takes_tma``)."""
    shape = (p.batch, p.heads_kv, p.seq_kv)
    return (
        describer_of_rows(shape, p.head_dim, p.k_strides, tile_kv),
        describer_of_rows(shape, p.head_dim_v, p.v_strides, tile_kv),
    )


# Products of fp32 operands in fp32: tf32 would keep 10 bits of them. To 16-bit operands it means nothing.
PRECISION = "ieee"


def prepare(problem: Problem, plan: Plan) -> Launcher:
    p, grouped = problem, plan.schedule in GROUPED
    modifiers = Modifiers(p, grouped, plan.visit_all)
    heads = p.heads_kv if grouped else p.heads_q
    rows = p.seq_q * p.group if grouped else p.seq_q
    row_tiles = math.ceil(rows / plan.tile_q)
    sequences = p.batch
    if p.form == "varlen":  # one more, for rows that belong to no sequence
        row_tiles, sequences = max(row_tiles, 1), p.batch + 1
    splits = max(1, math.ceil(p.seq_kv / plan.split_kv)) if plan.split_kv else 1
    out_shape, lse_shape = p.result_shapes()
    out_strides, lse_strides = p.result_strides()
    out_size, lse_size = math.prod(out_shape), math.prod(lse_shape)
    _, rest = columns(p.head_dim)
    edges = bounds(replace(p, mask=()) if plan.visit_all else p)
    folded = modifiers.score is None and p.scale > 0 and p.kv_dtype is None
    even = p.form == "dense" and p.seq_kv % plan.tile_kv == 0
    device = torch.device(p.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    fixed = {
        "q_strides": p.q_strides, "k_strides": p.k_strides, "v_strides": p.v_strides,
        "out_strides": out_strides, "lse_strides": lse_strides, "split_strides": (out_size, lse_size),
        "table_stride": p.seq_kv // p.page_size if p.page_size else 0,
        "batch": p.batch, "heads": heads, "group": p.group, "seq_q": p.seq_q, "seq_kv": p.seq_kv, "total_q": p.total_q,
        "scale": p.scale, "split_kv": plan.split_kv, **edges,
        "TILE_Q": plan.tile_q, "TILE_KV": plan.tile_kv, **dims(p), "GROUPED": grouped, "PAGE": p.page_size,
        "WIDE": far_apart(plan.tile_kv, p.k_strides, p.v_strides),
        "EQUAL_ROWS": p.k_strides[2] == p.v_strides[2], "TAIL": not even, "SPLITS": splits > 1, "FOLDED": folded,
        "SCORE": modifiers.score, "MASK": modifiers.mask, "PRECISION": PRECISION,
        "REST": rest, "BLOCK_REST": block(rest) if rest else 0, "KEEP_MAXIMUM": keeps_maximum(p, plan),
    }  # fmt: skip

    def variant(described: bool) -> Launch:
        return Launch(
            forward, (row_tiles * heads * sequences, splits),
            fixed | {"DESCRIBED": described, "HOLD_Q": described and holds_q(p, plan, capability)},
            num_warps=plan.warps, num_stages=plan.stages, **register_limit(p, plan),
        )  # fmt: skip

    launch = variant(False)
    described = (variant(True), *kv_describers(p, plan.tile_kv)) if plan.isa == TMA else None
    merge = _merge(p, splits, out_strides, lse_strides, (out_size, lse_size)) if splits > 1 else None
    dtype, return_lse = p.dtype, p.return_lse

    def run(o: Operands) -> tuple[Tensor, Tensor | None]:
        out = torch.empty(out_shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device) if return_lse else None
        sink = modifiers.sink(o)
        k_scale, v_scale = _by_head(o.k_scale, p.heads_kv), _by_head(o.v_scale, p.heads_kv)
        tiles = map_arguments(modifiers.tile_map(o, plan.tile_q, plan.tile_kv)) if modifiers.mapped else None
        into, into_lse = out, lse
        if merge is not None:
            into = torch.empty((splits, *out_shape), dtype=torch.float32, device=device)
            into_lse = torch.empty((splits, *lse_shape), dtype=torch.float32, device=device)
        k, v, chosen = o.k, o.v, launch
        if described is not None and aligned(k, v):
            chosen, describe_k, describe_v = described
            k, v = describe_k(k), describe_v(v)
        # fmt: off
        chosen(o.q, k, v, into, into_lse, o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens, o.page_table,
               k_scale, v_scale, sink, tiles, modifiers.score_operands(o), modifiers.mask_operands(o))
        # fmt: on
        if merge is not None:
            merge(into, into_lse, out, lse, sink)
        return out, lse

    return run


def _merge(
    p: Problem,
    splits: int,
    out_strides: tuple[int, int, int],
    lse_strides: tuple[int, int, int],
    split_strides: tuple[int, int],
) -> Launch:
    fixed = {
        "out_strides": out_strides, "lse_strides": lse_strides, "split_strides": split_strides,
        "heads": p.heads_q, "seq_q": p.seq_q, "splits": splits,
        "DIM": p.head_dim_v, "BLOCK": block(p.head_dim_v), "SPLITS": 1 << (splits - 1).bit_length(),
    }  # fmt: skip
    return Launch(combine, (p.batch * p.heads_q * p.seq_q,), fixed, num_warps=1)


def _by_head(scale: Tensor | None, heads: int) -> Tensor | None:
    """A cache's scale for each KV head."""
    return None if scale is None else scale.reshape(-1).expand(heads).contiguous()
