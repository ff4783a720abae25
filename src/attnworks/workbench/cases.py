"""Cases: one attention problem each, as data, with everything needed to ask it of a kernel and to know the answer.

A ``Case`` is frozen and small; ``build()`` makes its ``Inputs``, always the same ones. The named list is in
``catalogue.py``, real models' shapes in ``shapes.py``, stress inputs in ``generators.py``, hand-computed cases in
``hand.py``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.problem import Form, Layout
from attnworks.scores import ALiBi, Bias, Sink, Softcap
from attnworks.workbench import storage
from attnworks.workbench.generators import GENERATORS, HAND_D_OUT, Extents
from attnworks.workbench.inputs import Inputs, SequenceTensors

# ---- masks and scores as a case writes them: without tensors ---------------------------------------------------------


@dataclass(frozen=True)
class BooleanRule:
    """A random boolean mask of the broadcast form named by the letters b, h, q, k (1 for a size of 1); of each row's
    keys about ``keep`` are visible, of the last row none if ``empty_row``."""

    form: str = "bhqk"
    keep: float = 0.6
    empty_row: bool = False


@dataclass(frozen=True)
class PredicateRule:
    """A function (b, h, q, k) of raw indices."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class AlibiRule:
    """Slopes 2^(-8 h / heads_q) as in the paper, with a row for each sequence (halved from one to the next) if
    ``per_batch``."""

    per_batch: bool = False


@dataclass(frozen=True)
class BiasRule:
    """A unit-normal fp32 bias of the broadcast form; ``hide`` makes every fifth element -inf."""

    form: str = "bhqk"
    hide: bool = False


@dataclass(frozen=True)
class SinkRule:
    """One logit for each head: ``value``, or unit normal."""

    value: float | None = None


@dataclass(frozen=True)
class AddRule:
    """A score function (s, b, h, q, k) that adds something to s which does not depend on s."""

    function: Callable[..., Any]


MaskRule = Causal | Window | BooleanRule | PredicateRule
ScoreRule = Softcap | AlibiRule | BiasRule | SinkRule | AddRule


