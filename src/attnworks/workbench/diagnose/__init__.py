"""From a failing kernel to a cause: what ``attnworks diagnose`` runs.

``diagnose`` asks a kernel the probes (``probes.py``), finds the known fault that answers most like it (``nearest.py``),
looks for patterns in the errors (``patterns.py``), and shrinks a failing input (``shrink.py``) into a script
(``script.py``). What the faults mean is in ``causes.py``, the wording in ``explain.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose import bounds, moved, operands, patterns, reading, stages, tags
from attnworks.workbench.diagnose.answers import FAR
from attnworks.workbench.diagnose.nearest import Candidate, Corpus, Progress
from attnworks.workbench.diagnose.probes import Observation, Probe
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.diagnose.second_look import second_look
from attnworks.workbench.diagnose.sentence import sentence
from attnworks.workbench.diagnose.shrink import shrink
from attnworks.workbench.subjects import Subject
from attnworks.workbench.verify import Result, fresh_memory_poisoned, verify

# Nearer than NEAR, and by GAP nearer than the next one, the nearest fault was the right one in 61 of 62 kernels that
# nobody had seen, but in 13 of 20 of the last two sets (docs/results); beyond FAR it was a guess.
NEAR, GAP = 0.3, 0.08
READ = 0.4  # what was read of a kernel comes before faults that are no nearer
SEARCHED = 3  # of verify's cases that fail, how many are asked beside the probes
MOST = 0.9  # of what the kernel gets wrong, for a fault to be named without reserve
CLOSE = 0.1  # beyond, a fault named without reserve gives the very numbers in half of these tensors at least


# The faults that checks of ``verify`` show which no values show.
BY_CHECK = {
    "batch invariant": "batch changes the tiles",
    "repeatable": "changes from call to call",
    "gradients repeatable": "changes from call to call",
    "changes no input": "writes into q",
    "ignores what is outside": "tail weighted by 0",
}


@dataclass
class Diagnosis:
    """What was found. ``candidates``: known faults, the nearest first; ``failing``: names of the probes that fail;
    ``refused``: how many were not run; ``sentence``: what is wrong, whatever the fault; ``conditions``: of the calls in
    which the first candidate would show, what those share that are wrong; ``smallest``: a problem that still fails in
    the same way; ``checks``: what only checks of ``verify`` see, where no probe fails."""

    subject: str
    failing: list[str] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    refused: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    sentence: str = ""
    conditions: list[str] = field(default_factory=list)
    smallest: Probe | None = None
    checks: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.failing and not self.raised and not self.checks

    @property
    def certainty(self) -> str:
        """ "sure", "likely" or "" for none of the known faults."""
        if not self.candidates or self.candidates[0].distance > FAR:
            return ""
        first = self.candidates[0]
        rival = self.candidates[1].distance if len(self.candidates) > 1 else 1.0
        explained = first.explained >= MOST * first.wrong and not first.second_fault and not first.narrowed
        alike = first.distance <= CLOSE or 2 * first.left <= first.explained
        answered = bool(self.failing)  # not by where it raises alone
        near = first.distance <= NEAR and rival - first.distance >= GAP
        return "sure" if near and explained and alike and answered else "likely"

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "right": self.right,
            "asked": self.asked,
            "refused": self.refused,
            "failing": self.failing,
            "raised": self.raised,
            "certainty": self.certainty,
            "candidates": [vars(candidate) for candidate in self.candidates[:5]],
            "sentence": self.sentence,
            "conditions": self.conditions,
            "patterns": self.patterns,
            "checks": self.checks,
            "smallest": None if self.smallest is None else describe(self.smallest.case),
        }


def diagnose(
    subject: Subject,
    *,
    cases: Sequence[Case] = (),
    seed: int = 0,
    progress: Progress | None = None,
    corpus: Corpus | None = None,
) -> Diagnosis:
    """Find out what is wrong with a kernel.

    ``cases``: failing ones, asked beside the probes; where neither they nor the probes fail, the quick cases of
    ``verify`` are searched for one. ``corpus``: to use again what another diagnosis worked out, of the same seed.
    """
    corpus = (corpus or Corpus(seed=seed)).view([Probe(case.with_seed(seed)) for case in cases])
    with fresh_memory_poisoned():
        seen = corpus.observe(subject, progress)
        if not any(one.failed for one in seen) and not cases:
            probes, failed = second_look(subject, seed), []
            if not probes:
                failed = _search(subject, seed, progress)
                found = list({result.case.name: result.case for result in failed}.values())
                probes = [Probe(case) for case in found[:SEARCHED]]
            if probes:
                corpus = corpus.view(probes)
                seen = corpus.observe(subject, progress)
            if failed and not any(one.failed for one in seen):
                return _by_checks(subject, seen, failed)
        if size := patterns.tile_size(subject, corpus.benches, seen):
            corpus.try_size(size)
        corpus.try_numbers(reading.numbers(subject, corpus.benches, seen))
        return _explained(subject, corpus, seen, progress)


def _search(subject: Subject, seed: int, progress: Progress | None) -> list[Result]:
    """What fails of verify's quick cases, of the checks that say by themselves that something is wrong."""
    results = verify(subjects=[subject], quick=True, seed=seed, progress=progress)
    telling = ("forward", "gradients", *BY_CHECK)
    return [result for result in results if result.status == "failed" and result.check in telling]


