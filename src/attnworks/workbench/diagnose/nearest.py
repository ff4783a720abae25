"""The nearest mutant: which known fault answers the probes as the subject does.

For one tensor of one probe, two kernels of which only one is wrong are 1 apart. Where both are wrong, it counts that
they are, on which elements (Jaccard) and, twice, by what (the share of the errors that agrees, beyond what errors agree
in by chance); what is equal in all three is 0 apart. Where neither is wrong nothing is learned. The distance is the
mean over everything that either gets wrong. A fault may be there under a condition only, on one path of several: a
fault that is near in all calls in which the subject fails comes into consideration too, ``NARROWED`` further away,
however much it gets wrong elsewhere. Gradients count only where the output is right: what is wrong in them
otherwise follows from it, in a different way in every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.scores import ALiBi, Bias
from attnworks.workbench import modifiers
from attnworks.workbench.cases import BooleanRule
from attnworks.workbench.diagnose.probes import Answer, Bench, Observation, Probe, Truth, probes
from attnworks.workbench.faults import FAULTS, WAYS
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.oracle import visible
from attnworks.workbench.subjects import Outcome, Subject

Progress = Callable[[str, int, int], None]

# Faults whose answers depend on where tiles or partial results begin, and the tile sizes they are tried with.
TILED = (
    "accumulator not rescaled",
    "sum not rescaled",
    "sum and accumulator not rescaled",
    "tile borders counted twice",
    "V of another tile",
    "rescaled upside down",
    "rescaled after adding",
    "rescaled by another exponent",
    "window's first tile skipped",
    "mask or bias at another address",
    "first tile only",
    "last tile only",
    "accumulator overwritten by each tile",
    "last partial tile dropped",
    "tail keys unmasked",
    "tail rows unwritten",
    "causal by tile",
    "diagonal tile skipped",
    "dq overwritten by each tile",
    "last tile missing in dq",
    "padding scored 0 in backward",
    "dk, dv of the last query tile",
    "last query tile missing in dk, dv",
    "last tile missing in dk, dv",
    "tail rows unwritten in dq",
)
# Those among them that leave the output right.
BACKWARD = TILED[TILED.index("dq overwritten by each tile") :]
# Faults that show elsewhere in kernels that take masks and biases as tensors.
WRITTEN = (
    "causal hides itself",
    "causal shows the next",
    "causal ignored",
    "causal upside down",
    "causal by tile",
    "diagonal tile skipped",
    "aligned top-left",
    "aligned bottom-right",
    "mask of head 0",
    "boolean mask inverted",
    "boolean mask ignored",
    "bias ignored",
    "bias scaled",
    "bias of head 0",
    "bias of sequence 0",
    "bias of row 0",
    "mask or bias at another address",
)
SPLIT = ("splits averaged", "splits summed")
TILE_SIZES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
# Where sizes show.
TILE_PROBES = (
    *("off the tile", "lengths apart", "rising maximum", "falling maximum", "strongly negative", "causal"),
    *("varlen, full", "varlen, grouped", "cache, 8 heads on 2", "pages of 16"),
)
# From this distance on two answers are no more alike than those of faults that have nothing to do with each other.
FAR = 0.46
# What a fault's distance is at least, where the subject has it under a condition only, and what its distance over all
# weighs then: of two that explain the same, the one that says less about other calls comes first.
NARROWED, ELSEWHERE = 0.3, 0.05
CHANCE = 0.25  # what errors that have nothing to do with each other agree in
ROUNDED = 0.02  # of an error, what rounding may change in it
SMALL = 0.03  # relative errors below this are roundings: their size is compared, not their values
WEIGHTS = {"out": 1.0}
OTHERS = 0.5  # lse and gradients
# The probes on which a call is repeated, and what it weighs that calls differ or change their inputs.
STEADINESS = ("square", "off the tile", "gapped", "varlen", "cache")
STEADINESS_WEIGHT = 20.0
FIRST_PROBES, FINALISTS, BEST_WAYS = 4, 14, 2
SIZE_PROBES, SIZED_FINALISTS, BEST_SIZES = 2, 6, 2
# Faults that show in what a second call returns or in what the first one left behind.
UNSTEADY = ("changes from call to call", "writes into q")


@dataclass(frozen=True)
class Variant:
    """A fault with the sizes it is tried with."""

    fault: str
    tile_kv: int = modifiers.TILE
    split_kv: int = modifiers.SPLIT
    way: int = 0  # how the fault is made
    written: bool = False  # masks and ALiBi as SDPA takes them: tensors

    @property
    def usual(self) -> bool:
        return (self.tile_kv, self.split_kv) == (modifiers.TILE, modifiers.SPLIT)

    def subject(self) -> Mutant:
        kind = _Written if self.written else Mutant
        return kind(self.fault, tile_kv=self.tile_kv, split_kv=self.split_kv, way=self.way)


class _Written(Mutant):
    """A mutant that is called as SDPA is: ``is_causal`` where that says it, else masks and ALiBi as tensors."""

    def __call__(self, inputs: Inputs, **options: Any) -> Outcome:
        case = inputs.case
        square = case.seq_q == case.seq_kv
        own = all(isinstance(m, Causal) and (square or m.align == "top-left") for m in inputs.masks)
        if case.form == "dense" and inputs.masks and not (own and not inputs.scores and len(inputs.masks) == 1):
            inputs.masks = [torch.stack([visible(inputs, b) for b in range(case.batch)])]
        if case.form == "dense":
            behind = (torch.arange(case.seq_q)[:, None] + case.seq_kv - case.seq_q - torch.arange(case.seq_kv)).abs()
            inputs.scores = [
                Bias(-s.slopes.view(-1, case.heads_q, 1, 1) * behind) if isinstance(s, ALiBi) else s
                for s in inputs.scores
            ]
        return super().__call__(inputs, **options)


@dataclass(frozen=True)
class Candidate:
    """A known fault and how far it is from the subject: 0 answers alike everywhere, 1 shares nothing with it.
    ``tile``: the tile or split size that fits best, -n for n splits, 0 where none matters."""

    fault: str
    distance: float
    tile: int
    explained: int  # how many wrong tensors of the subject the fault has wrong in a like way
    wrong: int
    left: int  # how many of those still differ from the fault's by more than rounding
    narrowed: bool = False  # the fault would show in calls that the subject gets right

    @property
    def second_fault(self) -> bool:
        """Whether what is left calls for another fault. Not where it may come from another tile, split or way."""
        return self.fault not in {*TILED, *SPLIT, *UNSTEADY, *WAYS} and self.left > 0


def variants(faults: Iterable[str] = tuple(FAULTS)) -> list[Variant]:
    found = []
    for fault in faults:
        ways = range(WAYS.get(fault, 0) + 1)
        found += [Variant(fault, way=way) for way in ways]
        if fault in TILED:
            found += [Variant(fault, size, 0, way) for size in TILE_SIZES for way in ways]
        if fault in WRITTEN:
            found += [Variant(fault, way=way, written=True) for way in ways]
        if fault in SPLIT:
            found += [Variant(fault, min(size, 32), size, way) for size in TILE_SIZES for way in ways]
            found += [Variant(fault, split_kv=-parts, way=way) for parts in (2, 3, 4, 8) for way in ways]
    return found


class Corpus:
    """Every known fault's answers to the probes, worked out as they are asked for."""

    def __init__(self, chosen: Sequence[Probe] | None = None, *, seed: int = 0) -> None:
        self.benches = [Bench(probe) for probe in (probes(seed) if chosen is None else chosen)]
        self.variants = variants()
        self._tables: dict[int, _Table] = {}
        self._known: dict[Bench, _Known] = {}

    def view(self, more: Sequence[Probe] = ()) -> Corpus:
        """A corpus of the same probes, with all that is known about them, and of ``more``; what sizes are tried in it
        are its own."""
        found = Corpus(more)
        found.benches, found._known = self.benches + found.benches, self._known
        return found

    def observe(self, subject: Subject, progress: Progress | None = None) -> list[Observation]:
        """A subject's answers to every probe."""
        found = [Observation(refused="the fault shows on shorter ones") for _ in self.benches]
        for done, place in enumerate(sorted(range(len(found)), key=lambda n: self.benches[n].long)):
            bench = self.benches[place]
            if progress:
                progress(f"asking: {bench.probe.name}", done, len(self.benches))
            if not bench.long or not any(one.failed for one in found):
                found[place] = bench.observe(subject, properties=bench.probe.name in STEADINESS)
        return found

    def try_size(self, tile_kv: int) -> None:
        """Try the faults of tiles with one more tile size."""
        if tile_kv not in TILE_SIZES:
            self.variants += [
                Variant(fault, tile_kv, 0, way) for fault in TILED for way in range(WAYS.get(fault, 0) + 1)
            ]
            self._tables.clear()

    def rank(self, seen: Sequence[Observation], progress: Progress | None = None) -> list[Candidate]:
        """The faults that come near, the nearest first; none for a subject that fails nowhere.

        All faults are compared on a few of the probes that the subject fails on, the best of them on every probe."""
        if all(one.raised for one in seen if one.failed):  # where it does so is all there is to compare
            seen = [
                replace(one, answers={"out": bench.lost("out")}) if one.raised else one
                for bench, one in zip(self.benches, seen, strict=True)
            ]
        failing = [place for place, one in enumerate(seen) if one.failed and one.answers]
        if not failing:
            return []
        few = sorted({failing[round(n * (len(failing) - 1) / (FIRST_PROBES - 1))] for n in range(FIRST_PROBES)})
        tensors = self._takes_mask_tensors(seen)
        usual = [place for place, v in enumerate(self.variants) if v.usual and (tensors or not v.written)]
        first = self._distances(seen, few, usual, progress)[:, 0]
        best = _best_ways([(self.variants[usual[n]].fault, usual[n]) for n in first.argsort(stable=True).tolist()])
        finalists = best + self._sizes(seen, failing, progress)
        found = self._distances(seen, range(len(seen)), finalists, progress)
        ranked: dict[str, Candidate] = {}
        for place in found[:, 0].argsort(stable=True).tolist():
            v, (distance, *counts) = self.variants[finalists[place]], found[place].tolist()
            size = v.split_kv if v.fault in SPLIT else v.tile_kv if v.fault in TILED else 0
            explained, wrong, left, narrowed = map(int, counts)
            ranked.setdefault(v.fault, Candidate(v.fault, distance, size, explained, wrong, left, bool(narrowed)))
        return list(ranked.values())

    def _takes_mask_tensors(self, seen: Sequence[Observation]) -> bool:
        """Whether the subject was given a mask as a tensor: one that never is has no faults of such masks."""
        asked = [any(isinstance(rule, BooleanRule) for rule in bench.probe.case.mask) for bench in self.benches]
        return not any(asked) or any(one and not s.refused for one, s in zip(asked, seen, strict=True))

    def _sizes(self, seen: Sequence[Observation], failing: list[int], progress: Progress | None) -> list[int]:
        """The best tile sizes of the nearest of the faults that have such, by the first probes that tell."""
        telling = [place for place in failing if _tells_sizes(self.benches[place])][:SIZE_PROBES]
        if not telling:
            return []
        if self.benches[telling[0]].probe.case.form != "dense":
            del telling[1:]  # several sequences tell as much
        wrong = {seen[place].answers["out"].failed for place in telling if seen[place].answers}
        sized = [n for n, v in enumerate(self.variants) if not v.usual and (v.fault not in BACKWARD) in wrong]
        found = self._distances(seen, telling, sized, progress)[:, 0]
        kept: dict[str, list[int]] = {}
        for place in found.argsort(stable=True).tolist():
            kept.setdefault(self.variants[sized[place]].fault, []).append(sized[place])
        return [place for places in list(kept.values())[:SIZED_FINALISTS] for place in places[:BEST_SIZES]]

    def _distances(
        self, seen: Sequence[Observation], places: Iterable[int], chosen: list[int], progress: Progress | None
    ) -> Tensor:
        """(variants, 5): the distance, how many wrong tensors the two share, how many the subject has, in how many of
        the shared ones the two differ, and whether the distance is one of a fault under a condition."""
        totals, places = torch.zeros(7, len(chosen)), list(places)
        for done, place in enumerate(places):
            bench, observation = self.benches[place], seen[place]
            if progress:
                progress(f"comparing: {bench.probe.name}", done, len(places))
            if not observation.answers:
                continue
            if place not in self._tables:
                known = self._known.setdefault(bench, _Known(bench))
                self._tables[place] = _Table(known, self.variants)
            totals += self._tables[place].compare(observation, chosen)
        everywhere, mine = (
            torch.where(weight > 0, total / weight.clamp_min(1e-9), 1.0) for total, weight in (totals[:2], totals[2:4])
        )
        narrow = NARROWED + (1 - NARROWED) * mine + ELSEWHERE * everywhere
        return torch.stack((torch.minimum(everywhere, narrow), *totals[4:], (narrow < everywhere).float())).T


