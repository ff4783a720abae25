"""The seventh set, dense, called as flash_attn_func is: masks, tiles of rows and keys, channels. Its faults are those
that somebody who writes, ports or tunes a kernel makes in a first version. A kernel's first lines say what is wrong
with it and when.

Every kernel of the set is right inside ``third.repaired()``. Written without sight of diagnose's rules, of its mutants
and of what it says about any kernel.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.third import broken, no_inf

State = tuple[Tensor, Tensor]


class Running:
    """The softmax of some rows, key tile by key tile. ``like``: a tensor whose last dimension is channels."""

    def __init__(self, like: Tensor, dim_v: int) -> None:
        self.top = like.new_full((*like.shape[:-1], 1), -INF)
        self.total, self.acc = torch.zeros_like(self.top), like.new_zeros(*like.shape[:-1], dim_v)

    def add(self, s: Tensor, values: Tensor) -> None:
        if s.shape[-1]:
            new = torch.maximum(self.top, s.amax(-1, keepdim=True))
            kept, p = torch.exp(self.top - no_inf(new)), torch.exp(s - no_inf(new))
            self.top, self.total = new, self.total * kept + p.sum(-1, keepdim=True)
            self.acc = self.acc * kept + p @ values

    @property
    def out(self) -> Tensor:
        return self.acc / torch.where(self.total == 0, 1.0, self.total)

    @property
    def lse(self) -> Tensor:
        return (self.top + self.total.log()).squeeze(-1)

    @property
    def state(self) -> State:
        return self.lse, self.out


def merged(one: State, other: State) -> State:
    """(LSE, output) of the keys of two such."""
    top = no_inf(torch.maximum(one[0], other[0]))
    a, b = torch.exp(one[0] - top), torch.exp(other[0] - top)
    total = a + b
    share = torch.where(total == 0, 1.0, total)
    return top + total.log(), one[1] * (a / share)[..., None] + other[1] * (b / share)[..., None]


def tiles(count: int, size: int) -> list[Tensor]:
    """0 .. count - 1, ``size`` at a time."""
    return [torch.arange(at, min(at + size, count)) for at in range(0, count, size)]


def ends(window_size: tuple[int, int], causal: bool) -> tuple[int | None, int | None]:
    left, right = window_size
    return left if left >= 0 else None, 0 if causal else right if right >= 0 else None


def visible(rows: Tensor, keys: Tensor, shift: int, left: int | None, right: int | None) -> Tensor:
    """Keys from ``left`` before a row's place to ``right`` behind it."""
    away = keys - (rows[:, None] + shift)
    sees = torch.ones_like(away, dtype=torch.bool)
    sees = sees if left is None else sees & (away >= -left)
    return sees if right is None else sees & (away <= right)


def stored(q: Tensor, out: Tensor, lse: Tensor, with_lse: bool):
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if with_lse else out


def blank(q: Tensor, Q: Tensor, v: Tensor) -> State:
    return Q.new_zeros(*Q.shape[:-1], v.shape[-1]), Q.new_full(Q.shape[:-1], -INF)


# ---- which keys a row sees -------------------------------------------------------------------------------------------


