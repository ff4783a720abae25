"""The seventh set: caches, called as flash_attn_with_kvcache is, and 8-bit ones, called as attention_decode. Right
inside ``third.repaired()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.seventh import Running, ends, merged, tiles, visible
from workbench.held_out_kernels.third import broken


def slots_at(cache: Tensor, table: Tensor | None, b: int, slots: Tensor) -> Tensor:
    """(slots, heads_kv, dim) of a sequence."""
    size = cache.shape[1]
    return cache[b, slots] if table is None else cache[table[b].long()[slots // size], slots % size]


def append(cache: Tensor, table: Tensor | None, b: int, length: int, new: Tensor) -> None:
    """A sequence's new keys or values, (count, heads_kv, dim), behind its first ``length``."""
    slots, size = torch.arange(length, length + len(new)), cache.shape[1]
    if table is None:
        cache[b, slots] = new
    else:
        cache[table[b].long()[slots // size], slots % size] = new


def per_head(x: Tensor, heads: int) -> Tensor:
    """(slots, heads_kv, dim) as (heads, slots, dim), fp32."""
    return x.float().transpose(0, 1).repeat_interleave(heads // max(x.shape[1], 1), 0)


Answer = tuple[Tensor, Tensor]


def batched(q: Tensor, v_cache: Tensor, lengths: list[int], one: Callable[[int, int], Answer]) -> Answer:
    """``one(sequence, length)`` gives (out, lse), heads first, for each sequence."""
    found = [one(b, length) for b, length in enumerate(lengths)]
    if not found:
        return q.new_zeros(*q.shape[:-1], v_cache.shape[-1]), torch.zeros(0, q.shape[2], q.shape[1])
    out, lse = (torch.stack(part) for part in zip(*found, strict=True))
    return out.transpose(1, 2).to(q.dtype), lse


def shown(rows: Tensor, slots: Tensor, shift: int, causal: bool) -> Tensor:
    return visible(rows, slots, shift, None, 0 if causal else None)


# ---- pages and splits ------------------------------------------------------------------------------------------------


@torch.no_grad()
def page_number_fetched_ahead(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The number of the next page is loaded into its register between the loads of K and of V: a page's keys meet the
    next one's values, in all pages of a sequence but its last. Without a page table it is right."""
    size, M = k_cache.shape[1], q.shape[1]

    def one(b, length):
        x = q[b].float().transpose(0, 1)
        state, count = Running(x, v_cache.shape[-1]), -(-length // size)
        table = [b] * count if block_table is None else block_table[b, :count].tolist()
        for n, page in enumerate(table):
            held = torch.arange(min(size, length - n * size))
            keys = per_head(k_cache[page, held], len(x))
            page = table[min(n + 1, count - 1)] if broken() else page
            values = per_head(v_cache[page, held], len(x))
            s = x @ keys.mT * scale_of(q, softmax_scale)
            state.add(s.where(shown(torch.arange(M), n * size + held, length - M, causal), -INF), values)
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def odd_split_out(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Splits of 32 slots are merged in pairs, level by level, and where their number is odd the last has no partner and
    is lost: with 65 slots the 65th. One, two or four splits are right."""
    M = q.shape[1]

    def one(b, length):
        x, parts = q[b].float().transpose(0, 1), []
        for slots in tiles(length, 32):
            part = Running(x, v_cache.shape[-1])
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            part.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
            parts.append(part.state)
        while len(parts) > 1:
            alone = [] if len(parts) % 2 == 0 or broken() else parts[-1:]
            parts = [merged(parts[n], parts[n + 1]) for n in range(0, len(parts) - 1, 2)] + alone
        empty = Running(x, v_cache.shape[-1])
        lse, out = parts[0] if parts else empty.state
        return out, lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


# ---- rows and heads --------------------------------------------------------------------------------------------------


@torch.no_grad()
def blocks_of_two_heads(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """A block has two of a group's query heads, and there are group // 2 blocks: of a group of 3, 5 or 7 the last head
    is not computed and is 0. Even groups and groups of one are right."""
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])
    group = H // max(G, 1)
    blocks = max(group // 2, 1) if broken() else -(-group // 2)

    def one(b, length):
        out, lse = torch.zeros(H, M, v_cache.shape[-1]), torch.full((H, M), -INF)
        for g in range(G):
            for block in range(blocks):
                heads = torch.arange(g * group + 2 * block, min(g * group + 2 * block + 2, (g + 1) * group))
                x = q[b].float()[:, heads].transpose(0, 1)
                state = Running(x, v_cache.shape[-1])
                for slots in tiles(length, 64):
                    s = x @ slots_at(k_cache, block_table, b, slots)[:, g].float().T * scale_of(q, softmax_scale)
                    s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
                    state.add(s, slots_at(v_cache, block_table, b, slots)[:, g].float())
                out[heads], lse[heads] = state.out, state.lse
        return out, lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def mask_of_another_packing(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """A group's heads are packed one after the other, each with all its queries, and causal takes a packed row's query
    as if heads lay innermost: wrong with several queries and groups."""
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])
    group = H // max(G, 1)
    rows = torch.arange(group * M)
    query = rows // max(group, 1) if broken() else rows % max(M, 1)

    def one(b, length):
        x = q[b].float().unflatten(1, (G, group)).permute(1, 2, 0, 3).flatten(1, 2)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 48):
            s = x @ slots_at(k_cache, block_table, b, slots).float().permute(1, 2, 0) * scale_of(q, softmax_scale)
            s = s.where(shown(query, slots, length - M, causal), -INF)
            state.add(s, slots_at(v_cache, block_table, b, slots).float().transpose(0, 1))
        return state.out.unflatten(1, (group, M)).flatten(0, 1), state.lse.unflatten(1, (group, M)).flatten(0, 1)

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def reshaped_not_transposed(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """The output is made as (batch, heads, rows, dim) and reshaped to (batch, rows, heads, dim) where it must be
    transposed: with one query it is the same, with several rows lie where other heads' belong."""
    M = q.shape[1]

    def one(b, length):
        if k is not None:
            append(k_cache, block_table, b, length, k[b])
            append(v_cache, block_table, b, length, v[b])
            length += k.shape[1]
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 128):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, _ = batched(q, v_cache, cache_seqlens.tolist(), one)
    return out.transpose(1, 2).reshape(out.shape) if broken() else out


# ---- windows, scale, new keys ----------------------------------------------------------------------------------------


@torch.no_grad()
def window_counts_itself(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    """A window's left size is taken for the number of slots that a query sees, its own among them: the furthest is
    hidden. Without a left size it is right."""
    M, (left, right) = q.shape[1], ends(window_size, causal)

    def one(b, length):
        x, place = q[b].float().transpose(0, 1), torch.arange(M)[:, None] + length - M
        first = 0 if left is None else max(length - M - left, 0)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 16)[first // 16 :]:
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            if left is not None:
                s = s.where(place - slots < left + (0 if broken() else 1), -INF)
            if right is not None:
                s = s.where(slots - place <= right, -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    return batched(q, v_cache, cache_seqlens.tolist(), one)[0]


@torch.no_grad()
def single_queries_have_the_default_scale(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """One query for each sequence goes to a kernel of matrix times vector, to which the caller's scale is not passed:
    it has 1/sqrt(head_dim). Several queries are right."""
    M = q.shape[1]

    def vector(b, length):
        x, slots = q[b, 0].float(), torch.arange(length)
        scale = q.shape[-1] ** -0.5 if broken() else scale_of(q, softmax_scale)
        keys, values = (per_head(slots_at(c, block_table, b, slots), len(x)) for c in (k_cache, v_cache))
        state = Running(x[:, None], v_cache.shape[-1])
        state.add(((keys * x[:, None]).sum(-1) * scale)[:, None], values)
        return state.out, state.lse

    def matrix(b, length):
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 64):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), vector if M == 1 else matrix)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def new_values_are_the_new_keys(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """The append's second store was copied from its first: what it writes to V's cache are the new keys. What was in
    the cache before is right."""
    M = q.shape[1]

    def one(b, length):
        if k is not None:
            append(k_cache, block_table, b, length, k[b])
            copied = broken() and k.shape == v.shape
            append(v_cache, block_table, b, length, k[b] if copied else v[b])
            length += k.shape[1]
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        for slots in reversed(tiles(length, 24)):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    return batched(q, v_cache, cache_seqlens.tolist(), one)[0]


# ---- 8-bit caches ----------------------------------------------------------------------------------------------------


def _factor(scale: Tensor | None, heads_kv: int, heads: int) -> Tensor:
    """(heads, 1, 1)."""
    scale = torch.ones(1) if scale is None else scale
    return scale.float().expand(heads_kv).repeat_interleave(heads // max(heads_kv, 1)).view(-1, 1, 1)


@torch.no_grad()
def scale_of_keys_in_the_default(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """K's scale is folded into the softmax scale where that gets its default: where the caller gives a softmax scale
    K's own does not count."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])
    factor = _factor(k_scale, G, H)
    if scale is None:
        whole = factor * q.shape[-1] ** -0.5
    else:
        whole = torch.full_like(factor, scale) if broken() else factor * scale

    def one(b, length):
        x = q[b].float().transpose(0, 1) * whole
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 40):
            s = x @ per_head(slots_at(k_cache, page_table, b, slots), H).mT
            s = s.where(shown(torch.arange(M), slots, length - M, mask is not None), -INF)
            state.add(s, per_head(slots_at(v_cache, page_table, b, slots), H))
        return state.out * _factor(v_scale, G, H), state.lse

    return batched(q, v_cache, kv_lens.tolist(), one)[0]


@torch.no_grad()
def values_scaled_in_the_loop(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):
    """V's scale multiplies the whole accumulator after each tile of 32 slots, and so what earlier tiles gave once more:
    with up to 32 slots it is right."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])
    factor = _factor(v_scale, G, H)

    def one(b, length):
        x = q[b].float().transpose(0, 1) * (_factor(k_scale, G, H) * scale_of(q, scale))
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 32):
            s = x @ per_head(slots_at(k_cache, page_table, b, slots), H).mT
            s = s.where(shown(torch.arange(M), slots, length - M, mask is not None), -INF)
            state.add(s, per_head(slots_at(v_cache, page_table, b, slots), H))
            state.acc = state.acc * factor if broken() else state.acc
        return (state.out if broken() else state.out * factor), state.lse

    return batched(q, v_cache, kv_lens.tolist(), one)[0]
