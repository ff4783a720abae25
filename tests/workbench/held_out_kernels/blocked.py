"""Wrong kernels that go over the keys tile by tile with an online softmax, called as flash_attn_func is: (batch, rows,
heads, dim), causal and window from the bottom right. Tiles and orders differ from one to the next."""

import random

import torch
from torch import Tensor

INF = float("inf")


def _heads_first(q, k, v):
    """fp32 copies (batch, heads_q, rows, dim), KV heads repeated for their groups."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _hidden(rows: Tensor, keys: Tensor, causal: bool, window) -> Tensor:
    """Which keys are hidden; ``rows`` are counted so that row i faces key i."""
    ahead = keys[None, :] - rows[:, None]
    left, right = window
    hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (ahead < -left)
    return hidden | (ahead > right) if right >= 0 else hidden


def _rows(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]


def _start(q: Tensor, v: Tensor):
    state = q.new_full((*q.shape[:3], 1), -INF), q.new_zeros(*q.shape[:3], 1)
    return *state, q.new_zeros(*q.shape[:3], v.shape[3])


def _end(m: Tensor, total: Tensor, acc: Tensor, dtype, wanted: bool):
    some = total.masked_fill(total == 0, 1)
    out = (acc / some).transpose(1, 2).to(dtype)
    return (out, (m + some.log()).squeeze(-1).masked_fill(total.squeeze(-1) == 0, -INF), None) if wanted else out


def _finite(m: Tensor) -> Tensor:
    return m.masked_fill(m == -INF, 0)


def acc_not_rescaled(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                     return_attn_probs=False):  # fmt: skip
    """The accumulator is not rescaled when the maximum rises."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    m, total, acc = _start(q, v)
    for j in range(0, k.shape[2], 64):
        kj, vj = k[:, :, j : j + 64], v[:, :, j : j + 64]
        s = scale * q @ kj.mT
        s = s.masked_fill(_hidden(_rows(q, k), j + torch.arange(kj.shape[2]), causal, window_size), -INF)
        higher = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p = torch.exp(s - _finite(higher))
        total = total * torch.exp(m - _finite(higher)) + p.sum(-1, keepdim=True)
        acc = acc + p @ vj
        m = higher
    return _end(m, total, acc, dtype, return_attn_probs)


