"""The kill table: every fault is caught, diagnose names it in a kernel with other tiles, and the page says so."""

from pathlib import Path

import pytest

from attnworks.workbench.diagnose.kills import Rank, Row, page, rank
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.hunt import kill_table

PAGE = Path(__file__).parents[2] / "docs" / "kill_table.md"
# What no probe shows: verify's own cases find these.
UNSEEN = {"batch changes the tiles"}

pytestmark = pytest.mark.usefixtures("one_thread")


def _written() -> dict[str, list[str]]:
    """Of each fault: the case, the checks, the ranks, the largest distance, the rival."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.long
def test_diagnose_names_faults_as_the_page_says() -> None:
    """A sample with seed 0; the whole is ``attnworks diagnose --kill-table --seeds 5``."""
    written = _written()
    faults = [fault for fault in list(FAULTS)[9::20] if fault not in UNSEEN]
    assert len(faults) >= 9
    for fault, found in zip(faults, rank(faults), strict=True):
        assert 1 <= found.rank <= 2, fault
        if len(written[fault]) > 2:  # a page of --no-ranks says no more
            ranks, distance = written[fault][2:4]
            assert str(found.rank) in ranks.split("/"), fault
            assert found.distance == pytest.approx(float(distance), abs=0.02), fault


def test_every_fault_is_caught_and_by_what_the_page_says() -> None:
    written, kills = _written(), kill_table()
    assert [kill.fault for kill in kills] == list(FAULTS) == list(written)
    assert [kill.fault for kill in kills if not kill.check] == []
    assert [fault for fault, row in written.items() if row[1] == "nothing"] == []
    for kill in kills[3::10]:
        case, checks = written[kill.fault][:2]
        assert (case, checks.removesuffix(" …").split(", ")) == (kill.case, list(kill.checks[:6]))


def test_a_page_counts_what_was_not_caught() -> None:
    (kill,) = kill_table(["scale missing"])
    missed = Row("scale missing", (kill,), (Rank(3, 0.5, "scale twice", ("scale twice",)),))
    text = page([missed], [Rank(0, 1.0, "")])
    assert "names 0 first or second with every seed" in text
    assert "- scale missing, scale twice" in text
    assert "not shown by the probes: scale missing" in text
