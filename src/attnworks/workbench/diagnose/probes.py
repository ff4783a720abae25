"""Probes: the small problems on which wrong kernels differ from each other, and what a subject answers to them.

Each probe is chosen for a family of faults; that together they tell the known faults apart is measured
(``nearest.alike``, docs/kill_table.md). A kernel that refuses a probe, or has no LSE or gradients, is compared on the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.scores import Softcap
from attnworks.workbench.cases import AlibiRule, BiasRule, BooleanRule, Case, SinkRule
from attnworks.workbench.exact import given, run, same_bits
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.metrics import Standard
from attnworks.workbench.subjects import Declined, Subject
from attnworks.workbench.verify import Answers

FP16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
LARGEST_SAMPLE = 768


def named(name: str, seq_q: int, seq_kv: int, **fields: Any) -> Case:
    """A probe's case."""
    return Case(f"probe: {name}", "tells faults apart", seq_q=seq_q, seq_kv=seq_kv, **fields)


def _probes() -> tuple[Case, ...]:
    grads: dict[str, Any] = {"gradients": True}
    causal: dict[str, Any] = {"mask": (Causal(),), **grads}
    heads: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 4, **grads}
    varlen: dict[str, Any] = {
        "form": "varlen",
        "lengths": ((5, 50), (64, 10), (1, 90)),
        "spare": 6,
        "mask": (Causal(),),
    }
    decode: dict[str, Any] = {"form": "decode", "heads_q": 4, "lengths": ((1, 1), (1, 200), (1, 77))}
    even = ((1, 64), (1, 16), (1, 3), (1, 190))
    pack: dict[str, Any] = {
        "form": "varlen",
        "lengths": ((30, 20), (9, 60), (40, 41), (16, 16), (3, 33)),
        "heads_q": 4,
        "mask": (Causal(),),
    }
    few: dict[str, Any] = {"lengths": ((4, 4), (4, 150), (4, 77)), "mask": (Causal(),), "heads_q": 2}
    return (
        named("square", 128, 128, batch=2, **grads),
        named("off the tile", 163, 163, **grads),
        named("lengths apart", 40, 203, batch=2, **grads),
        named("whole tiles of queries", 64, 90),
        named("rising maximum", 70, 333, generator="rising maximum", **grads),
        named("falling maximum", 70, 333, generator="falling maximum"),
        named("large scores", 70, 200, generator="large scores"),
        named("large scores, causal", 40, 40, generator="large scores", mask=(Causal(),)),
        named("strongly negative", 40, 97, generator="strongly negative", **grads),
        named("nan query", 37, 37, generator="nan query"),
        named("fp16", 64, 128, dtype=FP16, **grads),
        named("bf16", 64, 128, dtype=BF16, **grads),
        named("large scores in bf16", 64, 128, dtype=BF16, generator="large scores"),
        named("16k keys in fp16", 3, 16_411, dtype=FP16),
        named("16k keys in bf16", 3, 16_411, dtype=BF16),
        named("causal", 130, 130, batch=2, **causal),
        named("causal, few queries", 40, 100, **causal),
        named("causal, rows without keys", 100, 40, **causal),
        named("causal from the top left", 40, 100, mask=(Causal("top-left"),), **grads),
        named("gradient of the lse", 40, 72, lse_cotangent=True, **grads),
        named("window", 100, 100, mask=(Window(7, 5),), **grads),
        named("window of 0 and open", 40, 56, mask=(Window(0, None),)),
        named("window open and beyond", 90, 40, mask=(Window(None, 60),)),
        named("causal and window", 90, 90, mask=(Causal(), Window(20, None)), **grads),
        named("boolean mask", 33, 70, batch=2, mask=(BooleanRule("bhqk", empty_row=True),), **grads),
        named("boolean mask without heads", 33, 70, batch=2, mask=(BooleanRule("b1qk"),)),
        named("6 heads on 3", 40, 72, batch=2, heads_q=6, heads_kv=3, **grads),
        named("8 heads on 2", 40, 72, batch=2, heads_q=8, heads_kv=2, **grads),
        named("6 heads on 2, causal", 70, 70, heads_q=6, **causal),
        named("unequal dims", 40, 72, head_dim_v=40, **grads),
        named("V wider", 40, 72, head_dim=40, **grads),
        named("head_dim 40", 40, 72, head_dim=40, head_dim_v=40, **grads),
        named("head_dim 160", 40, 72, head_dim=160, head_dim_v=160, **grads),
        named("scale 0.3", 40, 72, scale=0.3, **grads),
        named("scale -0.7", 40, 72, scale=-0.7, **grads),
        named("softcap", 50, 70, scores=(Softcap(2.0),), **grads),
        named("softcap, causal", 50, 70, scores=(Softcap(2.0),), mask=(Causal(),)),
        named("softcap of large scores", 50, 70, scores=(Softcap(20.0),), generator="large scores"),
        named("alibi", 50, 70, scores=(AlibiRule(),), **{**heads, "mask": (Causal(),)}),
        named("alibi, not causal", 50, 70, scores=(AlibiRule(),), **heads),
        named("alibi of each sequence", 50, 70, scores=(AlibiRule(True),), **heads),
        named("alibi, grouped", 50, 70, scores=(AlibiRule(),), **{**heads, "heads_kv": 2, "mask": (Causal(),)}),
        named("bias", 50, 70, scores=(BiasRule("bhqk"),), **heads),
        named("bias that hides", 50, 70, scores=(BiasRule("bhqk", hide=True),), **heads),
        named("bias without heads", 50, 70, scores=(BiasRule("b1qk"),), **heads),
        named("bias without sequences", 50, 70, scores=(BiasRule("1hqk"),), **heads),
        named("softcap, then bias", 50, 70, scores=(Softcap(2.0), BiasRule("b1qk"))),
        named("bias, then softcap", 50, 70, scores=(BiasRule("bhqk"), Softcap(2.0)), **heads),
        named("sink", 50, 70, scores=(SinkRule(),), **heads),
        named("sink 30000", 50, 70, scores=(SinkRule(30000.0),)),
        named("sink, rows without keys", 20, 6, scores=(SinkRule(0.5),), mask=(Causal(),)),
        named("gapped", 37, 75, batch=2, memory="gapped", heads_q=4, heads_kv=4),
        named("varlen", 64, 90, **varlen, **grads),
        named("varlen, full", 64, 90, **{**varlen, "lengths": ((20, 30), (7, 70), (33, 12)), "mask": ()}),
        named("varlen, grouped", 40, 60, **pack, **grads),
        named("varlen, window", 40, 60, **{**pack, "mask": (Window(7, 5),)}),
        named("varlen, alibi", 40, 60, **{**pack, "scores": (AlibiRule(),)}),
        named("varlen, head_dim 40", 40, 60, **{**pack, "mask": ()}, head_dim=40, head_dim_v=40, **grads),
        named("varlen, V narrower", 40, 60, **pack, head_dim_v=40),
        named("varlen, scale 0.3", 40, 60, **{**pack, "mask": ()}, scale=0.3, **grads),
        named("varlen, bf16", 40, 60, **{**pack, "dtype": BF16}),
        named("varlen, softcap", 40, 60, **{**pack, "scores": (Softcap(2.0),)}, **grads),
        named("varlen, sink", 40, 60, **{**pack, "scores": (SinkRule(),)}),
        named("varlen with empty", 9, 40, **{**pack, "lengths": ((4, 0), (0, 9), (9, 40), (7, 3))}, **grads),
        named("cache", 1, 220, **decode),
        named("cache, 8 heads on 2", 1, 256, **{**decode, "heads_q": 8, "lengths": even}),
        named(
            "cache, window",
            3,
            220,
            **{**decode, **few, "lengths": ((3, 9), (3, 150), (3, 77)), "mask": (Window(7, 5),)},
        ),
        named("cache, head_dim 80", 1, 220, **{**decode, "lengths": even}, head_dim=80, head_dim_v=80),
        named("cache, scale 0.3", 1, 220, **decode, scale=0.3),
        named("cache, fp16", 2, 220, **{**decode, **few, "lengths": ((2, 9), (2, 150), (2, 77)), "dtype": FP16}),
        named("cache, softcap", 1, 220, **decode, scores=(Softcap(2.0),)),
        named("cache, alibi", 1, 220, **{**decode, "heads_q": 8}, scores=(AlibiRule(),)),
        named("cache, sink", 1, 220, **{**decode, "heads_q": 8}, scores=(SinkRule(),)),
        named("cache with empty", 1, 96, **{**decode, "lengths": ((1, 0), (1, 40), (1, 96))}),
        named("pages of 16", 1, 220, **{**decode, "lengths": ((1, 50), (1, 200), (1, 77), (1, 33)), "page_size": 16}),
        named(
            "append over pages",
            2,
            96,
            **{**decode, "lengths": ((2, 17), (2, 66), (2, 40)), "new_keys": 2, "page_size": 16},
        ),
        named("append", 2, 96, **{**decode, "lengths": ((2, 17), (2, 66), (2, 40)), "new_keys": 2}),
        named("pages of 17", 4, 170, **{**decode, **few, "page_size": 17}),
        named("full pages", 1, 96, **{**decode, "lengths": ((1, 48), (1, 64), (1, 16)), "page_size": 16}),
        named("pages apart", 1, 220, **{**decode, "page_size": 16, "memory": "halves"}),
        named("append to pages", 2, 220, **{**decode, "lengths": ((2, 2), (2, 200)), "new_keys": 2, "page_size": 16}),
        named("append, causal", 3, 220, **{**decode, **few, "lengths": ((3, 3), (3, 150), (3, 77)), "new_keys": 3}),
        named("int8 cache", 1, 220, **{**decode, "dtype": BF16, "cache_dtype": torch.int8, "page_size": 16}),
        named("e4m3 cache", 1, 77, **{**decode, "lengths": ((1, 40), (1, 77)), "dtype": BF16, "cache_dtype": E4M3}),
    )


