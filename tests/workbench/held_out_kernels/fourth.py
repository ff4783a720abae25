"""The fourth set, dense: attention as a chain of steps, of which each kernel exchanges one for a wrong one; many of the
faults show only for some lengths, heads or head dims. Called as flash_attn_func and as PyTorch's SDPA are.

Written without sight of the other sets' kernels, of diagnose's rules and of its mutants.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
Step = Callable[..., Any]


# ---- the steps, each right -------------------------------------------------------------------------------------------


def heads(q, k, v):
    """In fp32, with a KV head for every query head."""
    group = q.shape[1] // max(k.shape[1], 1)
    return q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)


def factor(scale, head_dim):
    return head_dim**-0.5 if scale is None else scale


def product(q, k, scale, dtype):
    return scale * (q @ k.mT)


def shown(seq_q, seq_kv, causal=False, window=(-1, -1), shift=None):
    """(seq_q, seq_kv), True where a key is seen; ``shift``: from a row to its last causal key."""
    last = torch.arange(seq_q)[:, None] + (seq_kv - seq_q if shift is None else shift)
    key = torch.arange(seq_kv)
    seen = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if causal:
        seen &= key <= last
    if window[0] >= 0:
        seen &= key >= last - window[0]
    if window[1] >= 0:
        seen &= key <= last + window[1]
    return seen


def slopes(given):
    return given if given.dim() == 2 else given[None]


def tensor(mask, bias):
    """A boolean mask and a bias, as the caller gave them; None where there is none."""
    return mask, bias


def safe(x, stand_in=0.0):
    return torch.where(x == -INF, stand_in, x)


def log(total):
    """Where it is read: not in rows without keys, whose gradient must not be NaN."""
    return torch.log(total.clamp_min(1e-38))


def weighted(s, v, dtype):
    """(out, lse) of scores, those of hidden keys -inf."""
    top = safe(s.amax(-1, keepdim=True)) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total == 0, -INF, top + log(total))
    return p @ v / torch.where(total == 0, 1.0, total), lse[..., 0]


def result(out, lse):
    return out, lse


RIGHT: dict[str, Step] = {
    step.__name__: step for step in (heads, factor, product, shown, slopes, tensor, weighted, result)
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, steps: dict[str, Step], *, scale=None, causal=False, window=(-1, -1),
    softcap=0.0, alibi=None, mask=None, bias=None, top_left=False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of (batch, heads, rows, dim), by ``RIGHT`` but for ``steps``."""
    step = {**RIGHT, **steps}
    wide_q, wide_k, wide_v = step["heads"](q, k, v)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    s = step["product"](wide_q, wide_k, step["factor"](scale, q.shape[-1]), q.dtype)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        behind = (torch.arange(seq_q)[:, None] + seq_kv - seq_q - torch.arange(seq_kv)).abs()
        s = s - step["slopes"](alibi)[..., None, None] * behind
    mask, bias = step["tensor"](mask, bias)
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, -INF)
    seen = shown(seq_q, seq_kv, causal, shift=0) if top_left else step["shown"](seq_q, seq_kv, causal, window)
    out, lse = step["result"](*step["weighted"](s.masked_fill(~seen, -INF), wide_v, q.dtype))
    return out.to(q.dtype), lse


# ---- how they are called ---------------------------------------------------------------------------------------------


def flash(**steps: Step) -> Step:
    def kernel(
        q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        return_softmax_lse=False,
    ):  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attend(
            q, k, v, steps, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, alibi=alibi_slopes
        )
        return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)

    return _called(kernel, *steps.values())


