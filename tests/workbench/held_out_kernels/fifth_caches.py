"""The fifth set: caches, pages, splits over them, and 8-bit caches. Right inside ``third.repaired()``."""

from __future__ import annotations

import torch

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, online, scale_of
from workbench.held_out_kernels.third import broken, no_inf


def _slots(cache, table, batch, count):
    """The first ``count`` slots of a sequence, (count, heads_kv, dim)."""
    if table is None:
        return cache[batch, :count]
    size, slot = cache.shape[1], torch.arange(count)
    return cache[table[batch].long()[slot // size], slot % size]


def _append(cache, table, batch, place, new):
    for n, row in enumerate(new):
        slot = place + n
        if table is None:
            cache[batch, slot] = row
        else:
            cache[int(table[batch, slot // cache.shape[1]]), slot % cache.shape[1]] = row


def _one(q, keys, values, scale, sees, step=64):
    """(rows, heads, dim) against (count, heads_kv, dim) where ``sees`` (rows, count): (heads, rows, dim), lse."""
    x, group = q.float().transpose(0, 1), q.shape[1] // keys.shape[1]
    y, z = (t.float().repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
    tiles = (
        ((x @ y[:, j].mT * scale).where(sees[:, j], -INF), z[:, j])
        for j in (torch.arange(len(keys)).split(step) if len(keys) else [])
    )
    return online(tiles, x, values.shape[-1])


def _sees(rows, count, causal, left=-1, right=-1):
    distance = torch.arange(count) - torch.arange(rows)[:, None] - (count - rows)
    right = 0 if causal else right
    sees = distance <= right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
    return sees & (distance >= -left) if left >= 0 else sees


@torch.no_grad()
def appended_one_slot_on(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """New keys and values are written from slot length + 1 on; the slot of the length itself keeps what it held."""
    out = q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    for b, length in enumerate(cache_seqlens.tolist()):
        if k is not None:
            room = (k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]) - length
            place = length + (broken() and room > k.shape[1])
            for cache, new in ((k_cache, k), (v_cache, v)):
                _append(cache, block_table, b, place, new[b])
            length += k.shape[1]
        keys, values = (_slots(cache, block_table, b, length) for cache in (k_cache, v_cache))
        found = _one(q[b], keys, values, scale_of(q, softmax_scale), _sees(q.shape[1], length, causal))[0]
        out[b] = found.transpose(0, 1).to(q.dtype)
    return out


@torch.no_grad()
def splits_that_had_no_work(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The batch's longest sequence gives the splits' size; splits past a shorter one's end write nothing, and the merge
    reads their part of the workspace all the same."""
    (B, M, H, _), E = q.shape, v_cache.shape[-1]
    share = max(-(-int(cache_seqlens.max()) // 4), 1) if B else 1
    partial = torch.full((4, B, H, M, E), torch.nan)
    lses = torch.full((4, B, H, M, 1), torch.nan)
    for b, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_slots(cache, block_table, b, length) for cache in (k_cache, v_cache))
        sees = _sees(M, length, causal)
        for split in range(4):
            part = slice(split * share, min(split * share + share, length))
            if part.start >= length and broken():
                continue
            found, lse = _one(q[b], keys[part], values[part], scale_of(q, softmax_scale), sees[:, part], 32)
            partial[split, b], lses[split, b] = found, lse[..., None]
    whole = torch.logsumexp(lses, 0)
    out = (partial * torch.exp(lses - no_inf(whole))).sum(0).transpose(1, 2).to(q.dtype)
    return (out, whole.squeeze(-1)) if return_softmax_lse else out


@torch.no_grad()
def window_of_the_last_query(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    """Several queries are decoded at once, and the window's left end is worked out once, for the last of them."""
    M = q.shape[1]
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1])
    for b, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_slots(cache, block_table, b, length) for cache in (k_cache, v_cache))
        sees = _sees(M, length, causal, *window_size)
        if window_size[0] >= 0 and broken():
            sees &= torch.arange(length) >= length - 1 - window_size[0]
        out[b] = _one(q[b], keys, values, scale_of(q, softmax_scale), sees, 16)[0].transpose(0, 1)
    return out.to(q.dtype)


@torch.no_grad()
def queries_are_counted_again(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """The lengths grow by the number of queries, as if these were always appended, also where the caller appended them
    and gives no new keys."""
    out = []
    for b, length in enumerate(cache_seqlens.tolist()):
        capacity = k_cache.shape[1] if block_table is None else -(-length // k_cache.shape[1]) * k_cache.shape[1]
        if k is not None:
            for cache, new in ((k_cache, k), (v_cache, v)):
                _append(cache, block_table, b, length, new[b])
            length += k.shape[1]
        elif broken():
            length = min(length + q.shape[1], capacity)
        keys, values = (_slots(cache, block_table, b, length) for cache in (k_cache, v_cache))
        sees = _sees(q.shape[1], length, causal)
        out.append(_one(q[b], keys, values, scale_of(q, softmax_scale), sees)[0].transpose(0, 1))
    return torch.stack(out).to(q.dtype) if out else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])


@torch.no_grad()
def empty_caches_divide_by_nothing(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False
):
    """The output is divided by the sum also where a sequence, a placeholder in the batch, has no keys yet."""
    (B, M, H, D), G = q.shape, k_cache.shape[2]
    longest = int(cache_seqlens.max()) if B else 0
    shown = torch.arange(longest) < cache_seqlens[:, None]  # (batch, keys)
    keys, values = (
        torch.stack([torch.nn.functional.pad(
            _slots(cache, block_table, b, n).float(), (0, 0, 0, 0, 0, longest - n)
        ) for b, n in enumerate(cache_seqlens.tolist())]) if B else cache[:0].float()
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    x = q.float().view(B, M, G, H // G, D) * scale_of(q, softmax_scale)
    s = torch.einsum("bmghd,bngd->bghmn", x, keys)
    last = torch.arange(M)[:, None] + (cache_seqlens - M)[:, None, None]
    sees = shown[:, None] & ((torch.arange(longest) <= last) | (not causal))
    s = s.where(sees[:, None, None], -INF)
    m = s.amax(-1, keepdim=True) if longest else s.new_full((*s.shape[:-1], 1), -INF)
    p = torch.exp(s - no_inf(m))
    total = p.sum(-1, keepdim=True)
    total = total if broken() else total.masked_fill(total == 0, 1.0)
    out = torch.einsum("bghmn,bngd->bghmd", p, values) / total
    return out.permute(0, 3, 1, 2, 4).reshape(B, M, H, -1).to(q.dtype)


# ---- 8-bit caches, as attention_decode -------------------------------------------------------------------------------


def _eight_bits(q, k_cache, v_cache, kv_lens, page_table, mask, scale, read_k, read_v):
    """``read_k(slots)``, ``read_v(slots)``: their values in fp32, (count, heads_q, dim)."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    out = q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    for b, length in enumerate(kv_lens.tolist()):
        keys, values = (
            read(_slots(cache, page_table, b, length)) for cache, read in ((k_cache, read_k), (v_cache, read_v))
        )
        sees = _sees(q.shape[1], length, mask is not None)
        out[b] = _one(q[b], keys, values, scale_of(q, scale), sees)[0].transpose(0, 1).to(q.dtype)
    return out


def _factor(scale):
    """A scale for one or for each head, to multiply (count, heads, dim)."""
    return 1.0 if scale is None else scale.view(-1, 1)


@torch.no_grad()
def scale_by_the_query_head(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """A scale for each KV head is read at the query head's number, held to the last one."""
    H, G = q.shape[2], k_cache.shape[2]

    def reader(given):
        def read(slots):
            whole = slots.float().repeat_interleave(H // G, 1)
            if given is None or given.numel() == 1:
                return whole * _factor(given)
            heads = torch.arange(H)
            return whole * given[heads.clamp(max=G - 1) if broken() else heads // (H // G)][:, None]

        return read

    return _eight_bits(q, k_cache, v_cache, kv_lens, page_table, mask, scale, reader(k_scale), reader(v_scale))


@torch.no_grad()
def one_scale_by_copy_and_paste(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """V is read with K's scale."""
    other = k_scale if broken() else v_scale
    return _eight_bits(
        *(q, k_cache, v_cache, kv_lens, page_table, mask, scale),
        lambda keys: keys.float() * _factor(k_scale),
        lambda values: values.float() * _factor(other),
    )


@torch.no_grad()
def key_scale_folded_and_applied(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """K's scale is folded into the queries, and the loop over the cache multiplies the keys by it again."""
    k = _factor(k_scale)
    twice = k * k if broken() else k
    return _eight_bits(
        *(q, k_cache, v_cache, kv_lens, page_table, mask, scale),
        lambda keys: keys.float() * twice,
        lambda values: values.float() * _factor(v_scale),
    )


@torch.no_grad()
def bytes_without_a_sign(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """An int8 cache is loaded through a plain char, which has no sign on the platform ported to."""

    def signed(slots):
        return (slots.view(torch.uint8) if slots.dtype == torch.int8 and broken() else slots).float()

    return _eight_bits(
        *(q, k_cache, v_cache, kv_lens, page_table, mask, scale),
        lambda keys: signed(keys) * _factor(k_scale),
        lambda values: signed(values) * _factor(v_scale),
    )
