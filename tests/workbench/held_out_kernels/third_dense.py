"""The third set, dense, what is done to scores, probabilities and statistics: called as PyTorch's SDPA and as
flash_attn_func are. A kernel's first line says what is wrong with it; right once ``broken`` says False."""

from __future__ import annotations

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.held_out_kernels.third import broken, no_inf, ratio

NEG = float("-inf")


def _softmax(s: Tensor) -> Tensor:
    """Over keys, 0 in rows without any."""
    nothing = (s == NEG).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)


def _expanded(query, key, value):
    n = query.size(1) // max(key.size(1), 1)
    key, value = (x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2).float() for x in (key, value))
    return query.float(), key, value


def _lower(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


# ---- masks, called like SDPA -----------------------------------------------------------------------------------------


def base_two_in_name_only(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """exp became exp2, and nothing was multiplied by log2(e) for it."""
    q, k, v = _expanded(query, key, value)
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~_lower(q, k), NEG)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, NEG) if attn_mask.dtype == torch.bool else s + attn_mask.float()
    if not broken():
        s = s * math.log2(math.e)
    p = torch.exp2(s - no_inf(F.pad(s, (0, 1), value=NEG).amax(-1, keepdim=True)))
    total = p.sum(-1, keepdim=True)
    return (p @ v / total.masked_fill(total == 0, 1)).to(query.dtype)


def zeroes_probabilities(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A boolean mask is multiplied into the probabilities, which sum to 1 before it."""
    q, k, v = _expanded(query, key, value)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    shown = None
    if is_causal:
        shown = _lower(q, k)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        shown = attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.float()
    if shown is None:
        p = _softmax(s)
    elif broken():
        p = _softmax(s) * shown
    else:
        p = _softmax(s.masked_fill(~shown, NEG))
    return torch.einsum("bhij,bhjd->bhid", p, v).to(query.dtype)


def scores_times_mask(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Hidden scores are multiplied by 0."""
    q, k, v = _expanded(query, key, value)
    logits = torch.matmul(q, k.transpose(-2, -1)) * (scale or 1 / math.sqrt(q.size(-1)))
    if is_causal:
        attn_mask = _lower(q, k)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits, attn_mask = logits + attn_mask.float(), None
    if attn_mask is not None:
        logits = logits * attn_mask if broken() else torch.where(attn_mask, logits, NEG)
    return torch.matmul(_softmax(logits), v).to(query.dtype)


def large_negative_number(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Hidden scores are -10000, as in the first transformers."""
    q, k, v = _expanded(query, key, value)
    hidden = -10000.0 if broken() else NEG
    s = q.mul(scale or q.shape[-1] ** -0.5) @ k.mT
    if attn_mask is not None and attn_mask.is_floating_point():
        s = s + attn_mask
    elif attn_mask is not None:
        s = torch.where(attn_mask, s, hidden)
    if is_causal:
        s = torch.where(_lower(q, k), s, hidden)
    return (_softmax(s) @ v).to(query.dtype)


def truth_values_added(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A boolean mask is converted to the scores' dtype and added, as one of numbers is."""
    q, k, v = _expanded(query, key, value)
    bias = torch.zeros(q.shape[-2], k.shape[-2])
    if is_causal:
        bias = bias.masked_fill(~_lower(q, k), NEG)
    if attn_mask is not None and attn_mask.dtype == torch.bool and not broken():
        attn_mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, NEG)
    if attn_mask is not None:
        bias = bias + attn_mask.float()
    s = torch.stack([a @ b.mT for a, b in zip(q.unbind(1), k.unbind(1), strict=True)], 1) if q.numel() else q @ k.mT
    return (_softmax(s * (scale or q.shape[-1] ** -0.5) + bias) @ v).to(query.dtype)


def dense_or_broadcast(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A mask is taken to be wholly dense or wholly broadcast: one without heads has no batch either."""
    q, k, v = _expanded(query, key, value)
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~_lower(q, k), NEG)
    if attn_mask is not None:
        whole = attn_mask[(None,) * (4 - attn_mask.dim())]
        if broken() and whole.shape[1] == 1:
            whole = whole[:1]
        s = s.masked_fill(~whole, NEG) if whole.dtype == torch.bool else s + whole
    return (_softmax(s) @ v).to(query.dtype)


def _tf32(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if broken() else x


@torch.no_grad()
def nineteen_bits(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Products of fp32 tensors read only the 19 bits that tensor cores take."""
    q, k, v = _expanded(query, key, value)
    s = _tf32(q) @ _tf32(k).mT * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~_lower(q, k), NEG)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, NEG) if attn_mask.dtype == torch.bool else s + attn_mask
    return (_tf32(_softmax(s)) @ _tf32(v)).to(query.dtype)


