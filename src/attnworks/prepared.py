"""Prepared calls: launchers by the key of everything they depend on, so that a second call of a kind builds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from pathlib import Path

from torch import Tensor

from attnworks import dispatch, known, masks
from attnworks.autograd import Joined
from attnworks.backends import Backend, Launcher, Unaligned
from attnworks.hardware import detect
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem

# Emptied when full rather than evicted one by one: a program that meets this many distinct problems has no working set
# worth an LRU's cost on every hit.
CALLS: dict[Hashable, Launcher] = {}
LIMIT = 4096


def lookup(key: Hashable) -> Launcher | None:
    """The launcher of an earlier call with an equal key."""
    try:
        return CALLS.get(key)
    except TypeError:  # an argument that cannot be hashed is a wrong one: the checks that follow name it
        return None


def prepare(key: Hashable, problem: Problem, backend: str, plan: Plan | None) -> Launcher:
    """Choose backend and plan, prepare the launcher, keep it for the key. Raises what ``dispatch.choose`` raises."""
    chosen, best, verdicts = dispatch.choose(problem, backend, plan)
    if backend == "auto" and plan is None:
        dispatch.warn_if_quadratic(problem, chosen, verdicts)
    launch = _launcher(problem, chosen, best)
    unaligned = dataclasses.replace(problem, aligned=False)
    if not chosen.verdict(unaligned, detect(problem.device)).supported:
        launch = _WhereAligned(launch, unaligned, backend, plan)
    # A function that is called would be kept alive, with all it captured, for a key that a fresh one never meets again.
    if not _holds_functions(problem):
        if len(CALLS) >= LIMIT:
            CALLS.clear()
        CALLS[key] = launch
    return launch


def use_plans(folder: str | Path | None) -> None:
    """Take tuned plans from ``folder``, which holds a file ``<device>.json`` for each kind of device; None: from
    ``plans`` in the user's configuration folder, as before the first use. What the files don't say is left to the plans
    that are shipped and to the backends' own tables. Holds for the process; calls made before are prepared anew.

    Raises ``ValueError`` for what is no folder; a file that can't be read is named by the call that needs it.
    """
    from attnworks import tuned  # as by the first call

    tuned.use(folder)
    forget()


def forget() -> None:
    """All calls are prepared anew."""
    CALLS.clear()
    known.CALLS.clear()


class _WhereAligned:
    """The launcher of a backend that needs aligned addresses, which are in no key. A call whose tensors lie elsewhere
    gets what is chosen for a problem that says so: another backend, or the refusal of the one that was named."""

    def __init__(self, launch: Launcher, unaligned: Problem, backend: str, plan: Plan | None) -> None:
        self._launch, self._choice = launch, (unaligned, backend, plan)
        self._elsewhere: Launcher | None = None

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        try:
            return self._launch(o)
        except Unaligned:
            pass
        if self._elsewhere is None:
            problem, backend, plan = self._choice
            chosen, best, _ = dispatch.choose(problem, backend, plan)
            self._elsewhere = _launcher(problem, chosen, best)
        return self._elsewhere(o)


def _launcher(problem: Problem, chosen: Backend, plan: Plan) -> Launcher:
    return joined(problem, chosen, plan) if problem.differentiable else chosen.prepare(problem, plan)


def joined(problem: Problem, backend: Backend, plan: Plan) -> Launcher:
    """The launcher of a differentiable problem, joined to the backend's own backward where it has one."""
    backward = None if problem.transformed else backend.prepare_backward(problem, plan)
    if backward is None:
        return backend.prepare(problem, plan)
    forward = backend.prepare(dataclasses.replace(problem, return_lse=True), plan)
    return Joined(problem, backend, plan, forward, backward)


def _holds_functions(problem: Problem) -> bool:
    return any(isinstance(term, masks.Predicate) and term.function is not None for term in problem.mask) or any(
        term.function is not None for term in problem.scores
    )


# ---- what a key is made of -------------------------------------------------------------------------------------------


def signature(*tensors: Tensor | None) -> tuple[Hashable, ...] | None:
    """What the checks of shapes, dtypes and devices look at; None if something is no tensor, which they will name."""
    try:
        return tuple(
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.layout) for t in tensors
        )
    except (AttributeError, RuntimeError):
        return None
