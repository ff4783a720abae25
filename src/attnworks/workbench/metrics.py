"""How wrong a result is, and whether that is too wrong.

Each tensor (out, lse, dq, dk, dv, dbias, dsink) is measured against the oracle and judged by tests that are always
printed beside their budgets:

1. *elementwise*: |error| <= 8 · contraction, where the contraction carries u + 2^-24 · |scores| through the same
   products on absolute values (``oracle.py``), plus what intermediate numbers lose by underflow: each the smallest
   normal fp32 number, times what it is multiplied by; and the dtype's smallest subnormal. For head dims above 16 the
   second term is larger by head_dim/16. It holds for every correct kernel, also where the true value is 0 and relative
   errors mean nothing.
2. *aggregate*: Frobenius norm of the error of the tensor, of each head and of each tile of 64 rows <= 2 x the
   yardstick's (``yardstick.py``) + 3 u of the reference's + what fp32 sums cause, times 1 + 7/sqrt(n). The yardstick's
   error is the larger of the one measured and the one expected of its roundings. What a sum in fp32 is off by is far
   smaller than its bound as a rule and as large as that once in a while: of many errors little is left, of a single one
   nothing is known but the elementwise bound, 8 times what stands here. n counts the region's independent errors, fewer
   than its numbers: a score that is off puts one and the same error into all channels of a row.
3. *non-finite*: NaN and Inf exactly where the reference has them (Inf also where it exceeds the dtype).
4. *plain limits* on unit-normal inputs: fp32 max abs 1e-5, fp16 1e-3 · max(1, |ref|) and 1e-2 relative, fp32 gradients
   1e-4 relative (where the gradient is not 0 by cancellation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnworks.workbench.cases import Case
from attnworks.workbench.oracle import FORWARD, Expected, Tensors, arithmetic_roundoff, roundoff, smallest

ELEMENTWISE_FACTOR = 8.0
YARDSTICK_FACTOR = 2.0
ROUNDINGS = 3.0  # "a few u" of the aggregate test
TILE = 64


@dataclass(frozen=True)
class Check:
    """One test of one tensor: ``error`` must not exceed ``budget``; ``where`` tells the worst element or region."""

    name: str
    passed: bool
    error: float
    budget: float
    where: str = ""

    @property
    def share(self) -> float:
        """Error as a share of its budget."""
        if self.error == 0:
            return 0.0
        return self.error / self.budget if self.budget else math.inf


@dataclass(frozen=True)
class Measure:
    """One tensor's errors against the reference. ``nan``, ``inf``: counts, with the reference's own beside them;
    ``yardstick``, ``eager``: the relative Frobenius errors of the flash model and of eager attention in the input dtype
    (Inf where it overflows), as good as can be and as bad as is common. ``worst``: the element with the largest error;
    ``worst_row``: the row with the largest error beside its budget, ``row_error`` its relative Frobenius error.
    ``numbers``: (wanted, got) themselves, of hand-computed cases."""

    tensor: str
    max_abs: float
    max_rel: float
    frobenius: float
    yardstick: float
    eager: float
    cosine: float
    nan: int
    nan_expected: int
    inf: int
    inf_expected: int
    worst: str
    worst_row: str
    row_error: float
    checks: tuple[Check, ...]
    numbers: tuple[list[Any], list[Any]] | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) | {"share": check.share} for check in self.checks]
        return asdict(self) | {"passed": self.passed, "checks": checks}


@dataclass
class Standard:
    """What one tensor of a case is measured against: the reference and its budgets, worked out once for all subjects.

    ``elementwise``: a budget for each element of each sequence; ``regions``: an aggregate budget for each region's
    norm.
    """

    name: str
    case: Case
    want: list[Tensor]
    elementwise: list[Tensor]
    regions: dict[str, Tensor]
    norm: float
    yardstick: float
    eager: float
    cancelled: bool  # the true value is next to nothing beside the terms that make it up

    @cached_property
    def finite(self) -> bool:
        return _finite(self.want)


def standards(case: Case, expected: Expected, yardstick: Tensors, eager: Tensors | None = None) -> dict[str, Standard]:
    """The standards of every tensor expected of a case. ``eager`` is reported beside errors, where it is given."""
    found = {}
    for name, want in expected.values.items():
        contraction = expected.contraction[name]
        norm = _norm([torch.where(w.isfinite(), w, 0) for w in want])
        reach = _norm([c.nan_to_num(posinf=0) for c in contraction])
        yard_errors = [_signed_errors(y, w) for y, w in zip(yardstick[name], want, strict=True)]
        found[name] = Standard(
            name=name,
            case=case,
            want=want,
            # A NaN among the inputs makes the bound NaN where it reaches; what is finite there other tests judge.
            elementwise=[(ELEMENTWISE_FACTOR * c).nan_to_num(nan=torch.inf) for c in contraction],
            regions=_region_budgets(name, yard_errors, expected, case),
            norm=norm,
            yardstick=_ratio(_norm(yard_errors), norm),
            eager=math.nan if eager is None else _eager_error(eager[name], want, norm),
            cancelled=norm <= 1e-3 * reach / roundoff(case.dtype),
        )
    return found


def measure(standard: Standard, got: list[Tensor]) -> Measure:
    """Measure one tensor of a result: ``got`` holds its sequences, as ``standard.want`` does."""
    name, want = standard.name, standard.want
    shapes = [tuple(x.shape) for x in got], [tuple(x.shape) for x in want]
    if shapes[0] != shapes[1]:
        return _unmeasurable(name, f"shapes were {shapes[0]}, must be {shapes[1]}")
    wanted_dtype = _result_dtype(name, standard.case)
    if any(x.dtype != wanted_dtype for x in got):
        return _unmeasurable(name, f"dtype was {got[0].dtype}, must be {wanted_dtype}")
    finite = standard.finite and _finite(got)  # mostly, and then there is much less to do
    errors = [(g.double() - w).abs() if finite else _errors(g, w) for g, w in zip(got, want, strict=True)]
    nonfinite = Check("non-finite", True, 0.0, 0.0) if finite else _check_nonfinite(got, want)
    relative, product, square = 0.0, 0.0, 0.0
    for g, w, e in zip(got, want, errors, strict=True):
        if g.numel():
            g64, known = g.double(), w
            if not finite:
                g64, known = torch.where(g.isfinite() & w.isfinite(), g64, 0), w.nan_to_num(0, 0, 0)
            product += float((g64 * known).sum())
            square += float((g64 * g64).sum())
            relative = max(relative, float((e / w.abs()).nan_to_num(0, 0, 0).max()))
    error = _norm(errors)
    row, row_error = _worst_row(errors, standard)
    by_hand = standard.case.generator == "hand"
    checks = [nonfinite, _check_elementwise(errors, standard.elementwise), _check_aggregate(errors, standard)]
    return Measure(
        tensor=name,
        max_abs=max((float(e.max()) for e in errors if e.numel()), default=0.0),
        max_rel=relative,
        frobenius=_ratio(error, standard.norm),
        yardstick=standard.yardstick,
        eager=standard.eager,
        cosine=_ratio(product, math.sqrt(square) * standard.norm) if standard.norm else 1.0,
        nan=0 if finite else sum(int(g.isnan().sum()) for g in got),
        nan_expected=0 if finite else sum(int(w.isnan().sum()) for w in want),
        inf=0 if finite else sum(int(g.isinf().sum()) for g in got),
        inf_expected=0 if finite else sum(int(w.isinf().sum()) for w in want),
        worst=_place(*_argmax(errors)),
        worst_row=row,
        row_error=row_error,
        checks=(*checks, *(_plain_limits(errors, error, standard) if standard.case.unit_normal else ())),
        numbers=tuple([x.tolist() for x in side] for side in (want, got)) if by_hand else None,  # type: ignore[arg-type]
    )


def _result_dtype(name: str, case: Case) -> torch.dtype:
    if name == "lse":
        return torch.promote_types(case.dtype, torch.float32)
    # Bias and sink operands are fp32 in every case, and so are their gradients.
    return torch.float32 if name in ("dbias", "dsink") else case.dtype


def _unmeasurable(name: str, why: str) -> Measure:
    check = Check("shape and dtype", False, math.inf, 0.0, why)
    return Measure(name, math.inf, math.inf, math.inf, 0.0, math.nan, 0.0, 0, 0, 0, 0, why, why, math.inf, (check,))


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def _signed_errors(got: Tensor, want: Tensor) -> Tensor:
    """got - want where both are finite, else 0: the non-finite test judges the rest."""
    error = got.double() - want.double()
    return torch.where(error.isfinite(), error, 0)


def _errors(got: Tensor, want: Tensor) -> Tensor:
    return _signed_errors(got, want).abs()


def _eager_error(got: list[Tensor], want: list[Tensor], norm: float) -> float:
    lost = any(bool((w.isfinite() & ~g.isfinite()).any()) for g, w in zip(got, want, strict=True))
    return math.inf if lost else _ratio(_norm([_errors(g, w) for g, w in zip(got, want, strict=True)]), norm)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((x.double() ** 2).sum()) for x in tensors))


def _ratio(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else math.inf)


def _argmax(tensors: list[Tensor]) -> tuple[int, tuple[int, ...]]:
    """Sequence and index of the largest element; an index of () where there is none."""
    tops = [float(x.max()) if x.numel() else -1.0 for x in tensors]
    if not tops or max(tops) < 0:
        return 0, ()
    sequence = tops.index(max(tops))
    return sequence, _unravel(int(tensors[sequence].argmax()), tensors[sequence].shape)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.insert(0, place)
    return tuple(index)


_AXES = ("head", "row", "channel")


def _place(sequence: int, index: tuple[int, ...]) -> str:
    words = [f"{axis} {n}" for axis, n in zip(_AXES, index, strict=False)]
    return ", ".join([f"sequence {sequence}", *words]) if index else "nowhere"


def _worst_row(errors: list[Tensor], standard: Standard) -> tuple[str, float]:
    """Where the error of a row is largest beside its budget, and that row's relative Frobenius error. A row of the LSE
    and of gradients without rows is one number."""
    single = standard.name in ("lse", "dbias", "dsink")
    errors, budgets, want = (
        [x[..., None] for x in tensors] if single else tensors
        for tensors in (errors, standard.elementwise, standard.want)
    )
    shares = [
        e.norm(dim=-1) / b.nan_to_num(posinf=0).norm(dim=-1).clamp_min(1e-300)
        for e, b in zip(errors, budgets, strict=True)
    ]
    sequence, index = _argmax(shares)
    if not index:
        return "nowhere", 0.0
    row = want[sequence][index].nan_to_num(0, 0, 0)
    return _place(sequence, index), _ratio(float(errors[sequence][index].norm()), float(row.norm()))


def _check_nonfinite(got: list[Tensor], want: list[Tensor]) -> Check:
    wrong = []
    for g, w in zip(got, want, strict=True):
        limit = torch.finfo(g.dtype).max
        overflow = w.isfinite() & (w.abs() > limit) & (g == torch.sign(w) * torch.inf)
        infinite = (g.isinf() | w.isinf()) & (g.double() != w) & ~overflow
        wrong.append(((g.isnan() != w.isnan()) | (infinite & ~g.isnan())).double())
    count = sum(int(x.sum()) for x in wrong)
    where = _place(*_argmax(wrong)) if count else ""
    return Check("non-finite", count == 0, float(count), 0.0, where)


def _check_elementwise(errors: list[Tensor], budgets: list[Tensor]) -> Check:
    sequence, index = _argmax([e / b for e, b in zip(errors, budgets, strict=True)])
    if not index:
        return Check("elementwise", True, 0.0, 0.0)
    error, budget = float(errors[sequence][index]), float(budgets[sequence][index])
    return Check("elementwise", error <= budget, error, budget, _place(sequence, index))


def _check_aggregate(errors: list[Tensor], standard: Standard) -> Check:
    worst = Check("aggregate", True, 0.0, 0.0)
    for region, total in _region_sums(standard.name, [(e * e)[None] for e in errors]).items():
        found, budget = total[0].sqrt(), standard.regions[region]
        if not found.numel():
            continue
        at = int((found / budget).argmax())
        error, limit = float(found.flatten()[at]), float(budget.flatten()[at])
        check = Check("aggregate", error <= limit, error, limit, _region_name(region, _unravel(at, found.shape)))
        if check.share > worst.share or not worst.where:
            worst = check
    return worst


def _region_budgets(name: str, yard_errors: list[Tensor], expected: Expected, case: Case) -> dict[str, Tensor]:
    """An aggregate budget for the norm of each region. ``yard_errors``: the yardstick's, with their signs."""
    u = max(arithmetic_roundoff(case.dtype), roundoff(case.dtype) / 256) if name == "lse" else roundoff(case.dtype)
    arithmetics = [torch.where(x.isfinite(), x, 0) for x in expected.arithmetic[name]]
    squares = []
    for sequence, yard in enumerate(yard_errors):
        parts = (yard, expected.spread[name][sequence], expected.values[name][sequence], arithmetics[sequence])
        finite = [torch.where(x.isfinite(), x, 0).double() for x in parts]
        squares.append(torch.stack([x * x for x in (*finite, torch.ones_like(finite[0]))]))
    terms = expected.terms.get(name)
    grams = _gram_norms(yard_errors, arithmetics, terms) if terms else {}
    budgets = {}
    for region, total in _region_sums(name, squares).items():
        yard, spread, norm, arithmetic, size = total.sqrt()
        # (tr G)^2 / |G|^2, and a single error where nothing tells them apart
        count = (total[3] ** 2 / grams.get(region, total[3] ** 2).clamp_min(1e-300)).clamp_min(1)
        sums = (1 + (ELEMENTWISE_FACTOR - 1) / count.sqrt()) * arithmetic
        least = smallest(case.dtype) * size.clamp_min(1)
        budgets[region] = YARDSTICK_FACTOR * torch.maximum(yard, spread) + ROUNDINGS * u * norm + sums + least
    return budgets


