"""The answer in words, as a colleague would give it who has seen it before."""

from __future__ import annotations

from attnworks.workbench.diagnose import Diagnosis, describe
from attnworks.workbench.diagnose.causes import CAUSES
from attnworks.workbench.diagnose.nearest import Candidate
from attnworks.workbench.diagnose.variants import SPLIT

RIGHT = "Nothing is wrong with it on the {asked} probes that it ran: every value, LSE and gradient within its budget."


def explain(found: Diagnosis) -> list[tuple[str, list[str]]]:
    """Headings and the lines under them."""
    refused = f"{found.refused} probes were not run: the kernel does not take them, or shorter ones tell."
    if found.right:
        return [("right", [RIGHT.format(asked=found.asked), *([refused] if found.refused else [])])]
    return [
        ("what is seen", _symptoms(found)),
        ("most likely cause", _cause(found)),
        ("the smallest input that shows it", _smallest(found)),
    ]


def _symptoms(found: Diagnosis) -> list[str]:
    lines = [f"wrong on {len(found.failing)} of the {found.asked} probes that it ran"]
    lines += [found.sentence] if found.sentence else []
    if found.raised:
        name, error = next(iter(found.raised.items()))
        lines.append(f"raises on {len(found.raised)} probes, first on {name!r}: {error[:200]}")
    return lines + found.patterns + [f"verify: {check}" for check in found.checks]


def _cause(found: Diagnosis) -> list[str]:
    if not found.certainty:
        lines = ["None of the known faults: nothing comes near enough to be named. What can be said of it is above."]
        if found.candidates:
            near = ", ".join(f"{c.fault!r} ({c.distance:.2f})" for c in found.candidates[:2])
            lines.append(f"Least far (0 is the same, 1 has nothing in common): {near}.")
            lines.append("It may be two faults at once: repair what the patterns above show, and ask again.")
        return lines
    first = found.candidates[0]
    cause = CAUSES[first.fault]
    sure = "" if found.certainty == "sure" else " (likely, not certain)"
    lines = [
        f"{first.fault}{sure}",
        cause.symptom,
        f"must hold: {cause.line}",
        f"look at: {cause.look}",
        f"distance {first.distance:.2f} from that fault (0 is the same, 1 has nothing in common); it has "
        f"{first.explained} of the {first.wrong} wrong tensors wrong as well{_tile(first)}",
    ]
    if first.narrowed:
        lines.append(
            "Everywhere, that fault would show in more than is wrong: look for the path, the branch or the "
            "instance that only the failing calls, rows or heads take."
        )
        lines += [f"Of the calls in which it would show, this one {one}." for one in found.conditions]
        lines += [f"Within a call: {one}." for one in found.patterns if " is wrong in " in one]
    if first.second_fault:
        lines.append(
            f"A second fault is likely: {first.left} of these {first.explained} differ from that fault's by more than "
            "rounding explains. Repair this one and ask again."
        )
    elif first.explained < first.wrong:
        lines.append("What it does not have wrong may be a second fault: repair this one and ask again.")
    if len(found.candidates) > 1:
        rival = found.candidates[1]
        lines.append(f"next best: {rival.fault}, distance {rival.distance:.2f}")
        if found.certainty == "likely" and rival.distance < first.distance + 0.2:
            lines.append(f"for that one look at: {CAUSES[rival.fault].look}")
    return lines


def _tile(candidate: Candidate) -> str:
    if candidate.tile < 0:
        return f"; {-candidate.tile} splits fit best"
    if candidate.number is not None:
        return f"; {_number(candidate.fault, candidate.number)}"
    what = "splits" if candidate.fault in SPLIT else "tiles"
    return f"; {what} of {candidate.tile} fit best" if candidate.tile else ""


def _number(fault: str, number: float) -> str:
    """The number that was read from the kernel, in words where it is made of two."""
    first, second = divmod(round(number), 1000)
    if fault == "causal from other lengths":
        return f"lengths rounded up fit: keys to a multiple of {first}, queries of {second}"
    if fault == "tail rows unwritten":
        return f"of every {first} rows those from {second} on"
    if fault == "causal by tile":
        return f"{number:g} rows share the bound of the last of them"
    return f"its number is {number:g}"


def _smallest(found: Diagnosis) -> list[str]:
    return [] if found.smallest is None else [describe(found.smallest.case)]
