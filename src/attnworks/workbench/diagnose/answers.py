"""What subjects and known faults answer, probe by probe, and how far these answers are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnworks.workbench.diagnose.likeness import Rows
from attnworks.workbench.diagnose.probes import Bench, Observation
from attnworks.workbench.diagnose.variants import UNSTEADY, UNWRITTEN, Variant, Written
from attnworks.workbench.modifiers import SPLIT, TILE
from attnworks.workbench.mutants import Mutant

# From this distance on two answers are no more alike than those of faults that have nothing to do with each other.
FAR = 0.46
WEIGHTS = {"out": 1.0}
OTHERS = 0.5  # lse and gradients
# The probes on which a call is repeated, and what it weighs that calls differ or change their inputs.
STEADINESS = ("square", "off the tile", "gapped", "varlen", "cache")
FLAGS = ("changes", "writes", "spills")
STEADINESS_WEIGHT = 20.0


@dataclass
class Mean:
    """A weighted mean for each variant, 1 where nothing weighs."""

    total: Tensor
    weight: Tensor

    def add(self, values: Tensor, weight: Tensor) -> None:
        self.total += values * weight
        self.weight += weight

    def mean(self) -> Tensor:
        return torch.where(self.weight > 0, self.total / self.weight.clamp_min(1e-9), 1.0)


@dataclass
class Totals:
    """Sums over probes, for each variant. Mean distances: ``everywhere``; in the calls that the subject gets wrong
    (``failing``); on the elements that it gets wrong (``in_part``). Numbers of tensors: wrong in both and ``alike``,
    ``wrong`` in the subject, and of those alike how many differ by more than rounding (``left``)."""

    everywhere: Mean
    failing: Mean
    in_part: Mean
    alike: Tensor
    wrong: Tensor
    left: Tensor

    @classmethod
    def zero(cls, count: int) -> Totals:
        everywhere, failing, in_part = (Mean(*torch.zeros(2, count)) for _ in range(3))
        return cls(everywhere, failing, in_part, *torch.zeros(3, count))


class Table:
    """The answers of all variants to one probe, a row each, filled as they are needed. ``gradients``: also those, which
    count only beside a right output."""

    def __init__(self, known: Known, chosen: Sequence[Variant], gradients: bool = True) -> None:
        self.gradients = gradients
        self.known, self.bench, self.chosen = known, known.bench, chosen
        count, asked = len(chosen), known.asked
        self.unknown = torch.tensor([v.fault in asked[v.written] for v in chosen])
        free = torch.tensor([v.fault in UNWRITTEN for v in chosen])
        self.rows = {name: Rows(truth, free) for name, truth in self.bench.truths.items()}
        self.flags = {flag: torch.zeros(count, dtype=torch.bool) for flag in FLAGS}

    def compare(self, seen: Observation, chosen: list[int], totals: Totals) -> None:
        """Add to the totals what a subject's answers and those of the chosen variants differ in."""
        for place in chosen:
            if self.unknown[place]:
                self._fill(place)
        index = torch.tensor(chosen)
        wrong = seen.answers["out"].failed | self.rows["out"].failed[index]
        if "lse" in seen.answers:  # what a wrong LSE does to gradients depends on whether backward reads it
            wrong = wrong | seen.answers["lse"].failed | self.rows["lse"].failed[index]
        for name, answer in seen.answers.items():
            if not self.gradients and name not in ("out", "lse"):
                continue
            rows = self.rows[name]
            failed = rows.failed[index]
            counts = failed | answer.failed
            if name not in ("out", "lse"):
                counts &= ~wrong
            both = counts & failed & answer.failed
            distance, in_part = torch.ones(2, len(chosen))
            if bool(both.any()):
                distance[both] = 1 - rows.likeness(index[both], answer)
                in_part[both] = 1 - rows.share(index[both], answer)
            weight = WEIGHTS.get(name, OTHERS) * counts
            alike = both & (distance <= FAR)
            if bool(alike.any()):
                totals.left[alike] += rows.apart(index[alike], answer)
            totals.everywhere.add(distance, weight)
            totals.failing.add(distance, weight * seen.failed)
            totals.in_part.add(in_part, weight * answer.failed)
            totals.alike += alike
            totals.wrong += counts & answer.failed
        for flag in FLAGS:
            if self.bench.probe.name in STEADINESS or getattr(seen, flag):
                theirs = self.flags[flag][index]
                mine = torch.full_like(theirs, getattr(seen, flag))
                weight = STEADINESS_WEIGHT * (mine | theirs)
                differ = (mine != theirs).float()
                totals.everywhere.add(differ, weight)
                totals.failing.add(differ, weight * seen.failed)
                totals.in_part.add(differ, weight * seen.failed)
                totals.alike += mine & theirs
                totals.wrong += mine

    def _fill(self, place: int) -> None:
        seen = self.known.answers(self.chosen[place], self.gradients)
        for name, rows in self.rows.items():
            if seen.raised:  # it followed a page number into nowhere
                rows.put(place, self.bench.lost(name))
            elif name in seen.answers:  # gradients do not count where the output is wrong
                rows.put(place, seen.answers[name])
        for flag in FLAGS:
            self.flags[flag][place] = getattr(seen, flag)
        self.unknown[place] = False


class Known:
    """What variants answer to one probe, as far as that was asked for."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._seen: dict[tuple[Variant, bool], Observation] = {}

    @cached_property
    def asked(self) -> dict[bool, set[str]]:
        return {written: _asked(self.bench, written) for written in (False, True)}

    def answers(self, v: Variant, gradients: bool = True) -> Observation:
        """``gradients``: whether they are asked for, if the probe has some."""
        if v.tile_kv == TILE and not v.split_kv and max(kv for _, kv in self.bench.probe.case.sequences) <= SPLIT:
            v = replace(v, split_kv=SPLIT)  # which is one split, as without any
        asked = v, gradients and self.bench.probe.case.gradients
        if asked not in self._seen:
            seen = self.bench.observe(
                v.subject(self.bench.long), properties=v.fault in UNSTEADY, wrong_ones=False, gradients=gradients
            )
            # Only what is wrong is compared, on the sample.
            seen.answers = {name: replace(a, parts=[]) for name, a in seen.answers.items() if a.failed}
            self._seen[asked] = seen
        return self._seen[asked]


def gradients_count(seen: Observation) -> bool:
    """Whether a subject's gradients say something: output and LSE are right."""
    return not any(seen.answers[name].failed for name in ("out", "lse") if name in seen.answers)


def _asked(bench: Bench, written: bool) -> set[str]:
    """The faults that the tiled kernel comes by on its way through a probe: with any other it answers rightly."""
    asked: set[str] = set()

    class Listener(Written if written else Mutant):  # type: ignore[misc]
        def has(self, fault: str) -> bool:
            asked.add(fault)
            return False

    bench.observe(Listener(), properties=False)
    return asked
