"""Backends: each one runs Plans. They never import each other.

A backend is a module with the five names of ``Backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem

Launcher = Callable[[Operands], tuple[Tensor, Tensor | None]]
"""Runs a prepared call: (out, lse), lse None unless the Problem asks for it."""


class Backend(Protocol):
    """What dispatch needs of a backend."""

    NAME: str

    def verdict(self, problem: Problem, hardware: Hardware) -> Verdict:
        """Whether this backend runs the problem, with every reason if not. Pure."""

    def candidates(self, problem: Problem, hardware: Hardware) -> list[Plan]:
        """Plans that would run the (supported) problem, the preferred one first."""

    def check_plan(self, problem: Problem, plan: Plan) -> None:
        """Raise ``ValueError`` naming the field of a caller's plan that cannot run the problem."""

    def resources(self, problem: Problem, plan: Plan) -> dict[str, int]:
        """Bytes of fast memory a task of the plan takes, from the declaration the kernel allocates by."""

    def prepare(self, problem: Problem, plan: Plan) -> Launcher:
        """Everything that can be done before the tensors are known."""