def _by_checks(subject: Subject, seen: Sequence[Observation], failed: Sequence[Result]) -> Diagnosis:
    """What checks say whose findings are not in the values."""
    asked = sum(not s.refused for s in seen)
    found = Diagnosis(subject.name, asked=asked, refused=len(seen) - asked)
    found.checks = [f"{result.case.name}: {result.check}: {result.message}" for result in failed[:SEARCHED]]
    named = dict.fromkeys(BY_CHECK[result.check] for result in failed if result.check in BY_CHECK)
    found.candidates = [Candidate(fault, NEAR, 0, 1, 1, 0) for fault in named]
    return found


def _explained(subject: Subject, corpus: Corpus, seen: Sequence[Observation], progress: Progress | None) -> Diagnosis:
    named = list(zip(corpus.benches, seen, strict=True))
    found = Diagnosis(
        subject.name,
        failing=[b.probe.name for b, s in named if s.failed and not s.raised],
        raised={b.probe.name: s.raised for b, s in named if s.raised},
        asked=sum(not s.refused for s in seen),
        refused=sum(bool(s.refused) for s in seen),
    )
    if found.right:
        return found
    readings = moved.in_rows(corpus.benches, seen) + stages.read(subject, corpus.benches, seen)
    readings += bounds.diagonals(subject, corpus.benches, seen) + operands.sources(corpus.benches, seen)
    readings += tags.read(subject, corpus.benches, seen)
    found.candidates = corpus.rank(seen, progress)
    if found.candidates and found.candidates[0].narrowed:
        found.conditions = patterns.told_apart(*corpus.shown(found.candidates[0].fault, seen))
    found.candidates = _read_first(found.candidates, readings)
    when, weights = patterns.on_which(corpus.benches, seen), patterns.in_weights(subject, corpus.benches, seen)
    found.sentence = sentence(seen, when, readings, weights)
    found.patterns = when + patterns.in_tensors(corpus.benches, seen) + weights + [one.said for one in readings]
    first = next(b.probe for b, s in named if s.failed and (not s.raised or not found.failing))
    if progress:
        progress("shrinking", 0, 0)
    found.smallest = shrink(subject, first)
    return found


def _read_first(candidates: list[Candidate], readings: Sequence[Reading]) -> list[Candidate]:
    """The candidates, the nearest of those that a reading leaves first where nothing comes nearer than ``READ``."""
    for one_read in readings:
        if not one_read.faults or (candidates and candidates[0].distance < READ):
            continue
        if candidates and candidates[0].fault in one_read.faults:
            continue
        left = [one for one in candidates if one.fault in one_read.faults]
        first = left[0] if left else Candidate(one_read.faults[0], READ, 0, 0, 1, 0)
        rest = [one for one in candidates if one.fault != first.fault]
        return [replace(first, distance=min(first.distance, READ)), *rest]
    return candidates


def describe(case: Case) -> str:
    """A case in a line."""
    shape = ", ".join(f"{q} x {kv}" for q, kv in case.sequences)
    words = [f"{case.form}, seq_q x seq_kv {shape}", f"heads {case.heads_q}/{case.heads_kv}"]
    dims = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
    words += [f"head_dim {dims}", str(case.dtype).removeprefix("torch."), f"{case.generator} inputs"]
    words += [f"mask {rule}" for rule in case.mask] + [f"score {rule}" for rule in case.scores]
    words += [f"scale {case.scale}"] if case.scale is not None else []
    return ", ".join(words) + (", gradients" if case.gradients else "")
