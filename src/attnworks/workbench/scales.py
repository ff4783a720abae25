"""The softmax scale, and what is got wrong in working it out: a switch for each fault and the ways it is made
(``ways.WAYS``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def softmax_scale(has: Callable[[str], bool], way: int, given: float | None, q: Tensor, v: Tensor) -> float:
    """The scale of one sequence, q and v (heads, rows, dim)."""
    scale = given
    if scale is None or has("scale argument ignored"):
        scale = _default(has, way, q, v)
    elif has("scale on top of the default"):
        scale = scale * q.shape[-1] ** -0.5
    if has("scale rounded"):
        scale = float(torch.tensor(scale).to(torch.float16 if way else torch.bfloat16))
    if has("scale without its sign"):
        scale = abs(scale)
    return scale


def _default(has: Callable[[str], bool], way: int, q: Tensor, v: Tensor) -> float:
    dim = (v if has("scale of head_dim_v") else q).shape[-1]
    if has("scale of the padded head_dim"):
        multiple = 16 if way else 64
        dim = -(-dim // multiple) * multiple
    if has("scale of the model width"):
        dim *= q.shape[0]
    if has("scale of a constant head_dim"):
        dim = (64, 128)[way]
    if has("scale without its root"):
        return 1 / dim
    if has("scale upside down"):
        return float(dim**0.5)
    return float(dim**-0.5)
