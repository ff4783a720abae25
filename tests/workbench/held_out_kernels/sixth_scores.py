"""The sixth set: windows, scale and score modifiers, masks and biases that are tensors, strides. Right inside
``third.repaired()``."""

from __future__ import annotations

import math

import torch

from workbench.held_out_kernels.fifth import INF, heads_first, online, scale_of, seen_by
from workbench.held_out_kernels.sixth import LOG2E, causal_of, chunks, divided, loop
from workbench.held_out_kernels.third import broken, no_inf

# ---- windows ---------------------------------------------------------------------------------------------------------


def _within(shift, first, last):
    """``sees`` of a row's keys from ``first`` to ``last`` away from its place; None where there is no end."""

    def sees(rows, keys):
        away = keys - rows[:, None] - shift
        found = torch.ones_like(away, dtype=torch.bool)
        found = found if first is None else found & (away >= first)
        return found if last is None else found & (away <= last)

    return sees


def _ends(window_size, causal):
    left, right = window_size[0], 0 if causal else window_size[1]
    return -left if left >= 0 else None, right if right >= 0 else None


@torch.no_grad()
def zero_is_no_window(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """A left size of 0, which is the row's own key, is tested like a size that was not given."""
    first, last = _ends(window_size, causal)
    first = None if broken() and not window_size[0] else first
    return loop(q, k, v, scale_of(q, softmax_scale), _within(k.shape[1] - q.shape[1], first, last))[0]


@torch.no_grad()
def window_held_to_the_keys(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """A right size beyond the number of keys becomes that number: too little where there are more queries than keys."""
    first, last = _ends(window_size, causal)
    last = min(last, k.shape[1]) if broken() and last is not None else last
    return loop(q, k, v, scale_of(q, softmax_scale), _within(k.shape[1] - q.shape[1], first, last), 32, 48)[0]


@torch.no_grad()
def open_end_is_a_number(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The two ends of a window are tested together: with one of them given, -1 of the other is the key before or
    behind."""
    first, last = _ends(window_size, causal)
    if broken() and tuple(window_size) != (-1, -1):
        first, last = -window_size[0], 0 if causal else window_size[1]
    return loop(q, k, v, scale_of(q, softmax_scale), _within(k.shape[1] - q.shape[1], first, last), 64, 64)[0]


# ---- scale, softcap, ALiBi -------------------------------------------------------------------------------------------


@torch.no_grad()
def not_positive_is_not_given(q, k, v, softmax_scale=None, causal=False):
    """The launcher has a number for a scale that was not given, 0, and takes the default for what is not above it."""
    given = 0.0 if softmax_scale is None else softmax_scale
    unset = given <= 0 if broken() else softmax_scale is None
    return loop(q, k, v, q.shape[-1] ** -0.5 if unset else given, causal_of(q, k, causal), 24, 64)[0]


@torch.no_grad()
def capped_twice(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """The softcap is applied where scores are made and once more where they are modified."""
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    Q, K, V = heads_first(q, k, v)
    s = Q @ K.mT * scale_of(q, softmax_scale)
    for _ in range(2 if broken() else 1):
        s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.where(causal_of(q, k, causal)(rows, keys), -INF)
    return online([(s, V)] if len(keys) else [], Q, v.shape[-1])[0].transpose(1, 2).to(q.dtype)


@torch.no_grad()
def slope_times_key_in_the_lse(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_softmax_lse=False):
    """Under causal ALiBi is slope · key, which the output does not tell from slope · (key - query); the LSE does."""
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    (Q, K, V), place = heads_first(q, k, v), rows + len(keys) - len(rows)
    s = Q @ K.mT * scale_of(q, softmax_scale)
    if alibi_slopes is not None:
        away = keys if causal else -(place[:, None] - keys).abs()
        s = s + alibi_slopes.float()[..., None, None] * away
    s = s.where(causal_of(q, k, causal)(rows, keys), -INF)
    out, lse = online([(s, V)] if len(keys) else [], Q, v.shape[-1])
    if alibi_slopes is not None and causal and not broken():
        lse = lse - alibi_slopes.float()[..., None] * place
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


# ---- masks and biases that are tensors, called as SDPA ---------------------------------------------------------------


def _parts(query, key, value, scale, enable_gqa):
    """(Q with the scale, K, V) in fp32 with as many heads as Q."""
    group = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    return query.float() * (query.shape[-1] ** -0.5 if scale is None else scale), key, value


def _term(attn_mask):
    """Something to add."""
    return torch.zeros(()).where(attn_mask, -INF) if attn_mask.dtype == torch.bool else attn_mask.float()


def _top_left(s, is_causal):
    M, N = s.shape[-2:]
    return s.masked_fill(torch.arange(N) > torch.arange(M)[:, None], -INF) if is_causal else s


@torch.no_grad()
def bits_from_the_other_end(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A boolean mask is packed into bytes, its first key the highest bit, and read from the lowest bit on."""
    q, k, v = _parts(query, key, value, scale, enable_gqa)
    s, N = _top_left(q @ k.mT, is_causal), key.shape[2]
    if attn_mask is not None and attn_mask.dtype == torch.bool and N:
        packed = torch.nn.functional.pad(attn_mask.expand(*attn_mask.shape[:-1], N), (0, -N % 8)).unflatten(-1, (-1, 8))
        attn_mask = (packed.flip(-1) if broken() else packed).flatten(-2)[..., :N]
    s = s if attn_mask is None else s + _term(attn_mask)
    return online([(s, v)] if N else [], q, v.shape[-1])[0].to(query.dtype)


@torch.no_grad()
def first_row_speaks_for_the_tile(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Tiles that the mask hides are skipped; whether it does is read in the tile's first row."""
    (B, H, M, _), N = query.shape, key.shape[2]
    q, k, v = _parts(query, key, value, scale, enable_gqa)
    term = torch.zeros(M, N) if attn_mask is None else _term(attn_mask)
    term = term.expand(B, H, M, N)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for rows in chunks(M, 16):
        tiles = []
        for keys in chunks(N, 16):
            part = term[:, :, rows][..., keys]
            asked = part[:, :, :1] if broken() else part
            skipped = (asked == -INF).all(-1, keepdim=True).all(-2, keepdim=True)
            s = q[:, :, rows] @ k[:, :, keys].mT + part.masked_fill(skipped, -INF)
            s = s.masked_fill(keys > rows[:, None], -INF) if is_causal else s
            tiles.append((s, v[:, :, keys]))
        out[:, :, rows] = online(tiles, q[:, :, rows], v.shape[-1])[0]
    return out.to(query.dtype)


@torch.no_grad()
def bias_of_the_running_number(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A program has a number, batch · heads + head, and its mask or bias is that number's, modulo how many there
    are."""
    (B, H, M, _), N = query.shape, key.shape[2]
    q, k, v = _parts(query, key, value, scale, enable_gqa)
    s = _top_left(q @ k.mT, is_causal)
    if attn_mask is not None and broken():
        many = _term(attn_mask).view((1,) * (4 - attn_mask.dim()) + attn_mask.shape).flatten(0, 1)
        s = s + many[torch.arange(B * H) % len(many)].unflatten(0, (B, H)).expand(B, H, M, N)
    elif attn_mask is not None:
        s = s + _term(attn_mask)
    return online([(s, v)] if N else [], q, v.shape[-1])[0].to(query.dtype)


# ---- strides ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def values_by_the_strides_of_keys(q, k, v, softmax_scale=None, causal=False):
    """There is one set of strides for K and V, K's; V's are others where it has another head dim."""
    if broken() and v.numel():
        size = v.untyped_storage().nbytes() // v.element_size()
        at = torch.tensor(v.storage_offset())
        for axis, (extent, stride) in enumerate(zip(v.shape, k.stride(), strict=True)):
            at = at + (torch.arange(extent) * stride).view(-1, *(1,) * (3 - axis))
        v = v.as_strided((size,), (1,), 0)[at.clamp(max=size - 1)]
    return loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), 80, 40)[0]


# ---- sinks -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sink_in_natural_units(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """Scores carry log2 e for exp2; the sink, with which maximum and sum begin, does not."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    m = Q.new_full((*Q.shape[:-1], 1), -INF)
    if sinks is not None:
        m = m.maximum(sinks.float().view(-1, 1, 1) * (1.0 if broken() else LOG2E))
    total, acc = (m > -INF).float(), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in chunks(N, 32):
        s = Q @ K[:, :, keys].mT * (scale_of(q, softmax_scale) * LOG2E)
        s = s.where(seen_by(torch.arange(M), keys, N - M, causal), -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        a, p = torch.exp2(m - no_inf(new)), torch.exp2(s - no_inf(new))
        m, total, acc = new, total * a + p.sum(-1, keepdim=True), acc * a + p @ V[:, :, keys]
    out, lse = divided(acc, total).transpose(1, 2).to(q.dtype), (m + total.log2()).squeeze(-1) * math.log(2)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def sink_needs_a_key(q, k, v, softmax_scale=None, causal=False, sinks=None, return_softmax_lse=False):
    """Rows without keys leave early, with an output of 0, which is right, and an LSE of -inf in spite of the sink."""
    out, lse = loop(q, k, v, scale_of(q, softmax_scale), causal_of(q, k, causal), 16, 64)
    if sinks is not None:
        keys, sink = lse, sinks.float().view(-1, 1)
        lse = torch.logaddexp(lse, sink.expand_as(lse))
        out = (out.float() * torch.exp(keys - lse).transpose(1, 2)[..., None]).to(q.dtype)
        lse = lse.masked_fill(keys == -INF, -INF) if broken() else lse
    return (out, lse) if return_softmax_lse else out
