"""What a kernel does, read from its answers: the numbers in faults that have one (``ways.NUMBERS``).

With values that are a piece of the identity the output is the weights themselves (``patterns.weights``). Their
logarithms, against the right scores, tell what S was multiplied by and how much of ALiBi or of a bias was added; the
first and last key that get any weight tell how far a mask is off. Constant factors of outputs, LSEs and gradients show
in themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.scores import ALiBi, Bias, Softcap
from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose.bounds import VISIBLE, last_key, off
from attnworks.workbench.diagnose.patterns import weights
from attnworks.workbench.diagnose.probes import Answer, Bench, Observation, Truth
from attnworks.workbench.diagnose.variants import Variant, distances
from attnworks.workbench.subjects import Declined, Subject

MOST_READ = 4  # probes
MOST_TOGETHER = 64  # rows
FITS = 1e-3  # what may be left of a fit, of logarithms or relative
PADDED = (1, 8, 16, 32, 64, 128)  # multiples that lengths may be rounded up to
_GRADIENTS = {"dq": 0, "dk": 1, "dv": 2}


def numbers(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Variant]:
    """Faults with the numbers that a subject's answers show."""
    found: dict[Variant, None] = {}
    lasts: dict[str, int] = {}  # by probe, how many keys causal shows too many
    read = 0
    # What fails in 16 bits alone is read there.
    for bench, s in sorted(zip(benches, seen, strict=True), key=lambda pair: pair[0].probe.case.dtype.itemsize < 4):
        if not s.answers:
            continue
        found |= dict.fromkeys((*_factors(bench, s), *_unstored(bench, s)))
        case = bench.probe.case
        plain = case.form == "dense" and not bench.long and case.generator == "normal"
        if plain and s.answers["out"].failed and read < MOST_READ:
            read += 1
            of_weights = list(_of_weights(subject, replace(case, gradients=False)))
            found |= dict.fromkeys(of_weights)
            for v in of_weights:
                if v.fault == "causal further by a number" and v.value is not None:
                    lasts[bench.probe.name] = round(v.value)
    found |= dict.fromkeys(_padded(benches, seen, lasts))
    return list(found)


def _padded(benches: Sequence[Bench], seen: Sequence[Observation], lasts: dict[str, int]) -> Iterator[Variant]:
    """Lengths rounded up to a multiple that causal may count from: those that give every shift that was read, and none
    where the output is right."""
    causal = (Causal(),)
    known = [
        (bench.probe.case, lasts.get(bench.probe.name, 0))
        for bench, s in zip(benches, seen, strict=True)
        if bench.probe.case.form == "dense" and bench.probe.case.mask == causal and s.answers
        and (bench.probe.name in lasts or not s.answers["out"].failed)
    ]  # fmt: skip
    if not any(shift for _, shift in known):
        return
    for step_kv, step_q in product(PADDED, PADDED):
        off = [-case.seq_kv % step_kv - -case.seq_q % step_q for case, _ in known]
        if off == [shift for _, shift in known]:
            yield Variant("causal from other lengths", way=4, value=1000.0 * step_kv + step_q)
            return


