"""The eighth set: right kernels that are made in unusual ways, which must be found right."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attnworks import ALiBi, Bias, Sink, Softcap
from attnworks.masks import Causal, Window
from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, ends, stored, tiles, visible
from workbench.held_out_kernels.seventh_caches import append, batched, per_head, shown, slots_at
from workbench.held_out_kernels.seventh_packed import buffers, spans
from workbench.held_out_kernels.third import no_inf

LOG2E = math.log2(math.e)

# ---- dense -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_by_halves(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    return_softmax_lse=False,
):  # fmt: skip
    """Right: the keys are halved until at most 11 are left, and (maximum, sum, accumulator) of two halves become one,
    in base 2; there is no loop over tiles."""
    M, N, (left, right) = q.shape[1], k.shape[1], ends(window_size, causal)
    (Q, K, V), rows = heads_first(q, k, v), torch.arange(M)

    def state(first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        if last - first > 11:
            middle = (first + last) // 2
            (m, a, x), (n, b, y) = state(first, middle), state(middle, last)
            top = torch.maximum(m, n)
            c, d = torch.exp2(m - no_inf(top)), torch.exp2(n - no_inf(top))
            return top, a * c + b * d, x * c + y * d
        keys = torch.arange(first, last)
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if alibi_slopes is not None:
            s = s - alibi_slopes.float()[..., None, None] * (rows[:, None] + N - M - keys).abs()
        s = (s * LOG2E).where(visible(rows, keys, N - M, left, right), -INF)
        top = s.amax(-1, keepdim=True)
        p = torch.exp2(s - no_inf(top))
        return top, p.sum(-1, keepdim=True), p @ V[:, :, keys]

    if not N:
        return stored(q, Q.new_zeros(*Q.shape[:-1], v.shape[-1]), Q.new_full(Q.shape[:-1], -INF), return_softmax_lse)
    top, total, acc = state(0, N)
    lse = (top + total.log2()).squeeze(-1) / LOG2E
    return stored(q, acc / torch.where(total == 0, 1.0, total), lse, return_softmax_lse)


@torch.no_grad()
def right_channel_by_channel(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Right: scores are summed channel by channel, from the last to the first, and the output is made one channel of V
    at a time, in fp64 without tiles."""
    (Q, K, V), M, N = heads_first(q.double(), k.double(), v.double()), q.shape[1], k.shape[1]
    Q, K, V = Q.double(), K.double(), V.double()
    s = Q.new_zeros(*Q.shape[:-1], N)
    for channel in reversed(range(q.shape[-1])):
        s += Q[..., channel, None] * K[..., None, :, channel]
    s = (s * scale_of(q, softmax_scale)).where(
        visible(torch.arange(M), torch.arange(N), N - M, None, 0 if causal else None), -INF
    )
    lse = torch.logsumexp(s, -1) if N else Q.new_full(Q.shape[:-1], -INF)
    weights = torch.exp(s - no_inf(lse)[..., None])
    out = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for channel in range(v.shape[-1]):
        out[..., channel] = (weights * V[..., None, :, channel]).sum(-1)
    return stored(q, out, lse.float(), return_softmax_lse)


