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
    """How many times as fast a kernel is as another: the other's time over its own, the median of the rounds' ratios
    where they were interleaved, else the ratio of medians.

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


def _resampled_medians(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(values[rng.integers(values.size, size=(RESAMPLES, values.size))], axis=1)
    return medians
