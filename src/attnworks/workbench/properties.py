"""Properties that need no reference: what must not change a bit, and what must change nothing but rounding.

Each function runs a subject on a case and returns "" if the property holds, otherwise what it saw. ``APPLIES`` tells
which cases a property makes sense for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.merge import merge
from attnworks.workbench.cases import BooleanRule, Case
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.oracle import expect
from attnworks.workbench.subjects import Subject


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: NaN equals the same NaN, 0 differs from -0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _difference(what: str, first: list[Tensor], second: list[Tensor]) -> str:
    """ "" or the first place where two lists of (heads, rows, dim) differ in a bit."""
    for sequence, (a, b) in enumerate(zip(first, second, strict=True)):
        if not same_bits(a, b):
            changed = (a != b) & ~(a.isnan() & b.isnan())
            place = changed.nonzero()[0].tolist() if bool(changed.any()) else "the sign of a zero or NaN"
            return f"{what}: {int(changed.sum())} elements changed, first at sequence {sequence}, {place}"
    return ""


def _own(inputs: Inputs, subject: Subject, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    out, lse = subject(inputs, **options)
    return inputs.gather(out), [] if lse is None else inputs.gather_lse(lse)


def repeatable(subject: Subject, case: Case) -> str:
    """The same call gives the same bits, with and without ``return_lse``."""
    first, lse = _own(case.build(), subject)
    again, lse_again = _own(case.build(), subject)
    inputs = case.build()
    alone = inputs.gather(subject(inputs, return_lse=False)[0])
    return (
        _difference("out of a second call", first, again)
        or _difference("lse of a second call", lse, lse_again)
        or _difference("out without return_lse", first, alone)
    )


def ignores_what_is_outside(subject: Subject, case: Case) -> str:
    """Memory that is not the problem's does not influence a bit, whatever it holds, and rows of nobody come out 0."""
    found = []
    for poison in (math.nan, 0.0, 3e4, math.inf):
        inputs = case.build(poison)
        out, lse = subject(inputs)
        if bool((inputs.outside(out) != 0).any()):
            return f"rows outside the problem are not 0 with {poison} around it"
        found.append((poison, inputs.gather(out), [] if lse is None else inputs.gather_lse(lse)))
    for poison, out_parts, lse_parts in found[1:]:
        seen = _difference("out", found[0][1], out_parts) or _difference("lse", found[0][2], lse_parts)
        if seen:
            return f"with {poison} instead of NaN around the problem, {seen}"
    return ""


def changes_no_input(subject: Subject, case: Case) -> str:
    """A call leaves its inputs as they were."""
    inputs, before = case.build(), case.build()
    subject(inputs)
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "kv_lens", "page_table"):
        old, new = getattr(before, name), getattr(inputs, name)
        if old is not None and not same_bits(old, new):
            return f"{name} was changed by the call"
    return ""


