"""The proof that the checks bite: every mutant goes through ``verify``'s checks until one rejects it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from attnworks.workbench import catalogue, properties
from attnworks.workbench.cases import Case
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.verify import Answers, Progress, Result, fresh_memory_poisoned, verify_case, verify_properties


@dataclass(frozen=True)
class Kill:
    """What caught a mutant first: "" where nothing did; ``checks`` are all that do on that case, ``detail`` is the
    failure's message."""

    fault: str
    case: str
    check: str
    detail: str
    checks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kill_table(faults: Iterable[str] = tuple(FAULTS), *, seed: int = 0, progress: Progress | None = None) -> list[Kill]:
    """Run each mutant through the quick cases until a check catches it."""
    cases, found, faults = catalogue.select(quick=True, seed=seed), [], tuple(faults)
    answers = {case.name: Answers(case) for case in cases}
    with fresh_memory_poisoned():
        for done, fault in enumerate(faults):
            if progress:
                progress(fault, done, len(faults))
            first = [case for case in cases if fnmatchcase(case.name, FAULTS.get(fault, ""))]
            found.append(_hunt(Mutant(fault), [*first, *(case for case in cases if case not in first)], answers))
    if progress:
        progress("", len(faults), len(faults))
    return found


def _hunt(mutant: Mutant, cases: Iterable[Case], answers: dict[str, Answers]) -> Kill:
    for case in cases:
        results = verify_case(mutant, answers[case.name])
        if case.name in properties.CASES and not any(r.status == "failed" for r in results):
            results = verify_properties(mutant, case)
        failed = [r for r in results if r.status == "failed"]
        if failed:
            checks = [name for r in failed for name in _failed_checks(r)]
            return Kill(mutant.fault, case.name, checks[0], failed[0].message, tuple(dict.fromkeys(checks)))
    return Kill(mutant.fault, "", "", "survived")


def _failed_checks(result: Result) -> list[str]:
    measured = [f"{m.tensor} {c.name}" for m in result.measures for c in m.checks if not c.passed]
    return measured or [result.check]
