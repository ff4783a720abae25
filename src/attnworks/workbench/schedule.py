"""What a verification run does in which order, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from attnworks.workbench import catalogue, properties, sweep
from attnworks.workbench.cases import Case
from attnworks.workbench.subjects import Subject, abilities_of

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total): jobs, or seconds where a budget is what ends the run."""


@dataclass(frozen=True)
class Job:
    """One case for some subjects: its values, or the ``properties`` that need no reference."""

    case: Case
    subjects: tuple[Subject, ...]
    properties: bool = False

    def __str__(self) -> str:
        return f"properties of {self.case.name}" if self.properties else self.case.name


def jobs(subjects: Sequence[Subject], cases: Sequence[str | Case], *, quick: bool, seed: int) -> list[Job]:
    """The jobs of a run, what finds most first: the quick cases, properties, the sweep, the other named cases.

    Given ``cases`` are all there is to do (with their properties, if they are tried on them); without any, all named
    cases and, unless ``quick``, the sweep. Raises ``ValueError`` for a pattern that matches nothing."""
    everybody = tuple(subjects)
    named = tuple(case for case in cases if isinstance(case, Case))
    rows = tuple(case for case in cases if isinstance(case, str) and case.startswith(sweep.PREFIX))
    patterns = tuple(case for case in cases if isinstance(case, str) and not case.startswith(sweep.PREFIX))
    chosen = [*named, *(sweep.case_of(sweep.row_of(name), seed) for name in rows)]
    if patterns or not cases:
        chosen += catalogue.select(patterns, quick=quick, seed=seed)
    if not any(abilities_of(subject).lse_gradients for subject in subjects):
        chosen = [replace(case, lse_cotangent=False) for case in chosen]  # their other gradients can be checked
    if not any(abilities_of(subject).gqa for subject in subjects):
        chosen = [_ungrouped(case) for case in chosen]
    if not cases and not quick:
        urgent = {case.name for case in catalogue.select(quick=True)}
        chosen.sort(key=lambda case: case.name not in urgent)  # stable: otherwise in the catalogue's order
        first = len(urgent)
    else:
        first = len(chosen)
    tried = [Job(case, everybody, properties=True) for case in chosen if case.name in properties.CASES]
    swept = [] if cases or quick else list(_sweep(everybody, seed))
    return [*(Job(c, everybody) for c in chosen[:first]), *tried, *swept, *(Job(c, everybody) for c in chosen[first:])]


def _ungrouped(case: Case) -> Case:
    """Many cases have grouped heads beside what they are about, which can be asked without. Not those about heads, nor
    the ones whose numbers are written out."""
    about_heads = case.name.startswith("heads:") or case.generator == "hand"
    return case if about_heads else replace(case, heads_kv=case.heads_q)


def further_sweeps(subjects: Sequence[Subject], seed: int) -> Iterator[Job]:
    """Sweeps of one seed after another, without end (with none, if subjects run nothing of a sweep)."""
    for further in count(seed + 1):
        found = list(_sweep(tuple(subjects), further))
        if not found:
            return
        yield from found


def _sweep(subjects: tuple[Subject, ...], seed: int) -> Iterator[Job]:
    """Subjects that run the same levels share a design, and so the answers to its cases."""
    groups: dict[tuple[sweep.Row, ...], list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(sweep.allowed_by(subject), []).append(subject)
    for allowed, group in groups.items():
        for row in sweep.design(seed, allowed):
            yield Job(sweep.case_of(row, seed), tuple(group))


class Clock:
    """Reports progress, and tells when the budget (minutes; None for no end) is spent."""

    def __init__(self, budget: float | None, total: int, progress: Progress | None) -> None:
        self._budget = None if budget is None else 60 * budget
        self._total = total if self._budget is None else round(self._budget)
        self._progress = progress
        self._started = time.monotonic()
        self._done = 0

    def over(self, what: str) -> bool:
        """Whether no further job may begin; otherwise reports the one that does."""
        elapsed = time.monotonic() - self._started
        if self._budget is not None and elapsed >= self._budget:
            return True
        if self._progress:
            self._progress(what, self._done if self._budget is None else round(elapsed), self._total)
        self._done += 1
        return False

    def finish(self) -> None:
        if self._progress:
            self._progress("", self._total, self._total)