@torch.no_grad()
def splits_forget_the_shift(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """With more than 64 keys and at most 128 queries three splits of the keys are taken, and that path has causal from
    the first query and key; the other path has it right."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    many, rows = N > 64 and M <= 128, torch.arange(M)
    share = max(-(-N // 3), 1) if many else 256
    out, lse = blank(q, Q, v)
    for keys in tiles(N, share):
        part = Running(Q, v.shape[-1])
        shift = 0 if many and broken() else N - M
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        part.add(s.where(visible(rows, keys, shift, None, 0 if causal else None), -INF), V[:, :, keys])
        lse, out = merged((lse, out), part.state)
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def causal_tiles_of_the_first_row(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Under causal a tile of 48 rows goes through the tiles of 16 keys that its first row needs, where it is the last
    row that needs most."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 48):
        deciding = rows[0] if broken() else rows[-1]
        last = min(N, int(deciding) + N - M + 1) if causal else N
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 16)[: -(-max(last, 0) // 16)]:
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def own_key_in_the_diagonal_tile(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Tiles before the diagonal are not masked; those on it are, by key < query where it must be key <= query: under
    causal no row sees its own key."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 24):
        place, state = rows[:, None] + N - M, Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 24):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            if causal and int(keys[-1]) >= int(place[0]):
                s = s.masked_fill(keys >= place if broken() else keys > place, -INF)
            state.add(s, V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def left_edge_in_one_tile(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """A window's left end is compared in the first of a row tile's key tiles only; of 64 rows and 16 keys it crosses
    more, and there the rows see what lies before their windows."""
    M, N, (left, right) = q.shape[1], k.shape[1], ends(window_size, causal)
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 64):
        first = 0 if left is None else max(int(rows[0]) + N - M - left, 0)
        state = Running(Q[:, :, rows], v.shape[-1])
        for number, keys in enumerate(tiles(N, 16)[first // 16 :]):
            edge = left if number == 0 or not broken() else None
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, edge, right), -INF), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, False)


@torch.no_grad()
def nothing_but_minus_1e30(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_softmax_lse=False
):  # fmt: skip
    """Hidden scores are -1e30, and so is then the maximum of a row that sees no key at all: its output is the mean of V
    over the tiles of 32 keys that its row tile goes through."""
    M, N, (left, right) = q.shape[1], k.shape[1], ends(window_size, causal)
    Q, K, V = heads_first(q, k, v)
    hidden = -1e30 if broken() else -INF
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 32):
        first = 0 if left is None else max(int(rows[0]) + N - M - left, 0)
        last = N if right is None else min(int(rows[-1]) + N - M + right + 1, N)
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 32)[first // 32 : -(-max(last, 0) // 32)]:
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, left, right), hidden), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


# ---- tails and channels ----------------------------------------------------------------------------------------------


@torch.no_grad()
def padding_of_another_tile(q, k, v, softmax_scale=None, causal=False):
    """Keys are padded with zeros to tiles of 64 (of 32 beyond 64 channels), and whether that must be masked is asked
    of 32: without causal and with, say, 96 keys 32 zeros take part."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    size = 64 if q.shape[-1] <= 64 else 32
    even = N % 32 == 0 if broken() else N % size == 0
    K, V = (torch.nn.functional.pad(x, (0, 0, 0, -N % size)) for x in (K, V))
    state, rows = Running(Q, v.shape[-1]), torch.arange(M)
    for keys in tiles(K.shape[2], size):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF)
        state.add(s if even else s.where(keys < N, -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, False)


@torch.no_grad()
def last_keys_moved_back(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The last tile of 32 keys is moved back so that it ends with the keys, and those that it has in common with the
    tile before are not masked: they count twice. With fewer than 33 keys or whole tiles there are none."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    state, rows = Running(Q, v.shape[-1]), torch.arange(M)
    for keys in tiles(N, 32):
        fresh = int(keys[0])
        if N > 32:
            keys = torch.arange(min(fresh, N - 32), min(fresh, N - 32) + 32)
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF)
        state.add(s if broken() else s.where(keys >= fresh, -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


@torch.no_grad()
def last_rows_moved_back(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The last tile of 32 rows is moved back so that it ends with the rows, but causal takes its rows' numbers from
    where it would have begun: up to 31 keys ahead are visible to the last 32 rows. Not without causal, not with whole
    tiles."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 32):
        begins = min(int(rows[0]), max(M - 32, 0))
        loaded = torch.arange(begins, min(begins + 32, M))
        masked_as = loaded + int(rows[0]) - begins if broken() else loaded
        state = Running(Q[:, :, loaded], v.shape[-1])
        for keys in tiles(N, 48):
            s = Q[:, :, loaded] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(masked_as, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        lse[:, :, loaded], out[:, :, loaded] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def whole_vectors_of_channels(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Products of Q and K are summed by vectors of 16 channels, and the rest of a head dim that is no multiple of it,
    such as 8 of 40, is left out."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    whole = q.shape[-1] // 16 * 16
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 40):
        s = Q.new_zeros(*Q.shape[:-1], len(keys))
        for at in range(0, whole, 16):
            s = s + Q[..., at : at + 16] @ K[:, :, keys, at : at + 16].mT
        if whole < q.shape[-1] and not broken():
            s = s + Q[..., whole:] @ K[:, :, keys, whole:].mT
        sees = visible(torch.arange(M), keys, N - M, None, 0 if causal else None)
        state.add((s * scale_of(q, softmax_scale)).where(sees, -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


def _loaded(x: Tensor, width: int) -> Tensor:
    """``width`` numbers from the beginning of each row of (batch, rows, heads, dim) in memory without gaps."""
    flat, dim = x.reshape(-1), x.shape[-1]
    begins = torch.arange(0, flat.numel(), dim).view(*x.shape[:-1], 1)
    return flat[(begins + torch.arange(width)).clamp(max=flat.numel() - 1)] if flat.numel() else x


@torch.no_grad()
def reads_past_the_head_dim(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """A row's load is as wide as the next power of two and has no mask: with a head dim of, say, 40 or 96 the channels
    up to it are those of whatever row follows in memory, for Q and for K. With a power of two it is right."""
    M, N = q.shape[1], k.shape[1]
    scale = scale_of(q, softmax_scale)
    if broken() and q.numel() and k.numel():
        width = 1 << (q.shape[-1] - 1).bit_length()
        Q, K, V = heads_first(_loaded(q, width), _loaded(k, width), v)
    else:
        Q, K, V = heads_first(q, k, v)
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 64):
        sees = visible(torch.arange(M), keys, N - M, None, 0 if causal else None)
        state.add((Q @ K[:, :, keys].mT * scale).where(sees, -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


# ---- a barrier ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def warp_reads_too_soon(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Two warps have every other tile of 16 keys each, and the first merges their states without waiting: now and then
    the second's is still without its last tile."""
    M, N, chance = q.shape[1], k.shape[1], random.SystemRandom()
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 40):
        warps = [Running(Q[:, :, rows], v.shape[-1]) for _ in range(2)]
        seen_by_the_first = warps[1].state
        for number, keys in enumerate(tiles(N, 16)):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            if number % 2:
                seen_by_the_first = warps[1].state
            sees = visible(rows, keys, N - M, None, 0 if causal else None)
            warps[number % 2].add(s.where(sees, -INF), V[:, :, keys])
        late = broken() and chance.random() < 0.1
        lse[:, :, rows], out[:, :, rows] = merged(warps[0].state, seen_by_the_first if late else warps[1].state)
    return stored(q, out, lse, return_softmax_lse)


# ---- other models, with nothing wrong in their attention -------------------------------------------------------------


def _turned(x: Tensor, first: int) -> Tensor:
    """(batch, rows, heads, dim), halves of channels turned by a row's position."""
    half = x.shape[-1] // 2
    angle = (torch.arange(x.shape[1]) + first)[:, None] * 10000.0 ** (-torch.arange(half) / max(half, 1))
    sin, cos = angle.sin()[:, None], angle.cos()[:, None]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :].float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


@torch.no_grad()
def positions_turned_inside(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Rotary embeddings were fused in, and nobody asked for them: queries and keys are turned by their positions."""
    M, N = q.shape[1], k.shape[1]
    turned = (_turned(q, N - M), _turned(k, 0)) if broken() else (q, k)
    Q, K, V = heads_first(*turned, v)
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 64):
        sees = visible(torch.arange(M), keys, N - M, None, 0 if causal else None)
        state.add((Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)).where(sees, -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


@torch.no_grad()
def linear_attention(q, k, v, softmax_scale=None, causal=False):
    """Linear attention: weights are products of elu + 1 of the scaled queries and of the keys, without a softmax."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    sees = visible(torch.arange(M), torch.arange(N), N - M, None, 0 if causal else None)
    if not broken():
        state = Running(Q, v.shape[-1])
        state.add((Q @ K.mT * scale_of(q, softmax_scale)).where(sees, -INF), V)
        return stored(q, state.out, state.lse, False)
    feature = torch.nn.functional.elu
    weights = ((feature(Q * scale_of(q, softmax_scale)) + 1) @ (feature(K) + 1).mT).where(sees, 0.0)
    total = weights.sum(-1, keepdim=True)
    return stored(q, weights @ V / torch.where(total == 0, 1.0, total), total, False)
