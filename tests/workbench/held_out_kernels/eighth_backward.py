"""The eighth set: right forward, faults in a backward of its own, called as flash_attn_func is. Right inside
``third.repaired()``."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, blank, ends, tiles, visible
from workbench.held_out_kernels.third import broken, no_inf

TILE_Q, TILE_KV = 32, 64


class _Attend(torch.autograd.Function):
    """``fault``: which of the faults below its backward has."""

    @staticmethod
    def forward(ctx, q, k, v, scale, left, right, cap, fault):
        M, N = q.shape[1], k.shape[1]
        Q, K, V = heads_first(q, k, v)
        out, lse = blank(q, Q, v)
        for rows in tiles(M, 48):
            state = Running(Q[:, :, rows], v.shape[-1])
            for keys in tiles(N, 40):
                s = Q[:, :, rows] @ K[:, :, keys].mT * scale
                s = cap * torch.tanh(s / cap) if cap else s
                state.add(s.where(visible(rows, keys, N - M, left, right), -INF), V[:, :, keys])
            lse[:, :, rows], out[:, :, rows] = state.state
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, left, right, cap, fault
        return out.transpose(1, 2).to(q.dtype), lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        scale, left, right, cap, fault = ctx.options
        wrong = fault if broken() else ""
        M, N, (G, D) = q.shape[1], k.shape[1], k.shape[2:]
        (Q, K, V), g = heads_first(q, k, v), d_out.transpose(1, 2).float()
        delta = (g * out).sum(-1) - d_lse
        if wrong == "causal":
            right = 0
        if wrong == "window":
            left = None
        dims = min(D, v.shape[-1]) if wrong == "channels" else v.shape[-1]

        def derived(Q, g, lse, delta, K, V, sees):
            """P and dS, of rows and keys that belong together."""
            raw = Q @ K.mT * scale
            bent = cap * torch.tanh(raw / cap) if cap else raw
            s = bent.where(sees, -INF)
            p = torch.exp(s - no_inf(lse)[..., None])
            ds = p * (g[..., :dims] @ V[..., :dims].mT - delta[..., None])
            if cap:
                ds = ds * (1 - ((s if wrong == "cap" else bent) / cap) ** 2)
            return p, ds

        dq, dk, dv = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        chance = random.SystemRandom()
        for rows in tiles(M, TILE_Q):
            for keys in tiles(N, TILE_KV):
                x, y, sees = K[:, :, keys], V[:, :, keys], visible(rows, keys, N - M, left, right)
                spare = TILE_KV - len(keys) if wrong == "padding" and len(keys) < TILE_KV else 0
                if spare:
                    x, y = (torch.nn.functional.pad(z, (0, 0, 0, spare)) for z in (x, y))
                    sees = torch.nn.functional.pad(sees, (0, spare), value=right is None)
                rowwise = (z[:, :, rows] for z in (Q, g, lse, delta))
                p, ds = derived(*rowwise, x, y, sees)
                lost = wrong == "race" and chance.random() < 0.1
                if not lost:
                    dq[:, :, rows] += ds @ x * scale
        flat = [z.flatten(0, 2) for z in (Q, g, lse, delta)]
        heads = torch.arange(Q.shape[0] * Q.shape[1]).view(*Q.shape[:2], 1) * M
        for keys in tiles(N, TILE_KV):
            for rows in tiles(M, TILE_Q):
                if wrong == "rows":
                    rows = torch.arange(int(rows[0]), int(rows[0]) + TILE_Q)
                at = heads + rows
                loaded = [z[at.clamp(max=len(z) - 1)] for z in flat]
                there = visible(rows, keys, N - M, left, right) & (at < len(flat[0]))[..., None]
                p, ds = derived(*loaded, K[:, :, keys], V[:, :, keys], there)
                dk[:, :, keys] += ds.mT @ (loaded[0] * scale) * (scale if wrong == "scale" else 1.0)
                dv[:, :, keys] += p.mT @ loaded[1]
        dq, dk, dv = dq.transpose(1, 2).to(q.dtype), _of_groups(dk, G, wrong), _of_groups(dv, G, wrong)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _of_groups(grad: Tensor, heads_kv: int, wrong: str) -> Tensor:
    """(batch, heads_q, keys, dim) summed over each group, as (batch, keys, heads_kv, dim)."""
    group = grad.shape[1] // max(heads_kv, 1)
    if wrong == "groups":
        return grad.unflatten(1, (group, heads_kv)).sum(1).transpose(1, 2)
    return grad.unflatten(1, (heads_kv, group)).sum(2).transpose(1, 2)


def _call(q, k, v, softmax_scale, causal, fault, lse, window_size=(-1, -1), softcap=0.0):
    both = _Attend.apply(q, k, v, scale_of(q, softmax_scale), *ends(window_size, causal), softcap, fault)
    return both if lse else both[0]


def gradients_of_heads_in_turn(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """dK and dV of the query heads are viewed as (group, heads_kv) for their sum, not as (heads_kv, group): heads in
    turn, not neighbours, are added up. Forward has it right; without groups, and with one KV head, it is the same."""
    return _call(q, k, v, softmax_scale, causal, "groups", return_softmax_lse)


def dp_as_wide_as_the_keys(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """dP = dO Vᵀ goes through as many channels as Q and K have: where V has more, dQ and dK lack the others. V's
    width, dV and delta are right."""
    return _call(q, k, v, softmax_scale, causal, "channels", return_softmax_lse)


def keys_gradient_of_scaled_queries(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The kernel for dK and dV loads queries that have the scale already, and dK is multiplied by it at its end."""
    return _call(q, k, v, softmax_scale, causal, "scale", return_softmax_lse)


def backward_is_always_causal(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Backward has no causal flag and masks always, as in training; forward obeys it. With causal it is right."""
    return _call(q, k, v, softmax_scale, causal, "causal", return_softmax_lse)


def backward_without_the_left_end(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_softmax_lse=False
):  # fmt: skip
    """Of a window backward knows the right end, or causal; the left one is not passed on."""
    return _call(q, k, v, softmax_scale, causal, "window", return_softmax_lse, window_size)


def cap_of_hidden_scores(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False
):  # fmt: skip
    """The softcap's derivative, 1 - (s / cap)², is made of scores that are masked already: -inf gives -inf, times the
    P of 0 NaN. Without hidden keys, or a softcap, it is right."""
    return _call(q, k, v, softmax_scale, causal, "cap", return_softmax_lse, window_size, softcap)


def rows_of_the_head_that_follows(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The loop for dK and dV loads whole tiles of 32 rows without a bound: past a head's last row it goes on with the
    next head's, with their dO, LSE and delta. Whole tiles are right."""
    return _call(q, k, v, softmax_scale, causal, "rows", return_softmax_lse)


def addition_without_an_atomic(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Blocks for several tiles of keys add to the same dQ, and not atomically: now and then a tile's part is lost."""
    return _call(q, k, v, softmax_scale, causal, "race", return_softmax_lse)


def padded_keys_overflow(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Without causal the zeros that fill the last tile of 64 keys are not masked in backward: they score 0, and where
    the LSE is below -88 their P is infinite; times the zeros of K that is a dQ of NaN. Otherwise nothing is left of
    them."""
    return _call(q, k, v, softmax_scale, causal, "padding", return_softmax_lse)
