"""Inputs: a built case. What a caller passes, what it means sequence by sequence, and the way back from results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnworks import masks, scores
from attnworks.masks import Causal, Window
from attnworks.problem import Problem, aligned, packed_strides, strides_of
from attnworks.scores import ALiBi, Bias, Sink

if TYPE_CHECKING:
    from attnworks.workbench.cases import Case


_TENSORS = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "kv_lens", "page_table"),
    *("k_new", "v_new", "k_scale", "v_scale"),
)


@dataclass
class SequenceTensors:
    """One sequence as the maths sees it: q (heads_q, seq_q, head_dim), k (heads_kv, seq_kv, head_dim),
    v (heads_kv, seq_kv, head_dim_v), and the cotangents of out (heads_q, seq_q, head_dim_v) and lse (heads_q,
    seq_q)."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    d_lse: Tensor | None


@dataclass
class Inputs:
    """The tensors of one case: ``values`` are the problem, the others the same problem as a caller passes it."""

    case: Case
    values: list[SequenceTensors]
    q: Tensor = field(default_factory=lambda: torch.empty(0))
    k: Tensor = field(default_factory=lambda: torch.empty(0))
    v: Tensor = field(default_factory=lambda: torch.empty(0))
    masks: list[Any] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    kv_lens: Tensor | None = None
    page_table: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        """Arguments of ``attention``, ``attention_varlen`` or ``attention_decode``, whichever the case's form names."""
        case = self.case
        mask = None
        if self.masks:
            # A lone mask is passed as it is; & joins several, Causal first so that tensors meet its operator.
            ordered = sorted(self.masks, key=lambda part: not isinstance(part, Causal | Window))
            mask = ordered[0] if len(ordered) == 1 else reduce(lambda a, b: a & b, ordered)
        common: dict[str, Any] = {"mask": mask, "scores": tuple(self.scores), "scale": case.scale}
        if case.form == "dense":
            return {"q": self.q, "k": self.k, "v": self.v, "layout": case.layout, **common}
        if case.form == "varlen":
            offsets = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_kv": self.cu_seqlens_kv}
            return {"q": self.q, "k": self.k, "v": self.v, **offsets, **common}
        names = ("kv_lens", "page_table", "k_new", "v_new", "k_scale", "v_scale")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"q": self.q, "k_cache": self.k, "v_cache": self.v, **given, **common}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a call gets, by name."""
        found = {name: getattr(self, name) for name in _TENSORS}
        found |= {f"mask {n}": mask for n, mask in enumerate(self.masks)}
        for score in self.scores:
            if isinstance(score, ALiBi | Bias | Sink):
                found[type(score).__name__] = next(iter(vars(score).values()))
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def differentiable(self) -> dict[str, Tensor]:
        """The tensors gradients are asked for, made leaves that require grad: q, k, v, bias, sink."""
        self.q, self.k, self.v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        found = {"q": self.q, "k": self.k, "v": self.v}
        for position, score in enumerate(self.scores):
            if isinstance(score, Bias):
                found["bias"] = score.tensor.detach().requires_grad_()
                self.scores[position] = Bias(found["bias"])
            elif isinstance(score, Sink):
                found["sink"] = score.logits.detach().requires_grad_()
                self.scores[position] = Sink(found["sink"])
        return found

    def problem(
        self, *, differentiable: bool = False, return_lse: bool = True, batch_invariant: bool = False
    ) -> Problem:
        """The Problem that the call becomes."""
        case = self.case
        kwargs = self.kwargs()
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v))
        strides = packed_strides if case.form == "varlen" else None
        layout = case.layout if case.form == "dense" else "bshd"
        seq_q, seq_kv = case.seq_q, case.seq_kv
        if case.form == "varlen":
            seq_q, seq_kv = (max((s[i] for s in case.lengths), default=0) for i in (0, 1))
        elif self.page_table is not None:
            seq_kv = self.page_table.shape[1] * case.page_size
        return Problem(
            form=case.form,
            batch=len(case.sequences),
            heads_q=case.heads_q,
            heads_kv=case.heads_kv,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            dtype=case.dtype,
            device=str(q.device),
            scale=case.softmax_scale,
            q_strides=strides(q) if strides else strides_of(q, layout),
            k_strides=strides(k) if strides else strides_of(k, layout),
            v_strides=strides(v) if strides else strides_of(v, layout),
            mask=masks.split(kwargs["mask"])[0],
            scores=scores.split(kwargs["scores"])[0],
            layout="bshd" if case.form == "decode" else case.layout,
            kv_dtype=case.cache_dtype,
            total_q=q.shape[0] if case.form == "varlen" else 0,
            total_kv=k.shape[0] if case.form == "varlen" else 0,
            page_size=case.page_size,
            return_lse=return_lse,
            differentiable=differentiable,
            batch_invariant=batch_invariant,
            aligned=aligned(q, k, v),
        )

    # ---- from stored tensors back to sequences -----------------------------------------------------------------------

    def rows(self, tensor: Tensor, sequence: int, keys: bool) -> list[Tensor]:
        """Views (rows, heads, dim) of a q- or out-like (``keys`` False) or a k- or v-like tensor that together are the
        rows of one sequence."""
        case = self.case
        length = case.sequences[sequence][1 if keys else 0]
        if case.form == "varlen":
            offsets = self.cu_seqlens_kv if keys else self.cu_seqlens_q
            assert offsets is not None
            first = int(offsets[sequence])
            return [tensor[first : first + length]]
        if case.form == "dense":
            return [tensor[sequence].transpose(0, 1) if case.layout == "bhsd" else tensor[sequence]]
        if not keys:
            return [tensor[sequence]]
        if self.page_table is None:
            return [tensor[sequence, :length]]
        starts = range(0, length, case.page_size)
        pages = self.page_table[sequence].tolist()
        return [tensor[pages[s // case.page_size], : min(case.page_size, length - s)] for s in starts]

    def gather(self, tensor: Tensor, keys: bool = False) -> list[Tensor]:
        """The sequences (heads, rows, dim) of a stored tensor."""
        heads, dim = (
            tensor.shape[-3 if self.case.form == "dense" and self.case.layout == "bhsd" else -2],
            tensor.shape[-1],
        )
        found = []
        for sequence in range(len(self.case.sequences)):
            views = self.rows(tensor, sequence, keys)
            joined = torch.cat(views) if views else tensor.new_zeros(0, heads, dim)
            found.append(joined.transpose(0, 1))
        return found

    def gather_results(self, out: Tensor, lse: Tensor | None) -> dict[str, list[Tensor]]:
        """out and, if there is one, lse, by name and sequence."""
        return {"out": self.gather(out)} | ({} if lse is None else {"lse": self.gather_lse(lse)})

    def gather_gradients(self, grads: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """ "dq", "dk", ... by sequence, of the gradients of what ``differentiable`` returned; those of bias and sink
        whole."""
        return {
            f"d{name}": [grad] if name in ("bias", "sink") else self.gather(grad, keys=name != "q")
            for name, grad in grads.items()
        }

    def backward(self, leaves: dict[str, Tensor], out: Tensor, lse: Tensor | None = None) -> dict[str, Tensor]:
        """Gradients of the leaves for the case's cotangents of out and, if it is given, of lse; zeros where out says
        that it depends on no input, which is right where there is no key."""
        if not out.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        results, cotangents = [out], [self.scatter([part.d_out for part in self.values], out)]
        if lse is not None:
            d_lse = [part.d_lse for part in self.values if part.d_lse is not None]
            results, cotangents = [out, lse], [*cotangents, self.scatter_lse(d_lse, lse)]
        grads = torch.autograd.grad(numbers(results, cotangents), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def gather_lse(self, lse: Tensor) -> list[Tensor]:
        """The sequences (heads_q, rows) of an LSE, (batch, heads_q, seq_q) or packed (heads_q, total_q)."""
        if self.case.form != "varlen":
            return list(lse)
        assert self.cu_seqlens_q is not None
        ends = self.cu_seqlens_q.tolist()
        return [lse[:, first:last] for first, last in pairwise(ends)]

    def scatter(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """A q- or out-like tensor of zeros with the sequences (heads, rows, dim) in their places."""
        stored = torch.zeros_like(like)
        for sequence, part in enumerate(parts):
            (view,) = self.rows(stored, sequence, keys=False)
            view.copy_(part.transpose(0, 1))
        return stored

    def scatter_lse(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        stored = torch.zeros_like(like)
        for view, part in zip(self.gather_lse(stored), parts, strict=True):
            view.copy_(part)
        return stored

    def outside(self, tensor: Tensor, keys: bool = False) -> Tensor:
        """A copy in which the problem's own rows are 0: what is left belongs to nobody and must be 0."""
        rest = tensor.detach().clone()
        for sequence in range(len(self.case.sequences)):
            for view in self.rows(rest, sequence, keys):
                view.zero_()
        return rest


def numbers(results: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """One number for each result, whose gradient by it is its cotangent to the bit: autograd imports SymPy, for a
    second, where it is given cotangents."""
    with torch.enable_grad():  # which is off inside a backward
        return [(result * cotangent).sum() for result, cotangent in zip(results, cotangents, strict=True)]