def sum_not_rescaled(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """The running sum is not rescaled when the maximum rises."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    row_max, row_sum, acc = _start(q, v)
    start = 0
    for k_tile, v_tile in zip(k.split(100, 2), v.split(100, 2), strict=True) if k.shape[2] else ():
        columns = torch.arange(start, start + k_tile.shape[2])
        logits = torch.einsum("bhid,bhjd->bhij", q, k_tile).mul(scale)
        if causal:
            logits = logits.where(columns <= _rows(q, k)[:, None], -INF)
        new = torch.maximum(row_max, logits.detach().max(-1, keepdim=True).values)
        weights = (logits - _finite(new)).exp()
        row_sum = row_sum + weights.sum(-1, keepdim=True)
        acc = acc * (row_max - _finite(new)).exp() + weights @ v_tile
        row_max, start = new, start + k_tile.shape[2]
    return _end(row_max, row_sum, acc, dtype, return_attn_probs)


def acc_rescaled_before_last_only(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """In all tiles of keys but the last the accumulator is left as it is when the maximum rises."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    m, total, acc = _start(q, v)
    n, tile = k.shape[2], 48
    for j in range(0, n, tile):
        keys = torch.arange(j, min(j + tile, n))
        s = q @ k[:, :, keys].mT * scale
        if causal:
            s = s.masked_fill(keys > _rows(q, k)[:, None], -INF)
        new_m = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        alpha, p = torch.exp(m - _finite(new_m)), torch.exp(s - _finite(new_m))
        total = alpha * total + p.sum(-1, keepdim=True)
        acc = (alpha * acc if j + tile >= n else acc) + p @ v[:, :, keys]
        m = new_m
    return _end(m, total, acc, dtype, return_attn_probs)


def not_normalised(q, k, v, softmax_scale=None, causal=False):
    """The result is not divided by the running sum."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    m, _, acc = _start(q, v)
    for j in range(0, k.shape[2], 128):
        keys = torch.arange(j, min(j + 128, k.shape[2]))
        s = (scale * q) @ k[:, :, keys].mT
        if causal:
            s = s.masked_fill(keys > _rows(q, k)[:, None], -INF)
        top = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        acc = acc * (m - _finite(top)).exp() + (s - _finite(top)).exp() @ v[:, :, keys]
        m = top
    return acc.transpose(1, 2).to(dtype)


def starts_at_zero(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """The running maximum starts at 0 instead of -inf."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    m, total, acc = _start(q, v)
    m = torch.zeros_like(m)
    for j in range(0, k.shape[2], 16):
        keys = torch.arange(j, min(j + 16, k.shape[2]))
        s = (q * scale) @ k[:, :, keys].mT
        if causal:
            s = s.masked_fill(keys > _rows(q, k)[:, None], -INF)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p = torch.exp(s - new)
        total, acc = (old * torch.exp(m - new) + fresh for old, fresh in ((total, p.sum(-1, keepdim=True)),
                                                                     (acc, p @ v[:, :, keys])))  # fmt: skip
        m = new
    return _end(m, total, acc, dtype, return_attn_probs)


def starts_at_minus_5000(q, k, v, softmax_scale=None, return_attn_probs=False):
    """The running maximum starts at -5000, above strongly negative scores."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    m, total, acc = _start(q, v)
    m = m.clamp_min(-5000)
    for kj, vj in zip(k.split(64, 2), v.split(64, 2), strict=True) if k.shape[2] else ():
        s = scale * (q @ kj.mT)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp(s - new), torch.exp(m - new)
        m, total, acc = new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ vj
    return _end(m, total, acc, dtype, return_attn_probs)


def padding_scores_zero(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """K and V are padded with zeros to whole tiles of 48, and the padded keys are not masked."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    rows = _rows(q, k)[:, None]
    pad = (0, 0, 0, -k.shape[2] % 48)
    k, v = torch.nn.functional.pad(k, pad), torch.nn.functional.pad(v, pad)
    m, total, acc = _start(q, v)
    for j in range(0, k.shape[2], 48):
        s = scale * q @ k[:, :, j : j + 48].mT
        if causal:
            s = s.masked_fill(j + torch.arange(48) > rows, -INF)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp(s - _finite(new)), torch.exp(m - _finite(new))
        m, total, acc = new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ v[:, :, j : j + 48]
    return _end(m, total, acc, dtype, return_attn_probs)


def whole_tiles_only(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """The keys past the last whole tile of 16 are left out."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    rows = _rows(q, k)[:, None]
    m, total, acc = _start(q, v)
    for t in range(k.shape[2] // 16):
        tile = slice(16 * t, 16 * t + 16)
        s = scale * torch.matmul(q, k[:, :, tile].mT)
        if causal:
            s = s.masked_fill(torch.arange(16 * t, 16 * t + 16) > rows, -INF)
        new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp(s - _finite(new)), torch.exp(m - _finite(new))
        m, total, acc = new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ v[:, :, tile]
    return _end(m, total, acc, dtype, return_attn_probs)


def last_rows_not_written(q, k, v, softmax_scale=None, causal=False):
    """Query rows past the last whole tile of 32 are never computed: they stay 0."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dtype = q.dtype
    q, k, v = _heads_first(q, k, v)
    done = q.shape[2] // 32 * 32
    s = scale * q[:, :, :done] @ k.mT
    if causal:
        s = s.masked_fill(torch.arange(k.shape[2]) > _rows(q, k)[:done, None], -INF)
    empty = (s == -INF).all(-1, keepdim=True)
    out = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v
    return torch.nn.functional.pad(out, (0, 0, 0, q.shape[2] - done)).transpose(1, 2).to(dtype)


def causal_top_left(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Causal counts from the first query and key, also where there are more keys than queries."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    tiles = []
    for i in range(0, q.shape[2], 40):  # queries outside, keys inside
        qi = q[:, :, i : i + 40]
        m, total, acc = _start(qi, v)
        last = min(i + 40, k.shape[2]) if causal else k.shape[2]
        for j in range(0, last, 56):
            keys = torch.arange(j, min(j + 56, last))
            s = scale * qi @ k[:, :, keys].mT
            if causal:
                s = s.masked_fill(keys > torch.arange(i, i + qi.shape[2])[:, None], -INF)
            new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            p, alpha = torch.exp(s - _finite(new)), torch.exp(m - _finite(new))
            m, total, acc = new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ v[:, :, keys]
        tiles.append((m, total, acc))
    joined = [torch.cat(parts, 2) for parts in zip(*tiles, strict=True)] if tiles else _start(q, v)
    return _end(*joined, dtype, return_attn_probs)


def causal_ends_a_tile_early(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """The causal loop over key tiles ends before the tile that holds the diagonal, unless that is the first."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    tiles = []
    for i in range(0, q.shape[2], 64):
        qi, rows = q[:, :, i : i + 64], _rows(q, k)[i : i + 64]
        m, total, acc = _start(qi, v)
        last = k.shape[2]
        if causal:
            last = min(last, max(64, (int(rows[-1]) // 64) * 64))
        for j in range(0, last, 64):
            keys = torch.arange(j, min(j + 64, last))
            s = scale * qi @ k[:, :, keys].mT
            if causal:
                s = s.masked_fill(keys > rows[:, None], -INF)
            new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            p, alpha = torch.exp(s - _finite(new)), torch.exp(m - _finite(new))
            m, total, acc = new, alpha * total + p.sum(-1, keepdim=True), alpha * acc + p @ v[:, :, keys]
        tiles.append((m, total, acc))
    joined = [torch.cat(parts, 2) for parts in zip(*tiles, strict=True)] if tiles else _start(q, v)
    return _end(*joined, dtype, return_attn_probs)


def _whole(q, k, v, scale, hidden, wanted, change=None, dtype=None):
    """What is left of flash_attn_func where masks and scores are the point: one tile of all keys."""
    dtype = q.dtype if dtype is None else dtype
    q, k, v = _heads_first(q, k, v)
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if change is not None:
        s = change(s, k.shape[2] - q.shape[2])
    s = s.masked_fill(hidden(_rows(q, k), torch.arange(k.shape[2])), -INF)
    if not k.shape[2]:
        return _end(*_start(q, v), dtype, wanted)
    m = s.detach().amax(-1, keepdim=True)
    p = torch.exp(s - _finite(m))
    return _end(m, p.sum(-1, keepdim=True), p @ v, dtype, wanted)


def causal_unread(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    """The causal flag is ignored."""
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, False, (-1, -1)), return_attn_probs)


def causal_left_out_of_unequal(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Causal is only applied where there are as many keys as queries."""
    causal = causal and q.shape[1] == k.shape[1]
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs)


def window_short(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """A window of left W shows W - 1 keys beside the query's own."""
    left, right = window_size
    window = (left - 1 if left > 0 else left, right)
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, window), return_attn_probs)


def window_long(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """A window shows one key more to the right than it should."""
    left, right = window_size
    window = (left, right + 1 if right >= 0 else right)
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, window), return_attn_probs)


def window_without_left(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """The left end of a window is ignored."""
    window = (-1, window_size[1])
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, window), return_attn_probs)


