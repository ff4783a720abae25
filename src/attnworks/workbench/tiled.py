"""A compact tiled attention with a switch for each fault: the kernel that ``mutants.py`` breaks.

Without a fault it is right, forward and backward: KV tiles with a running maximum and sum, partial results for every
``SPLIT`` keys merged by their LSE, P and dS rounded to the input dtype. It reads what a caller passes (strides,
offsets, page tables), not the case's values, and takes its own way from masks to tiles, so that a wrong oracle could
not hide behind it. Rows are not tiled: no fault needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import AllOf, Causal, Window
from attnworks.scores import ALiBi, Bias, Sink, Softcap
from attnworks.workbench.addresses import Addresses, next_sequence, of_heads_first, shares

TILE = 32
SPLIT = 96
Has = Callable[[str], bool]
HIDDEN = {"hidden scores are -10000": -1e4, "empty rows give the mean": -1e9, "hidden scores are 0": 0.0}


@dataclass
class Modifiers:
    """What turns scale · q k into scores, for one sequence, a tile of keys at a time."""

    has: Has
    scale: float
    masks: list[Any]
    scores: tuple[Any, ...]
    sequence: int
    seq_q: int
    seq_kv: int
    limit: int  # keys of the sequence; more may have been loaded
    tile_kv: int = TILE
    split_kv: int = SPLIT  # keys of a partial result; 0 for one of all keys, -n for n equal ones
    biases: dict[int, Tensor] = field(default_factory=dict)  # by place among the scores, (heads_q, seq_q, seq_kv)
    addresses: Addresses = field(default_factory=lambda: Addresses(lambda fault: False, 0, TILE))
    shown: Tensor = field(default_factory=lambda: torch.empty(0))  # what the masks let through of the last tile

    def tile(self, q: Tensor, k: Tensor, first: int, backward: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """Scores (heads_q, seq_q, keys) of the keys from ``first`` on, hidden ones -inf, and each modifier's slope."""
        has = self.has
        i = torch.arange(self.seq_q).view(1, -1, 1)
        j = torch.arange(first, first + k.shape[1]).view(1, 1, -1)
        s = q @ k.transpose(-1, -2)
        if not has("softcap before scale"):
            s = s * self.scale
        if has("scale missing"):
            s = s / self.scale
        if has("scale twice"):
            s = s * self.scale
        if has("scores rounded"):
            s = s.to(self.dtype).to(s.dtype)
        if has("NaN swallowed"):
            s = s.nan_to_num(0)
        shown = self.shown = self._shown(i, j, backward)
        if has("masked after softmax") and not backward:
            shown = (j < self.limit).expand_as(shown)
        if has("softcap after mask"):
            s = torch.where(shown, s, -torch.inf)
        slopes: list[Tensor | None] = []
        for place, modifier in enumerate(self.scores):
            s, slope = self._modify(modifier, place, s, i, j)
            slopes.append(slope)
        if has("softcap before scale"):
            s = s * self.scale
        hidden = next((value for fault, value in HIDDEN.items() if has(fault)), -torch.inf)
        if not has("softcap after mask"):
            s = torch.where(shown, s, hidden)
        return s, slopes

    dtype: torch.dtype = torch.float32

    def _modify(self, modifier: Any, place: int, s: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor | None]:
        has = self.has
        if isinstance(modifier, Softcap):
            if has("softcap ignored"):
                return s, None
            x = s / modifier.cap
            if has("softcap by exponentials"):
                e = torch.exp(2 * x)
                ratio = (e - 1) / (e + 1)
            else:
                ratio = torch.tanh(x)
            return modifier.cap * ratio, None if has("softcap slope missing") else 1 - ratio * ratio
        if isinstance(modifier, ALiBi):
            slopes = modifier.slopes if modifier.slopes.dim() == 1 else modifier.slopes[self.sequence]
            if has("alibi of the wrong head"):
                slopes = modifier.slopes.view(-1, len(slopes))[0] if self.addresses.way else slopes.flip(0)
            shift = 0 if has("alibi from the first key") else self.seq_kv - self.seq_q
            behind = i + shift - j
            penalty = slopes.view(-1, 1, 1) * (behind if has("alibi distance signed") else behind.abs())
            return (s + penalty if has("alibi sign") else s - penalty), None
        if isinstance(modifier, Bias):
            bias = self.biases[place][..., int(j.min()) : int(j.max()) + 1].to(s.dtype)
            if has("bias ignored"):
                return s, None
            if has("bias of head 0"):
                bias = bias[:1]
            if has("bias scaled"):
                bias = bias * self.scale
            return s + bias, None
        if isinstance(modifier, Sink):
            return s, None
        h = torch.arange(s.shape[0]).view(-1, 1, 1)
        return modifier(s, torch.tensor(self.sequence), h, i, j).to(s.dtype), None

    def _shown(self, i: Tensor, j: Tensor, backward: bool) -> Tensor:
        has = self.has
        end = self.limit - (1 if has("last key dropped") and not self.addresses.way else 0)
        shown = ((j < end) & (j > 0 if has("first key dropped") else j >= 0)).expand(1, self.seq_q, -1)
        if backward and has("mask missing in backward"):
            return shown
        for mask in self.masks:
            shift = self.seq_kv - self.seq_q
            if isinstance(mask, Tensor):
                whole = mask.expand(1, 1, 1, 1) if mask.dim() == 0 else mask[(None,) * (4 - mask.dim())]
                own = whole[self.sequence if whole.shape[0] > 1 else 0]
                if has("boolean mask ignored"):
                    continue
                if has("boolean mask inverted"):
                    own = ~own
                if has("mask of head 0"):
                    turned = [of_heads_first(whole, self.sequence, turned) for turned in (False, True)]
                    own = (own[:1], whole[0], *turned, next_sequence(whole, self.sequence))[self.addresses.way]
                own = own.expand(-1, self.seq_q if own.shape[1] == 1 else -1, self.seq_kv if own.shape[2] == 1 else -1)
                shown = shown & own[:, : self.seq_q, int(j.min()) : int(j.max()) + 1]
            elif isinstance(mask, Causal | Window):
                if mask.align == "top-left" and not has("aligned bottom-right"):
                    shift = 0
                shift = 0 if has("aligned top-left") else shift
                left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
                shown = shown & self._bounds(i + shift, j, left, right, isinstance(mask, Causal))
            else:
                h = torch.arange(1).view(-1, 1, 1)
                shown = shown & mask(torch.tensor(self.sequence), h, i, j)
        return shown

    def _bounds(self, origin: Tensor, j: Tensor, left: int | None, right: int | None, causal: bool) -> Tensor:
        has = self.has
        shown = torch.ones_like(origin + j, dtype=torch.bool)
        if causal:
            off = -1 if has("causal hides itself") else 1 if has("causal shows the next") else 0
            if has("causal ignored"):
                return shown
            if has("causal by tile"):
                return origin // self.tile_kv >= j // self.tile_kv
            if has("diagonal tile skipped"):
                return (j <= origin) & ((j // self.tile_kv < origin // self.tile_kv) | (origin < self.tile_kv))
            if has("causal upside down"):
                return j >= origin
            return j <= origin + off
        off = -1 if has("window one short") else 1 if has("window one long") else 0
        if left is not None and not has("window without left end"):
            shown = shown & (j >= origin - left - off)
        if right is not None and not has("window without right end"):
            shown = shown & (j <= origin + right + (1 if has("window one long on the right") else 0))
        return shown


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
        logits = (sink * m.scale if has("sink scaled") else sink).view(-1, 1).expand(rows).to(q.dtype)
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
        if has("tail keys unmasked") and not m.addresses.way:
            s = torch.nn.functional.pad(s, (0, m.tile_kv - s.shape[-1]))
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
        exp = torch.exp2 if has("exp2 for exp") else torch.exp
        p = exp(s - safe)
        alpha = exp(safe - top) if has("rescaled upside down") and first > 0 else exp(top - safe)
        total = total * (1 if has("sum not rescaled") else alpha) + p.sum(-1, keepdim=True)
        total = total.to(m.dtype).to(total.dtype) if has("sum in low precision") else total
        acc = acc * (1 if has("accumulator not rescaled") or has("rescaled after adding") else alpha)
        acc = acc * (0 if has("accumulator overwritten by each tile") else 1)
        p = p[..., : v[:, keys].shape[1]]
        p = p * m.shown if has("masked after softmax") else p
        p = p.to(torch.float8_e4m3fn).to(p.dtype) if has("probs in fp8") else p.to(m.dtype).to(p.dtype)
        low = has("fp16 accumulation") and m.dtype == torch.float16
        acc = _accumulate_fp16(acc, p, v[:, keys]) if low else acc + p @ v[:, keys]
        acc = acc * alpha if has("rescaled after adding") and first > 0 else acc
        top = new_top
    safe_total = total if _hidden_give_nan(m) else torch.where(total == 0, 1, total)
    out = acc if has("not divided by the sum") else acc / safe_total
    lse = torch.where(total == 0, -30000.0 if has("finite lse of empty rows") else -torch.inf, top + torch.log(total))
    return out, lse.squeeze(-1)


def _hidden_give_nan(m: Modifiers) -> bool:
    return m.has("hidden tiles give NaN") and not m.addresses.way


def _skipped(m: Modifiers, first: int, size: int) -> bool:
    """Whether a fault leaves out the tile of ``size`` keys from ``first`` on."""
    return (
        (m.has("first tile only") and first > 0)
        or (m.has("last tile only") and first + size < m.limit)
        or (m.has("last partial tile dropped") and size < m.tile_kv)
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
    if not has("lse cotangent ignored"):
        delta = delta - torch.where(lse == -torch.inf, 0, d_lse)[..., None]
    if has("delta missing"):
        delta = torch.zeros_like(delta)
    if has("delta of the wrong sign"):
        delta = -delta
    safe = (
        lse[..., None] if has("empty rows leak into gradients") else torch.where(lse == -torch.inf, 0, lse)[..., None]
    )
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_biases = {place: torch.zeros_like(bias, dtype=q.dtype) for place, bias in m.biases.items()}
    unnormalised = _top(m, q, k) if has("probs not normalised in backward") else safe
    for first in range(0, k.shape[1], m.tile_kv):
        keys = slice(first, first + m.tile_kv)
        if has("last tile missing in dq") and first > 0 and first + m.tile_kv >= k.shape[1]:
            continue
        s, slopes = m.tile(q, k[:, keys], first, backward=True)
        p = torch.exp(s - unnormalised)
        padding = m.tile_kv - s.shape[-1] if has("padding scored 0 in backward") else 0
        dp = d_out @ v[:, keys].transpose(-1, -2)
        rows = _last_rows(m) if has("dk, dv of the last query tile") else slice(None)
        dv[:, keys] = p[:, rows].to(m.dtype).to(p.dtype).transpose(-1, -2) @ d_out[:, rows]
        ds = (dp - delta) * (m.shown if has("dS without probs") else p)
        for place, (modifier, slope) in reversed(list(enumerate(zip(m.scores, slopes, strict=True)))):
            if isinstance(modifier, Bias):
                d_biases[place][..., keys] = ds * m.scale if has("bias gradient scaled") else ds
            elif slope is not None:
                ds = ds * slope
        ds = ds.to(torch.float8_e4m3fn).to(ds.dtype) if has("dS in fp8") else ds.to(m.dtype).to(ds.dtype)
        step = ds @ k[:, keys] * _scale(m, "dq")
        if padding:
            step = step + (torch.exp(0 - safe) * (0 - delta)) @ k.new_zeros(1, 1, k.shape[-1])
        dq = step if has("dq overwritten by each tile") else dq + step
        dk[:, keys] = ds[:, rows].transpose(-1, -2) @ q[:, rows] * _scale(m, "dk")
    d_sink = None
    if sink is not None:
        d_sink = -(torch.exp(sink.view(-1, 1) - safe[..., 0]) * delta[..., 0]).sum(-1)
        if has("sink gradient missing"):
            d_sink = torch.zeros_like(d_sink)
    return dq, dk, dv, [d_biases[place] for place in m.biases], d_sink


def _scale(m: Modifiers, name: str) -> float:
    """What dS K or dS^T Q is multiplied by."""
    return 1.0 if m.has(f"{name} not scaled") else m.scale**2 if m.has(f"{name} scaled twice") else m.scale


def _last_rows(m: Modifiers) -> slice:
    """The queries of the last tile."""
    return slice(max(m.seq_q - 1, 0) // m.tile_kv * m.tile_kv, None)


def _top(m: Modifiers, q: Tensor, k: Tensor) -> Tensor:
    """The maximum of every row, 0 of an empty one."""
    tops = [m.tile(q, k[:, a : a + m.tile_kv], a)[0].amax(-1, keepdim=True) for a in range(0, k.shape[1], m.tile_kv)]
    top = torch.cat(tops, -1).amax(-1, keepdim=True) if tops else q.new_zeros(*q.shape[:2], 1)
    return torch.where(top == -torch.inf, 0, top)


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
        if m.has("products in tf32") and q.dtype == torch.float32:
            wide = [_in_tf32(x) for x in wide]
        out, lse = forward(m, wide[0], wide[1], wide[2], None if sink is None else sink.to(compute))
        ctx.m, ctx.sink, ctx.dtypes, ctx.heads_kv = m, sink, (q.dtype, k.dtype, v.dtype), k.shape[0]
        if m.has("tail rows unwritten") and (m.seq_q > m.tile_kv or m.addresses.way):
            out[:, m.seq_q // m.tile_kv * m.tile_kv :] = 0
        rounded = out.to(q.dtype)
        ctx.saved = (*wide, rounded.to(compute), lse)
        if m.has("lse in base 2"):
            return rounded, lse / torch.log(torch.tensor(2.0))
        if m.has("lse without the maximum"):
            return rounded, lse - _top(m, wide[0], wide[1])[..., 0]
        return rounded, torch.zeros_like(lse) if m.has("lse not written") else lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        m, sink = ctx.m, ctx.sink
        q, k, v, out, lse = ctx.saved
        # What autograd hands over for an unused output is zeros.
        d_out, d_lse = (grad.to(q.dtype) for grad in grads)
        wide_sink = None if sink is None else sink.to(q.dtype)
        dq, dk, dv, d_biases, d_sink = backward(m, q, k, v, wide_sink, out, lse, d_out, d_lse)
        narrow = []
        for wide in (dk, dv):
            if m.has("dk, dv of one query head"):
                group = q.shape[0] // max(ctx.heads_kv, 1)
                narrow.append(wide[:: max(group, 1)])
            else:
                narrow.append(wide.new_zeros(ctx.heads_kv, *wide.shape[1:]).index_add(0, ctx.heads, wide))
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


def flatten_mask(mask: Any) -> list[Any]:
    if mask is None:
        return []
    return reduce(lambda found, part: found + flatten_mask(part), mask.parts, []) if isinstance(mask, AllOf) else [mask]