def _tells_sizes(bench: Bench) -> bool:
    """Whether sizes show in a probe; a case that was found or named because it fails may be the only one that tells."""
    return bench.probe.name in TILE_PROBES or not bench.probe.case.name.startswith("probe: ")


def _best_ways(places: Iterable[tuple[str, int]]) -> list[int]:
    """The nearest two ways of each of the nearest faults, of (fault, place) in the order of their distances."""
    kept: dict[str, list[int]] = {}
    for fault, place in places:
        kept.setdefault(fault, []).append(place)
    return [place for ways in list(kept.values())[:FINALISTS] for place in ways[:BEST_WAYS]]


class _Table:
    """The answers of all variants to one probe, a row each, filled as they are needed."""

    def __init__(self, known: _Known, chosen: Sequence[Variant]) -> None:
        self.known, self.bench, self.chosen = known, known.bench, chosen
        count, asked = len(chosen), known.asked
        self.unknown = torch.tensor([v.fault in asked[v.written] for v in chosen])
        self.rows = {name: _Rows(truth, count) for name, truth in self.bench.truths.items()}
        self.changes, self.writes = torch.zeros(2, count, dtype=torch.bool)

    def compare(self, seen: Observation, chosen: list[int]) -> Tensor:
        """(distances, weights, both again if the subject fails, wrong in both and alike, wrong in the subject, and of
        those alike how many differ by more than rounding), each for every chosen variant."""
        for place in chosen:
            if self.unknown[place]:
                self._fill(place)
        index = torch.tensor(chosen)
        totals = torch.zeros(7, len(chosen))
        wrong = seen.answers["out"].failed | self.rows["out"].failed[index]
        if "lse" in seen.answers:  # what a wrong LSE does to gradients depends on whether backward reads it
            wrong = wrong | seen.answers["lse"].failed | self.rows["lse"].failed[index]
        for name, answer in seen.answers.items():
            rows = self.rows[name]
            failed = rows.failed[index]
            counts = failed | answer.failed
            if name not in ("out", "lse"):
                counts &= ~wrong
            both = counts & failed & answer.failed
            distance = torch.ones(len(chosen))
            if bool(both.any()):
                distance[both] = 1 - rows.likeness(index[both], answer)
            weight = WEIGHTS.get(name, OTHERS) * counts
            alike = both & (distance <= FAR)
            left = torch.zeros_like(alike)
            if bool(alike.any()):
                left[alike] = rows.apart(index[alike], answer)
            mine = counts & answer.failed
            own = weight * seen.failed
            totals += torch.stack(
                (weight * distance, weight, own * distance, own, alike.float(), mine.float(), left.float())
            )
        if self.bench.probe.name in STEADINESS or seen.changes or seen.writes:
            for flag, theirs in ((seen.changes, self.changes[index]), (seen.writes, self.writes[index])):
                mine = torch.full_like(theirs, flag)
                weight = STEADINESS_WEIGHT * (mine | theirs)
                shared = (mine & theirs).float()
                own, differ = weight * seen.failed, mine != theirs
                totals += torch.stack((weight * differ, weight, own * differ, own, shared, mine.float(), 0 * weight))
        return totals

    def _fill(self, place: int) -> None:
        seen = self.known.answers(self.chosen[place])
        for name, rows in self.rows.items():
            if seen.raised:  # it followed a page number into nowhere
                rows.put(place, self.bench.lost(name))
            elif name in seen.answers:  # gradients do not count where the output is wrong
                rows.put(place, seen.answers[name])
        self.changes[place], self.writes[place], self.unknown[place] = seen.changes, seen.writes, False


