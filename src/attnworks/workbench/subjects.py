"""Subjects: what is being verified. A backend under a plan, or anything else that answers the same calls.

A subject is called with a case's ``Inputs`` and returns what the user's function returns. Gradients are asked of it by
autograd, so a subject has no method for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

import attnworks
from attnworks import dispatch, scores
from attnworks.backends import Backend, cpu, cuda, reference, triton
from attnworks.hardware import detect
from attnworks.masks import Causal, Window
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.cases import Case
from attnworks.workbench.environment import place
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.transfer import OnDevice

Outcome = tuple[Tensor, Tensor | None]

FORMS = ("dense", "varlen", "decode")
MASKS = ("causal", "window", "boolean", "function")
SCORES = ("softcap", "alibi", "bias", "sink", "function")
EMPTY = ("batch", "heads", "queries")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Finding(Exception):
    """What a kernel did wrong in a call other than a wrong value, in words: a crash, a hang, a wrong shape."""


class Raised(Finding):
    """A kernel in another process raised an exception: its type, message and line."""


class Declined(Exception):
    """A kernel said, when called, that it does not do the case: listed, not failed."""


@dataclass(frozen=True)
class Abilities:
    """What a kernel can do, as declared or found by trying; None is no limit beyond its parameters.

    ``masks`` of ``MASKS``, ``scores`` of ``SCORES``, ``forms`` of ``FORMS``. ``empty``, of ``EMPTY``: what it takes
    none of, where the result has no element. ``gqa``: fewer KV heads than query heads.
    ``unequal_dims``: head_dim_v other than head_dim. ``lse``: it returns one; ``lse_gradients``: one that gradients
    flow through. ``batch_invariant``, ``thread_invariant``: it promises the same bits whatever the rest of the batch
    and the number of threads, ``deterministic`` of gradients with ``deterministic=True``; ``linear_memory``: that its
    memory grows with the length, not with its square. What is not promised is not checked.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    forms: tuple[str, ...] | None = None
    masks: tuple[str, ...] | None = None
    scores: tuple[str, ...] | None = None
    empty: tuple[str, ...] | None = None
    gqa: bool = True
    unequal_dims: bool = True
    lse: bool = True
    lse_gradients: bool = True
    gradients: bool = True
    batch_invariant: bool = True
    thread_invariant: bool = True
    deterministic: bool = True
    linear_memory: bool = False

    @classmethod
    def declared(cls, declares: Mapping[str, Any], owner: str) -> Abilities:
        """From a kernel's ``declares``: this class's fields, dtypes by name ("bf16") or as torch's, and ``fp64=True``
        for one that takes fp64, which is not asked of it otherwise. Raises ``ValueError`` for anything else."""
        given = dict(declares)
        fp64 = bool(given.pop("fp64", False))
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{owner} declares: was given {unknown[0]!r}, must hold only {', '.join(known)} and fp64")
        dtypes = given.pop("dtypes", ("fp32", "bf16", "fp16"))
        chosen = tuple(_DTYPES.get(dtype, dtype) for dtype in dtypes) + ((torch.float64,) if fp64 else ())
        if wrong := [dtype for dtype in chosen if not isinstance(dtype, torch.dtype)]:
            raise ValueError(
                f"{owner} declares dtypes: held {wrong[0]!r}, must hold {', '.join(_DTYPES)} or torch.dtype"
            )
        for name, allowed in (("forms", FORMS), ("masks", MASKS), ("scores", SCORES), ("empty", EMPTY)):
            if wrong := [kind for kind in given.get(name) or () if kind not in allowed]:
                raise ValueError(f"{owner} declares {name}: held {wrong[0]!r}, must hold only {', '.join(allowed)}")
        return cls(
            dtypes=chosen, **{"batch_invariant": False, "thread_invariant": False, "deterministic": False} | given
        )

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        """What of a case it cannot do."""
        case = inputs.case
        found = []
        if self.dtypes is not None and case.dtype not in self.dtypes:
            found.append(f"dtype {str(case.dtype).removeprefix('torch.')}")
        if self.forms is not None and case.form not in self.forms:
            found.append(f"form {case.form}")
        dims = {case.head_dim, case.head_dim_v} if self.head_dims is not None else set()
        found += [f"head dim {dim}" for dim in sorted(dims.difference(self.head_dims or ()))]
        if case.head_dim != case.head_dim_v and not self.unequal_dims:
            found.append("head_dim_v of its own")
        if case.heads_q != case.heads_kv and not self.gqa:
            found.append("grouped heads")
        masks, modifiers = (
            MASKS if self.masks is None else self.masks,
            SCORES if self.scores is None else self.scores,
        )
        found += [f"no {kind}" for kind in missing(case) if self.empty is not None and kind not in self.empty]
        found += [f"mask {kind}" for kind in sorted(mask_kinds(inputs)) if kind not in masks]
        found += [f"score modifier {kind}" for kind in sorted(score_kinds(inputs)) if kind not in modifiers]
        if differentiable and not self.gradients:
            found.append("gradients")
        if differentiable and case.lse_cotangent and not self.lse_gradients:
            found.append("gradients through the LSE")
        return tuple(found)


