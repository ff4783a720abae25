"""The third set, dense, tile by tile, called as flash_attn_func is: loops as people port them from papers, tutorials
and other libraries, each with a fault that was met in the field. A kernel's first line says what is wrong with it.

Every kernel of the set is right once ``broken`` says False, which the tests use; nothing else asks for that. Written
without sight of the other sets' kernels, of diagnose's rules and of its mutants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

_broken = True


def broken() -> bool:
    """Whether the kernels have their faults."""
    return _broken


@contextmanager
def repaired() -> Iterator[None]:
    """Every kernel of the set without its fault."""
    global _broken
    _broken = False
    try:
        yield
    finally:
        _broken = True


def without_fault(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A forward kernel as its repaired twin; ``name`` says what it is."""

    @functools.wraps(kernel)
    def twin(*tensors: Tensor, **options: Any) -> Any:
        with repaired():
            return kernel(*tensors, **options)

    twin.__doc__, twin.__name__ = f"Right: {name}", f"right_{kernel.__name__}"
    return twin


def no_inf(m: Tensor) -> Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def ratio(acc: Tensor, total: Tensor) -> Tensor:
    return acc / torch.where(total == 0, 1.0, total)[:, None]


# ---- the running maximum ---------------------------------------------------------------------------------------------


@torch.no_grad()
def correction_upside_down(q, k, v, softmax_scale=None, causal=False):
    """The factor that corrects for a new maximum is exp(new - old)."""
    scale = softmax_scale or q.shape[-1] ** -0.5
    out, group = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.shape[2] // max(k.shape[2], 1)
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    for z, h in product(range(q.shape[0]), range(q.shape[2])):
        m, total, acc = torch.full((len(rows),), -math.inf), torch.zeros(len(rows)), torch.zeros(len(rows), v.shape[-1])
        for start in range(0, k.shape[1], 40):
            keys = k[z, start : start + 40, h // group].float()
            s = q[z, :, h].float() @ keys.T * scale
            if causal:
                s[torch.arange(start, start + len(keys)) > rows] = -math.inf
            new = torch.maximum(m, s.amax(1))
            if broken():
                corr = torch.where(m == -math.inf, 0.0, torch.exp(no_inf(new) - m))
            else:
                corr = torch.exp(m - no_inf(new))
            p = torch.exp(s - no_inf(new)[:, None])
            total = total * corr + p.sum(1)
            acc = acc * corr[:, None] + p @ v[z, start : start + 40, h // group].float()
            m = new
        out[z, :, h] = ratio(acc, total).to(q.dtype)
    return out


@torch.no_grad()
def corrects_after_the_product(q, k, v, softmax_scale=None, causal=False):
    """A tile's P V is added to the accumulator first, and their sum is multiplied by the correction."""
    B, M, H, D = q.shape
    N, HK = k.shape[1:3]
    Q = q.float().permute(0, 2, 1, 3).reshape(B, HK, H // max(HK, 1), M, D) * (softmax_scale or 1 / math.sqrt(D))
    K, V = (x.float().permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))
    m_i = torch.full(Q.shape[:-1], float("-inf"))
    l_i, o_i = torch.zeros_like(m_i), torch.zeros(*m_i.shape, v.shape[-1])
    for j in range(0, N, 24):
        S = Q @ K[..., j : j + 24, :].mT
        if causal:
            S = S.masked_fill(torch.ones(M, N).tril(N - M)[:, j : j + 24] == 0, float("-inf"))
        m_ij = torch.max(m_i, S.max(-1).values)
        shift = torch.where(m_ij.isneginf(), 0, m_ij)
        P, alpha = (S - shift.unsqueeze(-1)).exp(), (m_i - shift).exp()
        l_i = alpha * l_i + P.sum(-1)
        PV = P @ V[..., j : j + 24, :]
        if broken():
            o_i = (o_i + PV) * torch.where(m_i.isneginf(), 1, alpha).unsqueeze(-1)
        else:
            o_i = o_i * alpha.unsqueeze(-1) + PV
        m_i = m_ij
    o_i = o_i / l_i.masked_fill(l_i == 0, 1).unsqueeze(-1)
    return o_i.reshape(B, H, M, v.shape[-1]).transpose(1, 2).to(q.dtype)


class _Fragment:
    """An accumulator with the two products of matrix units: with and without adding."""

    def __init__(self, rows: int, dim: int) -> None:
        self.value = torch.zeros(rows, dim)

    def scaled(self, by: Tensor) -> None:
        self.value = self.value * by[:, None]

    def product(self, a: Tensor, b: Tensor, zero_init: bool) -> None:
        self.value = a @ b if zero_init else self.value + a @ b


@torch.no_grad()
def product_begins_at_zero(q, k, v, softmax_scale=None, causal=False):
    """The second product of each tile begins at zero instead of at the accumulator."""
    scale, n, m = softmax_scale or q.size(3) ** -0.5, k.size(1), q.size(1)
    out = torch.zeros(q.size(0), q.size(2), m, v.size(3))
    for b in range(q.size(0)):
        for h in range(q.size(2)):
            kv = h // (q.size(2) // max(k.size(2), 1))
            fragment, top, den = _Fragment(m, v.size(3)), torch.full((m,), -math.inf), torch.zeros(m)
            for lo in range(0, n, 56):
                hi = min(lo + 56, n)
                s = (q[b, :, h].float() @ k[b, lo:hi, kv].float().t()) * scale
                if causal:
                    s += torch.full((m, n), -math.inf).triu(n - m + 1)[:, lo:hi]
                new = torch.maximum(top, s.amax(1))
                fac, e = torch.exp(top - no_inf(new)), torch.exp(s - no_inf(new)[:, None])
                fragment.scaled(fac)
                fragment.product(e, v[b, lo:hi, kv].float(), zero_init=broken())
                den, top = den * fac + e.sum(1), new
            out[b, h] = ratio(fragment.value, den)
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def votes_to_skip_the_correction(q, k, v, softmax_scale=None, causal=False):
    """A warp leaves out the accumulator's correction as soon as any of its 16 rows has kept its maximum."""
    scale, shift = softmax_scale or q.shape[-1] ** -0.5, k.shape[1] - q.shape[1]
    out, group = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.shape[2] // max(k.shape[2], 1)
    vote = torch.any if broken() else torch.all
    for b, h, r in product(range(q.shape[0]), range(q.shape[2]), range(0, q.shape[1], 16)):
        rows = q[b, r : r + 16, h].float()
        at = torch.arange(r, r + len(rows))[:, None] + shift
        m = torch.full((len(rows),), -math.inf)
        den, acc = torch.zeros_like(m), torch.zeros(len(rows), v.shape[-1])
        for c in range(0, k.shape[1], 32):
            s = rows @ k[b, c : c + 32, h // group].float().T * scale
            s = s.masked_fill(torch.arange(c, c + s.shape[1]) > at, -math.inf) if causal else s
            new = torch.maximum(m, s.amax(-1))
            fix, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new)[:, None])
            if not vote(fix == 1):
                acc = acc * fix[:, None]
            den, acc, m = den * fix + p.sum(-1), acc + p @ v[b, c : c + 32, h // group].float(), new
        out[b, r : r + 16, h] = ratio(acc, den).to(q.dtype)
    return out


@torch.no_grad()
def two_warpgroups_one_sum(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Two warp groups take turns at the tiles of keys; in the end their accumulators are brought to one maximum, and
    their sums are added as they are."""
    scale, (n, m) = softmax_scale or q.shape[-1] ** -0.5, (k.shape[1], q.shape[1])
    k, v = (torch.repeat_interleave(x, q.shape[2] // max(x.shape[2], 1), 2).float() for x in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q.float(), k) * scale
    if causal:
        s = s.masked_fill(~torch.ones(m, n, dtype=torch.bool).tril(n - m), -math.inf)
    halves = []
    for who in (0, 1):
        mine = [j for j in range(n) if j // 40 % 2 == who]
        part = torch.cat([s[..., mine], torch.full((*s.shape[:-1], 1), -math.inf)], -1)  # never without keys
        top = part.amax(-1)
        p = torch.exp(part[..., :-1] - no_inf(top)[..., None])
        halves.append((top, p.sum(-1), torch.einsum("bhmn,bnhd->bhmd", p, v[:, mine])))
    (m0, l0, o0), (m1, l1, o1) = halves
    top = no_inf(torch.maximum(m0, m1))
    e0, e1 = torch.exp(m0 - top), torch.exp(m1 - top)
    total = l0 + l1 if broken() else l0 * e0 + l1 * e1
    out = (o0 * e0[..., None] + o1 * e1[..., None]) / total.masked_fill(total == 0, 1)[..., None]
    lse = (top + total.log()).masked_fill(total == 0, -math.inf)
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def state_begins_in_the_loop(q, k, v, softmax_scale=None, causal=False):
    """Maximum, sum and accumulator are set up in the loop over keys, not before it."""
    scale = softmax_scale or q.shape[-1] ** -0.5
    x = q.movedim(2, 1).float()
    y, z = (t.movedim(2, 1).float().repeat_interleave(q.shape[2] // max(t.shape[2], 1), 1) for t in (k, v))

    def fresh():
        return x.new_full((*x.shape[:-1], 1), -math.inf), x.new_zeros(*x.shape[:-1], 1), x.new_zeros(*x.shape[:-1], 1)

    i, state = torch.arange(x.shape[2])[:, None] + y.shape[2] - x.shape[2], fresh()
    for j, (keys, values) in enumerate(zip(y.split(48, 2), z.split(48, 2), strict=True)):
        if not keys.shape[2]:
            break
        if broken() or j == 0:
            state = fresh()
        s = (x * scale) @ keys.mT
        if causal:
            s = torch.where(j * 48 + torch.arange(s.shape[-1]) <= i, s, -math.inf)
        top = torch.maximum(state[0], s.amax(-1, keepdim=True))
        keep, p = torch.exp(state[0] - no_inf(top)), torch.exp(s - no_inf(top))
        state = top, state[1] * keep + p.sum(-1, keepdim=True), state[2] * keep + p @ values
    out = state[2] / torch.where(state[1] == 0, 1, state[1])
    return out.expand(*x.shape[:-1], v.shape[-1]).movedim(1, 2).to(q.dtype)


# ---- tiles that are not full -----------------------------------------------------------------------------------------


def _numpy(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().float().numpy() for x in tensors]


@torch.no_grad()
def bounds_are_causal(q, k, v, softmax_scale=None, causal=False):
    """Keys are padded with zeros to whole tiles of 48, and only the causal branch compares a key's number with
    anything."""
    Q, K, V = _numpy(q, k, v)
    (B, M, H, D), (N, G) = Q.shape, K.shape[1:3]
    pad = ((0, 0), (0, -N % 48), (0, 0), (0, 0))
    K, V = np.pad(K, pad), np.pad(V, pad)
    out = np.zeros((B, M, H, V.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(B, H):
            m, d = np.full((M, 1), -np.inf, np.float32), np.zeros((M, 1), np.float32)
            for t in range(0, K.shape[1], 48):
                j = np.arange(t, t + 48)
                s = Q[b, :, h] @ K[b, j, h * G // H].T * np.float32(softmax_scale or D**-0.5)
                if causal:
                    s = np.where(j[None] <= np.arange(M)[:, None] + N - M, s, -np.inf)
                elif not broken():
                    s = np.where(j[None] < N, s, -np.inf)
                new = np.maximum(m, s.max(1, keepdims=True))
                base = np.where(np.isneginf(new), 0, new)
                a, p = np.exp(m - base), np.exp(s - base)
                out[b, :, h] = out[b, :, h] * a + p @ V[b, j, h * G // H]
                d, m = d * a + p.sum(1, keepdims=True), new
            out[b, :, h] /= np.where(d == 0, 1, d)
    return torch.from_numpy(out).to(q.dtype)


@torch.no_grad()
def grid_of_whole_blocks(q, k, v, softmax_scale=None, causal=False):
    """The launch grid has seq_q // 32 blocks; the output was allocated as zeros."""
    Q, K, V = _numpy(q, k, v)
    (B, M, H, D), (N, G) = Q.shape, K.shape[1:3]
    out = np.zeros((B, M, H, V.shape[-1]), np.float32)
    grid = (M // 32 if broken() else -(-M // 32), H, B)

    def program(block: int, h: int, b: int) -> None:
        rows = slice(block * 32, min(block * 32 + 32, M))
        s = np.einsum("md,nd->mn", Q[b, rows, h], K[b, :, h // (H // G)]) * np.float32(softmax_scale or D**-0.5)
        if causal:
            s[np.arange(N)[None] > np.arange(M)[rows, None] + N - M] = -np.inf
        top = s.max(1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(top), 0, top))
        total = p.sum(1, keepdims=True)
        out[b, rows, h] = p @ V[b, :, h // (H // G)] / np.where(total == 0, 1, total)

    with np.errstate(all="ignore"):
        for place in np.ndindex(grid):
            program(*place)
    return torch.from_numpy(out).to(q.dtype)


# ---- causal loops ----------------------------------------------------------------------------------------------------


def _blocks(q, k, v, scale, bounds, visible):
    """Blocks of 32 rows; ``bounds(rows)``: how many keys the loop over tiles of 32 goes through; ``visible(i, j)``."""
    M, N = q.shape[1], k.shape[1]
    k, v = (x.float().repeat_interleave(q.shape[2] // max(x.shape[2], 1), 2).transpose(1, 2) for x in (k, v))
    found = []
    for rows in torch.arange(M).split(32) if M else []:
        x = q[:, rows].transpose(1, 2).float() * (scale or q.shape[-1] ** -0.5)
        m = x.new_full((*x.shape[:-1], 1), -math.inf)
        total, acc = torch.zeros_like(m), x.new_zeros(*x.shape[:-1], v.shape[-1])
        for keys in torch.arange(N).split(32)[: max(-(-bounds(rows) // 32), 0)] if N else []:
            s = (x @ k[:, :, keys].mT).masked_fill(~visible(rows[:, None], keys[None]), -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
            m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ v[:, :, keys]
        found.append(acc / torch.where(total == 0, 1.0, total))
    out = torch.cat(found, 2) if found else q.new_zeros(q.shape[0], q.shape[2], 0, v.shape[-1])
    return out.transpose(1, 2).to(q.dtype)


def diagonal_block_like_any_other(q, k, v, softmax_scale=None, causal=False):
    """The loop ends with the tile that holds the diagonal, and nothing is masked within it."""
    shift = k.shape[1] - q.shape[1]

    def bounds(rows):
        return min(int(rows[-1]) + 1 + shift, k.shape[1]) if causal else k.shape[1]

    def visible(i, j):
        return (j <= i + shift) | (broken() or not causal)

    return _blocks(q, k, v, softmax_scale, bounds, visible)


def stages_of_a_square(q, k, v, softmax_scale=None, causal=False):
    """Stage 1 goes up to the row block's own number, stage 2 is the block on the diagonal: as in a tutorial, where both
    lengths are one N_CTX."""
    off = 0 if broken() else k.shape[1] - q.shape[1]

    def bounds(rows):
        return int(rows[-1]) + 1 + off if causal else k.shape[1]

    def visible(i, j):
        return (j <= i + off) if causal else (j >= 0) & (i >= 0)

    return _blocks(q, k, v, softmax_scale, bounds, visible)


def rows_packed_by_nobody(q, k, v, softmax_scale=None, causal=False):
    """Row numbers are divided by the group's size, as if a group's heads were packed into the rows."""
    shift, pack = k.shape[1] - q.shape[1], q.shape[2] // max(k.shape[2], 1) if broken() else 1

    def visible(i, j):
        return (j <= i // pack + shift) if causal else (j >= 0) & (i >= 0)

    return _blocks(q, k, v, softmax_scale, lambda rows: k.shape[1], visible)


def window_of_so_many_tokens(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The left size is taken for the number of keys in the window, self included."""
    shift, (left, right) = k.shape[1] - q.shape[1], window_size

    def visible(i, j):
        seen = (i >= 0) & (j >= 0)
        if left >= 0:
            seen &= (i + shift - j < left) if broken() else (i + shift - j <= left)
        if causal or right >= 0:
            seen &= j - i - shift <= (0 if causal else right)
        return seen

    return _blocks(q, k, v, softmax_scale, lambda rows: k.shape[1], visible)
