"""The oracle: softmax(S) V with all of S written out in fp32 (fp64 for fp64), differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.backends.reference.definitions import modify, positions, sink_logits, visible
from attnworks.problem import Operands, Problem


def attention(problem: Problem, o: Operands, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """q (batch, heads_q, seq_q, head_dim), k and v (batch, heads_kv, seq_kv, head_dim or head_dim_v).

    ``first``: the sequence of the problem that is batch 0 of q. Returns out in q's dtype and the LSE (batch, heads_q,
    seq_q) in the dtype it computes in. Backward, double backward, forward-mode AD and vmap are torch's own.
    """
    dtype, compute = q.dtype, torch.promote_types(q.dtype, torch.float32)
    batch, heads_q, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    q = q.to(compute)
    k = k.to(compute).repeat_interleave(problem.group, 1)
    v = v.to(compute).repeat_interleave(problem.group, 1)
    at = positions(first, batch, heads_q, range(seq_q), range(seq_kv), seq_q, seq_kv, q.device)
    sees = visible(problem.mask, o.mask, at) if problem.mask else None
    if sees is not None:
        # Queries that see nothing and keys that nobody sees are not read: a NaN in them must not become 0 · NaN.
        q = torch.where(sees.any(-1, keepdim=True), q, 0)
        seen = sees.any(-2, keepdim=True).transpose(-1, -2)
        k, v = torch.where(seen, k, 0), torch.where(seen, v, 0)
    s = modify(problem.scores, o.scores, problem.scale * (q @ k.transpose(-1, -2)), at)
    if sees is not None:
        s = torch.where(sees, s, -torch.inf)
    # The softmax does not change when all of a row is shifted, so nothing is differentiated through the pivot.
    top = s.detach().amax(-1, keepdim=True) if seq_kv else s.new_full((batch, heads_q, seq_q, 1), -torch.inf)
    sink = sink_logits(problem.scores, o, compute)
    pivot = top if sink is None else torch.maximum(top, sink.detach())
    # In an empty row exp(-inf - (-inf)) must not be formed, also not where autograd looks.
    pivot = torch.where(pivot == -torch.inf, 0, pivot)
    weights = torch.exp(s - pivot)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - pivot)
    safe_total = torch.where(total == 0, 1, total)
    out = torch.where(top == -torch.inf, 0, (weights / safe_total) @ v)
    lse = torch.where(total == 0, -torch.inf, pivot + torch.log(safe_total))
    return out.to(dtype), lse.squeeze(-1)