@dataclass(frozen=True)
class Probe:
    """A case with what lies around its tensors: a kernel that reads past them answers otherwise with other poison."""

    case: Case
    poison: float = math.nan

    @property
    def name(self) -> str:
        shown = self.case.name.removeprefix("probe: ")
        return shown if math.isnan(self.poison) else f"{shown}, {self.poison:g} behind the end"


def probes(seed: int = 0) -> tuple[Probe, ...]:
    """The probes, their inputs drawn with ``seed``."""
    made = [Probe(case.with_seed(seed)) for case in _probes()]
    return (*made, *(Probe(probe.case, 1.0) for probe in made if probe.name == "cache"))


@dataclass
class Truth:
    """What is right for one tensor of a probe, flattened: values, elementwise budgets, budget of the whole error's
    norm. ``sample``: the elements that wrong kernels are compared on, every row among them."""

    standard: Standard
    want: Tensor
    budget: Tensor
    norm: float
    norm_budget: float
    sample: Tensor


@dataclass
class Answer:
    """One tensor of a subject's answer. ``got`` and ``wrong`` are of the sample; ``relative``: Frobenius error over the
    norm of the right values; ``parts``: the whole tensor, sequence by sequence."""

    failed: bool
    got: Tensor
    wrong: Tensor
    relative: float
    parts: list[Tensor]


