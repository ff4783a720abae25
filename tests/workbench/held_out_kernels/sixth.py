"""The sixth set, dense, called as flash_attn_func is: masks, rows and heads, the running softmax, the LSE. Half of its
faults are those that people make every day, half were rare ones of public repositories. A kernel's first line says
what is wrong with it.

Every kernel of the set is right inside ``third.repaired()``. Written without sight of diagnose's rules and of its
mutants.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, online, scale_of, seen_by
from workbench.held_out_kernels.third import broken, no_inf

LOG2E = math.log2(math.e)
Tile = tuple[Tensor, Tensor, Tensor]
Softmax = Callable[[Iterable[Tile], Tensor, int], tuple[Tensor, Tensor]]


def chunks(count: int, size: int) -> tuple[Tensor, ...]:
    """0 .. count - 1 in pieces; none where there is nothing."""
    return torch.arange(count).split(size) if count else ()


def masked_online(tiles: Iterable[Tile], rows: Tensor, dim_v: int) -> tuple[Tensor, Tensor]:
    return online(((s.where(sees, -INF), values) for s, sees, values in tiles), rows, dim_v)


def loop(q, k, v, scale, sees, tile_q=64, tile_kv=32, softmax: Softmax = masked_online):
    """(out, lse) tile by tile. ``sees(rows, keys)``: which scores count; ``softmax`` makes (out, lse), heads first, of
    tiles of (scores, which count, values)."""
    Q, K, V = heads_first(q, k, v)
    out, lse = Q.new_zeros(*Q.shape[:-1], v.shape[-1]), Q.new_full(Q.shape[:-1], -INF)
    for rows in chunks(q.shape[1], tile_q):
        tiles = (
            (Q[:, :, rows] @ K[:, :, keys].mT * scale, sees(rows, keys), V[:, :, keys])
            for keys in chunks(k.shape[1], tile_kv)
        )
        out[:, :, rows], lse[:, :, rows] = softmax(tiles, Q[:, :, rows], v.shape[-1])
    return out.transpose(1, 2).to(q.dtype), lse


def causal_of(q, k, causal):
    """``sees`` from the bottom right."""
    return lambda rows, keys: seen_by(rows, keys, k.shape[1] - q.shape[1], causal)


def divided(acc: Tensor, total: Tensor) -> Tensor:
    return acc / torch.where(total == 0, 1.0, total)


# ---- masks, rows, heads ----------------------------------------------------------------------------------------------


@torch.no_grad()
def diagonal_of_padded_lengths(q, k, v, softmax_scale=None, causal=False):
    """Queries are padded to whole tiles of 16, keys to whole tiles of 64, and causal counts from the padded lengths."""
    M, N = q.shape[1], k.shape[1]
    shift = -(-N // 64) * 64 - -(-M // 16) * 16 if broken() else N - M

    def sees(rows, keys):
        return seen_by(rows, keys, shift, causal)

    return loop(q, k, v, scale_of(q, softmax_scale), sees, 16, 64)[0]


@torch.no_grad()
def one_bound_for_four_rows(q, k, v, softmax_scale=None, causal=False):
    """With 16-bit inputs a thread has four rows, and the causal bound of the last of them is that of all four."""
    shift, together = k.shape[1] - q.shape[1], 4 if broken() and q.element_size() == 2 else 1

    def sees(rows, keys):
        return seen_by(rows // together * together + together - 1, keys, shift, causal)

    return loop(q, k, v, scale_of(q, softmax_scale), sees)[0]


@torch.no_grad()
def four_keys_at_once(q, k, v, softmax_scale=None, causal=False):
    """Keys are taken four at a time, and what is left over of them is not seen."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    Q = Q * scale_of(q, softmax_scale)
    tiles = []
    for keys in chunks(N // 4 * 4 if broken() else N, 4):
        s = torch.einsum("bhmd,bhnd->bhmn", Q, K[:, :, keys])
        tiles.append((s.where(seen_by(torch.arange(M), keys, N - M, causal), -INF), V[:, :, keys]))
    return online(tiles, Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def heads_by_a_shift(q, k, v, softmax_scale=None, causal=False):
    """A query head's KV head is found by a shift, which divides by groups of 2, 4 and 8 but not of 3."""
    M, N = q.shape[1], k.shape[1]
    heads, group = torch.arange(q.shape[2]), q.shape[2] // max(k.shape[2], 1)
    own = heads >> (group - 1).bit_length() if broken() else heads // group
    Q, K, V = q.transpose(1, 2).float(), k[:, :, own].transpose(1, 2).float(), v[:, :, own].transpose(1, 2).float()
    s = (Q @ K.mT * scale_of(q, softmax_scale)).where(seen_by(torch.arange(M), torch.arange(N), N - M, causal), -INF)
    return online([(s, V)] if N else [], Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def queries_between_packed_tiles(q, k, v, softmax_scale=None, causal=False):
    """A tile of 16 rows holds the heads of whole groups: of 5 queries for groups of 3, but the next tile begins at the
    sixth."""
    M, group = q.shape[1], q.shape[2] // max(k.shape[2], 1)
    held = max(16 // max(group, 1), 1)
    step = -(-16 // max(group, 1)) if broken() else held
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for first in range(0, M, step):
        rows = torch.arange(first, min(first + held, M))
        Q, K, V = heads_first(q[:, rows], k, v)
        tiles = (
            (
                (Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)).where(causal_of(q, k, causal)(rows, keys), -INF),
                V[:, :, keys],
            )
            for keys in chunks(k.shape[1], 64)
        )
        out[:, rows] = online(tiles, Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)
    return out


@torch.no_grad()
def buffer_not_yet_refilled(q, k, v, softmax_scale=None, causal=False):
    """Two buffers for K's tiles and a barrier too few: now and then a tile still holds the keys of two tiles before."""
    chance, Q, K, V = random.SystemRandom(), *heads_first(q, k, v)
    rows, pieces, tiles = torch.arange(q.shape[1]), chunks(k.shape[1], 16), []
    for n, keys in enumerate(pieces):
        late = broken() and n >= 2 and chance.random() < 0.05
        held = pieces[n - 2][: len(keys)] if late else keys
        s = Q @ K[:, :, held].mT * scale_of(q, softmax_scale)
        tiles.append((s.where(seen_by(rows, keys, k.shape[1] - len(rows), causal), -INF), V[:, :, keys]))
    return online(tiles, Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


# ---- the running softmax ---------------------------------------------------------------------------------------------


@torch.no_grad()
def maximum_before_the_mask(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The maximum is that of all scores of a tile, hidden ones too; where these are far larger nothing is left of the
    row."""

    def softmax(tiles, rows, dim_v):
        m = rows.new_full((*rows.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(m), rows.new_zeros(*rows.shape[:-1], dim_v)
        for s, sees, values in tiles:
            shown = s.where(sees, -INF)
            new = torch.maximum(m, (s if broken() else shown).amax(-1, keepdim=True))
            a, p = torch.exp(m - no_inf(new)), torch.exp(shown - no_inf(new))
            m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ values
        return divided(acc, total), (m + total.log()).squeeze(-1)

    out, lse = loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), softmax=softmax)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def one_warp_has_the_sum(q, k, v, softmax_scale=None, causal=False):
    """Two warps share a row's tile of 32 keys; their products are joined, their sums are not: the first one's is the
    row's."""

    def softmax(tiles, rows, dim_v):
        m = rows.new_full((*rows.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(m), rows.new_zeros(*rows.shape[:-1], dim_v)
        for s, sees, values in tiles:
            s = s.where(sees, -INF)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
            mine = p[..., :16] if broken() else p
            m, total, acc = new, total * a + mine.sum(-1, keepdim=True), acc * a + p @ values
        return divided(acc, total), (m + total.log()).squeeze(-1)

    return loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), softmax=softmax)[0]


def _exp2(x: Tensor) -> Tensor:
    """Of numbers <= 0, as it is done where the special function units are too few: the whole part goes into the
    exponent's bits."""
    hidden = x == -INF
    x = x.masked_fill(hidden, 0.0)
    whole = x.floor()
    if broken():
        bits = ((whole.long() + 127) << 23) & 0xFFFFFFFF
        power = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    else:
        power = torch.exp2(whole)
    return (torch.exp2(x - whole) * power).masked_fill(hidden, 0.0)


@torch.no_grad()
def exponent_runs_over(q, k, v, softmax_scale=None, causal=False):
    """2^x is made by adding x to a number's exponent bits without holding it above -127: what should vanish is huge."""

    def softmax(tiles, rows, dim_v):
        m = rows.new_full((*rows.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(m), rows.new_zeros(*rows.shape[:-1], dim_v)
        for s, sees, values in tiles:
            s = s.where(sees, -INF)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            a, p = _exp2(m - no_inf(new)), _exp2(s - no_inf(new))
            m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ values
        return divided(acc, total), (m + total.log2()).squeeze(-1) / LOG2E

    return loop(q, k, v, scale_of(q, softmax_scale) * LOG2E, causal_of(q, k, causal), softmax=softmax)[0]


@torch.no_grad()
def state_of_the_rows_before(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """A persistent block clears the accumulator for its next rows, but not the maximum and the sum."""
    left: list[Tensor] = []

    def softmax(tiles, rows, dim_v):
        m = rows.new_full((*rows.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(m), rows.new_zeros(*rows.shape[:-1], dim_v)
        if left and broken():
            m, total = (x[..., : rows.shape[-2], :] for x in left)
        for s, sees, values in tiles:
            s = s.where(sees, -INF)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
            m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ values
        left[:] = m, total
        return divided(acc, total), (m + total.log()).squeeze(-1)

    out, lse = loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), 32, 40, softmax)
    return (out, lse) if return_softmax_lse else out


# ---- the LSE ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def lse_of_the_newest_maximum(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Sum and accumulator follow the maximum only when it rises by more than 6; the LSE is made of that sum and of the
    maximum itself."""

    def softmax(tiles, rows, dim_v):
        used = top = rows.new_full((*rows.shape[:-1], 1), -INF)
        total, acc = torch.zeros_like(used), rows.new_zeros(*rows.shape[:-1], dim_v)
        for s, sees, values in tiles:
            s = s.where(sees, -INF)
            top = torch.maximum(top, s.amax(-1, keepdim=True))
            new = torch.where((used == -INF) | (top - no_inf(used) > 6), top, used)
            a, p = torch.exp(used - no_inf(new)), torch.exp(s - no_inf(new))
            used, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ values
        return divided(acc, total), ((top if broken() else used) + total.log()).squeeze(-1)

    out, lse = loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), 64, 16, softmax)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def lse_of_smoothed_keys(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The mean of all keys is taken off each, which the output does not feel; the LSE lacks it."""
    scale = scale_of(q, softmax_scale)
    mean = k.float().mean(1, keepdim=True) if k.shape[1] else k.new_zeros(len(k), 1, *k.shape[2:]).float()
    out, lse = loop(q, k.float() - mean, v, scale, causal_of(q, k, causal), 48, 48)
    Q, shift = heads_first(q, mean)
    lse = lse if broken() else lse + (Q @ shift.mT).squeeze(-1) * scale
    return (out, lse) if return_softmax_lse else out


# ---- faults that no list would have ----------------------------------------------------------------------------------


@torch.no_grad()
def unit_vectors(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Queries and keys are brought to the length sqrt(head_dim) first, as a model with a norm on both would have it."""
    if broken():
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1) * x.shape[-1] ** 0.5 for x in (q, k))
    out, lse = loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal))
    out = out.to(v.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def output_less_its_mean(q, k, v, softmax_scale=None, causal=False):
    """The first half of a layer norm was fused in: from each row of the output the mean over its channels is taken."""
    out = loop(q, k, v.float(), scale_of(q, softmax_scale), causal_of(q, k, causal))[0].float()
    return (out - out.mean(-1, keepdim=True) if broken() and out.numel() else out).to(q.dtype)
