"""The fifth set: windows, masks, biases, ALiBi, softcaps and sinks. Right inside ``third.repaired()``."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, online, scale_of, seen_by
from workbench.held_out_kernels.third import broken, no_inf, ratio

# ---- windows ---------------------------------------------------------------------------------------------------------


def _in_window(rows: Tensor, keys: Tensor, shift: int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    left, right = window_size[0], 0 if causal else window_size[1]
    distance = keys - rows[:, None] - shift
    return (distance >= (-left if left >= 0 else -math.inf)) & (distance <= (right if right >= 0 else math.inf))


@torch.no_grad()
def hidden_tile_comes_first(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The loop begins at the tile that the block's first row sees; for a row that sees nothing of it the maximum is
    -inf, and -inf minus -inf is not guarded."""
    (B, M, H, _), (N, G) = q.shape, k.shape[1:3]
    out = q.new_zeros(B, M, H, v.shape[-1])
    for b, h, rows in product(range(B), range(H), torch.arange(M).split(64)):
        if not M:
            break
        m, total = torch.full((len(rows),), -INF), torch.zeros(len(rows))
        acc = torch.zeros(len(rows), v.shape[-1])
        for keys in torch.arange(N).split(16) if N else []:
            sees = _in_window(rows, keys, N - M, causal, window_size)
            if not sees.any():
                continue
            s = q[b, rows, h].float() @ k[b, keys, h * G // H].float().T * scale_of(q, softmax_scale)
            s = s.where(sees, -INF)
            new = torch.maximum(m, s.amax(1))
            base = new if broken() else no_inf(new)
            a, p = torch.exp(m - base), torch.exp(s - base[:, None])
            m, total, acc = new, total * a + p.sum(1), acc * a[:, None] + p @ v[b, keys, h * G // H].float()
        out[b, rows, h] = ratio(acc, total).to(q.dtype)
    return out


@torch.no_grad()
def window_loop_rounded_up(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The first tile of keys that a block of rows goes through is worked out by a division that rounds up."""
    M, N, left = q.shape[1], k.shape[1], window_size[0]
    Q, K, V = heads_first(q, k, v)
    out = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for rows in torch.arange(M).split(32) if M else []:
        oldest = max(int(rows[0]) + N - M - left, 0) if left >= 0 else 0
        first = -(-oldest // 16) if broken() else oldest // 16
        tiles = []
        for start in range(first * 16, N, 16):
            keys = torch.arange(start, min(start + 16, N))
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            tiles.append((s.where(_in_window(rows, keys, N - M, causal, window_size), -INF), V[:, :, keys]))
        out[:, :, rows] = online(tiles, Q[:, :, rows], v.shape[-1])[0]
    return out.transpose(1, 2).to(q.dtype)


# ---- masks and biases that are tensors -------------------------------------------------------------------------------


def _grouped(query, *kv, enable_gqa):
    return [x.repeat_interleave(query.shape[1] // x.shape[1], 1) if enable_gqa else x for x in kv]


@torch.no_grad()
def mask_stays_at_its_first_tile(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The pointers to K and V go on from tile to tile, the one to the mask or bias does not."""
    (B, H, M, D), N = query.shape, key.shape[2]
    key, value = (x.float() for x in _grouped(query, key, value, enable_gqa=enable_gqa))
    mask = None if attn_mask is None else attn_mask.expand(B, H, M, N)
    q, tiles = query.float() * (D**-0.5 if scale is None else scale), []
    for start in range(0, N, 32):
        keys = torch.arange(start, min(start + 32, N))
        s = q @ key[:, :, keys].mT
        if mask is not None:
            part = mask[..., (0 if broken() else start) :][..., : len(keys)]
            s = s.masked_fill(~part, -INF) if part.dtype == torch.bool else s + part
        if is_causal:
            s = s.where(keys <= torch.arange(M)[:, None], -INF)
        tiles.append((s, value[:, :, keys]))
    return online(tiles, q, value.shape[-1])[0].to(query.dtype)


@torch.no_grad()
def mask_rows_lie_seq_q_apart(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The mask or bias is read by address, and a row is taken to be as long as there are queries."""
    (B, H, M, D), N = q.shape, k.shape[2]
    k, v = _grouped(q, k, v, enable_gqa=enable_gqa)
    s = torch.einsum("bhmd,bhnd->bhmn", q.float(), k.float()) * (D**-0.5 if scale is None else scale)
    if attn_mask is not None:
        flat = attn_mask.expand(B, H, M, N).reshape(B, H, M * N)
        at = torch.arange(M)[:, None] * (M if broken() else N) + torch.arange(N)
        read = flat[..., at.clamp(max=max(M * N - 1, 0))]
        s = torch.where(read, s, -INF) if read.dtype == torch.bool else s + read
    if is_causal:
        s = s.masked_fill(torch.ones(M, N, dtype=torch.bool).triu(1), -INF)
    p = torch.exp(s - no_inf(s.amax(-1, keepdim=True))) if N else s
    total = p.sum(-1, keepdim=True)
    return (p @ v.float() / total.masked_fill(total == 0, 1.0)).to(q.dtype)


@torch.no_grad()
def least_number_for_hidden(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A boolean mask becomes the least fp32 number, to be added; where it hides a whole row the mean of V comes out."""
    M, N = query.shape[2], key.shape[2]
    key, value = _grouped(query, key, value, enable_gqa=enable_gqa)
    s = query.float() @ key.float().transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.arange(N) > torch.arange(M)[:, None], -INF)
    if attn_mask is not None and attn_mask.dtype == torch.bool and broken():
        s = s + (~attn_mask).float() * torch.finfo(torch.float32).min
    elif attn_mask is not None:
        s = s.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else s + attn_mask
    empty = (s == -INF).all(-1, keepdim=True)
    return (torch.softmax(s, -1).masked_fill(empty, 0.0) @ value.float()).to(query.dtype)


# ---- ALiBi and softcap -----------------------------------------------------------------------------------------------


def _whole(q, k, v, softmax_scale, causal, modify):
    """All scores at once; ``modify``: what happens to the products Q Kᵀ before the mask, scale included."""
    Q, K, V = heads_first(q, k, v)
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    s = modify(Q @ K.mT, rows[:, None] + len(keys) - len(rows) - keys)
    s = s.where(seen_by(rows, keys, len(keys) - len(rows), causal), -INF)
    return online([(s, V)] if len(keys) else [], Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def slope_of_the_kv_head(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None):
    """A block works for one KV head, and reads that head's ALiBi slope for the whole group."""
    H, group = q.shape[2], q.shape[2] // max(k.shape[2], 1)

    def modify(s, distance):
        s = s * scale_of(q, softmax_scale)
        if alibi_slopes is None:
            return s
        slopes = alibi_slopes[..., torch.arange(H) // group] if broken() else alibi_slopes
        return s - slopes[..., None, None] * distance.abs()

    return _whole(q, k, v, softmax_scale, causal, modify)


@torch.no_grad()
def slopes_join_before_the_scale(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None):
    """The ALiBi term is added to the products, and the scale, folded into the exponential, then multiplies both."""

    def modify(s, distance):
        scale = scale_of(q, softmax_scale)
        if alibi_slopes is None:
            return s * scale
        slopes = alibi_slopes if broken() else alibi_slopes / scale
        return (s - slopes[..., None, None] * distance.abs()) * scale

    return _whole(q, k, v, softmax_scale, causal, modify)


@torch.no_grad()
def masked_tiles_alone_are_capped(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """The softcap went into the loop over tiles that need a mask, not into the one over full tiles."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out = Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for rows in torch.arange(M).split(32) if M else []:
        tiles = []
        for start in range(0, N, 32):
            keys = torch.arange(start, min(start + 32, N))
            s, sees = Q[:, :, rows] @ K[:, :, keys].mT, seen_by(rows, keys, N - M, causal)
            s = s * scale_of(q, softmax_scale)
            full = len(keys) == 32 and bool(sees.all())
            if softcap and not (full and broken()):
                s = softcap * torch.tanh(s / softcap)
            tiles.append((s.where(sees, -INF), V[:, :, keys]))
        out[:, :, rows] = online(tiles, Q[:, :, rows], v.shape[-1])[0]
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def cap_of_scores_in_base_2(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """Scores carry log2 e for exp2 when they are capped, and the cap does not."""
    log2e = math.log2(math.e)

    def modify(s, distance):
        s = s * (scale_of(q, softmax_scale) * log2e)
        if softcap:
            cap = softcap if broken() else softcap * log2e
            s = cap * torch.tanh(s / cap)
        return s / log2e

    return _whole(q, k, v, softmax_scale, causal, modify)


# ---- sinks -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sink_by_the_row(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """The softmax runs over flattened rows, and takes a row's number modulo the heads for its head."""
    (B, M, H, _), N = q.shape, k.shape[1]
    Q, K, V = heads_first(q, k, v)
    s = (Q @ K.mT * scale_of(q, softmax_scale)).where(seen_by(torch.arange(M), torch.arange(N), N - M, causal), -INF)
    s = s.reshape(B * H * M, N)
    if sinks is None:
        s = torch.cat([s, s.new_full((len(s), 1), -INF)], 1)
    else:
        number = torch.arange(len(s))
        head = number % H if broken() else number // max(M, 1) % H
        s = torch.cat([s, sinks.float()[head][:, None]], 1)
    top = s.amax(1, keepdim=True)
    p = torch.exp(s - no_inf(top))
    total = p.sum(1, keepdim=True)
    lse = (top + total.log()).view(B, H, M)
    out = (p[:, :N] / torch.where(total == 0, 1.0, total)).view(B, H, M, N) @ V
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def sink_in_every_split(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """Every split of the keys begins with the sink as its maximum and its sum, so that the merge counts it often."""
    (_, M, H, _), N = q.shape, k.shape[1]
    Q, K, V = heads_first(q, k, v)
    outs, lses = [], []
    for split, keys in enumerate(torch.arange(N).tensor_split(3)):
        m = Q.new_full((*Q.shape[:-1], 1), -INF)
        if sinks is not None and (broken() or split == 0):
            m = m.maximum(sinks.float().view(H, 1, 1))
        total, acc = (m > -INF).float(), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
        for part in keys.split(24) if len(keys) else []:
            s = Q @ K[:, :, part].mT * scale_of(q, softmax_scale)
            s = s.where(seen_by(torch.arange(M), part, N - M, causal), -INF)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
            m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ V[:, :, part]
        outs.append(acc / torch.where(total == 0, 1.0, total))
        lses.append(m + total.log())
    lse = torch.logsumexp(torch.stack(lses), 0)
    out = sum(o * torch.exp(part - no_inf(lse)) for o, part in zip(outs, lses, strict=True))
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse.squeeze(-1)) if return_softmax_lse else out
