"""Ratios: what noise leaves undecided, what it must not hide. All on synthetic times: nothing depends on a clock."""

from __future__ import annotations

import numpy as np
import pytest

from attnworks.workbench import statistics
from attnworks.workbench.statistics import Ratio, ratio, ratio_of_sessions


def times(rng: np.random.Generator, median: float, noise: float, count: int = 50) -> np.ndarray:
    """Skewed run times, as machines make them: never much faster, sometimes much slower."""
    return median * np.exp(noise * np.abs(rng.standard_normal(count))) * np.where(rng.random(count) < 0.05, 1.5, 1)


def test_the_same_kernel_twice_is_hardly_ever_called_different() -> None:
    rng = np.random.default_rng(0)
    verdicts = [ratio(times(rng, 1, 0.05), times(rng, 1, 0.05), paired=True).verdict for _ in range(60)]
    assert verdicts.count("undecided") >= 0.95 * len(verdicts)


@pytest.mark.parametrize("slower", [1.05, 1.2])
def test_a_slower_kernel_is_found(slower: float) -> None:
    rng = np.random.default_rng(1)
    found = [ratio(times(rng, 1, 0.02), times(rng, slower, 0.02), paired=True) for _ in range(20)]
    assert [one.verdict for one in found].count("faster") >= 18
    assert all(one.low < slower < one.high for one in found[:5])


def test_the_ratio_is_the_others_time_over_the_own() -> None:
    own, other = np.full(20, 2.0), np.full(20, 3.0)
    assert ratio(own, other, paired=True).value == 1.5
    assert ratio(own, other, paired=True).verdict == "faster"
    assert ratio(other, own, paired=True).verdict == "slower"


def test_drift_that_hits_both_alike_cancels_in_paired_runs() -> None:
    rng = np.random.default_rng(2)
    drift = np.linspace(1, 3, 50)
    own, other = drift * times(rng, 1, 0.01), drift * times(rng, 1.1, 0.01)
    paired, apart = ratio(own, other, paired=True), ratio(own, other, paired=False)
    assert paired.verdict == "faster"
    assert paired.high - paired.low < apart.high - apart.low


def test_one_spike_moves_nothing() -> None:
    own = [1.0] * 49 + [1000.0]
    assert ratio(own, [1.0] * 50, paired=True).value == 1.0
    assert statistics.median(own) == statistics.percentile_90(own) == 1.0


def test_few_runs_give_their_range_and_how_sure_it_is() -> None:
    found = ratio([1.0, 1.0, 1.0, 1.0], [2.0, 2.2, 2.4, 2.6], paired=True)
    assert (found.low, found.high) == (2.0, 2.6)
    assert found.confidence == 1 - 2**-3
    assert found.verdict == "undecided", "four runs decide nothing"
    assert ratio([1.0] * 5, [2.0] * 5, paired=True).verdict == "faster"


def test_tiny_differences_are_not_claimed() -> None:
    found = Ratio(1.005, 1.004, 1.006, 0.99, 1000, True)
    assert found.verdict == "undecided"
    assert str(found).startswith("undecided")


@pytest.mark.parametrize(("own", "other"), [([], [1.0]), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_runs_that_do_not_pair_are_refused(own: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="runs"):
        ratio(own, other, paired=True)


# ---- sessions --------------------------------------------------------------------------------------------------------


def sessions(rng: np.random.Generator, median: float, drift: float, count: int) -> list[np.ndarray]:
    """Each session is slower or faster as a whole by ``drift``, the runs inside hardly differ."""
    return [times(rng, median * float(np.exp(drift * rng.standard_normal())), 0.002) for _ in range(count)]


@pytest.mark.parametrize("count", [3, 5])
def test_sessions_of_the_same_kernel_are_hardly_ever_called_different(count: int) -> None:
    rng = np.random.default_rng(5)
    tried = [ratio_of_sessions(sessions(rng, 1, 0.03, count), sessions(rng, 1, 0.03, count)) for _ in range(40)]
    assert [one.verdict for one in tried].count("undecided") >= 39
    of_runs = [ratio(sessions(rng, 1, 0.03, 1)[0], sessions(rng, 1, 0.03, 1)[0], paired=False) for _ in range(40)]
    assert [one.verdict for one in of_runs].count("undecided") < 30, "what the runs alone would have claimed"


def test_a_slower_kernel_is_found_across_sessions() -> None:
    rng = np.random.default_rng(6)
    found = ratio_of_sessions(sessions(rng, 1, 0.01, 5), sessions(rng, 1.2, 0.01, 5))
    assert found.verdict == "faster" and found.low < 1.2 < found.high


def test_few_sessions_must_differ_by_more() -> None:
    rng = np.random.default_rng(7)
    one, near, far = (sessions(rng, median, 0, 1) for median in (1, 1.03, 1.1))
    assert ratio_of_sessions(one, near).verdict == "undecided"
    assert ratio_of_sessions(one, far).verdict == "faster"


def test_sessions_without_any_noise_have_no_interval() -> None:
    found = ratio_of_sessions([[2.0] * 5] * 3, [[3.0] * 5] * 3)
    assert found.low == found.value == found.high == pytest.approx(1.5)
