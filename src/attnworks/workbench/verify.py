"""verify(): is a kernel right? Three layers and the properties, on named cases, for every backend.

1. hand: tiny cases whose answers are written out; 2. oracle: random and stress inputs against fp64; 3. fused: the
   framework's
own fused attention as a cross-check. Then the properties that need no reference. A case is skipped only by the
backend's own verdict, and listed with its reasons.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from attnworks.workbench import catalogue, fused, hand, properties
from attnworks.workbench.cases import Case
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.metrics import Measure, Standard, measure, standards
from attnworks.workbench.oracle import Expected
from attnworks.workbench.subjects import Declined, Finding, Subject, abilities_of, backend_subjects
from attnworks.workbench.yardstick import flash_model

Layer = Literal["hand", "oracle", "fused", "property"]
Status = Literal["passed", "failed", "skipped"]
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

NO_LSE = "it returns no LSE"


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
    """What is right for one case, worked out once for all subjects and only as far as they get."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def forward(self) -> dict[str, Standard]:
        inputs = self.case.build()
        return standards(self.case, self._expected, flash_model(inputs))

    @cached_property
    def _expected(self) -> Expected:
        return hand.answer(self.case.build(), gradients=False)

    @cached_property
    def gradients(self) -> dict[str, Standard]:
        inputs = self.case.build()
        return standards(self.case, hand.answer(inputs, gradients=True), flash_model(inputs, gradients=True))

    @cached_property
    def fused(self) -> fused.Fused | str:
        return fused.run(self.case.build(), self._expected)


def verify(
    *,
    backend: str = "auto-all",
    cases: Sequence[str | Case] = (),
    quick: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    subjects: Sequence[Subject] | None = None,
) -> list[Result]:
    """Verify subjects on cases; nothing is raised for what fails, it is in the results.

    ``backend``: "auto-all", or a name that subjects' names begin with ("cpu" takes "cpu" and "cpu, small tiles").
    ``cases``: ``Case`` objects or patterns of ``catalogue.select``. ``quick``: the short list. ``seed``: of the random
    inputs.
    ``subjects``: what to verify instead of the backends. Raises ``ValueError`` for a backend or pattern that matches
    nothing.
    """
    chosen_subjects = _subjects(backend, quick) if subjects is None else tuple(subjects)
    given = tuple(case for case in cases if isinstance(case, Case))
    patterns = tuple(case for case in cases if isinstance(case, str))
    chosen = given if given and not patterns else (*given, *catalogue.select(patterns, quick=quick, seed=seed))
    if not any(abilities_of(subject).lse_gradients for subject in chosen_subjects):
        chosen = tuple(replace(case, lse_cotangent=False) for case in chosen)  # their other gradients can be checked
    tried = tuple(case for case in chosen if case.name in properties.CASES)
    total, results = len(chosen) + len(tried), []
    with fresh_memory_poisoned():
        for done, case in enumerate(chosen):
            if progress:
                progress(case.name, done, total)
            answers = Answers(case)
            for subject in chosen_subjects:
                results += verify_case(subject, answers)
        for done, case in enumerate(tried, len(chosen)):
            if progress:
                progress(f"properties of {case.name}", done, total)
            for subject in chosen_subjects:
                results += verify_properties(subject, case)
    if progress:
        progress("", total, total)
    return results


def _subjects(backend: str, quick: bool) -> tuple[Subject, ...]:
    # A backend asked for by name comes with all its plans.
    found: tuple[Subject, ...] = backend_subjects(quick=quick and backend == "auto-all")
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
    reasons = subject.reasons(case.build())
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
        refused = subject.reasons(case.build(), differentiable=True)
        if refused:
            results.append(Result(subject.name, case, layer, "gradients", "skipped", message="; ".join(refused)))
        else:
            results.append(_result(subject, case, layer, "gradients", lambda: _gradients(subject, answers)))
    return results


def _gathered(subject: Subject, inputs: Inputs, out: Tensor, lse: Tensor | None) -> dict[str, list[Tensor]]:
    """out and lse by sequence; only out of a subject that is known to return no LSE."""
    if lse is None:
        if abilities_of(subject).lse:
            raise Finding("returned no lse where one was asked for")
        return {"out": inputs.gather(out)}
    return {"out": inputs.gather(out), "lse": inputs.gather_lse(lse)}


def _gradients(subject: Subject, answers: Answers) -> tuple[tuple[Measure, ...], str]:
    inputs = answers.case.build()
    leaves = inputs.differentiable()
    out, lse = subject(inputs)
    results, cotangents = [out], [inputs.scatter([part.d_out for part in inputs.values], out)]
    d_lse = [part.d_lse for part in inputs.values if part.d_lse is not None]
    if answers.case.lse_cotangent:
        assert lse is not None, "reasons() refuses the others"
        results.append(lse)
        cotangents.append(inputs.scatter_lse(d_lse, lse))
    tensors = list(leaves.values())
    if out.requires_grad:
        found = torch.autograd.grad(results, tensors, cotangents, materialize_grads=True)
    else:  # it says that its output depends on no input, which is right where there is no key
        found = tuple(torch.zeros_like(x) for x in tensors)
    grads = dict(zip(leaves, found, strict=True))
    # The values too: a call that requires grad may well take another path than one that does not.
    got = _gathered(subject, inputs, out.detach(), None if lse is None else lse.detach())
    for name, grad in grads.items():
        got[f"d{name}"] = [grad] if name in ("bias", "sink") else inputs.gather(grad, keys=name != "q")
    measures = tuple(measure(standard, got[n]) for n, standard in answers.gradients.items() if n in got)
    outside = _outside(inputs, {f"d{name}": grad for name, grad in grads.items() if name in "qkv"})
    return measures, outside


def _outside(inputs: Inputs, tensors: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        if bool((inputs.outside(tensor, keys=name in ("dk", "dv")) != 0).any()):
            return f"{name} is not 0 outside the problem"
    return ""


def verify_properties(subject: Subject, case: Case) -> list[Result]:
    if subject.reasons(case.build()):
        return []
    results = []
    for p in properties.PROPERTIES:
        if not p.applies(case):
            continue
        if missing := _not_asked(subject, p.name):
            results.append(Result(subject.name, case, "property", p.name, "skipped", message=missing))
        else:
            results.append(_result(subject, case, "property", p.name, lambda p=p: ((), p.holds(subject, case))))  # type: ignore[misc]
    return results


def _not_asked(subject: Subject, name: str) -> str:
    """Why a property is not asked of a subject: what nobody promised is no fault."""
    abilities = abilities_of(subject)
    if name == "batch invariant" and not abilities.batch_invariant:
        return "batch invariance is not declared"
    if name == "ignores threads" and not abilities.thread_invariant:
        return "thread invariance is not declared"
    return NO_LSE if name == "merges" and not abilities.lse else ""


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
        message = "; ".join(f"{t} {c.name}: {c.error:.3g} > {c.budget:.3g} ({c.where})" for t, c in worst)
    status: Status = "failed" if failed else "passed"
    return Result(subject.name, case, layer, check, status, measures, message, time.perf_counter() - started)
