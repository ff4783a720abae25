"""A compact tiled attention with a switch for each fault: the kernel that ``mutants.py`` breaks.

Without a fault it is right, forward and backward: KV tiles with a running maximum and sum, partial results for every
``SPLIT`` keys merged by their LSE, P and dS rounded to the input dtype. It reads what a caller passes (strides,
offsets, page tables), not the case's values, and takes its own way from masks to tiles, so that a wrong oracle could
not hide behind it. Rows are not tiled: no fault needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnworks.workbench.addresses import shares
from attnworks.workbench.misplaced import next_channels
from attnworks.workbench.modifiers import Modifiers, kept_channels
from attnworks.workbench.reported import reported
from attnworks.workbench.splits import split_spans
from attnworks.workbench.tiled_backward import backward, of_kv_heads


def forward(m: Modifiers, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) in the compute dtype, from partial results merged by LSE. k and v have heads_q heads."""
    has = m.has
    rows = q.shape[:2]
    if has("softmax over queries"):
        s, _ = m.tile(q, k, 0)
        return torch.softmax(s, 1).nan_to_num(0) @ v, torch.logsumexp(s, -1)
    # Partial results are merged in fp32, which would hide what fp16 accumulators lose over many keys.
    whole = has("fp16 accumulation") or has("sum in low precision") or not m.split_kv
    size = k.shape[1] if whole else m.split_kv if m.split_kv > 0 else -(k.shape[1] // m.split_kv)
    spans = split_spans(has, m.addresses.way, k.shape[1], size, m.split_kv)
    parts = [_split(m, q, k[:, a:b], v[:, a:b], a) for a, b in spans]
    tops = m.tops
    if sink is not None and not has("sink ignored"):
        logits = _sink_logits(m, sink, len(parts)).expand(rows).to(q.dtype)
        if not has("sink outside the maximum"):
            held = v[:, :1].expand(*rows, -1) if v.shape[1] and has("sink has a value") else q.new_zeros(1)
            parts.append((held.expand(*rows, v.shape[-1]), logits))
    if not parts:
        left = torch.nan if has("empty rows give NaN") else 0.0
        finite = (
            (-30000.0, 0.0, torch.inf, torch.nan)[m.addresses.way] if has("finite lse of empty rows") else -torch.inf
        )
        return q.new_full((*rows, v.shape[-1]), left), q.new_full(rows, finite)
    lses = torch.stack([lse for _, lse in parts])
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0, top))
    total = weights.sum(0)
    if sink is not None and has("sink without the maximum"):
        held = sink.view(-1, 1)
        total = weights[:-1].sum(0) + (held if m.addresses.way else torch.exp(held))  # or taken for a weight
    if sink is not None and has("sink outside the maximum"):
        total = total + torch.exp(sink.view(-1, 1) - torch.where(top == -torch.inf, 0, top))
    lse = torch.where(total == 0, -torch.inf, top + torch.log(total))
    if has("sink only in the lse") and sink is not None:
        if not m.addresses.way and len(parts) > 1:
            weights = torch.cat((torch.softmax(lses[:-1], 0).nan_to_num(0), 0 * weights[-1:]))
        total = weights[:-1].sum(0)
    if len(parts) > 1 and (has("a split left out") or has("splits merged by another weight")):
        weights, total = _other_weights(m, lses, tops), torch.ones_like(total)
        if has("a split left out") and m.addresses.way > 3:  # in the LSE as well
            lse = torch.where(_kept(m.addresses.way, len(lses), len(tops)).view(-1, 1, 1), lses, -torch.inf)
            lse = torch.logsumexp(lse, 0)
        elif m.addresses.way == 5:  # accumulators by their maxima, sums as they are
            maxima = torch.stack([*tops, *lses[len(tops) :]])
            highest = torch.where(top == -torch.inf, 0, maxima.amax(0))
            weights, total = torch.exp(lses - highest), torch.exp(lses - maxima).nan_to_num(0).sum(0)
            lse = torch.where(total == 0, -torch.inf, highest + torch.log(total))
    if has("splits averaged"):
        sizes = [b - a for a, b in spans]
        alike = shares(sizes, len(parts), m.addresses.way).to(q.dtype)
        weights, total = alike.view(-1, 1, 1).expand_as(weights), torch.ones_like(total)
    if has("partial results in 16 bits"):
        kept = torch.bfloat16 if m.addresses.way else torch.float16
        parts = [(out.to(kept).to(out.dtype), lse_of) for out, lse_of in parts]
    if m.addresses.way and has("sink left out of the lse") and sink is not None:  # of rows without keys
        no_keys = torch.stack([*lses[:-1], torch.full_like(lse, -torch.inf)]).amax(0) == -torch.inf
        lse = torch.where(no_keys, -torch.inf, lse)
    elif has("sink left out of the lse") and sink is not None:
        lse = torch.logsumexp(lses[:-1], 0) if len(parts) > 1 else torch.full_like(lse, -torch.inf)
    if has("splits summed"):
        weights, total = torch.ones_like(weights), torch.ones_like(total)
    out = sum((w[..., None] * part[0] for w, part in zip(weights, parts, strict=True)), q.new_zeros(()))
    empty = total if has("empty rows give NaN") else torch.where(total == 0, 1, total)
    return out / empty[..., None], lse