def _gram_norms(errors: list[Tensor], sizes: list[Tensor], terms: list[Tensor]) -> dict[str, Tensor]:
    """Of each region |G|^2, the squared norm of the Gram matrix of its rows' errors. No kernel that is judged has a say
    in it: directions are those of ``errors``, the yardstick's, norms those of ``sizes``, what is expected of fp32 sums,
    both (heads, rows, channels) of each sequence; what a row adds is divided by its own ``terms``, (heads, rows).

    With (tr G)^2, the fourth power of all sizes, it makes a participation ratio: how many independent errors a region's
    is made of. That is 1 for one error, for equal rows of one each and for one beside which the others are nothing;
    t n m / (n + m) for n rows of t errors each whose directions are random among m."""
    grams = {"tensor": torch.zeros((), dtype=torch.float64)}
    for sequence, (error, size, count) in enumerate(zip(errors, sizes, terms, strict=True)):
        length, norm = (x.norm(dim=-1, keepdim=True) for x in (error, size))
        # A row without an error has no direction of its own; it gets its size's, as all of its kind do.
        direction = torch.where(length > 0, error / length, size / norm.clamp_min(1e-300))
        rows = direction * norm * count[..., None] ** -0.25
        padded = pad(rows, (0, 0, 0, -rows.shape[1] % TILE))
        tiles = padded.view(padded.shape[0], padded.shape[1] // TILE, TILE, padded.shape[2])
        heads = _gram_norm(rows)
        grams[f"head of sequence {sequence}"], grams[f"tile of sequence {sequence}"] = heads, _gram_norm(tiles)
        grams["tensor"] += heads.sum()
    return grams


def _gram_norm(rows: Tensor) -> Tensor:
    smaller = rows if rows.shape[-2] <= rows.shape[-1] else rows.mT
    product = smaller @ smaller.mT
    return (product * product).sum((-2, -1))


def _region_sums(name: str, squares: list[Tensor]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for sequence, square in enumerate(squares):
        for region, total in _regions(name, square, sequence).items():
            sums[region] = sums[region] + total if region in sums else total
    return sums


def _regions(name: str, squares: Tensor, sequence: int) -> dict[str, Tensor]:
    """Sums over the whole tensor, and for what has heads and rows over each head and each tile of rows of a sequence.
    ``squares``: (quantities, heads, rows[, dim])."""
    whole = {"tensor": squares.flatten(1).sum(1)}
    if name in ("dbias", "dsink"):
        return whole
    by_row = squares.sum(-1) if squares.dim() == 4 else squares
    padded = pad(by_row, (0, -by_row.shape[-1] % TILE))
    tiles = padded.view(*padded.shape[:-1], padded.shape[-1] // TILE, TILE).sum(-1)
    return whole | {f"head of sequence {sequence}": by_row.sum(-1), f"tile of sequence {sequence}": tiles}


def _region_name(region: str, spot: tuple[int, ...]) -> str:
    if region.startswith("head"):
        return f"{region}: head {spot[0]}"
    if region.startswith("tile"):
        return f"{region}: head {spot[0]}, rows {TILE * spot[1]}-{TILE * spot[1] + TILE - 1}"
    return "whole tensor"


def _plain_limits(errors: list[Tensor], error: float, standard: Standard) -> list[Check]:
    dtype, largest = standard.case.dtype, max((float(e.max()) for e in errors if e.numel()), default=0.0)
    if standard.name not in FORWARD:
        if dtype == torch.float32 and not standard.cancelled:
            return [_limit("plain: relative 1e-4", error / standard.norm, 1e-4)]
        return []
    if dtype == torch.float32:
        return [_limit("plain: max abs 1e-5", largest, 1e-5)]
    if dtype == torch.float16:
        scaled = [e / w.abs().clamp_min(1) for e, w in zip(errors, standard.want, strict=True)]
        found = max((float(e.max()) for e in scaled if e.numel()), default=0.0)
        checks = [_limit("plain: 1e-3 of max(1, |ref|)", found, 1e-3)]
        return checks + ([] if standard.cancelled else [_limit("plain: relative 1e-2", error / standard.norm, 1e-2)])
    return []


def _limit(name: str, error: float, budget: float) -> Check:
    return Check(name, error <= budget, error, budget)
