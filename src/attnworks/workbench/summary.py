"""Summaries of verification results: the worst errors beside their budgets, the distribution of errors, why cases were
skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attnworks.workbench.metrics import Check, Measure
from attnworks.workbench.verify import Result, longest

LENGTH_BANDS = ((0, 15, "0-15"), (16, 127, "16-127"), (128, 1023, "128-1023"), (1024, 2**63, "1024 and more"))


@dataclass(frozen=True)
class Worst:
    """The case that comes closest to a budget, or exceeds it most."""

    subject: str
    dtype: str
    tensor: str
    case: str
    measure: Measure
    check: Check


@dataclass(frozen=True)
class Spread:
    """The distribution over cases and tensors of the error as a share of its tightest budget: 1 would be a failure."""

    by: str
    group: str
    count: int
    median: float
    p90: float
    p99: float
    largest: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measures(results: Iterable[Result]) -> list[tuple[Result, Measure]]:
    return [(result, measure) for result in results for measure in result.measures]


def tightest(measure: Measure) -> Check:
    """The check with the largest error as a share of its budget."""
    return max(measure.checks, key=lambda check: (not check.passed, check.share))


def worst(results: Iterable[Result]) -> list[Worst]:
    """For each subject, dtype and tensor the tightest check of all cases."""
    found: dict[tuple[str, str, str], Worst] = {}
    for result, measure in measures(results):
        dtype = str(result.case.dtype).removeprefix("torch.")
        key = (result.subject, dtype, measure.tensor)
        candidate = Worst(*key, result.case.name, measure, tightest(measure))
        if key not in found or candidate.check.share > found[key].check.share:
            found[key] = candidate
    return list(found.values())


def distribution(results: Iterable[Result]) -> list[Spread]:
    """Spreads of all measured tensors by subject, dtype, length band and input distribution."""
    pairs = measures(results)
    groupings: dict[str, Callable[[Result], str]] = {
        "backend": lambda r: r.subject,
        "dtype": lambda r: str(r.case.dtype).removeprefix("torch."),
        "length": lambda r: next(name for low, high, name in LENGTH_BANDS if low <= longest(r.case) <= high),
        "distribution": lambda r: r.case.generator,
    }
    found = []
    for by, grouping in groupings.items():
        shares: dict[str, list[float]] = {}
        for result, measure in pairs:
            shares.setdefault(grouping(result), []).append(tightest(measure).share)
        for group, values in shares.items():
            median, p90, p99 = np.percentile(np.minimum(values, 1e300), (50, 90, 99))
            found.append(Spread(by, group, len(values), float(median), float(p90), float(p99), max(values)))
    return found


def skipped(results: Iterable[Result]) -> Counter[tuple[str, str]]:
    """How often each subject gave each reason."""
    return Counter((result.subject, result.message) for result in results if result.status == "skipped")


def counts(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """By subject: how many checks passed, failed and were skipped, and of which layer."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.subject, Counter()).update((result.status, f"{result.layer} {result.status}"))
    return found
