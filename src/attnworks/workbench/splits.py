"""Which keys each partial result has, and what is got wrong in that: a switch for each fault and the ways it is made
(``ways.WAYS``)."""

from __future__ import annotations

from collections.abc import Callable

_WHOLE = (64, 16, 32)


def split_spans(has: Callable[[str], bool], way: int, keys: int, size: int, given: int) -> list[tuple[int, int]]:
    """(first key, end) of the parts of ``size`` keys, or of -``given`` equal ones."""
    starts = range(0, keys, size or 1)
    spans = [(a, min(a + size, keys)) for a in starts]
    if len(spans) < 2:
        return spans
    if has("keys between splits left out"):
        if way == 0:  # what is left over of equal shares
            share = keys // (-given if given < 0 else len(spans))
            return [(n * share, (n + 1) * share) for n in range(len(spans))] if share else spans
        step = _WHOLE[(way - 1) % 3]
        return [(-(-a // step) * step if way > 3 else a, b if way > 3 or b == keys else b // step * step)
                for a, b in spans]  # fmt: skip
    if has("splits overlap"):  # a part ends where a whole tile does
        step = _WHOLE[way % 3]
        ends = [a + -(-(b - a) // step) * step if way > 2 else -(-b // step) * step for a, b in spans]
        return [(a, min(end, keys)) for (a, _), end in zip(spans, ends, strict=True)]
    return spans
