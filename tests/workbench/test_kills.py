"""The kill table: every fault is caught, diagnose names it in a kernel with other tiles, and the page says so."""

from pathlib import Path

from attnworks.workbench.diagnose.kills import Rank, Row, page, rank
from attnworks.workbench.hunt import kill_table
from attnworks.workbench.mutants import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "kill_table.md"
# What no probe shows: verify's own cases find these.
UNSEEN = {"batch changes the tiles", "rows past the end unwritten"}


def test_diagnose_names_faults_first_or_second() -> None:
    """A sample with seed 0; the whole is ``attnworks diagnose --kill-table --seeds 5``."""
    faults = [fault for fault in list(FAULTS)[3::6] if fault not in UNSEEN]
    ranks = rank(faults)
    missed = [fault for fault, found in zip(faults, ranks, strict=True) if not 1 <= found.rank <= 2]
    assert len(faults) > 10
    assert len(missed) <= len(faults) // 10


def _written() -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_lists_every_fault_as_caught() -> None:
    written = _written()
    assert list(written) == list(FAULTS)
    assert [fault for fault, row in written.items() if row[1] == "nothing"] == []


def test_the_page_says_what_catches_a_fault() -> None:
    written = _written()
    for kill in kill_table([fault for n, fault in enumerate(FAULTS) if n % 10 == 3]):
        case, checks = written[kill.fault][:2]
        assert (case, checks.removesuffix(" …").split(", ")) == (kill.case, list(kill.checks[:6]))


def test_a_page_counts_what_was_not_caught() -> None:
    (kill,) = kill_table(["scale missing"])
    missed = Row("scale missing", (kill,), (Rank(3, 0.5, "scale twice", ("scale twice",)),))
    text = page([missed], [Rank(0, 1.0, "")])
    assert "names 0 first or second with every seed" in text
    assert "- scale missing, scale twice" in text
    assert "not shown by the probes: scale missing" in text