def causal(subject: Subject, case: Case) -> str:
    """Changing key and value j changes no bit of a query before j."""
    seq_q, seq_kv = case.seq_q, case.seq_kv
    align = next(rule.align for rule in case.mask if isinstance(rule, Causal))
    shift = seq_kv - seq_q if align == "bottom-right" else 0
    before, lse_before = _own(case.build(), subject)
    for key in sorted({0, 1, seq_kv // 3, seq_kv // 2 + 1, seq_kv - 1} & set(range(seq_kv))):
        inputs = case.build()
        for tensor in (inputs.k, inputs.v):
            for sequence in range(case.batch):
                for view in inputs.rows(tensor, sequence, keys=True):
                    view[key] = view[key] * -3 + 1
        after, lse_after = _own(inputs, subject)
        blind = max(0, min(seq_q, key - shift))  # queries that must not see the key
        seen = _difference("out", [x[:, :blind] for x in before], [x[:, :blind] for x in after])
        seen = seen or _difference("lse", [x[:, :blind] for x in lse_before], [x[:, :blind] for x in lse_after])
        if seen:
            return f"after key {key} changed, {seen}"
        if blind < seq_q and all(same_bits(a, b) for a, b in zip(before, after, strict=True)):
            return f"after key {key} changed, no row did"
    return ""


def ignores_threads(subject: Subject, case: Case) -> str:
    """The number of threads changes no bit."""
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(_own(case.build(), subject))
    finally:
        torch.set_num_threads(threads)
    for count, (out, lse) in zip((2, 3), found[1:], strict=True):
        seen = _difference("out", found[0][0], out) or _difference("lse", found[0][1], lse)
        if seen:
            return f"with {count} threads instead of 1, {seen}"
    return ""


def batch_invariant(subject: Subject, case: Case) -> str:
    """For a fixed plan a sequence's bits depend neither on the rest of the batch, nor on its place, nor on the
    pages."""
    whole = case.build()
    plan = getattr(subject, "plan", lambda inputs: None)(whole)
    options: dict[str, Any] = {"batch_invariant": True} | ({"plan": plan} if plan is not None else {})
    out, lse = _own(whole, subject, **options)
    for order in ([n] for n in range(len(out))):
        found, found_lse = _own(_take(whole, order), subject, **options)
        seen = _difference("out", [out[n] for n in order], found) or _difference(
            "lse", [lse[n] for n in order], found_lse
        )
        if seen:
            return f"sequence {order[0]} alone instead of in the batch, {seen}"
    order = list(range(len(out)))[::-1]
    found, found_lse = _own(_take(whole, order), subject, **options)
    seen = _difference("out", [out[n] for n in order], found) or _difference("lse", [lse[n] for n in order], found_lse)
    return f"with the batch in reverse (and pages moved), {seen}" if seen else ""


def _take(inputs: Inputs, order: list[int]) -> Inputs:
    """The same sequences, those of ``order`` in that order; pages are put in other places."""
    case = inputs.case
    lengths = tuple(case.lengths[n] for n in order) if case.lengths else ()
    taken = replace(case, batch=len(order), lengths=lengths, name=f"{case.name} reordered")
    built = Inputs(taken, [inputs.values[n] for n in order], masks=inputs.masks, scores=inputs.scores)
    taken._store(built, torch.Generator().manual_seed(1), math.nan)
    return built


def merges(subject: Subject, case: Case) -> str:
    """Attention over two halves of the keys, merged by LSE, is attention over all of them; a missing half changes
    nothing."""
    whole = case.build()
    expected = expect(whole)
    halves = []
    middle = case.seq_kv // 3
    for keys in (slice(0, middle), slice(middle, case.seq_kv)):
        part = case.build()
        rows = 2 if case.layout == "bhsd" else 1
        part.k, part.v = (x.narrow(rows, keys.start, keys.stop - keys.start) for x in (part.k, part.v))
        out, lse = subject(part)
        assert lse is not None
        halves += [out, lse]
    out, lse = merge(*halves, layout=case.layout)
    for sequence, got in enumerate(whole.gather(out)):
        error = (got.double() - expected.values["out"][sequence]).abs()
        # Both halves are rounded once more when they are merged.
        share = float((error / (16 * expected.contraction["out"][sequence])).max())
        if not share <= 1:
            return f"out merged from two halves is {share:.3g} of its budget away from the whole"
    for sequence, got in enumerate(whole.gather_lse(lse)):
        error = (got.double() - expected.values["lse"][sequence]).abs()
        share = float((error / (16 * expected.contraction["lse"][sequence])).max())
        if not share <= 1:
            return f"lse merged from two halves is {share:.3g} of its budget away from the whole"
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    kept, kept_lse = merge(out, lse, *nothing, layout=case.layout)
    return "" if same_bits(kept, out) and same_bits(kept_lse, lse) else "merging an empty part changed the other"


@dataclass(frozen=True)
class Property:
    name: str
    holds: Callable[[Subject, Case], str]
    applies: Callable[[Case], bool]


def _tensors_per_batch(case: Case) -> bool:
    return any(isinstance(rule, BooleanRule) for rule in case.mask) or bool(case.scores)


PROPERTIES = (
    Property("repeatable", repeatable, lambda case: True),
    Property("ignores what is outside", ignores_what_is_outside, lambda case: case.generator != "hand"),
    Property("changes no input", changes_no_input, lambda case: not case.new_keys),
    Property(
        "causal",
        causal,
        lambda case: case.form == "dense" and case.mask in ((Causal(),), (Causal("top-left"),)) and case.unit_normal,
    ),
    Property("ignores threads", ignores_threads, lambda case: True),
    Property(
        "batch invariant",
        batch_invariant,
        lambda case: (
            len(case.sequences) > 1 and not _tensors_per_batch(case) and not case.cache_dtype and not case.new_keys
        ),
    ),
    Property(
        "merges",
        merges,
        lambda case: case.form == "dense" and not case.mask and not case.scores and case.seq_kv > 2,
    ),
)

# The cases that properties are tried on: one of each form and path, with tails, grouped heads, poison and strides.
CASES = (
    "rows without keys, fp32",
    "rows without keys, fp16",
    "size: 513, causal, bf16",
    "heads: 8/2",
    "heads: 6/2 causal, fp32",
    "strides: gapped, bshd",
    "strides: gapped, bhsd, causal, bf16",
    "stress: few queries on 16k keys, fp16",
    "varlen unequal, causal, fp32",
    "varlen with empty, causal, bf16",
    "varlen ragged",
    "decode, fp32",
    "decode, grouped, bf16",
    "decode, 4 queries, causal, fp16",
    "decode, pages of 16, bf16",
    "decode, 4 queries, causal, pages of 17",
    "decode, strided, pages of 16, fp32",
    "decode, append, pages of 16, fp32",
    "decode, window, fp32",
    "decode, 16k keys, bf16",
)
