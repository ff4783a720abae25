"""What a traced call says beside its tensors, as one string: no lengths, no strides, so that a new length compiles
nothing anew. ``split`` runs while a tracer watches, ``parse`` when the graph does."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks import masks
from attnworks.expressions import Expression
from attnworks.expressions.graph import Node
from attnworks.masks import Causal, UserMask, Window
from attnworks.plan import Plan
from attnworks.scores import ALiBi, Bias, Sink, Softcap, UserScore


class Spec(NamedTuple):
    """``mask``: its parts, None in the place of a boolean tensor. ``scores``: modifiers, a class in the place of one
    that holds a tensor, a function as its expression. ``differentiable``: as in Problem."""

    form: str
    layout: str
    differentiable: bool
    deterministic: bool
    batch_invariant: bool
    validate: bool
    backend: str
    plan: Plan | None
    mask: tuple[Any, ...]
    scores: tuple[Any, ...]


HOLDERS: dict[str, type[ALiBi | Bias | Sink]] = {"alibi": ALiBi, "bias": Bias, "sink": Sink}
PLAN_FIELDS = tuple(field.name for field in fields(Plan))

# What cannot be written as text, predicates, the string names by its number here. Kept as long as the process lives, as
# compiled code may be.
KEPT: list[Any] = []


@lru_cache(maxsize=1024)
def parse(text: str) -> Spec:
    """The Spec in a string that ``split`` made."""
    *plain, plan, mask, scores = json.loads(text)
    parts = tuple(_mask_part(part) for part in mask)
    modifiers = tuple(_score_part(part) for part in scores)
    return Spec._make((*plain, None if plan is None else Plan(*plan), parts, modifiers))


def _mask_part(part: Any) -> Any:
    return KEPT[part] if isinstance(part, int) else None if part is None else Window(*part)


def _score_part(part: Any) -> Any:
    if isinstance(part, str):
        return HOLDERS[part]
    if not isinstance(part, list):
        return Softcap(part)
    kind, said = part
    return KEPT[said] if kind == "kept" else _expression(said)


def _expression(nodes: str) -> Expression:
    return Expression(tuple(Node(op, kind, tuple(args), literal) for op, kind, args, literal in json.loads(nodes)), ())


# Run for real while the tracer looks on; the results are constants of the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keep(what: Any) -> int:
    return _number(what)


def _number(what: Any) -> int:
    if what not in KEPT:
        KEPT.append(what)
    return KEPT.index(what)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _function(score: Any, differentiable: bool) -> tuple[str, Any]:
    """What the string says of a function as score: ("expression", its text) if it captured no tensor; ("kept", number)
    if it did; ("refused", why) where gradients of what it captured could be lost, or nothing is known of it."""
    from attnworks.expressions.tracing import SCORE_INPUTS, trace

    traced = trace(score, SCORE_INPUTS)
    if traced.expression is None:
        return "refused", f"could not be traced: {traced.why_not}"
    if traced.operands and differentiable:
        return "refused", "captured a tensor, to which torch.compile would give no gradient"
    if traced.operands:
        return "kept", _number(score)
    nodes = [(node.op, node.kind, node.args, node.literal) for node in traced.expression.nodes]
    return "expression", json.dumps(nodes)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(*said: Any) -> str:
    return json.dumps(said)


def split(
    form: str,
    tensors: tuple[Tensor, ...],
    *,
    mask: UserMask,
    scores: tuple[UserScore, ...],
    batch_invariant: bool,
    validate: bool,
    backend: str,
    plan: Plan | None,
    layout: str = "",
    deterministic: bool = False,
) -> tuple[str, list[Tensor], list[Tensor]]:
    """(spec, operands of the scores, operands of the mask) of a call on q, k, v."""
    mask_parts, mask_operands = _split_mask(mask)
    score_operands = [_held(score) for score in scores if isinstance(score, ALiBi | Bias | Sink)]
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *score_operands))
    score_parts = tuple([_score_said(score, differentiable) for score in scores])
    said_plan = None
    if plan is not None:
        values = [getattr(plan, name) for name in PLAN_FIELDS]
        said_plan = tuple(
            [index(value) if type(value) is not bool and isinstance(value, int) else value for value in values]
        )
    flags = differentiable, deterministic, batch_invariant, validate
    text = _text(form, layout, *flags, backend, said_plan, mask_parts, score_parts)
    return str(text), score_operands, mask_operands


def _split_mask(mask: UserMask) -> tuple[tuple[Any, ...], list[Tensor]]:
    parts: list[Any] = []
    operands: list[Tensor] = []
    for part in masks.flatten(mask):
        if isinstance(part, Tensor):
            parts.append(None)
            operands.append(part)
        elif isinstance(part, Causal):
            parts.append((None, 0, part.align))
        elif isinstance(part, Window):  # index(): a number that the tracer holds for variable becomes a constant
            left, right = (None if extent is None else index(extent) for extent in (part.left, part.right))
            parts.append((left, right, part.align))
        else:
            parts.append(_keep(part))
    return tuple(parts), operands


def _held(score: ALiBi | Bias | Sink) -> Tensor:
    return score.slopes if isinstance(score, ALiBi) else score.tensor if isinstance(score, Bias) else score.logits


def _score_said(score: UserScore, differentiable: bool) -> Any:
    if isinstance(score, Softcap):
        return score.cap
    if isinstance(score, ALiBi):
        return "alibi"
    if isinstance(score, Bias):
        return "bias"
    if isinstance(score, Sink):
        return "sink"
    kind, said = _function(score, differentiable)
    if kind == "refused":
        raise NotImplementedError(
            f"scores: held a function that {said}. Use Softcap, ALiBi, Bias or Sink, or call attention outside what is "
            "compiled"
        )
    return kind, said