def _sink_logits(m: Modifiers, sink: Tensor, splits: int) -> Tensor:
    """(heads, 1)."""
    has = m.has
    factor = (m.scale, math.log2(math.e), math.log(2), -1.0)[m.addresses.way] if has("sink scaled") else 1.0
    if has("sink rounded"):
        sink = sink.to(torch.bfloat16).to(sink.dtype)
    logits = (sink * factor).view(-1, 1)
    if has("sink counted twice"):
        logits = logits + math.log(splits if m.addresses.way and splits else 2)
    return logits


def _split(m: Modifiers, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The online softmax over the keys of one split."""
    has = m.has
    acc = q.new_zeros(*q.shape[:2], v.shape[-1])
    begin = (-5000.0, 0.0, -50.0)[m.addresses.way] if has("finite initial maximum") else -torch.inf
    top = q.new_full((*q.shape[:2], 1), begin)
    total = torch.zeros_like(top)
    for first in range(0, k.shape[1], m.tile_kv):
        keys = slice(first, first + m.tile_kv)
        if _skipped(m, start + first, k[:, keys].shape[1]):
            continue
        s, _ = m.tile(q, _keys(m, k, keys), start + first)
        if first > 0 and has("running maximum rounded"):  # where it lies between tiles
            top = top.to(torch.bfloat16 if m.addresses.way else torch.float16).to(top.dtype)
        padding = m.tile_kv - s.shape[-1]
        # Always, or where the number of queries says that no tile needs a mask.
        if has("tail keys unmasked") and (m.addresses.way == 0 or (m.addresses.way == 3 and m.seq_q % m.tile_kv == 0)):
            s = torch.nn.functional.pad(s, (0, padding))
        if has("tail keys unmasked") and m.addresses.way == 2:  # with copies of the last key
            s = torch.cat((s[..., :-1], s[..., -1:] + math.log(1 + padding)), -1)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        if has("maximum over hidden keys"):
            new_top = torch.maximum(new_top, m.unmasked.amax(-1, keepdim=True).expand_as(top))
        if has("sum not rescaled") and m.addresses.way:  # the maximum follows only where it rises far
            new_top = torch.where(new_top > top + 8, new_top, top)
        if has("maximum shared by rows"):
            new_top = new_top.amax((0, 1) if m.addresses.way else 1, keepdim=True).expand_as(top)
        if has("maximum not subtracted"):
            new_top = top if m.addresses.way and first > 0 else new_top if m.addresses.way else 0 * new_top
        safe = (
            new_top
            if has("hidden tiles give NaN") and not m.addresses.way
            else torch.where(new_top == -torch.inf, 0, new_top)
        )
        exp: Callable[[Tensor], Tensor] = torch.exp2 if has("exp2 for exp") and not m.addresses.way else torch.exp
        exp = _approximated(m.addresses.way) if has("exp approximated") else exp
        p = exp(s - safe)
        alpha = exp(safe - top) if has("rescaled upside down") and first > 0 else exp(top - safe)
        if has("rescaled by another exponent"):
            alpha = exp(
                (top - safe) * (math.log(2), math.log2(math.e), 1 / abs(m.scale), abs(m.scale))[m.addresses.way]
            )
        if first > 0 and has("correction rounded"):
            alpha = alpha.to(torch.bfloat16 if m.addresses.way else torch.float16).to(alpha.dtype)
        if has("sum and accumulator not rescaled"):
            alpha = torch.where(safe - top < (1.0 if m.addresses.way else torch.inf), 1.0, alpha)
        share = p.sum(-1, keepdim=True)
        if has("sum of part of the keys"):
            lanes = torch.arange(p.shape[-1])
            held = (lanes % 2 == 0, lanes % 2 == 1, lanes < m.tile_kv // 2, lanes % 8 < 2)[m.addresses.way]
            share = (p * held).sum(-1, keepdim=True)
        if has("a tile counted twice") and _missing(m, start + first, p.shape[-1]):
            p, share = 2 * p, 2 * share
        if has("a tile missing in the sum"):
            share = share * (not _missing(m, start + first, p.shape[-1]))
        total = total * (1 if has("sum not rescaled") else 0 if has("sum overwritten by each tile") else alpha) + share
        if has("sum in low precision"):
            total = total.to((m.dtype, torch.float16, torch.bfloat16)[m.addresses.way]).to(total.dtype)
        acc = acc * (1 if has("accumulator not rescaled") or has("rescaled after adding") else alpha)
        acc = acc * (0 if has("accumulator overwritten by each tile") else 1)
        p = p[..., : v[:, keys].shape[1]]
        p = p * m.shown if has("masked after softmax") else p
        coarse = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16)
        p = p.to(coarse[m.addresses.way] if has("probs in fp8") else m.dtype).to(p.dtype)
        if has("a tile missing in the accumulator"):
            p = p * (not _missing(m, start + first, p.shape[-1]))
        low = has("fp16 accumulation") and m.dtype == torch.float16 and not m.addresses.way
        values = _values(m, v, keys)
        acc = _accumulate_fp16(acc, p, values) if low else acc + p @ values
        if has("fp16 accumulation") and m.addresses.way:
            acc = acc.to(torch.bfloat16 if m.addresses.way == 2 else m.dtype).to(acc.dtype)
        acc = acc * alpha if has("rescaled after adding") and first > 0 else acc
        top = new_top
    m.tops.append(top.squeeze(-1))
    if has("one added to the sum"):
        total = total + (1.0, torch.exp(-torch.where(top == -torch.inf, 0, top)), 1e-3)[m.addresses.way]
    if has("sum of other rows") and m.seq_q > 1:
        total = _other_rows(m, total)
    if m.seq_q and has("state of the rows before"):
        acc, top, total = _with_rows_before(m, acc, top, total)
    safe_total = total if _hidden_give_nan(m) else torch.where(total == 0, 1, total)
    out = acc if has("not divided by the sum") else acc / safe_total
    stand_in = -30000.0 if has("finite lse of empty rows") and not m.addresses.way else -torch.inf
    lse = torch.where(total == 0, stand_in, top + torch.log(total))
    return out, lse.squeeze(-1)


def _keys(m: Modifiers, k: Tensor, keys: slice) -> Tensor:
    """The rows of K that a tile's scores are of."""
    if keys.start > 0 and m.has("K of another tile"):
        back = (m.tile_kv, keys.start)[m.addresses.way]  # the tile before, or the first one
        return k[:, torch.arange(k.shape[1])[keys] - back]
    return k[:, keys]


def _missing(m: Modifiers, first: int, size: int) -> bool:
    """Whether a tile is the one that does not count: the last, the first, one that is not whole, every other one."""
    last = first + size >= m.limit
    return (last and first > 0, first == 0, size < m.tile_kv, first // m.tile_kv % 2 == 1)[m.addresses.way]


def _with_rows_before(m: Modifiers, acc: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of each tile of rows begun with what the tile before left: its maximum and sum, or its accumulator
    too; or that of the head before."""
    way, count = m.addresses.way, m.seq_q
    sizes = (acc.shape[0], -(-count // m.tile_kv), m.tile_kv)

    def tiles(x: Tensor, fill: float) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, sizes[1] * sizes[2] - count), value=fill)
        return padded.view(*sizes, x.shape[-1])

    dim = 0 if way == 1 else 1
    lse = tiles(top + torch.log(total), -torch.inf)
    joined = lse.logcumsumexp(dim)
    new_top = torch.where(joined == -torch.inf, 0, joined)
    weight = torch.exp(lse - new_top)
    share = tiles(acc / torch.where(total == 0, 1, total), 0.0) * weight
    if way == 2:
        kept = [share.select(dim, 0)]
        for n in range(1, share.shape[dim]):
            fade = torch.exp(joined.select(dim, n - 1) - new_top.select(dim, n))
            kept.append(share.select(dim, n) + kept[-1] * fade)
        share = torch.stack(kept, dim)
    whole = [x.flatten(1, 2)[:, :count] for x in (share, new_top, (joined > -torch.inf).to(acc.dtype))]
    return whole[0], whole[1], whole[2]


def _other_rows(m: Modifiers, total: Tensor) -> Tensor:
    if m.addresses.way == 1:  # of the first row of a tile
        rows = torch.arange(m.seq_q)
        return total[:, rows - rows % 16]
    return (total.roll(1, 1), total, total.amax(1, keepdim=True).expand_as(total))[m.addresses.way]


def _approximated(way: int) -> Callable[[Tensor], Tensor]:
    """exp by 2^n times a polynomial for the rest: of degree 1, 2 or 3, or as the bits of a float are made."""

    def exp(x: Tensor) -> Tensor:
        scaled = (x * math.log2(math.e)).clamp(min=-1000)
        whole = scaled.floor()
        rest = scaled - whole
        terms = (1 + rest, 1 + rest * (0.6565 + 0.3435 * rest), 1 + rest * (0.6951 + rest * (0.2276 + 0.0773 * rest)))
        return torch.where(x == -torch.inf, 0, torch.exp2(whole) * terms[way])

    return exp


def _other_weights(m: Modifiers, lses: Tensor, tops: list[Tensor]) -> Tensor:
    """What partial results weigh where one is left out, or where weights are made of something else than their LSE."""
    way = m.addresses.way
    if m.has("a split left out"):
        lses = torch.where(_kept(way, len(lses), len(tops)).view(-1, 1, 1), lses, -torch.inf)
    elif way == 0:
        lses = torch.stack([*tops, *lses[len(tops) :]])  # by their maxima alone
    elif way > 2:  # one after the other, by an LSE of what was merged that is the first one's or the largest
        return _in_turn(lses, way == 4)
    else:
        lses = lses * (math.log2(math.e), math.log(2))[way - 1]  # exp of what is in base 2, or the other way round
    return torch.softmax(lses, 0).nan_to_num(0)


def _kept(way: int, count: int, splits: int) -> Tensor:
    """Which of ``count`` partial results, the first ``splits`` of them of keys, are not left out."""
    keep = torch.ones(count, dtype=torch.bool)
    paired = 1 << max(splits.bit_length() - 1, 0)  # what a tree of pairs keeps that has no place for an odd one
    last = slice(splits - 1, splits)
    lost = (slice(count - 1, None), slice(0, 1), slice(1, 2), slice(2, None), slice(paired, splits), last)
    keep[lost[way]] = False
    return keep


def _in_turn(lses: Tensor, largest: bool) -> Tensor:
    weights, merged = [torch.ones_like(lses[0])], lses[0]
    for lse in lses[1:]:
        share = torch.sigmoid((lse - merged).nan_to_num(0, torch.inf, -torch.inf))
        weights = [*(w * (1 - share) for w in weights), share]
        merged = torch.maximum(merged, lse) if largest else merged
    return torch.stack(weights)


def _values(m: Modifiers, v: Tensor, keys: slice) -> Tensor:
    """The rows of V that P of a tile's keys meets."""
    if m.has("V of another tile"):
        back = -1 if m.addresses.way else min(m.tile_kv, keys.start)
        return v[:, (torch.arange(v.shape[1])[keys] - back).clamp(max=v.shape[1] - 1)]
    return v[:, keys]


def _hidden_give_nan(m: Modifiers) -> bool:
    return m.has("hidden tiles give NaN") and not m.addresses.way


def _skipped(m: Modifiers, first: int, size: int) -> bool:
    """Whether a fault leaves out the tile of ``size`` keys from ``first`` on."""
    return (
        (m.has("first tile only") and first > 0)
        or (m.has("last tile only") and first + size < m.limit)
        or (m.has("last partial tile dropped") and not m.addresses.way and size < m.tile_kv)
        or (m.has("last whole tile dropped") and 0 < first == m.limit - m.tile_kv)
    )


def _in_tf32(x: Tensor, cut: bool) -> Tensor:
    """Rounded, or ``cut`` as matrix units do, to the 10 stored bits of a TF32 mantissa."""
    return (
        ((x.float().contiguous().view(torch.int32) + (0 if cut else 0x1000)) & ~0x1FFF).view(torch.float32).to(x.dtype)
    )


def _accumulate_fp16(acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """As a tensor core with fp16 accumulators does: 16 keys at a time."""
    for a in range(0, v.shape[1], 16):
        acc = (acc + p[..., a : a + 16] @ v[:, a : a + 16]).half().to(acc.dtype)
    return acc


def _unwritten(m: Modifiers) -> Tensor:
    """The rows of the output that are not stored: those of the last tile, of one that is not whole, the last one, some
    of every few, those past the tiles of the first sequence, or a last tile that is whole."""
    rows, way = torch.arange(m.seq_q), m.addresses.way
    if way == 3:
        period, held = divmod(round(m.value), 1000)
        return rows % period >= held
    if way == 4:
        return rows >= -(-m.first_rows // m.tile_kv) * m.tile_kv
    if way == 5:
        return (rows >= m.seq_q - m.tile_kv) & (m.seq_q % m.tile_kv == 0) & (m.seq_q > m.tile_kv)
    return rows >= (m.seq_q - 1 if way == 2 else m.seq_q // m.tile_kv * m.tile_kv)


class Attend(torch.autograd.Function):
    """forward() and backward() above for one sequence: (m, q, k, v, sink, *biases) -> (out, lse), with the rounding to
    the input dtype and the mapping of query heads to KV heads."""

    @staticmethod
    def forward(ctx: Any, m: Modifiers, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *biases: Tensor) -> Any:
        m.biases = dict(zip(m.biases, biases, strict=True))
        compute = torch.promote_types(q.dtype, torch.float32)
        ctx.heads, heads_v = m.addresses.heads(q.shape[0], k.shape[0])
        # Copies, because a matrix product's bits may depend on how its operands lie in memory.
        q_copy = q.to(compute).clone(memory_format=torch.contiguous_format)
        if q.shape[-1] % 64 and m.has("channels of the next row"):
            q_copy, k = (next_channels(x, m.addresses.way) for x in (q_copy, k))
        wide = [q_copy, k.to(compute)[ctx.heads], v.to(compute)[heads_v]]
        if m.has("K and V exchanged") and k.shape == v.shape:
            wide[1], wide[2] = wide[2], wide[1]
        if q.dtype != torch.bfloat16 and m.has("inputs in bf16"):
            coarse, which = ((torch.bfloat16, torch.float16)[m.addresses.way % 2], (2, 0, 1)[m.addresses.way // 2])
            wide = [x.to(coarse).to(compute) if which in (2, n == 2) else x for n, x in enumerate(wide)]
        if m.has("products in tf32") and q.dtype == torch.float32:
            way = m.addresses.way
            wide = [_in_tf32(x, way == 3) if way in (0, 1 + (n == 2), 3) else x for n, x in enumerate(wide)]
        out, lse = forward(m, wide[0], wide[1], wide[2], None if sink is None else sink.to(compute))
        ctx.m, ctx.sink, ctx.dtypes, ctx.heads_kv = m, sink, (q.dtype, k.dtype, v.dtype), k.shape[0]
        if m.seq_q > k.shape[1] and m.has("rows end with the keys"):
            out[:, k.shape[1] :] = 0
        if m.has("scale of the output"):
            out = out * m.scale
        if m.has("output of another size"):
            out = out * m.value
        if m.has("tail rows unwritten") and (m.seq_q > m.tile_kv or m.addresses.way):
            out[:, _unwritten(m)] = 0
        if m.leaves_out(v.shape[-1]) and 3 < m.addresses.way < 8:
            out[..., kept_channels(v.shape[-1], m.addresses.way) :] = 0
        if v.shape[-1] > q.shape[-1] and m.has("channels left out") and m.addresses.way == 8:
            out[..., q.shape[-1] :] = 0
        if q.dtype == torch.float32 and m.has("output in 16 bits"):
            out = out.to(torch.float16 if m.addresses.way else torch.bfloat16)
        rounded = out.to(q.dtype)
        # Without their history: an output that its own node keeps is never freed.
        ctx.saved = (*wide, rounded.detach().to(compute), lse.detach())
        return rounded, reported(m, wide[0], wide[1], lse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        m, sink = ctx.m, ctx.sink
        q, k, v, out, lse = ctx.saved
        # What autograd hands over for an unused output is zeros.
        d_out, d_lse = (grad.to(q.dtype) for grad in grads)
        wide_sink = None if sink is None else sink.to(q.dtype)
        dq, dk, dv, d_biases, d_sink = backward(m, q, k, v, wide_sink, out, lse, d_out, d_lse)
        narrow = [of_kv_heads(m, wide, ctx.heads, ctx.heads_kv, n) for n, wide in enumerate((dk, dv), 1)]
        dtypes = ctx.dtypes
        d_sink = None if d_sink is None or sink is None else d_sink.to(sink.dtype)
        return (
            None,
            dq.to(dtypes[0]),
            narrow[0].to(dtypes[1]),
            narrow[1].to(dtypes[2]),
            d_sink,
            *(d.float() for d in d_biases),
        )
