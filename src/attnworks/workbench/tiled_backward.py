"""The backward of the tiled attention that ``mutants.py`` breaks (``tiled.py`` has the forward), with a switch for each
fault: P recomputed from the LSE, tile by tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnworks.masks import Window
from attnworks.scores import Bias
from attnworks.workbench.mask_tiles import seen_in_blocks
from attnworks.workbench.modifiers import Modifiers


def backward(
    m: Modifiers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor | None]:
    """(dq, dk, dv, dbias of each bias, dsink): P recomputed from the LSE, tile by tile. dk, dv have heads_q heads."""
    has, way = m.has, m.addresses.way
    if d_out.numel() and has("dO of another place"):
        d_out = _other_d_out(way, d_out)
    delta = _delta(m, out, lse, d_out, d_lse)
    if has("delta of the accumulator"):  # as it is before it is divided by the sum
        delta = delta * torch.exp(lse[..., None] - top_scores(m, q, k)).nan_to_num(0)
    safe = _saved_lse(m, q, k, sink, lse)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_biases = {place: torch.zeros_like(bias, dtype=q.dtype) for place, bias in m.biases.items()}
    if way and has("heads mapped otherwise in backward"):
        k, v = _by_remainder(m, k), _by_remainder(m, v)
    for first in range(0, k.shape[1], m.tile_kv):
        keys = slice(first, first + m.tile_kv)
        own_k, own_v = _tiles(m, k, v, keys)
        s, slopes = m.tile(q, own_k, first, backward=True)
        p_of_v, p = _probs(m, q, k, s, safe)
        padding = m.tile_kv - s.shape[-1] if has("padding scored 0 in backward") else 0
        dp = _d_probs(m, q, own_v, d_out)
        if has("delta of another size"):  # or dP
            dp, used = (dp * m.scale, delta) if way == 1 else (dp, delta * (m.scale, 0.0, 1 / m.scale, 2.0)[way])
        else:
            used = delta
        rows = _rows(m, first, s.shape[-1])
        dv[:, keys] = _narrow(m, p_of_v[:, rows]).transpose(-1, -2) @ _narrow(m, d_out[:, rows])
        ds = (dp - used) * (m.shown if has("dS without probs") else p)
        for place, (modifier, slope) in reversed(list(enumerate(zip(m.scores, slopes, strict=True)))):
            if isinstance(modifier, Bias):
                d_biases[place][..., keys] = _d_bias(m, ds)
            elif slope is not None:
                ds = ds * slope
        ds = ds.to(torch.float8_e4m3fn).to(ds.dtype) if has("dS in fp8") else _narrow(m, ds, way=2)
        step = ds @ own_k * _scale(m, "dq")
        if padding:
            step = step + (torch.exp(0 - safe) * (0 - delta)) @ k.new_zeros(1, 1, k.shape[-1])
        if k.shape[1] > m.tile_kv and has("last tile missing in dq"):
            step = step * _dq_keeps(m, first, k.shape[1])
        dq = step if has("dq overwritten by each tile") else dq + step
        if has("backward in 16 bits") and way in (6, 7):  # where it is summed up
            dq = dq.to(torch.bfloat16 if way == 6 else torch.float16).to(dq.dtype)
        dk[:, keys] = ds[:, rows].transpose(-1, -2) @ q[:, rows] * _scale(m, "dk")
        if m.masks and has("gradients of what is hidden unwritten") and not bool(m.shown.any()):
            for grad in ((dk, dv), (dk,), (dv,), ())[way]:
                grad[:, keys] = torch.nan
    if m.masks and way == 3 and has("gradients of what is hidden unwritten"):  # of rows without keys
        dq = dq.masked_fill((lse == -torch.inf)[..., None], torch.nan)
    d_sink = None if sink is None else _d_sink(m, sink, safe, delta)
    if any(d.numel() for d in d_biases.values()) and has("bias gradient in another place"):
        d_biases = {place: d.roll(1, 1) if way else d.flip(0) for place, d in d_biases.items()}
    return *_stored(m, dq, dk, dv), [d_biases[place] for place in m.biases], d_sink


def _saved_lse(m: Modifiers, q: Tensor, k: Tensor, sink: Tensor | None, lse: Tensor) -> Tensor:
    """(heads, rows, 1): the LSE that P is recomputed from, 0 of empty rows."""
    has = m.has
    safe = lse if has("empty rows leak into gradients") else torch.where(lse == -torch.inf, 0, lse)
    if k.shape[1] > 8 and has("lse of some keys in backward"):  # of the last tile, or of the first one
        first = 0 if m.addresses.way else (k.shape[1] - 1) // m.tile_kv * m.tile_kv
        part = torch.logsumexp(m.tile(q, k[:, first : first + m.tile_kv], first)[0], -1)
        safe = torch.where(part == -torch.inf, 0, part)
    if sink is not None and has("lse without the sink in backward"):
        return _less(safe[..., None], sink)
    return safe[..., None]


def _d_bias(m: Modifiers, ds: Tensor) -> Tensor:
    """A bias's gradient for a tile of keys."""
    factor = m.scale if m.has("bias gradient scaled") else 0.0 if m.has("bias gradient missing") else 1.0
    if m.masks and m.has("bias gradient unwritten where hidden"):
        return (ds * factor).masked_fill(~seen_in_blocks(m.shown, m.tile_kv), torch.nan)
    return ds * factor


