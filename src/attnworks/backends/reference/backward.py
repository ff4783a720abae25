"""The tiled backward: P is recomputed tile by tile from the saved LSE, never stored.

FlashAttention-2 (arXiv:2307.08691, algorithm 2), with gradients for bias, slopes, sink and an LSE cotangent too. Why
each step is what it is: docs/maths.md, "Backward".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnworks.backends.reference.definitions import (
    Positions,
    distance,
    modify_once,
    operand_index,
    operand_values,
    operand_view,
    sink_logits,
)
from attnworks.backends.reference.online import pivot_of
from attnworks.backends.reference.tiles import (
    finish_scores,
    is_hidden,
    kv_head,
    load,
    load_shared,
    product,
    spans,
    tile_positions,
)
from attnworks.expressions.derivatives import derivative
from attnworks.expressions.evaluation import evaluate
from attnworks.problem import Operands, Problem
from attnworks.scores import ScoreTerm


class TiledGradients(NamedTuple):
    """Of q, k, v and the score operands, in the shapes of their inputs and the dtype of the sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: tuple[Tensor, ...]


def delta(d_out: Tensor, out: Tensor) -> Tensor:
    """rowsum(dO ∘ O) = rowsum(P ∘ dP): what raising all scores of a row alike would change, which is nothing."""
    return (d_out * out).sum(-1, keepdim=True)


def recompute_probs(scores: Tensor, lse: Tensor) -> Tensor:
    """P = exp(S - LSE), divided by its sum already; 0 in empty rows."""
    return torch.exp(scores - pivot_of(lse))


def dscores(probs: Tensor, d_probs: Tensor, row_delta: Tensor, d_lse: Tensor) -> Tensor:
    """dS = P ∘ (dP - delta + dLSE): the softmax's Jacobian, and the LSE's, whose gradient by S is P."""
    return probs * (d_probs - row_delta + d_lse)


def dsink(sink: Tensor, lse: Tensor, row_delta: Tensor, d_lse: Tensor) -> Tensor:
    """The gradient of a sink's logits (heads_q,): dS of a key whose value, and so whose dP, is 0."""
    return dscores(torch.exp(sink - pivot_of(lse)), torch.zeros_like(lse), row_delta, d_lse).sum((0, 2, 3))


def sum_groups(x: Tensor, problem: Problem) -> Tensor:
    """A gradient by query head (batch, heads_q, ..) summed into that of the shared KV heads."""
    heads = kv_head(torch.arange(problem.heads_q, device=x.device), problem.group)
    shared = x.new_zeros((x.shape[0], problem.heads_kv, *x.shape[2:]))
    return shared.index_add(1, heads, x)


def through_modifiers(
    problem: Problem, o: Operands, raw: Tensor, d_scores: Tensor, at: Positions, d_operands: tuple[Tensor, ...]
) -> Tensor:
    """The gradient by scale · Q Kᵀ from that by the modified scores; adds the tile's share to ``d_operands``."""
    values = [raw]
    for term in problem.scores:
        values.append(modify_once(term, o.scores, values[-1], at))
    for term, before, after in zip(reversed(problem.scores), reversed(values[:-1]), reversed(values[1:]), strict=True):
        if term.kind == "softcap":
            # d/ds c·tanh(s/c) = 1 - tanh²(s/c)
            d_scores = d_scores * (1 - (after / term.cap) ** 2)
        elif term.expression is not None:
            captured, inputs = term.own(o.scores), at.indices | {"s": before}
            add_captured(term, captured, inputs, d_scores, d_operands)
            d_scores = d_scores * evaluate(derivative(term.expression), inputs, captured).to(d_scores.dtype)
        elif term.operand is not None and term.kind in ("bias", "alibi"):
            operand = d_operands[term.operand.index]
            share = d_scores if term.kind == "bias" else -d_scores * distance(at)
            share = share.sum_to_size(operand_values(term, operand, at).shape)
            operand_view(term, operand).index_put_(operand_index(term, operand, at), share, accumulate=True)
    return d_scores


def add_captured(
    term: ScoreTerm,
    captured: tuple[Tensor, ...],
    inputs: dict[str, Tensor],
    d_scores: Tensor,
    d_operands: tuple[Tensor, ...],
) -> None:
    """Add the gradients by the tensors that a score function captured; by autograd, as any of its operations may use
    them."""
    assert term.expression is not None
    wanted = [spec.index for spec in term.expression.operands if spec.requires_grad]
    if not wanted:
        return
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(index in wanted) for index, x in enumerate(captured)]
        after = evaluate(term.expression, inputs, leaves).to(d_scores.dtype).expand_as(d_scores)
        found = torch.autograd.grad(after, [leaves[index] for index in wanted], d_scores, allow_unused=True)
    for index, gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            d_operands[term.first + index].add_(gradient)


def backward(
    problem: Problem,
    o: Operands,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    first: int = 0,
    *,
    tile_q: int,
    tile_kv: int,
) -> TiledGradients:
    """Gradients from those of out (batch, heads_q, seq_q, head_dim_v) and lse (batch, heads_q, seq_q).

    ``out`` and ``lse`` are what a loop of ``online`` gave for the same problem on ``o``'s q, k and v, in "bhsd". K and
    V tiles outer, so that dK and dV of a tile stay on chip; dQ is summed in slow memory. Sums are in fp32 (fp64 for
    fp64). Score functions that were not traced are not differentiated: ``check_plan`` refuses them.
    """
    q, k, v = o.q, o.k, o.v
    compute = torch.promote_types(q.dtype, torch.float32)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=compute) for x in (q, k, v))
    d_operands = tuple(torch.zeros_like(x, dtype=compute) for x in o.scores)
    d_out, lse, d_lse = d_out.to(compute), lse.unsqueeze(-1), d_lse.unsqueeze(-1)
    row_delta = delta(d_out, out.to(compute))
    for keys in spans(seq_kv, tile_kv):
        k_tile, v_tile = (load_shared(x, keys, tile_kv, compute, problem) for x in (k, v))
        d_k_tile, d_v_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in spans(seq_q, tile_q):
            if is_hidden(problem.mask, rows, keys, seq_q, seq_kv):
                continue
            q_tile, d_out_tile, lse_tile, delta_tile, d_lse_tile = (
                load(x, rows, len(rows), compute) for x in (q, d_out, lse, row_delta, d_lse)
            )
            at = tile_positions(problem, q, k, first, rows, keys, tile_kv)
            raw = product(q_tile, k_tile, problem.scale)
            probs = recompute_probs(finish_scores(problem, o, raw, at, len(keys)), lse_tile)
            d_v_tile += probs.transpose(-1, -2) @ d_out_tile
            d_probs = d_out_tile @ v_tile.transpose(-1, -2)
            d_scores = dscores(probs, d_probs, delta_tile, d_lse_tile)
            d_raw = problem.scale * through_modifiers(problem, o, raw, d_scores, at, d_operands)
            d_q[:, :, rows.start : rows.stop] += d_raw @ k_tile
            d_k_tile += d_raw.transpose(-1, -2) @ q_tile
        d_k[:, :, keys.start : keys.stop] = sum_groups(d_k_tile, problem)[:, :, : len(keys)]
        d_v[:, :, keys.start : keys.stop] = sum_groups(d_v_tile, problem)[:, :, : len(keys)]
    sink = sink_logits(problem.scores, o, compute)
    for term in problem.scores:
        if sink is not None and term.kind == "sink" and term.operand is not None:
            d_operands[term.operand.index].copy_(dsink(sink, lse, row_delta, d_lse))
    return TiledGradients(d_q, d_k, d_v, d_operands)
