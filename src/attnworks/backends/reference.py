"""The reference backend: eager attention that writes out all scores, in fp64 for fp64 inputs, differentiable by autograd.

It can do all of the contract and is the oracle the others are judged by. It therefore takes visibility from the masks'
definitions, element by element, never from the bounds and tiles that the fast backends use, so that a shared mistake
cannot hide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.backends import Launcher
from attnworks.errors import Verdict
from attnworks.hardware import Hardware
from attnworks.masks import DenseMask, MaskSpec, Predicate
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem
from attnworks.scores import ScoreSpec

NAME = "reference"


def verdict(problem: Problem, hardware: Hardware) -> Verdict:
    return Verdict(NAME)


def candidates(problem: Problem, hardware: Hardware) -> list[Plan]:
    return [Plan(NAME, "eager")]


def check_plan(problem: Problem, plan: Plan) -> None:
    if plan.schedule != "eager":
        raise ValueError(f"plan schedule: was {plan.schedule!r}, must be 'eager' on backend 'reference'")


def resources(problem: Problem, plan: Plan) -> dict[str, int]:
    return {}


def prepare(problem: Problem, plan: Plan) -> Launcher:
    form = {"dense": _dense, "varlen": _varlen, "decode": _decode}[problem.form]

    def launch(operands: Operands) -> tuple[Tensor, Tensor | None]:
        out, lse = form(problem, operands)
        return out, lse if problem.return_lse else None

    return launch


def visible(
    spec: MaskSpec, operands: tuple[Tensor, ...], b: Tensor, h: Tensor, i: Tensor, j: Tensor, seq_q: int, seq_kv: int
) -> Tensor:
    """Which keys j the queries i see: a boolean tensor of the broadcast shape of the index tensors b, h, i, j."""
    result = torch.ones_like(b + h + i + j, dtype=torch.bool)
    for term in spec:
        if isinstance(term, Predicate):
            result = result & term.function(b, h, i, j)
        elif isinstance(term, DenseMask):
            result = result & _pick(operands[term.operand.index], b, h, i, j)
        else:
            origin = i + (seq_kv - seq_q if term.align == "bottom-right" else 0)
            if term.left is not None:
                result = result & (j >= origin - term.left)
            if term.right is not None:
                result = result & (j <= origin + term.right)
    return result


def modify(
    spec: ScoreSpec,
    operands: tuple[Tensor, ...],
    s: Tensor,
    b: Tensor,
    h: Tensor,
    i: Tensor,
    j: Tensor,
    seq_q: int,
    seq_kv: int,
) -> Tensor:
    """The score modifiers applied left to right to s, whose elements have the indices b, h, i, j. A sink changes no score."""
    for term in spec:
        if term.kind == "softcap":
            s = term.cap * torch.tanh(s / term.cap)
        elif term.kind == "function":
            assert term.function is not None
            s = term.function(s, b, h, i, j)
        elif term.operand is not None and term.kind == "bias":
            s = s + _pick(operands[term.operand.index], b, h, i, j).to(s.dtype)
        elif term.operand is not None and term.kind == "alibi":
            slopes = operands[term.operand.index].to(s.dtype)
            slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
            s = s - slope * (i + (seq_kv - seq_q) - j).abs().to(s.dtype)
    return s


def _pick(tensor: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Elements b, h, i, j of a tensor that broadcasts to (batch, heads_q, seq_q, seq_kv)."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    index = (b, h, i, j)
    return tensor[tuple(x if size > 1 else torch.zeros_like(x) for x, size in zip(index, tensor.shape, strict=True))]


def eager(problem: Problem, o: Operands, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """softmax(S) V with S written out, for q, k, v in "bhsd"; sequence ``first`` of the problem is batch 0 of q.

    Computed in fp32 (fp64 for fp64). Returns out in q's dtype and the LSE (batch, heads_q, seq_q).
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    batch, heads_q, seq_q, _ = q.shape
    seq_kv = k.shape[2]
    k = k.to(compute).repeat_interleave(problem.group, 1)
    v = v.to(compute).repeat_interleave(problem.group, 1)
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    b, h, i, j = (
        torch.arange(size, device=q.device).view(shape)
        for size, shape in zip((batch, heads_q, seq_q, seq_kv), shapes, strict=True)
    )
    b = b + first
    s = problem.scale * (q.to(compute) @ k.transpose(-1, -2))
    s = modify(problem.scores, o.scores, s, b, h, i, j, seq_q, seq_kv)
    if problem.mask:
        s = torch.where(visible(problem.mask, o.mask, b, h, i, j, seq_q, seq_kv), s, -torch.inf)
    sink = next((o.scores[t.operand.index] for t in problem.scores if t.kind == "sink" and t.operand), None)
    extra = None if sink is None else sink.to(compute).view(1, -1, 1, 1).expand(batch, -1, seq_q, 1)
    everything = s if extra is None else torch.cat((s, extra), -1)
    # An empty row: its maximum is -inf, and exp(-inf - (-inf)) must not be formed, also not where autograd looks.
    top = everything.amax(-1, keepdim=True) if everything.shape[-1] else s.new_full((*s.shape[:3], 1), -torch.inf)
    pivot = torch.where(top == -torch.inf, 0, top).detach()
    weights = torch.exp(s - pivot)
    total = weights.sum(-1, keepdim=True)
    if extra is not None:
        total = total + torch.exp(extra - pivot)
    empty = total == 0
    safe_total = torch.where(empty, 1, total)
    out = (weights / safe_total) @ v
    lse = torch.where(empty, -torch.inf, pivot + torch.log(safe_total)).squeeze(-1)
    return out.to(q.dtype), lse