@dataclass
class Observation:
    """A subject's answers to one probe. ``refused``: why it did not run; ``raised``: the exception it ended in;
    ``changes``: two calls differed in a bit; ``writes``: it changed its inputs; ``spills``: packed rows that belong to
    no sequence are not 0."""

    answers: dict[str, Answer] = field(default_factory=dict)
    refused: str = ""
    raised: str = ""
    changes: bool = False
    writes: bool = False
    spills: bool = False

    @property
    def failed(self) -> bool:
        flagged = self.raised or self.changes or self.writes or self.spills
        return bool(flagged or any(a.failed for a in self.answers.values()))


class Bench:
    """One probe with its truths, worked out once for all subjects."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.long = probe.case.seq_kv > 1000

    @cached_property
    def truths(self) -> dict[str, Truth]:
        answers = Answers(self.probe.case)
        found = answers.gradients if self.probe.case.gradients else answers.forward
        return {name: _truth(standard) for name, standard in found.items()}

    def observe(
        self, subject: Subject, *, properties: bool = True, wrong_ones: bool = True, gradients: bool = True
    ) -> Observation:
        """Run a subject once, twice where ``properties`` asks whether calls repeat and leave their inputs alone.
        ``wrong_ones``: wrong results are asked for a second time, to see whether they come again; known faults'
        are not. ``gradients``: also where the probe has some."""
        inputs = self.probe.case.build(self.probe.poison)
        refused = subject.reasons(inputs)
        if refused:
            return Observation(refused="; ".join(refused))
        getattr(subject, "seen", []).clear()
        try:
            first, answers = None, None
            gradients = gradients and self.probe.case.gradients
            if wrong_ones or not gradients:
                first = run(subject, inputs)
                answers = self._judged(first)
            if gradients and (answers is None or not answers["out"].failed):
                fresh = properties or first is not None  # inputs that no call may have written into
                asked = self.probe.case.build(self.probe.poison) if fresh else inputs
                answers = self._with_gradients(subject, asked) or answers
            if answers is None:
                first = run(subject, inputs)
                answers = self._judged(first)
            seen = Observation(answers)
            if properties or (wrong_ones and "out" in seen.answers and seen.answers["out"].failed):
                first = first or run(subject, inputs)
                before = self.probe.case.build(self.probe.poison)
                kept = given(before)
                seen.writes = any(not same_bits(kept[name], tensor) for name, tensor in given(inputs).items())
                again = run(subject, before)
                seen.changes = any(not same_bits(a, b) for n in first for a, b in zip(first[n], again[n], strict=True))
            if self.probe.case.spare:
                out = subject(self.probe.case.build(self.probe.poison))[0]
                seen.spills = bool((inputs.outside(out) != 0).any())
            seen.writes |= bool(getattr(subject, "seen", ()))  # a guarded subject works on copies, and tells
        except Declined as error:
            return Observation(refused=str(error))
        except Exception as error:  # whatever a kernel under test raises
            return Observation(raised=f"{type(error).__name__}: {error}")
        return seen

    def _with_gradients(self, subject: Subject, inputs: Inputs) -> dict[str, Answer] | None:
        """Values and gradients, these only where the output is right; None where the subject has none."""
        if subject.reasons(inputs, differentiable=True):
            return None
        leaves = inputs.differentiable()
        out, lse = subject(inputs)
        if not out.requires_grad:
            return None
        through_lse = self.probe.case.lse_cotangent
        if through_lse and (lse is None or not lse.requires_grad):
            return None
        found = self._judged(inputs.gather_results(out.detach(), None if lse is None else lse.detach()))
        if found["out"].failed:
            return found
        grads = inputs.backward(leaves, out, lse if through_lse else None)
        return found | self._judged(inputs.gather_gradients(grads))

    def _judged(self, found: dict[str, list[Tensor]]) -> dict[str, Answer]:
        return {name: self._judge(name, parts) for name, parts in found.items()}

    def lost(self, name: str, parts: Sequence[Tensor] = ()) -> Answer:
        """The answer of a kernel that gives none, or one of another shape."""
        truth = self.truths[name]
        lost = torch.full_like(truth.want[truth.sample], torch.nan)
        return Answer(True, lost, torch.ones_like(lost, dtype=torch.bool), math.inf, list(parts))

    def _judge(self, name: str, parts: list[Tensor]) -> Answer:
        truth = self.truths[name]
        if [x.shape for x in parts] != [x.shape for x in truth.standard.want]:
            return self.lost(name, parts)
        got = _flat(parts)
        finite = got.isfinite() & truth.want.isfinite()
        error = torch.where(finite, (got - truth.want).abs(), 0)
        strange = ~finite & ~((got == truth.want) | (got.isnan() & truth.want.isnan()))
        # A value beyond the dtype's largest rounds to infinity.
        strange &= ~((got == torch.sign(truth.want) * torch.inf) & (truth.want.abs() > torch.finfo(parts[0].dtype).max))
        wrong = (error > truth.budget) | strange
        norm = float(error.norm())
        failed = bool(wrong.any()) or norm > truth.norm_budget
        relative = norm / truth.norm if truth.norm else 0.0
        return Answer(failed, got[truth.sample], wrong[truth.sample], relative, parts)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().double().flatten() for part in parts])


def _truth(standard: Standard) -> Truth:
    want = _flat(standard.want)
    kept, start = [], 0
    for part in standard.want:
        kept.append(_sampled(part) + start)
        start += part.numel()
    sample = torch.cat(kept)
    if len(sample) > LARGEST_SAMPLE:
        sample = sample[torch.linspace(0, len(sample) - 1, LARGEST_SAMPLE).long()]
    budget = float(standard.regions["tensor"].max()) if standard.regions else math.inf
    return Truth(standard, want, _flat(standard.elementwise), standard.norm, budget, sample)


def _sampled(part: Tensor) -> Tensor:
    """One channel of every row of (..., rows, channels), another in each; everything of smaller tensors."""
    if part.dim() < 3 or part.numel() <= 256:
        return torch.arange(part.numel())
    channels = part.shape[-1]
    row = torch.arange(part.numel() // channels)
    return row * channels + (row * 7) % channels
