"""The LSE as the kernel that ``mutants.py`` breaks hands it out, with a switch for each fault of the LSE alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnworks.scores import ALiBi
from attnworks.workbench.modifiers import Modifiers
from attnworks.workbench.tiled_backward import top_scores


def reported(m: Modifiers, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """The LSE as it is handed out."""
    has, way = m.has, m.addresses.way
    if has("lse in base 2"):
        top = top_scores(m, q, k)[..., 0]
        parts = (lse / math.log(2), top + (lse - top) / math.log(2), top / math.log(2) + (lse - top))
        return parts[way]
    if has("lse without the maximum"):
        return lse - top_scores(m, q, k)[..., 0]
    if has("lse is the maximum"):
        return top_scores(m, q, k)[..., 0]
    if has("lse without its logarithm"):
        top = top_scores(m, q, k)[..., 0]
        return torch.exp(lse - top) if way == 0 else torch.exp(lse - top) + top if way == 1 else torch.exp(lse)
    if has("lse of the wrong sign"):
        return -lse
    if has("lse scaled"):
        return lse * (m.scale, 1 / m.scale, m.value)[way]
    if k.shape[1] and has("lse of one tile"):
        last = max(k.shape[1] - 1, 0) // m.tile_kv * m.tile_kv
        first = 0 if way else last
        if way == 2:  # the largest of all
            spans = [(a, k[:, a : a + m.tile_kv]) for a in range(0, k.shape[1], m.tile_kv)]
            return torch.stack([torch.logsumexp(m.tile(q, keys, a)[0], -1) for a, keys in spans]).amax(0)
        return torch.logsumexp(m.tile(q, k[:, first : first + m.tile_kv], first)[0], -1)
    if k.shape[1] and has("lse of another maximum"):
        return lse + _rise(m, q, k)
    if k.shape[1] and has("lse of shifted scores"):
        return lse - _shift(m, q, k)
    if has("lse in low precision"):
        return lse.to(torch.float16 if way else torch.bfloat16).to(lse.dtype)
    if has("finite lse of empty rows") and way:
        return torch.where(lse == -torch.inf, (0.0, torch.inf, torch.nan)[way - 1], lse)
    return torch.zeros_like(lse) if has("lse not written") else lse


def _rise(m: Modifiers, q: Tensor, k: Tensor) -> Tensor:
    """What an LSE is off by that is made of another maximum than its sum: of the newest one, where sums follow the
    maximum only when it rises far (or never), or of the one before the last tile."""
    way = m.addresses.way
    tops = [m.tile(q, k[:, a : a + m.tile_kv], a)[0].amax(-1) for a in range(0, k.shape[1], m.tile_kv)]
    newest = torch.stack(tops).amax(0)
    if way == 4:
        before = torch.stack(tops[:-1]).amax(0) if len(tops) > 1 else newest
        return torch.where(before == -torch.inf, 0, before - newest).nan_to_num(0)
    far = (math.inf, 6.0, 8.0, 8 * math.log(2))[way]
    used = tops[0]
    for top in tops[1:]:
        used = torch.where((used == -torch.inf) | (top - used > far), torch.maximum(used, top), used)
    return torch.where(newest == -torch.inf, 0, newest - used)


def _shift(m: Modifiers, q: Tensor, k: Tensor) -> Tensor:
    """What softmax does not see and the LSE does: the mean key taken off each, the first key, ALiBi without the
    query's own number; or the scale left out of the maximum, which the sum has."""
    if m.addresses.way == 2:
        slopes = [s.slopes if s.slopes.dim() == 1 else s.slopes[m.sequence] for s in m.scores if isinstance(s, ALiBi)]
        places = torch.arange(m.seq_q) + m.seq_kv - m.seq_q
        return -sum((slope.view(-1, 1) * places for slope in slopes), q.new_zeros(q.shape[:2])) * m.causal
    if m.addresses.way == 3:  # the maximum is that of the products, to which the scale comes in the exponential
        top = top_scores(m, q, k)[..., 0]
        return top - top / m.scale
    key = k[:, :1] if m.addresses.way else k.mean(1, keepdim=True)
    return m.scale * (q @ key.mT)[..., 0]
