"""Wrong kernels whose LSE is wrong or whose arithmetic is too coarse, in attnworks' own call: attention(q, k, v, mask,
scores, scale, layout, return_lse)."""

import math

import torch
from torch import Tensor

import attnworks as aw

INF = math.inf


def _declined(what) -> NotImplementedError:
    return NotImplementedError(f"does not do {what!r}")


def _scores(q: Tensor, k: Tensor, mask, scale) -> Tensor:
    """fp32 scores of (batch, heads, rows, dim) with a mask that is None, Causal, Window or boolean."""
    q, k = q.float(), k.float()
    s = (
        q
        @ k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1).mT
        * (q.shape[-1] ** -0.5 if scale is None else scale)
    )
    return s if mask is None else s.masked_fill(~_visible(mask, *s.shape[-2:]), -INF)


def _visible(mask, seq_q: int, seq_kv: int) -> Tensor:
    if isinstance(mask, Tensor):
        return mask
    if not isinstance(mask, aw.Causal | aw.Window):
        raise _declined(mask)
    shift = seq_kv - seq_q if mask.align == "bottom-right" else 0
    ahead = torch.arange(seq_kv) - torch.arange(seq_q)[:, None] - shift
    left, right = (None, 0) if isinstance(mask, aw.Causal) else (mask.left, mask.right)
    return (ahead >= (-INF if left is None else -left)) & (ahead <= (INF if right is None else right))


def _heads(v: Tensor, q: Tensor) -> Tensor:
    return v.float().repeat_interleave(q.shape[1] // max(v.shape[1], 1), 1)


def _top(s: Tensor) -> Tensor:
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -INF)
    return top.masked_fill(top == -INF, 0)


def lse_base_2(q, k, v, *, mask=None, scores=(), scale=None, return_lse=False):
    """The LSE is in base 2."""
    if scores:
        raise _declined(scores)
    s = _scores(q, k, mask, scale) * math.log2(math.e)
    top = _top(s)
    p = torch.exp2(s - top)
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    lse = (top + torch.log2(some)).masked_fill(total == 0, -INF)[..., 0]
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, lse) if return_lse else out


def lse_half_converted(q, k, v, *, mask=None, scale=None, return_lse=False):
    """The LSE's maximum is in base 2 and its logarithm of the sum is natural."""
    s = _scores(q, k, mask, scale) * math.log2(math.e)
    top = _top(s)
    p = torch.exp2(s - top)
    total = p.sum(-1)
    some = total.masked_fill(total == 0, 1)
    out = (p @ _heads(v, q) / some[..., None]).to(q.dtype)
    return (out, (top[..., 0] + some.log()).masked_fill(total == 0, -INF)) if return_lse else out


def lse_of_the_sum_only(q, k, v, *, mask=None, scale=None, return_lse=False):
    """The LSE lacks the maximum: it is the logarithm of the running sum alone."""
    s = _scores(q, k, mask, scale)
    p = torch.exp(s - _top(s))
    total = p.sum(-1, keepdim=True)
    out = (p / total.masked_fill(total == 0, 1) @ _heads(v, q)).to(q.dtype)
    return (out, total.log()[..., 0]) if return_lse else out


def lse_of_empty_rows(q, k, v, *, mask=None, scale=None, return_lse=False):
    """The LSE of a row without keys is a large negative number instead of -inf."""
    s = _scores(q, k, mask, scale)
    p = torch.exp(s - _top(s))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    lse = (_top(s) + some.log()).masked_fill(total == 0, -1e30)[..., 0]
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, lse) if return_lse else out


