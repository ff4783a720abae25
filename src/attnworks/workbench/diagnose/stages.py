"""Which step is wrong, of a backward, of the LSE or of the softmax's sum, read from the answers, whatever the fault is.

Forward right, gradients wrong: with dO a piece of the identity dV is the transposed P that backward works with, so that
its mask and the LSE that it subtracts can be read. A wrong delta moves each row of dQ along scale · P K and nowhere
else. Where rows of the output are right but for a factor, the LSE says whether it is in the sum. An LSE that is wrong
alone is compared with the numbers that a row has beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnworks.scores import ALiBi
from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose.probes import Bench, Observation
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.oracle import score, softmax
from attnworks.workbench.subjects import Subject

EXACT = 3e-3  # what may be left of a fit, relative
MOST_MISSING = 0.9  # of P, for dO to be another one
CLEAR = 1e-4  # a smaller weight may be rounding
_SUM = (
    "one added to the sum",
    "sum of other rows",
    "state of the rows before",
    "sum of part of the keys",
    "a tile missing in the sum",
    "sum not rescaled",
    "sum overwritten by each tile",
    "sum in low precision",
    "tail keys unmasked",
)
_DIVISION = (
    "not divided by the sum",
    "splits summed",
    "splits averaged",
    "splits merged by another weight",
    "masked after softmax",
    "output of another size",
)
_LSE = (
    "lse of the other base in backward",
    "lse without the sink in backward",
    "lse of other rows in backward",
    "probs not normalised in backward",
)
_MASK = (
    "mask missing in backward",
    "window missing in backward",
    "mask from the top left in backward",
    "mask off by one in backward",
)
_MISSING = (
    "last query tile missing in dk, dv",
    "dk, dv miss rows of the window",
    "dk, dv begin at the key's number",
    "dk, dv of the last query tile",
    "last tile missing in dk, dv",
)
_SCORES = ("scores plain in backward", "scale argument ignored in backward", "K or V of another tile in backward")
_DELTA = (
    "delta missing",
    "delta of the wrong sign",
    "delta of other rows",
    "delta of some channels",
    "delta of the accumulator",
    "lse cotangent ignored",
    "lse cotangent of the wrong sign",
)


def read(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Reading]:
    """What is wrong behind the output, of the first probes that tell."""
    found: dict[str, Reading] = {}
    for bench, s in zip(benches, seen, strict=True):
        case = bench.probe.case
        if s.answers and s.answers["out"].failed and "sums" not in found and not case.scores:
            _keep(found, "sums", _sums(bench, s), bench)
        if not s.answers or s.answers["out"].failed or case.form != "dense" or case.dtype != torch.float32:
            continue
        if "lse" in s.answers and s.answers["lse"].failed and "lse" not in found:
            _keep(found, "lse", _lse(bench, s), bench)
        if case.heads_q != case.heads_kv or case.generator != "normal" or case.scores:
            continue
        if "dv" in s.answers and s.answers["dv"].failed and "probs" not in found:
            _keep(found, "probs", _probs(subject, case), bench)
        if "dq" in s.answers and s.answers["dq"].failed and not s.answers["dv"].failed and "delta" not in found:
            _keep(found, "delta", _delta(bench, s), bench)
    return list(found.values())


def _keep(found: dict[str, Reading], stage: str, reading: Reading | None, bench: Bench) -> None:
    if reading is not None:
        found[stage] = Reading(f"{reading.said} ({bench.probe.name})", reading.faults)


# ---- rows that are right but for a factor ----------------------------------------------------------------------------


def _sums(bench: Bench, seen: Observation) -> Reading | None:
    truth, answer = bench.truths["out"].standard, seen.answers["out"]
    if bench.probe.case.dtype != torch.float32 or [x.shape for x in answer.parts] != [x.shape for x in truth.want]:
        return None
    got, want = (torch.cat([x.double().flatten(0, 1) for x in parts]) for parts in (answer.parts, truth.want))
    if want.shape[-1] < 8:
        return None
    size = (want * want).sum(-1)
    factor = (got * want).sum(-1) / size.clamp_min(1e-30)
    clear = size > 1e-9
    rest = (got - factor[:, None] * want).norm(dim=-1)
    if not bool(got.isfinite().all()) or bool((rest > EXACT * got.norm(dim=-1).clamp_min(1e-9))[clear].any()):
        return None
    factor = factor[clear]
    if float(factor.min()) <= 0 or float(factor.std()) < EXACT:
        return None
    said = f"rows of the output are right but for a factor of their own, {float(factor.min()):.3g} … "
    said += f"{float(factor.max()):.3g}"
    if "lse" not in seen.answers or not seen.answers["lse"].parts:
        return Reading(said, ())
    lse = bench.truths["lse"].standard
    off = torch.cat([(a.double() - b).flatten() for a, b in zip(seen.answers["lse"].parts, lse.want, strict=True)])
    off = off[clear]
    if float((off + factor.log()).abs().max()) < 10 * EXACT:
        return Reading(f"{said}, and so is the LSE: the sum is wrong", _SUM)
    if float(off.abs().max()) < EXACT:
        return Reading(f"{said}, the LSE is right: what is divided, or what it is divided by in the end", _DIVISION)
    return Reading(said, ())


# ---- P in backward ---------------------------------------------------------------------------------------------------


def _right(case: Case, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """(scores, P), (heads, rows, keys) each, of one sequence."""
    inputs = case.build()
    part, group = inputs.values[sequence], case.heads_q // case.heads_kv
    scored = score(inputs, sequence, part.q.double(), part.k.double().repeat_interleave(group, 0))
    return scored.scores[..., : case.seq_kv], softmax(scored.scores)[0][..., : case.seq_kv]


def probs(subject: Subject, case: Case) -> Tensor | None:
    """P (heads, rows, keys) of the first sequence as backward has it; None where there is no backward."""
    pieces = []
    for first in range(0, case.seq_q, case.head_dim_v):
        inputs = case.build()
        inputs.values = [replace(part) for part in inputs.values]
        rows = torch.arange(case.seq_q)[:, None] == first + torch.arange(case.head_dim_v)
        for part in inputs.values:
            part.d_out = rows.expand(case.heads_q, -1, -1).to(case.dtype)
        leaves = inputs.differentiable()
        try:
            out, _ = subject(inputs)
            if not out.requires_grad:
                return None
            dv = inputs.gather(inputs.backward(leaves, out)["v"], keys=True)[0]
        except Exception:  # whatever a kernel under test raises: nothing is read
            return None
        pieces.append(dv[..., : case.seq_q - first].mT.double())
    return torch.cat(pieces, 1) if pieces else None


def _probs(subject: Subject, case: Case) -> Reading | None:
    got = probs(subject, replace(case, lse_cotangent=False))
    if got is None or not bool(got.isfinite().all()):
        return None
    want = _right(case)[1]
    extra, missing = (want == 0) & (got.abs() > CLEAR), (want > CLEAR) & (got == 0)
    ratio = torch.where(want > CLEAR, got / want.clamp_min(1e-30), torch.nan)
    level = ratio.nanmean(-1, keepdim=True)
    if bool(extra.any()):
        return Reading("backward's P has weight at keys that are hidden", _MASK)
    lacking = float(missing.double().sum()) > MOST_MISSING * float((want > CLEAR).double().sum())
    if lacking or _rows_of_others(got, want):
        return Reading("dV is not made of dO's own rows", ("dO of another place",))
    if bool(missing.any()):
        return Reading(f"backward's P lacks {int(missing.sum())} weights that dV should have", _MISSING)
    if float(((ratio / level) - 1).abs().nan_to_num(0).max()) < EXACT:
        if float((level - 1).abs().nan_to_num(0).max()) < EXACT:
            return Reading("backward's P is right: what it is multiplied by is not", ())
        return Reading("backward's P is right but for a factor in each row: the LSE that it subtracts", _LSE)
    return Reading("backward's P has other weights: other scores", _SCORES)


def _rows_of_others(got: Tensor, want: Tensor) -> bool:
    """Whether rows of P are those of other rows of their head."""
    size = want.norm(dim=-1)
    apart = torch.cdist(got, want) / size[:, None].clamp_min(1e-30)
    own = apart.diagonal(dim1=-2, dim2=-1)
    clear = size > 0
    moved = (apart.amin(-1) < EXACT) & (own > 10 * EXACT)
    return float(moved[clear].double().mean()) > MOST_MISSING


# ---- delta -----------------------------------------------------------------------------------------------------------


def _delta(bench: Bench, seen: Observation) -> Reading | None:
    """Whether dQ is off as by another delta, and by which."""
    case, truth = bench.probe.case, bench.truths["dq"]
    if not case.gradients or [x.shape for x in seen.answers["dq"].parts] != [x.shape for x in truth.standard.want]:
        return None
    inputs = case.build()
    off, own, through = [], [], []
    for n, part in enumerate(inputs.values):
        _, p = _right(case, n)
        along = case.softmax_scale * p @ part.k.double()
        error = seen.answers["dq"].parts[n].double() - truth.standard.want[n].double()
        size = (along * along).sum(-1)
        share = (error * along).sum(-1) / size.clamp_min(1e-30)
        rest = (error - share[..., None] * along).norm()
        if not bool(error.isfinite().all()) or float(rest) > EXACT * float(error.norm()):
            return None
        rows = size > 1e-9
        off.append(-share[rows])
        own.append((part.d_out.double() * (p @ part.v.double())).sum(-1)[rows])
        through.append(torch.zeros_like(share)[rows] if part.d_lse is None else part.d_lse.double()[rows])
    e, delta, d_lse = (torch.cat(x) for x in (off, own, through))
    delta = delta - d_lse
    known = {
        "delta missing": -delta,
        "delta of the wrong sign": -2 * delta,
        "lse cotangent ignored": d_lse,
        "lse cotangent of the wrong sign": 2 * d_lse,
    }
    for fault, term in known.items():
        if float(term.norm()) > 0 and float((e - term).norm()) < 10 * EXACT * float(e.norm()):
            return Reading(f"dQ is off as by another delta: {fault}", (fault,))
    return Reading("dQ is off as by another delta, rowsum(dO ∘ O), and by nothing else", _DELTA)


# ---- an LSE that is wrong alone --------------------------------------------------------------------------------------


def _lse(bench: Bench, seen: Observation) -> Reading | None:
    case, truth = bench.probe.case, bench.truths["lse"]
    parts = seen.answers["lse"].parts
    if [x.shape for x in parts] != [x.shape for x in truth.standard.want] or (case.scale is None and not case.seq_kv):
        return None
    inputs = case.build()
    off, terms = [], []
    for n, (part, got) in enumerate(zip(inputs.values, parts, strict=True)):
        s, _ = _right(case, n)
        lse = truth.standard.want[n].double()
        k = part.k.double().repeat_interleave(case.heads_q // case.heads_kv, 0)
        q = case.softmax_scale * part.q.double()
        places = (torch.arange(case.seq_q) + case.seq_kv - case.seq_q).double()
        slopes = [x.slopes.view(-1, case.heads_q)[n if x.slopes.dim() > 1 else 0] for x in inputs.scores
                  if isinstance(x, ALiBi)]  # fmt: skip
        rows = {
            "a constant": torch.ones_like(lse),
            "the maximum": s.amax(-1),
            "log of the sum": lse - s.amax(-1),
            "scale · q · mean of K": (q * k.mean(1, keepdim=True)).sum(-1),
            "scale · q · first key": (q * k[:, :1]).sum(-1),
            "slope · the row's place": sum((x.double().view(-1, 1) * places for x in slopes), torch.zeros_like(lse)),
        }
        use = lse.isfinite() & got.isfinite()
        off.append((got.double() - lse)[use])
        terms.append({name: row[use] for name, row in rows.items()})
    e = torch.cat(off)
    for name in terms[0] if terms else ():
        term = torch.cat([one[name] for one in terms])
        size = float((term * term).sum())
        share = float((e * term).sum()) / size if size else 0.0
        if share and float((e - share * term).norm()) < EXACT * float(e.norm()):
            shifted = "q" in name.split() or "slope" in name
            faults = ("lse of shifted scores",) if shifted else ()
            return Reading(f"the LSE alone is wrong: {share:+.4g} times {name} has been added to it", faults)
    return None
