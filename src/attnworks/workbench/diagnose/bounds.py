"""Where causal ends, read from the weights of dense and packed calls: the diagonal may lie some keys off, by a number
that is one for all rows of a sequence and another for other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.workbench.diagnose.patterns import weights
from attnworks.workbench.diagnose.probes import Bench, Observation
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.subjects import Subject

MOST_READ = 4  # probes
VISIBLE = 1e-6  # a smaller weight may be rounding
USUAL = 0.9  # of the rows, for a shift to be one of all
LEAST_ROWS = 4
_ORIGIN = (
    "causal from other lengths",
    "aligned top-left",
    "causal shift of the wrong sign",
    "causal before the append",
    "longest length for all",
)


def diagonals(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Reading]:
    """That causal's diagonal lies elsewhere, where it does so by different numbers of keys."""
    found: dict[tuple[int, int], int] = {}
    read = 0
    for bench, s in zip(benches, seen, strict=True):
        case = bench.probe.case
        plain = case.form != "decode" and case.dtype == torch.float32 and case.generator == "normal"
        if not plain or case.mask != (Causal(),) or not s.answers or not s.answers["out"].failed or read == MOST_READ:
            continue
        read += 1
        for n, (seq_q, seq_kv) in enumerate(case.sequences):
            if not seq_kv:
                continue
            try:
                got, want = weights(subject, replace(case, gradients=False), n)
            except Exception:  # whatever a kernel under test raises: nothing is read
                return []
            shown, right = got > VISIBLE, want > VISIBLE
            both = (shown.any(-1) & right.any(-1)).flatten()
            begins = (first_key(shown) == first_key(right))[both].double().mean()  # NaN, which is less, of none
            shift = off(shown, right) if float(begins) >= USUAL and bool(got.isfinite().all()) else None
            if shift is not None:
                found[seq_q, seq_kv] = shift
    if len(set(found.values())) < 2:
        return []
    words = ", ".join(f"{shift:+d} for {seq_q} on {seq_kv}" for (seq_q, seq_kv), shift in list(found.items())[:4])
    return [Reading(f"causal's diagonal lies elsewhere, by as many keys in all rows: {words}", _ORIGIN)]


def last_key(shown: Tensor) -> Tensor:
    """The last key of each row, -1 in a row without."""
    keys = torch.arange(shown.shape[-1])
    return torch.where(shown, keys, -1).amax(-1).flatten()


def first_key(shown: Tensor) -> Tensor:
    """The first key of each row, the number of keys in a row without."""
    return shown.shape[-1] - 1 - last_key(shown.flip(-1))


def off(got: Tensor, want: Tensor) -> int | None:
    """By how many keys the last one that is seen is off in nearly all rows whose keys do not end at either side; None
    where that is not one number, or rows are too few to tell."""
    a, b, seq_kv = last_key(got), last_key(want), want.shape[-1]
    inside = (a >= 0) & (b >= 0) & (a < seq_kv - 1) & (b < seq_kv - 1)
    if int(inside.sum()) < LEAST_ROWS:
        return None
    values, counts = torch.unique((a - b)[inside], return_counts=True)
    return int(values[counts.argmax()]) if float(counts.max()) >= USUAL * float(inside.sum()) else None
