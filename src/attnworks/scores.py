"""Score modifiers: what happens to S = scale * Q K^T before the mask and the softmax, applied left to right.

Like masks they are split into a hashable spec (a tuple of ``ScoreTerm``) and operand tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from attnworks.expressions import Expression, OperandSpec, kernel_operand, operand_spec
from attnworks.masks import name_of


@dataclass(frozen=True)
class Softcap:
    """s -> cap * tanh(s / cap) (Gemma 2, arXiv:2408.00118, section 2). Raises ``ValueError`` unless 0 < cap < inf."""

    cap: float

    def __post_init__(self) -> None:
        if not isinstance(self.cap, int | float) or not 0 < self.cap < math.inf:
            raise ValueError(f"Softcap cap: was {self.cap!r}, must be a finite number > 0")


@dataclass(frozen=True, eq=False)
class ALiBi:
    """s -> s - slopes[h] * |i + seq_kv - seq_q - j| (arXiv:2108.12409, section 3), origin as for ``Causal()``.

    ``slopes``: (heads_q,) or (batch, heads_q), floating point.
    """

    slopes: Tensor


@dataclass(frozen=True, eq=False)
class Bias:
    """s -> s + tensor, where ``tensor`` broadcasts to (batch, heads_q, seq_q, seq_kv); -inf hides. Differentiable."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Sink:
    """One extra logit per query head that enters the denominator and the LSE but carries no value. Differentiable.

    ``logits``: (heads_q,), in the units of S (gpt-oss; "Efficient Streaming Language Models with Attention Sinks",
    arXiv:2309.17453). Of partial results that are merged, exactly one may carry it.
    """

    logits: Tensor


ScoreKind = Literal["softcap", "alibi", "bias", "sink", "function"]


@dataclass(frozen=True)
class ScoreTerm:
    """One modifier as a kernel is built for it: its kind, its static parameter, its operand's shape and strides.

    A "function" is traced as in ``masks.Predicate``: it has an ``expression``, whose operands are those of the scores
    from number ``first`` on, or else a ``function`` to call, and ``why_not``.
    """

    kind: ScoreKind
    cap: float = 0.0
    function: Callable[..., Any] | None = None
    operand: OperandSpec | None = None
    expression: Expression | None = None
    first: int = 0
    name: str = field(default="", compare=False)
    why_not: str = field(default="", compare=False)

    def own(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors that a traced function captured, among the scores' operands."""
        return operands[self.first : self.first + len(self.expression.operands)] if self.expression else ()


ScoreSpec = tuple[ScoreTerm, ...]
UserScore = Softcap | ALiBi | Bias | Sink | Callable[..., Any]


def split(scores: object) -> tuple[ScoreSpec, tuple[Tensor, ...]]:
    """Split the user's ``scores`` into a spec and operand tensors.

    Raises ``TypeError`` if ``scores`` is not a tuple or list of modifiers or an operand is not a floating-point tensor,
    ``ValueError`` if there is more than one ``Sink``.
    """
    if not isinstance(scores, tuple | list):  # an iterator could be read only once
        raise TypeError(f"scores: was {scores!r}, must be a tuple such as (Softcap(50.0),)")
    terms: list[ScoreTerm] = []
    operands: list[Tensor] = []
    for score in scores:
        if isinstance(score, Softcap):
            terms.append(ScoreTerm("softcap", cap=float(score.cap)))
        elif isinstance(score, ALiBi | Bias | Sink):
            kind, name, tensor = _operand_of(score)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                was = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{type(score).__name__} {name}: was {was}, must be a floating-point tensor")
            tensor = kernel_operand(tensor, f"{type(score).__name__} {name}")
            terms.append(ScoreTerm(kind, operand=operand_spec(tensor, len(operands))))
            operands.append(tensor)
        elif isinstance(score, Expression):  # a function that a traced call has put into words (specs.py)
            terms.append(_traced(score, len(operands), "function"))
        elif callable(score) and not isinstance(score, type):
            from attnworks.expressions.tracing import SCORE_INPUTS, trace  # most programs never need it

            traced = trace(score, SCORE_INPUTS)
            if traced.expression is None:
                terms.append(ScoreTerm("function", function=score, name=name_of(score), why_not=traced.why_not))
            else:
                terms.append(_traced(traced.expression, len(operands), name_of(score)))
                operands += traced.operands
        else:
            raise TypeError(
                f"scores: held {score!r}, must hold Softcap, ALiBi, Bias, Sink or functions (s, b, h, q, k)"
            )
    if sum(term.kind == "sink" for term in terms) > 1:
        raise ValueError("scores: held more than one Sink, must hold at most one")
    return tuple(terms), tuple(operands)


@lru_cache(maxsize=1024)
def _traced(expression: Expression, first: int, name: str) -> ScoreTerm:
    return ScoreTerm("function", expression=expression, first=first, name=name)


def _operand_of(score: ALiBi | Bias | Sink) -> tuple[ScoreKind, str, Tensor]:
    if isinstance(score, ALiBi):
        return "alibi", "slopes", score.slopes
    if isinstance(score, Bias):
        return "bias", "tensor", score.tensor
    return "sink", "logits", score.logits


def describe(spec: ScoreSpec) -> str:
    """The modifiers in words, for tables and error messages."""
    if not spec:
        return "none"
    return ", ".join(f"softcap({term.cap:g})" if term.kind == "softcap" else term.kind for term in spec)
