"""The nearest mutant: which known fault answers the probes as the subject does.

For one tensor of one probe, two kernels of which only one is wrong are 1 apart. Where both are wrong, it counts that
they are, on which elements (Jaccard) and, twice, by what (the share of the errors that agrees, beyond what errors agree
in by chance); what is equal in all three is 0 apart. Where neither is wrong nothing is learned. The distance is the
mean over everything that either gets wrong. A fault may be there under a condition only, on one path of several: a
fault that is near in all calls in which the subject fails comes into consideration too, ``NARROWED`` further away,
however much it gets wrong elsewhere; and so does one that gives the very numbers of the elements that are wrong
(``IN_PART``), such as one head's. Gradients count only where the output is right: what is wrong in them
otherwise follows from it, in a different way in every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnworks.workbench.cases import BooleanRule, Case
from attnworks.workbench.diagnose.answers import STEADINESS, Known, Table, Totals, gradients_count
from attnworks.workbench.diagnose.probes import Bench, Observation, Probe, probes
from attnworks.workbench.diagnose.variants import (
    BACKWARD,
    LONG_WAYS,
    SPLIT,
    TILE_SIZES,
    TILED,
    UNSTEADY,
    Variant,
    variants,
)
from attnworks.workbench.subjects import Subject
from attnworks.workbench.ways import WAYS

Progress = Callable[[str, int, int], None]

# Where sizes show.
TILE_PROBES = (
    *("off the tile", "lengths apart", "rising maximum", "falling maximum", "strongly negative", "causal"),
    *("varlen, full", "varlen, grouped", "cache, 8 heads on 2", "pages of 16"),
)
# What a fault's distance is at least, where the subject has it under a condition only (in some calls, or in these on
# some elements), and what its distance over all weighs then: of two that explain the same, the one that says less about
# other calls comes first.
NARROWED, IN_PART, ELSEWHERE = 0.3, 0.35, 0.05
# What it is at least where such a fault gives the very numbers: nearer than another one that comes near everywhere.
EXACT = 0.15
SAME = 0.02  # distances that differ by less are alike
FIRST_PROBES, HOPEFUL, FINALISTS, BEST_WAYS = 4, 150, 18, 2
SIZE_PROBES, COARSE_FINALISTS, SIZED_FINALISTS, BEST_SIZES = 2, 10, 6, 2


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
    narrowed: bool = False  # the fault would show in calls, or on elements, that the subject gets right
    number: float | None = None  # the one in the fault that was read from the subject's answers

    @property
    def second_fault(self) -> bool:
        """Whether what is left calls for another fault. Not where it may come from another tile, split or way."""
        return self.fault not in {*TILED, *SPLIT, *UNSTEADY, *WAYS} and self.left > 0


class Corpus:
    """Every known fault's answers to the probes, worked out as they are asked for."""

    def __init__(self, chosen: Sequence[Probe] | None = None, *, seed: int = 0) -> None:
        self.benches = [Bench(probe) for probe in (probes(seed) if chosen is None else chosen)]
        self.variants = variants()
        self._tables: dict[tuple[int, bool], Table] = {}
        self.named: dict[str, Variant] = {}  # of the faults ranked last, the variant that came nearest
        self._known = {bench: Known(bench) for bench in self.benches}

    def view(self, more: Sequence[Probe] = ()) -> Corpus:
        """A corpus of the same probes, with all that is known about them, and of ``more``; what sizes are tried in it
        are its own."""
        found = Corpus(more)
        found.benches, found._known = self.benches + found.benches, self._known | found._known
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

    def try_numbers(self, found: Iterable[Variant]) -> None:
        """Try faults with numbers that the subject's answers show."""
        self.variants += [variant for variant in found if variant not in self.variants]
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
        if all(self.benches[place].long for place in failing):  # where each variant takes a second
            usual = [
                place for place in usual if not self.variants[place].way or self.variants[place].fault in LONG_WAYS
            ]
        hopeful = self._distances(seen, sorted({few[0], few[-1]}), usual, progress)[:, 0].argsort(stable=True)
        usual = [usual[place] for place in hopeful[:HOPEFUL].tolist()]
        near = self._nearest(seen, few, usual, progress)[:FINALISTS]
        best = [place for _, ways in near for place in ways[:BEST_WAYS]]
        finalists = best + self._sizes(seen, failing, progress)
        found = self._distances(seen, range(len(seen)), finalists, progress)
        ranked: dict[str, Candidate] = {}
        self.named.clear()
        for place in found[:, 0].argsort(stable=True).tolist():
            v, (distance, *counts) = self.variants[finalists[place]], found[place].tolist()
            size = v.size if v.fault in {*TILED, *SPLIT} else 0
            explained, wrong, left, narrowed = map(int, counts)
            candidate = Candidate(v.fault, distance, size, explained, wrong, left, bool(narrowed), v.value)
            if v.fault not in ranked:
                ranked[v.fault], self.named[v.fault] = candidate, v
        # A number that makes one fault of another says nothing beside the other's name.
        named = min((one.distance for one in ranked.values() if one.number is None), default=1.0)
        return [one for one in ranked.values() if one.number is None or one.distance < named - SAME]

    def shown(self, fault: str, seen: Sequence[Observation]) -> tuple[list[Case], list[Case]]:
        """Of the cases in which a ranked fault would show, those that the subject gets wrong, and those that it gets
        right."""
        cases: tuple[list[Case], list[Case]] = ([], [])
        for bench, s in zip(self.benches, seen, strict=True):
            known, variant = self._known[bench], self.named[fault]
            if s.answers and fault in known.asked[variant.written] and known.answers(variant).failed:
                cases[not s.failed].append(bench.probe.case)
        return cases

    def _takes_mask_tensors(self, seen: Sequence[Observation]) -> bool:
        """Whether the subject was given a mask as a tensor: one that never is has no faults of such masks."""
        asked = [any(isinstance(rule, BooleanRule) for rule in bench.probe.case.mask) for bench in self.benches]
        return not any(asked) or any(one and not s.refused for one, s in zip(asked, seen, strict=True))

    def _sizes(self, seen: Sequence[Observation], failing: list[int], progress: Progress | None) -> list[int]:
        """The best tile sizes of the nearest of the faults that have such, by the first probes that tell."""
        short = [place for place in failing if not self.benches[place].long]
        # A fault may show in none of the probes that were chosen for sizes.
        telling = [place for place in short if _tells_sizes(self.benches[place])][:SIZE_PROBES] or short[:1]
        if not telling:
            return []
        if self.benches[telling[0]].probe.case.form != "dense":
            del telling[1:]  # several sequences tell as much
        wrong = {seen[place].answers["out"].failed for place in telling if seen[place].answers}
        sized = [n for n, v in enumerate(self.variants) if not v.usual and (v.fault not in BACKWARD) in wrong]
        coarse = [n for n in sized if self.variants[n].coarse]
        hopeful = self._nearest(seen, telling, coarse, progress)[:COARSE_FINALISTS]
        ways = {(fault, self.variants[place].way) for fault, places in hopeful for place in places[:BEST_SIZES]}
        fine = [n for n in sized if (self.variants[n].fault, self.variants[n].way) in ways]
        found = self._nearest(seen, telling, fine, progress)[:SIZED_FINALISTS]
        return [place for _, places in found for place in places[:BEST_SIZES]]

    def _nearest(
        self, seen: Sequence[Observation], places: list[int], chosen: list[int], progress: Progress | None
    ) -> list[tuple[str, list[int]]]:
        """Faults and their chosen variants, the nearest first."""
        distances = self._distances(seen, places, chosen, progress)[:, 0]
        kept: dict[str, list[int]] = {}
        for place in distances.argsort(stable=True).tolist():
            kept.setdefault(self.variants[chosen[place]].fault, []).append(chosen[place])
        return list(kept.items())

    def _distances(
        self, seen: Sequence[Observation], places: Iterable[int], chosen: list[int], progress: Progress | None
    ) -> Tensor:
        """(variants, 5): the distance, how many wrong tensors the two share, how many the subject has, in how many of
        the shared ones the two differ, and whether the distance is one of a fault under a condition."""
        totals, places = Totals.zero(len(chosen)), list(places)
        for done, place in enumerate(places):
            bench, observation = self.benches[place], seen[place]
            if progress:
                progress(f"comparing: {bench.probe.name}", done, len(places))
            if not observation.answers:
                continue
            kind = place, gradients_count(observation)
            if kind not in self._tables:
                self._tables[kind] = Table(self._known[bench], self.variants, kind[1])
            self._tables[kind].compare(observation, chosen, totals)
        everywhere = totals.everywhere.mean()
        narrow, part = _conditional(totals.failing.mean(), NARROWED), _conditional(totals.in_part.mean(), IN_PART)
        conditional = torch.minimum(narrow, part) + ELSEWHERE * everywhere
        nearest = torch.minimum(everywhere, conditional)
        return torch.stack((nearest, totals.alike, totals.wrong, totals.left, (conditional < everywhere).float())).T


def _conditional(distances: Tensor, least: float) -> Tensor:
    """Distances where the subject is wrong, as those of a fault under a condition."""
    return torch.where(distances < SAME, EXACT + distances, least + (1 - least) * distances)


def _tells_sizes(bench: Bench) -> bool:
    """Whether sizes show in a probe; a case that was found or named because it fails may be the only one that tells."""
    return bench.probe.name in TILE_PROBES or not bench.probe.case.name.startswith("probe: ")