@dataclass(frozen=True)
class Case:
    """One named problem.

    ``lengths``: (seq_q, seq_kv) of each sequence for varlen; for decode seq_kv is the keys in the cache after the
    append of ``new_keys``. ``seq_kv`` of a decode case is the capacity. ``memory``: how tensors lie (``storage.py``).
    ``spare``: packed rows that belong to no sequence. ``probs_dtype``: the format that a kernel may round P to, where
    that is coarser than ``dtype``; budgets and yardstick allow for it, forward only. ``gradients``: dQ, dK, dV (and
    bias, sink) are checked where the backend differentiates; ``lse_cotangent``: also through the LSE. ``source``: where
    a real model's shape comes from.
    """

    name: str
    stresses: str
    form: Form = "dense"
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 64
    seq_kv: int = 64
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: torch.dtype = torch.float32
    mask: tuple[MaskRule, ...] = ()
    scores: tuple[ScoreRule, ...] = ()
    scale: float | None = None
    layout: Layout = "bhsd"
    generator: str = "normal"
    memory: str = "contiguous"
    lengths: tuple[tuple[int, int], ...] = ()
    spare: int = 0
    page_size: int = 0
    new_keys: int = 0
    cache_dtype: torch.dtype | None = None
    probs_dtype: torch.dtype | None = None
    gradients: bool = False
    lse_cotangent: bool = False
    seed: int = 0
    source: str = ""

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seq_q, seq_kv) of every sequence."""
        return self.lengths if self.form != "dense" else ((self.seq_q, self.seq_kv),) * self.batch

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def unit_normal(self) -> bool:
        """Whether the plain limits people quote apply: unit-normal inputs, ordinary scale, nothing added to the
        scores."""
        return self.generator == "normal" and not self.scores and self.scale is None and self.cache_dtype is None

    @property
    def tags(self) -> tuple[str, ...]:
        """What a pattern may also match: form, dtype, generator."""
        return (self.form, str(self.dtype).removeprefix("torch."), self.generator, self.memory)

    def with_seed(self, seed: int) -> Case:
        return replace(self, seed=seed)

    def build(self, poison: float = math.nan) -> Inputs:
        """The tensors, made from the case's name and seed alone; ``poison`` fills whatever is not the problem's.

        ``values`` are shared by all builds of a case and must not be written to; everything else is fresh.
        """
        return self._built([replace(part) for part in _values(self)], poison)

    def outline(self) -> Inputs:
        """What ``build`` gives with zeros for values, in a fraction of the time: to ask whether somebody runs it.
        Shared by whoever asks, so not to be written to."""
        return _outline(self)

    def _built(self, values: list[SequenceTensors], poison: float) -> Inputs:
        inputs = Inputs(self, values)
        rng = torch.Generator().manual_seed(self._number + 1)
        self._store(inputs, rng, poison)
        self._modify(inputs, rng)
        return inputs

    @property
    def _number(self) -> int:
        return zlib.crc32(self.name.encode()) + 1_000_003 * self.seed

    def _sequence(self, rng: torch.Generator, seq_q: int, seq_kv: int) -> SequenceTensors:
        extents = Extents(
            self.heads_q, self.heads_kv, seq_q, seq_kv, self.head_dim, self.head_dim_v, self.softmax_scale
        )
        q, k, v = (x.to(self.dtype).contiguous() for x in GENERATORS[self.generator](rng, extents))
        if self.memory == "shared heads":
            k, v = k[:1].expand_as(k), v[:1].expand_as(v)
        if self.memory == "latent":
            v = k[..., : self.head_dim_v]
        d_out = torch.randn(self.heads_q, seq_q, self.head_dim_v, generator=rng).to(self.dtype)
        if self.generator == "hand":
            d_out = torch.tensor(HAND_D_OUT, dtype=self.dtype)[: self.heads_q, :seq_q]
        lse_dtype = torch.promote_types(self.dtype, torch.float32)
        d_lse = torch.randn(self.heads_q, seq_q, generator=rng).to(lse_dtype) if self.lse_cotangent else None
        return SequenceTensors(q, k, v, d_out, d_lse)

    def _blank(self, seq_q: int, seq_kv: int) -> SequenceTensors:
        zero = torch.zeros((), dtype=self.dtype)
        q, out = (zero.expand(self.heads_q, seq_q, dim) for dim in (self.head_dim, self.head_dim_v))
        k, v = (zero.expand(self.heads_kv, seq_kv, dim) for dim in (self.head_dim, self.head_dim_v))
        return SequenceTensors(q, k, v, out, None)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _store(self, inputs: Inputs, rng: torch.Generator, poison: float) -> None:
        parts = inputs.values
        if self.form == "decode":
            self._store_caches(inputs, rng, poison)
        elif self.form == "varlen":
            inputs.q, inputs.k, inputs.v = (
                storage.pack([getattr(part, name) for part in parts], self.spare, self.memory, poison) for name in "qkv"
            )
            inputs.cu_seqlens_q, inputs.cu_seqlens_kv = (
                torch.tensor([sum(s[i] for s in self.lengths[:n]) for n in range(len(self.lengths) + 1)]).int()
                for i in (0, 1)
            )
        else:
            shapes = (
                (self.heads_q, self.seq_q, self.head_dim),
                (self.heads_kv, self.seq_kv, self.head_dim),
                (self.heads_kv, self.seq_kv, self.head_dim_v),
            )
            stacked = [
                torch.stack([getattr(part, name) for part in parts])
                if parts
                else torch.zeros(0, *shape, dtype=self.dtype)
                for name, shape in zip("qkv", shapes, strict=True)
            ]
            q_memory = "contiguous" if self.memory == "shared heads" else self.memory
            inputs.q = storage.store(stacked[0], self.layout, q_memory, poison)
            inputs.k, inputs.v = (storage.store(x, self.layout, self.memory, poison) for x in stacked[1:])

    def _store_caches(self, inputs: Inputs, rng: torch.Generator, poison: float) -> None:
        queries = torch.stack([part.q for part in inputs.values]) if inputs.values else self._no_queries()
        inputs.q = storage.store(queries, "bshd", "gapped" if self.memory == "gapped" else "contiguous", poison)
        lengths = [seq_kv for _, seq_kv in self.lengths]
        inputs.kv_lens = torch.tensor(lengths, dtype=torch.int32) - self.new_keys
        keys, values = self._quantised(inputs)
        if self.new_keys:
            inputs.k_new, inputs.v_new = (
                torch.stack([part[:, -self.new_keys :].transpose(0, 1) for part in parts]) for parts in (keys, values)
            )
        old_keys, old_values = (
            [part[:, : part.shape[1] - self.new_keys] for part in parts] for parts in (keys, values)
        )
        if self.page_size:
            inputs.page_table, pages = storage.page_table(lengths, self.page_size, rng)
            inputs.k, inputs.v = storage.paged(
                (old_keys, old_values), inputs.page_table, pages, self.page_size, self.memory, poison
            )
        else:
            inputs.k = storage.cache(old_keys, self.seq_kv, self.memory, poison)
            inputs.v = storage.cache(old_values, self.seq_kv, self.memory, poison)
        if self.memory == "latent":
            inputs.v = inputs.k[..., : self.head_dim_v]

    def _no_queries(self) -> Tensor:
        return torch.zeros(0, self.heads_q, self.seq_q, self.head_dim, dtype=self.dtype)

    def _quantised(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and values as the cache stores them; where that rounds them, what they now stand for is the
        problem."""
        keys, values = [part.k for part in inputs.values], [part.v for part in inputs.values]
        if self.cache_dtype is None:
            return keys, values
        # Scales as calibration gives them: the largest number becomes the largest of the format. That of every other
        # head is twice what it need be: were they alike, a kernel that reads another head's would hardly show it.
        largest = 127.0 if self.cache_dtype == torch.int8 else torch.finfo(self.cache_dtype).max
        inputs.k_scale = _largest(keys, self.heads_kv) / largest * (1 + torch.arange(self.heads_kv) % 2)
        inputs.v_scale = _largest(values, self.heads_kv).amax(0, keepdim=True) / largest
        stored = []
        for parts, scale in ((keys, inputs.k_scale), (values, inputs.v_scale)):
            scaled = [part.float() / scale.view(-1, 1, 1) for part in parts]
            if self.cache_dtype == torch.int8:
                scaled = [part.round().clamp(-127, 127) for part in scaled]
            stored.append([part.to(self.cache_dtype) for part in scaled])
        for part, k, v in zip(inputs.values, *stored, strict=True):
            part.k = k.double() * inputs.k_scale.double().view(-1, 1, 1)
            part.v = v.double() * inputs.v_scale.double().view(-1, 1, 1)
        return stored[0], stored[1]

    # ---- masks and scores --------------------------------------------------------------------------------------------

    def _modify(self, inputs: Inputs, rng: torch.Generator) -> None:
        """Turn the rules into the objects a caller passes, tensors and all."""
        for rule in self.mask:
            if isinstance(rule, BooleanRule):
                shape = self._broadcast_shape(rule.form)
                visible = torch.rand(shape, generator=rng) < rule.keep
                if rule.empty_row:
                    visible[..., -1, :] = False
                inputs.masks.append(visible)
            else:
                inputs.masks.append(rule.function if isinstance(rule, PredicateRule) else rule)
        for score in self.scores:
            if isinstance(score, AlibiRule):
                slopes = 2.0 ** (-8 * torch.arange(1, self.heads_q + 1) / self.heads_q)
                if score.per_batch:
                    slopes = slopes * 0.5 ** torch.arange(len(self.sequences))[:, None]
                inputs.scores.append(ALiBi(slopes))
            elif isinstance(score, BiasRule):
                bias = torch.randn(self._broadcast_shape(score.form), generator=rng)
                if score.hide:
                    bias.view(-1)[::5] = -math.inf
                inputs.scores.append(Bias(bias))
            elif isinstance(score, SinkRule):
                logits = torch.randn(self.heads_q, generator=rng)
                inputs.scores.append(Sink(logits if score.value is None else torch.full_like(logits, score.value)))
            else:
                inputs.scores.append(score.function if isinstance(score, AddRule) else score)

    def _broadcast_shape(self, form: str) -> tuple[int, ...]:
        longest_q = max((seq_q for seq_q, _ in self.sequences), default=self.seq_q)
        longest_kv = self.seq_kv if self.form != "varlen" else max((seq_kv for _, seq_kv in self.lengths), default=0)
        if self.page_size:
            longest_kv = storage.table_width([n for _, n in self.lengths], self.page_size) * self.page_size
        sizes = {"b": len(self.sequences), "h": self.heads_q, "q": longest_q, "k": longest_kv, "1": 1}
        return tuple(sizes[letter] for letter in form)


def _largest(parts: Sequence[Tensor], heads: int) -> Tensor:
    """The largest absolute value of each head over all sequences, fp32; 1 where there is none."""
    found = torch.zeros(heads)
    for part in parts:
        if part.numel():
            found = torch.maximum(found, part.float().abs().amax((1, 2)))
    return torch.where(found == 0, 1, found)


_KEPT = 16  # cases: a case is built many times in a row, and a run works out the answers of a dozen ahead


@lru_cache(maxsize=_KEPT)
def _values(case: Case) -> list[SequenceTensors]:
    """The problem's values."""
    rng = torch.Generator().manual_seed(case._number)
    return [case._sequence(rng, seq_q, seq_kv) for seq_q, seq_kv in case.sequences]


@lru_cache(maxsize=_KEPT)
def _outline(case: Case) -> Inputs:
    return case._built([case._blank(seq_q, seq_kv) for seq_q, seq_kv in case.sequences], 0.0)
