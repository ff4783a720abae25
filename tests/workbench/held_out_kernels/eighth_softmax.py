"""The eighth set: the running softmax, merged splits, what is kept in 16 bits, and softcap, sinks, called as
flash_attn_func is. Right inside ``third.repaired()``."""

from __future__ import annotations

import math

import torch

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, ends, stored, tiles, visible
from workbench.held_out_kernels.third import broken, no_inf


def _parts(q, k, v, scale, left, right, size):
    """(LSE, output) of each ``size`` keys, for all rows."""
    (Q, K, V), M, N, found = heads_first(q, k, v), q.shape[1], k.shape[1], []
    for keys in tiles(N, size):
        part = Running(Q, v.shape[-1])
        s = Q @ K[:, :, keys].mT * scale
        part.add(s.where(visible(torch.arange(M), keys, N - M, left, right), -INF), V[:, :, keys])
        found.append(part.state)
    return found or [Running(Q, v.shape[-1]).state]


# ---- rescaling and merging -------------------------------------------------------------------------------------------


@torch.no_grad()
def rescaling_put_off(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Sum and accumulator are rescaled only where the maximum rises by more than 8 in base 2, as a newer kernel does
    it; but the maximum itself moves every time, and what is added next is smaller than what is there."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    top = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(top), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in tiles(N, 32):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        little = (top > -INF) & (new - no_inf(top) <= 8 * math.log(2))
        kept = torch.where(little, 1.0, torch.exp(top - no_inf(new)))
        top = new if broken() else torch.where(little, top, new)
        p = torch.exp(s - no_inf(top))
        total, acc = total * kept + p.sum(-1, keepdim=True), acc * kept + p @ V[:, :, keys]
    out = acc / torch.where(total == 0, 1.0, total)
    return stored(q, out, (top + total.log()).squeeze(-1), return_softmax_lse)


@torch.no_grad()
def weights_are_exp_of_the_lse(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Splits of 64 keys are merged with weights exp(LSE), from which no maximum is taken: beyond 88 they are infinite,
    below -104 nothing. One split, and LSEs of ordinary size, are right."""
    parts = _parts(q, k, v, scale_of(q, softmax_scale), None, 0 if causal else None, 64)
    if len(parts) == 1:
        return stored(q, parts[0][1], parts[0][0], return_softmax_lse)
    lses = torch.stack([lse for lse, _ in parts])
    top = torch.zeros(()) if broken() else no_inf(lses.amax(0))
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    out = sum(w[..., None] * part for w, (_, part) in zip(weights, parts, strict=True))
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    return stored(q, out, top + total.log(), return_softmax_lse)


@torch.no_grad()
def nothing_merged_with_nothing(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_softmax_lse=False
):  # fmt: skip
    """States of 48 keys are merged one after the other. Where neither of two has a key for a row, its weights are of
    -inf minus -inf, and the row is NaN from there on."""
    left, right = ends(window_size, causal)
    (lse, out), *others = _parts(q, k, v, scale_of(q, softmax_scale), left, right, 48)
    for other_lse, other in others:
        top = torch.maximum(lse, other_lse)
        top = top if broken() else no_inf(top)
        a, b = torch.exp(lse - top), torch.exp(other_lse - top)
        whole = torch.where(a + b == 0, 1.0, a + b)
        lse, out = top + (a + b).log(), out * (a / whole)[..., None] + other * (b / whole)[..., None]
    return stored(q, out, lse, return_softmax_lse)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def workspace_like_the_queries(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The splits' LSEs lie in a workspace that was made like q, and so in its dtype; their outputs are fp32. With fp32
    inputs, or at most 32 keys, it is right."""
    parts = _parts(q, k, v, scale_of(q, softmax_scale), None, 0 if causal else None, 32)
    kept_in = q.dtype if broken() and len(parts) > 1 else torch.float32
    lses = torch.stack([lse for lse, _ in parts]).to(kept_in).float()
    whole = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - no_inf(whole))
    out = sum(w[..., None] * part for w, (_, part) in zip(weights, parts, strict=True))
    return stored(q, out, whole, return_softmax_lse)


@torch.no_grad()
def sum_like_the_queries(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The running sum is made with zeros of q's dtype and stays in it; the accumulator is fp32. With fp32 inputs it is
    right, with 16 bits and many keys it stops growing."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    top = Q.new_full((*Q.shape[:-1], 1), -INF)
    total = torch.zeros_like(top).to(q.dtype if broken() else torch.float32)
    acc = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in tiles(N, 16):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        kept, p = torch.exp(top - no_inf(new)), torch.exp(s - no_inf(new))
        total = (total * kept + p.sum(-1, keepdim=True)).to(total.dtype)
        top, acc = new, acc * kept + p @ V[:, :, keys]
    found = total.float()
    out = acc / torch.where(found == 0, 1.0, found)
    return stored(q, out, (top + found.log()).squeeze(-1), return_softmax_lse)


# ---- softcap, sinks --------------------------------------------------------------------------------------------------


@torch.no_grad()
def tanh_by_a_sigmoid(q, k, v, softmax_scale=None, causal=False, softcap=0.0, return_softmax_lse=False):
    """There is no tanh in the language, and it was written as 2 sigmoid(x) - 1, which is tanh(x / 2)."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 64):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        if softcap:
            s = softcap * (2 * torch.sigmoid((1 if broken() else 2) * s / softcap) - 1)
        state.add(s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


@torch.no_grad()
def sink_by_the_row_number(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """The softmax kernel has rows of (batch, heads, queries) in one axis and takes the sink of row % heads. With one
    query, as in decode, that is the head."""
    (B, M, H, _), N = q.shape, k.shape[1]
    Q, K, V = heads_first(q, k, v)
    s = Q @ K.mT * scale_of(q, softmax_scale)
    s = s.where(visible(torch.arange(M), torch.arange(N), N - M, None, 0 if causal else None), -INF).flatten(0, 2)
    values = V[:, :, None].expand(B, H, M, N, v.shape[-1]).reshape(B * H * M, N, v.shape[-1])
    state = Running(s.new_zeros(B * H * M, 1, 1), v.shape[-1])
    state.add(s[:, None], values)
    if sinks is not None:
        row = torch.arange(B * H * M)
        head = row % max(H, 1) if broken() else row // max(M, 1) % max(H, 1)
        state.add(sinks.float()[head][:, None, None], torch.zeros(len(row), 1, v.shape[-1]))
    return stored(q, state.out.view(B, H, M, v.shape[-1]), state.lse.view(B, H, M), return_softmax_lse)


@torch.no_grad()
def sinks_join_in_the_merge(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), sinks=None, return_softmax_lse=False
):
    """Sinks are added where splits of 64 keys are merged; with up to 64 keys there is one split, which writes the
    output itself, and sinks do not count."""
    left, right = ends(window_size, causal)
    parts = _parts(q, k, v, scale_of(q, softmax_scale), left, right, 64)
    terms = [lse for lse, _ in parts]
    if sinks is not None and (len(parts) > 1 or not broken()):
        terms.append(sinks.float().view(-1, 1).expand_as(terms[0]))
    whole = torch.logsumexp(torch.stack(terms), 0)
    out = sum(torch.exp(lse - no_inf(whole))[..., None] * part for lse, part in parts)
    return stored(q, out, whole, return_softmax_lse)
