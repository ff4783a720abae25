"""What is read of a kernel from its answers, whatever its fault: the form that all that read one give it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """Something that was read: in words, and the faults that it leaves, the likeliest first."""

    said: str
    faults: tuple[str, ...]
