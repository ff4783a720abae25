"""The tiled backward for every form: one sequence after the other brought to the "bhsd" tensors that ``backward`` works
on, its gradients added where they belong."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks.backends import Gradients, Needs
from attnworks.backends.reference.backward import backward
from attnworks.cache import take
from attnworks.problem import Operands, Problem


class Place(NamedTuple):
    """Where a sequence lies: indices into q-like tensors, k- and v-like ones, each (.., rows, heads, dim) once the
    layout is "bshd", and into the LSE."""

    rows: Any
    keys: Any
    lse: Any


def gradients(
    problem: Problem,
    o: Operands,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: Needs,
    *,
    tile_q: int,
    tile_kv: int,
) -> Gradients:
    """See ``BackwardLauncher``. All are computed, in fp32 (fp64 for fp64); those that nobody asked for are dropped."""
    compute = torch.promote_types(problem.dtype, torch.float32)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    inputs = (o.q, o.k, o.v, *o.scores)
    sums = [torch.zeros_like(x, dtype=compute) for x in inputs]
    for n in range(problem.batch):
        at = _place(problem, o, n)
        q, out_n, d_out_n = (_take(problem, x, at.rows) for x in (o.q, out, d_out))
        k, v = (_dequantised(_take(problem, x, at.keys), s, q) for x, s in ((o.k, o.k_scale), (o.v, o.v_scale)))
        own = Operands(q, k, v, o.mask, o.scores)
        lse_n, d_lse_n = lse[at.lse][None], d_lse[at.lse][None]
        d = backward(problem, own, out_n, lse_n, d_out_n, d_lse_n, n, tile_q=tile_q, tile_kv=tile_kv)
        _add(problem, sums[0], at.rows, d.q)
        _add(problem, sums[1], at.keys, _dequantised(d.k, o.k_scale, q))
        _add(problem, sums[2], at.keys, _dequantised(d.v, o.v_scale, q))
        for total, share in zip(sums[3:], d.scores, strict=True):
            total += share
    d_q, d_k, d_v, *d_scores = (d.to(x.dtype) if need else None for d, x, need in zip(sums, inputs, needs, strict=True))
    return Gradients(d_q, d_k, d_v, tuple(d_scores))


def _place(problem: Problem, o: Operands, n: int) -> Place:
    if problem.form == "dense":
        return Place(n, n, n)
    if problem.form == "varlen":
        assert o.cu_seqlens_q is not None and o.cu_seqlens_kv is not None
        rows, keys = (slice(*cu[n : n + 2].tolist()) for cu in (o.cu_seqlens_q, o.cu_seqlens_kv))
        return Place(rows, keys, (slice(None), rows))
    assert o.kv_lens is not None
    length = int(o.kv_lens[n])
    if o.page_table is None:
        return Place(n, (n, slice(length)), n)
    key = torch.arange(length, device=o.k.device)
    return Place(n, (o.page_table[n, key // problem.page_size], key % problem.page_size), n)


def _rows_first(problem: Problem, x: Tensor) -> Tensor:
    return x.transpose(1, 2) if problem.form == "dense" and problem.layout == "bhsd" else x


def _take(problem: Problem, x: Tensor, index: Any) -> Tensor:
    """One sequence's rows as (1, heads, rows, dim)."""
    return take(_rows_first(problem, x), index).transpose(0, 1)[None]


def _add(problem: Problem, total: Tensor, index: Any, part: Tensor) -> None:
    """Add what ``_take`` would take; pages may be shared, between sequences and within one."""
    total, rows = _rows_first(problem, total), part[0].transpose(0, 1)
    if problem.page_size and isinstance(index, tuple):
        total.index_put_(index, rows, accumulate=True)
    else:
        total[index] += rows


def _dequantised(x: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    """(1, heads, rows, dim) of a cache multiplied by its scale; also the gradient by what is stored from that by what
    it stands for."""
    if scale is None:
        return x
    return x.to(torch.promote_types(q.dtype, torch.float32)) * scale.reshape(-1, 1, 1)
