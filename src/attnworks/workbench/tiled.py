"""A compact tiled attention with a switch for each fault: the kernel that ``mutants.py`` breaks.

Without a fault it is right, forward and backward: KV tiles with a running maximum and sum, partial results for every
``SPLIT`` keys merged by their LSE, P and dS rounded to the input dtype. It reads what a caller passes (strides,
offsets, page tables), not the case's values, and takes its own way from masks to tiles, so that a wrong oracle could
not hide behind it. Rows are not tiled: no fault needs it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnworks.scores import Bias
from attnworks.workbench.addresses import shares
from attnworks.workbench.modifiers import Modifiers, kept_channels


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
    parts = [_split(m, q, k[:, a : a + size], v[:, a : a + size], a) for a in range(0, k.shape[1], size or 1)]
    if sink is not None and not has("sink ignored"):
        factor = (m.scale, math.log2(math.e), math.log(2))[m.addresses.way] if has("sink scaled") else 1.0
        logits = (sink * factor).view(-1, 1).expand(rows).to(q.dtype)
        if has("sink counted twice"):
            logits = logits + math.log(len(parts) if m.addresses.way and parts else 2)
        if not has("sink outside the maximum"):
            parts.append((q.new_zeros(*rows, v.shape[-1]), logits))
    if not parts:
        return q.new_zeros(*rows, v.shape[-1]), q.new_full(rows, -torch.inf)
    lses = torch.stack([lse for _, lse in parts])
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0, top))
    total = weights.sum(0)
    if sink is not None and has("sink outside the maximum"):
        total = total + torch.exp(sink.view(-1, 1) - torch.where(top == -torch.inf, 0, top))
    lse = torch.where(total == 0, -torch.inf, top + torch.log(total))
    if has("sink only in the lse") and sink is not None:
        total = weights[:-1].sum(0)
    if has("splits averaged"):
        sizes = [min(size, k.shape[1] - a) for a in range(0, k.shape[1], size or 1)]
        alike = shares(sizes, len(parts), m.addresses.way).to(q.dtype)
        weights, total = alike.view(-1, 1, 1).expand_as(weights), torch.ones_like(total)
    if has("sink left out of the lse") and sink is not None:
        lse = torch.logsumexp(lses[:-1], 0) if len(parts) > 1 else torch.full_like(lse, -torch.inf)
    if has("splits summed"):
        weights, total = torch.ones_like(weights), torch.ones_like(total)
    out = sum((w[..., None] * part[0] for w, part in zip(weights, parts, strict=True)), q.new_zeros(()))
    empty = total if has("empty rows give NaN") else torch.where(total == 0, 1, total)
    return out / empty[..., None], lse


def _split(m: Modifiers, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The online softmax over the keys of one split."""
    has = m.has
    acc = q.new_zeros(*q.shape[:2], v.shape[-1])
    top = q.new_full((*q.shape[:2], 1), -5000.0 if has("finite initial maximum") else -torch.inf)
    total = torch.zeros_like(top)
    for first in range(0, k.shape[1], m.tile_kv):
        keys = slice(first, first + m.tile_kv)
        if _skipped(m, start + first, k[:, keys].shape[1]):
            continue
        s, _ = m.tile(q, k[:, keys], start + first)
        padding = m.tile_kv - s.shape[-1]
        # Always, or where the number of queries says that no tile needs a mask.
        if has("tail keys unmasked") and (m.addresses.way == 0 or (m.addresses.way == 3 and m.seq_q % m.tile_kv == 0)):
            s = torch.nn.functional.pad(s, (0, padding))
        if has("tail keys unmasked") and m.addresses.way == 2:  # with copies of the last key
            s = torch.cat((s[..., :-1], s[..., -1:] + math.log(1 + padding)), -1)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        if has("sum not rescaled") and m.addresses.way:  # the maximum follows only where it rises far
            new_top = torch.where(new_top > top + 8, new_top, top)
        if has("maximum not subtracted"):
            new_top = torch.zeros_like(new_top)
        safe = (
            new_top
            if has("hidden tiles give NaN") and not m.addresses.way
            else torch.where(new_top == -torch.inf, 0, new_top)
        )
        exp = torch.exp2 if has("exp2 for exp") and not m.addresses.way else torch.exp
        p = exp(s - safe)
        alpha = exp(safe - top) if has("rescaled upside down") and first > 0 else exp(top - safe)
        if has("rescaled by another exponent"):
            alpha = exp(
                (top - safe) * (math.log(2), math.log2(math.e), 1 / abs(m.scale), abs(m.scale))[m.addresses.way]
            )
        if has("sum and accumulator not rescaled"):
            alpha = torch.where(safe - top < (1.0 if m.addresses.way else torch.inf), 1.0, alpha)
        total = total * (1 if has("sum not rescaled") else alpha) + p.sum(-1, keepdim=True)
        total = total.to(m.dtype).to(total.dtype) if has("sum in low precision") else total
        acc = acc * (1 if has("accumulator not rescaled") or has("rescaled after adding") else alpha)
        acc = acc * (0 if has("accumulator overwritten by each tile") else 1)
        p = p[..., : v[:, keys].shape[1]]
        p = p * m.shown if has("masked after softmax") else p
        coarse = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)
        p = p.to(coarse[m.addresses.way] if has("probs in fp8") else m.dtype).to(p.dtype)
        low = has("fp16 accumulation") and m.dtype == torch.float16 and not m.addresses.way
        values = _values(m, v, keys)
        acc = _accumulate_fp16(acc, p, values) if low else acc + p @ values
        if has("fp16 accumulation") and m.addresses.way:
            acc = acc.to(torch.bfloat16 if m.addresses.way == 2 else m.dtype).to(acc.dtype)
        acc = acc * alpha if has("rescaled after adding") and first > 0 else acc
        top = new_top
    safe_total = total if _hidden_give_nan(m) else torch.where(total == 0, 1, total)
    out = acc if has("not divided by the sum") else acc / safe_total
    stand_in = -30000.0 if has("finite lse of empty rows") and not m.addresses.way else -torch.inf
    lse = torch.where(total == 0, stand_in, top + torch.log(total))
    return out, lse.squeeze(-1)


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
    )