def acc_in_half(q, k, v, *, mask=None, scale=None, return_lse=False):
    """The accumulator is kept in the input dtype, rounded after every 16 keys."""
    s = _scores(q, k, mask, scale)
    top, values = _top(s), _heads(v, q)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    acc = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for j in range(0, k.shape[2], 16):
        acc = (acc.float() + p[..., j : j + 16] @ values[:, :, j : j + 16]).to(q.dtype)
    out = (acc.float() / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def sum_in_half(q, k, v, *, mask=None, scale=None, return_lse=False):
    """The running sum is kept in the input dtype, rounded after every tile of 16 keys."""
    s = _scores(q, k, mask, scale)
    top = _top(s)
    p = torch.exp(s - top)
    total = torch.zeros(*q.shape[:3], 1, dtype=q.dtype)
    for part in p.split(16, -1) if p.shape[-1] else ():
        total = (total.float() + part.sum(-1, keepdim=True)).to(q.dtype)
    some = total.float().masked_fill(total == 0, 1)
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def products_in_half(q, k, v, *, mask=None, scale=None, return_lse=False):
    """Q K^T is summed in the input dtype, 8 channels at a time."""
    width, group = q.shape[-1], q.shape[1] // max(k.shape[1], 1)
    keys = k.repeat_interleave(group, 1)
    s = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype)
    for c in range(0, width, 8):
        s = (s.float() + q[..., c : c + 8].float() @ keys[..., c : c + 8].float().mT).to(q.dtype)
    s = s.float() * (width**-0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~_visible(mask, *s.shape[-2:]), -INF)
    top = _top(s)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def probs_in_e5m2(q, k, v, *, mask=None, scale=None, return_lse=False):
    """P is rounded to 8 bits before it meets V, whatever the input dtype."""
    s = _scores(q, k, mask, scale)
    top = _top(s)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    coarse = p + (p.detach().to(torch.float8_e5m2).float() - p.detach())
    out = (coarse @ _heads(v, q) / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def probs_in_bf16(q, k, v, *, mask=None, scale=None, return_lse=False):
    """P is rounded to bf16 before it meets V, also for fp32 inputs."""
    s = _scores(q, k, mask, scale)
    top = _top(s)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    coarse = p + (p.detach().bfloat16().float() - p.detach())
    out = (coarse @ _heads(v, q) / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def _sinks(scores):
    if any(not isinstance(score, aw.Sink) for score in scores):
        raise _declined(scores)
    return scores[0].logits.float().view(1, -1, 1, 1) if scores else None


def sink_unread(q, k, v, *, mask=None, scores=(), scale=None, return_lse=False):
    """The sink is ignored."""
    _sinks(scores)
    s = _scores(q, k, mask, scale)
    p = torch.exp(s - _top(s))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, (_top(s) + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def sink_scaled(q, k, v, *, mask=None, scores=(), scale=None, return_lse=False):
    """The sink's logit is multiplied by the scale."""
    sink, s = _sinks(scores), _scores(q, k, mask, scale)
    if sink is not None:
        sink = sink * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = torch.cat((s, sink.expand(*s.shape[:3], 1)), -1)
    p = torch.exp(s - _top(s))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    out = (p[..., : k.shape[2]] @ _heads(v, q) / some).to(q.dtype)
    return (out, (_top(s) + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def sink_after_the_maximum(q, k, v, *, mask=None, scores=(), scale=None, return_lse=False):
    """The sink is left out of the maximum, so that a large one overflows."""
    sink, s = _sinks(scores), _scores(q, k, mask, scale)
    top = _top(s)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    some = total.masked_fill(total == 0, 1)
    out = (p @ _heads(v, q) / some).to(q.dtype)
    return (out, (top + some.log()).masked_fill(total == 0, -INF)[..., 0]) if return_lse else out


def sink_not_in_lse(q, k, v, *, mask=None, scores=(), scale=None, return_lse=False):
    """The sink enters the output but not the LSE."""
    sink, s = _sinks(scores), _scores(q, k, mask, scale)
    own = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -INF)
    if sink is not None:
        s = torch.cat((s, sink.expand(*s.shape[:3], 1)), -1)
    p = torch.exp(s - _top(s))
    total = p.sum(-1, keepdim=True)
    out = (p[..., : k.shape[2]] @ _heads(v, q) / total.masked_fill(total == 0, 1)).to(q.dtype)
    return (out, own) if return_lse else out
