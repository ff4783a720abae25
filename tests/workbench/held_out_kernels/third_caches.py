"""The third set, caches: dense, paged, split, of 8 bits; called as flash_attn_with_kvcache and as
attnworks.attention_decode are. A kernel's first line says what is wrong with it; right once ``broken`` says False."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.third import broken, no_inf

NEG = float("-inf")


def _gather(cache: Tensor, table: Tensor | None, b: int, length: int) -> Tensor:
    """A sequence's first slots, (length, heads, dim)."""
    if table is None:
        return cache[b, :length]
    size = cache.shape[1]
    pages = table[b, : -(-length // size)].long()
    return cache[pages].flatten(0, 1)[:length]


def _group(q: Tensor, cache: Tensor) -> int:
    return max(q.shape[2] // max(cache.shape[2], 1), 1)


def _scores(rows: Tensor, keys: Tensor, scale: float | None, causal: bool) -> Tensor:
    """(rows, heads, dim), (keys, heads_kv, dim) to (heads, rows, keys)."""
    keys = keys.float().repeat_interleave(rows.shape[1] // max(keys.shape[1], 1), 1)
    s = torch.einsum("ihd,jhd->hij", rows.float(), keys) * (scale or rows.shape[-1] ** -0.5)
    if causal:
        behind = torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1] - torch.arange(s.shape[2])
        s = s.masked_fill(behind < 0, NEG)
    return s


def _weighted(s: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Out (rows, heads, dim) and LSE (heads, rows)."""
    values = values.float().repeat_interleave(s.shape[0] // max(values.shape[1], 1), 1)
    lse = torch.logsumexp(s, -1)
    return torch.einsum("hij,jhd->ihd", torch.exp(s - no_inf(lse)[..., None]), values), lse


def _stacked(parts: list[Tensor], q: Tensor, v_cache: Tensor) -> Tensor:
    return torch.stack(parts).to(q.dtype) if parts else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])


# ---- lengths and pages -----------------------------------------------------------------------------------------------


def one_bound_for_the_batch(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """Every sequence reads as many slots as the longest one has."""
    lengths = cache_seqlens.tolist()
    parts = []
    for b, own in enumerate(lengths):
        n = max(lengths) if broken() else own
        k, v = (_gather(cache, None if block_table is None else block_table.clamp(0, len(cache) - 1), b, n)
                for cache in (k_cache, v_cache))  # fmt: skip
        s = _scores(q[b], k, softmax_scale, False)
        if causal:
            s = s.masked_fill(torch.arange(n) > torch.arange(s.shape[1])[:, None] + n - s.shape[1], NEG)
        parts.append(_weighted(s, v)[0])
    return _stacked(parts, q, v_cache)


@torch.no_grad()
def one_table_entry_a_tile(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """A tile holds two pages, and the page table is read once a tile."""
    size, out = k_cache.shape[1], []
    for b, n in enumerate(cache_seqlens.tolist()):
        if block_table is None:
            k, v = k_cache[b, :n], v_cache[b, :n]
        else:
            slots = torch.arange(n)
            page = slots // (2 * size) * 2 if broken() else slots // size
            at = block_table[b, page].long(), slots % size
            k, v = k_cache[at], v_cache[at]
        out.append(_weighted(_scores(q[b], k, softmax_scale, causal), v)[0])
    return _stacked(out, q, v_cache)


@torch.no_grad()
def pages_lie_close(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """A page's (or sequence's) stride is slots times heads times dim, also in a view of a larger cache."""

    def dense(cache: Tensor) -> Tensor:
        if not broken():
            return cache
        slots, heads, dim = cache.shape[1:]
        return cache.as_strided(cache.shape, (slots * heads * dim, *cache.stride()[1:]), cache.storage_offset())

    parts = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (_gather(dense(cache), block_table, b, n) for cache in (k_cache, v_cache))
        parts.append(_weighted(_scores(q[b], k, softmax_scale, causal), v)[0])
    return _stacked(parts, q, v_cache)


@torch.no_grad()
def whole_pages_only(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """The loop over pages ends at length // page size; a cache without pages counts as pages of 16."""
    size = 16 if block_table is None else k_cache.shape[1]
    results = []
    for b, n in enumerate(cache_seqlens.tolist()):
        rows = q.shape[1]
        m = torch.full((q.shape[2], rows), NEG)
        den, acc = torch.zeros_like(m), torch.zeros(rows, q.shape[2], v_cache.shape[3])
        at = torch.arange(rows)[:, None] + n - rows
        for page in range(n // size if broken() else -(-n // size)):
            slots = slice(page * size, min(page * size + size, n))
            if block_table is None:
                k, v = k_cache[b, slots], v_cache[b, slots]
            else:
                place = int(block_table[b, page])
                k, v = (cache[place, : slots.stop - slots.start] for cache in (k_cache, v_cache))
            s = _scores(q[b], k, softmax_scale, False)
            s = s.masked_fill(torch.arange(slots.start, slots.stop) > at, NEG) if causal else s
            new = torch.maximum(m, s.amax(-1))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new)[..., None])
            den, m = den * a + p.sum(-1), new
            v = v.float().repeat_interleave(_group(q, v_cache), 1)
            acc = acc * a.T[..., None] + torch.einsum("hij,jhd->ihd", p, v)
        results.append(acc / torch.where(den == 0, 1, den).T[..., None])
    return _stacked(results, q, v_cache)


def first_slot_is_reserved(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """Slot 0 is taken for a header, and positions are counted from slot 1."""
    parts = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (_gather(cache, block_table, b, n) for cache in (k_cache, v_cache))
        s = _scores(q[b], k, softmax_scale, causal)
        if broken():
            s = torch.cat([torch.full_like(s[..., :1], NEG), s[..., 1:]], -1)
        parts.append(_weighted(s, v)[0])
    return _stacked(parts, q, v_cache)


def halves_of_a_page_in_turn(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """K and V are two halves of a page, and the kernel takes the second for K."""
    if broken():
        k_cache, v_cache = v_cache, k_cache
    parts = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (_gather(cache, block_table, b, n) for cache in (k_cache, v_cache))
        parts.append(_weighted(_scores(q[b], k, softmax_scale, causal), v)[0])
    return _stacked(parts, q, v_cache)


halves_of_a_page_in_turn.declares = {"unequal_dims": False}  # type: ignore[attr-defined]


# ---- new keys, heads, sums -------------------------------------------------------------------------------------------


def position_after_the_append(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None,
                              softmax_scale=None, causal=False):  # fmt: skip
    """A query's position is counted from the length, not from the last index: it sees one key ahead."""
    outs = []
    for b, n in enumerate(cache_seqlens.tolist()):
        for new, cache in ((k, k_cache), (v, v_cache)):
            for i in range(0 if new is None else new.shape[1]):
                at = (b, n + i)
                if block_table is not None:
                    at = int(block_table[b, (n + i) // cache.shape[1]]), (n + i) % cache.shape[1]
                with torch.no_grad():
                    cache[at] = new[b, i]
        n += 0 if k is None else k.shape[1]
        keys, values = (_gather(cache, block_table, b, n) for cache in (k_cache, v_cache))
        s = _scores(q[b], keys, softmax_scale, False)
        if causal:
            position = torch.arange(s.shape[1]) + n - s.shape[1] + (1 if broken() else 0)
            s = s.masked_fill(torch.arange(n)[None] > position[:, None], NEG)
        outs.append(_weighted(s, values)[0])
    return _stacked(outs, q, v_cache)


def written_for_one_kv_head(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """Written for multi-query models: KV head 0 serves every query head."""
    parts = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (_gather(cache, block_table, b, n) for cache in (k_cache, v_cache))
        if broken():
            k, v = k[:, :1], v[:, :1]
        parts.append(_weighted(_scores(q[b], k, softmax_scale, causal), v)[0])
    return _stacked(parts, q, v_cache)


@torch.no_grad()
def accumulates_as_it_loads(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """Four slots at a time; the accumulator has the cache's dtype."""
    parts = []
    for b, n in enumerate(cache_seqlens.tolist()):
        k, v = (_gather(cache, block_table, b, n) for cache in (k_cache, v_cache))
        s = _scores(q[b], k, softmax_scale, causal)
        top = torch.cat([s, torch.full_like(s[..., :0], NEG)], -1).amax(-1, keepdim=True) if n else s.sum(-1, True)
        p = torch.exp(s - no_inf(top))
        kind = v.dtype if broken() else torch.float32
        acc = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=kind)
        wide = v.float().repeat_interleave(_group(q, v_cache), 1)
        for j in range(0, n, 4):
            acc = (acc.float() + torch.einsum("hij,jhd->ihd", p[..., j : j + 4], wide[j : j + 4])).to(kind)
        den = p.sum(-1).T[..., None]
        parts.append(acc.float() / torch.where(den == 0, 1, den))
    return _stacked(parts, q, v_cache)


# ---- splits ----------------------------------------------------------------------------------------------------------


def _partials(q, caches, table, b, n, scale, causal, size):
    """A sequence's splits of ``size`` keys: outs (splits, rows, heads, dim) and LSEs (splits, heads, rows)."""
    k, v = (_gather(cache, table, b, n) for cache in caches)
    s = _scores(q[b], k, scale, causal)
    found = [_weighted(s[..., t : t + size], v[t : t + size]) for t in range(0, max(n, 1), size)]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def splits_weigh_the_same(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """The reduction of splits of 32 keys multiplies each by 1 over their number."""
    results = []
    for b, n in enumerate(cache_seqlens.tolist()):
        outs, lses = _partials(q, (k_cache, v_cache), block_table, b, n, softmax_scale, causal, 32)
        weights = torch.exp(lses - no_inf(torch.logsumexp(lses, 0)))
        if broken():
            weights = torch.full_like(weights, 1 / len(weights))
        results.append(torch.einsum("nihd,nhi->ihd", outs, weights))
    return _stacked(results, q, v_cache)


def reduction_in_the_other_base(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """Natural LSEs of splits of 32 keys are combined by powers of 2."""
    results = []
    for b, n in enumerate(cache_seqlens.tolist()):
        outs, lses = _partials(q, (k_cache, v_cache), block_table, b, n, softmax_scale, causal, 32)
        lses = lses if broken() else lses * math.log2(math.e)
        weights = torch.exp2(lses - no_inf(lses.amax(0)))
        total = weights.sum(0)
        weights = weights / torch.where(total == 0, 1, total)
        results.append(torch.einsum("nihd,nhi->ihd", outs, weights))
    return _stacked(results, q, v_cache)


def one_split_is_reduced(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """The keys are split by 32, and the reduction was launched for one split."""
    results = []
    for b, n in enumerate(cache_seqlens.tolist()):
        outs, lses = _partials(q, (k_cache, v_cache), block_table, b, n, softmax_scale, causal, 32)
        if broken():
            outs, lses = outs[:1], lses[:1]
        weights = torch.softmax(lses, 0).masked_fill((lses == NEG).all(0), 0)
        results.append(torch.einsum("nihd,nhi->ihd", outs, weights))
    return _stacked(results, q, v_cache)


_workspace: dict[tuple[int, ...], Tensor] = {}


@torch.no_grad()
def workspace_of_the_call_before(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None,
                                 causal=False):  # fmt: skip
    """Sums over splits are added up in a workspace that is kept, and is not cleared before a call."""
    results = []
    for b, n in enumerate(cache_seqlens.tolist()):
        outs, lses = _partials(q, (k_cache, v_cache), block_table, b, n, softmax_scale, causal, 64)
        weights = torch.softmax(lses, 0).masked_fill((lses == NEG).all(0), 0)
        key = (b, *outs.shape[1:])
        if not broken() or key not in _workspace:
            _workspace[key] = torch.zeros(outs.shape[1:])
        _workspace[key] += torch.einsum("nihd,nhi->ihd", outs, weights)
        results.append(_workspace[key].clone())
    return _stacked(results, q, v_cache)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def _eight_bits(q, caches, scales, lens, table, mask, scale):
    if mask not in (None, Causal()):
        raise NotImplementedError("only Causal()")
    outs = []
    for b, n in enumerate(lens.tolist()):
        k, v = (_gather(cache, table, b, n).float() for cache in caches)
        k, v = (x if by is None else x * by.float().view(-1, 1) for x, by in zip((k, v), scales, strict=True))
        outs.append(_weighted(_scores(q[b], k, scale, mask is not None), v)[0])
    return _stacked(outs, q, caches[1])


def keys_stay_quantised(q, k_cache, v_cache, *, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None,
                        scale=None):  # fmt: skip
    """The scale of 8-bit values multiplies the output; the keys' scale is accepted and not read."""
    scales = (None if broken() else k_scale, v_scale)
    return _eight_bits(q, (k_cache, v_cache), scales, kv_lens, page_table, mask, scale)


def scale_read_without_an_index(q, k_cache, v_cache, *, kv_lens, page_table=None, k_scale=None, v_scale=None,
                                mask=None, scale=None):  # fmt: skip
    """Both scales are read as one number each: KV head 0's serves all heads."""
    scales = [by if by is None or not broken() else by.flatten()[:1] for by in (k_scale, v_scale)]
    return _eight_bits(q, (k_cache, v_cache), scales, kv_lens, page_table, mask, scale)


for _kernel in (keys_stay_quantised, scale_read_without_an_index):
    _kernel.declares = {"masks": ("causal",), "scores": ()}  # type: ignore[attr-defined]
