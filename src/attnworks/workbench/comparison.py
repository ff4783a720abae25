"""Two sets of measured runs compared: times with the interval that noise leaves, errors, and what changed besides.

What is the same on both sides pairs them, problem, machine, kernel and plan in this order; where each side has one and
they differ, that is the change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attnworks.workbench import statistics
from attnworks.workbench.history import History
from attnworks.workbench.records import Record
from attnworks.workbench.statistics import Ratio

# Errors of one kernel on other random inputs vary too: that of all rows together by a few percent, the largest by up to
# a third. What is beyond these factors is another arithmetic.
RELATIVE_ERROR_FACTOR = 1.25
LARGEST_ERROR_FACTOR = 2.0

Numerics = Literal["worse", "better", "same"]
Records = Mapping[int, Record]


@dataclass(frozen=True)
class Comparison:
    """The same problem on sides a and b.

    ``ratio``: how many times as fast b is as a; with a ``control`` in units of that kernel's time in the same rounds,
    by which what the machine did in the meantime cancels. ``changes``: what differs between the sides."""

    a: tuple[Record, ...]
    b: tuple[Record, ...]
    ratio: Ratio
    control: str | None
    changes: tuple[str, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians of a and b."""
        return _seconds(self.a), _seconds(self.b)

    @property
    def relative_errors(self) -> tuple[float | None, float | None]:
        """Medians of a's and b's relative errors; None for records of a time when there were none."""
        return _error(self.a, "relative_error"), _error(self.b, "relative_error")

    @property
    def largest_errors(self) -> tuple[float | None, float | None]:
        """The same of the largest error as a share of its bound."""
        return _error(self.a, "worst_share_of_bound"), _error(self.b, "worst_share_of_bound")

    @property
    def numerics(self) -> Numerics:
        factors = (
            (self.relative_errors, RELATIVE_ERROR_FACTOR),
            (self.largest_errors, LARGEST_ERROR_FACTOR),
        )
        grown = [(b / a, factor) for (a, b), factor in factors if a and b is not None]
        if any(ratio > factor for ratio, factor in grown):
            return "worse"
        return "better" if any(ratio < 1 / factor for ratio, factor in grown) else "same"

    @property
    def worse(self) -> bool:
        return self.ratio.verdict == "slower" or self.numerics == "worse"

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.b[0].problem,
            "providers": [self.a[0].provider, self.b[0].provider],
            "forms": [self.a[0].form, self.b[0].form],
            "sessions": [len(self.a), len(self.b)],
            "seconds": self.seconds,
            "ratio": self.ratio.to_json(),
            "control": self.control,
            "relative_errors": self.relative_errors,
            "largest_errors": self.largest_errors,
            "numerics": self.numerics,
            "changes": self.changes,
            "worse": self.worse,
        }


@dataclass(frozen=True)
class Compared:
    """``unmatched``: in words, what could not be paired; ``lost``: kernels that only a has of a problem
    (``regress``)."""

    comparisons: tuple[Comparison, ...] = ()
    unmatched: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def worse(self) -> bool:
        return bool(self.lost) or any(comparison.worse for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        comparisons = [comparison.to_json() for comparison in self.comparisons]
        return {"comparisons": comparisons, "unmatched": self.unmatched, "lost": self.lost, "worse": self.worse}


def compare(history: History, a: Records, b: Records, control: str | None = None) -> Compared:
    """Sides ``a`` and ``b``, records by their ids. ``control``: a provider that was timed in the same sessions and did
    not change itself, such as "sdpa"; it is used where each session has it."""
    unmatched: list[str] = []
    pairs = _pairs(list(a.values()), list(b.values()), _SAME, unmatched.append)
    comparisons = [_comparison(history, mine, theirs, control) for mine, theirs in pairs]
    return Compared(tuple(comparisons), tuple(unmatched))


# ---- who is compared with whom ---------------------------------------------------------------------------------------

Side = Sequence[Record]


def problem_of(record: Record) -> str:
    """The problem without the device: the same may be asked of a CPU and a GPU."""
    return json.dumps({name: value for name, value in record.problem.items() if name != "device"}, sort_keys=True)


def machine_of(record: Record) -> str:
    threads = record.conditions.get("threads")
    return str(record.machine["name"]) + (f", {threads} threads" if threads else "")


def _plan_of(record: Record) -> str:
    return json.dumps(record.plan, sort_keys=True)


_SAME: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("problem", problem_of),
    ("machine", machine_of),
    ("kernel", lambda record: record.provider),
    ("plan", _plan_of),
)


def _pairs(
    a: Side, b: Side, same: Sequence[tuple[str, Callable[[Record], str]]], unmatched: Callable[[str], None]
) -> Iterator[tuple[Side, Side]]:
    if not a or not b:
        return
    if not same:
        yield a, b
        return
    (name, of), *rest = same
    mine, theirs = _grouped(a, of), _grouped(b, of)
    if len(mine) == len(theirs) == 1 and name != "problem":
        yield from _pairs(a, b, rest, unmatched)
        return
    common = [value for value in mine if value in theirs]
    if not common:
        unmatched(f"no {name} is on both sides: {_listed(mine)} against {_listed(theirs)}")
    for value in common:
        yield from _pairs(mine[value], theirs[value], rest, unmatched)