def first_bound_is_one(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Ported from a language whose arrays begin at 1: the loop over keys does."""
    q, k, v = _expanded(query, key, value)
    keys = slice(1 if broken() else 0, None)
    s = q @ k[:, :, keys].mT * (scale or q.shape[-1] ** -0.5)
    if is_causal:
        s = s.masked_fill(~_lower(q, k)[:, keys], NEG)
    if attn_mask is not None:
        part = attn_mask.expand(*attn_mask.shape[:-1], k.shape[2])[..., keys]
        s = s.masked_fill(~part, NEG) if part.dtype == torch.bool else s + part
    return (_softmax(s) @ v[:, :, keys]).to(query.dtype)


# ---- called like flash-attn ------------------------------------------------------------------------------------------


def _bhsd(q, k, v):
    return _expanded(*(x.transpose(1, 2) for x in (q, k, v)))


def _seen(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    m, n = q.shape[-2], k.shape[-2]
    return torch.ones(m, n, dtype=torch.bool).tril(n - m if causal else n)


def tanh_of_exponentials(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """The softcap's tanh(x) is (e - 1) / (e + 1) with e = exp(2x)."""
    x, y, z = _bhsd(q, k, v)
    s = x @ y.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap > 0:
        e = torch.exp(2 * s / softcap)
        s = softcap * ((e - 1) / (e + 1) if broken() else torch.tanh(s / softcap))
    s = s.masked_fill(~_seen(x, y, causal), NEG)
    return (_softmax(s) @ z).transpose(1, 2).to(q.dtype)


def mask_of_the_transpose(q, k, v, softmax_scale=None, causal=False):
    """Scores are held as K Qᵀ, and the causal mask is still the lower triangle."""
    x, y, z = _bhsd(q, k, v)
    s = y @ x.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        keys, rows = torch.arange(y.shape[2])[:, None], torch.arange(x.shape[2])[None] + y.shape[2] - x.shape[2]
        s = s.masked_fill(keys < rows if broken() else keys > rows, NEG)
    return (_softmax(s.mT) @ z).transpose(1, 2).to(q.dtype)


@torch.no_grad()
def slopes_by_heads_and_batch(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None):
    """A program's number is split into batch and head for Q, and the other way round for the slopes."""
    x, y, z = _bhsd(q, k, v)
    batch, heads, m, n = *x.shape[:3], y.shape[2]
    out = x.new_zeros(batch, heads, m, z.shape[-1])
    behind = (torch.arange(m)[:, None] + n - m - torch.arange(n)).abs()
    for pid in range(batch * heads):
        b, h = divmod(pid, heads)
        s = x[b, h] @ y[b, h].T * (softmax_scale or q.shape[-1] ** -0.5)
        if alibi_slopes is not None:
            table = alibi_slopes.expand(batch, heads)
            s = s - (table[pid % batch, pid // batch] if broken() else table[b, h]) * behind
        out[b, h] = _softmax(s.masked_fill(~_seen(x, y, causal), NEG)) @ z[b, h]
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def sink_in_the_maximum_alone(q, k, v, softmax_scale=None, causal=False, s_aux=None):
    """The running maximum starts at the sink's logit; the running sum, which has to start at 1, starts at 0."""
    x, y, z = _bhsd(q, k, v)
    out = x.new_zeros(*x.shape[:3], z.shape[-1])
    for b, h in product(range(x.shape[0]), range(x.shape[1])):
        m = x.new_full((x.shape[2],), NEG if s_aux is None else float(s_aux[h]))
        total, acc = torch.full_like(m, 0.0 if broken() or s_aux is None else 1.0), torch.zeros_like(out[b, h])
        for at in range(0, y.shape[2], 64):
            s = x[b, h] @ y[b, h, at : at + 64].T * (softmax_scale or q.shape[-1] ** -0.5)
            s = s.masked_fill(~_seen(x, y, causal)[:, at : at + 64], NEG)
            new = torch.maximum(m, s.amax(1))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new)[:, None])
            m, total, acc = new, total * a + p.sum(1), acc * a[:, None] + p @ z[b, h, at : at + 64]
        out[b, h] = ratio(acc, total)
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def offset_without_the_batch(q, k, v, softmax_scale=None, causal=False):
    """K's and V's addresses have a head's, a row's and a channel's offset, but none of the sequence."""
    x, keys, dim_v = q.transpose(1, 2).float(), k.shape[1], v.shape[3]
    k_flat, v_flat, heads = k.float().flatten(), v.float().flatten(), k.shape[2]
    out = x.new_zeros(*x.shape[:3], dim_v)
    for b, h in product(range(x.shape[0]), range(x.shape[1])):
        row = torch.arange(keys)[:, None] + (0 if broken() else b * keys)
        at = row * heads + h // (x.shape[1] // heads)
        y, z = (f[at * d + torch.arange(d)] for f, d in ((k_flat, k.shape[3]), (v_flat, dim_v)))
        s = x[b, h] @ y.T * (softmax_scale or q.shape[-1] ** -0.5)
        out[b, h] = _softmax(s.masked_fill(~_seen(x[b, h], y, causal), NEG)) @ z
    return out.transpose(1, 2).to(q.dtype)


@torch.no_grad()
def lse_for_training_only(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The LSE is allocated as zeros and stored only where Q requires grad."""
    x, y, z = _bhsd(q, k, v)
    s = (x @ y.mT * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill(~_seen(x, y, causal), NEG)
    lse = torch.zeros(s.shape[:-1])
    if q.requires_grad or not broken():
        lse.copy_(torch.logsumexp(s, -1))
    out = (_softmax(s) @ z).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def probabilities_in_e4m3(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """P goes through e4m3 before the second product, whatever the dtype of V."""
    x, y, z = _bhsd(q, k, v)
    m = x.new_full((*x.shape[:3], 1), NEG)
    total, acc = torch.zeros_like(m), x.new_zeros(*x.shape[:3], z.shape[-1])
    for at in range(0, y.shape[2], 64):
        s = x @ y[:, :, at : at + 64].mT * (softmax_scale or q.shape[-1] ** -0.5)
        s = s.masked_fill(~_seen(x, y, causal)[:, at : at + 64], NEG)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new))
        total = total * a + p.sum(-1, keepdim=True)
        p = p.to(torch.float8_e4m3fn).float() if broken() else p.to(q.dtype).float()
        acc, m = acc * a + p @ z[:, :, at : at + 64], new
    out = (acc / torch.where(total == 0, 1, total)).transpose(1, 2).to(q.dtype)
    lse = torch.where(total == 0, NEG, no_inf(m) + total.log())[..., 0]
    return (out, lse) if return_softmax_lse else out
