"""The second set, packed sequences and caches. Each function's first line says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.second import (
    INF,
    Scale,
    as_rows,
    band,
    by_heads,
    finish,
    fold,
    fresh,
    products,
    safe,
    scale_of,
    seen_by_all,
    soft,
    tiles,
)

# ---- packed sequences ------------------------------------------------------------------------------------------------


def _each(q: Tensor, v: Tensor, cu_seqlens_q: Tensor, one: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The packed outputs of ``one(number, q)``, which gives a sequence's rows (rows, heads, dim)."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    found += [one(n, q[first:last]) for n, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist()))]
    return torch.cat(found)


def diagonal_of_the_whole_pack(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                               softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """One block-diagonal mask, whose causal diagonal is that of all packed queries and keys."""
    x, y, z = by_heads(q, k, v)
    mine, theirs = (
        torch.bucketize(torch.arange(len(rows)), ends[1:].long().contiguous(), right=True)
        for rows, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k))
    )
    seen = (mine[:, None] == theirs) & seen_by_all(x, y, causal)
    return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen))[0] @ z, q)


def boundary_to_the_sequence_before(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    softmax_scale: Scale = None) -> Tensor:  # fmt: skip
    """A key's sequence is searched on the wrong side of the offsets: its first key belongs to the one before."""
    x, y, z = by_heads(q, k, v)
    mine = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:].long().contiguous(), right=True)
    theirs = torch.bucketize(torch.arange(len(k)), cu_seqlens_k[1:].long().contiguous())
    return as_rows(soft(products(x, y, scale_of(q, softmax_scale), mine[:, None] == theirs))[0] @ z, q)


def window_open_at_its_right(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                             softmax_scale: Scale = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    """The window's right end is compared with < where it must be <=."""
    ends, (left, right) = cu_seqlens_k.tolist(), window_size

    def one(n: int, rows: Tensor) -> Tensor:
        x, y, z = by_heads(rows, k[ends[n] : ends[n + 1]], v[ends[n] : ends[n + 1]])
        seen = seen_by_all(x, y, causal, (left, -1))
        if not causal and right >= 0:
            at = torch.arange(len(rows))[:, None] + y.shape[1] - len(rows)
            seen = seen & (torch.arange(y.shape[1]) < at + right)
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen))[0] @ z, q)

    return _each(q, v, cu_seqlens_q, one)


def window_around_the_row_number(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                 softmax_scale: Scale = None, causal: bool = False,
                                 window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    """The window lies around the key with the query's own number in its sequence."""
    ends = cu_seqlens_k.tolist()

    def one(n: int, rows: Tensor) -> Tensor:
        x, y, z = by_heads(rows, k[ends[n] : ends[n + 1]], v[ends[n] : ends[n + 1]])
        around = band(torch.arange(len(rows)), torch.arange(y.shape[1]), 0, False, window_size)
        seen, state = around & seen_by_all(x, y, causal), fresh(x, z)
        for at in tiles(y.shape[1], 56):
            state = fold(state, products(x, y[:, at], scale_of(q, softmax_scale), seen[:, at]), z[:, at])
        return as_rows(finish(state)[0], q)

    return _each(q, v, cu_seqlens_q, one)


def whole_tiles_of_rows(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                        softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """A sequence has as many tiles of 16 queries as go into its length; the rows behind them stay 0."""
    ends = cu_seqlens_k.tolist()

    def one(n: int, rows: Tensor) -> Tensor:
        x, y, z = by_heads(rows, k[ends[n] : ends[n + 1]], v[ends[n] : ends[n + 1]])
        seen, done = seen_by_all(x, y, causal), len(rows) // 16 * 16
        found = [soft(products(x[:, at], y, scale_of(q, softmax_scale), seen[at]))[0] @ z for at in tiles(done, 16)]
        found.append(x.new_zeros(x.shape[0], len(rows) - done, z.shape[-1]))
        return as_rows(torch.cat(found, 1), q)

    return _each(q, v, cu_seqlens_q, one)


def v_heads_in_turn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                    softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """K's head is the query head over the group's size, V's is the rest of the query head by the KV heads."""
    ends = cu_seqlens_k.tolist()

    def one(n: int, rows: Tensor) -> Tensor:
        keys, values = k[ends[n] : ends[n + 1]], v[ends[n] : ends[n + 1]]
        x, y, _ = by_heads(rows, keys, values)
        p, _ = soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))
        theirs = torch.arange(q.shape[1]) % max(v.shape[1], 1)
        return torch.einsum("hqk,khd->qhd", p, values[:, theirs].float()).to(q.dtype)

    return _each(q, v, cu_seqlens_q, one)


def offsets_as_if_padded(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                         max_seqlen_q: int = 0, max_seqlen_k: int = 0,
                         softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """A sequence's keys begin at its number times the longest length, as in a padded batch."""
    ends = cu_seqlens_k.tolist()

    def one(n: int, rows: Tensor) -> Tensor:
        length = ends[n + 1] - ends[n]
        first = min(n * max_seqlen_k, len(k) - length)
        x, y, z = by_heads(rows, k[first : first + length], v[first : first + length])
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))[0] @ z, q)

    return _each(q, v, cu_seqlens_q, one)


