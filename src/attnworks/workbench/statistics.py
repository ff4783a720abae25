"""Statistics of run times: median, P90, and the ratio of two kernels with the interval that noise leaves it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a kernel is as another: the other's median time over its own.

    ``low``, ``high``: the interval that holds the true ratio with the given ``confidence``. ``verdict`` is "undecided"
    where the interval holds ratios that are no difference.
    """

    value: float
    low: float
    high: float
    confidence: float
    runs: int
    paired: bool

    @property
    def verdict(self) -> Verdict:
        if self.runs >= FEWEST_TO_DECIDE:
            if self.low > 1 + SMALLEST_DIFFERENCE:
                return "faster"
            if self.high < 1 - SMALLEST_DIFFERENCE:
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

    ``paired``: run i of both belongs to the same round, so that drift of the machine between rounds cancels; rounds are
    resampled then, else each side by itself. Percentile bootstrap of the ratio of medians (Efron 1979); with fewer than
    ``FEWEST_FOR_BOOTSTRAP`` runs the range of the rounds' ratios (paired) or of the runs' (not paired), which holds the
    median with probability 1 - 2^(1 - n). Raises ``ValueError`` for no runs or paired runs of different number.
    """
    mine, theirs = np.asarray(own, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if not mine.size or not theirs.size:
        raise ValueError(f"own, other: had {mine.size} and {theirs.size} runs, must have at least one each")
    if paired and mine.size != theirs.size:
        raise ValueError(f"own, other: had {mine.size} and {theirs.size} runs, must have equally many to be paired")
    runs = min(mine.size, theirs.size)
    value = float(np.median(theirs) / np.median(mine))
    if runs < FEWEST_FOR_BOOTSTRAP:
        ratios = theirs / mine if paired else np.array([theirs.min() / mine.max(), theirs.max() / mine.min()])
        low, high = float(min(ratios.min(), value)), float(max(ratios.max(), value))
        return Ratio(value, low, high, 1 - 2.0 ** (1 - runs), runs, paired)
    rng = np.random.default_rng(seed)
    picked = rng.integers(mine.size, size=(RESAMPLES, mine.size))
    others = picked if paired else rng.integers(theirs.size, size=(RESAMPLES, theirs.size))
    resampled: NDArray[np.float64] = np.median(theirs[others], axis=1) / np.median(mine[picked], axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Ratio(value, float(low), float(high), CONFIDENCE, runs, paired)
