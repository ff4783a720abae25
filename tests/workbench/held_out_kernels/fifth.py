"""The fifth set, dense, in tiles and splits, called as flash_attn_func is: what ports and tunings of such loops got
wrong in the field. A kernel's first line says what is wrong with it.

Every kernel of the set is right inside ``third.repaired()``. Written without sight of the other sets' kernels (but
``third``'s, for the form), of diagnose's rules and of its mutants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

import numpy as np
import torch
from torch import Tensor

from workbench.held_out_kernels.third import broken, no_inf, ratio

INF = math.inf


def scale_of(q: Tensor, given: float | None) -> float:
    return q.shape[-1] ** -0.5 if given is None else given


def heads_first(q: Tensor, *kv: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads_q, rows, dim) in fp32, K and V once for each query head."""
    group = q.shape[2] // max(kv[0].shape[2], 1)
    return q.transpose(1, 2).float(), *(x.transpose(1, 2).float().repeat_interleave(group, 1) for x in kv)


def seen_by(rows: Tensor, keys: Tensor, shift: int, causal: bool) -> Tensor:
    return (keys <= rows[:, None] + shift) if causal else torch.ones(len(rows), len(keys), dtype=torch.bool)


def online(tiles: Iterable[tuple[Tensor, Tensor]], rows: Tensor, dim_v: int) -> tuple[Tensor, Tensor]:
    """(out, lse) from tiles of (scores, values); ``rows``: a tensor whose last dimension is the queries' channels."""
    m = rows.new_full((*rows.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(m), rows.new_zeros(*rows.shape[:-1], dim_v)
    for s, values in tiles:
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        alpha, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
        m, total, acc = new, total * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ values
    return acc / torch.where(total == 0, 1.0, total), (m + total.log()).squeeze(-1)


# ---- channels and rows -----------------------------------------------------------------------------------------------


@torch.no_grad()
def first_64_channels(q, k, v, softmax_scale=None, causal=False):
    """The block of channels is a constant 64: what Q and K hold beyond it does not count."""
    block = 64 if broken() else q.shape[-1]
    Q, K, V = heads_first(q, k, v)
    rows, shift = torch.arange(q.shape[1]), k.shape[1] - q.shape[1]

    def tiles():
        for keys in torch.arange(k.shape[1]).split(48) if k.shape[1] else []:
            s = Q[..., :block] @ K[:, :, keys, :block].mT * scale_of(q, softmax_scale)
            yield s.masked_fill(~seen_by(rows, keys, shift, causal), -INF), V[:, :, keys]

    return online(tiles(), Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def values_as_wide_as_keys(q, k, v, softmax_scale=None, causal=False):
    """V's tiles have the width of K's: what V has beyond it is never loaded, and the output stays 0 there."""
    (B, M, H, D), (N, G), E = q.shape, k.shape[1:3], v.shape[-1]
    Q, K, V = (x.detach().float().numpy() for x in (q, k, v))
    out = np.zeros((B, M, H, E), np.float32)
    lanes = min(D, E) if broken() else E
    with np.errstate(all="ignore"):
        for b, h, lo in product(range(B), range(H), range(0, M, 24)):
            i = np.arange(lo, min(lo + 24, M))
            s = Q[b, i, h] @ K[b, :, h * G // H].T * np.float32(scale_of(q, softmax_scale))
            if causal:
                s = np.where(np.arange(N) <= i[:, None] + N - M, s, -np.inf)
            top = s.max(1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(np.isneginf(top), 0, top))
            total = p.sum(1, keepdims=True)
            out[b, i, h, :lanes] = p @ V[b, :, h * G // H, :lanes] / np.where(total == 0, 1, total)
    return torch.from_numpy(out).to(q.dtype)


@torch.no_grad()
def packed_row_is_the_query(q, k, v, softmax_scale=None, causal=False):
    """A group's heads are packed into the rows of one tile, and causal compares keys with a row's number there."""
    (B, M, H, D), (N, G) = q.shape, k.shape[1:3]
    group, scale = H // max(G, 1), scale_of(q, softmax_scale)
    out = torch.zeros(B, G, M * group, v.shape[-1])
    packed = q.float().view(B, M, G, group, D).permute(0, 2, 1, 3, 4).reshape(B, G, M * group, D)
    for r in torch.arange(M * group).split(40) if M else []:
        at = (r if broken() else r // max(group, 1)) + N - M
        s = packed[:, :, r] @ k.float().permute(0, 2, 3, 1) * scale
        s = s.masked_fill(torch.arange(N) > at[:, None], -INF) if causal else s
        top = no_inf(s.amax(-1, keepdim=True)) if N else 0.0
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        out[:, :, r] = p @ v.float().transpose(1, 2) / torch.where(total == 0, 1.0, total)
    return out.unflatten(2, (M, group)).permute(0, 2, 1, 3, 4).flatten(2, 3).to(q.dtype)


@torch.no_grad()
def returns_before_it_writes(q, k, v, softmax_scale=None, causal=False):
    """A tile of rows with no tile of keys to go through returns at once, and its rows hold what the memory held."""
    (B, M, H, _), N = q.shape, k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out = torch.full((B, H, M, v.shape[-1]), math.nan)
    for rows in torch.arange(M).split(16) if M else []:
        last = min(N, int(rows[-1]) + 1 + N - M) if causal else N
        if last <= 0:
            if not broken():
                out[:, :, rows] = 0.0
            continue
        tiles = (
            ((Q[:, :, rows] @ K[:, :, j].mT * scale_of(q, softmax_scale)).where(seen_by(rows, j, N - M, causal), -INF),
             V[:, :, j])
            for j in torch.arange(last).split(32)
        )  # fmt: skip
        out[:, :, rows] = online(tiles, Q[:, :, rows], v.shape[-1])[0]
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def program_number_taken_apart_twice(q, k, v, softmax_scale=None, causal=False):
    """A program's number is batch · heads + head where it reads and head · batches + batch where it writes."""
    (B, M, H, D), (N, G), E = q.shape, k.shape[1:3], v.shape[-1]
    out = torch.zeros(B, M, H, E)
    for program in range(B * H):
        b, h = divmod(program, H)
        s = q[b, :, h].float() @ k[b, :, h // (H // G)].float().T * (softmax_scale if softmax_scale else D**-0.5)
        if causal:
            s = s + torch.full((M, N), -INF).triu(N - M + 1)
        p = torch.exp(s - no_inf(s.amax(1, keepdim=True))) if N else s
        row = ratio(p @ v[b, :, h // (H // G)].float(), p.sum(1))
        if broken():
            out[program % B, :, program // B] = row
        else:
            out[b, :, h] = row
    return out.to(q.dtype)


# ---- the running maximum and its factor ------------------------------------------------------------------------------


def _per_head(q, k, v, causal, step, one):
    """Calls ``one(rows, keys, values, hidden)`` for each head, with tiles of ``step`` keys as a list."""
    B, M, H, _ = q.shape
    N, out = k.shape[1], q.new_zeros(*q.shape[:-1], v.shape[-1])
    hidden = ~seen_by(torch.arange(M), torch.arange(N), N - M, causal)
    for b, h in product(range(B), range(H)):
        g = h // (H // k.shape[2])
        spans = [slice(j, min(j + step, N)) for j in range(0, N, step)]
        keys, values = [k[b, span, g].float() for span in spans], [v[b, span, g].float() for span in spans]
        out[b, :, h] = one(q[b, :, h].float(), keys, values, [hidden[:, span] for span in spans]).to(q.dtype)
    return out


@torch.no_grad()
def correction_by_exp(q, k, v, softmax_scale=None, causal=False):
    """Scores carry log2 e for exp2, as which the probabilities are computed, but the old sums' factor is exp."""
    slope = scale_of(q, softmax_scale) * math.log2(math.e)
    factor = torch.exp if broken() else torch.exp2

    def one(rows, keys, values, hidden):
        m, total, acc = rows.new_full((len(rows),), -INF), rows.new_zeros(len(rows)), 0.0
        for x, y, no in zip(keys, values, hidden, strict=True):
            s = (rows @ x.T * slope).masked_fill(no, -INF)
            new = torch.maximum(m, s.amax(1))
            a, p = factor(m - no_inf(new)), torch.exp2(s - no_inf(new)[:, None])
            m, total, acc = new, total * a + p.sum(1), acc * a[:, None] + p @ y
        return ratio(acc, total) if keys else rows.new_zeros(len(rows), v.shape[-1])

    return _per_head(q, k, v, causal, 32, one)


@torch.no_grad()
def correction_without_the_scale(q, k, v, softmax_scale=None, causal=False):
    """The scale is multiplied in inside the exponential, and the factor for a new maximum was left without it."""
    scale = scale_of(q, softmax_scale)

    def one(rows, keys, values, hidden):
        best, mass, acc = torch.full((len(rows), 1), -INF), torch.zeros(len(rows), 1), torch.zeros(1, v.shape[-1])
        for x, y, no in zip(keys, values, hidden, strict=True):
            s = (rows @ x.T).masked_fill(no, -INF)
            seen = torch.maximum(best, s.amax(1, keepdim=True))
            old = torch.exp((best - no_inf(seen)) * (1.0 if broken() else scale))
            p = torch.exp((s - no_inf(seen)) * scale)
            best, mass, acc = seen, mass * old + p.sum(1, keepdim=True), acc * old + p @ y
        return acc / mass.masked_fill(mass == 0, 1.0)

    return _per_head(q, k, v, causal, 24, one)


@torch.no_grad()
def maximum_in_half(q, k, v, softmax_scale=None, causal=False):
    """Between tiles the running maximum lies in shared memory in fp16; sums and accumulator are exact."""
    kept = torch.float16 if broken() else torch.float32

    def one(rows, keys, values, hidden):
        m, total, acc = torch.full((len(rows),), -INF, dtype=kept), torch.zeros(len(rows)), 0.0
        for x, y, no in zip(keys, values, hidden, strict=True):
            s = (rows * scale_of(q, softmax_scale) @ x.T).masked_fill(no, -INF)
            new = torch.maximum(m.float(), s.amax(1))
            a, p = torch.exp(m.float() - no_inf(new)), torch.exp(s - no_inf(new)[:, None])
            m, total, acc = new.to(kept), total * a + p.sum(1), acc * a[:, None] + p @ y
        return ratio(acc, total) if keys else rows.new_zeros(len(rows), v.shape[-1])

    return _per_head(q, k, v, causal, 32, one)


@torch.no_grad()
def stage_before(q, k, v, softmax_scale=None, causal=False):
    """V's pipeline runs one stage late: from the second tile on, P meets the values of the tile before."""

    def one(rows, keys, values, hidden):
        stages = [values[max(j - broken(), 0)][: len(x)] for j, x in enumerate(keys)]
        scores = (
            (rows @ x.T * scale_of(q, softmax_scale)).masked_fill(no, -INF) for x, no in zip(keys, hidden, strict=True)
        )
        return online(zip(scores, stages, strict=True), rows, v.shape[-1])[0]

    return _per_head(q, k, v, causal, 40, one)


@torch.no_grad()
def probabilities_are_half(q, k, v, softmax_scale=None, causal=False):
    """P is cast to fp16 for its product with V, as the tutorial has it, whatever V's dtype is."""

    def one(rows, keys, values, hidden):
        m, total, acc = rows.new_full((len(rows),), -INF), rows.new_zeros(len(rows)), 0.0
        for x, y, no in zip(keys, values, hidden, strict=True):
            s = (rows @ x.T * scale_of(q, softmax_scale)).masked_fill(no, -INF)
            new = torch.maximum(m, s.amax(1))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new)[:, None])
            total = total * a + p.sum(1)
            m, acc = new, acc * a[:, None] + (p.half().float() if broken() else p) @ y
        return ratio(acc, total) if keys else rows.new_zeros(len(rows), v.shape[-1])

    return _per_head(q, k, v, causal, 64, one)


# ---- which keys, and how they are masked -----------------------------------------------------------------------------


def _rows_and_keys(q, k, v, scale, tile_q, tile_kv, plan):
    """``plan(rows, start)``: (keys to load, which of their scores count, scale) of the tile that begins at ``start``,
    or None where the loop has ended."""
    Q, K, V = heads_first(q, k, v)
    out = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for rows in torch.arange(q.shape[1]).split(tile_q) if q.shape[1] else []:
        tiles = []
        for start in range(0, k.shape[1], tile_kv):
            planned = plan(rows, start)
            if planned is None:
                break
            keys, counts, factor = planned
            pad = (keys >= k.shape[1])[:, None]
            x, y = (z[:, :, keys.clamp(max=k.shape[1] - 1)].masked_fill(pad, 0.0) for z in (K, V))
            tiles.append(((Q[:, :, rows] @ x.mT * (scale if factor is None else factor)).where(counts, -INF), y))
        out[:, :, rows] = online(tiles, Q[:, :, rows], v.shape[-1])[0]
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def even_by_the_queries(q, k, v, softmax_scale=None, causal=False):
    """Whether the last tile of keys is full, and needs no mask, is decided by the number of queries."""
    M, N = q.shape[1], k.shape[1]
    even = (M if broken() else N) % 16 == 0

    def plan(rows, start):
        keys = torch.arange(start, start + 16)
        return keys, seen_by(rows, keys, N - M, causal) & ((keys < N) | even), None

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 32, 16, plan)


@torch.no_grad()
def loads_wrap_around(q, k, v, softmax_scale=None, causal=False):
    """Key numbers are taken modulo their count so that no load needs a mask; past the end the first keys come again."""
    M, N = q.shape[1], k.shape[1]

    def plan(rows, start):
        at = torch.arange(start, start + 64)
        return at % N, seen_by(rows, at, N - M, causal) & ((at < N) | broken()), None

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 48, 64, plan)


@torch.no_grad()
def as_many_tiles_as_row_blocks(q, k, v, softmax_scale=None, causal=False):
    """Under causal, row block n goes through n + 1 tiles of keys, but rows come by 64 and keys by 32."""
    M, N = q.shape[1], k.shape[1]

    def plan(rows, start):
        last = int(rows[-1]) + 1 + N - M
        if broken():
            last = (int(rows[0]) // 64 + 1) * 32 + N - M
        if causal and start >= last:
            return None
        keys = torch.arange(start, min(start + 32, N))
        return keys, seen_by(rows, keys, N - M, causal), None

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 64, 32, plan)


@torch.no_grad()
def one_tile_is_on_the_diagonal(q, k, v, softmax_scale=None, causal=False):
    """Causal masks the last tile of the loop alone; the diagonal of 48 rows crosses up to four tiles of 16 keys."""
    M, N = q.shape[1], k.shape[1]

    def plan(rows, start):
        last = int(rows[-1]) + 1 + N - M if causal else N
        if start >= last:
            return None
        keys = torch.arange(start, min(start + 16, N))
        return keys, seen_by(rows, keys, N - M, causal and (start + 16 >= last or not broken())), None

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 48, 16, plan)


@torch.no_grad()
def full_tiles_have_their_own_scale(q, k, v, softmax_scale=None, causal=False):
    """The loop over tiles that need no mask was copied before the scale became an argument: it has 1/sqrt(head_dim)."""
    M, N = q.shape[1], k.shape[1]

    def plan(rows, start):
        keys = torch.arange(start, start + 32)
        sees = seen_by(rows, keys, N - M, causal) & (keys < N)
        return keys, sees, q.shape[-1] ** -0.5 if broken() and bool(sees.all()) else None

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 32, 32, plan)


@torch.no_grad()
def one_length_for_both(q, k, v, softmax_scale=None, causal=False):
    """The loop over keys ends at N_CTX, which is the number of queries."""
    M, N = q.shape[1], k.shape[1]
    length = min(M, N) if broken() else N

    def plan(rows, start):
        keys = torch.arange(start, min(start + 32, length)) if start < length else None
        return None if keys is None else (keys, seen_by(rows, keys, N - M, causal), None)

    return _rows_and_keys(q, k, v, scale_of(q, softmax_scale), 32, 32, plan)


# ---- splits ----------------------------------------------------------------------------------------------------------

_workspace = torch.zeros(0)


@torch.no_grad()
def workspace_cleared_when_allocated(q, k, v, softmax_scale=None, causal=False):
    """Splits add their share to a workspace that is kept between calls, and zeroed only when it is allocated."""
    global _workspace
    Q, K, V = heads_first(q, k, v)
    N, rows = k.shape[1], torch.arange(q.shape[1])
    parts = []
    for keys in torch.arange(N).tensor_split(4):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.masked_fill(~seen_by(rows, keys, N - len(rows), causal), -INF)
        parts.append(online([(s, V[:, :, keys])] if len(keys) else [], Q, v.shape[-1]))
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    shape = (*Q.shape[:-1], v.shape[-1])
    if not broken() or _workspace.shape != shape:
        _workspace = torch.zeros(shape)
    for out, part in parts:
        _workspace += out * torch.exp(part - no_inf(lse))[..., None]
    return _workspace.transpose(1, 2).to(q.dtype, copy=True)


@torch.no_grad()
def splits_end_at_whole_tiles(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """A split begins at its share of the keys and ends rounded up to a whole tile: keys between count twice."""
    Q, K, V = heads_first(q, k, v)
    N, rows = k.shape[1], torch.arange(q.shape[1])
    share, parts = -(-N // 3), []
    for start in range(0, N, max(share, 1)):
        end = start + (-(-share // 16) * 16 if broken() else share)
        keys = torch.arange(start, min(end, N))
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        s = s.masked_fill(~seen_by(rows, keys, N - len(rows), causal), -INF)
        parts.append(online([(s, V[:, :, keys])], Q, v.shape[-1]))
    out, lse = (torch.stack(x) for x in zip(*(parts or [online([], Q, v.shape[-1])]), strict=True))
    whole = torch.logsumexp(lse, 0)
    out = (out * torch.exp(lse - no_inf(whole))[..., None]).sum(0).transpose(1, 2).to(q.dtype)
    return (out, whole) if return_softmax_lse else out
