"""Properties that hold to the bit: what must not change anything.

Each function runs a subject on a case and returns "" if the property holds, otherwise what it saw. A subject without an
LSE is judged by its ``out`` alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.workbench.cases import Case
from attnworks.workbench.inputs import Inputs, SequenceTensors
from attnworks.workbench.subjects import Subject

Parts = dict[str, list[Tensor]]
"""By tensor name (out, lse, dq, ...): the sequences (heads, rows, dim)."""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: NaN equals the same NaN, 0 differs from -0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _difference(first: Parts, second: Parts) -> str:
    """ "" or the first place where two results differ in a bit, of the tensors that both have."""
    for name in first.keys() & second.keys():
        for sequence, (a, b) in enumerate(zip(first[name], second[name], strict=True)):
            if not same_bits(a, b):
                changed = (a != b) & ~(a.isnan() & b.isnan())
                place = changed.nonzero()[0].tolist() if bool(changed.any()) else "the sign of a zero or NaN"
                return f"{name}: {int(changed.sum())} elements changed, first at sequence {sequence}, {place}"
    return ""


def run(subject: Subject, inputs: Inputs, **options: Any) -> Parts:
    return inputs.gather_results(*subject(inputs, **options))


def _gradients(subject: Subject, inputs: Inputs, **options: Any) -> Parts:
    """dq, dk, dv and those of bias and sink, for the case's own dO."""
    leaves = inputs.differentiable()
    out, _ = subject(inputs, **options)
    return inputs.gather_gradients(inputs.backward(leaves, out))


def repeatable(subject: Subject, case: Case) -> str:
    """The same call gives the same bits, with and without ``return_lse``."""
    first = run(subject, case.build())
    if seen := _difference(first, run(subject, case.build())):
        return f"in a second call, {seen}"
    seen = _difference(first, run(subject, case.build(), return_lse=False))
    return f"without return_lse, {seen}" if seen else ""


def gradients_repeatable(subject: Subject, case: Case) -> str:
    """The same call with ``deterministic=True`` gives the same gradients. On the same number of threads: nothing
    promises more, and torch's own matrix products do not hold it."""
    first = _gradients(subject, case.build(), deterministic=True)
    for _ in range(3):
        if seen := _difference(first, _gradients(subject, case.build(), deterministic=True)):
            return f"in a second call, {seen}"
    return ""


def ignores_what_is_outside(subject: Subject, case: Case) -> str:
    """Memory that is not the problem's does not influence a bit, whatever it holds, and rows of nobody come out 0."""
    found = []
    for poison in (math.nan, 0.0, 3e4, math.inf):
        inputs = case.build(poison)
        out, lse = subject(inputs)
        if bool((inputs.outside(out) != 0).any()):
            return f"rows outside the problem are not 0 with {poison} around it"
        found.append(inputs.gather_results(out, lse))
        if seen := _difference(found[0], found[-1]):
            return f"with {poison} instead of NaN around the problem, {seen}"
    return ""


def gradients_ignore_what_is_outside(subject: Subject, case: Case) -> str:
    """Nor does it influence a bit of a gradient."""
    first = _gradients(subject, case.build(), deterministic=True)
    for poison in (0.0, math.inf):
        if seen := _difference(first, _gradients(subject, case.build(poison), deterministic=True)):
            return f"with {poison} instead of NaN around the problem, {seen}"
    return ""


def given(inputs: Inputs) -> dict[str, Tensor]:
    """What a call must leave as it was: a cache only where nothing is appended to it."""
    appended_to = ("k", "v") if inputs.case.new_keys else ()
    return {name: tensor for name, tensor in inputs.tensors().items() if name not in appended_to}


def changes_no_input(subject: Subject, case: Case) -> str:
    """A call leaves its inputs as they were."""
    inputs, before = case.build(), given(case.build())
    subject(inputs)
    for name, tensor in given(inputs).items():
        if not same_bits(before[name], tensor):
            return f"{name} was changed by the call"
    return ""