def missing(case: Case) -> tuple[str, ...]:
    """Which of ``EMPTY`` a case has none of: any of them leaves nothing to be worked out."""
    none = (not case.sequences, case.heads_q == 0, not any(seq_q for seq_q, _ in case.sequences))
    return tuple(kind for kind, empty in zip(EMPTY, none, strict=True) if empty)[:1]


def mask_kinds(inputs: Inputs) -> set[str]:
    """Which of ``MASKS`` a case has."""
    kinds = set()
    for mask in inputs.masks:
        if isinstance(mask, Causal | Window):
            kinds.add("causal" if isinstance(mask, Causal) else "window")
        else:
            kinds.add("boolean" if isinstance(mask, Tensor) else "function")
    return kinds


def score_kinds(inputs: Inputs) -> set[str]:
    """Which of ``SCORES`` a case has."""
    return {term.kind for term in scores.split(tuple(inputs.scores))[0]}


class Subject(Protocol):
    """Something that computes attention. One that has an attribute ``abilities`` is held to those, any other to all."""

    @property
    def name(self) -> str: ...

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        """Every reason why it does not run the case; empty if it does."""

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        """(out, lse) of the case, lse None unless asked for. ``options``: ``batch_invariant`` and ``plan``."""


@dataclass(frozen=True)
class BackendSubject:
    """One backend of attnworks, through the public functions. ``change`` turns its preferred plan into the one to
    verify (None: whatever the backend picks by itself). ``only_fp32``: its 16-bit results are not meant to be
    precise. ``linear_memory``: it claims that its memory grows with the length, not with its square. ``device``: where
    it runs; inputs and results are on the CPU all the same."""

    name: str
    backend: Backend
    change: Callable[[Plan], Plan | None] | None = None
    only_fp32: bool = False
    linear_memory: bool = False
    device: str = "cpu"

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        problem = self._problem(inputs, differentiable)
        found = self.backend.verdict(problem, detect(problem.device)).reasons
        if self.only_fp32 and problem.dtype.itemsize < 4:
            return (
                *found,
                "it rounds S to the input dtype, which is not the precision that budgets are made for",
            )
        if found or self.change is None:
            return found
        plan = self.plan(inputs, differentiable)
        if plan is None:
            return ("the plan is the one verified without it",)
        try:
            self.backend.check_plan(problem, plan)
        except ValueError as error:
            return (str(error),)
        return ()

    def plan(self, inputs: Inputs, differentiable: bool = False) -> Plan | None:
        """The plan to verify the case under."""
        problem = self._problem(inputs, differentiable)
        preferred = self.backend.candidates(problem, detect(problem.device))[0]
        return preferred if self.change is None else self.change(preferred)

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        call: Any = {
            "dense": attnworks.attention,
            "varlen": attnworks.attention_varlen,
            "decode": attnworks.attention_decode,
        }[inputs.case.form]
        if self.change is not None and "plan" not in options:
            options["plan"] = self.plan(inputs, inputs.q.requires_grad)
        there = None if self.device == "cpu" else OnDevice(inputs, self.device)
        kwargs = (inputs if there is None else there.inputs).kwargs()
        result = call(**kwargs, backend=self.backend.NAME, return_lse=return_lse, **options)
        out, lse = result if return_lse else (result, None)
        if there is not None:
            out, lse = out.cpu(), None if lse is None else lse.cpu()
            there.write_back()
        return out, lse

    def _problem(self, inputs: Inputs, differentiable: bool) -> Problem:
        return replace(inputs.problem(differentiable=differentiable), device=self.device)


