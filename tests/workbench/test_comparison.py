"""Comparisons of kept runs: who is compared with whom, what noise hides, what a machine's drift must not look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from attnworks.workbench.cli import main
from attnworks.workbench.comparison import Compared, NothingToCompareError, compare, newest_two, regress
from attnworks.workbench.history import History
from attnworks.workbench.records import Record
from record_helpers import RECORD

SIZES = {"form": "dense", "batch": 1, "heads_q": 2, "heads_kv": 2, "seq_q": 64, "seq_kv": 64, "head_dim": 16}
PROBLEM = SIZES | {"head_dim_v": 16, "dtype": "float32", "device": "cpu", "mask": "none", "scores": "none"}
PLAN = {"backend": "cpu", "schedule": "tiled", "tile_q": 64, "tile_kv": 64}
SLOW, ERROR = 2.0, 1e-3


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history.db")


class Machine:
    """Writes sessions of noisy runs into a history, each later than the one before."""

    def __init__(self, history: History, noise: float = 0.02) -> None:
        self.history, self.noise, self.sessions = history, noise, len(history.records())
        self.rng = np.random.default_rng(3)

    def session(self, commit: str | None, drift: float = 1.0, runs: int = 30, **seconds: Any) -> list[int]:
        """One record for each provider: its time, or (time, fields to change)."""
        self.sessions += 1
        rounds = drift * np.exp(self.noise * np.abs(self.rng.standard_normal(runs)))
        records = []
        for name, value in seconds.items():
            time, changes = value if isinstance(value, tuple) else (value, {})
            own = time * rounds * np.exp(self.noise / 4 * self.rng.standard_normal(runs))
            made = replace(
                RECORD,
                session=f"session {self.sessions}",
                when=f"2026-01-01T00:00:{self.sessions:02}+00:00",
                provider=name,
                form=f"{name}(q, k, v)",
                commit=commit,
                problem=PROBLEM,
                plan=PLAN if name == "attnworks" else None,
                seconds=tuple(map(float, own)),
                check={"worst_share_of_bound": 0.1, "relative_error": ERROR * (1 + 0.02 * self.rng.standard_normal())},
            )
            records.append(replace(made, **changes))
        return self.history.add(records)


def of(history: History, a: dict[str, Any], b: dict[str, Any], control: str | None = None) -> Compared:
    return compare(history, history.records(**a), history.records(**b), control)


# ---- times -----------------------------------------------------------------------------------------------------------


def test_two_commits(history: History) -> None:
    machine = Machine(history)
    machine.session("aaaaaaa", attnworks=1.2, sdpa=3.0)
    machine.session("bbbbbbb", attnworks=1.0, sdpa=3.0)
    found = of(history, {"commit": "aaaaaaa"}, {"commit": "bbbbbbb"})
    attnworks, sdpa = found.comparisons
    assert (attnworks.b[0].provider, sdpa.b[0].provider) == ("attnworks", "sdpa")
    assert attnworks.ratio.verdict == "faster" and attnworks.ratio.low < 1.2 < attnworks.ratio.high
    assert sdpa.ratio.verdict == "undecided"
    assert attnworks.changes == ("commit: aaaaaaa -> bbbbbbb",)
    assert attnworks.numerics == "same" and not found.worse


def test_kernels_of_one_session_are_compared_by_rounds(history: History) -> None:
    Machine(history, noise=0.3).session("c", attnworks=1.0, sdpa=1.1)
    (found,) = of(history, {"provider": "sdpa"}, {"provider": "attnworks"}).comparisons
    assert found.ratio.paired and found.ratio.verdict == "faster"
    assert any(change.startswith("kernel") for change in found.changes)


def test_few_sessions_claim_no_small_difference_and_many_do(history: History) -> None:
    machine = Machine(history, noise=0.002)
    for _ in range(4):
        machine.session("aaaaaaa", attnworks=1.0)
        machine.session("bbbbbbb", attnworks=1.03)
    few = compare(history, history.records(id=1), history.records(id=2)).comparisons[0]
    assert few.ratio.verdict == "undecided" and few.ratio.high < 1
    assert of(history, {"commit": "aaaaaaa"}, {"commit": "bbbbbbb"}).comparisons[0].ratio.verdict == "slower"


def test_sessions_that_differ_among_themselves_are_the_noise(history: History) -> None:
    machine = Machine(history, noise=0.002)
    for drift in (1.0, 1.3, 0.8, 1.1):
        machine.session("aaaaaaa", drift, attnworks=1.0)
        machine.session("bbbbbbb", drift * 1.02, attnworks=1.0)
    assert of(history, {"commit": "aaaaaaa"}, {"commit": "bbbbbbb"}).comparisons[0].ratio.verdict == "undecided"


def test_the_control_takes_the_machines_drift_out(history: History) -> None:
    machine = Machine(history)
    machine.session("aaaaaaa", attnworks=1.0, sdpa=3.0)
    machine.session("bbbbbbb", drift=1.5, attnworks=1.0, sdpa=3.0)
    sides = {"commit": "aaaaaaa", "provider": "attnworks"}, {"commit": "bbbbbbb", "provider": "attnworks"}
    assert of(history, *sides).comparisons[0].ratio.verdict == "slower"
    (controlled,) = of(history, *sides, control="sdpa").comparisons
    assert controlled.ratio.verdict == "undecided" and controlled.control == "sdpa"
    machine.session("ccccccc", attnworks=1.0)
    without = of(history, sides[0], {"commit": "ccccccc"}, control="sdpa").comparisons[0]
    assert without.control is None, "a session has no sdpa"
    machine.session("ddddddd", attnworks=1.0, sdpa=(3.0, {"versions": {"torch": "9"}}))
    assert of(history, sides[0], {"commit": "ddddddd"}, control="sdpa").comparisons[0].control is None, "another torch"


# ---- who is compared with whom ---------------------------------------------------------------------------------------


def test_plans_machines_and_problems_pair_or_are_the_change(history: History) -> None:
    machine = Machine(history)
    wide, other = PLAN | {"tile_q": 128}, {"name": "another"}
    machine.session("c", attnworks=1.0)
    machine.session("c", attnworks=(1.2, {"plan": wide}))
    (plans,) = of(history, {"tile_q": 64}, {"tile_q": 128}).comparisons
    assert len(plans.changes) == 1 and "tile_q 64" in plans.changes[0] and "tile_q 128" in plans.changes[0]
    machine.session("d", attnworks=(1.2, {"plan": wide}))
    machine.session("d", attnworks=(1.0, {}))
    both = of(history, {"commit": "c"}, {"commit": "d"})
    assert [one.a[0].plan == one.b[0].plan for one in both.comparisons] == [True, True], "plans pair"
    machine.session("e", attnworks=(1.0, {"machine": other, "problem": PROBLEM | {"device": "cuda:0"}}))
    (machines,) = of(history, {"id": 1}, {"machine": "another"}).comparisons
    assert any(change == "machine: cpu, 2 threads -> another, 2 threads" for change in machines.changes)
    machine.session("f", attnworks=(1.0, {"problem": PROBLEM | {"seq_q": 128}}))
    apart = of(history, {"commit": "e"}, {"commit": "f"})
    assert not apart.comparisons and "no problem is on both sides" in apart.unmatched[0]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"relative_error": 1.1 * ERROR, "worst_share_of_bound": 0.15}, "same"),
        ({"relative_error": 1.5 * ERROR, "worst_share_of_bound": 0.1}, "worse"),
        ({"relative_error": ERROR, "worst_share_of_bound": 0.3}, "worse"),
        ({"relative_error": 0.5 * ERROR, "worst_share_of_bound": 0.1}, "better"),
        ({"worst_share_of_bound": 0.1}, "same"),
    ],
)
def test_errors_are_compared_too(history: History, check: dict[str, float], expected: str) -> None:
    machine = Machine(history)
    machine.session("aaaaaaa", attnworks=1.0)
    machine.session("bbbbbbb", attnworks=(1.0, {"check": check}))
    found = of(history, {"commit": "aaaaaaa"}, {"commit": "bbbbbbb"})
    assert found.comparisons[0].numerics == expected
    assert found.worse == (expected == "worse")


# ---- regress ---------------------------------------------------------------------------------------------------------


def invoke(history: History, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--db", str(history.path)], env={"COLUMNS": "200"})


def sessions(history: History, *pairs: tuple[str, dict[str, Any]]) -> None:
    machine = Machine(history)
    for commit, seconds in pairs:
        machine.session(commit, **seconds)


BEFORE = ("aaaaaaa", {"attnworks": 1.0, "sdpa": 3.0})


@pytest.mark.parametrize(
    ("after", "code", "words"),
    [
        ({"attnworks": 1.0, "sdpa": 3.0}, 0, "not worse: 2 compared"),
        ({"attnworks": 1.2, "sdpa": 3.0}, 1, "worse: 1 of 2"),
        ({"attnworks": 0.8, "sdpa": 3.0}, 0, "not worse"),
        ({"attnworks": 2.0, "sdpa": 6.0, "drift": 2.0}, 1, "worse: 1 of 2"),
        ({"attnworks": (1.0, {"check": {"worst_share_of_bound": 0.9}}), "sdpa": 3.0}, 1, "worse: 1 of 2"),
        ({"sdpa": 3.0}, 1, "B has no attnworks"),
    ],
    ids=["the same", "slower", "faster", "a slower machine", "less exact", "fails the check"],
)
def test_regress_is_for_continuous_integration(history: History, after: dict[str, Any], code: int, words: str) -> None:
    sessions(history, BEFORE, ("bbbbbbb", after))
    result = invoke(history, "regress")
    assert result.exit_code == code, result.output
    assert words in result.output


def test_regress_takes_selections_and_says_when_there_is_nothing(history: History) -> None:
    assert invoke(history, "regress").exit_code == 2
    sessions(history, BEFORE)
    assert "no commit but aaaaaaa" in invoke(history, "regress").output
    sessions(history, ("bbbbbbb", {"attnworks": 1.0}), ("ccccccc", {"attnworks": 1.0}))
    named = ("--baseline", "aaaaaaa", "--candidate", "ccccccc")
    assert invoke(history, "regress", *named).exit_code == 0
    assert invoke(history, "regress", *named[:2]).exit_code == 2
    assert invoke(history, "regress", "--baseline", "aaaaaaa", "--candidate", "ddddddd").exit_code == 2
    with pytest.raises(NothingToCompareError, match="one of the sides"):
        regress(history, {}, history.records())


def test_the_newest_two_commits_are_of_one_machine(history: History) -> None:
    elsewhere: Sequence[tuple[str, dict[str, Any]]] = [("bbbbbbb", {"attnworks": (1.0, {"machine": {"name": "gpu"}})})]
    sessions(history, BEFORE, *elsewhere, ("ccccccc", {"attnworks": 1.0}))
    before, after = newest_two(history)
    assert {record.commit for record in before.values()} == {"aaaaaaa"}
    assert {record.commit for record in after.values()} == {"ccccccc"}


# ---- compare on the command line -------------------------------------------------------------------------------------


def test_compare_prints_forms_and_changes(history: History) -> None:
    sessions(history, BEFORE, ("bbbbbbb", {"attnworks": 1.2, "sdpa": 3.0}))
    result = invoke(history, "compare", "aaaaaaa", "bbbbbbb", "--control", "sdpa")
    assert result.exit_code == 0, result.output
    for words in ("attnworks(q, k, v)", "sdpa(q, k, v)", "commit: aaaaaaa -> bbbbbbb", "slower", "few sessions"):
        assert words in result.stdout
    found = json.loads(invoke(history, "compare", "1", "3", "--json").stdout)
    assert found["comparisons"][0]["ratio"]["verdict"] == "slower"
    assert "plain times: " in " ".join(invoke(history, "compare", "1", "3", "--control", "nobody").stdout.split())
    assert "plain times: " not in result.stdout
    assert "no runs of '77'" in invoke(history, "compare", "1", "77").output


def test_a_run_is_not_compared_with_itself(history: History) -> None:
    sessions(history, BEFORE, ("bbbbbbb", {"attnworks": 1.2, "sdpa": 3.0}))
    asked = (("compare", "aaaaaaa", "since=2000-01-01"), ("regress", "--baseline", "1", "--candidate", "attnworks"))
    for arguments in asked:
        result = invoke(history, *arguments)
        assert result.exit_code == 2 and "both selections have runs 1" in result.output, result.output


def test_two_ids(history: History) -> None:
    first, second = Machine(history).session("c", attnworks=1.0, sdpa=1.2)
    records: dict[int, Record] = history.records()
    assert compare(history, {first: records[first]}, {second: records[second]}).comparisons[0].ratio.paired
