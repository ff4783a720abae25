"""Backends: each one runs Plans. They never import each other.

A backend is a module with the names of ``Backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of one kernel: bytes of shared memory, registers a thread, bytes of registers spilled to
    memory, and how many matrix instructions it emitted. ``error`` is its own message where it failed, ``warning`` where
    it says that something is lost."""

    shared: int = 0
    registers: int | None = None
    spills: int | None = None
    matrix_instructions: int | None = None
    error: str = ""
    warning: str = ""
    asm: dict[str, Any] | None = None


Launcher = Callable[[Operands], tuple[Tensor, Tensor | None]]
"""Runs a prepared call: (out, lse), lse None unless the Problem asks for it."""


class Unaligned(Exception):
    """What a launcher raises, before it does anything, whose backend's verdict needs ``Problem.aligned`` and whose
    call's tensors are not. It has their addresses at hand; to look them up once more would cost every call."""


class ReadsLengths:
    """A launcher that copies and checks ``kv_lens`` itself: where they are contiguous int64, and the cache is neither
    paged nor appended to, its Operands may hold the caller's own tensor. It raises what ``cache.read_kv_lens`` does.

    No ABC: every call asks whether its launcher is one, and to ask an ABC costs as much as ten other such questions."""

    def __call__(self, o: Operands) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class Gradients(NamedTuple):
    """Of q, k, v and the score operands, each in its input's shape and dtype (a broadcast operand's is summed over what
    it was broadcast to), with the strides that ``torch.empty_like`` of the input has; None for those not asked for."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    scores: tuple[Tensor | None, ...]


Needs = tuple[bool, ...]
"""For q, k, v and each score operand: whether its gradient is asked for."""

BackwardLauncher = Callable[[Operands, Tensor, Tensor, Tensor, Tensor | None, Needs], Gradients]
"""Runs a prepared backward: (operands, out, lse, d_out, d_lse, needs) → ``Gradients``.

``operands``, ``out`` and ``lse`` are those of the forward; out and lse are contiguous. ``d_out`` has out's shape and
dtype, its last dimension contiguous, any other strides; ``d_lse`` has lse's shape and dtype, contiguous, None if no
gradient comes through the LSE. At least one of ``needs`` is True. Memory outside the problem is written as 0 in the
gradients, as in ``out``.
"""


class Backend(Protocol):
    """What dispatch needs of a backend."""

    NAME: str

    KERNELS: tuple[Path, ...]
    """Sources of the kernels that tuned plans are measured with; none where plans are not tuned."""

    def verdict(self, problem: Problem, hardware: Hardware) -> Verdict:
        """Whether this backend runs the problem, with every reason if not. Pure."""

    def candidates(self, problem: Problem, hardware: Hardware) -> list[Plan]:
        """Plans that would run the (supported) problem, the preferred one first."""

    def adapt(self, problem: Problem, plan: Plan, hardware: Hardware) -> Plan:
        """A tuned plan, which was measured on a problem like this one, with what depends on more than that likeness
        chosen for this very problem."""

    def check_plan(self, problem: Problem, plan: Plan) -> None:
        """Raise ``ValueError`` naming the field of a caller's plan that cannot run the problem."""

    def resources(self, problem: Problem, plan: Plan) -> dict[str, int]:
        """Bytes of fast memory a task of the plan takes, from the declaration the kernel allocates by."""

    def prepare(self, problem: Problem, plan: Plan) -> Launcher:
        """Everything that can be done before the tensors are known. For a differentiable problem with a backward of
        the backend's own it is asked with ``return_lse``, as that backward needs the LSE."""

    def prepare_backward(self, problem: Problem, plan: Plan) -> BackwardLauncher | None:
        """The backward of a differentiable problem; never asked for one that is transformed. None where the launcher
        is made of torch operations, which autograd differentiates by itself, to any order. A backend that has no
        backward refuses differentiable problems in its verdict."""
