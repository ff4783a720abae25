"""Wrong kernels over packed sequences, KV caches and splits of the keys, called as flash_attn_varlen_func,
flash_attn_with_kvcache, attnworks.attention_decode and flash_attn_func are. Causal from the bottom right."""

import random

import torch
from torch import Tensor

import attnworks as aw

INF = float("inf")


def _one(q, k, v, scale, causal, shift=None):
    """One sequence, (rows, heads, dim) each: out (rows, heads_q, dim_v) and LSE (heads_q, rows), fp32."""
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    group = q.shape[0] // max(k.shape[0], 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        shift = k.shape[1] - q.shape[1] if shift is None else shift
        s = s.masked_fill(torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + shift, -INF)
    return _finish(s, v)


def _finish(s: Tensor, v: Tensor):
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -INF)
    p = torch.exp(s - top.masked_fill(top == -INF, 0))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    lse = (top + some.log()).masked_fill(total == 0, -INF)[..., 0]
    return (p @ v / some).transpose(0, 1), lse


def _pairs(cu_q: Tensor, cu_k: Tensor):
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(q[n], q[n + 1]), slice(k[n], k[n + 1])) for n in range(len(q) - 1)]


def _packed(parts, q, v, wanted):
    outs, lses = zip(*parts, strict=True) if parts else ((), ())
    out = torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[-1])
    return (out.to(q.dtype), torch.cat(lses, 1), None) if wanted else out.to(q.dtype)


# ---- packed sequences ------------------------------------------------------------------------------------------------


def sequences_mixed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                    causal=False, return_attn_probs=False):  # fmt: skip
    """Every query sees the keys of all sequences of the pack."""
    out, lse = _one(q, k, v, softmax_scale, causal)
    return (out.to(q.dtype), lse, None) if return_attn_probs else out.to(q.dtype)


def keys_by_query_offsets(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                          causal=False, return_attn_probs=False):  # fmt: skip
    """A sequence's keys start at its offset among the queries."""
    parts = []
    for rows, keys in _pairs(cu_seqlens_q, cu_seqlens_k):
        length = keys.stop - keys.start
        first = max(0, min(rows.start, k.shape[0] - length))  # a read past the end would be a crash
        keys = slice(first, first + length)
        parts.append(_one(q[rows], k[keys], v[keys], softmax_scale, causal))
    return _packed(parts, q, v, return_attn_probs)


def longest_for_all(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                    causal=False, return_attn_probs=False):  # fmt: skip
    """Each sequence reads max_seqlen_k keys from its offset, into the next one's."""
    parts = []
    for rows, keys in _pairs(cu_seqlens_q, cu_seqlens_k):
        read = slice(keys.start, min(keys.start + max_seqlen_k, k.shape[0]))
        shift = keys.stop - keys.start - (rows.stop - rows.start)
        parts.append(_one(q[rows], k[read], v[read], softmax_scale, causal, shift))
    return _packed(parts, q, v, return_attn_probs)


def varlen_top_left(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
                    causal=False, return_attn_probs=False):  # fmt: skip
    """In packed sequences causal counts from each sequence's first query and key."""
    parts = []
    for rows, keys in _pairs(cu_seqlens_q, cu_seqlens_k):
        parts.append(_one(q[rows], k[keys], v[keys], softmax_scale, causal, shift=0))
    return _packed(parts, q, v, return_attn_probs)


def shift_of_the_longest(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                         causal=False, return_attn_probs=False):  # fmt: skip
    """Causal's origin in each packed sequence comes from the longest lengths instead of its own."""
    parts = []
    for rows, keys in _pairs(cu_seqlens_q, cu_seqlens_k):
        parts.append(_one(q[rows], k[keys], v[keys], softmax_scale, causal, max_seqlen_k - max_seqlen_q))
    return _packed(parts, q, v, return_attn_probs)


# ---- caches ----------------------------------------------------------------------------------------------------------