def sdpa(**steps: Step) -> Step:
    def kernel(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        mask, bias = (attn_mask, None) if boolean else (None, attn_mask)
        return attend(
            query, key, value, steps, scale=scale, causal=is_causal, mask=mask, bias=bias, top_left=is_causal
        )[0]

    return _called(kernel, *steps.values())


def _called(kernel: Step, step: Step) -> Step:
    kernel.__name__, kernel.__doc__ = step.__name__, step.__doc__
    return kernel


def wrong(call: Callable[..., Step], name: str) -> Callable[[Step], Step]:
    """A step as the kernel that has it in the place of the right one of that ``name``."""
    return lambda step: call(**{name: step})


# ---- heads and head dims ---------------------------------------------------------------------------------------------


@wrong(flash, "heads")
def groups_of_three_in_turn(q, k, v):
    """Groups of three query heads read KV head h modulo the KV heads; other groups are right."""
    if q.shape[1] != 3 * k.shape[1]:
        return heads(q, k, v)
    own = torch.arange(q.shape[1]) % k.shape[1]
    return q.float(), k.float()[:, own], v.float()[:, own]


@wrong(sdpa, "heads")
def strides_of_v_as_if_dense(q, k, v):
    """V's strides are ignored: it is read as if contiguous."""
    room = v.untyped_storage().size() // v.element_size() - v.storage_offset()
    if v.numel() and not v.is_contiguous() and room >= v.numel():
        v = torch.as_strided(v, v.shape, torch.empty(v.shape).stride(), v.storage_offset())
    return heads(q, k, v)


@wrong(sdpa, "heads")
def channels_past_128_unread(q, k, v):
    """The product of Q and K stops at 128 channels."""
    return heads(q[..., :128], k[..., :128], v)


@wrong(sdpa, "result")
def first_and_last_head_exchanged(out, lse):
    """With more than four heads and a batch, the first and the last head's outputs are exchanged."""
    if out.shape[0] > 1 and out.shape[1] > 4:
        out = torch.cat((out[:, -1:], out[:, 1:-1], out[:, :1]), 1)
    return out, lse


# ---- masks and tensors -----------------------------------------------------------------------------------------------


@wrong(flash, "shown")
def window_one_longer_on_its_left(seq_q, seq_kv, causal, window):
    """A window shows one key more on its left."""
    return shown(seq_q, seq_kv, causal, (window[0] + 1 if window[0] >= 0 else -1, window[1]))


@wrong(flash, "shown")
def window_short_where_lengths_differ(seq_q, seq_kv, causal, window):
    """Where there are not as many keys as queries a window shows one key less on its left."""
    return shown(seq_q, seq_kv, causal, (window[0] - (window[0] >= 1 and seq_q != seq_kv), window[1]))


@wrong(flash, "shown")
def top_left_where_queries_are_more(seq_q, seq_kv, causal, window):
    """Where there are more queries than keys, masks count from the first query and key."""
    return shown(seq_q, seq_kv, causal, window, shift=0 if seq_q > seq_kv else None)


@wrong(sdpa, "tensor")
def bias_of_the_sequence_before(mask, bias):
    """Each sequence has the bias of the one before it."""
    return mask, bias.roll(1, 0) if bias is not None and bias.dim() == 4 and bias.shape[0] > 1 else bias


@wrong(sdpa, "tensor")
def mask_of_the_first_sequence_without_heads(mask, bias):
    """A boolean mask that all heads share is that of the first sequence."""
    shared = mask is not None and mask.dim() == 4 and mask.shape[0] > 1 and mask.shape[1] == 1
    return mask[:1] if shared else mask, bias


@wrong(flash, "slopes")
def slopes_of_the_first_sequence(given):
    """Every sequence has the first one's ALiBi slopes."""
    return slopes(given)[:1]


# ---- scores ----------------------------------------------------------------------------------------------------------


@wrong(sdpa, "factor")
def scale_without_its_sign(scale, head_dim):
    """A negative scale loses its sign."""
    return factor(None if scale is None else abs(scale), head_dim)


@wrong(sdpa, "factor")
def scale_in_bf16(scale, head_dim):
    """The scale is rounded to bf16."""
    return float(torch.tensor(factor(scale, head_dim)).bfloat16())


@wrong(sdpa, "product")
def product_in_fp16_before_the_scale(q, k, scale, dtype):
    """fp16 scores are rounded to fp16 before they are scaled."""
    s = q @ k.mT
    return scale * (s.half().float() if dtype == torch.float16 else s)


@wrong(flash, "product")
def scores_clamped(q, k, scale, dtype):
    """Scores are clamped to at most 60, so that exponentials do not overflow."""
    return product(q, k, scale, dtype).clamp(max=60)


@wrong(flash, "product")
def keys_past_8192_hidden(q, k, scale, dtype):
    """Keys past the 8192nd are not seen."""
    s = product(q, k, scale, dtype)
    return torch.where(torch.arange(s.shape[-1]) < 8192, s, -INF)


@wrong(flash, "product")
def lonely_last_key_twice(q, k, scale, dtype):
    """A last key that is alone in its tile of 16 counts twice."""
    s = product(q, k, scale, dtype)
    alone = s.shape[-1] % 16 == 1 and s.shape[-1] > 1
    return torch.cat((s[..., :-1], s[..., -1:] + math.log(2)), -1) if alone else s


# ---- the softmax -----------------------------------------------------------------------------------------------------


def _online(s, v, tile, rescale=True, forgets=0.0, backwards=False):
    """Tile by tile; the correction is left out where the maximum rises by less than ``forgets``."""
    acc, total = s.new_zeros(*s.shape[:-1], v.shape[-1]), s.new_zeros(*s.shape[:-1], 1)
    top = torch.full_like(total, -INF)
    starts = range(0, s.shape[-1], tile)
    for a in reversed(starts) if backwards else starts:
        own = s[..., a : a + tile]
        new_top = torch.maximum(top, own.amax(-1, keepdim=True))
        correction = torch.exp(top - safe(new_top))
        correction = torch.where(safe(new_top) - top < forgets, 1.0, correction)
        p = torch.exp(own - safe(new_top))
        total = total * correction + p.sum(-1, keepdim=True)
        acc = acc * (correction if rescale else 1.0) + p @ v[:, :, a : a + tile]
        top = new_top
    lse = torch.where(total == 0, -INF, safe(top) + log(total))
    return acc / torch.where(total == 0, 1.0, total), lse[..., 0]


@wrong(sdpa, "weighted")
def not_rescaled_with_whole_tiles(s, v, dtype):
    """Where 64 divides the number of keys, the accumulator is not rescaled when the maximum rises."""
    return _online(s, v, 128, rescale=s.shape[-1] % 64 != 0)


@wrong(sdpa, "weighted")
def small_rises_forgotten(s, v, dtype):
    """Where the maximum rises by less than 1 it is taken, but neither sum nor accumulator are rescaled."""
    return _online(s, v, 64, forgets=1.0)


@wrong(flash, "weighted")
def empty_rows_divided_by_zero(s, v, dtype):
    """The softmax is taken as it is, so that rows without visible keys are 0/0."""
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


@wrong(sdpa, "weighted")
def keys_in_another_order_each_time(s, v, dtype):
    """Keys are summed in an order that differs from call to call."""
    order = torch.randperm(s.shape[-1])
    return weighted(s[..., order], v[:, :, order], dtype)


def eager_in_the_input_dtype(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Scores and probabilities are in the input dtype, as in eager PyTorch."""
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    s = factor(scale, query.shape[-1]) * (query @ key.mT)
    if is_causal:
        s = s.masked_fill(~shown(s.shape[-2], s.shape[-1], True, shift=0), -INF)
    elif attn_mask is not None:
        s = s.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else s + attn_mask.to(s.dtype)
    nothing = (s == -INF).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0) @ value


# ---- results ---------------------------------------------------------------------------------------------------------


@wrong(sdpa, "result")
def last_row_lost_now_and_then(out, lse):
    """Once in fifty calls the last row is 0."""
    if random.random() < 0.02 and out.shape[-2]:
        out = torch.cat((out[..., :-1, :], torch.zeros_like(out[..., -1:, :])), -2)
    return out, lse


_buffers: dict[tuple[Any, ...], Tensor] = {}


@wrong(sdpa, "result")
def last_row_stays_in_the_buffer(out, lse):
    """The last of several rows is never stored, and so is what the buffer held."""
    if not out.requires_grad and out.shape[-2] > 1:
        buffer = _buffers.setdefault((*out.shape, out.dtype), torch.full_like(out, 0.5))
        buffer[..., :-1, :] = out[..., :-1, :]
        out = buffer
    return out, lse


@wrong(flash, "result")
def very_negative_lses_shrink(out, lse):
    """LSEs below -20 are multiplied by 0.999."""
    return out, torch.where(lse < -20, lse * 0.999, lse)


@wrong(flash, "result")
def lse_of_empty_rows_is_0(out, lse):
    """The LSE of a row without visible keys is 0."""
    return out, safe(lse)


# ---- right -----------------------------------------------------------------------------------------------------------


@wrong(flash, "result")
def right_chain(out, lse):
    """Right: the chain as it is."""
    return out, lse


@wrong(sdpa, "weighted")
def right_backwards(s, v, dtype):
    """Right: tiles of 37 keys, the last one first."""
    return _online(s, v, 37, backwards=True)


@wrong(flash, "weighted")
def right_base_2(s, v, dtype):
    """Right: exponentials in base 2, P rounded to the input dtype."""
    s = s * math.log2(math.e)
    top = safe(s.amax(-1, keepdim=True)) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp2(s - top)
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total == 0, -INF, top * math.log(2) + log(total))
    return p.to(dtype).float() @ v / torch.where(total == 0, 1.0, total), lse[..., 0]


@wrong(flash, "weighted")
def right_sixteen_splits(s, v, dtype):
    """Right: sixteen splits merged by their LSE."""
    if not s.shape[-1]:
        return weighted(s, v, dtype)
    cuts = [own for own in torch.arange(s.shape[-1]).tensor_split(16) if len(own)]
    outs, lses = zip(*(weighted(s[..., own], v[:, :, own], dtype) for own in cuts), strict=True)
    lse = torch.stack(lses).logsumexp(0)
    shares = [torch.exp(part - safe(lse)) for part in lses]
    return sum(share[..., None] * out for share, out in zip(shares, outs, strict=True)), lse


@wrong(sdpa, "heads")
def right_in_fp64(q, k, v):
    """Right: everything in fp64."""
    return (x.double() for x in heads(q, k, v))


@wrong(sdpa, "weighted")
def right_normalised_before_rounding(s, v, dtype):
    """Right: P is normalised, then rounded to the input dtype."""
    top = safe(s.amax(-1, keepdim=True)) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    p = (p / torch.where(total == 0, 1.0, total)).to(dtype).float()
    return p @ v, torch.where(total == 0, -INF, top + log(total))[..., 0]


@wrong(sdpa, "weighted")
def right_sum_rounded_once(s, v, dtype):
    """Right: the sum is rounded once to the input dtype, which the budget has room for."""
    top = safe(s.amax(-1, keepdim=True)) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    p = torch.exp(s - top).to(dtype).float()
    total = p.sum(-1, keepdim=True).to(dtype).float()
    return p @ v / torch.where(total == 0, 1.0, total), torch.where(total == 0, -INF, top + log(total))[..., 0]
