"""What is wrong in one sentence, put together from what was read: which tensors, when, and what they hold instead.

It names no fault, so that it holds for those that no list has."""

from __future__ import annotations

from collections.abc import Sequence

from attnworks.workbench.diagnose.probes import Observation
from attnworks.workbench.diagnose.readings import Reading

_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
_WORDS = {"dq": "dQ", "dk": "dK", "dv": "dV", "dbias": "the bias's gradient", "dsink": "the sink's gradient"}


def sentence(
    seen: Sequence[Observation], when: Sequence[str], readings: Sequence[Reading], weights: Sequence[str]
) -> str:
    """``when``: what failing probes share; ``weights``: what is wrong with the softmax's weights."""
    which = _which(seen)
    if not which:
        return ""
    what = [one.said for one in readings] or list(weights)
    told = f": {'; '.join(what[:2])}" if what else ""
    return f"{which[0].upper()}{which[1:]} {_when(when)}{told}."


def _which(seen: Sequence[Observation]) -> str:
    """The tensors that are wrong by themselves: gradients where the output is right, the LSE in any case."""
    answers = [one.answers for one in seen if one.answers]
    if any("out" in one and one["out"].failed for one in answers):
        lse = [one["lse"].failed for one in answers if "lse" in one and one["out"].failed]
        return "the output is wrong" + ("" if not lse else ", the LSE with it," if any(lse) else ", the LSE right,")
    names = [name for name in _GRADIENTS if any(name in one and one[name].failed for one in answers)]
    wrong = ["the LSE"] if any("lse" in one and one["lse"].failed for one in answers) else []
    wrong += [_WORDS[name] for name in names]
    if not wrong:
        return ""
    listed = wrong[0] if len(wrong) == 1 else f"{', '.join(wrong[:-1])} and {wrong[-1]}"
    return f"the output is right, {listed} {'is' if len(wrong) == 1 else 'are'} wrong"


def _when(when: Sequence[str]) -> str:
    first = when[0] if when else ""
    if first.startswith("fails on all"):
        return "in every call"
    return first.removeprefix("fails ").removeprefix("always fails ") if first else "in some calls"
