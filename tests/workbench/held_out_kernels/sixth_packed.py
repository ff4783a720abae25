"""The sixth set: packed sequences, called as flash_attn_varlen_func is. Right inside ``third.repaired()``."""

from __future__ import annotations

from itertools import pairwise

import torch

from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.sixth import causal_of, loop
from workbench.held_out_kernels.third import broken


def _spans(cu_seqlens_q, cu_seqlens_k):
    """(rows, keys) of each sequence, as slices."""
    pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs]


def _one(q, k, v, scale, causal):
    """(rows, heads, dim) against (keys, heads_kv, dim): out like q, lse (heads, rows)."""
    out, lse = loop(q[None], k[None], v[None], scale, causal_of(q[None], k[None], causal), 32, 24)
    return out[0], lse[0]


@torch.no_grad()
def whole_tiles_last_sequence_first(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """The output is stored in whole tiles of 16 rows, of which the last reaches into the next sequence; sequences are
    taken from the last to the first, so that nobody writes it anew."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for rows, keys in reversed(_spans(cu_seqlens_q, cu_seqlens_k)):
        found = _one(q[rows], k[keys], v[keys], scale_of(q, softmax_scale), causal)[0]
        out[rows] = found
        if broken() and len(found) % 16:
            out[rows.stop : rows.stop - len(found) % 16 + 16] = 0
    return out


@torch.no_grad()
def values_from_aligned_offsets(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """V is loaded eight rows at a time, and the offset at which a sequence's values begin is rounded up for that."""
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((q.shape[1], q.shape[0]), -INF)
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        length = keys.stop - keys.start
        first = min(-(-keys.start // 8) * 8, len(v) - length) if broken() else keys.start
        values = v[first : first + length]
        out[rows], lse[:, rows] = _one(q[rows], k[keys], values, scale_of(q, softmax_scale), causal)
    return (out, lse) if return_softmax_lse else out


class _ByKeys(torch.autograd.Function):
    """Gradients sequence by sequence, into buffers that were not cleared: here full of ones."""

    @staticmethod
    def forward(ctx, q, k, v, spans, scale, causal):
        out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((q.shape[1], q.shape[0]), -INF)
        for rows, keys in spans:
            out[rows], lse[:, rows] = _one(q[rows], k[keys], v[keys], scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = spans, scale, causal
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        spans, scale, causal = ctx.options
        group = q.shape[1] // max(k.shape[1], 1)
        dq, dk, dv = (torch.full_like(x, 1.0 if broken() else 0.0) for x in (q, k, v))
        for rows, keys in spans:
            if rows.start == rows.stop:  # no tile of rows, so nothing to be summed
                continue
            Q, found, g = (x[rows].transpose(0, 1).float() for x in (q, out, d_out))
            K, V = (x[keys].transpose(0, 1).float().repeat_interleave(group, 0) for x in (k, v))
            sees = causal_of(q[None, rows], k[None, keys], causal)
            sees = sees(torch.arange(Q.shape[1]), torch.arange(K.shape[1]))
            p = torch.exp((Q @ K.mT * scale).where(sees, -INF) - lse[:, rows, None].where(lse[:, rows, None] > -INF, 0))
            ds = p * (g @ V.mT - (g * found).sum(-1, keepdim=True)) * scale
            dq[rows] = (ds @ K).transpose(0, 1).to(q.dtype)
            for grad, whole in ((dk, ds.mT @ Q), (dv, p.mT @ g)):
                grad[keys] = whole.unflatten(0, (-1, group)).sum(1).transpose(0, 1).to(grad.dtype)
        return dq, dk, dv, None, None, None


def no_queries_no_gradients(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Backward leaves out sequences without queries, and dK and dV of their keys are what the memory held."""
    return _ByKeys.apply(q, k, v, _spans(cu_seqlens_q, cu_seqlens_k), scale_of(q, softmax_scale), causal)
