"""Dense, varlen and decode: each brought to the "bhsd" tensors that a schedule works on, one sequence at a time where
lengths differ. Nothing outside a sequence is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnworks.cache import take
from attnworks.problem import Operands, Problem

Core = Callable[[Problem, Operands, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor | None]]
"""A schedule: (problem, operands, q, k, v, first) → (out, lse), all "bhsd", lse (batch, heads_q, seq_q) or None;
sequence ``first`` of the problem is batch 0 of q."""

Form = Callable[[Core, Problem, Operands], tuple[Tensor, Tensor | None]]


def dense(core: Core, problem: Problem, o: Operands) -> tuple[Tensor, Tensor | None]:
    q, k, v = (o.q, o.k, o.v) if problem.layout == "bhsd" else (x.transpose(1, 2) for x in (o.q, o.k, o.v))
    if problem.batch_invariant and problem.batch:
        ones = [slice(b, b + 1) for b in range(problem.batch)]
        parts = [_alone(core, problem, o, q[one], k[one], v[one], one.start) for one in ones]
        out = torch.cat([out for out, _ in parts])
        lse = torch.cat([lse for _, lse in parts if lse is not None]) if problem.return_lse else None
    else:
        out, lse = core(problem, o, q, k, v, 0)
    return (out if problem.layout == "bhsd" else out.transpose(1, 2).contiguous()), lse


def varlen(core: Core, problem: Problem, o: Operands) -> tuple[Tensor, Tensor | None]:
    assert o.cu_seqlens_q is not None and o.cu_seqlens_kv is not None
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    offsets_q, offsets_kv = o.cu_seqlens_q.tolist(), o.cu_seqlens_kv.tolist()
    for sequence in range(problem.batch):
        rows = slice(offsets_q[sequence], offsets_q[sequence + 1])
        keys = slice(offsets_kv[sequence], offsets_kv[sequence + 1])
        q, k, v = (x.transpose(0, 1)[None] for x in (o.q[rows], o.k[keys], o.v[keys]))
        out, lse = _alone(core, problem, o, q, k, v, sequence)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0])
    unused = problem.total_q - offsets_q[-1]
    outs.append(o.q.new_zeros(unused, problem.heads_q, problem.head_dim_v))
    lses.append(_empty_lse(o.q, problem.heads_q, unused))
    return torch.cat(outs), torch.cat(lses, 1)


def decode(core: Core, problem: Problem, o: Operands) -> tuple[Tensor, Tensor | None]:
    assert o.kv_lens is not None
    if problem.batch == 0:
        out = o.q.new_zeros(0, problem.seq_q, problem.heads_q, problem.head_dim_v)
        return out, _empty_lse(o.q, 0, problem.heads_q, problem.seq_q)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for sequence, length in enumerate(o.kv_lens.tolist()):
        k = cached(o.k, o, sequence, length, o.k_scale)
        v = cached(o.v, o, sequence, length, o.v_scale)
        out, lse = _alone(core, problem, o, o.q[sequence].transpose(0, 1)[None], k, v, sequence)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse)
    return torch.stack(outs), torch.cat(lses) if lses else None


FORMS: dict[str, Form] = {"dense": dense, "varlen": varlen, "decode": decode}


def cached(cache: Tensor, o: Operands, sequence: int, length: int, scale: Tensor | None) -> Tensor:
    """The ``length`` keys (or values) of one sequence, (1, heads_kv, length, dim), dequantised."""
    if o.page_table is None:
        rows = cache[sequence, :length]
    else:
        page_size = cache.shape[1]
        pages = o.page_table[sequence, : -(-length // page_size)]
        rows = take(cache, pages).flatten(0, 1)[:length]
    if scale is not None:
        # Not rounded to q's dtype: the scores are computed in fp32 anyway.
        rows = rows.to(torch.promote_types(o.q.dtype, torch.float32)) * scale.reshape(-1, 1)
    return rows.transpose(0, 1)[None]


def _alone(
    core: Core, problem: Problem, o: Operands, q: Tensor, k: Tensor, v: Tensor, sequence: int
) -> tuple[Tensor, Tensor | None]:
    """One sequence by itself. Batch-invariant ones from memory of their own: a matrix product's order of summation may
    depend on how its operands are aligned, as on how many it is done for."""
    if problem.batch_invariant:
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    return core(problem, o, q, k, v, sequence)


def _empty_lse(q: Tensor, *shape: int) -> Tensor:
    return q.new_full(shape, -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