def _in_tf32(x: Tensor) -> Tensor:
    """Rounded to the 10 stored bits of a TF32 mantissa."""
    return ((x.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


def _accumulate_fp16(acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """As a tensor core with fp16 accumulators does: 16 keys at a time."""
    for a in range(0, v.shape[1], 16):
        acc = (acc + p[..., a : a + 16] @ v[:, a : a + 16]).half().to(acc.dtype)
    return acc


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
    has = m.has
    delta = (d_out * out).sum(-1, keepdim=True)
    seen = torch.where(lse == -torch.inf, 0, d_lse)[..., None]
    delta = delta - seen * ((-1 if m.addresses.way else 0) if has("lse cotangent ignored") else 1)
    if has("delta missing"):
        delta = torch.zeros_like(delta)
    if has("delta of the wrong sign"):
        delta = -delta
    if has("delta of other rows") and delta.numel():
        delta = delta.mean(1, keepdim=True).expand_as(delta) if m.addresses.way else delta.roll(1, 1)
    safe = (
        lse[..., None] if has("empty rows leak into gradients") else torch.where(lse == -torch.inf, 0, lse)[..., None]
    )
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_biases = {place: torch.zeros_like(bias, dtype=q.dtype) for place, bias in m.biases.items()}
    recomputed = _top(m, q, k) if has("probs not normalised in backward") else safe
    if has("lse of the other base in backward"):
        recomputed = recomputed * (math.log(2) if m.addresses.way else math.log2(math.e))
    for first in range(0, k.shape[1], m.tile_kv):
        keys = slice(first, first + m.tile_kv)
        s, slopes = m.tile(q, k[:, keys], first, backward=True)
        p = torch.exp(s - recomputed)
        padding = m.tile_kv - s.shape[-1] if has("padding scored 0 in backward") else 0
        dp = d_out @ v[:, keys].transpose(-1, -2)
        rows = _rows(m)
        dv[:, keys] = _narrow(m, p[:, rows]).transpose(-1, -2) @ _narrow(m, d_out[:, rows])
        ds = (dp - delta) * (m.shown if has("dS without probs") else p)
        for place, (modifier, slope) in reversed(list(enumerate(zip(m.scores, slopes, strict=True)))):
            if isinstance(modifier, Bias):
                factor = m.scale if has("bias gradient scaled") else 0.0 if has("bias gradient missing") else 1.0
                d_biases[place][..., keys] = ds * factor
            elif slope is not None:
                ds = ds * slope
        ds = ds.to(torch.float8_e4m3fn).to(ds.dtype) if has("dS in fp8") else _narrow(m, ds, way=2)
        step = ds @ k[:, keys] * _scale(m, "dq")
        if padding:
            step = step + (torch.exp(0 - safe) * (0 - delta)) @ k.new_zeros(1, 1, k.shape[-1])
        missing = first == 0 if m.addresses.way else first + m.tile_kv >= k.shape[1]
        if not (missing and k.shape[1] > m.tile_kv and has("last tile missing in dq")):
            dq = step if has("dq overwritten by each tile") else dq + step
        dk[:, keys] = ds[:, rows].transpose(-1, -2) @ q[:, rows] * _scale(m, "dk")
    d_sink = None
    if sink is not None:
        d_sink = -(torch.exp(sink.view(-1, 1) - safe[..., 0]) * delta[..., 0]).sum(-1)
        if has("sink gradient missing"):
            d_sink = -d_sink if m.addresses.way else torch.zeros_like(d_sink)
    _leave_out(m, dq, dk, dv)
    if has("dv scaled"):
        dv = dv * m.scale
    if has("dk and dv exchanged") and dk.shape == dv.shape:
        dk, dv = dv, dk
    return dq, dk, dv, [d_biases[place] for place in m.biases], d_sink


def _leave_out(m: Modifiers, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """What is never written."""
    way, tile, seq_kv = m.addresses.way, m.tile_kv, dk.shape[1]
    if m.has("tail rows unwritten in dq") and m.seq_q > tile:
        dq[:, tile if way else m.seq_q // tile * tile :] = 0
    if m.has("last tile missing in dk, dv") and seq_kv > tile:
        for grad in ((dk, dv), (dk,), (dv,))[way]:
            grad[:, (seq_kv - 1) // tile * tile :] = 0


def _narrow(m: Modifiers, x: Tensor, way: int = 0) -> Tensor:
    """P, dO or (``way``: 2) dS rounded to the input dtype, or with fewer bits."""
    if m.has("backward in 16 bits") and m.addresses.way < 4 - way:
        return x.to(torch.bfloat16 if m.addresses.way % 2 else torch.float16).to(x.dtype)
    return x.to(m.dtype).to(x.dtype)


def _scale(m: Modifiers, name: str) -> float:
    """What dS K or dS^T Q is multiplied by."""
    if m.has("scale argument ignored in backward"):
        return m.default_scale
    return 1.0 if m.has(f"{name} not scaled") else m.scale**2 if m.has(f"{name} scaled twice") else m.scale


def _rows(m: Modifiers) -> slice:
    """The queries that dK and dV are sums over."""
    last = max(m.seq_q - 1, 0) // m.tile_kv * m.tile_kv
    if m.has("dk, dv of the last query tile"):
        return slice(last, None)
    if m.has("last query tile missing in dk, dv") and last:
        return slice(m.tile_kv, None) if m.addresses.way else slice(None, last)
    return slice(None)


def _top(m: Modifiers, q: Tensor, k: Tensor) -> Tensor:
    """The maximum of every row, 0 of an empty one."""
    tops = [m.tile(q, k[:, a : a + m.tile_kv], a)[0].amax(-1, keepdim=True) for a in range(0, k.shape[1], m.tile_kv)]
    top = torch.cat(tops, -1).amax(-1, keepdim=True) if tops else q.new_zeros(*q.shape[:2], 1)
    return torch.where(top == -torch.inf, 0, top)


def _of_kv_heads(m: Modifiers, wide: Tensor, heads: Tensor, heads_kv: int, which: int) -> Tensor:
    """dK (``which``: 1) or dV (2), by query heads, as what the KV heads get."""
    group = max(wide.shape[0] // max(heads_kv, 1), 1)
    if m.has("dk, dv of one query head") and m.addresses.way in (0, which, 3):
        return wide[group - 1 if m.addresses.way == 3 else 0 :: group]
    summed = wide.new_zeros(heads_kv, *wide.shape[1:]).index_add(0, heads, wide)
    averaged = m.has("dk, dv averaged over the group") and m.addresses.way in (0, which)
    return summed / group if averaged else summed


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
        wide = [q_copy, k.to(compute)[ctx.heads], v.to(compute)[heads_v]]
        if m.has("K and V exchanged") and k.shape == v.shape:
            wide[1], wide[2] = wide[2], wide[1]
        if q.dtype != torch.bfloat16 and m.has("inputs in bf16"):
            wide = [x.bfloat16().to(compute) for x in wide]
        if m.has("products in tf32") and q.dtype == torch.float32:
            wide = [_in_tf32(x) for x in wide]
        out, lse = forward(m, wide[0], wide[1], wide[2], None if sink is None else sink.to(compute))
        ctx.m, ctx.sink, ctx.dtypes, ctx.heads_kv = m, sink, (q.dtype, k.dtype, v.dtype), k.shape[0]
        if m.has("tail rows unwritten") and (m.seq_q > m.tile_kv or m.addresses.way):
            out[:, m.seq_q // m.tile_kv * m.tile_kv :] = 0
        if m.leaves_out(v.shape[-1]) and 3 < m.addresses.way < 8:
            out[..., kept_channels(v.shape[-1], m.addresses.way) :] = 0
        if v.shape[-1] > q.shape[-1] and m.has("channels left out") and m.addresses.way == 8:
            out[..., q.shape[-1] :] = 0
        if q.dtype == torch.float32 and m.has("output in 16 bits"):
            out = out.to(torch.float16 if m.addresses.way else torch.bfloat16)
        rounded = out.to(q.dtype)
        ctx.saved = (*wide, rounded.to(compute), lse)
        if m.has("lse in base 2"):
            return rounded, lse / torch.log(torch.tensor(2.0))
        if m.has("lse without the maximum"):
            return rounded, lse - _top(m, wide[0], wide[1])[..., 0]
        if m.has("lse is the maximum"):
            return rounded, _top(m, wide[0], wide[1])[..., 0]
        if m.has("lse in low precision"):
            return rounded, lse.to(torch.float16 if m.addresses.way else torch.bfloat16).to(lse.dtype)
        if m.has("finite lse of empty rows") and m.addresses.way:
            return rounded, torch.where(lse == -torch.inf, (0.0, torch.inf, torch.nan)[m.addresses.way - 1], lse)
        return rounded, torch.zeros_like(lse) if m.has("lse not written") else lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        m, sink = ctx.m, ctx.sink
        q, k, v, out, lse = ctx.saved
        # What autograd hands over for an unused output is zeros.
        d_out, d_lse = (grad.to(q.dtype) for grad in grads)
        wide_sink = None if sink is None else sink.to(q.dtype)
        dq, dk, dv, d_biases, d_sink = backward(m, q, k, v, wide_sink, out, lse, d_out, d_lse)
        narrow = [_of_kv_heads(m, wide, ctx.heads, ctx.heads_kv, n) for n, wide in enumerate((dk, dv), 1)]
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
