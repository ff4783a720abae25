"""Mutants: attention with one fault each, every one of which the checks must reject (``hunt.py``).

``faults.py`` lists them; ``Mutant`` makes one a subject of ``verify``, through the same checks as any backend.
The kernel that the faults are built into is in ``tiled.py``, where it finds its keys in ``addresses.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnworks.scores import Bias, Sink, Softcap
from attnworks.workbench import modifiers, tiled
from attnworks.workbench.addresses import Addresses, next_sequence, of_format, of_heads_first
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.misplaced import Misplaced
from attnworks.workbench.scales import softmax_scale
from attnworks.workbench.subjects import Outcome
from attnworks.workbench.ways import NUMBERS

# Ways in which a page is read as (heads, slots, dim), and of which cache.
_PAGES_TURNED = {(10, "k"), (10, "v"), (11, "k"), (12, "v")}


class Mutant:
    """Tiled attention with one fault ("" for none, which is right). It runs every case.

    ``tile_kv``: keys of a tile, and queries where a fault is one of query tiles; ``split_kv``: keys of a partial
    result, 0 for one of all keys, -n for n equal ones; ``way``: how the fault is made (``ways.WAYS``); ``value``: the
    number in it, where it has one (``ways.NUMBERS``). Raises ``ValueError`` for a fault that is not in ``FAULTS``."""

    def __init__(
        self,
        fault: str = "",
        *,
        tile_kv: int = modifiers.TILE,
        split_kv: int = modifiers.SPLIT,
        way: int = 0,
        value: float | None = None,
    ) -> None:
        if fault and fault not in FAULTS:
            raise ValueError(f"fault: was {fault!r}, must be '' or one of FAULTS")
        self.fault, self.tile_kv, self.split_kv, self.way = fault, tile_kv, split_kv, way
        self.value = NUMBERS.get(fault, 1.0) if value is None else value
        self.addresses = Addresses(self.has, way, tile_kv)
        self.misplaced = Misplaced(self.has, way, tile_kv)
        self.name = f"mutant: {fault or 'none'}"
        self._calls, self._longest, self._first_rows, self._sequences = 0, 0, 0, 0
        self._packed_apart: list[int] = []

    def has(self, fault: str) -> bool:
        return self.fault == fault

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        return ()

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        kwargs = inputs.kwargs()
        self._packed_apart = []
        forms: dict[str, Callable[..., Outcome]] = {
            "dense": self._dense,
            "varlen": self._varlen,
            "decode": self._decode,
        }
        if self.has("writes into q"):
            written = inputs.tensors()[("q", "k", "v")[self.way]].data
            written.mul_(1).nan_to_num_(7.0)
            if written.numel() and written.is_floating_point():
                written.flatten(-1)[..., -1:].add_(1e-3)
        out, lse = forms[inputs.case.form](**kwargs)
        self._calls += 1
        if self.has("changes from call to call"):
            out = out * (1 + torch.finfo(out.dtype).eps * (self._calls % 2))
        if lse is not None and self.has("lse of another row"):
            lse = self.misplaced.lse(lse, inputs.case.heads_kv)
        if self.has("batch changes the tiles"):
            out = out * (1 + torch.finfo(out.dtype).eps * (len(inputs.case.sequences) % 2))
        return out, lse if return_lse else None

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Any = None,
        scores: tuple[Any, ...] = (),
        scale: float | None = None,
        layout: str = "bhsd",
        return_lse: bool = False,
    ) -> Any:
        """The mutant as a function, called as ``attnworks.attention`` is."""
        out, lse = self._dense(q, k, v, layout, mask=mask, scores=scores, scale=scale)
        return (out, lse) if return_lse else out

    # ---- the three forms: find each sequence's rows, attend, put the results back ------------------------------------

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, layout: str, **rest: Any) -> Outcome:
        if self.has("strides ignored"):
            q, k, v = _by_other_strides(self.way, q, k, v)
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sources = self.addresses.sequences(q.shape[0])
        outs, lses = self._attend_all([(q[b], k[own_k], v[own_v]) for b, own_k, own_v in sources], **rest)
        if not outs:
            shape = (0, *q.shape[1:3], v.shape[-1])
            empty = q.new_zeros(shape if layout == "bhsd" else (0, shape[2], shape[1], shape[3]))
            lse = q.new_zeros(shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
            return empty + 0 * q.sum(), lse + 0 * q.sum()
        out = torch.stack(outs)
        return (out if layout == "bhsd" else out.transpose(1, 2)), torch.stack(lses)

    def _varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, **rest: Any
    ) -> Outcome:
        ends_q = cu_seqlens_q.tolist()
        ends_kv = cu_seqlens_kv.tolist()
        self._packed_apart = [a - b for a, b in zip(ends_q[:-1], ends_kv[:-1], strict=True)]
        keys, counted = self.addresses.packed(ends_q, ends_kv)
        keys, values = self.addresses.values(keys, ends_kv)
        if k.requires_grad and self.has("gradients without queries unwritten"):
            k, v = (_unwritten(x, ends_q, ends_kv) for x in (k, v))
        if k.requires_grad and ends_q != ends_kv and self.has("dk, dv at the queries' offsets"):
            k, v = (_at_offsets(x, ends_kv, ends_q) for x in (k, v))
        rows_q, counted = self.addresses.rows(ends_q, ends_kv, counted)
        parts = [
            (q[mine].transpose(0, 1), k[own].transpose(0, 1), v[own_v].transpose(0, 1))
            for mine, own, own_v in zip(rows_q, keys, values, strict=True)
        ]
        outs, lses = self._attend_all(parts, counted=counted, **rest)
        unused = q.shape[0] - ends_q[-1]
        filler = float("nan") if self.has("rows past the end unwritten") else 0.0
        if self.has("stores reach the next sequence"):
            outs = self.misplaced.overrun(outs)
        if ends_q != ends_kv and self.has("output offsets from keys"):
            outs = self.misplaced.at_offsets(outs, ends_kv)
        rows = [out.transpose(0, 1) for out in outs] + [q.new_full((unused, q.shape[1], v.shape[-1]), filler)]
        return torch.cat(rows), torch.cat([*lses, lses[0].new_full((q.shape[1], unused), -torch.inf)], 1)

    def _decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_lens: Tensor,
        page_table: Tensor | None = None,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **rest: Any,
    ) -> Outcome:
        if self.has("page stride from sizes") and page_table is not None:
            k_cache, v_cache = (_as_if_contiguous(x) for x in (k_cache, v_cache))
        size = 0 if page_table is None else k_cache.shape[1]
        capacity = k_cache.shape[1] if page_table is None else page_table.shape[1] * size
        new_keys = 0 if k_new is None else k_new.shape[1]
        lens, counted = self.addresses.cached(kv_lens.tolist(), capacity, size, q.shape[1], new_keys)
        k_new, v_new = self._exchanged(k_new, v_new)
        scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
        parts = []
        for b, length in enumerate(lens):
            pair = []
            for cache, new, name in ((k_cache, k_new, "k_scale"), (v_cache, v_new, "v_scale")):
                rows = self._appended(cache, page_table, b, length, new, name[0])
                if rows.dtype.itemsize == 1 and self.has("8-bit cache in another format"):
                    rows = of_format(rows, self.way)
                if rows.dtype == torch.int8 and self.has("8-bit cache without its sign"):
                    rows = rows.view(torch.uint8)
                if scales is not None:
                    factor = self.addresses.scale(name, *scales, q.shape[2])
                    group = max(factor.shape[0] // rows.shape[1], 1)
                    rows = rows.to(torch.float32).repeat_interleave(group, 1)
                    rows = rows * self.addresses.scales(name, factor, rows.shape[0])
                pair.append(rows.transpose(0, 1))
            most = max(x.shape[0] for x in pair)
            keys, values = (x.repeat_interleave(most // max(x.shape[0], 1), 0) for x in pair)
            parts.append((q[b].transpose(0, 1), keys, values))
        limits = [length + new_keys for length in lens]
        if self.has("last key dropped") and self.way and new_keys:
            limits = [limit - 1 for limit in limits]
        if size and self.has("last partial tile dropped") and self.way:
            limits = [limit // size * size if limit > size else limit for limit in limits]
        if size and self.has("full last page left out"):
            limits = [limit - size if limit and limit % size == 0 else limit for limit in limits]
        unseen = self.has("causal before the append") or (self.has("new keys not appended") and self.way == 2)
        counted = [n + (0 if unseen else new_keys) for n in counted]
        whole = self.has("cache lengths ignored") and not self.way
        outs, lses = self._attend_all(
            parts, limits=None if whole else limits, counted=None if whole else counted, **rest
        )
        for b, limit in enumerate(limits):
            if self.addresses.splits_meet(limit, capacity):
                outs[b], lses[b] = outs[b] * torch.nan, lses[b] * torch.nan
        return torch.stack(outs).transpose(1, 2), torch.stack(lses)

    def _exchanged(self, k_new: Tensor | None, v_new: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """New keys and values as they are stored."""
        alike = k_new is not None and v_new is not None and k_new.shape == v_new.shape
        if alike and self.has("new keys for new values"):
            return ((k_new, k_new), (v_new, v_new), (v_new, k_new))[self.way]
        return k_new, v_new

    def _appended(
        self, cache: Tensor, page_table: Tensor | None, b: int, length: int, new: Tensor | None, which: str
    ) -> Tensor:
        """(keys, heads_kv, dim) of one sequence, the new ones among them."""
        if new is None:
            return self._cached(cache, page_table, b, length, which)
        if self.has("new keys not appended") and self.way in (0, 2):
            return self._cached(cache, page_table, b, length, which)
        if new.shape[0] > 1 and self.has("new keys of another sequence"):
            new = new.roll(1 if self.way else -1, 0)
        if new.shape[1] > 1 and self.has("new keys in another order"):
            new = new.flip(1)
        if self.has("new keys in the wrong slot"):
            rows = self._cached(cache, page_table, b, length + new.shape[1], which).clone()
            for n, one in enumerate(new[b]):
                slot = self.addresses.slot(length, n, 0 if page_table is None else cache.shape[1])
                if slot >= 0:
                    rows[slot : slot + 1] = one
            return rows
        if self.has("new keys not appended"):
            rows = self._cached(cache, page_table, b, length + new.shape[1], which).clone()
            if self.way == 3:  # none but the first
                rows[length : length + 1] = new[b, :1]
            if (self.way, which) in ((4, "v"), (5, "k")):  # values are, keys are not, or the other way round
                rows[length:] = new[b]
            return rows
        return torch.cat((self._cached(cache, page_table, b, length, which)[:length], new[b]))

    def _cached(self, cache: Tensor, page_table: Tensor | None, b: int, length: int, which: str) -> Tensor:
        """(keys, heads_kv, dim) of one sequence; more than ``length`` under the faults that load what lies behind."""
        whole = (self.has("cache lengths ignored") and not self.way) or self.has("tail weighted by 0")
        if page_table is None:
            return cache[b] if whole else cache[b, :length]
        size = cache.shape[1]
        slots = self.addresses.slots(page_table, b, length, size, cache.shape[0])
        if slots is not None:
            return cache.flatten(0, 1)[slots]
        pages = self.addresses.pages(page_table, b, -(-length // size), cache.shape[0], which)
        read = cache[pages]
        if cache.shape[2] > 1 and self.has("layouts confused") and (self.way, which) in _PAGES_TURNED:
            read = read.reshape(len(pages), cache.shape[2], size, -1).transpose(1, 2)
        rows = read.flatten(0, 1)
        return rows if whole else rows[:length]

    def _attend_all(
        self,
        parts: Sequence[tuple[Tensor, Tensor, Tensor]],
        limits: list[int] | None = None,
        counted: list[int] | None = None,
        **rest: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``limits``: keys that may be seen, ``counted``: keys that masks are aligned by; None for all there are."""
        lengths = [k.shape[1] for _, k, _ in parts]
        self._longest = max(limits or lengths, default=0)
        self._first_rows, self._sequences = parts[0][0].shape[1] if parts else 0, len(parts)
        parts = self.misplaced.operands(list(parts))
        pairs = [
            self._attend(b, q, k, v, (limits or lengths)[b], (counted or lengths)[b], **rest)
            for b, (q, k, v) in enumerate(parts)
        ]
        if len(pairs) > 1 and self.has("sequences left out"):
            first = 1 if self.way else max(len(pairs) - 1, 1)
            if self.way == 2 and pairs[0][0].shape == pairs[-1][0].shape:  # all are written where the first belongs
                pairs[0] = pairs[-1]
            pairs[first:] = [(out * 0, lse * 0) for out, lse in pairs[first:]]
        if len(pairs) > 1 and self.has("sequences exchanged"):
            pairs = [pairs[n] for n in self.addresses.order([q.shape[1] for q, _, _ in parts])]
        pairs = self.misplaced.results(pairs, parts[0][1].shape[0] if parts else 1)
        return [out for out, _ in pairs], [lse for _, lse in pairs]

    def _attend(
        self,
        b: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        limit: int,
        counted: int,
        mask: Any,
        scores: tuple[Any, ...],
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        default = q.shape[-1] ** -0.5
        scale = softmax_scale(self.has, self.way, scale, q, v)
        if len(scores) > 1 and self.has("scores in another order"):
            scores = tuple(sorted(scores, key=lambda s: isinstance(s, Softcap) == bool(self.way)))
        seq_q, seq_kv = q.shape[1], k.shape[1]
        biases: dict[int, Tensor] = {}
        sink = None
        for place, score in enumerate(scores):
            if isinstance(score, Bias):
                whole = score.tensor[(None,) * (4 - score.tensor.dim())]
                if self.has("bias of sequence 0") and self.way:
                    own = next_sequence(whole, b) if self.way == 3 else of_heads_first(whole, b, turned=self.way == 2)
                elif self.has("mask of head 0") and self.way > 1:  # masks and biases alike
                    own = next_sequence(whole, b) if self.way == 4 else of_heads_first(whole, b, turned=self.way == 3)
                else:
                    own = whole[b if whole.shape[0] > 1 and not self.has("bias of sequence 0") else 0]
                if self.has("bias of row 0"):
                    own = own[..., :1] if self.way else own[:, :1]
                if self.way == 2 and self.has("bias gradient not summed"):  # but averaged
                    own = _slower(own, whole, self._sequences, q.shape[0])
                elif self.has("bias gradient not summed") and (b > 0 if self.way else own.shape[0] == 1):
                    shared = whole.shape[0] == 1
                    own = (own.detach() if shared else own) if self.way else self._of_one_head(own, q.shape[0])
                own = own[:, : seq_q if own.shape[1] > 1 else 1, : seq_kv if own.shape[2] > 1 else 1]
                biases[place] = own.expand(q.shape[0], seq_q, seq_kv)
            elif isinstance(score, Sink):
                sink = score.logits
                if self.has("sink of the wrong head"):
                    heads = torch.arange(q.shape[0])
                    group = q.shape[0] // max(k.shape[0], 1) or 1
                    sink = sink[(0 * heads, heads.flip(0), heads // group, heads.roll(1))[self.way]]
        masks = modifiers.flatten_mask(mask)
        m = modifiers.Modifiers(self.has, scale, masks, scores, b, seq_q, counted, limit, self.tile_kv, self.split_kv)
        m.dtype, m.biases, m.addresses, m.default_scale = q.dtype, biases, self.addresses, default
        m.value = self.value
        m.longest, m.first_rows = self._longest, self._first_rows
        m.packed_apart = self._packed_apart[b] if self._packed_apart else seq_kv - seq_q
        m.group, m.heads_q = max(q.shape[0] // max(k.shape[0], 1), 1), q.shape[0]
        out, lse = tiled.Attend.apply(m, q, k, v, sink, *biases.values())  # type: ignore[no-untyped-call]
        if q.shape[0] > 1 and self.has("heads of the output exchanged"):
            out = out[self.addresses.stored(out.shape[0], k.shape[0])]
        return out, lse

    @staticmethod
    def _of_one_head(bias: Tensor, heads: int) -> Tensor:
        """(heads, rows, keys) of a bias that all heads share, whose gradient is the first one's."""
        return torch.cat((bias, bias.detach().expand(heads - 1, -1, -1)))


def _at_offsets(x: Tensor, own: Sequence[int], others: Sequence[int]) -> Tensor:
    """K or V, whose gradient lies, sequence by sequence, where other offsets begin."""

    def moved(grad: Tensor) -> Tensor:
        found = torch.zeros_like(grad)
        for (a, b), start in zip(pairwise(own), others, strict=False):
            taken = max(min(b - a, len(grad) - start), 0)
            found[start : start + taken] = grad[a : a + taken]
        return found

    watched = x * 1
    watched.register_hook(moved)  # type: ignore[no-untyped-call]
    return watched


def _slower(x: Tensor, whole: Tensor, sequences: int, heads: int) -> Tensor:
    """A sequence's part of a bias, whose gradient is divided by how many sequences and heads share it."""
    times = (sequences if whole.shape[0] == 1 else 1) * (heads if whole.shape[1] == 1 else 1)
    return x / times + (x - x / times).detach()


def _unwritten(x: Tensor, ends_q: Sequence[int], ends_kv: Sequence[int]) -> Tensor:
    """K or V, whose gradient is NaN where nobody asks for the keys."""
    nobody = torch.zeros(x.shape[0], 1, 1, dtype=torch.bool)
    for (a, b), (first, last) in zip(pairwise(ends_q), pairwise(ends_kv), strict=True):
        nobody[first:last] |= a == b
    watched = x * 1
    watched.register_hook(lambda grad: grad.masked_fill(nobody, torch.nan))  # type: ignore[no-untyped-call]
    return watched


def _by_other_strides(way: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v read as if without gaps; V by K's strides; K and V by Q's."""
    if not way:
        return _as_if_contiguous(q), _as_if_contiguous(k), _as_if_contiguous(v)
    return q, k if way == 1 else _by_strides(k, q), _by_strides(v, k if way == 1 else q)


def _by_strides(x: Tensor, other: Tensor) -> Tensor:
    """The elements that another tensor's strides lead to, held to the storage."""
    if not x.numel() or x.stride() == other.stride():
        return x
    places = torch.tensor(x.storage_offset())
    for axis, (extent, stride) in enumerate(zip(x.shape, other.stride(), strict=True)):
        places = places + (torch.arange(extent) * stride).view(-1, *(1,) * (x.dim() - 1 - axis))
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((size,), (1,), 0)[places.clamp(max=size - 1)]


def _as_if_contiguous(x: Tensor) -> Tensor:
    """The same memory read with the strides that a contiguous tensor of this shape would have."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return x.as_strided(x.shape, strides, x.storage_offset())