def _unstored(bench: Bench, seen: Observation) -> Iterator[Variant]:
    """Of every few rows the last ones, where these hold one number and no others are wrong."""
    parts, wanted = seen.answers["out"].parts, bench.truths["out"].standard
    if not seen.answers["out"].failed or not parts or parts[0].shape != wanted.want[0].shape or parts[0].dim() != 3:
        return
    got = parts[0].detach().double()
    error = (got - wanted.want[0]).abs()
    bad = ((error > wanted.elementwise[0]) | error.isnan()).any(-1)
    rows = bad.any(0)
    held = got[bad]
    if not bool(rows.any()) or not bool((bad == rows).all()) or not bool(((held == held[0, 0]) | held.isnan()).all()):
        return
    places = torch.arange(len(rows))
    for period in range(2, len(rows) // 2):
        first = int((places[rows] % period).min())
        if first and bool((rows == (places % period >= first)).all()):
            yield Variant("tail rows unwritten", way=3, value=1000.0 * period + first)
            return


def _factors(bench: Bench, seen: Observation) -> Iterator[Variant]:
    """Constant factors of whole tensors."""
    for name, answer in seen.answers.items():
        if not answer.failed or (name in _GRADIENTS and seen.answers["out"].failed):
            continue
        factor = _factor(bench.truths[name], answer)
        if factor is None:
            continue
        if name == "out":
            yield Variant("output of another size", value=factor)
        elif name == "lse":
            yield Variant("lse scaled", way=2, value=factor)
        elif name in _GRADIENTS:
            yield Variant("a gradient of another size", way=_GRADIENTS[name], value=factor)


def _factor(truth: Truth, answer: Answer) -> float | None:
    want = truth.want[truth.sample]
    finite = answer.got.isfinite() & want.isfinite()
    got, want = answer.got[finite].double(), want[finite].double()
    factor = float((got * want).sum() / (want * want).sum().clamp_min(1e-300))
    left = float((got - factor * want).norm() / (factor * want).norm().clamp_min(1e-300)) if factor else 1.0
    return round(factor, 5) if left < FITS and len(want) > 3 else None


def _of_weights(subject: Subject, case: Case) -> Iterator[Variant]:
    try:
        got, want = weights(subject, case)
    except Declined:
        return
    if bool(got.isnan().any()):
        return
    yield from _shifts(case, got > VISIBLE, want > VISIBLE)
    yield from _coefficients(case, got, want)


def _shifts(case: Case, got: Tensor, want: Tensor) -> Iterator[Variant]:
    """By how many keys causal or a window is off, where it is off by as many in all rows."""
    if len(case.mask) != 1 or not isinstance(case.mask[0], Causal | Window):
        return
    last = off(got, want)
    if isinstance(case.mask[0], Causal):
        if last:
            yield Variant("causal further by a number", value=float(last))
        elif together := _together(got, case):
            yield Variant("causal by tile", way=4, value=float(together))
        return
    first = off(got.flip(-1), want.flip(-1))
    if first:
        yield Variant("window of another size", way=3, value=float(first))
    if last:
        yield Variant("window of another size", way=4, value=float(last))


def _together(got: Tensor, case: Case) -> int:
    """How many rows have the causal bound of the last of them; 0 where that is not what is seen."""
    rows = torch.arange(case.seq_q)
    shift = case.seq_kv - case.seq_q if case.mask[0] == Causal() else 0
    found = last_key(got).view(-1, case.seq_q)
    for size in range(1, MOST_TOGETHER + 1):
        bound = (rows // size + 1) * size - 1 + shift
        if bool((found == bound.clamp(-1, case.seq_kv - 1)).all()):
            return size if size > 1 else 0
    return 0


def _coefficients(case: Case, got: Tensor, want: Tensor) -> Iterator[Variant]:
    """What scaled products, ALiBi and bias are multiplied by in the logarithms of the weights."""
    if any(isinstance(rule, Softcap) for rule in case.scores):
        return
    inputs = case.build()
    part = inputs.values[0]
    keys = part.k.double().repeat_interleave(case.heads_q // case.heads_kv, 0)
    terms = {"scale of another size": case.softmax_scale * part.q.double() @ keys.mT}
    behind = distances(case)
    for score in inputs.scores:
        if isinstance(score, ALiBi):
            slopes = score.slopes.view(-1, case.heads_q)[0].double()
            terms["alibi scaled"] = -slopes.view(-1, 1, 1) * behind
        elif isinstance(score, Bias):
            whole = score.tensor[(None,) * (4 - score.tensor.dim())][0].double()
            terms["bias scaled"] = whole.expand(case.heads_q, case.seq_q, case.seq_kv)
    both = (got > VISIBLE) & (want > VISIBLE)
    columns = [_centred(term, both) for term in terms.values()]
    right = _centred(got.clamp_min(1e-300).log(), both)
    if len(right) < 16:
        return
    table = torch.stack(columns, 1)
    found = torch.linalg.lstsq(table, right[:, None]).solution[:, 0]
    if float((table @ found - right).abs().max()) > 10 * FITS:
        return
    for (fault, _), value in zip(terms.items(), found.tolist(), strict=True):
        if abs(value - 1) > FITS:
            yield Variant(fault, way=0 if fault == "scale of another size" else 5, value=round(value, 4))


def _centred(x: Tensor, both: Tensor) -> Tensor:
    """The elements of ``both``, less their row's mean: what is added to all of a row's scores does not show."""
    x = torch.where(both, x, 0.0)
    mean = x.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp_min(1)
    return (x - mean)[both]
