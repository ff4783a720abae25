"""verify(): is a kernel right? Three layers and the properties, on named cases, for every backend.

1. hand: tiny cases whose answers are written out; 2. oracle: random and stress inputs against fp64, on the named cases
and on a sweep that covers all pairs of factors (``sweep.py``); 3. fused: the framework's own fused attention as a
cross-check. Then the properties that need no reference. A case is skipped only by the backend's own verdict, and listed
with its reasons.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from attnworks.workbench import fused, hand, properties, schedule
from attnworks.workbench.cases import Case
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.isolation import Isolated
from attnworks.workbench.metrics import Measure, Standard, measure, standards
from attnworks.workbench.oracle import FORWARD, Expected
from attnworks.workbench.subjects import Declined, Finding, Subject, abilities_of, backend_subjects
from attnworks.workbench.yardstick import eager, flash_model

Layer = Literal["hand", "oracle", "fused", "property"]
Status = Literal["passed", "failed", "skipped"]
Progress = schedule.Progress

_LOOKAHEAD = 12  # cases whose answers are worked out, or wait, at a time
NO_LSE = properties.UNDECLARED["lse"]


@dataclass(frozen=True)
class Result:
    """What one subject did on one case in one layer. ``check``: "forward", "gradients", "fused" or the property's name;
    ``message``: why it failed or was skipped."""

    subject: str
    case: Case
    layer: Layer
    check: str
    status: Status
    measures: tuple[Measure, ...] = ()
    message: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "subject": self.subject,
            "case": case.name,
            "layer": self.layer,
            "check": self.check,
            "status": self.status,
            "message": self.message,
            "seconds": self.seconds,
            "stresses": case.stresses,
            "form": case.form,
            "dtype": str(case.dtype).removeprefix("torch."),
            "longest": longest(case),
            "generator": case.generator,
            "seed": case.seed,
            "source": case.source,
            "measures": [m.to_json() for m in self.measures],
        }


def longest(case: Case) -> int:
    return max((max(pair) for pair in case.sequences), default=0)


class Answers:
    """What is right for one case, worked out once for all subjects and only as far as they get. ``gradients``: whether
    those of the case will be asked for, so that the values are worked out with them."""

    def __init__(self, case: Case, gradients: bool = True) -> None:
        self.case = case
        self._together = gradients and case.gradients

    @cached_property
    def _inputs(self) -> Inputs:
        return self.case.build()

    @cached_property
    def forward(self) -> dict[str, Standard]:
        if self._together:
            return {name: standard for name, standard in self.gradients.items() if name in FORWARD}
        return self._standards(self._expected, gradients=False)

    @cached_property
    def _expected(self) -> Expected:
        return hand.answer(self._inputs, gradients=self._together)

    @cached_property
    def gradients(self) -> dict[str, Standard]:
        expected = self._expected if self._together else hand.answer(self._inputs, gradients=True)
        return self._standards(expected, gradients=True)

    def _standards(self, expected: Expected, gradients: bool) -> dict[str, Standard]:
        yardstick = flash_model(self._inputs, gradients)
        # In fp32 and fp64 eager attention rounds as the yardstick does, but for the order of a division.
        low = self.case.dtype.itemsize < 4
        return standards(self.case, expected, yardstick, eager(self._inputs, gradients) if low else yardstick)

    @cached_property
    def fused(self) -> fused.Fused | str:
        return fused.run(self._inputs, self._expected)

    def work_out(self) -> None:
        _ = self.forward, self.fused


class Ahead:
    """Answers that are worked out in a thread of their own before they are asked for. A context manager: on leaving it
    what was not asked for is dropped."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[tuple[Case, bool], tuple[Answers, Future[None]]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def guess(self, cases: Iterable[Case]) -> None:
        """Begin with the cases that ``schedule.jobs`` changes for no kernel."""
        for case in cases:
            if case.form == "dense" and case.heads_q == case.heads_kv and not case.lse_cotangent:
                self.begin(case, gradients=True)

    def begin(self, case: Case, gradients: bool) -> None:
        if (case, gradients) not in self._begun:
            answers = Answers(case, gradients)
            self._begun[case, gradients] = answers, self._thread.submit(answers.work_out)

    def settle(self) -> None:
        """Keep what is done, finish what is being done, begin nothing more."""
        for wanted, (_, done) in list(self._begun.items()):
            if done.cancel():
                del self._begun[wanted]
        wait([done for _, done in self._begun.values()])

    def take(self, case: Case, gradients: bool) -> Answers:
        """The answers to a case, which come when they are asked for unless they are here."""
        if (case, gradients) not in self._begun:
            return Answers(case, gradients)
        answers, done = self._begun.pop((case, gradients))
        wait([done])  # what it raised is raised again where the answers are asked for
        return answers


