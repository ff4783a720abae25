"""The sixth set: caches, pages, splits over them, and 8-bit caches. Right inside ``third.repaired()``."""

from __future__ import annotations

import torch

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, online, scale_of, seen_by
from workbench.held_out_kernels.third import broken, no_inf


def _place(cache, table, batch, slots):
    """Where a sequence's slots lie: (first index, second index)."""
    if table is None:
        return torch.full_like(slots, batch), slots
    size = cache.shape[1]
    return table[batch].long()[slots // size], slots % size


def _read(cache, table, batch, first, last):
    return cache[_place(cache, table, batch, torch.arange(first, last))]


def _scores(x, keys, scale, sees):
    """x (heads, rows, dim) and keys (count, heads_kv, dim): (heads, rows, count)."""
    y = keys.float().repeat_interleave(x.shape[0] // keys.shape[1], 1).permute(1, 2, 0)
    return (x @ y * scale).where(sees, -INF)


def _values(x, values):
    return values.float().repeat_interleave(x.shape[0] // values.shape[1], 1).transpose(0, 1)


def _lengths(cache_seqlens, k):
    return [length + (0 if k is None else k.shape[1]) for length in cache_seqlens.tolist()]


def _stored(q, outs, v_cache):
    out = torch.stack(outs).transpose(1, 2) if outs else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])
    return out.to(q.dtype)


# ---- appending -------------------------------------------------------------------------------------------------------


def _appended(q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, write):
    """``write(cache, batch, length, new)`` appends (count, heads_kv, dim)."""
    if k is not None:
        for b, length in enumerate(cache_seqlens.tolist()):
            write(k_cache, b, length, k)
            write(v_cache, b, length, v)
    outs = []
    for b, length in enumerate(_lengths(cache_seqlens, k)):
        x, sees = q[b].float().transpose(0, 1), seen_by(
            torch.arange(q.shape[1]), torch.arange(length), length - q.shape[1], causal
        )  # fmt: skip
        keys, values = (_read(cache, block_table, b, 0, length) for cache in (k_cache, v_cache))
        tiles = [(_scores(x, keys, scale_of(q, softmax_scale), sees), _values(x, values))] if length else []
        outs.append(online(tiles, x, v_cache.shape[-1])[0])
    return _stored(q, outs, v_cache)


@torch.no_grad()
def append_wraps_in_its_page(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """New keys are written to the page of the first of them, modulo its size, also where they should go on in the
    next."""

    def write(cache, b, length, new):
        page, slot = _place(cache, block_table, b, torch.arange(length, length + new.shape[1]))
        cache[page[:1].expand_as(page) if broken() else page, slot] = new[b]

    return _appended(q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, write)


@torch.no_grad()
def new_keys_of_the_first(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """The append has no stride for the batch where it reads: each sequence gets the first one's new keys and values."""

    def write(cache, b, length, new):
        cache[_place(cache, block_table, b, torch.arange(length, length + new.shape[1]))] = new[0 if broken() else b]

    return _appended(q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, write)


# ---- windows, pages --------------------------------------------------------------------------------------------------


@torch.no_grad()
def window_slice_of_the_longest(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    """For a window the cache is cut to its last slots, in whole tiles of 16, before the kernel; for the whole batch at
    once, by its longest sequence, so that shorter ones lose keys that their windows show."""
    (left, right), M, outs = window_size, q.shape[1], []
    right = 0 if causal else right
    lengths = cache_seqlens.tolist()
    cut = max(max(lengths, default=0) - -(-(left + M) // 16) * 16, 0) if left >= 0 and broken() else 0
    for b, length in enumerate(lengths):
        x, first = q[b].float().transpose(0, 1), min(cut, length)
        away = torch.arange(first, length) - torch.arange(M)[:, None] - (length - M)
        sees = (away >= -left) | (left < 0)
        sees &= (away <= right) | (right < 0)
        keys, values = (_read(cache, block_table, b, first, length) for cache in (k_cache, v_cache))
        tiles = [(_scores(x, keys, scale_of(q, softmax_scale), sees), _values(x, values))] if len(keys) else []
        outs.append(online(tiles, x, v_cache.shape[-1])[0])
    return _stored(q, outs, v_cache)


@torch.no_grad()
def small_pages_padded_to_tiles(q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False):
    """A tile has 32 keys; where pages hold fewer the rest of the tile is zeros, and their scores of 0 count."""
    M, outs = q.shape[1], []
    step = 32 if block_table is None else k_cache.shape[1]
    for b, length in enumerate(cache_seqlens.tolist()):
        x, tiles = q[b].float().transpose(0, 1), []
        for first in range(0, length, step):
            keys = torch.arange(first, min(first + step, length))
            y, z = (_read(cache, block_table, b, first, first + len(keys)) for cache in (k_cache, v_cache))
            s = _scores(x, y, scale_of(q, softmax_scale), seen_by(torch.arange(M), keys, length - M, causal))
            z = _values(x, z)
            if block_table is not None and broken():
                s, z = torch.nn.functional.pad(s, (0, max(32 - step, 0))), torch.nn.functional.pad(
                    z, (0, 0, 0, max(32 - step, 0))
                )  # fmt: skip
            tiles.append((s, z))
        outs.append(online(tiles, x, v_cache.shape[-1])[0])
    return _stored(q, outs, v_cache)


@torch.no_grad()
def table_of_sixteens(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """An entry of the page table stands for 16 slots, as where the kernel was written, whatever the cache's pages
    hold."""
    outs, lses, (size, G) = [], [], k_cache.shape[1:3]
    for b, length in enumerate(cache_seqlens.tolist()):
        x, slots = q[b].float().transpose(0, 1), torch.arange(length)
        held = 16 if broken() else size
        page = torch.full_like(slots, b) if block_table is None else block_table[b].long()[
            (slots // held).clamp(max=block_table.shape[1] - 1)
        ]  # fmt: skip
        at = (page * size + (slots if block_table is None else slots % held)).clamp(max=k_cache.shape[0] * size - 1)
        keys, values = (cache.reshape(-1, G, cache.shape[-1])[at] for cache in (k_cache, v_cache))
        sees = seen_by(torch.arange(q.shape[1]), slots, length - q.shape[1], causal)
        tiles = [(_scores(x, keys, scale_of(q, softmax_scale), sees), _values(x, values))] if length else []
        out, lse = online(tiles, x, v_cache.shape[-1])
        outs.append(out)
        lses.append(lse)
    out = _stored(q, outs, v_cache)
    return (out, torch.stack(lses)) if return_softmax_lse and lses else out


# ---- splits ----------------------------------------------------------------------------------------------------------


def _split(q, k_cache, v_cache, lengths, table, scale, causal, keep, empty):
    """Four splits of the longest sequence's share, merged by their LSE. ``keep``: the dtype that their outputs are kept
    in; ``empty``: the LSE of one without slots."""
    M, outs, lses = q.shape[1], [], []
    share = max(-(-max(lengths, default=0) // 4), 1)
    for b, length in enumerate(lengths):
        x, parts = q[b].float().transpose(0, 1), []
        for first in range(0, 4 * share, share):
            last = min(first + share, length)
            if first >= last:
                parts.append((x.new_zeros(*x.shape[:-1], v_cache.shape[-1]), x.new_full(x.shape[:-1], empty)))
                continue
            keys, values = (_read(cache, table, b, first, last) for cache in (k_cache, v_cache))
            sees = seen_by(torch.arange(M), torch.arange(first, last), length - M, causal)
            out, lse = online([(_scores(x, keys, scale, sees), _values(x, values))], x, v_cache.shape[-1])
            parts.append((out.to(keep).float(), lse))
        out, lse = (torch.stack(part) for part in zip(*parts, strict=True))
        whole = torch.logsumexp(lse, 0)
        outs.append((out * torch.exp(lse - no_inf(whole))[..., None]).sum(0))
        lses.append(whole)
    return _stored(q, outs, v_cache), torch.stack(lses) if lses else q.new_zeros(0, q.shape[2], M).float()


@torch.no_grad()
def partial_outputs_in_half(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The splits' outputs are kept in fp16 until they are merged."""
    keep = torch.float16 if broken() else torch.float32
    out, lse = _split(
        *(q, k_cache, v_cache, cache_seqlens.tolist(), block_table, scale_of(q, softmax_scale), causal), keep, -INF
    )
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def splits_without_keys_weigh(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Splits past a shorter sequence's end leave their LSE at the 0 that the workspace was filled with, and are merged
    as outputs of 0 with that weight."""
    empty = 0.0 if broken() else -INF
    out, lse = _split(
        *(q, k_cache, v_cache, cache_seqlens.tolist(), block_table, scale_of(q, softmax_scale), causal),
        torch.float32,
        empty,
    )
    return (out, lse) if return_softmax_lse else out


# ---- 8-bit caches, as attention_decode -------------------------------------------------------------------------------


def _eight_bits(q, k_cache, v_cache, kv_lens, page_table, k_scale, v_scale, mask, scale, dequantise):
    """``dequantise(slots, scale)``: fp32, ``slots`` (count, heads_kv, dim) and ``scale`` for each head or one, or
    None."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    outs = []
    for b, length in enumerate(kv_lens.tolist()):
        x = q[b].float().transpose(0, 1)
        sees = seen_by(torch.arange(q.shape[1]), torch.arange(length), length - q.shape[1], mask is not None)
        keys = dequantise(_read(k_cache, page_table, b, 0, length), k_scale)
        values = dequantise(_read(v_cache, page_table, b, 0, length), v_scale)
        tiles = [(_scores(x, keys, scale_of(q, scale), sees), _values(x, values))] if length else []
        outs.append(online(tiles, x, v_cache.shape[-1])[0])
    return _stored(q, outs, v_cache)


@torch.no_grad()
def divided_by_the_scale(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """The scales are taken for those that quantised: what is stored is divided by them."""

    def dequantise(slots, given):
        if given is None:
            return slots.float()
        return slots.float() / given.view(-1, 1) if broken() else slots.float() * given.view(-1, 1)

    return _eight_bits(q, k_cache, v_cache, kv_lens, page_table, k_scale, v_scale, mask, scale, dequantise)


@torch.no_grad()
def fn_taken_for_fnuz(q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None):
    """Bytes of e4m3fn are read as another vendor's e4m3fnuz, whose exponents are one less."""

    def dequantise(slots, given):
        if slots.dtype == torch.float8_e4m3fn and broken():
            slots = slots.contiguous().view(torch.float8_e4m3fnuz)
        return slots.float() if given is None else slots.float() * given.view(-1, 1)

    return _eight_bits(q, k_cache, v_cache, kv_lens, page_table, k_scale, v_scale, mask, scale, dequantise)
