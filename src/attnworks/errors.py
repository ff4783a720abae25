"""The errors attnworks raises beyond Python's own.

Wrong shapes, dtypes and devices are ``ValueError`` or ``TypeError``; the message names the argument, what it was and
what it must be. ``UnsupportedError`` means that the question is well formed but that no permitted backend can answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What one backend says of one problem: it runs it, or every reason why it does not.

    ``reasons`` is empty exactly when the backend supports the problem.
    """

    backend: str
    reasons: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.backend}: " + ("supported" if self.supported else "; ".join(self.reasons))


class UnsupportedError(NotImplementedError):
    """No permitted backend can run the problem. ``verdicts`` holds every backend's reasons; so does the message."""

    def __init__(self, verdicts: Iterable[Verdict], asked: str = "auto") -> None:
        self.verdicts = tuple(verdicts)
        self.asked = asked
        who = "no backend supports this call" if asked == "auto" else f"backend={asked!r} does not support this call"
        super().__init__(who + "".join(f"\n  {verdict}" for verdict in self.verdicts))

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[tuple[Verdict, ...], str]]:
        return UnsupportedError, (self.verdicts, self.asked)  # so that it crosses process boundaries
