"""Statistics of run times: median, P90, and the ratio of two kernels with the interval that noise leaves it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["faster", "slower", "undecided"]

RESAMPLES = 4000
CONFIDENCE = 0.99
# Below this many runs a bootstrap's percentiles say little; the spread of the runs themselves is used instead.
FEWEST_FOR_BOOTSTRAP = 10
# Below this many runs nothing is decided: the spread of four misses the median once in eight times.
FEWEST_TO_DECIDE = 5
# A difference of less than this is not claimed, however narrow the interval: the machine's own drift is of that size.
SMALLEST_DIFFERENCE = 0.01
# Two sessions of the same kernel differ by more than the runs inside either tell (other memory, other clocks, other
# neighbours). From so many sessions on that is seen; where there are fewer, this much is allowed for it.
FEWEST_SESSIONS = 3
DIFFERENCE_OF_SESSIONS = 0.05


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a kernel is as another: the other's time over its own, the median of the rounds' ratios
    where they were interleaved, else the ratio of medians.

    ``low``, ``high``: the interval that holds the true ratio with the given ``confidence``. ``verdict`` is "undecided"
    where the interval holds ratios that differ from 1 by no more than ``smallest``.
    """

    value: float
    low: float
    high: float
    confidence: float
    runs: int
    paired: bool
    smallest: float = SMALLEST_DIFFERENCE

    @property
    def verdict(self) -> Verdict:
        if self.runs >= FEWEST_TO_DECIDE:
            if self.low > 1 + self.smallest:
                return "faster"
            if self.high < 1 - self.smallest:
                return "slower"
        return "undecided"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}

    def __str__(self) -> str:
        if self.verdict == "undecided":
            return f"undecided ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds))


def percentile_90(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 90))


def ratio(own: Sequence[float], other: Sequence[float], *, paired: bool, seed: int = 0) -> Ratio:
    """The ``Ratio`` of a kernel with run times ``own`` to one with run times ``other``, in seconds.

    ``paired``: run i of both belongs to the same round. The ratio is taken in each round then, so that the machine's
    drift from round to round cancels, and rounds are resampled; otherwise each side by itself. Percentile bootstrap
    (Efron 1979); with fewer than ``FEWEST_FOR_BOOTSTRAP`` runs the range of the rounds' ratios (paired) or of the
    runs' (not paired), which holds the median with probability 1 - 2^(1 - n). Raises ``ValueError`` for no runs or
    paired runs of different number.
    """
    mine, theirs = np.asarray(own, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if not mine.size or not theirs.size:
        raise ValueError(f"own, other: had {mine.size} and {theirs.size} runs, must have at least one each")
    if paired and mine.size != theirs.size:
        raise ValueError(f"own, other: had {mine.size} and {theirs.size} runs, must have equally many to be paired")
    runs = min(mine.size, theirs.size)
    rounds = theirs / mine if paired else None
    value = float(np.median(theirs) / np.median(mine) if rounds is None else np.median(rounds))
    if runs < FEWEST_FOR_BOOTSTRAP:
        reached = np.array([theirs.min() / mine.max(), theirs.max() / mine.min()]) if rounds is None else rounds
        return Ratio(value, float(reached.min()), float(reached.max()), 1 - 2.0 ** (1 - runs), runs, paired)
    rng = np.random.default_rng(seed)
    if rounds is not None:
        resampled = _resampled_medians(rounds, rng)
    else:
        resampled = _resampled_medians(theirs, rng) / _resampled_medians(mine, rng)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Ratio(value, float(low), float(high), CONFIDENCE, runs, paired)


def ratio_of_sessions(own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Ratio:
    """The ``Ratio`` of two kernels that were not timed in the same rounds; each side is the runs of its sessions.

    From ``FEWEST_SESSIONS`` on each side the sessions are what varies: an interval for the difference of the logarithms
    of their medians (Welch 1947). With fewer, that of all runs, and a difference counts from ``DIFFERENCE_OF_SESSIONS``
    on."""
    mine, theirs = ([run for session in side for run in session] for side in (own, other))
    if min(len(own), len(other)) < FEWEST_SESSIONS:
        return replace(ratio(mine, theirs, paired=False), smallest=DIFFERENCE_OF_SESSIONS)
    logs = [np.log([median(session) for session in side]) for side in (own, other)]
    difference = float(logs[1].mean() - logs[0].mean())
    variances = [float(side.var(ddof=1)) / side.size for side in logs]
    spread = sum(variances)
    reach = 0.0
    if spread > 0:
        freedom = spread**2 / sum(v**2 / (side.size - 1) for v, side in zip(variances, logs, strict=True))
        reach = _student(freedom) * spread**0.5
    low, value, high = (float(np.exp(difference + x)) for x in (-reach, 0.0, reach))
    return Ratio(value, low, high, CONFIDENCE, min(len(mine), len(theirs)), paired=False)


@cache
def _student(freedom: float) -> float:
    """The two-sided quantile of Student's t at ``CONFIDENCE``, to about a percent."""
    drawn = np.random.default_rng(0).standard_t(freedom, size=400_000)
    return float(np.percentile(np.abs(drawn), 100 * CONFIDENCE))


def _resampled_medians(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(values[rng.integers(values.size, size=(RESAMPLES, values.size))], axis=1)
    return medians