def verify(
    *,
    backend: str = "auto-all",
    device: str = "cpu",
    cases: Sequence[str | Case] = (),
    quick: bool = False,
    seed: int = 0,
    budget: float | None = None,
    progress: Progress | None = None,
    subjects: Sequence[Subject] | None = None,
    ahead: Ahead | None = None,
) -> list[Result]:
    """Verify subjects on cases; nothing is raised for what fails, it is in the results.

    ``backend``: "auto-all", or a name that subjects' names begin with ("cpu" takes "cpu" and "cpu, small tiles").
    ``device``: where backends run ("cuda" or "cuda:1"); what they return is judged on the CPU.
    ``cases``: ``Case`` objects, names of cases of the sweep, or patterns of ``catalogue.select``. ``quick``: the short
    list. ``seed``: of the random inputs and of the sweep's design. ``budget``: minutes, after which no further check is
    begun; what finds most comes first, and where time is left, sweeps of further seeds follow. ``subjects``: what to
    verify instead of the backends. ``ahead``: answers that somebody has begun to work out. Raises ``ValueError`` for a
    backend or pattern that matches nothing.
    """
    verified = chosen_subjects(backend, quick, device) if subjects is None else tuple(subjects)
    jobs = schedule.jobs(verified, cases, quick=quick, seed=seed)
    further = schedule.further_sweeps(verified, seed) if budget and not cases and not quick else ()
    results: list[Result] = []
    clock = schedule.Clock(budget, len(jobs), progress)
    # Another process poisons its own, and here it would slow the oracle.
    elsewhere = all(isinstance(subject, Isolated) for subject in verified)
    with contextlib.nullcontext() if elsewhere else fresh_memory_poisoned(), ahead or Ahead() as known:
        for job, answers in _with_answers(chain(jobs, further), known):
            if clock.over(str(job)):
                break
            for subject in job.subjects:
                results += verify_properties(subject, job.case) if job.properties else verify_case(subject, answers)
    clock.finish()
    return results


def _with_answers(jobs: Iterable[schedule.Job], ahead: Ahead) -> Iterator[tuple[schedule.Job, Answers]]:
    """The jobs with their answers, which are worked out while the jobs before them run. Not beside properties, which
    set the number of threads and measure the process's memory."""
    ahead.settle()
    coming, waiting = iter(jobs), deque[schedule.Job]()
    while True:
        # The next few: some take far longer than others.
        while len(waiting) < _LOOKAHEAD and not (waiting and waiting[-1].properties):
            job = next(coming, None)
            if job is None:
                break
            waiting.append(job)
            if not job.properties and _asked(job):
                ahead.begin(*_wanted(job))
        if not waiting:
            return
        job = waiting.popleft()
        yield job, ahead.take(*_wanted(job))


def _wanted(job: schedule.Job) -> tuple[Case, bool]:
    return job.case, any(abilities_of(subject).gradients for subject in job.subjects)


def _asked(job: schedule.Job) -> bool:
    """Whether any subject runs the job's case."""
    inputs = job.case.outline()
    return any(not subject.reasons(inputs) for subject in job.subjects)


def chosen_subjects(backend: str, quick: bool, device: str = "cpu") -> tuple[Subject, ...]:
    """The backends to verify, as ``verify`` takes their name."""
    # A backend asked for by name comes with all its plans.
    found: tuple[Subject, ...] = backend_subjects(quick=quick and backend == "auto-all", device=device)
    if backend != "auto-all":
        names = [subject.name for subject in found]
        found = tuple(s for s in found if s.name == backend or s.name.startswith(f"{backend}, "))
        if not found:
            raise ValueError(f"backend: was {backend!r}, must be 'auto-all' or one of {names}")
    return found