def _dense(problem: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    if problem.layout == "bhsd":
        return eager(problem, o, o.q, o.k, o.v)
    out, lse = eager(problem, o, o.q.transpose(1, 2), o.k.transpose(1, 2), o.v.transpose(1, 2))
    return out.transpose(1, 2).contiguous(), lse


def _varlen(problem: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    assert o.cu_seqlens_q is not None and o.cu_seqlens_kv is not None
    compute = torch.promote_types(problem.dtype, torch.float32)
    outs, lses = [], []
    offsets_q, offsets_kv = o.cu_seqlens_q.tolist(), o.cu_seqlens_kv.tolist()
    for sequence in range(problem.batch):
        rows = slice(offsets_q[sequence], offsets_q[sequence + 1])
        keys = slice(offsets_kv[sequence], offsets_kv[sequence + 1])
        q, k, v = (x.transpose(0, 1)[None] for x in (o.q[rows], o.k[keys], o.v[keys]))
        out, lse = eager(problem, o, q, k, v, sequence)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    unused = problem.total_q - offsets_q[-1]
    outs.append(o.q.new_zeros(unused, problem.heads_q, problem.head_dim_v))
    lses.append(o.q.new_full((problem.heads_q, unused), -torch.inf, dtype=compute))
    return torch.cat(outs), torch.cat(lses, 1)


def _decode(problem: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    assert o.kv_lens is not None
    outs, lses = [], []
    for sequence, length in enumerate(o.kv_lens.tolist()):
        k = _cached(o.k, o, sequence, length, o.k_scale, problem.dtype)
        v = _cached(o.v, o, sequence, length, o.v_scale, problem.dtype)
        q = o.q[sequence].transpose(0, 1)[None]
        out, lse = eager(problem, o, q, k, v, sequence)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    if not outs:
        return o.q.new_zeros(0, problem.seq_q, problem.heads_q, problem.head_dim_v), o.q.new_zeros(
            0, problem.heads_q, problem.seq_q, dtype=torch.promote_types(problem.dtype, torch.float32)
        )
    return torch.stack(outs), torch.stack(lses)


def _cached(cache: Tensor, o: Operands, sequence: int, length: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The ``length`` keys (or values) of one sequence, (1, heads_kv, length, dim), dequantised."""
    if o.page_table is None:
        rows = cache[sequence, :length]
    else:
        page_size = cache.shape[1]
        pages = o.page_table[sequence, : -(-length // page_size)]
        rows = cache[pages].flatten(0, 1)[:length]
    if scale is not None:
        # Not rounded to q's dtype: the scores are computed in fp32 anyway.
        rows = rows.to(torch.promote_types(dtype, torch.float32)) * scale.view(-1, 1)
    return rows.transpose(0, 1)[None]