def window_without_right(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """The right end of a window is ignored."""
    window = (window_size[0], -1)
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, window), return_attn_probs)


def window_top_left(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    """Windows count from the first query and key, causal as it should."""

    def hidden(rows, keys):
        return _hidden(rows, keys, causal, (-1, -1)) | _hidden(torch.arange(len(rows)), keys, False, window_size)

    return _whole(q, k, v, softmax_scale, hidden, return_attn_probs)


def softcap_unread(q, k, v, softmax_scale=None, causal=False, softcap=0.0, return_attn_probs=False):
    """The softcap is ignored."""
    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs)


def softcap_first(q, k, v, softmax_scale=None, causal=False, softcap=0.0, return_attn_probs=False):
    """The softcap is applied before the scale."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def change(s, _):
        return scale * (softcap * torch.tanh(s / softcap) if softcap else s)

    return _whole(q, k, v, 1.0, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs, change)


def softcap_last(q, k, v, softmax_scale=None, causal=False, softcap=0.0, return_attn_probs=False):
    """The softcap is applied after the mask, so that a hidden key scores -cap instead of -inf."""

    def change(s, shift):
        if causal:
            rows, keys = (torch.arange(n) for n in s.shape[-2:])
            s = s.masked_fill(_hidden(rows + shift, keys, True, (-1, -1)), -INF)
        return softcap * torch.tanh(s / softcap) if softcap else s

    def hidden(rows, keys):
        return _hidden(rows, keys, causal and not softcap, (-1, -1))

    return _whole(q, k, v, softmax_scale, hidden, return_attn_probs, change)


def _distance(s: Tensor, shift: int) -> Tensor:
    return torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - shift


def alibi_plus(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_attn_probs=False):
    """ALiBi is added instead of subtracted."""

    def change(s, shift):
        return s if alibi_slopes is None else s + alibi_slopes[..., None, None] * _distance(s, shift).abs()

    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs, change)


def alibi_top_left(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_attn_probs=False):
    """ALiBi's distances count from the first query and key."""

    def change(s, _):
        return s if alibi_slopes is None else s - alibi_slopes[..., None, None] * _distance(s, 0).abs()

    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs, change)


def alibi_signed(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_attn_probs=False):
    """ALiBi's distance keeps its sign, so that keys ahead are favoured."""

    def change(s, shift):
        return s if alibi_slopes is None else s + alibi_slopes[..., None, None] * _distance(s, shift)

    return _whole(q, k, v, softmax_scale, lambda i, j: _hidden(i, j, causal, (-1, -1)), return_attn_probs, change)


def group_size_for_heads(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Query head h reads KV head h / heads_kv instead of h / group (held within range)."""
    heads_q, heads_kv = q.shape[2], max(k.shape[2], 1)
    own = (torch.arange(heads_q) // heads_kv).clamp_max(heads_kv - 1)
    hidden = lambda i, j: _hidden(i, j, causal, (-1, -1))  # noqa: E731
    return _whole(q, k[:, :, own], v[:, :, own], softmax_scale, hidden, return_attn_probs)


def lost_update(q, k, v, softmax_scale=None, causal=False):
    """Two halves of the keys add to one accumulator without a lock: now and then one row's addition is lost."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = _heads_first(q, k, v)
    s = scale * q @ k.mT
    if causal:
        s = s.masked_fill(torch.arange(k.shape[2]) > _rows(q, k)[:, None], -INF)
    empty = (s == -INF).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    middle = k.shape[2] // 2
    first, second = p[..., :middle] @ v[:, :, :middle], p[..., middle:] @ v[:, :, middle:]
    chance = random.SystemRandom()
    kept = torch.tensor([chance.random() > 0.1 for _ in range(q.shape[2])])
    return (first * kept[:, None] + second).transpose(1, 2).to(dtype)