def causal(subject: Subject, case: Case) -> str:
    """Changing key and value j changes no bit of a query before j, and one of those after it."""
    align = next(rule.align for rule in case.mask if isinstance(rule, Causal))
    before = run(subject, case.build())
    longest = max(seq_kv for _, seq_kv in case.sequences)
    for key in sorted({0, 1, longest // 3, longest // 2 + 1, longest - 1} & set(range(longest))):
        inputs = case.build()
        blind = []  # by sequence: how many queries must not see the key
        for sequence, (seq_q, seq_kv) in enumerate(case.sequences):
            shift = seq_kv - seq_q if align == "bottom-right" else 0
            blind.append(max(0, min(seq_q, key - shift)) if key < seq_kv else seq_q)
            for tensor in (inputs.k, inputs.v):
                row = _rows_in_order(inputs, tensor, sequence, key)
                row.copy_(row * -3 + 1)
        after = run(subject, inputs)
        early = [
            {name: [x[:, :n] for x, n in zip(parts, blind, strict=True)] for name, parts in found.items()}
            for found in (before, after)
        ]
        if seen := _difference(*early):
            return f"after key {key} changed, {seen}"
        late = any(n < seq_q for n, (seq_q, _) in zip(blind, case.sequences, strict=True))
        if late and all(same_bits(a, b) for a, b in zip(before["out"], after["out"], strict=True)):
            return f"after key {key} changed, no row did"
    return ""


def _rows_in_order(inputs: Inputs, tensor: Tensor, sequence: int, key: int) -> Tensor:
    """The stored (1, heads, dim) of one key of a sequence, a view; (0, heads, dim) past its end."""
    for view in inputs.rows(tensor, sequence, keys=True):
        if key < view.shape[0]:
            return view[key : key + 1]
        key -= view.shape[0]
    return tensor.new_empty(0, 1, 1)


def ignores_threads(subject: Subject, case: Case) -> str:
    """The number of threads changes no bit."""
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(run(subject, case.build()))
            if seen := _difference(found[0], found[-1]):
                return f"with {count} threads instead of 1, {seen}"
    finally:
        torch.set_num_threads(threads)
    return ""


def batch_invariant(subject: Subject, case: Case) -> str:
    """For a fixed plan a sequence's bits depend neither on the rest of the batch, nor on its place, nor on the
    pages."""
    whole = case.build()
    plan = getattr(subject, "plan", lambda inputs: None)(whole)
    options: dict[str, Any] = {"batch_invariant": True} | ({"plan": plan} if plan is not None else {})
    first = run(subject, whole, **options)
    everyone = range(len(case.sequences))
    orders = {f"sequence {n} alone instead of in the batch": [n] for n in everyone}
    if case.page_size:
        orders["pages in other places"] = list(everyone)
    orders["the batch in reverse (and pages moved)"] = list(everyone)[::-1]
    for what, order in orders.items():
        expected = {name: [parts[n] for n in order] for name, parts in first.items()}
        if seen := _difference(expected, run(subject, _take(whole, order), **options)):
            return f"with {what}, {seen}"
    return ""


def _take(inputs: Inputs, order: list[int]) -> Inputs:
    """The same sequences, those of ``order`` in that order; pages are put in other places."""
    case = inputs.case
    lengths = tuple(case.lengths[n] for n in order) if case.lengths else ()
    taken = replace(case, batch=len(order), lengths=lengths, name=f"{case.name} reordered")
    return stored(taken, inputs, [inputs.values[n] for n in order])


def stored(case: Case, inputs: Inputs, values: list[SequenceTensors]) -> Inputs:
    """Inputs like those given, with other values."""
    built = Inputs(case, values, masks=inputs.masks, scores=inputs.scores)
    case._store(built, torch.Generator().manual_seed(1), math.nan)
    return built


def scales_with_v(subject: Subject, case: Case) -> str:
    """Four times V gives four times the output to the bit, and the same LSE: a power of two commutes with every
    rounding, of whatever precision."""
    inputs = case.build()
    before = run(subject, inputs)
    after = run(subject, stored(case, inputs, [replace(part, v=4 * part.v) for part in inputs.values]))
    # A subnormal number has fewer bits than four times it.
    least = torch.finfo(case.dtype).smallest_normal
    normal = [x.abs() >= least for x in before["out"]]
    before["out"] = [torch.where(n, 4 * x, 0) for n, x in zip(normal, before["out"], strict=True)]
    after["out"] = [torch.where(n, x, 0) for n, x in zip(normal, after["out"], strict=True)]
    seen = _difference(before, after)
    return f"with four times V, not four times the output: {seen}" if seen else ""