@torch.no_grad()
def right_running_mean(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Right: key by key, and the output is a weighted mean at every moment, moved towards each value by its share of
    the sum so far; in fp64."""
    (M, D), N = query.shape[2:], key.shape[2]
    group = query.shape[1] // max(key.shape[1], 1) if enable_gqa else 1
    Q, (K, V) = query.double(), (x.double().repeat_interleave(group, 1) for x in (key, value))
    mask = torch.zeros(1, 1) if attn_mask is None else attn_mask
    mask = torch.zeros(()).where(mask, -INF) if mask.dtype == torch.bool else mask.double()
    mask = mask.expand(*query.shape[:3], N) if N else mask
    top, total = Q.new_full(Q.shape[:-1], -INF), Q.new_zeros(Q.shape[:-1])
    mean = Q.new_zeros(*Q.shape[:-1], value.shape[-1])
    for j in range(N):
        s = (Q * K[:, :, j, None]).sum(-1) * (D**-0.5 if scale is None else scale) + mask[..., j]
        s = s.masked_fill(torch.arange(M) < j, -INF) if is_causal else s
        new = torch.maximum(top, s)
        share = torch.exp(s - no_inf(new))
        total, top = total * torch.exp(top - no_inf(new)) + share, new
        mean += (V[:, :, j, None] - mean) * (share / torch.where(total == 0, 1.0, total))[..., None]
    return mean.to(query.dtype)


class _RowsOutermost(torch.autograd.Function):
    """Maximum and sum are saved, not the LSE."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, scale, left, right, cap):
        (Q, K, V), M, N = heads_first(q, k, v), q.shape[1], k.shape[1]
        state = Running(Q, v.shape[-1])
        if sinks is not None:
            logits = sinks.float().view(1, -1, 1, 1).expand(*Q.shape[:-1], 1)
            state.add(logits, Q.new_zeros(*Q.shape[:2], 1, v.shape[-1]))
        for keys in tiles(N, 52):
            s = Q @ K[:, :, keys].mT * scale
            s = cap * torch.tanh(s / cap) if cap else s
            state.add(s.where(visible(torch.arange(M), keys, N - M, left, right), -INF), V[:, :, keys])
        ctx.save_for_backward(q, k, v, sinks, state.top, state.total)
        ctx.options = scale, left, right, cap
        return state.out.transpose(1, 2).to(q.dtype), state.lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, sinks, top, total = ctx.saved_tensors
        scale, left, right, cap = ctx.options
        (_, M, H, _), (N, G) = q.shape, k.shape[1:3]
        group, inverse = H // max(G, 1), 1 / torch.where(total == 0, 1.0, total)
        dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
        d_sinks = None if sinks is None else torch.zeros(H)
        for h in range(H):
            K, V = k[:, :, h // group].float(), v[:, :, h // group].float()
            for rows in tiles(M, 20):
                Q, g = q[:, rows, h].float(), d_out[:, rows, h].float()
                raw = torch.einsum("bmd,bnd->bmn", Q, K) * scale
                bent = torch.tanh(raw / cap) if cap else raw
                s = (cap * bent if cap else raw).where(visible(rows, torch.arange(N), N - M, left, right), -INF)
                p = torch.exp(s - no_inf(top[:, h, rows])) * inverse[:, h, rows]
                dp = torch.einsum("bme,bne->bmn", g, V)
                away = (p * dp).sum(-1, keepdim=True) - d_lse[:, h, rows, None]
                if d_sinks is not None:
                    share = torch.exp(sinks[h].float() - no_inf(top[:, h, rows])) * inverse[:, h, rows]
                    d_sinks[h] -= (share * away).sum()
                ds = p * (dp - away) * scale * (1 - bent**2 if cap else 1.0)
                dq[:, rows, h] = torch.einsum("bmn,bnd->bmd", ds, K)
                dk[:, :, h // group] += torch.einsum("bmn,bmd->bnd", ds, Q)
                dv[:, :, h // group] += torch.einsum("bmn,bme->bne", p, g)
        d_sinks = None if sinks is None or d_sinks is None else d_sinks.to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None, None


def right_rows_outermost(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None, return_softmax_lse=False
):
    """Right: backward has one head's 20 rows after the other, against all keys at once, and adds to dK and dV; it
    divides by the sum that was saved beside the maximum, and makes delta of P dP."""
    options = scale_of(q, softmax_scale), *ends(window_size, causal), softcap
    both = _RowsOutermost.apply(q, k, v, sinks, *options)
    return both if return_softmax_lse else both[0]


@torch.no_grad()
def right_in_powers_of_ten(q, k, v, mask=None, scores=(), scale=None, return_lse=False):
    """Right: numpy in fp64 with exponentials of base 10, heads as (heads_kv, group) and nothing repeated; sinks join
    the sum at the end, with a maximum that had them."""
    (B, H, M, D), (G, N), E = q.shape, k.shape[1:3], v.shape[-1]
    group = H // max(G, 1)
    Q, K, V = (x.double().numpy() for x in (q, k, v))
    s = np.einsum("bgrmd,bgnd->bgrmn", Q.reshape(B, G, group, M, D), K).reshape(B, H, M, N)
    s = s * (D**-0.5 if scale is None else scale)
    away = np.arange(N) - (np.arange(M)[:, None] + N - M)
    sinks = np.full((H, 1), -np.inf)
    for score in scores:
        if isinstance(score, Softcap):
            s = score.cap * np.tanh(s / score.cap)
        elif isinstance(score, ALiBi):
            s = s - score.slopes.double().numpy()[..., None, None] * abs(away)
        elif isinstance(score, Bias):
            s = s + score.tensor.double().numpy()
        elif isinstance(score, Sink):
            sinks = score.logits.double().numpy()[:, None]
        else:
            raise NotImplementedError("no functions")
    if isinstance(mask, Tensor):
        sees = mask.numpy()
    elif mask is None or isinstance(mask, Causal | Window):
        far = away if mask is None or mask.align == "bottom-right" else away + N - M
        left, right = (mask.left, mask.right) if isinstance(mask, Window) else (None, None if mask is None else 0)
        sees = (far >= (-np.inf if left is None else -left)) & (far <= (np.inf if right is None else right))
    else:
        raise NotImplementedError("no predicates and no intersections")
    s = np.where(np.broadcast_to(sees, s.shape), s, -np.inf) * math.log10(math.e)
    sinks = sinks * math.log10(math.e)
    with np.errstate(all="ignore"):
        top = np.maximum(s.max(-1, initial=-np.inf), sinks)
        base = np.where(np.isneginf(top), 0.0, top)
        p = 10.0 ** (s - base[..., None])
        total = p.sum(-1) + 10.0 ** (sinks - base)
        lse = (base + np.log10(total)) / math.log10(math.e)
    acc = np.einsum("bgrmn,bgne->bgrme", p.reshape(B, G, group, M, N), V).reshape(B, H, M, E)
    out = torch.from_numpy(acc / np.where(total == 0, 1.0, total)[..., None]).to(q.dtype)
    return (out, torch.from_numpy(lse).float()) if return_lse else out


# ---- packed sequences ------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_pair_by_pair(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, window_size=(-1, -1),
    return_softmax_lse=False,
):  # fmt: skip
    """Right: all pairs of a row and a key that it sees, of all sequences, stand in one list, and maxima, sums and
    outputs are scattered to the rows."""
    (left, right), (T, H), G = ends(window_size, causal), q.shape[:2], k.shape[1]
    found = [torch.zeros(0, 2, dtype=torch.long)]
    for a, b, c, d in spans(cu_seqlens_q, cu_seqlens_k):
        pairs = visible(torch.arange(b - a), torch.arange(d - c), (d - c) - (b - a), left, right).nonzero()
        found.append(pairs + torch.tensor([a, c]))
    row, key = torch.cat(found).T
    own = torch.arange(H) * G // max(H, 1)
    s = (q[row].double() * k[:, own][key].double()).sum(-1) * scale_of(q, softmax_scale)
    top = torch.full((T, H), -INF, dtype=torch.float64)
    top = top.scatter_reduce(0, row[:, None].expand(-1, H), s, "amax")
    p = torch.exp(s - no_inf(top)[row])
    total = torch.zeros(T, H, dtype=torch.float64).index_add(0, row, p)
    acc = torch.zeros(T, H, v.shape[-1], dtype=torch.float64).index_add(0, row, p[..., None] * v[:, own][key].double())
    out, lse = buffers(q, v)
    out.copy_(acc / torch.where(total == 0, 1.0, total)[..., None])
    lse.copy_((top + total.log()).T)
    return (out, lse) if return_softmax_lse else out


# ---- caches ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def right_lowest_page_first(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
):  # fmt: skip
    """Right: a sequence's pages are taken in the order in which they lie in memory, whatever their places in it, and
    V's channels in two halves, each with a softmax of its own."""
    M, (left, right) = q.shape[1], ends(window_size, causal)
    size = 24 if block_table is None else k_cache.shape[1]

    def one(b, length):
        if k is not None:
            append(k_cache, block_table, b, length, k[b])
            append(v_cache, block_table, b, length, v[b])
            length += k.shape[1]
        pages = list(range(-(-length // size)))
        if block_table is not None:
            pages.sort(key=lambda n: int(block_table[b, n]))
        x, half = q[b].float().transpose(0, 1), v_cache.shape[-1] // 2
        states = Running(x, half), Running(x, v_cache.shape[-1] - half)
        for n in pages:
            slots = torch.arange(n * size, min(n * size + size, length))
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = softcap * torch.tanh(s / softcap) if softcap else s
            s = s.where(visible(torch.arange(M), slots, length - M, left, right), -INF)
            values = per_head(slots_at(v_cache, block_table, b, slots), len(x))
            for state, part in zip(states, (values[..., :half], values[..., half:]), strict=True):
                state.add(s, part)
        return torch.cat([state.out for state in states], -1), states[1].lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def right_splits_that_double(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None, return_lse=False
):
    """Right: what an 8-bit cache stores is multiplied as it is; K's scale is in the queries, V's is applied to the
    merged output. Splits double in length, from 8 slots on, and are merged by a softmax of their LSEs."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])

    def factor(given: Tensor | None) -> Tensor:
        given = torch.ones(1) if given is None else given.float().flatten()
        return given.expand(G).repeat_interleave(H // max(G, 1)).view(-1, 1, 1)

    def one(b, length):
        x, first, share, lses, outs = q[b].float().transpose(0, 1) * factor(k_scale) * scale_of(q, scale), 0, 8, [], []
        while first < length:
            slots = torch.arange(first, min(first + share, length))
            s = x @ per_head(slots_at(k_cache, page_table, b, slots), H).mT
            s = s.where(shown(torch.arange(M), slots, length - M, mask is not None), -INF)
            lses.append(torch.logsumexp(s, -1))
            weights = torch.exp(s - no_inf(lses[-1])[..., None])
            outs.append(weights @ per_head(slots_at(v_cache, page_table, b, slots), H))
            first, share = first + share, 2 * share
        if not outs:
            return torch.zeros(H, M, v_cache.shape[-1]), torch.full((H, M), -INF)
        stacked = torch.stack(lses)
        weights = torch.softmax(stacked, 0).nan_to_num(0.0)
        return (weights[..., None] * torch.stack(outs)).sum(0) * factor(v_scale), torch.logsumexp(stacked, 0)

    out, lse = batched(q, v_cache, kv_lens.tolist(), one)
    return (out, lse) if return_lse else out
