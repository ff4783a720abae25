"""A quick check against fp64 on the very problem that is about to be timed: sampled heads and rows, every key.

It costs a small fraction of the problem itself, so that no benchmark has a reason to go without. Visibility comes
from the masks' definition, element by element."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnworks.masks import Bounds
from attnworks.problem import Problem
from attnworks.workbench.oracle import underflow

ROWS = 48
HEADS = 4
_ACCUMULATION = 2.0**-24


class NotVerifiedError(RuntimeError):
    """A kernel's results are not those of the problem; it is not benchmarked."""


@dataclass(frozen=True)
class Check:
    """``worst``: the largest error as a share of its bound (must be <= 1), in (batch, head, row, channel) ``where``;
    ``largest_error``: absolute. ``rows``: how many were compared. ``relative_error``: of all of them together, in the
    Frobenius norm; it varies least from one set of inputs to the next."""

    worst: float
    where: tuple[int, int, int, int]
    largest_error: float
    rows: int
    relative_error: float = 0.0

    @property
    def passed(self) -> bool:
        return self.worst <= 1.0

    def to_json(self) -> dict[str, float]:
        return {
            "worst_share_of_bound": self.worst,
            "largest_error": self.largest_error,
            "relative_error": self.relative_error,
            "rows": self.rows,
        }


def visible_keys(problem: Problem, rows: Tensor) -> Tensor:
    """(rows, seq_kv): which keys the queries ``rows`` see. Raises ``ValueError`` for masks other than closed bounds."""
    keys = torch.arange(problem.seq_kv)
    seen = torch.ones(rows.numel(), problem.seq_kv, dtype=torch.bool)
    for term in problem.mask:
        if not isinstance(term, Bounds):
            raise ValueError(f"mask: was {term}, must be made of Causal() and Window() to be benchmarked")
        origin = rows[:, None] + (problem.seq_kv - problem.seq_q if term.align == "bottom-right" else 0)
        if term.left is not None:
            seen &= keys >= origin - term.left
        if term.right is not None:
            seen &= keys <= origin + term.right
    return seen


def sample(size: int, count: int, rng: random.Random) -> list[int]:
    """Up to ``count`` of 0..size-1 in order: always the first and the last, the others at random."""
    if size <= count:
        return list(range(size))
    return [0, *sorted(rng.sample(range(1, size - 1), count - 2)), size - 1]


def check(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, seed: int = 0) -> Check:
    """Compare ``out`` (batch, heads_q, seq_q, head_dim_v) with fp64 attention of q, k, v in "bhsd".

    The bound of an element is 8 (u + 2^-24 scale |q|ᵀ|k|) carried through P |V|, u being the dtype's unit roundoff,
    plus the dtype's smallest number and, for each weight, what may underflow to 0; it holds for every correct kernel.
    Rows without a visible key must be 0; NaN fails."""
    rng = random.Random(seed)
    info, tiny = torch.finfo(problem.dtype), underflow(problem.dtype)
    rows = torch.tensor(sample(problem.seq_q, ROWS, rng), dtype=torch.int64)
    seen = visible_keys(problem, rows)
    found, squares = Check(0.0, (0, 0, 0, 0), 0.0, 0), [0.0, 0.0]
    if tuple(out.shape) != (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v):
        raise NotVerifiedError(f"out: was of shape {tuple(out.shape)}, must be the problem's {problem}")
    for b in sample(problem.batch, HEADS, rng):
        for h in sample(problem.heads_q, HEADS, rng):
            queries = q[b, h, rows].double()
            keys, values = (x[b, h // problem.group].double() for x in (k, v))
            scores = (problem.scale * (queries @ keys.T)).masked_fill(~seen, -torch.inf)
            probs = torch.nan_to_num(torch.softmax(scores, -1)) if problem.seq_kv else scores
            size = info.eps / 2 + _ACCUMULATION * problem.scale * (queries.abs() @ keys.abs().T)
            bound = 8 * (probs * size + tiny) @ values.abs() + max(info.smallest_normal * info.eps, tiny)
            exact = probs @ values
            error = (out[b, h, rows].double() - exact).abs()
            squares = [total + float(x.square().sum()) for total, x in zip(squares, (error, exact), strict=True)]
            share = torch.where(torch.isfinite(error), error / bound, torch.inf)
            at = int(share.argmax())
            row, channel = at // problem.head_dim_v, at % problem.head_dim_v
            worst, where = found.worst, found.where
            if float(share.max()) > worst:
                worst, where = float(share.max()), (b, h, int(rows[row]), channel)
            found = Check(worst, where, max(found.largest_error, float(error.max())), found.rows + rows.numel())
    return replace(found, relative_error=math.sqrt(squares[0] / (squares[1] or 1.0)))
