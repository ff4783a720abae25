"""A kernel of one's own, as small as an online softmax can be: what docs/verify.md verifies."""

import torch
from torch import Tensor

TILE = 64


def my_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale · Q Kᵀ) V, tile by tile: (batch, heads, rows, dim), causal from the top left as in SDPA."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q = query.float() * scale
    rows = torch.arange(q.shape[2])[:, None]
    running_max = q.new_full((*q.shape[:3], 1), -torch.inf)
    running_sum = torch.zeros_like(running_max)
    acc = q.new_zeros(*q.shape[:3], value.shape[3])
    for first in range(0, key.shape[2], TILE):
        k, v = (x[:, :, first : first + TILE].float() for x in (key, value))
        scores = q @ k.transpose(2, 3)
        if is_causal:
            keys = first + torch.arange(k.shape[2])
            scores = scores.masked_fill(keys > rows, -torch.inf)
        new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
        shift = new_max.masked_fill(new_max == -torch.inf, 0)  # a row that has seen nothing yet: not -inf - (-inf)
        alpha, probs = torch.exp(running_max - shift), torch.exp(scores - shift)
        running_sum = alpha * running_sum + probs.sum(-1, keepdim=True)
        acc = alpha * acc + probs @ v
        running_max = new_max
    return (acc / torch.where(running_sum == 0, 1, running_sum)).to(query.dtype)
