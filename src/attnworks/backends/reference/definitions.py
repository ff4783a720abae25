"""What masks and scores mean, element by element: from their definitions, never from the bounds and tiles that the fast
backends use, so that a shared mistake cannot hide."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnworks.expressions.evaluation import evaluate
from attnworks.masks import Bounds, DenseMask, MaskSpec, Predicate
from attnworks.problem import Operands
from attnworks.scores import ScoreSpec, ScoreTerm


class Positions(NamedTuple):
    """Indices of a block of scores: int64, of shapes (batch, 1, 1, 1), (1, heads_q, 1, 1), (1, 1, rows, 1) and
    (1, 1, 1, keys); and the lengths of the sequence they are in."""

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    seq_q: int
    seq_kv: int

    @property
    def indices(self) -> dict[str, Tensor]:
        """By the names that expressions have for them."""
        return {"b": self.b, "h": self.h, "q": self.q, "k": self.k}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.b.numel(), self.h.numel(), self.q.numel(), self.k.numel()


def positions(
    first: int, batch: int, heads_q: int, rows: range, keys: range, seq_q: int, seq_kv: int, device: torch.device
) -> Positions:
    """Positions of queries ``rows`` and keys ``keys`` in ``batch`` sequences from the problem's ``first`` on."""

    def index(numbers: range, *shape: int) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, device=device).view(shape)

    return Positions(
        index(range(first, first + batch), -1, 1, 1, 1),
        index(range(heads_q), 1, -1, 1, 1),
        index(rows, 1, 1, -1, 1),
        index(keys, 1, 1, 1, -1),
        seq_q,
        seq_kv,
    )


def visible(spec: MaskSpec, operands: tuple[Tensor, ...], at: Positions) -> Tensor:
    """Which keys the queries see: a boolean tensor that broadcasts to ``at.shape``.

    Raises ``TypeError`` for a predicate that does not return a boolean tensor, ``ValueError`` for one of a wrong shape.
    """
    result = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=at.q.device)
    for term in spec:
        if isinstance(term, Predicate):
            result = result & _asked(term, operands, at)
        elif isinstance(term, DenseMask):
            result = result & _broadcast(operands[term.operand.index])[_index(operands[term.operand.index], at)]
        else:
            result = result & _within(term, at)
    return result


def _within(term: Bounds, at: Positions) -> Tensor:
    origin = at.q + (at.seq_kv - at.seq_q if term.align == "bottom-right" else 0)
    result = torch.ones_like(origin, dtype=torch.bool)
    if term.left is not None:
        result = result & (at.k >= origin - term.left)
    if term.right is not None:
        result = result & (at.k <= origin + term.right)
    return result


def _asked(term: Predicate, operands: tuple[Tensor, ...], at: Positions) -> Tensor:
    if term.expression is not None:
        return evaluate(term.expression, at.indices, term.own(operands))
    assert term.function is not None
    result = term.function(at.b, at.h, at.q, at.k)
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        was = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(
            f"mask: predicate {term.name} returned {was}, must return a torch.bool tensor made from its "
            "indices with comparisons, &, | and ~"
        )
    _check_shape(f"mask: predicate {term.name}", result, at)
    return result


def modify(spec: ScoreSpec, operands: tuple[Tensor, ...], s: Tensor, at: Positions) -> Tensor:
    """The score modifiers applied left to right to s (``at.shape``). A sink changes no score.

    Raises ``TypeError`` for a function that does not return a floating-point tensor, ``ValueError`` for a wrong shape.
    """
    for term in spec:
        s = modify_once(term, operands, s, at)
    return s


def modify_once(term: ScoreTerm, operands: tuple[Tensor, ...], s: Tensor, at: Positions) -> Tensor:
    """One modifier applied to s."""
    if term.kind == "softcap":
        return term.cap * torch.tanh(s / term.cap)
    if term.kind == "function":
        return _scored(term, operands, s, at)
    if term.operand is None or term.kind == "sink":
        return s
    values = operand_values(term, operands[term.operand.index], at).to(s.dtype)
    return s + values if term.kind == "bias" else s - values * distance(at).to(s.dtype)


def _scored(term: ScoreTerm, operands: tuple[Tensor, ...], s: Tensor, at: Positions) -> Tensor:
    if term.expression is not None:
        return evaluate(term.expression, at.indices | {"s": s}, term.own(operands)).to(s.dtype).expand(at.shape)
    assert term.function is not None
    result = term.function(s, at.b, at.h, at.q, at.k)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        was = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"scores: function {term.name} returned {was}, must return a floating-point tensor")
    _check_shape(f"scores: function {term.name}", result, at)
    return result.to(s.dtype).expand(at.shape)


def distance(at: Positions) -> Tensor:
    """ALiBi's |i + seq_kv - seq_q - j|."""
    return (at.q + (at.seq_kv - at.seq_q) - at.k).abs()


def operand_values(term: ScoreTerm, operand: Tensor, at: Positions) -> Tensor:
    """The elements of a bias or of ALiBi's slopes that belong to the positions, broadcasting to ``at.shape``."""
    return operand_view(term, operand)[operand_index(term, operand, at)]


def operand_view(term: ScoreTerm, operand: Tensor) -> Tensor:
    """The operand with the dimensions that ``operand_index`` indexes."""
    return _broadcast(operand) if term.kind == "bias" else operand


def operand_index(term: ScoreTerm, operand: Tensor, at: Positions) -> tuple[Tensor, ...]:
    if term.kind == "bias":
        return _index(operand, at)
    return (at.h,) if operand.dim() == 1 else (at.b, at.h)


def sink_logits(spec: ScoreSpec, o: Operands, dtype: torch.dtype) -> Tensor | None:
    """The sink's logits as (1, heads_q, 1, 1) in ``dtype``, None where there is no sink."""
    for term in spec:
        if term.kind == "sink" and term.operand is not None:
            return o.scores[term.operand.index].to(dtype).view(1, -1, 1, 1)
    return None


def _broadcast(tensor: Tensor) -> Tensor:
    """A tensor that broadcasts to (batch, heads_q, seq_q, seq_kv), with all four dimensions."""
    return tensor[(None,) * (4 - tensor.dim())]


def _index(tensor: Tensor, at: Positions) -> tuple[Tensor, ...]:
    """Index of the positions in ``_broadcast(tensor)``; dimensions of size 1 stay so, to be broadcast, not copied."""
    everywhere = at.q.new_zeros(1, 1, 1, 1)
    sizes = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    return tuple(everywhere if size == 1 else x for size, x in zip(sizes, at[:4], strict=True))


def _check_shape(owner: str, result: Tensor, at: Positions) -> None:
    missing = 4 - result.dim()
    if missing < 0 or any(s not in (1, whole) for s, whole in zip(result.shape, at.shape[missing:], strict=True)):
        raise ValueError(f"{owner} returned shape {tuple(result.shape)}, must broadcast to {at.shape}")