def abilities_of(subject: Subject) -> Abilities:
    found = getattr(subject, "abilities", None)
    return found if isinstance(found, Abilities) else Abilities()


def backend_subjects(*, quick: bool = False, device: str = "cpu") -> tuple[BackendSubject, ...]:
    """Every backend as it is, and under the plans that its own choice would not reach on this machine: the CPU backend
    with each other instruction set, with small tiles and with short splits; on a GPU Triton's with small tiles, short
    splits and its older schedules; the reference's other schedules (they are slow, so not if ``quick``). ``device``:
    where they run; raises ``ValueError`` for one that is not here."""
    if (there := place(device)) != "cpu":
        return _gpu_subjects(quick, there)
    backends = [backend for backend in dispatch.BACKENDS if backend is not cuda]  # which runs on GPUs alone
    found = [BackendSubject(backend.NAME, backend, linear_memory=backend is cpu) for backend in backends]
    found += [BackendSubject(f"cpu, {isa}", cpu, _with(isa=isa)) for isa in cpu.isas()[1:]]
    if cpu.isas():
        found.append(BackendSubject("cpu, small tiles", cpu, _small_tiles))
        found.append(BackendSubject("cpu, short splits", cpu, lambda plan: Plan("cpu", "split_kv", split_kv=48)))
    for schedule in () if quick else ("standard", "kv_outer", "q_outer"):
        tiles = {} if schedule == "standard" else {"tile_q": 40, "tile_kv": 56}
        change = _with(schedule=schedule, **tiles)
        found.append(BackendSubject(f"reference, {schedule}", reference, change, only_fp32=schedule == "standard"))
    return tuple(found)


def _gpu_subjects(quick: bool, device: str) -> tuple[BackendSubject, ...]:
    backends = [backend for backend in dispatch.BACKENDS if backend is not cpu]
    found = [BackendSubject(backend.NAME, backend, device=device) for backend in backends]
    for name, change in () if quick else TRITON_PLANS.items():
        found.append(BackendSubject(f"triton, {name}", triton, change, device=device, only_fp32=name == "standard"))
    return tuple(found)


def _with(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **fields)


def _small_tiles(plan: Plan) -> Plan | None:
    return replace(plan, tile_q=20, tile_kv=40) if plan.schedule == "tiled" else None


def _small_triton_tiles(plan: Plan) -> Plan | None:
    return replace(plan, tile_q=32, tile_kv=16, stages=1) if plan.schedule == "q_outer" else None


def _short_triton_splits(plan: Plan) -> Plan | None:
    """Splits of one tile each, also where heads are not grouped by the backend's own choice."""
    return replace(plan, schedule="split_kv", tile_q=16, tile_kv=32, split_kv=32, isa="")


def _by_descriptors(plan: Plan) -> Plan | None:
    return replace(plan, isa="tma") if plan.schedule in ("q_outer", "grouped") else None


TRITON_PLANS: dict[str, Callable[[Plan], Plan | None]] = {
    "small tiles": _small_triton_tiles,
    "short splits": _short_triton_splits,
    "tensor descriptors": _by_descriptors,
    "standard": _with(schedule="standard", tile_q=32, tile_kv=32, split_kv=0, stages=1, isa=""),
    "kv_outer": _with(schedule="kv_outer", tile_q=32, tile_kv=32, split_kv=0, stages=1, isa=""),
}
