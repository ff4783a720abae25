"""The yardstick: what a flash kernel at the declared precision gets, so that errors have something fair to stand
beside.

Scores, sums and accumulators in fp32 (fp64 for fp64), P and dS rounded to the input dtype before they are multiplied (P
to the case's ``probs_dtype`` where it has one), the result rounded once. Budgets never come from eager attention in low
precision: eager fp16 is worse than a kernel that wrongly accumulates in fp16, and would let it pass. ``eager`` is what
the same formulas give when every step is rounded to the input dtype; it is reported, and decides nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.scores import Bias, Sink
from attnworks.workbench.inputs import Inputs, SequenceTensors
from attnworks.workbench.oracle import FORWARD, GRADIENTS, Tensors, bias_place, by_query_head, score, softmax


def flash_model(inputs: Inputs, gradients: bool = False) -> Tensors:
    """out and lse (and dq, dk, dv, dbias, dsink) of every sequence, at the kernel's precision, in its dtypes."""
    return _model(inputs, gradients, eager=False)


def eager(inputs: Inputs, gradients: bool = False) -> Tensors:
    """The same of attention written as matrix products and a softmax in the input dtype."""
    return _model(inputs, gradients, eager=True)


def _model(inputs: Inputs, gradients: bool, eager: bool) -> Tensors:
    found: Tensors = {name: [] for name in FORWARD + (GRADIENTS if gradients else ())}
    for sequence, part in enumerate(inputs.values):
        for name, value in _sequence(inputs, sequence, part, gradients, eager).items():
            if name in ("dbias", "dsink"):
                found[name] = [found[name][0] + value] if name in found else [value]
            else:
                found.setdefault(name, []).append(value)
    return found


def _sequence(inputs: Inputs, sequence: int, part: SequenceTensors, gradients: bool, eager: bool) -> dict[str, Tensor]:
    case = inputs.case
    dtype = case.dtype
    compute = dtype if eager else torch.promote_types(dtype, torch.float32)
    group = case.heads_q // max(case.heads_kv, 1)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(compute)

    def by_kv_head(x: Tensor) -> Tensor:
        return x.view(case.heads_kv, group, *x.shape[1:]).sum(1) if case.heads_kv else x

    q = part.q.to(compute)
    k, v = (by_query_head(x.to(compute), group) for x in (part.k, part.v))
    scored = score(inputs, sequence, q, k)
    s, keys = scored.scores, slice(0, k.shape[1])
    _, lse = softmax(s)
    # A kernel multiplies exp(S - max), not P, and divides at the end.
    top = s.amax(-1, keepdim=True)
    weights = torch.exp(s - torch.where(top == -torch.inf, 0, top))
    total = weights.sum(-1, keepdim=True)
    divisor = torch.where(total == 0, 1, total)
    if eager:
        out = (weights / divisor)[..., keys] @ v
    else:
        out = (weights[..., keys].to(case.probs_dtype or dtype).to(compute) @ v / divisor).to(dtype)
    found = {"out": out, "lse": lse}
    if not gradients:
        return found
    d_out = part.d_out.to(compute)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0, lse)[..., None])
    delta = (d_out * out.to(compute)).sum(-1, keepdim=True)
    if part.d_lse is not None:
        delta = delta - torch.where(lse == -torch.inf, 0, part.d_lse)[..., None].to(compute)
    if any(isinstance(modifier, Sink) for modifier in inputs.scores):
        found["dsink"] = -(p[..., -1] * delta[..., 0]).sum(-1)
    p = p[..., keys]
    found["dv"] = by_kv_head(rounded(p).transpose(-1, -2) @ d_out).to(dtype)
    ds = p * (d_out @ v.transpose(-1, -2) - delta)
    for kind, slope in scored.slopes:
        if kind == "bias" and any(isinstance(modifier, Bias) for modifier in inputs.scores):
            found["dbias"] = bias_place(inputs, sequence)(ds)
        elif slope is not None:
            ds = ds * slope
    ds = rounded(ds)
    found["dq"] = (case.softmax_scale * (ds @ k)).to(dtype)
    found["dk"] = by_kv_head(case.softmax_scale * (ds.transpose(-1, -2) @ q)).to(dtype)
    return found
