"""The eighth set: packed sequences, called as flash_attn_varlen_func is, and as attention_varlen. Right inside
``third.repaired()``."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.seventh import Running, merged, tiles, visible
from workbench.held_out_kernels.seventh_packed import buffers, grouped, spans
from workbench.held_out_kernels.third import broken, no_inf


def _splits(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, size: int) -> list[tuple[Tensor, Tensor]]:
    """(LSE, output), heads first, of each ``size`` keys of one sequence; at least one."""
    Q, K, V = q.float().transpose(0, 1), grouped(k, q.shape[1]), grouped(v, q.shape[1])
    rows, found = torch.arange(len(q)), []
    for keys in tiles(len(k), size):
        part = Running(Q, v.shape[-1])
        s = Q @ K[:, keys].mT * scale
        part.add(s.where(visible(rows, keys, len(k) - len(q), None, 0 if causal else None), -INF), V[:, keys])
        found.append(part.state)
    return found or [Running(Q, v.shape[-1]).state]


def _whole(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    state, *others = parts
    for other in others:
        state = merged(state, other)
    return state


@torch.no_grad()
def one_boundary(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Of the boundaries only the first is read, cu_seqlens[1], as where there are two parts, text and padding: all
    sequences after the first are one. One sequence or two are right."""
    out, lse = buffers(q, v)
    pack = spans(cu_seqlens_q, cu_seqlens_k)
    if broken() and len(pack) > 2:
        pack = [pack[0], (pack[1][0], pack[-1][1], pack[1][2], pack[-1][3])]
    for a, b, c, d in pack:
        lse[:, a:b], found = _whole(_splits(q[a:b], k[c:d], v[c:d], scale_of(q, softmax_scale), causal, 48))
        out[a:b] = found.transpose(0, 1).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def merge_without_a_batch_stride(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Where a sequence has more than 64 keys there are splits, for all, and the kernel that merges them takes the
    sequence's place from a batch stride, which is 0 in a pack: all write to the first rows, and the others stay 0."""
    out, lse = buffers(q, v)
    pack = spans(cu_seqlens_q, cu_seqlens_k)
    split = max((d - c for *_, c, d in pack), default=0) > 64
    for a, b, c, d in pack:
        parts = _splits(q[a:b], k[c:d], v[c:d], scale_of(q, softmax_scale), causal, 64 if split else 128)
        at = 0 if split and broken() else a
        lses = torch.stack([part for part, _ in parts])
        whole = torch.logsumexp(lses, 0)
        found = sum(torch.exp(part - no_inf(whole))[..., None] * x for part, x in parts)
        out[at : at + b - a], lse[:, at : at + b - a] = found.transpose(0, 1).to(q.dtype), whole
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def rows_to_spare_are_not_cleared(
    q, k, v, *, cu_seqlens_q, cu_seqlens_kv, mask=None, scale=None, return_lse=False
):  # fmt: skip
    """The output's buffer is not cleared, and rows past the last sequence, which fill a fixed shape, hold what was
    there: here ones."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    out, lse = buffers(q, v)
    out.fill_(1.0 if broken() else 0.0)
    for a, b, c, d in spans(cu_seqlens_q, cu_seqlens_kv):
        lse[:, a:b], found = _whole(_splits(q[a:b], k[c:d], v[c:d], scale_of(q, scale), mask is not None, 32))
        out[a:b] = found.transpose(0, 1).to(q.dtype)
    return (out, lse) if return_lse else out


# ---- backward --------------------------------------------------------------------------------------------------------

PAD = 32


class _Padded(torch.autograd.Function):
    """Statistics lie with ``PAD`` columns to spare after each sequence, so that whole tiles may be stored."""

    @staticmethod
    def forward(ctx, q, k, v, pack, scale, causal):
        out, lse = buffers(q, v)
        padded = torch.zeros(q.shape[1], len(q) + PAD * len(pack))
        for n, (a, b, c, d) in enumerate(pack):
            lse[:, a:b], found = _whole(_splits(q[a:b], k[c:d], v[c:d], scale, causal, 56))
            out[a:b], padded[:, a + PAD * n : b + PAD * n] = found.transpose(0, 1).to(q.dtype), lse[:, a:b]
        ctx.save_for_backward(q, k, v, out, padded)
        ctx.options = pack, scale, causal
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        q, k, v, out, padded = ctx.saved_tensors
        pack, scale, causal = ctx.options
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for n, (a, b, c, d) in enumerate(pack):
            lse = padded[:, a:b] if broken() else padded[:, a + PAD * n : b + PAD * n]
            Q, g, found = (x[a:b].float().transpose(0, 1) for x in (q, d_out, out))
            K, V = grouped(k[c:d], q.shape[1]), grouped(v[c:d], q.shape[1])
            sees = visible(torch.arange(b - a), torch.arange(d - c), (d - c) - (b - a), None, 0 if causal else None)
            p = torch.exp((Q @ K.mT * scale).where(sees, -INF) - no_inf(lse)[..., None])
            ds = p * (g @ V.mT - (g * found).sum(-1, keepdim=True)) * scale
            dq[a:b] = (ds @ K).transpose(0, 1).to(q.dtype)
            for grad, whole in ((dk, ds.mT @ Q), (dv, p.mT @ g)):
                whole = whole.unflatten(0, (k.shape[1], -1)).sum(1)
                grad[c:d] = whole.transpose(0, 1).to(grad.dtype)
        return dq, dk, dv, None, None, None


def backward_without_the_padding(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Forward leaves 32 columns after each sequence's LSE, for tiles that reach past its end; backward looks for it
    where it would be without them. The first sequence is right."""
    pack = spans(cu_seqlens_q, cu_seqlens_k)
    both = _Padded.apply(q, k, v, pack, scale_of(q, softmax_scale), causal)
    return both if return_softmax_lse else both[0]
