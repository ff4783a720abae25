"""Error patterns: what the wrong results have in common, in simple rules, whatever the fault may be.

``on_which`` fits what the failing probes share; ``in_tensors`` looks at the wrong elements (rows, heads, factors, NaN);
``weights`` reads the softmax weights themselves out of a kernel, by values that are a piece of the identity, and
``in_weights`` says which keys get the wrong ones, which also shows the tile size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.scores import Softcap
from attnworks.workbench.cases import AlibiRule, BiasRule, BooleanRule, Case, SinkRule
from attnworks.workbench.diagnose.probes import Answer, Bench, Observation, Truth
from attnworks.workbench.oracle import score, softmax
from attnworks.workbench.subjects import Subject

Feature = Callable[[Case], bool]


def _has(kind: type, kinds: str) -> Feature:
    return lambda case: any(isinstance(rule, kind) for rule in getattr(case, kinds))


FEATURES: dict[str, Feature] = {
    "with a causal mask": _has(Causal, "mask"),
    "with a window": _has(Window, "mask"),
    "with a boolean mask": _has(BooleanRule, "mask"),
    "with any mask": lambda case: bool(case.mask),
    "with a causal mask from the top left": lambda case: case.mask == (Causal("top-left"),),
    "with a softcap": _has(Softcap, "scores"),
    "with ALiBi": _has(AlibiRule, "scores"),
    "with a bias": _has(BiasRule, "scores"),
    "with a sink": _has(SinkRule, "scores"),
    "with grouped heads": lambda case: case.heads_q != case.heads_kv,
    "with more than one sequence": lambda case: len(case.sequences) > 1,
    "with an open end of a window": lambda case: any(
        isinstance(m, Window) and None in (m.left, m.right) for m in case.mask
    ),
    "with groups of heads that are no power of 2": lambda case: bool(
        case.heads_kv and (case.heads_q // case.heads_kv) & (case.heads_q // case.heads_kv - 1)
    ),
    "with several queries": lambda case: case.seq_q > 1,
    "with a sequence without keys": lambda case: any(not kv for _, kv in case.sequences),
    "with a sequence without queries": lambda case: any(not q for q, _ in case.sequences),
    "with sequences of different lengths": lambda case: len(set(case.sequences)) > 1,
    "with more queries than keys": lambda case: any(q > kv for q, kv in case.sequences),
    "with rows that see no key": lambda case: (
        (any(q > kv for q, kv in case.sequences) and case.mask == (Causal(),))
        or any(isinstance(m, BooleanRule) and m.empty_row for m in case.mask)
    ),
    "where seq_q differs from seq_kv": lambda case: any(q != kv for q, kv in case.sequences),
    "where head_dim_v differs from head_dim": lambda case: case.head_dim != case.head_dim_v,
    "with a head_dim above 128": lambda case: case.head_dim > 128,
    "with a scale that is not the default": lambda case: case.scale is not None,
    "in 16 bits": lambda case: case.dtype.itemsize == 2,
    "in fp16": lambda case: case.dtype == torch.float16,
    "in bf16": lambda case: case.dtype == torch.bfloat16,
    "on thousands of keys": lambda case: case.seq_kv > 1000,
    "on more than 128 keys": lambda case: max(kv for _, kv in case.sequences) > 128,
    "where seq_kv is not a multiple of 16": lambda case: any(kv % 16 for _, kv in case.sequences),
    "where seq_kv is a multiple of 64": lambda case: all(kv and not kv % 64 for _, kv in case.sequences),
    "where scores rise along the keys": lambda case: case.generator == "rising maximum",
    "where scores fall along the keys": lambda case: case.generator == "falling maximum",
    "with scores in the thousands": lambda case: case.generator in ("large scores", "strongly negative"),
    "with scores far below 0": lambda case: case.generator == "strongly negative",
    "with NaN in a query": lambda case: case.generator == "nan query",
    "with packed sequences": lambda case: case.form == "varlen",
    "with a cache": lambda case: case.form == "decode",
    "with pages": lambda case: case.page_size > 0,
    "with new keys to append": lambda case: case.new_keys > 0,
    "with an 8-bit cache": lambda case: case.cache_dtype is not None,
    "with tensors that are not contiguous": lambda case: case.memory != "contiguous",
    "where the loss depends on the LSE": lambda case: case.lse_cotangent,
}


def on_which(benches: Sequence[Bench], seen: Sequence[Observation]) -> list[str]:
    """What the failing probes share that the others lack."""
    ran = [(b.probe.case, s) for b, s in zip(benches, seen, strict=True) if not s.refused]
    failing = [case for case, s in ran if s.failed]
    passing = [case for case, s in ran if not s.failed]
    return told_apart(failing, passing) if passing or not failing else [f"fails on all {len(failing)} probes"]


def told_apart(failing: list[Case], passing: list[Case]) -> list[str]:
    """What failing cases share that passing ones lack."""
    if not failing or not passing:
        return []
    exact: list[str] = []
    shared: list[str] = []
    for name, feature in FEATURES.items():
        if all(map(feature, failing)):
            (shared if any(map(feature, passing)) else exact).append(name)
    every = [n for n, feature in FEATURES.items() if not any(map(feature, passing)) and any(map(feature, failing))]
    if exact:
        return [f"fails exactly {exact[0]}"] + [f"that is also {name}" for name in exact[1:3]]
    if both := _together(shared, passing):
        return [both]
    said = [f"fails only {name}" for name in shared[:3]] + _from_a_length_on(failing, passing)
    return said or [f"always fails {name}" for name in every[:2]]


def _together(shared: Sequence[str], passing: Sequence[Case]) -> str:
    """The first two features that all failing cases have and no passing one has both of."""
    pairs = ((a, b) for n, a in enumerate(shared) for b in shared[n + 1 :])
    apart = (pair for pair in pairs if not any(FEATURES[pair[0]](c) and FEATURES[pair[1]](c) for c in passing))
    found = next(apart, None)
    return "" if found is None else f"fails exactly {found[0]} and {found[1]}"


def _from_a_length_on(failing: list[Case], passing: list[Case]) -> list[str]:
    """Whether a length alone tells failing from passing probes."""
    for place, what in ((1, "keys"), (0, "queries")):
        least = min(max(pair[place] for pair in case.sequences) for case in failing)
        most = max(max(pair[place] for pair in case.sequences) for case in passing)
        if most < least:
            return [f"fails from {least} {what} on, is right up to {most}"]
    return []


def in_tensors(benches: Sequence[Bench], seen: Sequence[Observation]) -> list[str]:
    """Which tensors, and where in them."""
    ran = [(b, s) for b, s in zip(benches, seen, strict=True) if s.answers]
    wrong = dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), 0)
    for _, s in ran:
        out_wrong = s.answers["out"].failed
        for name, answer in s.answers.items():
            # Gradients of a wrong output are wrong too: that says nothing.
            wrong[name] += answer.failed and (name in ("out", "lse") or not out_wrong)
    said = []
    names = [name for name, count in wrong.items() if count]
    asked = {name for _, s in ran for name in s.answers}
    if names and not wrong["out"]:
        said.append(f"the output is right; wrong: {', '.join(names)}" + _right_ones(asked - set(names) - {"out"}))
    elif names == ["out"] and "lse" in asked:
        said.append("the output is wrong, the LSE right")
    if any(s.changes for _, s in ran):
        said.append("two calls on the same inputs differ")
    if any(s.writes for _, s in ran):
        said.append("the call changes its inputs")
    if any(s.spills for _, s in ran):
        said.append("packed rows that belong to no sequence are not 0")
    for name in names[:3]:
        bench, answer = _clearest(ran, name)
        said += [f"{name} {what} ({bench.probe.name})" for what in _where(bench.truths[name], answer)]
    return said


def _right_ones(names: set[str]) -> str:
    return f"; right: {', '.join(sorted(names))}" if names else ""


def _clearest(ran: list[tuple[Bench, Observation]], name: str) -> tuple[Bench, Answer]:
    """The failing probe with the fewest wrong elements, by share."""
    found = [
        (float(s.answers[name].wrong.float().mean()), place)
        for place, (_, s) in enumerate(ran)
        if name in s.answers and s.answers[name].failed and (name in ("out", "lse") or not s.answers["out"].failed)
    ]
    bench, s = ran[min(found)[1]]
    return bench, s.answers[name]


def _where(truth: Truth, answer: Answer) -> list[str]:
    """Rows, heads, NaN and factors of one wrong tensor."""
    if not answer.parts or [x.shape for x in answer.parts] != [x.shape for x in truth.standard.want]:
        return ["is of another shape"]
    said = []
    got = torch.cat([x.detach().double().flatten() for x in answer.parts])
    strange = ~got.isfinite() & truth.want.isfinite()
    if bool(strange.any()):
        kind = "NaN" if bool(got[strange].isnan().any()) else "Inf"
        said.append(f"holds {int(strange.sum())} {kind} where the right values are finite")
    finite = got.isfinite() & truth.want.isfinite()
    g, w = got[finite], truth.want[finite]
    factor = float((g * w).sum() / (w * w).sum().clamp_min(1e-300))
    left = float((g - factor * w).norm() / (factor * w).norm().clamp_min(1e-300)) if factor else 1.0
    if left < 1e-3 and abs(factor - 1) > 1e-3:
        case = truth.standard.case
        known = {case.softmax_scale: "the scale", 1 / case.softmax_scale: "1/scale", 1.442695: "1/ln 2"}
        word = next((f", {what}" for value, what in known.items() if abs(factor / value - 1) < 2e-3), "")
        return [*said, f"is {factor:.4g} times the right one{word}"]
    if truth.standard.name not in ("dbias", "dsink"):
        for sequence, part in enumerate(answer.parts):
            said += _rows_and_heads(sequence, part, truth, len(answer.parts))
            if said:
                break
    return said


def _rows_and_heads(sequence: int, part: Tensor, truth: Truth, sequences: int) -> list[str]:
    want, budget = truth.standard.want[sequence], truth.standard.elementwise[sequence]
    error = (part.detach().double() - want).abs()
    bad = (error > budget) | (error.isnan() & ~want.isnan())
    bad = bad.any(-1) if bad.dim() == 3 else bad  # (heads, rows)
    if not bool(bad.any()) or bool(bad.all()):
        return []
    of = f" of sequence {sequence}" if sequences > 1 else ""
    said = []
    heads = bad.any(1)
    if not bool(heads.all()):
        said.append(f"is wrong in heads {_ranges(heads)} and right in {_ranges(~heads)}{of}")
    rows = bad.any(0)
    if not bool(rows.all()):
        kind = "keys" if truth.standard.name in ("dk", "dv") else "rows"
        said.append(f"is wrong in {kind} {_ranges(rows)}, right in the others of {len(rows)}{of}")
    return said


def _ranges(flags: Tensor) -> str:
    """ "0-3, 7" of a boolean vector; the first few ranges."""
    places: list[int] = flags.nonzero().flatten().tolist()
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:4]]
    return ", ".join(words) + (f" … ({len(places)} in all)" if len(runs) > 4 else "")


# ---- the weights themselves ------------------------------------------------------------------------------------------


class _Identity:
    """A case whose values are columns ``first`` … of the identity: the output is these columns of the weights."""

    def __init__(self, case: Case, first: int) -> None:
        self.case, self.first = case, first

    def __call__(self, subject: Subject) -> list[Tensor]:
        inputs = self.case.build()
        for sequence in range(len(self.case.sequences)):
            for view in inputs.rows(inputs.v, sequence, keys=True):
                rows, _, dim = view.shape
                keys = torch.arange(rows)[:, None, None]
                view.copy_((keys == self.first + torch.arange(dim)).expand_as(view))
        return inputs.gather(subject(inputs)[0].detach())


def weights(subject: Subject, case: Case, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """What a subject multiplies V by in one sequence, and the right weights: both (heads_q, seq_q, seq_kv), fp64."""
    seq_kv = case.sequences[sequence][1]
    columns = [_Identity(case, a)(subject)[sequence] for a in range(0, seq_kv, case.head_dim_v)]
    got = torch.cat(columns, -1)[..., :seq_kv].double()
    inputs = case.build()
    part, group = inputs.values[sequence], case.heads_q // case.heads_kv
    scored = score(inputs, sequence, part.q.double(), part.k.double().repeat_interleave(group, 0))
    return got, softmax(scored.scores)[0][..., :seq_kv]


def in_weights(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> list[str]:
    """Which keys get wrong weights, on the first failing probes that tell."""
    for bench, s in zip(benches, seen, strict=True):
        if not _readable(bench, s):
            continue
        case = bench.probe.case
        longest_first = sorted(range(len(case.sequences)), key=lambda n: -case.sequences[n][0] * case.sequences[n][1])
        for n in longest_first:
            if not min(case.sequences[n]):
                break
            got, want = weights(subject, replace(case, gradients=False), n)
            if said := _about_weights(got, want):
                of = "" if case.form == "dense" else f", sequence {n}"
                return [f"{what} ({bench.probe.name}{of})" for what in said]
            if case.form == "dense":
                break
    return []


def _about_weights(got: Tensor, want: Tensor) -> list[str]:
    if bool(got.isnan().any()):
        return []
    said = []
    shown = want > 0
    seq_kv = want.shape[-1]
    extra = ~shown & (got > 1e-6)
    missing = (want > 1e-6) & (got.abs() < 1e-9)
    if bool(extra.any()):
        count = extra.sum(-1)[extra.any(-1)]
        most, least = int(count.max()), int(count.min())
        said.append(f"hidden keys get weight: {least} to {most} in a row" if most > least else
                    f"hidden keys get weight: {most} in each row that has any")  # fmt: skip
    lost = missing.flatten(0, 1)
    if bool(missing.any()):
        columns = lost.any(0)
        always = (lost | ~(want > 1e-6).flatten(0, 1)).all(0) & columns
        if bool(always.any()) and not bool(always.all()):
            said.append(f"keys {_ranges(always)} of {seq_kv} get no weight in any row")
        else:
            said.append(f"{int(missing.sum())} weights that should be there are 0")
    sums = got.sum(-1)[shown.any(-1)]
    if sums.numel() and float((sums - 1).abs().max()) > 1e-3:
        said.append(f"weights of a row sum to {float(sums.min()):.3g} … {float(sums.max()):.3g} instead of 1")
    if not bool(extra.any()) and not bool(missing.any()):
        said += _about_ratio(got, want)
    return said


def _about_ratio(got: Tensor, want: Tensor) -> list[str]:
    """got/want along the keys: the same for all keys of a row, or in steps of a tile. One key says neither."""
    if want.shape[-1] < 2:
        return []
    clear = want > 1e-7
    ratio = torch.where(clear, got / want.clamp_min(1e-30), torch.nan).flatten(0, 1)
    steps = (ratio[:, 1:] / ratio[:, :-1] - 1).abs()
    if float(steps.nan_to_num(0).max()) < 1e-3:
        return ["each row's weights are the right ones times a factor of its own"]
    where = _jumps(steps)
    if where:
        listed = ", ".join(map(str, where[:4]))
        return [f"weights change by a factor at keys {listed}: tiles of {math.gcd(*where)} keys"]
    return []


def _jumps(steps: Tensor) -> list[int]:
    """Keys at which the weights' error changes in steps, if these are few."""
    where: list[int] = ((steps > 1e-2).any(0).nonzero().flatten() + 1).tolist()
    return where if len(where) < steps.shape[1] / 4 else []


def tile_size(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> int:
    """The tile of keys that a subject's wrong weights show by changing in steps; 0 where they do not."""
    for bench, s in zip(benches, seen, strict=True):
        if bench.probe.case.form == "dense" and _readable(bench, s):
            got, want = weights(subject, replace(bench.probe.case, gradients=False))
            ratio = torch.where(want > 1e-7, got / want.clamp_min(1e-30), torch.nan).flatten(0, 1)
            where = _jumps((ratio[:, 1:] / ratio[:, :-1] - 1).abs())
            if where:
                return math.gcd(*where)
    return 0


def _readable(bench: Bench, seen: Observation) -> bool:
    case = bench.probe.case
    kept = case.new_keys == 0 and case.cache_dtype is None and not bench.long  # V is what the call gives
    plain = kept and case.dtype == torch.float32 and case.generator in ("normal", "rising maximum")
    return plain and bool(seen.answers) and seen.answers["out"].failed
