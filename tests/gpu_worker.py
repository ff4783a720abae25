"""What the processes of tests/gpu/test_conformance.py run: one case for one subject, on the GPU."""

from __future__ import annotations

import torch

from attnworks.workbench import catalogue
from attnworks.workbench.subjects import BackendSubject, backend_subjects
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case, verify_properties

Found = list[tuple[str, str, str]]
"""(status, check, message) of each result."""
Job = tuple[str, str, bool]
"""Subject, case, whether its properties are checked."""

_lost = ""  # the case after which the device no longer answered this process


def start() -> None:
    torch.set_num_threads(1)


def check(subject: str, case: str, properties: bool, device: str = "cuda") -> Found:
    global _lost
    if _lost:
        return [("failed", "not run", f"the device was lost by {_lost}")]
    chosen, problem = _subject(subject, device), catalogue.BY_NAME[case]
    with fresh_memory_poisoned():
        results = verify_properties(chosen, problem) if properties else verify_case(chosen, Answers(problem))
    if not results:
        return [("skipped", "properties", "; ".join(chosen.reasons(problem.build())))]
    if any("CUDA error" in result.message for result in results):  # it will answer every further call with the same
        _lost = case
    return [(result.status, result.check, result.message) for result in results]


def _subject(name: str, device: str) -> BackendSubject:
    return next(subject for subject in backend_subjects(device=device) if subject.name == name)
