"""Attention as other people write it, with a fault each: naive and blocked, with autograd or a backward of its own,
tiles that no mutant has, no LSE. What ``diagnose`` is tried on besides its own mutants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.scores import Bias, Softcap
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.oracle import visible

Has = Callable[[str], bool]


def _shown(has: Has, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """(batch or 1, heads or 1, seq_q, seq_kv)."""
    i = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2] if has("aligned bottom-right") else 0)
    j = torch.arange(k.shape[2])[None]
    shown = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if causal and not has("causal ignored"):
        shown = shown & (j <= i + (1 if has("causal shows the next") else -1 if has("causal hides itself") else 0))
    if mask is not None and not has("boolean mask ignored"):
        shown = shown & (~mask if has("boolean mask inverted") else mask)
    return shown


def naive(
    has: Has, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, bias: Tensor | None,
    cap: float,
) -> Tensor:  # fmt: skip
    """S, P and O written out in fp32; gradients by autograd."""
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q != heads_kv:
        repeats = (1, heads_q // heads_kv, 1, 1)
        k, v = (
            (x.repeat(repeats) if has("KV head by remainder") else x.repeat_interleave(heads_q // heads_kv, 1))
            for x in (k, v)
        )
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    if has("scale missing"):
        scale = 1.0
    if has("scale twice"):
        scale = scale**2
    if has("scale of head_dim_v") and scale == q.shape[-1] ** -0.5:
        scale = v.shape[-1] ** -0.5
    if has("scale argument ignored"):
        scale = q.shape[-1] ** -0.5
    if has("K and V exchanged") and k.shape == v.shape:
        k, v = v, k
    s = q @ k.mT * scale
    if has("scores rounded"):
        s = s.to(dtype).float()
    if cap and not has("softcap ignored"):
        s = cap * torch.tanh(s / cap)
    if bias is not None and not has("bias ignored"):
        s = s + (bias[:1, :1] if has("bias of head 0") else bias)
    shown = _shown(has, q, k, mask, causal)
    if has("masked after softmax"):
        return ((torch.softmax(s, -1) * shown) @ v).to(dtype)
    s = s.masked_fill(~shown, 0.0 if has("hidden scores are 0") else -1e9 if has("mean") else -math.inf)
    if has("maximum not subtracted"):
        p = torch.exp(s)
        return (p @ v / p.sum(-1, keepdim=True)).nan_to_num(0, None, None).to(dtype)
    p = torch.softmax(s, -2 if has("softmax over queries") else -1)
    if not has("empty rows give NaN"):
        p = torch.where(shown, p, 0) if not has("mean") and not has("hidden scores are 0") else p
    if has("probs in fp8"):
        p = p.to(torch.float8_e4m3fn).float()
    if has("not divided by the sum"):
        p = p * torch.logsumexp(s - s.amax(-1, keepdim=True), -1, keepdim=True).exp()
    return (p @ v).to(dtype)


def blocked(
    has: Has, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, bias: Tensor | None,
    cap: float, tile: int = 40,
) -> Tensor:  # fmt: skip
    """The online softmax over tiles of keys; gradients by autograd."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q = q.float() * scale
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    shown = _shown(has, q, k, mask, causal)
    m = torch.full((*q.shape[:3], 1), 0.0 if has("finite initial maximum") else -math.inf)
    total, acc = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1])
    seq_kv = k.shape[2]
    for first in range(0, seq_kv, tile):
        keys = slice(first, min(first + tile, seq_kv))
        if has("last partial tile dropped") and first + tile > seq_kv:
            break
        s = q @ k[:, :, keys].mT
        if cap:
            s = cap * torch.tanh(s / cap)
        if bias is not None:
            s = s + bias[..., keys]
        s = s.masked_fill(~shown[..., keys], -math.inf)
        if has("tail keys unmasked"):
            s = torch.nn.functional.pad(s, (0, tile - s.shape[-1]))
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        new = new if not has("maximum of the tile") else s.amax(-1, keepdim=True)
        safe = torch.where(new == -math.inf, 0.0, new)
        p, alpha = torch.exp(s - safe), torch.exp(m - safe)
        if has("exp2 for exp"):
            p, alpha = torch.exp2(s - safe), torch.exp2(m - safe)
        alpha_sum = torch.ones_like(alpha) if has("sum not rescaled") else alpha
        alpha_acc = torch.ones_like(alpha) if has("accumulator not rescaled") else alpha
        total = total * alpha_sum + p.sum(-1, keepdim=True)
        p = p[..., : keys.stop - first].to(dtype).float()
        if has("rescaled after adding"):
            acc = (acc + p @ v[:, :, keys]) * (alpha if first else 1)
        elif has("accumulator overwritten by each tile"):
            acc = p @ v[:, :, keys]
        else:
            acc = acc * alpha_acc + p @ v[:, :, keys]
        if has("fp16 accumulation"):
            acc = acc.to(dtype).float()
        if has("sum in low precision"):
            total = total.to(dtype).float()
        m = new
    if has("not divided by the sum"):
        return acc.to(dtype)
    return (acc / (total if has("empty rows give NaN") else total.masked_fill(total == 0, 1))).to(dtype)


