"""The third set, packed sequences, called as flash_attn_varlen_func and attnworks.attention_varlen are. A kernel's
first line says what is wrong with it; right once ``broken`` says False."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attnworks.masks import Causal
from workbench.held_out_kernels.third import broken, no_inf

NEG = float("-inf")


def _spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor):
    """Each sequence's rows and keys, as slices."""
    pairs = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs]


def _causal(rows: int, keys: int) -> Tensor:
    return torch.arange(keys)[None] <= torch.arange(rows)[:, None] + (keys - rows)


def _attend(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(heads, rows, keys) and (heads, keys, dim)."""
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - no_inf(lse)[..., None]) @ v, lse


def _logits(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """(rows, heads, dim) to (heads, rows, keys), K with its own heads."""
    k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1).float()
    return torch.einsum("ihd,jhd->hij", q.float(), k) * (scale or q.shape[-1] ** -0.5)


def _values(q: Tensor, v: Tensor) -> Tensor:
    return v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), 1).transpose(0, 1).float()


# ---- which keys ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tiles_run_into_the_next(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """The last tile of 32 keys has no bound of its own: what it holds of the next sequence takes part."""
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        length, count = keys.stop - keys.start, rows.stop - rows.start
        read = min(-(-length // 32) * 32, len(k) - keys.start) if broken() else length
        m = torch.full((q.shape[1], count), NEG)
        total, acc = torch.zeros_like(m), torch.zeros(q.shape[1], count, v.shape[2])
        for t in range(0, read, 32):
            part = slice(keys.start + t, keys.start + min(t + 32, read))
            s = _logits(q[rows], k[part], softmax_scale)
            if causal:
                j = torch.arange(t, t + s.shape[-1])
                s = s.masked_fill(j > torch.arange(count)[:, None] + length - count, NEG)
            new = torch.maximum(m, s.amax(-1))
            a, p = torch.exp(m - no_inf(new)), torch.exp(s - no_inf(new)[..., None])
            m, total, acc = new, total * a + p.sum(-1), acc * a[..., None] + p @ _values(q, v[part])
        out[rows] = (acc / torch.where(total == 0, 1, total)[..., None]).transpose(0, 1).to(q.dtype)
    return out


def values_by_the_queries_offsets(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """K is read from cu_seqlens_k, V from cu_seqlens_q."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s, length = _logits(q[rows], k[keys], softmax_scale), keys.stop - keys.start
        first = min(rows.start, len(v) - length) if broken() else keys.start
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        found.append(_attend(s, _values(q, v[first : first + length]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


def offsets_without_their_zero(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """The keys' offsets are read as a cumulative sum that does not begin with 0: each sequence reads from its end."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        length = keys.stop - keys.start
        first = min(keys.stop, len(k) - length) if broken() else keys.start
        s = _logits(q[rows], k[first : first + length], softmax_scale)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        found.append(_attend(s, _values(q, v[first : first + length]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


def empty_sequences_left_out(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Sequences without queries are taken out of the queries' offsets, and stay in the keys'."""
    spans = _spans(cu_seqlens_q, cu_seqlens_k)
    if broken():
        some = [rows for rows, _ in spans if rows.stop > rows.start]
        spans = list(zip(some, [keys for _, keys in spans], strict=False))
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    parts = []
    for rows, keys in spans:
        s = _logits(q[rows], k[keys], softmax_scale)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        parts.append(_attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat([out[:0], *parts])


@torch.no_grad()
def key_tiles_by_division(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """A sequence has len // 24 tiles of keys."""
    Q, K, V = (x.float().numpy() for x in (q, k, v))
    cq, ck = cu_seqlens_q.numpy(), cu_seqlens_k.numpy()
    out = np.zeros((*Q.shape[:2], V.shape[2]), np.float32)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(len(cq) - 1, Q.shape[1]):
            n, g = ck[b + 1] - ck[b], h * K.shape[1] // Q.shape[1]
            x = Q[cq[b] : cq[b + 1], h] * np.float32(softmax_scale or Q.shape[2] ** -0.5)
            m = np.full(len(x), -np.inf, np.float32)
            den, acc = np.zeros(len(x), np.float32), np.zeros((len(x), V.shape[2]), np.float32)
            for tile in range(n // 24 if broken() else -(-n // 24)):
                j = np.arange(tile * 24, min(tile * 24 + 24, n))
                s = x @ K[ck[b] + j, g].T
                if causal:
                    s[j[None] > np.arange(len(x))[:, None] + n - len(x)] = -np.inf
                new = np.maximum(m, s.max(1))
                base = np.where(np.isneginf(new), 0, new)
                a, p = np.exp(m - base), np.exp(s - base[:, None])
                m, den, acc = new, den * a + p.sum(1), acc * a[:, None] + p @ V[ck[b] + j, g]
            out[cq[b] : cq[b + 1], h] = acc / np.where(den == 0, 1, den)[:, None]
    return torch.from_numpy(out).to(q.dtype)


def right_end_one_further(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """The window's right end is turned into an exclusive bound, and still compared with <=."""
    left, right = window_size
    right = 0 if causal else right
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = _logits(q[rows], k[keys], softmax_scale)
        j, i = torch.arange(s.shape[2]), torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1]
        if left >= 0:
            s = s.masked_fill(j < i - left, NEG)
        if right >= 0:
            end = i + right + (1 if broken() and not causal else 0)
            s = s.masked_fill(j > end, NEG)
        found.append(_attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


def no_token_sees_itself(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Causal is strict: a token does not see itself, unless it is its sequence's first."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = _logits(q[rows], k[keys], softmax_scale)
        if causal:
            j, i = torch.arange(s.shape[2]), torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1]
            s = s.masked_fill(~((j < i) | (j == 0) & (i == 0)) if broken() else j > i, NEG)
        found.append(_attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


# ---- heads, scale, scores --------------------------------------------------------------------------------------------


def head_over_the_kv_heads(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """The KV head is the query head modulo the number of KV heads."""
    heads = torch.arange(q.shape[1])
    heads = heads % max(k.shape[1], 1) if broken() else heads // (q.shape[1] // max(k.shape[1], 1))
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = torch.matmul(q[rows].transpose(0, 1).float(), k[keys][:, heads].permute(1, 2, 0).float())
        s = s * (softmax_scale or q.shape[2] ** -0.5)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        found.append(_attend(s, v[keys][:, heads].transpose(0, 1).float())[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


def scale_after_padding(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """The head dim is padded to a power of 2 on entry, and the default scale is made from it."""
    dim = q.shape[2]
    padded = 1 << (dim - 1).bit_length()
    q, k = (torch.nn.functional.pad(x, (0, padded - dim)) for x in (q, k))
    scale = softmax_scale or (padded if broken() else dim) ** -0.5
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = _logits(q[rows], k[keys], scale)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        found.append(_attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


def distances_between_row_numbers(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False,
                                  alibi_slopes=None):  # fmt: skip
    """ALiBi's distance is |row - key| within a sequence, however many more keys than rows it has."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for b, (rows, keys) in enumerate(_spans(cu_seqlens_q, cu_seqlens_k)):
        s = _logits(q[rows], k[keys], softmax_scale)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            origin = 0 if broken() else s.shape[2] - s.shape[1]
            far = (torch.arange(s.shape[1])[:, None] + origin - torch.arange(s.shape[2])).abs()
            s = s - slopes[:, None, None] * far
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        found.append(_attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype))
    return torch.cat(found)


# ---- what is returned ------------------------------------------------------------------------------------------------


def rows_before_the_first_key(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """A sequence with more queries than keys: causal rows before its first key are 0/0."""
    found = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = _logits(q[rows], k[keys], softmax_scale)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        if s.shape[2] == 0:
            p = s
        elif broken():
            p = torch.softmax(s, -1)
        else:
            p = torch.softmax(s, -1).masked_fill((s == NEG).all(-1, keepdim=True), 0)
        found.append((p @ _values(q, v[keys])).transpose(0, 1).to(q.dtype))
    return torch.cat(found)


@torch.no_grad()
def splits_are_added(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Splits of 64 keys are normalised each by itself and then summed by atomics."""
    out = torch.zeros(*q.shape[:2], v.shape[2])
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s, z = _logits(q[rows], k[keys], softmax_scale), _values(q, v[keys])
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        whole = torch.logsumexp(s, -1)
        for t in range(0, s.shape[2], 64):
            part, lse = _attend(s[..., t : t + 64], z[:, t : t + 64])
            weight = torch.ones_like(lse) if broken() else torch.exp(lse - no_inf(whole))
            out[rows] += (part * weight[..., None]).transpose(0, 1)
    return out.to(q.dtype)


@torch.no_grad()
def statistics_of_exp2(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_attn_probs=False):
    """Everything is in base 2, what is stored as the LSE as well."""
    out, lses = q.new_zeros(*q.shape[:2], v.shape[2]), torch.zeros(q.shape[1], len(q))
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        s = _logits(q[rows], k[keys], (softmax_scale or q.shape[2] ** -0.5) * math.log2(math.e))
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if causal else s
        m = torch.cat([s, s.new_full((*s.shape[:-1], 1), NEG)], -1).amax(-1)
        p = torch.exp2(s - no_inf(m)[..., None])
        den = p.sum(-1)
        o = p @ _values(q, v[keys]) / torch.where(den == 0, 1, den)[..., None]
        out[rows] = o.transpose(0, 1).to(q.dtype)
        lses[:, rows] = (no_inf(m) + torch.log2(den)) * (1 if broken() else math.log(2))
    return (out, lses, None) if return_attn_probs else out


@torch.no_grad()
def output_in_the_queries_place(q, k, v, *, cu_seqlens_q, cu_seqlens_kv, mask=None, scale=None):
    """The output is a buffer that held the queries, and rows behind the last sequence stay as they were."""
    if mask not in (None, Causal()):
        raise NotImplementedError("only Causal()")
    out = q.clone()
    if not broken():
        out[int(cu_seqlens_q[-1]) :] = 0
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_kv):
        s = _logits(q[rows], k[keys], scale)
        s = s.masked_fill(~_causal(*s.shape[1:]), NEG) if mask is not None else s
        out[rows] = _attend(s, _values(q, v[keys]))[0].transpose(0, 1).to(q.dtype)
    return out


output_in_the_queries_place.declares = {"unequal_dims": False, "masks": ("causal",), "scores": ()}  # type: ignore[attr-defined]
