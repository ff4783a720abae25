"""The two sizes of a window, and what is got wrong in taking them from the call: a switch for each fault and the ways
it is made (``ways.WAYS``). What is wrong with the bounds that they make is in ``modifiers.py``."""

from __future__ import annotations

from collections.abc import Callable

Ends = tuple[int | None, int | None]


def ends(
    has: Callable[[str], bool], way: int, value: float, left: int | None, right: int | None, seq_q: int, seq_kv: int
) -> Ends:
    """(left, right) as a kernel with a fault takes them; None is open."""
    if has("window sides exchanged"):
        left, right = (right, left) if not way else (left, left) if way == 1 else (right, right)
    if has("window of another size"):
        if left is not None:
            left = (left // 2, left * 2, left + (right or 0), left + round(value), left)[way]
        if right is not None and way == 4:
            right = right + round(value)
    if 0 in (left, right) and has("window size 0 taken for none"):
        left = None if left == 0 and way != 1 else left
        right = None if right == 0 and way != 0 else right
    beyond = (left or 0) > seq_q or (right or 0) > min(seq_q, seq_kv)
    if beyond and has("window size held to a length"):
        if right is not None and way != 1:
            right = min(right, seq_kv)
        if left is not None and way:
            left = min(left, seq_q)
    if (left is None) != (right is None) and has("open window end taken for a number"):
        number = 0 if way == 3 else -1
        left = number if left is None and way != 2 else left
        right = number if right is None and way != 1 else right
    return left, right
