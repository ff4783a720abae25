"""Dispatch: which backend and plan answer a Problem, and why. Pure: it looks at the Problem, never at memory."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

from attnworks.backends import Backend, cpu, cuda, reference, triton
from attnworks.errors import UnsupportedError, Verdict
from attnworks.hardware import Hardware, detect
from attnworks.plan import Plan, best_plan
from attnworks.problem import Problem

BACKENDS: tuple[Backend, ...] = (cpu, cuda, triton, reference)
"""In the order in which ``backend="auto"`` tries them; the last can do all of the contract."""

NAMES = tuple(backend.NAME for backend in BACKENDS)

# Below this, the scores that the reference writes out are not worth a warning.
QUIET_SCORE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found: the backend and plan a call gets, why that plan, and every backend's verdict."""

    problem: Problem
    backend: str
    plan: Plan
    verdicts: tuple[Verdict, ...]
    resources: dict[str, int]
    why: str

    def __str__(self) -> str:
        fields = {name: value for name, value in self.plan.to_json().items() if value and name != "backend"}
        lines = [f"backend: {self.backend}", "plan: " + ", ".join(f"{name}={value}" for name, value in fields.items())]
        lines.append(f"why: {self.why}")
        lines += [f"on chip: {size} bytes of {name}" for name, size in self.resources.items()]
        return "\n".join(lines + [str(verdict) for verdict in self.verdicts])

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem.to_json(),
            "backend": self.backend,
            "plan": self.plan.to_json(),
            "why": self.why,
            "resources": self.resources,
            "verdicts": [{"backend": v.backend, "supported": v.supported, "reasons": v.reasons} for v in self.verdicts],
        }


def verdicts(problem: Problem, hardware: Hardware | None = None) -> tuple[Verdict, ...]:
    """Every backend's verdict on the problem."""
    hardware = hardware or detect(problem.device)
    return tuple(backend.verdict(problem, hardware) for backend in BACKENDS)


def choose(
    problem: Problem, backend: str = "auto", plan: Plan | None = None
) -> tuple[Backend, Plan, tuple[Verdict, ...]]:
    """The backend and plan for a problem.

    A named backend (or the one a given plan names) is used or refused, never replaced. Raises ``ValueError`` for an
    unknown backend or a plan that does not fit, ``UnsupportedError`` with every reason if none may run it.
    """
    chosen, best, _, found = _chosen(problem, backend, plan)
    return chosen, best, found


def explain(problem: Problem, backend: str = "auto", plan: Plan | None = None) -> Explanation:
    """``choose``, with what it chose written down."""
    chosen, best, why, found = _chosen(problem, backend, plan)
    return Explanation(problem, chosen.NAME, best, found, chosen.resources(problem, best), why)


def _chosen(problem: Problem, backend: str, plan: Plan | None) -> tuple[Backend, Plan, str, tuple[Verdict, ...]]:
    asked = _asked(backend, plan)
    hardware = detect(problem.device)
    found = verdicts(problem, hardware)
    for candidate, verdict in zip(BACKENDS, found, strict=True):
        if asked in ("auto", candidate.NAME) and verdict.supported:
            if plan is None:
                return candidate, *_ranked(problem, candidate, hardware), found
            candidate.check_plan(problem, plan)
            return candidate, plan, "given by the caller", found
    raise UnsupportedError([v for v in found if asked in ("auto", v.backend)], asked)


def _ranked(problem: Problem, backend: Backend, hardware: Hardware) -> tuple[Plan, str]:
    """The plan where none is given, and why: a tuned one, else the backend's own choice. Raises ``ValueError`` for a
    tuned plan that can't run its problem."""
    from attnworks import tuned  # with the first call

    found = tuned.find(problem, hardware, backend.NAME, backend.KERNELS)
    if found is None:
        return best_plan(problem, backend.candidates(problem, hardware), hardware), "the backend's own choice"
    plan = backend.adapt(problem, found.row.plan, hardware)
    try:
        backend.check_plan(problem, plan)
    except ValueError as error:
        raise ValueError(f"tuned plans {found.path}, row {found.key!r}: {error}") from None
    return plan, str(found)


def _asked(backend: object, plan: object) -> str:
    if backend != "auto" and backend not in NAMES:
        raise ValueError(f"backend: was {backend!r}, must be 'auto' or one of {NAMES}")
    if plan is None:
        return str(backend)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: was {plan!r}, must be None or a Plan")
    if plan.backend not in NAMES:
        raise ValueError(f"plan: named backend {plan.backend!r}, must name one of {NAMES}")
    if backend not in ("auto", plan.backend):
        raise ValueError(f"plan: named backend {plan.backend!r}, must name {backend!r} like the backend argument")
    return plan.backend


def warn_if_quadratic(problem: Problem, chosen: Backend, found: tuple[Verdict, ...]) -> None:
    """Say that ``auto`` ended at the reference, on a GPU or above a few MB of scores; once for each calling line."""
    score_bytes = 4 * problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    if chosen is not reference or (problem.device.startswith("cpu") and score_bytes <= QUIET_SCORE_BYTES):
        return
    reasons = "; ".join(str(verdict) for verdict in found if not verdict.supported)
    # The warnings module shows one message once for each place: the line that called attention() or a sibling. The text
    # holds no sizes, so that a loop over lengths does not repeat it.
    warnings.warn(
        f"attention runs on the reference backend, which writes out all scores ({reasons})",
        RuntimeWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """``warnings.warn``'s stacklevel, for the function that calls this, of the first frame outside the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnworks."):
        frame, level = frame.f_back, level + 1
    return level
