"""The fifth set: packed sequences, called as flash_attn_varlen_func is. Right inside ``third.repaired()``."""

from __future__ import annotations

from itertools import pairwise

import torch

from workbench.held_out_kernels.fifth import INF, online, scale_of, seen_by
from workbench.held_out_kernels.third import broken, no_inf


def _sequences(cu_seqlens_q, cu_seqlens_k):
    """(first query, end, first key, end) of each sequence."""
    pairs = (pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
    return [(*one, *other) for one, other in zip(*pairs, strict=True)]


def _attend(q, k, v, scale, causal):
    """(rows, heads, dim) against (keys, heads_kv, dim): (out in fp32, lse (heads, rows)), 32 keys at a time."""
    group = q.shape[1] // max(k.shape[1], 1)
    x, y, z = (t.transpose(0, 1).float() for t in (q, k, v))
    y, z = y.repeat_interleave(group, 0), z.repeat_interleave(group, 0)
    rows, n = torch.arange(q.shape[0]), k.shape[0]
    tiles = (
        ((x @ y[:, j].mT * scale).where(seen_by(rows, j, n - len(rows), causal), -INF), z[:, j])
        for j in (torch.arange(n).split(32) if n else [])
    )
    out, lse = online(tiles, x, v.shape[-1])
    return out.transpose(0, 1), lse


@torch.no_grad()
def statistics_reshaped(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, return_softmax_lse=False
):
    """The LSE is written row by row, (total, heads), and handed out as (heads, total) by a reshape."""
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full((q.shape[0], q.shape[1]), -INF)
    for a, b, c, d in _sequences(cu_seqlens_q, cu_seqlens_k):
        found, statistics = _attend(q[a:b], k[c:d], v[c:d], scale_of(q, softmax_scale), causal)
        out[a:b], lse[a:b] = found.to(q.dtype), statistics.T
    lse = lse.reshape(q.shape[1], q.shape[0]) if broken() else lse.T.contiguous()
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def accumulators_of_the_last_work(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """A persistent block clears its accumulators with the first tile of keys; a sequence without keys writes out what
    the one before it left."""
    out, held = torch.zeros(*q.shape[:-1], v.shape[-1]), torch.zeros(1, q.shape[1], v.shape[-1])
    for a, b, c, d in _sequences(cu_seqlens_q, cu_seqlens_k):
        for rows in torch.arange(a, b).split(16) if b > a else []:
            if d > c:
                shift = d - c - (b - a)
                s = torch.einsum("rhd,khd->hrk", q[rows].float(), _by_query_head(k[c:d], q)) * scale_of(
                    q, softmax_scale
                )
                s = s.where(seen_by(rows - a, torch.arange(d - c), shift, causal), -INF)
                p = torch.exp(s - no_inf(s.amax(-1, keepdim=True)))
                total = p.sum(-1, keepdim=True)
                held = torch.einsum("hrk,khd->rhd", p / total.where(total > 0, 1.0), _by_query_head(v[c:d], q))
            elif not broken():
                held = torch.zeros_like(held[:1])
            out[rows] = held[torch.arange(len(rows)) % len(held)]
    return out.to(q.dtype)


def _by_query_head(x, q):
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


@torch.no_grad()
def self_attention_lengths(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """A sequence's number of keys is taken from the queries' offsets; where its keys begin is right."""
    parts = []
    for a, b, c, d in _sequences(cu_seqlens_q, cu_seqlens_k):
        keys = slice(c, min(c + b - a, d) if broken() else d)
        x, y, z = (t.transpose(0, 1).float() for t in (q[a:b], _by_query_head(k[keys], q), _by_query_head(v[keys], q)))
        s = x @ y.mT * scale_of(q, softmax_scale)
        s = s.where(seen_by(torch.arange(b - a), torch.arange(y.shape[1]), d - c - (b - a), causal), -INF)
        parts.append(online([(s, z)] if y.shape[1] else [], x, v.shape[-1])[0].transpose(0, 1))
    return torch.cat(parts).to(q.dtype) if parts else q.new_zeros(*q.shape[:-1], v.shape[-1])


@torch.no_grad()
def tile_belongs_to_its_first_row(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Tiles of 16 rows run through the whole pack, and all rows of one attend to the sequence of its first row."""
    total, out = q.shape[0], torch.zeros(*q.shape[:-1], v.shape[-1])
    ends = cu_seqlens_q[1:].long()
    for rows in torch.arange(total).split(16) if total else []:
        owner = torch.searchsorted(ends, rows, right=True)
        owner = owner[:1].expand(len(rows)) if broken() else owner
        for n in owner.unique().tolist():
            mine = rows[owner == n]
            a, b, c, d = (int(x) for x in (*cu_seqlens_q[n : n + 2], *cu_seqlens_k[n : n + 2]))
            at, keys = mine - a, torch.arange(d - c)
            s = torch.einsum("rhd,khd->hrk", q[mine].float(), _by_query_head(k[c:d], q)) * scale_of(q, softmax_scale)
            s = s.where(seen_by(at, keys, d - c - (b - a), causal), -INF)
            values = _by_query_head(v[c:d], q).transpose(0, 1)
            rows_out = online([(s, values)] if len(keys) else [], q[mine].float().transpose(0, 1), v.shape[-1])[0]
            out[mine] = rows_out.transpose(0, 1)
    return out.to(q.dtype)


@torch.no_grad()
def longest_first_and_never_back(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """Sequences are taken longest first, and their results are joined in that order."""
    parts = _sequences(cu_seqlens_q, cu_seqlens_k)
    order = sorted(range(len(parts)), key=lambda n: parts[n][2] - parts[n][3])
    done = {}
    for n in order:
        a, b, c, d = parts[n]
        done[n] = _attend(q[a:b], k[c:d], v[c:d], scale_of(q, softmax_scale), causal)[0]
    joined = [done[n] for n in (order if broken() else range(len(parts)))]
    return torch.cat(joined).to(q.dtype) if joined else q.new_zeros(*q.shape[:-1], v.shape[-1])


@torch.no_grad()
def last_offset_included(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
    """A sequence's last key is taken to be cu_seqlens_k[b + 1] - 1 by a loop that already ends before its bound."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for a, b, c, d in _sequences(cu_seqlens_q, cu_seqlens_k):
        count, shift = d - c - broken(), d - c - (b - a)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            tiles = []
            for start in range(0, count, 48):
                keys = torch.arange(start, min(start + 48, count))
                s = q[a:b, h].float() @ k[c + keys, g].float().T * scale_of(q, softmax_scale)
                tiles.append((s.where(seen_by(torch.arange(b - a), keys, shift, causal), -INF), v[c + keys, g].float()))
            out[a:b, h] = online(tiles, q[a:b, h].float(), v.shape[-1])[0].to(q.dtype)
    return out
