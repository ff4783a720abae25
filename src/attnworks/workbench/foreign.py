"""Kernels of anybody as competitors: called through the convention that their parameters' names show, as ``verify``
does, with tensors stored in the layout they like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Bounds, Causal, Window
from attnworks.problem import Problem
from attnworks.workbench import adapters
from attnworks.workbench.adapters import Call
from attnworks.workbench.cases import Case, MaskRule
from attnworks.workbench.conventions import Kernel, load_subject
from attnworks.workbench.guards import Guarded
from attnworks.workbench.inputs import Inputs as CallInputs
from attnworks.workbench.probing import prepare, probe
from attnworks.workbench.providers import Bound, Inputs, Provider, user_mask
from attnworks.workbench.quick_check import NotVerifiedError
from attnworks.workbench.subjects import Outcome
from attnworks.workbench.transfer import OnDevice
from attnworks.workbench.verify import Progress, Result, verify

_NAMES_SHOWN = 3  # failures in a complaint


class Foreign(Provider):
    """The kernel that ``target`` names, "package.module:function" or "path/file.py:function". Raises ``ValueError``
    where nothing is found under it or its convention is not clear."""

    def __init__(self, target: str, convention: str | None = None) -> None:
        kernel = load_subject(target, convention)
        if not isinstance(kernel, Kernel):
            raise ValueError(f"target: {target!r} brings a Subject of its own, must be a function to be timed")
        self.name = target
        self.kernel = kernel

    def __reduce__(self) -> tuple[Any, ...]:
        return Foreign, (self.name, self.kernel.convention.name)

    def refuses(self, problem: Problem) -> str:
        if problem.form == "varlen":
            return "packed sequences are not benchmarked yet"
        if problem.scores:
            return "score modifiers are not benchmarked yet"
        # Of one sequence and head: what it refuses does not depend on how many there are.
        few = replace(problem, device="cpu", batch=1, heads_q=problem.group, heads_kv=1)
        made = _inputs(few, _empty(few), self._layout)
        return "; ".join(self.kernel.reasons(made))

    def form(self, problem: Problem) -> str:
        few = replace(problem, device="cpu", batch=1, heads_q=problem.group, heads_kv=1)
        made = _inputs(few, _empty(few), self._layout)
        call, names = self._call(made), {id(made.q): "q", id(made.k): "k", id(made.v): "v"}
        given = [names[id(x)] for x in call.tensors]
        given += [f"{name}={names.get(id(value)) or _written(value)}" for name, value in call.kwargs.items()]
        return f"{self.kernel.name}({', '.join(given)})"

    def bind(self, problem: Problem, values: Inputs) -> Bound:
        made = _inputs(problem, values, self._layout)
        call = self._call(made)
        function, tensors, kwargs = self.kernel.function, call.tensors, call.kwargs
        rows_first = made.case.layout == "bshd" or problem.form == "decode"
        shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)

        def out(result: Any) -> Tensor:
            found, _ = adapters.read(result, call)
            if type(found) is not Tensor:
                raise NotVerifiedError(
                    f"{self.name}: returned {type(found).__name__}, must return a tensor that is there"
                )
            found = found.transpose(1, 2) if rows_first else found
            if tuple(found.shape) != shape:
                raise NotVerifiedError(f"{self.name}: out was of shape {tuple(found.shape)}, must be {shape}")
            return found

        return Bound(lambda: function(*tensors, **kwargs), out)

    @property
    def _layout(self) -> str:
        """Of dense tensors, in which the kernel reads them without a view."""
        return "bshd" if "rows, heads" in self.kernel.convention.layout else "bhsd"

    def _call(self, made: CallInputs) -> Call:
        call = Call(self.kernel.parameters)
        self.kernel.convention.adapter(made, call)
        adapters.ask_lse(call, wanted=False)
        return call


def _written(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _empty(problem: Problem) -> Inputs:
    p = problem
    shapes = (
        (p.batch, p.heads_q, p.seq_q, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v),
    )
    return Inputs(*(torch.zeros(1, dtype=p.dtype).expand(shape) for shape in shapes))


def _inputs(problem: Problem, values: Inputs, layout: str) -> CallInputs:
    """A problem as a caller of the convention passes it."""
    p = problem
    decode = p.form == "decode"
    rules: tuple[MaskRule, ...] = tuple(_rule(term) for term in p.mask if isinstance(term, Bounds))
    case = Case(
        "bench",
        "speed",
        form=p.form,
        batch=p.batch,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        seq_q=p.seq_q,
        seq_kv=p.seq_kv,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        dtype=p.dtype,
        mask=rules,
        scale=None if p.scale == p.head_dim**-0.5 else p.scale,
        layout="bshd" if layout == "bshd" else "bhsd",
        lengths=((p.seq_q, p.seq_kv),) * p.batch if decode else (),
    )
    stored = values
    if layout == "bshd" or decode:
        stored = Inputs(*(x.transpose(1, 2).contiguous() for x in values))
    lens = torch.full((p.batch,), p.seq_kv, dtype=torch.int32, device=values.q.device) if decode else None
    mask = user_mask(p)
    masks = [] if mask is None else list(rules)
    return CallInputs(case, [], *stored, masks=masks, kv_lens=lens)


def _rule(term: Bounds) -> Causal | Window:
    return Causal(term.align) if (term.left, term.right) == (None, 0) else Window(term.left, term.right, term.align)


# ---- verified before it is timed -------------------------------------------------------------------------------------


class _There:
    """A kernel whose calls run on a GPU; what it gets and returns is on the CPU."""

    def __init__(self, kernel: Kernel, device: str) -> None:
        self.name, self.abilities, self.reasons = kernel.name, kernel.abilities, kernel.reasons
        self._kernel, self._device = kernel, device

    def __call__(self, inputs: CallInputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        there = OnDevice(inputs, self._device)
        out, lse = self._kernel(there.inputs, return_lse=return_lse, **options)
        there.write_back()
        return out.cpu(), None if lse is None else lse.cpu()


def verify_first(provider: Foreign, device: str, progress: Progress | None = None) -> str:
    """What ``verify --quick`` finds wrong with a kernel on a device, in words; "" for nothing. On a CPU it runs in a
    process of its own, so that a crash is found like anything else."""
    if device == "cpu":
        prepared = prepare(provider.name, provider.kernel.convention.name)
        try:
            return _complaint(provider, verify(subjects=(prepared.subject,), quick=True, progress=progress))
        finally:
            prepared.close()
    subject = Guarded(_There(provider.kernel, device))
    probe(subject)
    return _complaint(provider, verify(subjects=(subject,), quick=True, progress=progress))


def _complaint(provider: Foreign, results: Sequence[Result]) -> str:
    failed = [result for result in results if result.status == "failed"]
    if not failed and not any(result.status == "passed" for result in results):
        return f"{provider.name}: ran no case of verify --quick, so nothing is known of it: not benchmarked"
    if not failed:
        return ""
    named = ", ".join(dict.fromkeys(f"{result.case.name} ({result.check})" for result in failed[:_NAMES_SHOWN]))
    others = len(failed) - _NAMES_SHOWN
    more = f" and {others} more" if others > 0 else ""
    return (
        f"{provider.name}: failed {len(failed)} checks of verify --quick: {named}{more}: not benchmarked "
        f"(attnworks diagnose {provider.name} says what is probably wrong)"
    )
