"""The seventh set: ALiBi, called as flash_attn_func is, and masks and biases that are tensors, called as SDPA. Right
inside ``third.repaired()``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, stored, tiles, visible
from workbench.held_out_kernels.third import broken, no_inf

# ---- ALiBi -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def distance_within_the_tile(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_softmax_lse=False):
    """ALiBi's distance is that from a key's number in its tile of 32, to which the tile's own beginning is not added:
    keys past the first tile seem further away than they are, or nearer."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    state, place = Running(Q, v.shape[-1]), torch.arange(M)[:, None] + N - M
    for keys in tiles(N, 32):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        if alibi_slopes is not None:
            number = keys - keys[0] if broken() else keys
            s = s - alibi_slopes.float()[..., None, None] * (place - number).abs()
        state.add(s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


@torch.no_grad()
def slopes_beside_log2_e(q, k, v, softmax_scale=None, causal=False, alibi_slopes=None, return_softmax_lse=False):
    """The scale carries log2 e for exp2 and ALiBi's slopes do not: they act as if they were ln 2 of what they are."""
    M, N, log2e = q.shape[1], k.shape[1], math.log2(math.e)
    Q, K, V = heads_first(q, k, v)
    top = Q.new_full((*Q.shape[:-1], 1), -INF)
    total, acc = torch.zeros_like(top), Q.new_zeros(*Q.shape[:-1], v.shape[-1])
    for keys in tiles(N, 48):
        s = Q @ K[:, :, keys].mT * (scale_of(q, softmax_scale) * log2e)
        if alibi_slopes is not None:
            slope = alibi_slopes.float()[..., None, None] * (1.0 if broken() else log2e)
            s = s - slope * (torch.arange(M)[:, None] + N - M - keys).abs()
        s = s.where(visible(torch.arange(M), keys, N - M, None, 0 if causal else None), -INF)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        kept, p = torch.exp2(top - no_inf(new)), torch.exp2(s - no_inf(new))
        top, total, acc = new, total * kept + p.sum(-1, keepdim=True), acc * kept + p @ V[:, :, keys]
    out = acc / torch.where(total == 0, 1.0, total)
    return stored(q, out, (top + total.log2()).squeeze(-1) * math.log(2), return_softmax_lse)


# ---- masks and biases that are tensors -------------------------------------------------------------------------------


def _by_keys(query, key, value, scale, enable_gqa, size, modify) -> Tensor:
    """All rows at once, ``size`` keys at a time. ``modify(scores, keys)``: fp32 scores of all rows and some keys."""
    group = query.shape[1] // max(key.shape[1], 1) if enable_gqa else 1
    K, V = (x.float().repeat_interleave(group, 1) for x in (key, value))
    Q = query.float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    state = Running(Q, value.shape[-1])
    for keys in tiles(key.shape[2], size):
        state.add(modify(Q @ K[:, :, keys].mT, keys), V[:, :, keys])
    return state.out.to(query.dtype)


def _whole(attn_mask: Tensor) -> Tensor:
    """Something to add, of four dimensions."""
    term = torch.zeros(()).where(attn_mask, -INF) if attn_mask.dtype == torch.bool else attn_mask.float()
    return term.view((1,) * (4 - term.dim()) + term.shape)


def _under_causal(s: Tensor, keys: Tensor, shift: int) -> Tensor:
    return s.masked_fill(keys > torch.arange(s.shape[-2])[:, None] + shift, -INF)


@torch.no_grad()
def a_mask_only_hides(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A mask of floating point is made a boolean one, which hides where it is -inf: finite numbers, a bias, do not
    count. Boolean masks are right."""

    def modify(s, keys):
        if attn_mask is not None:
            term = _whole(attn_mask).expand(*query.shape[:3], key.shape[2])[..., keys]
            if broken():
                term = torch.zeros(()).where(term > -INF, -INF)
            s = s + term
        return _under_causal(s, keys, 0) if is_causal else s

    return _by_keys(query, key, value, scale, enable_gqa, 64, modify)


@torch.no_grad()
def stride_of_an_axis_of_one(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A mask's strides are used as they are also where its size is 1, instead of 0: a mask without heads is, for head
    h, that of the sequence h further on. Masks with all their dimensions are right."""

    def modify(s, keys):
        if attn_mask is not None:
            term = _whole(attn_mask)
            at: Tensor | int = 0
            for axis, extent in enumerate((*query.shape[:3], key.shape[2])):
                stride = math.prod(term.shape[axis + 1 :])
                stride = 0 if term.shape[axis] == 1 and not broken() else stride
                at = at + (torch.arange(extent) * stride).view(-1, *(1,) * (3 - axis))
            s = s + term.reshape(-1)[at % max(term.numel(), 1)][..., keys]
        return _under_causal(s, keys, 0) if is_causal else s

    return _by_keys(query, key, value, scale, enable_gqa, 48, modify)


@torch.no_grad()
def causal_as_another_library_has_it(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """is_causal counts from the last query and key, as in the kernel that was ported, where SDPA's counts from the
    first: wrong where there are more keys than queries or fewer. As many of them is right."""
    shift = key.shape[2] - query.shape[2] if broken() else 0

    def modify(s, keys):
        if attn_mask is not None:
            s = s + _whole(attn_mask).expand(*query.shape[:3], key.shape[2])[..., keys]
        return _under_causal(s, keys, shift) if is_causal else s

    return _by_keys(query, key, value, scale, enable_gqa, 80, modify)