def _read(cache: Tensor, row: int, length: int, table=None):
    """The first ``length`` keys of one sequence, (length, heads, dim)."""
    if table is None:
        return cache[row, :length]
    pages = table[row, : -(-length // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:length]


def _append(cache: Tensor, new, lengths, table) -> None:
    for row, length in enumerate(lengths):
        for n in range(0 if new is None else new.shape[1]):
            at = length + n
            place = (row, at) if table is None else (int(table[row, at // cache.shape[1]]), at % cache.shape[1])
            cache[place] = new[row, n]


def _batched(parts, q, v, wanted):
    out = torch.stack([part[0] for part in parts]) if parts else q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.stack([part[1] for part in parts]) if parts else torch.zeros(0, q.shape[2], q.shape[1])
    return (out.to(q.dtype), lse) if wanted else out.to(q.dtype)


def whole_capacity(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False,
                   return_softmax_lse=False):  # fmt: skip
    """The cache's lengths are ignored: every slot is read."""
    parts = [_one(q[b], k_cache[b], v_cache[b], softmax_scale, causal) for b in range(q.shape[0])]
    return _batched(parts, q, v_cache, return_softmax_lse)


def length_minus_one(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None,
                     return_softmax_lse=False):  # fmt: skip
    """The newest key of the cache is not read."""
    parts = []
    for b, length in enumerate(cache_seqlens.tolist()):
        read = max(length - 1, 0)
        k, v = _read(k_cache, b, read, block_table), _read(v_cache, b, read, block_table)
        parts.append(_one(q[b], k, v, softmax_scale, False))
    return _batched(parts, q, v_cache, return_softmax_lse)


def table_of_first(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
                   return_softmax_lse=False):  # fmt: skip
    """Every sequence reads the page table's first row."""
    parts = []
    for b, length in enumerate(cache_seqlens.tolist()):
        table = block_table
        if table is not None:  # entries that name no page would be a crash
            table = table[:1].remainder(k_cache.shape[0]).expand_as(table)
        k, v = (_read(cache, b, length, table) for cache in (k_cache, v_cache))
        parts.append(_one(q[b], k, v, softmax_scale, causal))
    return _batched(parts, q, v_cache, return_softmax_lse)


def stale_last_page(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
                    return_softmax_lse=False):  # fmt: skip
    """The last page of a sequence of several is read from the page before it."""
    parts = []
    for b, length in enumerate(cache_seqlens.tolist()):
        table = block_table
        if table is not None and length > k_cache.shape[1]:
            last = (length - 1) // k_cache.shape[1]
            table = table.clone()
            table[b, last] = table[b, last - 1]
        k, v = _read(k_cache, b, length, table), _read(v_cache, b, length, table)
        parts.append(_one(q[b], k, v, softmax_scale, causal))
    return _batched(parts, q, v_cache, return_softmax_lse)


def pages_in_order(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
                   return_softmax_lse=False):  # fmt: skip
    """Only the first entry of a page table's row is read: the other pages are taken to follow it in memory."""
    parts = []
    for b, length in enumerate(cache_seqlens.tolist()):
        table = block_table
        if table is not None:
            count = max(-(-length // k_cache.shape[1]), 1)
            first = int(table[b, 0]) if length else 0
            table = (first + torch.arange(count)).remainder(k_cache.shape[0]).expand(q.shape[0], -1)
        k, v = _read(k_cache, b, length, table), _read(v_cache, b, length, table)
        parts.append(_one(q[b], k, v, softmax_scale, causal))
    return _batched(parts, q, v_cache, return_softmax_lse)


def tail_weighted_zero(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None,
                       return_softmax_lse=False):  # fmt: skip
    """Whole pages are loaded and slots past the length only get the weight 0, so that what lies there leaks."""
    parts = []
    size = 32 if block_table is None else k_cache.shape[1]
    for b, length in enumerate(cache_seqlens.tolist()):
        loaded = -(-length // size) * size
        k, v = _read(k_cache, b, loaded, block_table), _read(v_cache, b, loaded, block_table)
        kt, vt = k.transpose(0, 1).float(), v.transpose(0, 1).float()
        group = q.shape[2] // kt.shape[0]
        s = q[b].transpose(0, 1).float() @ kt.repeat_interleave(group, 0).mT
        s = s * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        s = s.masked_fill(torch.arange(k.shape[0]) >= length, -INF)
        parts.append(_finish(s, vt.repeat_interleave(group, 0)))
    return _batched(parts, q, v_cache, return_softmax_lse)


def causal_before_append(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, softmax_scale=None, causal=False,
                         return_softmax_lse=False):  # fmt: skip
    """Causal's origin counts the keys before the new ones are appended."""
    lengths, new = cache_seqlens.tolist(), 0 if k is None else k.shape[1]
    with torch.no_grad():
        _append(k_cache, k, lengths, None)
        _append(v_cache, v, lengths, None)
    parts = []
    for b, length in enumerate(lengths):
        keys, values = k_cache[b, : length + new], v_cache[b, : length + new]
        parts.append(_one(q[b], keys, values, softmax_scale, causal, shift=length - q.shape[1]))
    return _batched(parts, q, v_cache, return_softmax_lse)


def new_keys_unread(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None,
                        causal=False, return_softmax_lse=False):  # fmt: skip
    """New keys are not attended to: the cache is read as it was before the append."""
    lengths = cache_seqlens.tolist()
    with torch.no_grad():
        _append(k_cache, k, lengths, block_table)
        _append(v_cache, v, lengths, block_table)
    parts = []
    for b, length in enumerate(lengths):
        keys, values = _read(k_cache, b, length, block_table), _read(v_cache, b, length, block_table)
        shift = length + (0 if k is None else k.shape[1]) - q.shape[1]
        parts.append(_one(q[b], keys, values, softmax_scale, causal, shift))
    return _batched(parts, q, v_cache, return_softmax_lse)


def cache_unscaled(q, k_cache, v_cache, *, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None,
                   return_lse=False):  # fmt: skip
    """The scale of V of a quantised cache is dropped."""
    if mask is not None and mask != aw.Causal():
        raise NotImplementedError("only causal")
    parts = []
    for b, length in enumerate(kv_lens.tolist()):
        k, v = _read(k_cache, b, length, page_table).float(), _read(v_cache, b, length, page_table).float()
        if k_scale is not None:
            k = k * k_scale.view(-1, 1)
        parts.append(_one(q[b], k, v, scale, mask is not None))
    return _batched(parts, q, v_cache, return_lse)


def lengths_of_first(q, k_cache, v_cache, *, kv_lens, page_table=None, mask=None, scale=None, return_lse=False):
    """Causal's origin in the cache is computed from the first sequence's length."""
    if mask is not None and mask != aw.Causal():
        raise NotImplementedError("only causal")
    lengths = kv_lens.tolist()
    parts = []
    for b, length in enumerate(lengths):
        k, v = _read(k_cache, b, length, page_table), _read(v_cache, b, length, page_table)
        parts.append(_one(q[b], k, v, scale, mask is not None, lengths[0] - q.shape[1]))
    return _batched(parts, q, v_cache, return_lse)


# ---- splits of the keys ----------------------------------------------------------------------------------------------


def _splits(q, k, v, scale, causal, bounds):
    """Partial results (out, lse), (splits, batch, heads_q, rows, ...), over slices of the keys of (batch, rows, heads,
    dim)."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.arange(k.shape[2]) > rows, -INF)
    outs, lses = [], []
    for first, last in bounds:
        part = s[..., first:last]
        top = part.detach().amax(-1, keepdim=True) if last > first else part.new_full((*s.shape[:3], 1), -INF)
        p = torch.exp(part - top.masked_fill(top == -INF, 0))
        total = p.sum(-1, keepdim=True)
        some = total.masked_fill(total == 0, 1)
        outs.append(p @ v[:, :, first:last] / some)
        lses.append((top + some.log()).masked_fill(total == 0, -INF))
    return torch.stack(outs), torch.stack(lses)


def _bounds(n: int, size: int):
    return [(j, min(j + size, n)) for j in range(0, max(n, 1), size)]


def _joint(lses: Tensor):
    top = lses.detach().amax(0)
    top = top.masked_fill(top == -INF, 0)
    total = torch.exp(lses - top).sum(0)
    return (top + total.masked_fill(total == 0, 1).log()).masked_fill(total == 0, -INF)


def splits_averaged(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Splits of 48 keys are merged by their plain mean, over those that hold a visible key."""
    outs, lses = _splits(q, k, v, softmax_scale, causal, _bounds(k.shape[1], 48))
    count = (lses > -INF).sum(0).clamp_min(1)
    out = (outs.sum(0) / count).transpose(1, 2).to(q.dtype)
    return (out, _joint(lses)[..., 0], None) if return_attn_probs else out


def splits_by_size(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Splits of 100 keys are weighted by the number of their keys."""
    bounds = _bounds(k.shape[1], 100)
    outs, lses = _splits(q, k, v, softmax_scale, causal, bounds)
    sizes = torch.tensor([float(last - first) for first, last in bounds]).view(-1, 1, 1, 1, 1) * (lses > -INF)
    out = (outs * sizes).sum(0) / sizes.sum(0).clamp_min(1)
    out = out.transpose(1, 2).to(q.dtype)
    return (out, _joint(lses)[..., 0], None) if return_attn_probs else out


def rest_after_splits_dropped(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Keys are split in four equal parts, and what four does not divide is left out."""
    each = k.shape[1] // 4
    bounds = [(each * n, each * (n + 1)) for n in range(4)]
    outs, lses = _splits(q, k, v, softmax_scale, causal, bounds)
    joint = _joint(lses)
    weights = torch.exp(lses - joint.masked_fill(joint == -INF, 0))
    out = (outs * weights).sum(0).transpose(1, 2).to(q.dtype)
    return (out, joint[..., 0], None) if return_attn_probs else out


def first_split_empty_nan(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Merging splits that hold no visible key for a row gives NaN."""
    outs, lses = _splits(q, k, v, softmax_scale, causal, _bounds(k.shape[1], 128))
    weights = torch.exp(lses - lses.amax(0))
    joint = (lses.amax(0) + weights.sum(0).log())[..., 0]
    out = ((outs * weights).sum(0) / weights.sum(0)).transpose(1, 2).to(q.dtype)
    return (out, joint, None) if return_attn_probs else out


def merged_before_written(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """The merge does not wait for the splits: now and then it takes a row's split of 32 keys before it is written."""
    outs, lses = _splits(q, k, v, softmax_scale, causal, _bounds(k.shape[1], 32))
    chance = random.SystemRandom()
    written = [[chance.random() > 0.05 for _ in range(q.shape[1])] for _ in range(len(outs))]
    lses = lses.masked_fill(~torch.tensor(written, dtype=torch.bool).view(len(outs), 1, 1, -1, 1), -INF)
    joint = _joint(lses)
    out = (outs * torch.exp(lses - joint.masked_fill(joint == -INF, 0))).sum(0).transpose(1, 2).to(q.dtype)
    return (out, joint[..., 0], None) if return_attn_probs else out