class _Known:
    """What variants answer to one probe, as far as that was asked for."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._seen: dict[Variant, Observation] = {}

    @cached_property
    def asked(self) -> dict[bool, set[str]]:
        return {written: _asked(self.bench, written) for written in (False, True)}

    def answers(self, v: Variant) -> Observation:
        if v not in self._seen:
            seen = self.bench.observe(v.subject(), properties=v.fault in UNSTEADY, wrong_ones=False)
            # Only what is wrong is compared, on the sample.
            seen.answers = {name: replace(a, parts=[]) for name, a in seen.answers.items() if a.failed}
            self._seen[v] = seen
        return self._seen[v]


class _Rows:
    """One tensor of one probe as every variant answers it; right until told otherwise. Only wrong answers are kept."""

    def __init__(self, truth: Truth, count: int) -> None:
        self.budget = truth.budget[truth.sample].float()
        self.failed = torch.zeros(count, dtype=torch.bool)
        self.relative = torch.zeros(count)
        self.want = truth.want[truth.sample].float()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, place: int, answer: Answer) -> None:
        self.failed[place], self.relative[place] = answer.failed, answer.relative
        if answer.failed:
            self.kept[place] = answer.got.float(), answer.wrong

    def _wrong_ones(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """What variants answer, and on which elements that is wrong: (variants, sample) each."""
        got, wrong = zip(*(self.kept[place] for place in index.tolist()), strict=True)
        return torch.stack(got), torch.stack(wrong)

    def apart(self, index: Tensor, answer: Answer) -> Tensor:
        """Whether variants that are wrong as the subject is differ from it by more than both their roundings, which
        may be larger on wrong values than on right ones."""
        got, theirs = answer.got.float(), self._wrong_ones(index)[0]
        error = torch.maximum((theirs - self.want).abs(), (got - self.want).abs())
        differ = (theirs - got).abs() > 2 * self.budget + ROUNDED * error
        strange = (theirs.isfinite() != got.isfinite()) | (theirs.isnan() != got.isnan())
        small = (self.relative[index] < SMALL) & (answer.relative < SMALL)
        return (differ | strange).any(1) & ~small

    def likeness(self, index: Tensor, answer: Answer) -> Tensor:
        """In [0, 1], for variants that are wrong where the subject is."""
        got, (theirs, wrong) = answer.got.float(), self._wrong_ones(index)
        either = wrong | answer.wrong
        count = either.sum(1)
        jaccard = torch.where(count > 0, (wrong & answer.wrong).sum(1) / count.clamp_min(1), 1.0)
        errors = torch.maximum((theirs - self.want).abs(), (got - self.want).abs())
        agree = 1 - ((theirs - got).abs() / errors.clamp_min(1e-30)).clamp(0, 1)
        same = (theirs == got) | (theirs.isnan() & got.isnan())
        agree = torch.where(same, 1.0, torch.where(agree.isnan(), 0.0, agree))
        # Where the error is too large in all, but in no one element, every element tells as much as its error.
        weight = torch.where(count[:, None] > 0, either.float(), errors.nan_to_num(0, 0, 0))
        values = (agree * weight).sum(1) / weight.sum(1).clamp_min(1e-30)
        relative = self.relative[index]
        ratio = torch.log2(relative.clamp_min(1e-12) / max(answer.relative, 1e-12)).abs()
        size = (1 - ratio / 3).clamp(0, 1)
        small = (relative < SMALL) & (answer.relative < SMALL)
        values = torch.where(small, torch.maximum(values, size), values)
        jaccard = torch.where(small, torch.maximum(jaccard, size), jaccard)
        values = ((values - CHANCE) / (1 - CHANCE)).clamp_min(0)
        return (1 + jaccard + 2 * values) / 4


def _asked(bench: Bench, written: bool) -> set[str]:
    """The faults that the tiled kernel comes by on its way through a probe: with any other it answers rightly."""
    asked: set[str] = set()

    class Listener(_Written if written else Mutant):  # type: ignore[misc]
        def has(self, fault: str) -> bool:
            asked.add(fault)
            return False

    bench.observe(Listener(), properties=False)
    return asked