@contextlib.contextmanager
def fresh_memory_poisoned() -> Iterator[None]:
    """``torch.empty`` gives NaN inside: what a kernel forgets to write shows."""
    # Not torch.use_deterministic_algorithms: that imports the compiler, for seconds.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def verify_case(subject: Subject, answers: Answers) -> list[Result]:
    """Forward, gradients and the cross-check of one subject on one case."""
    case = answers.case
    layer: Layer = "hand" if case.generator == "hand" else "oracle"
    reasons = subject.reasons(case.outline())
    if reasons:
        return [Result(subject.name, case, layer, "forward", "skipped", message="; ".join(reasons))]
    got: dict[str, list[Tensor]] = {}

    def forward() -> tuple[tuple[Measure, ...], str]:
        inputs = case.build()
        out, lse = subject(inputs)
        got.update(_gathered(subject, inputs, out, lse))
        return tuple(measure(answers.forward[n], got[n]) for n in got), _outside(inputs, {"out": out})

    results = [_result(subject, case, layer, "forward", forward)]
    if got and "lse" not in got:
        results.append(Result(subject.name, case, layer, "lse", "skipped", message=NO_LSE))
    if got and isinstance(answers.fused, fused.Fused):
        cross = answers.fused
        results.append(_result(subject, case, "fused", "fused", lambda: ((), cross.compare(got))))
    if case.gradients:
        refused = subject.reasons(case.outline(), differentiable=True)
        if refused:
            results.append(Result(subject.name, case, layer, "gradients", "skipped", message="; ".join(refused)))
        else:
            results.append(_result(subject, case, layer, "gradients", lambda: _gradients(subject, answers)))
    return results


def _gathered(subject: Subject, inputs: Inputs, out: Tensor, lse: Tensor | None) -> dict[str, list[Tensor]]:
    """out and lse by sequence; only out of a subject that is known to return no LSE."""
    if lse is None and abilities_of(subject).lse:
        raise Finding("returned no lse where one was asked for")
    return inputs.gather_results(out, lse)


def _gradients(subject: Subject, answers: Answers) -> tuple[tuple[Measure, ...], str]:
    inputs = answers.case.build()
    leaves = inputs.differentiable()
    out, lse = subject(inputs)
    assert lse is not None or not answers.case.lse_cotangent, "reasons() refuses the others"
    grads = inputs.backward(leaves, out, lse if answers.case.lse_cotangent else None)
    # The values too: a call that requires grad may well take another path than one that does not.
    got = _gathered(subject, inputs, out.detach(), None if lse is None else lse.detach())
    got |= inputs.gather_gradients(grads)
    measures = tuple(measure(standard, got[n]) for n, standard in answers.gradients.items() if n in got)
    outside = _outside(inputs, {f"d{name}": grad for name, grad in grads.items() if name in "qkv"})
    return measures, outside


def _outside(inputs: Inputs, tensors: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        if bool((inputs.outside(tensor, keys=name in ("dk", "dv")) != 0).any()):
            return f"{name} is not 0 outside the problem"
    return ""


def verify_properties(subject: Subject, case: Case) -> list[Result]:
    if subject.reasons(case.outline()):
        return []
    results = []
    for p in properties.PROPERTIES:
        if not p.applies(case) or (p.gradients and subject.reasons(case.outline(), differentiable=True)):
            continue
        if p.claim and not properties.claims(subject, p.claim):
            missing = properties.UNDECLARED[p.claim]
            results.append(Result(subject.name, case, "property", p.name, "skipped", message=missing))
        else:
            results.append(_result(subject, case, "property", p.name, lambda p=p: ((), p.holds(subject, case))))  # type: ignore[misc]
    return results


def _result(
    subject: Subject, case: Case, layer: Layer, check: str, run: Callable[[], tuple[tuple[Measure, ...], str]]
) -> Result:
    """Run one check; an exception of the subject is a failure, not the end of the run."""
    started = time.perf_counter()
    seen: list[str] = getattr(subject, "seen", [])
    seen.clear()
    try:
        measures, message = run()
    except Declined as error:
        return Result(subject.name, case, layer, check, "skipped", message=str(error))
    except Finding as error:
        measures, message = (), str(error)
    except Exception as error:  # whatever a kernel under test raises
        where = traceback.extract_tb(error.__traceback__)[-1]
        measures, message = (), f"raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    message = "; ".join([*([message] if message else []), *dict.fromkeys(seen)])
    failed = message or any(not m.passed for m in measures)
    if failed and not message:
        worst = [(m.tensor, c) for m in measures for c in m.checks if not c.passed]
        message = "; ".join(f"{t} {c.name}: {c.error:.3g} > {c.budget:.3g} ({c.where or 'anywhere'})" for t, c in worst)
    status: Status = "failed" if failed else "passed"
    return Result(subject.name, case, layer, check, status, measures, message, time.perf_counter() - started)