def _grouped(side: Iterable[Record], of: Callable[[Record], str]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in side:
        found[of(record)].append(record)
    return found


def _listed(groups: Mapping[str, Any]) -> str:
    return " | ".join(list(groups)[:3]) + (" ..." if len(groups) > 3 else "")


def _comparison(history: History, a: Side, b: Side, control: str | None) -> Comparison:
    beside = _beside(history, [*a, *b], control) if control not in (None, a[0].provider, b[0].provider) else None
    sessions = {record.session for record in a}, {record.session for record in b}
    if sessions[0] == sessions[1]:  # the same rounds
        theirs = {record.session: record.seconds for record in a}
        own = [run for record in b for run in record.seconds]
        found = statistics.ratio(own, [run for record in b for run in theirs[record.session]], paired=True)
        beside = None
    else:
        found = statistics.ratio_of_sessions(*([_runs(record, beside) for record in side] for side in (b, a)))
    return Comparison(tuple(a), tuple(b), found, control if beside else None, tuple(_changes(a, b)))


def _runs(record: Record, beside: Mapping[str, Record] | None) -> Sequence[float]:
    if beside is None:
        return record.seconds
    return [own / other for own, other in zip(record.seconds, beside[record.session].seconds, strict=True)]


def _beside(history: History, records: Side, control: str | None) -> dict[str, Record] | None:
    """The control's record of each session, if each has one and they are of the same form and versions."""
    found: dict[str, Record] = {}
    for record in records:
        stored = history.records(session=record.session, provider=control, problem=record.problem).values()
        fitting = [other for other in stored if len(other.seconds) == len(record.seconds)]
        if not fitting:
            return None
        found[record.session] = fitting[0]
    alike = {(other.form, other.versions.get("torch"), machine_of(other)) for other in found.values()}
    return found if len(alike) == 1 else None


def _changes(a: Side, b: Side) -> Iterator[str]:
    """What differs, in words; where one side has several, all are named."""
    for name, of in (
        ("commit", lambda record: record.commit or "unknown"),
        ("machine", machine_of),
        ("kernel", lambda record: record.provider),
        ("plan", lambda record: " ".join(f"{k} {v}" for k, v in (record.plan or {}).items() if v) or "unknown"),
        ("versions", lambda record: " ".join(f"{k} {v}" for k, v in sorted(record.versions.items()))),
    ):
        before, after = (sorted({of(record) for record in side}) for side in (a, b))
        if before != after:
            yield f"{name}: {' | '.join(before)} -> {' | '.join(after)}"


def _seconds(side: Side) -> float:
    return statistics.median([record.median for record in side])


def _error(side: Side, name: str) -> float | None:
    known = [record.check[name] for record in side if name in record.check]
    return statistics.median(known) if known else None


# ---- for continuous integration --------------------------------------------------------------------------------------


class NothingToCompareError(ValueError):
    """The history does not have what a comparison needs."""


def regress(history: History, baseline: Records, candidate: Records, control: str | None = "sdpa") -> Compared:
    """``compare`` with what got lost: kernels but the control that the baseline timed on a problem for which the
    candidate has others only, because they fail the check or refuse it now. Raises ``NothingToCompareError`` where
    nothing is on both sides."""
    found = compare(history, baseline, candidate, control)
    lost = tuple(_lost(baseline.values(), candidate.values(), control))
    if not found.comparisons and not lost:
        raise NothingToCompareError("; ".join(found.unmatched) or "there are no records on one of the sides")
    return replace(found, lost=lost)


def newest_two(history: History, machine: str | None = None) -> tuple[Records, Records]:
    """Baseline and candidate where nobody named them: all records of the commit that was measured last, and of the one
    before it on the same machine. Raises ``NothingToCompareError`` where there are no two."""
    stored = history.records() if machine is None else history.records(machine=machine)
    if not stored:
        raise NothingToCompareError(f"{history.path} has no records{f' of {machine}' if machine else ''}")
    last = list(stored.values())[-1]
    here = {id_: record for id_, record in stored.items() if machine_of(record) == machine_of(last)}
    earlier = [record.commit for record in here.values() if record.commit != last.commit]
    if not earlier:
        raise NothingToCompareError(f"{history.path} has no commit but {last.commit} on {machine_of(last)}")
    sides = ({id_: r for id_, r in here.items() if r.commit == commit} for commit in (earlier[-1], last.commit))
    return next(sides), next(sides)


def _lost(a: Iterable[Record], b: Iterable[Record], control: str | None) -> Iterator[str]:
    def place(record: Record) -> str:
        return f"{machine_of(record)}: {problem_of(record)}"

    there = _grouped(b, place)
    for where, records in _grouped(a, place).items():
        if where in there:
            gone = {record.provider for record in records} - {record.provider for record in there[where]} - {control}
            yield from (f"{name} on {where}" for name in sorted(gone))
