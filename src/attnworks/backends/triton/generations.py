"""Calls of the plans that are kept for comparison: standard attention and FlashAttention-1, dense and forward only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnworks.backends import Launcher
from attnworks.backends.triton.calls import PRECISION, Modifiers, bounds, dims, far_apart, map_arguments
from attnworks.backends.triton.kv_outer import kv_outer
from attnworks.backends.triton.launch import Launch
from attnworks.backends.triton.plans import block
from attnworks.backends.triton.standard import weigh_values, write_probs, write_scores
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem

# A row of S up to this long stays in the registers of one program.
ROW_MAX_BLOCK = 16384


def prepare(problem: Problem, plan: Plan) -> Launcher:
    return _prepare_kv_outer(problem, plan) if plan.schedule == "kv_outer" else _prepare_standard(problem, plan)


def _prepare_kv_outer(p: Problem, plan: Plan) -> Launcher:
    modifiers = Modifiers(p)
    out_strides, lse_strides = p.result_strides()
    fixed = {
        "q_strides": p.q_strides, "k_strides": p.k_strides, "v_strides": p.v_strides,
        "out_strides": out_strides, "lse_strides": lse_strides,
        "heads": p.heads_q, "group": p.group, "seq_q": p.seq_q, "seq_kv": p.seq_kv, "scale": p.scale, **bounds(p),
        "TILE_Q": plan.tile_q, "TILE_KV": plan.tile_kv, **dims(p),
        "WIDE": far_apart(plan.tile_q, p.q_strides),
        "TAIL_Q": p.seq_q % plan.tile_q != 0, "TAIL_KV": p.seq_kv % plan.tile_kv != 0,
        "SCORE": modifiers.score, "MASK": modifiers.mask, "PRECISION": PRECISION,
    }  # fmt: skip
    launch = Launch(kv_outer, (p.heads_q * p.batch,), fixed, num_warps=plan.warps, num_stages=plan.stages)
    state = (p.batch, p.heads_q, p.seq_q)

    def run(o: Operands) -> tuple[Tensor, Tensor | None]:
        out, lse = _results(p)
        acc = torch.empty((*state, p.head_dim_v), dtype=torch.float32, device=out.device)
        running_max, running_sum = (torch.empty(state, dtype=torch.float32, device=out.device) for _ in range(2))
        tiles = None
        if modifiers.mapped:
            tiles = map_arguments(modifiers.tile_map(o, plan.tile_q, plan.tile_kv).transposed)
        # fmt: off
        launch(o.q, o.k, o.v, out, lse, acc, running_max, running_sum, modifiers.sink(o), tiles,
               modifiers.score_operands(o), modifiers.mask_operands(o))
        # fmt: on
        return out, lse

    return run


def _prepare_standard(p: Problem, plan: Plan) -> Launcher:
    modifiers = Modifiers(p)
    out_strides, lse_strides = p.result_strides()
    units, options = p.heads_q * p.batch, {"num_warps": plan.warps, "num_stages": plan.stages}
    q_tiles, kv_tiles = math.ceil(p.seq_q / plan.tile_q), math.ceil(p.seq_kv / plan.tile_kv)
    sizes = {"heads": p.heads_q, "group": p.group, "seq_q": p.seq_q, "seq_kv": p.seq_kv}
    tiles = {"TILE_Q": plan.tile_q, "TILE_KV": plan.tile_kv, "PRECISION": PRECISION}
    edges, padded = bounds(p), dims(p)
    first = {
        "q_strides": p.q_strides, "k_strides": p.k_strides, **sizes, "scale": p.scale, **edges, **tiles,
        "HEAD_DIM": p.head_dim, "BLOCK_D": padded["BLOCK_D"], "SCORE": modifiers.score, "MASK": modifiers.mask,
    }  # fmt: skip
    row_block = min(block(max(p.seq_kv, 1)), ROW_MAX_BLOCK)
    second = {
        "lse_strides": lse_strides, "heads": p.heads_q, "seq_q": p.seq_q, "seq_kv": p.seq_kv,
        "BLOCK": row_block, "SINGLE": p.seq_kv <= row_block,
    }  # fmt: skip
    third = {
        "v_strides": p.v_strides, "out_strides": out_strides, **sizes, **tiles,
        "HEAD_DIM_V": p.head_dim_v, "BLOCK_DV": padded["BLOCK_DV"],
    }  # fmt: skip
    scored = Launch(write_scores, (kv_tiles * q_tiles * units,), first, **options)
    normalised = Launch(write_probs, (p.seq_q * units,), second, num_warps=min(16, max(1, row_block // 1024)))
    weighed = Launch(weigh_values, (q_tiles * units,), third, **options)
    matrix = (p.batch, p.heads_q, p.seq_q, p.seq_kv)

    def run(o: Operands) -> tuple[Tensor, Tensor | None]:
        out, lse = _results(p)
        scores, probs = (torch.empty(matrix, dtype=p.dtype, device=out.device) for _ in range(2))
        scored(o.q, o.k, scores, modifiers.score_operands(o), modifiers.mask_operands(o))
        normalised(scores, probs, lse, modifiers.sink(o))
        weighed(probs, o.v, out)
        return out, lse

    return run


def _results(p: Problem) -> tuple[Tensor, Tensor | None]:
    """Memory for out and, if the problem asks for it, the LSE."""
    out_shape, lse_shape = p.result_shapes()
    out = torch.empty(out_shape, dtype=p.dtype, device=p.device)
    return out, torch.empty(lse_shape, dtype=torch.float32, device=p.device) if p.return_lse else None
