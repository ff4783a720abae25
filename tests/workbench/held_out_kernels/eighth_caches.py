"""The eighth set: caches, called as flash_attn_with_kvcache is, and 8-bit ones, called as attention_decode. Right
inside ``third.repaired()``."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.fifth import INF, scale_of
from workbench.held_out_kernels.seventh import Running, ends, tiles, visible
from workbench.held_out_kernels.seventh_caches import append, batched, per_head, shown, slots_at
from workbench.held_out_kernels.third import broken


def _places(cache: Tensor, table: Tensor | None, b: int, slots: Tensor) -> Tensor:
    """Numbers of a sequence's slots in all of the cache's memory; what would lie outside is held to its end."""
    pages, size = cache.shape[:2]
    if table is None:
        return (b * size + slots).clamp(max=pages * size - 1)
    page = table[b].long()[(slots // size).clamp(max=table.shape[1] - 1)]
    return (page * size + slots % size).clamp(0, pages * size - 1)


# ---- lengths and pages -----------------------------------------------------------------------------------------------


@torch.no_grad()
def last_page_without_a_mask(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """Without causal no tile is masked, and the loop goes through whole pages: the slots of the last one that are past
    the sequence's end count. Whole pages, causal, and caches without pages are right."""
    M, size = q.shape[1], k_cache.shape[1]

    def one(b, length):
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        whole = block_table is not None and not causal and broken()
        for slots in tiles(-(-length // size) * size if whole else length, size if whole else 64):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def new_keys_counted_twice(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """The wrapper adds the number of new keys to the lengths, and the kernel does so again: as many slots past the end
    count as there are new keys. Calls without new keys are right."""
    M = q.shape[1]

    def one(b, length):
        if k is not None:
            append(k_cache, block_table, b, length, k[b])
            append(v_cache, block_table, b, length, v[b])
            length += k.shape[1] * (2 if broken() else 1)
        held = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        x, length = q[b].float().transpose(0, 1), min(length, held)
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 32):
            at = _places(k_cache, block_table, b, slots)
            s = x @ per_head(k_cache.flatten(0, 1)[at], len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(v_cache.flatten(0, 1)[at], len(x)))
        return state.out, state.lse

    return batched(q, v_cache, cache_seqlens.tolist(), one)[0]


@torch.no_grad()
def length_modulo_the_page(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The last page holds length % page_size slots, which is 0 for one that is full: it is not read. Other lengths are
    right."""
    M, size = q.shape[1], k_cache.shape[1]

    def one(b, length):
        x = q[b].float().transpose(0, 1)
        state, pages = Running(x, v_cache.shape[-1]), -(-length // size)
        for n in range(pages):
            held = length % size if n == pages - 1 else size
            if not held and not (broken() and block_table is not None):
                held = size
            slots = torch.arange(n * size, n * size + held)
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


# ---- heads -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def values_at_the_query_head(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The address of V is made with the query head's number, where K's has its KV head's: in a group, what is loaded
    are other heads, also of the slots that follow. With as many KV heads as heads it is right."""
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])
    keys_flat, values_flat = (c.reshape(-1, c.shape[-1]) for c in (k_cache, v_cache))

    def one(b, length):
        out, lse = torch.zeros(H, M, v_cache.shape[-1]), torch.full((H, M), -INF)
        for h in range(H):
            x, own = q[b, :, h].float(), h * G // H
            state = Running(x, v_cache.shape[-1])
            for slots in tiles(length, 64):
                at = _places(k_cache, block_table, b, slots) * G
                s = x @ keys_flat[at + own].float().T * scale_of(q, softmax_scale)
                s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
                state.add(s, values_flat[(at + (h if broken() else own)).clamp(max=len(values_flat) - 1)].float())
            out[h], lse[h] = state.out, state.lse
        return out, lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


# ---- which slots a new query sees ------------------------------------------------------------------------------------


@torch.no_grad()
def distance_among_new_queries(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, alibi_slopes=None,
    return_softmax_lse=False,
):  # fmt: skip
    """ALiBi's distance is that of a slot from the query's number in the call, which begins at 0, not from its place
    behind what is in the cache."""
    M, H = q.shape[1:3]

    def one(b, length):
        x, row = q[b].float().transpose(0, 1), torch.arange(M)[:, None]
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 64):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            if alibi_slopes is not None:
                slope = alibi_slopes.float().expand(len(q), H)[b][:, None, None]
                s = s - slope * ((row if broken() else row + length - M) - slots).abs()
            s = s.where(shown(torch.arange(M), slots, length - M, causal), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def no_window_over_the_context(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    return_softmax_lse=False,
):  # fmt: skip
    """There are two loops, over what was in the cache before these queries and over their own keys; the window's left
    end is compared in the second only."""
    M, (left, right) = q.shape[1], ends(window_size, causal)

    def one(b, length):
        x, rows, context = q[b].float().transpose(0, 1), torch.arange(M), max(length - M, 0)
        state = Running(x, v_cache.shape[-1])
        for begins, count in ((0, context), (context, length - context)):
            for slots in tiles(count, 32):
                slots = begins + slots
                edge = None if begins == 0 and context and broken() else left
                s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
                s = s.where(visible(rows, slots, length - M, edge, right), -INF)
                state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def decode_is_always_causal(
    q, k_cache, v_cache, cache_seqlens, block_table=None, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The flag is not passed to the decode kernel, which is causal always: several queries without causal do not see
    all keys. One query is right."""
    M = q.shape[1]

    def one(b, length):
        x = q[b].float().transpose(0, 1)
        state = Running(x, v_cache.shape[-1])
        for slots in reversed(tiles(length, 64)):
            s = x @ per_head(slots_at(k_cache, block_table, b, slots), len(x)).mT * scale_of(q, softmax_scale)
            s = s.where(shown(torch.arange(M), slots, length - M, causal or broken()), -INF)
            state.add(s, per_head(slots_at(v_cache, block_table, b, slots), len(x)))
        return state.out, state.lse

    out, lse = batched(q, v_cache, cache_seqlens.tolist(), one)
    return (out, lse) if return_softmax_lse else out


# ---- 8-bit caches ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def scales_loaded_once(
    q, k_cache, v_cache, kv_lens, page_table=None, k_scale=None, v_scale=None, mask=None, scale=None
):  # fmt: skip
    """The scales of K and V are loaded as if there were one of each: the first head's is that of all."""
    if mask not in (None, Causal()):
        raise NotImplementedError("no mask but causal")
    M, (H, G) = q.shape[1], (q.shape[2], k_cache.shape[2])

    def factor(given: Tensor | None) -> Tensor:
        given = torch.ones(1) if given is None else given.float().flatten()
        return (given[:1] if broken() else given).expand(G).repeat_interleave(H // max(G, 1)).view(-1, 1, 1)

    def one(b, length):
        x = q[b].float().transpose(0, 1) * (scale_of(q, scale) * factor(k_scale))
        state = Running(x, v_cache.shape[-1])
        for slots in tiles(length, 48):
            s = x @ per_head(slots_at(k_cache, page_table, b, slots), H).mT
            s = s.where(shown(torch.arange(M), slots, length - M, mask is not None), -INF)
            state.add(s, per_head(slots_at(v_cache, page_table, b, slots), H))
        return state.out * factor(v_scale), state.lse

    return batched(q, v_cache, kv_lens.tolist(), one)[0]