def split(
    has: Has, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, bias: Tensor | None,
    cap: float,
) -> Tensor:  # fmt: skip
    """The keys in three parts, put together by their LSE."""
    q, dtype = q.float() * scale, q.dtype
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    shown = _shown(has, q, k, mask, causal)
    outs, lses = [], []
    size = -(-k.shape[2] // 3)
    for first in range(0, k.shape[2], size):
        keys = slice(first, first + size)
        s = (q @ k[:, :, keys].mT).masked_fill(~shown[..., keys], -math.inf)
        lse = torch.logsumexp(s, -1, keepdim=True)
        outs.append(torch.exp(s - lse).nan_to_num(0) @ v[:, :, keys])
        lses.append(lse)
    if has("splits averaged"):
        return (sum(outs) / len(outs)).to(dtype)  # type: ignore[union-attr]
    if has("splits summed"):
        return sum(outs).to(dtype)  # type: ignore[union-attr]
    weights = torch.softmax(torch.cat(lses, -1), -1).nan_to_num(0)
    return sum(weights[..., n : n + 1] * out for n, out in enumerate(outs)).to(dtype)  # type: ignore[union-attr]


class _Backward(torch.autograd.Function):
    """Right forward, a backward that is written out."""

    @staticmethod
    def forward(
        ctx: Any, has: Has, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        out = naive(lambda fault: False, q, k, v, mask, causal, scale, None, 0.0)
        ctx.save_for_backward(q, k, v, out)
        ctx.rest = has, mask, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out = (x.float() for x in ctx.saved_tensors)
        has, mask, causal, scale = ctx.rest
        group, dtype, d_out = q.shape[1] // k.shape[1], d_out.dtype, d_out.float()
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = q @ wide_k.mT * scale
        s = s.masked_fill(~_shown(lambda fault: False, q, k, mask, causal), -math.inf)
        p = torch.softmax(s, -1).nan_to_num(0)
        if has("mask missing in backward"):
            p = torch.exp(q @ wide_k.mT * scale - torch.logsumexp(s, -1, keepdim=True)).nan_to_num(0, 0, 0)
        if has("probs not normalised in backward"):
            p = torch.exp(s - s.amax(-1, keepdim=True)).nan_to_num(0)
        dv = p.mT @ d_out
        dp = d_out @ wide_v.mT
        delta = (d_out * out).sum(-1, keepdim=True)
        if has("delta missing"):
            delta = delta * 0
        if has("delta of the wrong sign"):
            delta = -delta
        if has("delta over the wrong axis"):
            delta = (d_out * out).sum(-2, keepdim=True).mean(-1, keepdim=True)
        ds = (dp - delta) * (1 if has("dS without probs") else p)
        factors = [
            1.0 if has(f"{name} not scaled") else scale**2 if has(f"{name} scaled twice") else scale
            for name in ("dq", "dk")
        ]
        dq = ds @ wide_k * factors[0]
        if has("dq overwritten by each tile"):
            first = (k.shape[2] - 1) // 40 * 40
            dq = ds[..., first:] @ wide_k[..., first:, :] * scale
        dk = ds.mT @ q * factors[1]
        narrow = []
        for x in (dk, dv):
            grouped = x.unflatten(1, (k.shape[1], group))
            narrow.append(grouped[:, :, -1] if has("dk, dv of one query head") else grouped.sum(2))
        return None, dq.to(dtype), narrow[0].to(dtype), narrow[1].to(dtype), None, None, None


def with_backward(
    has: Has, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, bias: Any, cap: Any
) -> Tensor:
    out: Tensor = _Backward.apply(has, q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
    return out


class Foreign:
    """One of the functions above with a fault, as a subject: dense, without LSE, and only what it has."""

    def __init__(self, function: Callable[..., Tensor], fault: str = "", **options: Any) -> None:
        self.function, self.fault, self.options = function, fault, options
        self.name = f"{function.__name__}: {fault or 'right'}"

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        case = inputs.case
        scored = self.function in (naive, blocked)
        allowed: tuple[type, ...] = (Bias, Softcap) if scored else ()
        if case.form != "dense" or not all(isinstance(score, allowed) for score in inputs.scores):
            return ("dense, and only with some scores",)
        if len(inputs.scores) > 1:
            return ("one score",)
        return ()

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> tuple[Tensor, None]:
        call = inputs.kwargs()
        case, mask = inputs.case, None
        # As SDPA is called: causal from the top left, all else as a tensor.
        causal = case.mask == (Causal("top-left"),) or (case.mask == (Causal(),) and case.seq_q == case.seq_kv)
        if inputs.masks and not causal:
            mask = torch.stack([visible(inputs, b) for b in range(case.batch)])
        q, k, v = (call[name].transpose(1, 2) if call["layout"] == "bshd" else call[name] for name in "qkv")
        score = inputs.scores[0] if inputs.scores else None
        bias = score.tensor if isinstance(score, Bias) else None
        cap = score.cap if isinstance(score, Softcap) else 0.0
        out = self.function(
            lambda fault: fault == self.fault, q, k, v, mask, causal, inputs.case.softmax_scale, bias, cap,
            **self.options,
        )  # fmt: skip
        return (out.transpose(1, 2) if call["layout"] == "bshd" else out), None


# Kernel, its fault, and the names under which it may appear: faults that no kernel without an LSE shows apart.
MEAN = ("empty rows give the mean", "hidden scores are -10000")
FOREIGN: list[tuple[Foreign, tuple[str, ...]]] = [
    *(
        (Foreign(naive, fault), (fault,))
        for fault in (
            "aligned bottom-right", "causal ignored", "causal shows the next", "causal hides itself",
            "boolean mask ignored", "boolean mask inverted", "KV head by remainder", "scale missing", "scale twice",
            "scale of head_dim_v", "scale argument ignored", "K and V exchanged", "scores rounded",
            "softcap ignored", "bias ignored",
            "bias of head 0", "masked after softmax", "hidden scores are 0", "maximum not subtracted",
            "softmax over queries", "empty rows give NaN", "probs in fp8", "not divided by the sum",
        )
    ),
    (Foreign(naive, "mean"), MEAN),
    *(
        (Foreign(blocked, fault, tile=tile), (fault,))
        for tile in (20, 50, 72, 100)
        for fault in (
            "last partial tile dropped", "tail keys unmasked", "finite initial maximum", "sum not rescaled",
            "accumulator not rescaled", "rescaled after adding", "exp2 for exp", "accumulator overwritten by each tile",
            "fp16 accumulation", "sum in low precision", "empty rows give NaN", "not divided by the sum",
        )
    ),
    (Foreign(split, "splits averaged"), ("splits averaged",)),
    (Foreign(split, "splits summed"), ("splits summed",)),
    *(
        (Foreign(with_backward, fault), (fault,))
        for fault in (
            "mask missing in backward", "probs not normalised in backward", "delta missing", "delta of the wrong sign",
            "dS without probs", "dq not scaled", "dk not scaled", "dq scaled twice", "dk scaled twice",
            "dq overwritten by each tile", "dk, dv of one query head",
        )
    ),
]  # fmt: skip
