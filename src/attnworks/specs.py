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
from attnworks.masks import Causal, UserMask, Window
from attnworks.plan import Plan
from attnworks.scores import ALiBi, Bias, Sink, Softcap, UserScore


class Spec(NamedTuple):
    """``mask``: its parts, None in the place of a boolean tensor. ``scores``: modifiers, a class in the place of one
    that holds a tensor. ``differentiable``: as in Problem."""

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
    modifiers = tuple(HOLDERS[part] if isinstance(part, str) else Softcap(part) for part in scores)
    return Spec._make((*plain, None if plan is None else Plan(*plan), parts, modifiers))


def _mask_part(part: Any) -> Any:
    return KEPT[part] if isinstance(part, int) else None if part is None else Window(*part)


# Run for real while the tracer looks on; the results are constants of the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keep(what: Any) -> int:
    if what not in KEPT:
        KEPT.append(what)
    return KEPT.index(what)


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
    score_parts, score_operands = _split_scores(scores)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *score_operands))
    said_plan = None
    if plan is not None:
        values = [getattr(plan, name) for name in PLAN_FIELDS]
        said_plan = tuple([index(value) if isinstance(value, int) else value for value in values])
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


def _split_scores(scores: tuple[UserScore, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    parts: list[Any] = []
    operands: list[Tensor] = []
    for score in scores:
        if isinstance(score, Softcap):
            parts.append(score.cap)
        elif isinstance(score, ALiBi):
            parts.append("alibi")
            operands.append(score.slopes)
        elif isinstance(score, Bias):
            parts.append("bias")
            operands.append(score.tensor)
        elif isinstance(score, Sink):
            parts.append("sink")
            operands.append(score.logits)
        else:
            raise NotImplementedError(
                "scores: held a function, which torch.compile cannot take into its graph: the gradients of what it "
                "captures would be lost. Use Softcap, ALiBi, Bias or Sink, or call attention outside what is compiled"
            )
    return tuple(parts), operands