# ---- caches ----------------------------------------------------------------------------------------------------------


def _place(table: Tensor | None, cache: Tensor, n: int, slot: int) -> tuple[int, int]:
    """Where a sequence's slot lies in its cache."""
    if table is None:
        return n, slot
    return int(table[n, slot // cache.shape[1]]), slot % cache.shape[1]


def _slots(cache: Tensor, n: int, slots: slice, table: Tensor | None) -> Tensor:
    """Some slots of a sequence, (slots, heads, dim)."""
    if table is None:
        return cache[n, slots]
    at = torch.arange(slots.start or 0, slots.stop)
    return cache[table[n, at // cache.shape[1]].long(), at % cache.shape[1]]


def _append(
    caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], lengths: list[int], table: Tensor | None
) -> None:
    with torch.no_grad():
        for cache, rows in zip(caches, new, strict=True):
            for n, length in enumerate(lengths):
                for row in range(rows.shape[1]):
                    cache[_place(table, cache, n, length + row)] = rows[n, row]


def _batch(q: Tensor, v_cache: Tensor, one: Callable[[int, Tensor], Tensor]) -> Tensor:
    found = [one(n, q[n]) for n in range(len(q))]
    return torch.stack(found) if found else q.new_zeros(*q.shape[:-1], v_cache.shape[-1])


def causal_from_the_first_slot(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                               block_table: Tensor | None = None, softmax_scale: Scale = None,
                               causal: bool = False) -> Tensor:  # fmt: skip
    """A causal query sees the slots up to its own number among the queries."""
    assert cache_seqlens is not None

    def one(n: int, rows: Tensor) -> Tensor:
        slots = slice(0, int(cache_seqlens[n]))
        x, y, z = by_heads(rows, *(_slots(cache, n, slots, block_table) for cache in (k_cache, v_cache)))
        seen = band(torch.arange(x.shape[1]), torch.arange(y.shape[1]), 0, causal)
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen))[0] @ z, q)

    return _batch(q, v_cache, one)


def several_queries_like_one(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                             block_table: Tensor | None = None, softmax_scale: Scale = None,
                             causal: bool = False) -> Tensor:  # fmt: skip
    """Decoding is for one query, which sees the whole cache; several queries at once do so too."""
    assert cache_seqlens is not None

    def one(n: int, rows: Tensor) -> Tensor:
        slots = slice(0, int(cache_seqlens[n]))
        x, y, z = by_heads(rows, *(_slots(cache, n, slots, block_table) for cache in (k_cache, v_cache)))
        state = fresh(x, z)
        for at in tiles(y.shape[1], 56):
            state = fold(state, products(x, y[:, at], scale_of(q, softmax_scale)), z[:, at])
        return as_rows(finish(state)[0], q)

    return _batch(q, v_cache, one)


def groups_laid_out_inside_out(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                               block_table: Tensor | None = None, softmax_scale: Scale = None,
                               causal: bool = False) -> Tensor:  # fmt: skip
    """Query heads are split into (group, KV heads) where they are (KV heads, group)."""
    assert cache_seqlens is not None

    def one(n: int, rows: Tensor) -> Tensor:
        slots = slice(0, int(cache_seqlens[n]))
        y, z = (_slots(cache, n, slots, block_table).float() for cache in (k_cache, v_cache))
        group = rows.shape[1] // max(y.shape[1], 1)
        packed = rows.float().view(len(rows), group, y.shape[1], rows.shape[2])
        s = torch.einsum("qghd,khd->ghqk", packed, y) * scale_of(q, softmax_scale)
        seen = band(torch.arange(len(rows)), torch.arange(len(y)), len(y) - len(rows), causal)
        out = torch.einsum("ghqk,khd->qghd", soft(s.masked_fill(~seen, -INF))[0], z)
        return out.flatten(1, 2).to(q.dtype)

    return _batch(q, v_cache, one)


def _tree(parts: list[tuple[Tensor, Tensor]], base: Callable[[Tensor], Tensor]) -> Tensor:
    """Partial (out, lse) merged two by two; ``base`` is what is subtracted for a maximum."""
    while len(parts) > 1:
        pairs = []
        for (a, lse_a), (b, lse_b) in zip(parts[::2], parts[1::2], strict=False):
            top = base(torch.maximum(lse_a, lse_b).detach())
            ours, theirs = torch.exp(lse_a - top), torch.exp(lse_b - top)
            total = ours + theirs
            some = torch.where(total == 0, 1.0, total)
            out = (a * ours[..., None] + b * theirs[..., None]) / some[..., None]
            pairs.append((out, torch.where(total == 0, -INF, top + some.log())))
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0][0]


