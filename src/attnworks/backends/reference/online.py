"""The online softmax: exact attention in one pass over the keys, a tile at a time, in the two published loop orders.

``running_max``, ``running_sum`` and ``acc`` are the papers' m, l and O: after any number of tiles they describe
attention over the keys seen so far (docs/maths.md, "Online softmax"). Every step is a function of its own, to be read,
and to be broken by the tests that check the tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnworks.backends.reference.definitions import sink_logits
from attnworks.backends.reference.tiles import (
    finish_scores,
    is_hidden,
    load,
    load_shared,
    product,
    spans,
    tile_positions,
)
from attnworks.problem import Operands, Problem


class State(NamedTuple):
    """Attention of some rows over the keys seen so far: running_max and running_sum (batch, heads_q, rows, 1), acc
    (batch, heads_q, rows, head_dim_v), which is not yet divided by running_sum."""

    running_max: Tensor
    running_sum: Tensor
    acc: Tensor


def initial_state(problem: Problem, o: Operands, q: Tensor, rows: int, initial_max: float, dtype: torch.dtype) -> State:
    """The state before any key. A sink is a key seen already, whose value is 0."""
    shape = (q.shape[0], problem.heads_q, rows, 1)
    running_max = q.new_full(shape, initial_max, dtype=dtype)
    acc = q.new_zeros((*shape[:3], problem.head_dim_v), dtype=dtype)
    sink = sink_logits(problem.scores, o, dtype)
    if sink is None:
        return State(running_max, torch.zeros_like(running_max), acc)
    running_max = torch.maximum(running_max, sink)
    return State(running_max, torch.exp(sink - pivot_of(running_max)), acc)


def pivot_of(running_max: Tensor) -> Tensor:
    """What is subtracted before exp: the maximum, or 0 while every score was -inf, as -inf - (-inf) is NaN."""
    return torch.where(running_max == -torch.inf, 0, running_max)


def rescale_factor(old_max: Tensor, new_max: Tensor) -> Tensor:
    """alpha: by how much everything summed so far shrinks when the maximum rises; 0 if nothing was seen before."""
    return torch.exp(old_max - pivot_of(new_max))


def tile_probs(scores: Tensor, new_max: Tensor) -> Tensor:
    """exp(S - m), not yet divided by the sum."""
    return torch.exp(scores - pivot_of(new_max))


def update_sum(running_sum: Tensor, alpha: Tensor, probs: Tensor) -> Tensor:
    return alpha * running_sum + probs.sum(-1, keepdim=True)


def rescale_acc(acc: Tensor, alpha: Tensor) -> Tensor:
    return alpha * acc


def step(state: State, scores: Tensor, v_tile: Tensor) -> State:
    """The state after one more tile of keys (FlashAttention-2, arXiv:2307.08691, algorithm 1, lines 9 and 10)."""
    new_max = torch.maximum(state.running_max, scores.amax(-1, keepdim=True))
    alpha = rescale_factor(state.running_max, new_max)
    probs = tile_probs(scores, new_max)
    acc = rescale_acc(state.acc, alpha) + probs @ v_tile
    return State(new_max, update_sum(state.running_sum, alpha, probs), acc)


def normalise(acc: Tensor, running_sum: Tensor) -> Tensor:
    """O = acc / l; 0 where no key was visible."""
    return torch.where(running_sum == 0, 0, acc / torch.where(running_sum == 0, 1, running_sum))


def log_sum_exp(running_max: Tensor, running_sum: Tensor) -> Tensor:
    """LSE = m + ln l, (batch, heads_q, rows); -inf where no key was visible."""
    return (pivot_of(running_max) + torch.log(running_sum)).squeeze(-1)


def q_outer(
    problem: Problem,
    o: Operands,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int = 0,
    *,
    tile_q: int,
    tile_kv: int,
    initial_max: float = -torch.inf,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 (arXiv:2307.08691, algorithm 1): the state of one Q tile stays on chip while K and V go by.

    Shapes and results as for ``eager``; tiles of any size >= 1. ``initial_max`` is where running_max starts: -inf is
    exact; a finite sentinel is offered only to show that scores below it are lost.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    out = q.new_zeros((*q.shape[:3], problem.head_dim_v))
    lse = q.new_zeros(q.shape[:3], dtype=compute)
    for rows in spans(seq_q, tile_q):
        q_tile = load(q, rows, len(rows), compute)
        state = initial_state(problem, o, q, len(rows), initial_max, compute)
        for keys in spans(seq_kv, tile_kv):
            if is_hidden(problem.mask, rows, keys, seq_q, seq_kv):
                continue
            k_tile, v_tile = (load_shared(x, keys, tile_kv, compute, problem) for x in (k, v))
            at = tile_positions(problem, q, k, first, rows, keys, tile_kv)
            raw = product(q_tile, k_tile, problem.scale)
            state = step(state, finish_scores(problem, o, raw, at, len(keys)), v_tile)
        out[:, :, rows.start : rows.stop] = normalise(state.acc, state.running_sum)
        lse[:, :, rows.start : rows.stop] = log_sum_exp(state.running_max, state.running_sum)
    return out, lse


def kv_outer(
    problem: Problem,
    o: Operands,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int = 0,
    *,
    tile_q: int,
    tile_kv: int,
    initial_max: float = -torch.inf,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-1 (arXiv:2205.14135, algorithm 1): one tile of K and V stays on chip while Q and all states go by.

    Arguments and results as for ``q_outer``.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    row_tiles = spans(seq_q, tile_q)
    # Slow memory: for each Q tile m, l and, already divided by l, O.
    slow = [initial_state(problem, o, q, len(rows), initial_max, compute) for rows in row_tiles]
    for keys in spans(seq_kv, tile_kv):
        k_tile, v_tile = (load_shared(x, keys, tile_kv, compute, problem) for x in (k, v))
        for tile, rows in enumerate(row_tiles):
            if is_hidden(problem.mask, rows, keys, seq_q, seq_kv):
                continue
            q_tile = load(q, rows, len(rows), compute)
            running_max, running_sum, out_tile = slow[tile]
            state = State(running_max, running_sum, running_sum * out_tile)
            at = tile_positions(problem, q, k, first, rows, keys, tile_kv)
            raw = product(q_tile, k_tile, problem.scale)
            state = step(state, finish_scores(problem, o, raw, at, len(keys)), v_tile)
            slow[tile] = state._replace(acc=normalise(state.acc, state.running_sum))
    out = q.new_zeros((*q.shape[:3], problem.head_dim_v))
    lse = q.new_zeros(q.shape[:3], dtype=compute)
    for rows, (running_max, running_sum, out_tile) in zip(row_tiles, slow, strict=True):
        out[:, :, rows.start : rows.stop] = out_tile
        lse[:, :, rows.start : rows.stop] = log_sum_exp(running_max, running_sum)
    return out, lse


LOOPS = {"kv_outer": kv_outer, "q_outer": q_outer}