def _d_sink(m: Modifiers, sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    way = m.addresses.way
    shares = torch.exp(sink.view(-1, 1) - lse[..., 0]) * delta[..., 0]
    d_sink = -shares.sum(-1)
    if m.seq_q and m.has("sink gradient not summed"):
        d_sink = d_sink * (m.sequence == 0) if way == 2 else -shares[:, 0 if way else -1]
    if m.has("sink gradient missing"):
        d_sink = -d_sink if way else torch.zeros_like(d_sink)
    return d_sink


def _delta(m: Modifiers, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Tensor:
    """(heads, rows, 1): rowsum(dO ∘ O), less the LSE's cotangent."""
    has, way = m.has, m.addresses.way
    delta = (d_out * out).sum(-1, keepdim=True)
    if has("delta of some channels"):
        channels = out.shape[-1]
        delta = (d_out * out)[..., : (32, 64, channels // 2)[way]].sum(-1, keepdim=True)
    seen = torch.where(lse == -torch.inf, 0, d_lse)[..., None]
    delta = delta - seen * (0 if has("lse cotangent ignored") else -1 if has("lse cotangent of the wrong sign") else 1)
    if has("delta missing"):
        return torch.zeros_like(delta)
    if m.seq_q > 8 and has("delta missing in the last tile"):  # of one that is not whole, or in all but the first
        kept = m.tile_kv if way else m.seq_q // m.tile_kv * m.tile_kv
        return delta * (torch.arange(m.seq_q).view(-1, 1) < kept)
    if has("backward in 16 bits") and way in (4, 5):
        return delta.to(torch.bfloat16 if way == 4 else torch.float16).to(delta.dtype)
    if has("delta of the wrong sign"):
        return -delta
    if delta.numel() and has("delta of other rows"):
        return _of_others(delta, way)
    return delta


def _other_d_out(way: int, d_out: Tensor) -> Tensor:
    """dO (heads, rows, dim) read as if rows lay before heads in memory, or the other way round; of other rows or
    heads."""
    heads, rows, dim = d_out.shape
    if way < 2:
        turned = d_out.reshape(rows, heads, dim) if way else d_out.transpose(0, 1)
        return turned.reshape(d_out.shape) if not way else turned.transpose(0, 1)
    return (d_out.roll(1, 1), d_out.roll(-1, 1), d_out.flip(0))[way - 2]


def _less(lse: Tensor, sink: Tensor) -> Tensor:
    """The LSE (heads, rows, 1) of the keys alone."""
    share = 1 - torch.exp(sink.view(-1, 1, 1) - lse)
    return torch.where(share > 0, lse + torch.log(share.clamp_min(1e-30)), 0)


def _tiles(m: Modifiers, k: Tensor, v: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """K's and V's rows that a tile's scores and dP are of."""
    if keys.start == 0 or not m.has("K or V of another tile in backward"):
        return k[:, keys], v[:, keys]
    way = m.addresses.way
    other = torch.arange(k.shape[1])[keys] - (m.tile_kv if way % 2 else keys.start)
    return k[:, other if way < 4 else keys], v[:, other if way not in (2, 3) else keys]


def _d_probs(m: Modifiers, q: Tensor, v: Tensor, d_out: Tensor) -> Tensor:
    """dP = dO Vᵀ."""
    if m.has("dP of some channels"):
        channels = (min(v.shape[-1], q.shape[-1]), 64, 32)[m.addresses.way]
        return d_out[..., :channels] @ v[..., :channels].transpose(-1, -2)
    return d_out @ v.transpose(-1, -2)


def _probs(m: Modifiers, q: Tensor, k: Tensor, s: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """P recomputed from scores and the LSE (heads, rows, 1), as dV and as dS take it."""
    has, way = m.has, m.addresses.way
    if has("backward in 16 bits") and way > 7:  # the LSE that forward kept
        lse = lse.to(torch.bfloat16 if way == 8 else torch.float16).to(lse.dtype)
    p = torch.exp(s - lse)
    if has("probs not normalised in backward"):
        wrong = torch.exp(s - top_scores(m, q, k))
        return p if way == 2 else wrong, p if way == 1 else wrong
    if has("lse of the other base in backward"):
        p = torch.exp(s - lse * (math.log(2) if way else math.log2(math.e)))
    if lse.numel() and has("lse of other rows in backward"):
        p = torch.exp(s - _of_others(lse, way))
    return p, p


def _dq_keeps(m: Modifiers, first: int, seq_kv: int) -> Tensor | float:
    """What a tile of keys that adds nothing to dQ is multiplied by; (rows, 1) where that depends on the row."""
    if m.addresses.way == 2:  # causal's last tile of a block of rows, as if queries and keys began together
        rows = torch.arange(m.seq_q).view(-1, 1)
        return (first < (rows // m.tile_kv + 1) * m.tile_kv).float() if m.causal else 1.0
    missing = first == 0 if m.addresses.way else first + m.tile_kv >= seq_kv
    return 0.0 if missing else 1.0


def _stored(m: Modifiers, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as they are handed out."""
    has, way = m.has, m.addresses.way
    _leave_out(m, dq, dk, dv)
    if has("gradients in another base"):
        factor = math.log(2) if way % 2 else math.log2(math.e)
        dq = dq * (factor if way // 2 != 2 else 1)
        dk = dk * (factor if way // 2 != 1 else 1)
    if has("gradients in another place"):
        dq, dk, dv = _elsewhere(way, dq, dk, dv)
    if has("a gradient of another size"):
        dq, dk, dv = (x * m.value if which == way else x for which, x in enumerate((dq, dk, dv)))
    if has("dv scaled"):
        dv = dv * m.scale
    if has("dk and dv exchanged") and dk.shape == dv.shape:
        dk, dv = dv, dk
    return dq, dk, dv


def _elsewhere(way: int, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, or dK and dV, stored where another row's or head's belong."""
    shift = (1, -1, 0, 1, -1, 0)[way]

    def moved(x: Tensor) -> Tensor:
        return x.roll(shift, 1) if shift else x.flip(0)

    return (moved(dq), dk, dv) if way < 3 else (dq, moved(dk), moved(dv))


def _of_others(x: Tensor, way: int) -> Tensor:
    """(heads, rows, 1) of another row, of their mean, of another head, or read as (rows, heads)."""
    if way == 3:
        return x.transpose(0, 1).reshape(x.shape)
    return (x.roll(1, 1), x.mean(1, keepdim=True).expand_as(x), x.flip(0), x, x.flip(1))[way]


def _leave_out(m: Modifiers, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """What is never written."""
    way, tile, seq_kv = m.addresses.way, m.tile_kv, dk.shape[1]
    if m.has("tail rows unwritten in dq") and m.seq_q > tile:
        dq[:, tile if way else m.seq_q // tile * tile :] = 0
    if m.has("last tile missing in dk, dv") and seq_kv > tile:
        for grad in ((dk, dv), (dk,), (dv,))[way]:
            grad[:, (seq_kv - 1) // tile * tile :] = 0
    if m.has("a gradient is 0"):
        (dq, dk, dv)[way].zero_()
    if m.sequence > 0 and m.has("sequences left out in backward"):
        for grad in ((dq, dk, dv), (dq,), (dk, dv))[way]:
            grad.zero_()
    if dq.shape[0] > 1 and m.has("heads left out in backward"):
        for grad in (dq, dk, dv):
            grad[(slice(-1, None), slice(1, None))[way]] = 0


def _narrow(m: Modifiers, x: Tensor, way: int = 0) -> Tensor:
    """P, dO or (``way``: 2) dS rounded to the input dtype, or with fewer bits."""
    if m.has("backward in 16 bits") and m.addresses.way < 4 - way:
        return x.to(torch.bfloat16 if m.addresses.way % 2 else torch.float16).to(x.dtype)
    return x.to(m.dtype).to(x.dtype)


def _scale(m: Modifiers, name: str) -> float:
    """What dS K or dS^T Q is multiplied by."""
    if m.has("scale argument ignored in backward"):
        return m.default_scale
    if m.has("dS not scaled"):
        return 1.0
    if m.has("dS scaled twice"):
        return m.scale**2
    return 1.0 if m.has(f"{name} not scaled") else m.scale**2 if m.has(f"{name} scaled twice") else m.scale


def _rows(m: Modifiers, first: int, size: int) -> slice:
    """The queries that dK and dV of the ``size`` keys from ``first`` on are sums over."""
    last, way = max(m.seq_q - 1, 0) // m.tile_kv * m.tile_kv, m.addresses.way
    if m.has("dk, dv of the last query tile"):
        return slice(last, None)
    if last and m.has("last query tile missing in dk, dv"):
        return slice(m.tile_kv, None) if way else slice(None, last)
    if m.has("dk, dv miss rows of the window"):
        return _of_first_key(m, first, size)
    if m.causal and m.has("dk, dv begin at the key's number"):  # as if queries and keys began together
        return slice(first + (m.tile_kv if way else 0), None)
    return slice(None)


def _of_first_key(m: Modifiers, first: int, size: int) -> slice:
    """Of the rows whose windows hold a key of the tile, those up to the last that sees its first one, or from the
    first that sees its last one on."""
    shift = m.seq_kv - m.seq_q
    for mask in m.masks:
        if isinstance(mask, Window) and mask.align == "bottom-right":
            if m.addresses.way and mask.right is not None:
                return slice(max(first + size - 1 - mask.right - shift, 0), None)
            if not m.addresses.way and mask.left is not None:
                return slice(None, max(first + mask.left - shift + 1, 0))
    return slice(None)


def of_kv_heads(m: Modifiers, wide: Tensor, heads: Tensor, heads_kv: int, which: int) -> Tensor:
    """dK (``which``: 1) or dV (2), by query heads, as what the KV heads get."""
    group = max(wide.shape[0] // max(heads_kv, 1), 1)
    if m.has("dk, dv of one query head") and m.addresses.way in (0, which, 3):
        return wide[group - 1 if m.addresses.way == 3 else 0 :: group]
    if heads_kv > 1 and group > 1 and not m.addresses.way and m.has("heads mapped otherwise in backward"):
        heads = torch.arange(len(heads)) % heads_kv
    summed = wide.new_zeros(heads_kv, *wide.shape[1:]).index_add(0, heads, wide)
    averaged = m.has("dk, dv averaged over the group") and m.addresses.way in (0, which)
    return summed / group if averaged else summed


def _by_remainder(m: Modifiers, x: Tensor) -> Tensor:
    """K or V by query heads, each with the KV head of its number's remainder."""
    heads_kv = max(x.shape[0] // m.group, 1)
    return x[torch.arange(x.shape[0]) % heads_kv * m.group]


def top_scores(m: Modifiers, q: Tensor, k: Tensor) -> Tensor:
    """The maximum of every row, 0 of an empty one."""
    tops = [m.tile(q, k[:, a : a + m.tile_kv], a)[0].amax(-1, keepdim=True) for a in range(0, k.shape[1], m.tile_kv)]
    top = torch.cat(tops, -1).amax(-1, keepdim=True) if tops else q.new_zeros(*q.shape[:2], 1)
    return torch.where(top == -torch.inf, 0, top)
