"""Summaries of verification results: the worst errors beside their budgets, the distribution of errors, why cases were
skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attnworks.workbench import sweep
from attnworks.workbench.metrics import Check, Measure
from attnworks.workbench.subjects import Subject
from attnworks.workbench.sweep import Coverage
from attnworks.workbench.verify import Result, longest

LENGTH_BANDS = ((0, 15, "0-15"), (16, 127, "16-127"), (128, 1023, "128-1023"), (1024, 2**63, "1024 and more"))


@dataclass(frozen=True)
class Worst:
    """The case that comes closest to a budget, or exceeds it most. ``inputs``: the generator of its inputs."""

    subject: str
    dtype: str
    tensor: str
    case: str
    inputs: str
    seed: int
    measure: Measure
    check: Check

    def to_json(self) -> dict[str, Any]:
        named = ("subject", "dtype", "tensor", "case", "inputs", "seed")
        check = asdict(self.check) | {"share": self.check.share}
        return {name: getattr(self, name) for name in named} | {"check": check}


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


VALUES = ("out", "lse")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def dtype_of(result: Result) -> str:
    """The dtype of a result's inputs in short, with that of its cache where that is another: "bf16", "bf16 on
    float8_e4m3fn"."""
    case = result.case
    dtype = DTYPES[str(case.dtype).removeprefix("torch.")]
    return dtype if case.cache_dtype is None else f"{dtype} on {str(case.cache_dtype).removeprefix('torch.')}"


def band_of(result: Result) -> str:
    """The length band of a result's longest sequence."""
    return next(name for low, high, name in LENGTH_BANDS if low <= longest(result.case) <= high)


# What errors are grouped by.
GROUPINGS: dict[str, Callable[[Result], str]] = {
    "subject": lambda result: result.subject,
    "dtype": dtype_of,
    "length": band_of,
    "inputs": lambda result: result.case.generator,
}


def measures(results: Iterable[Result]) -> list[tuple[Result, Measure]]:
    return [(result, measure) for result in results for measure in result.measures]


def tightest(measure: Measure) -> Check:
    """The check with the largest error as a share of its budget."""
    return max(measure.checks, key=lambda check: (not check.passed, check.share))


def worst(results: Iterable[Result]) -> list[Worst]:
    """For each subject, dtype and tensor the tightest check of all cases."""
    found: dict[tuple[str, str, str], Worst] = {}
    for result, measure in measures(results):
        key = (result.subject, dtype_of(result), measure.tensor)
        candidate = Worst(*key, result.case.name, result.case.generator, result.case.seed, measure, tightest(measure))
        if key not in found or candidate.check.share > found[key].check.share:
            found[key] = candidate
    return list(found.values())


def worst_gradients(results: Iterable[Result]) -> list[Worst]:
    """The same of gradients alone, by dtype."""
    rows = worst(result for result in results if result.check == "gradients")  # which hold values too
    return sorted((row for row in rows if row.tensor not in VALUES), key=lambda row: row.dtype)


def distribution(results: Iterable[Result]) -> list[Spread]:
    """Spreads of all measured tensors by what ``GROUPINGS`` names."""
    pairs = measures(results)
    found = []
    for by, grouping in GROUPINGS.items():
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


def nothing_checked(results: Iterable[Result]) -> bool:
    """Whether every check was skipped: then nothing is known, and nobody may take it for passed."""
    return all(result.status == "skipped" for result in results)


def coverage(subjects: Iterable[Subject], results: Iterable[Result]) -> list[Coverage]:
    """The pairs of levels that each subject's sweep covered; none for a subject of which no case of a sweep was
    tried. A case counts where neither its values nor its gradients were refused."""
    results, found = list(results), []
    for subject in subjects:
        tried = {
            result.case.name: True
            for result in results
            if result.subject == subject.name and result.case.name.startswith(sweep.PREFIX)
        }
        for result in results:
            refused = result.status == "skipped" and result.check in ("forward", "gradients")
            if refused and result.subject == subject.name and result.case.name in tried:
                tried[result.case.name] = False
        if tried:
            ran = [name for name, whole in tried.items() if whole]
            found.append(sweep.coverage(subject, ran, refused=len(tried) - len(ran)))
    return found
