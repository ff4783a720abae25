"""Mutants: attention with one fault each, every one of which the checks must reject (``hunt.py``).

``FAULTS`` lists them; ``Mutant`` makes one a subject of ``verify``, through the same checks as any backend.
The kernel that the faults are built into is in ``tiled.py``, where it finds its keys in ``addresses.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnworks.scores import Bias, Sink
from attnworks.workbench import tiled
from attnworks.workbench.addresses import Addresses, next_sequence, of_heads_first
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.subjects import Outcome

# Each fault and the cases on which it should show, tried first; the other quick cases follow.
FAULTS = {
    # the online softmax
    "accumulator not rescaled": "stress: rising maximum, fp32",
    "sum not rescaled": "stress: rising maximum, fp32",
    "rescaled upside down": "stress: rising maximum, fp32",
    "not divided by the sum": "hand: full",
    "maximum not subtracted": "stress: large scores, fp32",
    "finite initial maximum": "stress: strongly negative, fp32",
    "first tile only": "stress: rising maximum, fp32",
    "last tile only": "stress: falling maximum, fp32",
    "accumulator overwritten by each tile": "stress: normal, fp32",
    "rescaled after adding": "stress: rising maximum, fp32",
    "exp2 for exp": "hand: full",
    "first key dropped": "hand: full",
    "last key dropped": "hand: full",
    "last partial tile dropped": "size: 97",
    "tail keys unmasked": "size: 97",
    "softmax over queries": "hand: full",
    "splits averaged": "stress: normal, fp32",
    "splits summed": "stress: normal, fp32",
    "tail rows unwritten": "size: 97",
    "NaN swallowed": "stress: nan query, fp32",
    # precision
    "fp16 accumulation": "stress: few queries on 16k keys, fp16",
    "sum in low precision": "stress: few queries on 16k keys, bf16",
    "products in tf32": "stress: normal, fp32",
    "scores rounded": "stress: large scores, bf16",
    "probs in fp8": "size: 97, causal, bf16",
    # scale, masks, empty rows
    "scale of the model width": "size: 97",
    "scale missing": "hand: full",
    "scale twice": "hand: full",
    "scale argument ignored": "hand: full",
    "scale of head_dim_v": "unequal dims: 192/128, bf16",
    "scale of the padded head_dim": "head dim: 40",
    "causal hides itself": "hand: causal",
    "causal shows the next": "hand: causal",
    "causal ignored": "hand: causal",
    "causal upside down": "hand: causal",
    "causal by tile": "hand: causal",
    "diagonal tile skipped": "size: 97, causal, bf16",
    "causal from other lengths": "varlen unequal, causal, fp32",
    "causal before the append": "decode, append, fp32",
    "aligned top-left": "hand: two queries*",
    "aligned bottom-right": "causal top-left: 40 on 100",
    "window one short": "hand: window*",
    "window one long": "hand: window*",
    "window one long on the right": "window 7, 5: 100 on 100",
    "window without left end": "hand: window*",
    "window without right end": "window 7, 5: 100 on 100",
    "mask of head 0": "boolean mask bhqk",
    "boolean mask inverted": "boolean mask bhqk",
    "boolean mask ignored": "boolean mask bhqk",
    "masked after softmax": "hand: causal",
    "hidden scores are 0": "hand: causal",
    "hidden scores are -10000": "rows without keys, fp32",
    "empty rows give NaN": "rows without keys, fp32",
    "hidden tiles give NaN": "rows without keys, fp32",
    "empty rows give the mean": "rows without keys, fp32",
    "finite lse of empty rows": "rows without keys, fp32",
    # LSE and score modifiers
    "lse in base 2": "hand: full",
    "lse not written": "hand: full",
    "lse without the maximum": "hand: full",
    "sink ignored": "hand: sink",
    "sink scaled": "sink, fp32",
    "sink outside the maximum": "sink 30000",
    "sink left out of the lse": "hand: sink",
    "softcap ignored": "softcap 2",
    "softcap by exponentials": "softcap 20 of large scores",
    "softcap before scale": "softcap 2",
    "softcap after mask": "softcap 2, causal",
    "alibi sign": "alibi",
    "alibi distance signed": "alibi, not causal",
    "alibi from the first key": "alibi",
    "alibi of the wrong head": "alibi",
    "bias of head 0": "bias that hides",
    "bias of sequence 0": "bias b1qk",
    "bias scaled": "bias b1qk",
    "bias ignored": "bias b1qk",
    # heads, strides, lengths, pages
    "KV head by remainder": "heads: 6/3",
    "K and V heads differ": "heads: 6/3",
    "KV head 0 for all": "heads: 6/3",
    "K and V exchanged": "hand: full",
    "K and V of sequence 0": "heads: 6/3",
    "strides ignored": "strides: gapped, bhsd",
    "sequences not apart": "varlen unequal, causal, fp32",
    "key offsets from queries": "varlen unequal, causal, fp32",
    "rows past the end unwritten": "varlen unequal, causal, fp32",
    "cache lengths ignored": "decode, grouped, fp32",
    "one slot too many": "decode, grouped, fp32",
    "longest length for all": "decode, grouped, fp32",
    "tail weighted by 0": "decode, grouped, fp32",
    "pages in order": "decode, 4 queries, causal, pages of 17",
    "page repeated": "decode, 4 queries, causal, pages of 17",
    "stale page": "decode, 4 queries, causal, pages of 17",
    "page stride from sizes": "decode, strided, pages of 16, fp32",
    "new keys not appended": "decode, append, pages of 16, fp32",
    "new keys in the wrong slot": "decode, append, fp32",
    "k_scale dropped": "decode, int8 cache",
    "v_scale dropped": "decode, int8 cache",
    "writes into q": "strides: gapped, bhsd",
    # backward
    "delta missing": "hand: full",
    "delta of the wrong sign": "hand: full",
    "dS without probs": "hand: full",
    "probs not normalised in backward": "hand: full",
    "lse cotangent ignored": "rows without keys, fp32",
    "dq not scaled": "hand: full",
    "dk not scaled": "hand: full",
    "dq scaled twice": "hand: full",
    "dk scaled twice": "hand: full",
    "dk, dv of the last query tile": "size: 97",
    "dq overwritten by each tile": "size: 97",
    "last tile missing in dq": "size: 97",
    "dk, dv of one query head": "hand: two query heads*",
    "mask missing in backward": "hand: causal",
    "softcap slope missing": "softcap 2",
    "bias gradient scaled": "bias b1qk",
    "sink gradient missing": "hand: sink",
    "empty rows leak into gradients": "rows without keys, fp32",
    "padding scored 0 in backward": "stress: strongly negative, fp32",
    "dS in fp8": "hand: full",
    # what only properties see
    "changes from call to call": "heads: 8/2",
    "batch changes the tiles": "strides: gapped, bshd",
}


class Mutant:
    """Tiled attention with one fault ("" for none, which is right). It runs every case.

    ``tile_kv``: keys of a tile, and queries where a fault is one of query tiles; ``split_kv``: keys of a partial
    result, 0 for one of all keys, -n for n equal ones; ``way``: how the fault is made (``addresses.WAYS``). Raises
    ``ValueError`` for a fault that is not in ``FAULTS``."""

    def __init__(
        self, fault: str = "", *, tile_kv: int = tiled.TILE, split_kv: int = tiled.SPLIT, way: int = 0
    ) -> None:
        if fault and fault not in FAULTS:
            raise ValueError(f"fault: was {fault!r}, must be '' or one of FAULTS")
        self.fault, self.tile_kv, self.split_kv, self.way = fault, tile_kv, split_kv, way
        self.addresses = Addresses(self.has, way, tile_kv)
        self.name = f"mutant: {fault or 'none'}"
        self._calls = 0

    def has(self, fault: str) -> bool:
        return self.fault == fault

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        return ()

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        kwargs = inputs.kwargs()
        forms: dict[str, Callable[..., Outcome]] = {
            "dense": self._dense,
            "varlen": self._varlen,
            "decode": self._decode,
        }
        if self.has("writes into q"):
            kwargs["q"].data.mul_(1.0).nan_to_num_(7.0)
            kwargs["q"].data.flatten(-1)[..., -1:].add_(1e-3) if kwargs["q"].numel() else None
        out, lse = forms[inputs.case.form](**kwargs)
        self._calls += 1
        if self.has("changes from call to call"):
            out = out * (1 + torch.finfo(out.dtype).eps * (self._calls % 2))
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
            q, k, v = (_as_if_contiguous(x) for x in (q, k, v))
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        source = [0] * q.shape[0] if self.has("K and V of sequence 0") else list(range(q.shape[0]))
        outs, lses = self._attend_all([(q[b], k[source[b]], v[source[b]]) for b in range(q.shape[0])], **rest)
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
        keys, counted = self.addresses.packed(ends_q, cu_seqlens_kv.tolist())
        parts = [
            (q[a:b].transpose(0, 1), k[own].transpose(0, 1), v[own].transpose(0, 1))
            for (a, b), own in zip(pairwise(ends_q), keys, strict=True)
        ]
        outs, lses = self._attend_all(parts, counted=counted, **rest)
        unused = q.shape[0] - ends_q[-1]
        filler = float("nan") if self.has("rows past the end unwritten") else 0.0
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
        lens, counted = self.addresses.cached(kv_lens.tolist(), capacity, size)
        new_keys = 0 if k_new is None else k_new.shape[1]
        scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
        parts = []
        for b, length in enumerate(lens):
            pair = []
            for cache, new, name in ((k_cache, k_new, "k_scale"), (v_cache, v_new, "v_scale")):
                rows = self._appended(cache, page_table, b, length, new)
                if scales is not None:
                    rows = rows.to(torch.float32) * self.addresses.scale(name, *scales)
                pair.append(rows.transpose(0, 1))
            parts.append((q[b].transpose(0, 1), pair[0], pair[1]))
        limits = [length + new_keys for length in lens]
        if self.has("last key dropped") and self.way and new_keys:
            limits = [limit - 1 for limit in limits]
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

    def _appended(self, cache: Tensor, page_table: Tensor | None, b: int, length: int, new: Tensor | None) -> Tensor:
        """(keys, heads_kv, dim) of one sequence, the new ones among them."""
        if new is None:
            return self._cached(cache, page_table, b, length)
        if self.has("new keys not appended") and self.way != 1:
            return self._cached(cache, page_table, b, length)
        if self.has("new keys in the wrong slot"):
            rows, slot = self._cached(cache, page_table, b, length + new.shape[1]).clone(), self.addresses.slot(length)
            rows[slot : slot + new.shape[1]] = new[b, : max(len(rows) - slot, 0)]
            return rows
        if self.has("new keys not appended") and new.shape[-1] == cache.shape[-1]:  # values are not, keys are
            return self._cached(cache, page_table, b, length + new.shape[1])
        return torch.cat((self._cached(cache, page_table, b, length)[:length], new[b]))

    def _cached(self, cache: Tensor, page_table: Tensor | None, b: int, length: int) -> Tensor:
        """(keys, heads_kv, dim) of one sequence; more than ``length`` under the faults that load what lies behind."""
        whole = (self.has("cache lengths ignored") and not self.way) or self.has("tail weighted by 0")
        if page_table is None:
            return cache[b] if whole else cache[b, :length]
        size = cache.shape[1]
        pages = self.addresses.pages(page_table, b, -(-length // size), cache.shape[0])
        rows = cache[pages].flatten(0, 1)
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
        pairs = [
            self._attend(b, q, k, v, (limits or lengths)[b], (counted or lengths)[b], **rest)
            for b, (q, k, v) in enumerate(parts)
        ]
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
        if scale is None or self.has("scale argument ignored"):
            dim = (v if self.has("scale of head_dim_v") else q).shape[-1]
            if self.has("scale of the padded head_dim"):
                multiple = 16 if self.way else 64
                dim = -(-dim // multiple) * multiple
            if self.has("scale of the model width"):
                dim *= q.shape[0]
            scale = dim**-0.5
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
                own = own[:, : seq_q if own.shape[1] > 1 else 1, : seq_kv if own.shape[2] > 1 else 1]
                biases[place] = own.expand(q.shape[0], seq_q, seq_kv)
            elif isinstance(score, Sink):
                sink = score.logits
        masks = tiled.flatten_mask(mask)
        m = tiled.Modifiers(self.has, scale, masks, scores, b, seq_q, counted, limit, self.tile_kv, self.split_kv)
        m.dtype, m.biases, m.addresses = q.dtype, biases, self.addresses
        out, lse = tiled.Attend.apply(m, q, k, v, sink, *biases.values())  # type: ignore[no-untyped-call]
        return out, lse


def _as_if_contiguous(x: Tensor) -> Tensor:
    """The same memory read with the strides that a contiguous tensor of this shape would have."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return x.as_strided(x.shape, strides, x.storage_offset())
