"""Properties that hold to within rounding: what must change nothing but that. Functions are as in ``exact.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnworks.merge import merge
from attnworks.workbench.cases import Case
from attnworks.workbench.exact import Parts, run, same_bits, stored
from attnworks.workbench.inputs import SequenceTensors
from attnworks.workbench.metrics import ELEMENTWISE_FACTOR
from attnworks.workbench.oracle import Expected, expect
from attnworks.workbench.subjects import Subject


def _far(name: str, got: Sequence[Tensor], other: Sequence[Tensor], budgets: Sequence[Tensor]) -> str:
    """ "" or where two tensors are further apart than two correct kernels' budgets together allow."""
    for sequence, (a, b, budget) in enumerate(zip(got, other, budgets, strict=True)):
        apart = (a.double() - b.double()).abs()
        apart = torch.where(a.double() == b.double(), 0, apart)  # equal infinities
        share = (apart / (ELEMENTWISE_FACTOR * budget)).nan_to_num(nan=math.inf)
        if share.numel() and float(share.max()) > 1:
            place = [int(n) for n in torch.unravel_index(share.argmax(), share.shape)]
            return f"{name} is {float(share.max()):.3g} times as far away as allowed at sequence {sequence}, {place}"
    return ""


def _close(first: Parts, second: Parts, expected: Sequence[Expected]) -> str:
    """Compares results of two problems within the sum of the budgets expected of them."""
    for name in first.keys() & second.keys():
        budgets = [sum(parts, torch.zeros(())) for parts in zip(*(e.contraction[name] for e in expected), strict=True)]
        if seen := _far(name, first[name], second[name], budgets):
            return seen
    return ""


def permutation_of_keys(subject: Subject, case: Case) -> str:
    """Keys in another order, with their values, change nothing but rounding: reversed, and with the scores of the
    first query rising, so that every tile raises its maximum."""
    inputs = case.build()
    before, expected = run(subject, inputs), expect(inputs)
    for what, order in (("reversed", _reversed), ("sorted by the first query's scores", _sorted)):
        values = []
        for part in inputs.values:
            keys = order(part)
            values.append(replace(part, k=part.k[:, keys], v=part.v[:, keys]))
        permuted = stored(case, inputs, values)
        if seen := _close(before, run(subject, permuted), (expected, expected)):
            return f"with keys {what}, {seen}"
    return ""


def _reversed(part: SequenceTensors) -> Tensor:
    return torch.arange(part.k.shape[1]).flip(0)


def _sorted(part: SequenceTensors) -> Tensor:
    if not part.q.shape[1]:
        return torch.arange(part.k.shape[1])
    return torch.argsort(part.q[0, 0].double() @ part.k[0].double().T)


def shift_invariance(subject: Subject, case: Case) -> str:
    """An offset c that all keys share adds scale · q·c to every score of a row: the output stays, the LSE moves by it.

    Keys are rounded to quarters of at most 4 and the offset is 14, so that every dtype holds both exactly; along the
    first query its sum is far beyond what exp can take.
    """
    inputs = case.build()
    first = next((part.q[0, 0] for part in inputs.values if part.q.shape[1]), None)
    if first is None:
        return ""
    offset = 14 * torch.where(first < 0, -1, 1).to(case.dtype)
    rounded = [replace(part, k=(4 * part.k).round().clamp(-16, 16) / 4) for part in inputs.values]
    plain = stored(case, inputs, rounded)
    moved = stored(case, inputs, [replace(part, k=part.k + offset) for part in rounded])
    before, after = run(subject, plain), run(subject, moved)
    if "lse" in after:
        shifts = [case.softmax_scale * (part.q.double() @ offset.double()) for part in inputs.values]
        before["lse"] = [lse.double() + shift for lse, shift in zip(before["lse"], shifts, strict=True)]
    seen = _close(before, after, (expect(plain), expect(moved)))
    return f"with an offset that all keys share, {seen}" if seen else ""


def merges(subject: Subject, case: Case) -> str:
    """Attention over two halves of the keys, merged by LSE, is attention over all of them; a missing half changes
    nothing."""
    whole, halves = case.build(), []
    middle = case.seq_kv // 3
    for keys in (slice(0, middle), slice(middle, case.seq_kv)):
        part = case.build()
        rows = 2 if case.layout == "bhsd" else 1
        part.k, part.v = (x.narrow(rows, keys.start, keys.stop - keys.start) for x in (part.k, part.v))
        out, lse = subject(part)
        assert lse is not None, "only asked of a subject that returns one"
        halves += [out, lse]
    out, lse = merge(*halves, layout=case.layout)
    expected = expect(whole)
    for name, got in (("out", whole.gather(out)), ("lse", whole.gather_lse(lse))):
        # Both halves are rounded once more when they are merged.
        budgets = [2 * c for c in expected.contraction[name]]
        if seen := _far(name, got, expected.values[name], budgets):
            return f"merged from two halves, {seen}"
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    kept, kept_lse = merge(out, lse, *nothing, layout=case.layout)
    return "" if same_bits(kept, out) and same_bits(kept_lse, lse) else "merging an empty part changed the other"