def two_empty_splits_meet(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                          block_table: Tensor | None = None, softmax_scale: Scale = None,
                          causal: bool = False) -> Tensor:  # fmt: skip
    """Four splits of the capacity are merged in a tree, where two without keys give -inf - -inf."""
    assert cache_seqlens is not None
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    size = max(-(-capacity // 4), 1)

    def one(n: int, rows: Tensor) -> Tensor:
        length = int(cache_seqlens[n])
        x, y, z = by_heads(rows, *(_slots(cache, n, slice(0, length), block_table) for cache in (k_cache, v_cache)))
        s = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal))
        parts = []
        for first in range(0, 4 * size, size):
            p, lse = soft(s[..., first : first + size])
            parts.append((p @ z[:, first : first + size], lse))
        return as_rows(_tree(parts, lambda top: top), q)

    return _batch(q, v_cache, one)


def right_tree_of_splits(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
                         cache_seqlens: Tensor | None = None, block_table: Tensor | None = None,
                         softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """Right: appended keys, pages, four splits of the capacity merged in a tree."""
    assert cache_seqlens is not None
    lengths = cache_seqlens.tolist()
    if k is not None and v is not None:
        _append((k_cache, v_cache), (k, v), lengths, block_table)
        lengths = [length + k.shape[1] for length in lengths]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    size = max(-(-capacity // 4), 1)

    def one(n: int, rows: Tensor) -> Tensor:
        slots = slice(0, lengths[n])
        x, y, z = by_heads(rows, *(_slots(cache, n, slots, block_table) for cache in (k_cache, v_cache)))
        s = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal))
        parts = []
        for first in range(0, 4 * size, size):
            p, lse = soft(s[..., first : first + size])
            parts.append((p @ z[:, first : first + size], lse))
        return as_rows(_tree(parts, safe), q)

    return _batch(q, v_cache, one)


def length_rounded_up_to_eight(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                               softmax_scale: Scale = None, causal: bool = False) -> Tensor:  # fmt: skip
    """The cache is read in vectors of eight slots, and none of the last vector's are masked."""
    assert cache_seqlens is not None

    def one(n: int, rows: Tensor) -> Tensor:
        length = int(cache_seqlens[n])
        read = min(-(-length // 8) * 8, k_cache.shape[1])
        x, y, z = by_heads(rows, k_cache[n, :read], v_cache[n, :read])
        seen = band(torch.arange(len(rows)), torch.arange(read), length - len(rows), causal)
        if causal:
            seen = seen | (torch.arange(read) >= length)
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen))[0] @ z, q)

    return _batch(q, v_cache, one)


def newest_of_the_appended_unread(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                                  v: Tensor | None = None, cache_seqlens: Tensor | None = None,
                                  block_table: Tensor | None = None, softmax_scale: Scale = None,
                                  causal: bool = False) -> Tensor:  # fmt: skip
    """After an append the index of the last key is taken for the number of keys."""
    assert cache_seqlens is not None
    lengths, new = cache_seqlens.tolist(), 0
    if k is not None and v is not None:
        _append((k_cache, v_cache), (k, v), lengths, block_table)
        new = k.shape[1]

    def one(n: int, rows: Tensor) -> Tensor:
        length = lengths[n] + new
        slots = slice(0, max(length - 1, 0) if new else length)
        x, y, z = by_heads(rows, *(_slots(cache, n, slots, block_table) for cache in (k_cache, v_cache)))
        seen = band(torch.arange(len(rows)), torch.arange(y.shape[1]), length - len(rows), causal)
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen))[0] @ z, q)

    return _batch(q, v_cache, one)


def table_rows_without_their_spare(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None,
                                   block_table: Tensor | None = None, softmax_scale: Scale = None,
                                   causal: bool = False) -> Tensor:  # fmt: skip
    """The page table is read as if its rows were as long as the sequence has pages."""
    assert cache_seqlens is not None

    def one(n: int, rows: Tensor) -> Tensor:
        length, table = int(cache_seqlens[n]), block_table
        if table is not None:
            pages = -(-length // k_cache.shape[1])
            table = table.flatten()[n * pages : (n + 1) * pages].clamp(0, len(k_cache) - 1).expand(n + 1, -1)
        x, y, z = by_heads(rows, *(_slots(cache, n, slice(0, length), table) for cache in (k_cache, v_cache)))
        return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))[0] @ z, q)

    return _batch(q, v_cache, one)


def values_stay_quantised(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, kv_lens: Tensor,
                          page_table: Tensor | None = None, k_scale: Tensor | None = None,
                          v_scale: Tensor | None = None, mask: Any = None, scale: Scale = None) -> Tensor:  # fmt: skip
    """The scale of an 8-bit K is folded into the scores, the scale of V is left out."""
    if mask not in (None, Causal()):
        raise NotImplementedError("only Causal()")

    def one(n: int, rows: Tensor) -> Tensor:
        slots = slice(0, int(kv_lens[n]))
        x, y, z = by_heads(rows, *(_slots(cache, n, slots, page_table) for cache in (k_cache, v_cache)))
        if k_scale is not None:
            heads = k_scale.float().expand(k_cache.shape[2])
            y = y * heads.repeat_interleave(len(x) // len(heads))[:, None, None]
        return as_rows(soft(products(x, y, scale_of(q, scale), seen_by_all(x, y, mask is not None)))[0] @ z, q)

    return _batch(q, v_cache, one)


values_stay_quantised.declares = {"masks": ("causal",), "scores": ()}  # type: ignore[attr-defined]
