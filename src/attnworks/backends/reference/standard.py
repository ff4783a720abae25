"""Standard attention: three steps, each reading and writing all of an N by N matrix in the input dtype.

FlashAttention (arXiv:2205.14135), algorithm 0; the baseline everybody compares with. What rounding S and P to 16 bits
costs is part of it: in fp16 a score beyond 65,504 overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.backends.reference.definitions import modify, positions, sink_logits, visible
from attnworks.problem import Operands, Problem


def attention(
    problem: Problem, o: Operands, q: Tensor, k: Tensor, v: Tensor, first: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Shapes and results as for ``eager``, at the precision of q's dtype. The LSE, one more pass, only if asked for.

    S is (batch, heads_q, seq_q, seq_kv). Query heads that share a KV head are rows of one product, so that K and V are
    not copied for each.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # a quantised cache arrives in fp32
    scores = write_scores(problem, o, q, k, first)
    probs, lse = write_probs(problem, o, scores)
    out = _group_rows(probs, problem) @ v
    return out.reshape(*q.shape[:3], v.shape[-1]), lse


def write_scores(problem: Problem, o: Operands, q: Tensor, k: Tensor, first: int) -> Tensor:
    """S = scale · Q Kᵀ, modified and masked."""
    batch, heads_q, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    # Scaling Q costs a pass over N·d numbers, scaling S one over N².
    product = _group_rows(problem.scale * q, problem) @ k.transpose(-1, -2)
    scores = product.reshape(batch, heads_q, seq_q, seq_kv)
    if not problem.mask and not problem.scores:
        return scores
    at = positions(first, batch, heads_q, range(seq_q), range(seq_kv), seq_q, seq_kv, q.device)
    scores = modify(problem.scores, o.scores, scores, at)
    return torch.where(visible(problem.mask, o.mask, at), scores, -torch.inf) if problem.mask else scores


def write_probs(problem: Problem, o: Operands, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """P = softmax(S) by row, 0 in rows without a visible key; and the LSE if the problem asks for it."""
    sink = sink_logits(problem.scores, o, scores.dtype)
    logits = scores if sink is None else torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
    if problem.mask or problem.scores:
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        probs = torch.where(empty, 0, torch.softmax(torch.where(empty, 0, logits), -1))
    else:
        probs = torch.softmax(logits, -1)
    compute = torch.promote_types(scores.dtype, torch.float32)
    lse = torch.logsumexp(logits.to(compute), -1) if problem.return_lse else None
    return probs[..., : scores.shape[-1]], lse


def _group_rows(x: Tensor, problem: Problem) -> Tensor:
    """(batch, heads_q, seq_q, n) as (batch, heads_kv, group · seq_q, n)."""
    batch, _, seq_q, columns = x.shape
    return x.reshape(batch, problem.heads_kv, problem.group * seq_q, columns)
