"""The eighth set: masks and biases that are tensors, called as SDPA. Right inside ``third.repaired()``."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF
from workbench.held_out_kernels.seventh import Running, tiles
from workbench.held_out_kernels.third import broken, no_inf


def _grouped(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """fp32, K and V once for each query head."""
    group = query.shape[1] // max(key.shape[1], 1) if enable_gqa else 1
    K, V = (x.float().repeat_interleave(group, 1) for x in (key, value))
    return query.float(), K, V


def _term(attn_mask: Tensor) -> Tensor:
    """Something to add, of four dimensions."""
    term = torch.zeros(()).where(attn_mask, -INF) if attn_mask.dtype == torch.bool else attn_mask.float()
    return term.view((1,) * (4 - term.dim()) + term.shape)


def _causal(s: Tensor, first: int = 0) -> Tensor:
    """From the top left; ``first``: the number of the first key."""
    keys = torch.arange(first, first + s.shape[-1])
    return s.masked_fill(keys > torch.arange(s.shape[-2])[:, None], -INF)


def _softmax(s: Tensor, V: Tensor) -> Tensor:
    if not s.shape[-1]:
        return s.new_zeros(*s.shape[:-1], V.shape[-1])
    p = torch.exp(s - no_inf(s.amax(-1, keepdim=True)))
    total = p.sum(-1, keepdim=True)
    return p @ V / torch.where(total == 0, 1.0, total)


@torch.no_grad()
def bias_added_without_alpha(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """With a floating point mask scores come from one baddbmm(mask, Q, K), whose alpha, the scale, was not given.
    Boolean masks and none take the other way, which is right."""
    Q, K, V = _grouped(query, key, value, enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    B, H, M, N = *Q.shape[:3], K.shape[2]
    if attn_mask is not None and attn_mask.is_floating_point():
        bias = _term(attn_mask).expand(B, H, M, N).reshape(B * H, M, N)
        s = torch.baddbmm(bias, Q.flatten(0, 1), K.flatten(0, 1).mT, alpha=1.0 if broken() else scale)
        s = s.view(B, H, M, N)
    else:
        s = Q @ K.mT * scale
        s = s if attn_mask is None else s + _term(attn_mask)
    return _softmax(_causal(s) if is_causal else s, V).to(query.dtype)


@torch.no_grad()
def mask_of_the_kv_head(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A block has one KV head and its group of query heads, and reads the mask or bias at the KV head's number for all
    of them. Without groups, and for masks without heads, it is right."""
    Q, _, _ = _grouped(query, key, value, enable_gqa)
    (B, H, M, _), (G, N) = query.shape, key.shape[1:3]
    group = H // max(G, 1)
    out = query.new_zeros(B, H, M, value.shape[-1])
    for g in range(G):
        heads = torch.arange(g * group, (g + 1) * group)
        state = Running(Q[:, heads], value.shape[-1])
        for keys in tiles(N, 40):
            s = Q[:, heads] @ key[:, g : g + 1, keys].float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
            if attn_mask is not None:
                term = _term(attn_mask).expand(B, H, M, N)[..., keys]
                s = s + (term[:, g : g + 1] if broken() else term[:, heads])
            s = _causal(s, int(keys[0])) if is_causal else s
            state.add(s, value[:, g : g + 1, keys].float())
        out[:, heads] = state.out.to(query.dtype)
    return out


@torch.no_grad()
def taken_for_key_padding(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A boolean mask is made one of key padding, by its first row: that row is the mask of all queries. Masks with one
    row, and those of floating point, are right."""
    Q, K, V = _grouped(query, key, value, enable_gqa)
    s = Q @ K.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        term = _term(attn_mask)
        s = s + (term[:, :, :1] if broken() and attn_mask.dtype == torch.bool else term)
    return _softmax(_causal(s) if is_causal else s, V).to(query.dtype)


@torch.no_grad()
def softmax_of_nothing(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """torch.softmax of scores that are all -inf: rows of which a mask hides every key are NaN."""
    Q, K, V = _grouped(query, key, value, enable_gqa)
    s = Q @ K.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    s = s if attn_mask is None else s + _term(attn_mask)
    s = _causal(s) if is_causal else s
    p = torch.softmax(s, -1)
    if not broken():
        p = p.masked_fill((s == -INF).all(-1, keepdim=True), 0.0)
    return (p @ V).to(query.dtype)
