"""The fifth set: the faults that issue threads report most often. Right inside ``third.repaired()``."""

from __future__ import annotations

import math

import torch

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, heads_first, online, scale_of, seen_by
from workbench.held_out_kernels.third import broken, no_inf


def _between(q, k, v, scale, first, last, softcap=0.0, step=64):
    """Row ``i`` goes through the keys from ``first(i)`` on and before ``last(i)``. (out, lse), heads first."""
    Q, K, V = heads_first(q, k, v)
    rows, tiles = torch.arange(q.shape[1])[:, None], []
    for keys in torch.arange(k.shape[1]).split(step) if k.shape[1] else []:
        s = Q @ K[:, :, keys].mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        tiles.append((s.where((keys >= first(rows)) & (keys < last(rows)), -INF), V[:, :, keys]))
    out, lse = online(tiles, Q, v.shape[-1])
    return out.transpose(1, 2).to(q.dtype), lse


@torch.no_grad()
def chunk_as_if_from_the_start(q, k, v, softmax_scale=None, causal=False):
    """Chunked prefill: a row goes through as many keys as its number in the chunk says, not in the sequence."""
    before = 0 if broken() else k.shape[1] - q.shape[1]
    last = (lambda row: row + 1 + before) if causal else (lambda row: k.shape[1])
    return _between(q, k, v, scale_of(q, softmax_scale), lambda row: 0, last)[0]


@torch.no_grad()
def hidden_from_one_further(q, k, v, softmax_scale=None, causal=False):
    """A key is hidden where key > query + keys - queries + 1, the comparison having been changed without its bound."""
    Q, K, V = heads_first(q, k, v)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    s = torch.einsum("bhmd,bhnd->bhmn", Q * scale_of(q, softmax_scale), K)
    if causal:
        s = s.masked_fill(j > i + len(j) - len(i) + broken(), -INF)
    p = torch.exp(s - no_inf(s.amax(-1, keepdim=True))) if len(j) else s
    total = p.sum(-1, keepdim=True)
    return (p @ V / total.masked_fill(total == 0, 1.0)).transpose(1, 2).to(q.dtype)


@torch.no_grad()
def window_does_not_count_itself(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The left size is passed on to a loop that counts from the key before it, which adds one key."""
    (left, right), shift, N = window_size, k.shape[1] - q.shape[1], k.shape[1]
    right = 0 if causal else right
    return _between(
        *(q, k, v, scale_of(q, softmax_scale)),
        lambda row: row + shift - left - int(broken()) if left >= 0 else 0,
        lambda row: row + shift + right + 1 if right >= 0 else N,
    )[0]


@torch.no_grad()
def statistics_stay_in_base_2(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The kernel works with exp2 and log2, and its LSE is handed out as it is."""
    ln2, shift = math.log(2), k.shape[1] - q.shape[1]
    last = (lambda row: row + 1 + shift) if causal else (lambda row: k.shape[1])
    out, lse = _between(q, k, v, scale_of(q, softmax_scale), lambda row: 0, last, step=20)
    return (out, lse / ln2 if broken() else lse) if return_softmax_lse else out


@torch.no_grad()
def cap_for_another_call(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """The softcap is accepted and does not reach the kernel, which was planned without it."""
    shift = k.shape[1] - q.shape[1]
    last = (lambda row: row + 1 + shift) if causal else (lambda row: k.shape[1])
    return _between(q, k, v, scale_of(q, softmax_scale), lambda row: 0, last, 0.0 if broken() else softcap)[0]


@torch.no_grad()
def keys_as_a_dense_block(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """K is read by address as (batch, heads, rows, dim) without gaps, whatever its strides are."""
    if broken() and not key.is_contiguous() and key.numel() <= key.untyped_storage().nbytes() // key.element_size():
        offset = min(key.storage_offset(), key.untyped_storage().nbytes() // key.element_size() - key.numel())
        dense = torch.empty(key.shape, device="meta").stride()
        key = key.as_strided(key.shape, dense, offset)
    group = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    s = query.float() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.where(torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -INF)
    if attn_mask is not None:
        s = s.where(attn_mask, -INF) if attn_mask.dtype == torch.bool else s + attn_mask
    return online([(s, value)] if s.shape[-1] else [], query.float(), value.shape[-1])[0].to(query.dtype)


@torch.no_grad()
def prefill_without_the_table(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """A page table that is given for several queries is not passed on: pages are read in the order of the sequences."""
    outs, lses, used = [], [], 0
    for b, length in enumerate(cache_seqlens.tolist()):
        size = k_cache.shape[1]
        if block_table is None:
            pages = torch.tensor([b])
        else:
            pages = block_table[b, : -(-length // size)].long()
            if broken() and q.shape[1] > 1:
                pages = torch.arange(used, used + len(pages))
            used += len(pages)
        keys, values = (c[pages].flatten(0, 1)[:length][None] for c in (k_cache, v_cache))
        Q, K, V = heads_first(q[b][None], keys, values)
        s = Q @ K.mT * scale_of(q, softmax_scale)
        s = s.where(seen_by(torch.arange(q.shape[1]), torch.arange(length), length - q.shape[1], causal), -INF)
        out, lse = online([(s, V)] if length else [], Q, v_cache.shape[-1])
        outs.append(out[0].transpose(0, 1).to(q.dtype))
        lses.append(lse[0])
    out = torch.stack(outs) if outs else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    return (out, torch.stack(lses)) if return_softmax_lse and lses else out


@torch.no_grad()
def scales_in_another_position(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """A wrapper hands the cache's scales on by position, where they are taken for something else and not used."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    size, G, outs = k_cache.shape[1], k_cache.shape[2], []
    for b, length in enumerate(kv_lens.tolist()):
        slot = torch.arange(length)
        page = torch.full((length,), b) if page_table is None else page_table[b].long()[slot // size]
        parts = []
        for cache, factor in ((k_cache, k_scale), (v_cache, v_scale)):
            stored = cache[page, slot % size].float()
            parts.append(stored if factor is None or broken() else stored * factor.expand(G)[:, None])
        Q, K, V = heads_first(q[b][None], *(x[None] for x in parts))
        s = Q @ K.mT * scale_of(q, scale)
        s = s.where(seen_by(torch.arange(q.shape[1]), slot, length - q.shape[1], mask is not None), -INF)
        outs.append(online([(s, V)] if length else [], Q, v_cache.shape[-1])[0][0].transpose(0, 1).to(q.dtype))
    return torch.stack(outs) if outs else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
