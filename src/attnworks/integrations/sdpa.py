"""PyTorch's scaled_dot_product_attention, answered by attnworks: as a function, and in the place of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnworks.api import attention
from attnworks.calls import autocasts
from attnworks.masks import Causal, UserMask
from attnworks.scores import Bias, UserScore


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with its signature and its meaning.

    query (..., heads, seq_q, head_dim), key (..., heads, seq_kv, head_dim), value (..., heads, seq_kv, head_dim_v), two
    dimensions or more; leading ones broadcast, and with ``enable_gqa`` the heads of key and value divide query's.
    ``attn_mask``: boolean, True where visible, or additive in float32 or query's dtype, at least (seq_q, seq_kv),
    broadcasting to the scores; differentiable. ``is_causal``: the first query sees the first key (top-left). Under
    autocast all is cast to its dtype. Returns (..., heads, seq_q, head_dim_v); a row that sees nothing is 0.

    Raises ``ValueError`` for ``dropout_p`` other than 0, which attnworks does not have, and for ``attn_mask`` together
    with ``is_causal``; else what ``attention`` raises.
    """
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class replace_sdpa(TorchFunctionMode):
    """``with replace_sdpa():`` routes ``F.scaled_dot_product_attention`` to ``sdpa``.

    Whatever name it is called by, also inside torch's own modules and models that imported it earlier. It holds for the
    thread that entered it, until the block is left, by an exception too; blocks nest, the innermost decides. A call
    that ``sdpa`` cannot take (dropout, nested tensors) raises its error: none goes to torch unnoticed. Every other
    torch function called from Python inside the block takes a few microseconds longer.

    ``backend``: as for ``attention``.
    """

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _sdpa(*args, **(kwargs or {}), backend=self.backend)
        if func is torch.nn.functional.multi_head_attention_forward:
            return _multi_head_attention(self.backend)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@cache
def _multi_head_attention(backend: str) -> Callable[..., Any]:
    """torch's function of nn.MultiheadAttention, which the mode sees as one call, with our attention among its globals
    (and without its question whether a mode is active)."""
    theirs: Any = torch.nn.functional.multi_head_attention_forward
    changed = {"scaled_dot_product_attention": partial(_sdpa, backend=backend), "has_torch_function": lambda _: False}
    ours = FunctionType(theirs.__code__, theirs.__globals__ | changed, theirs.__name__, theirs.__defaults__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Tensor:
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    leading, q, k, v = _four_dimensions(query, key, value, enable_gqa)
    mask: UserMask = Causal("top-left") if is_causal else None
    scores: tuple[UserScore, ...] = ()
    if attn_mask is not None:
        attn_mask = _mask_of_four(attn_mask, leading)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif attn_mask.dtype in (torch.float32, q.dtype):
            scores = (Bias(attn_mask),)
        else:
            raise TypeError(f"attn_mask: was {attn_mask.dtype}, must be bool, float32 or {q.dtype} like query")
    out = cast("Tensor", attention(q, k, v, mask=mask, scores=scores, scale=scale, backend=backend))
    return out.reshape(*leading, *out.shape[2:])


def _check(
    query: object, key: object, value: object, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    if dropout_p != 0:
        raise ValueError(f"dropout_p: was {dropout_p}, must be 0: attnworks has no dropout (pass 0 also in training)")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: was given, must be None where is_causal=True")
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if tensor is None and name == "attn_mask":
            continue
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            was = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: was {was}, must be a torch.Tensor of at least two dimensions")
        if tensor.dim() < 2:
            raise ValueError(f"{name}: was of shape {tuple(tensor.shape)}, must have at least two dimensions")


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if not autocasts(query):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast_one(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast_one(query), cast_one(key), cast_one(value), None if attn_mask is None else cast_one(attn_mask)


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """(the result's leading dimensions, q, k, v), the last three (batch, heads, rows, dim)."""
    if enable_gqa:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() < 3:
                raise ValueError(f"{name}: was of shape {tuple(x.shape)}, must have heads where enable_gqa=True")
        heads_q, heads_k, heads_v = (x.shape[-3] for x in (query, key, value))
        if heads_k != heads_v:  # each divides heads_q by itself, as torch takes it
            for name, heads in (("key", heads_k), ("value", heads_v)):
                if not heads or heads_q % heads:
                    raise ValueError(f"{name}: had {heads} heads, must have a divisor of query's {heads_q}")
            key = key.repeat_interleave(heads_q // heads_k, -3)
            value = value.repeat_interleave(heads_q // heads_v, -3)
        batch = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        shapes = [(*batch, x.shape[-3]) for x in (query, key, value)]
        leading = shapes[0]
    else:
        leading = _broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        shapes = [leading] * 3

    def fold(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        x = x.expand(*shape, *x.shape[-2:])
        while x.dim() < 4:
            x = x.unsqueeze(0)
        return x.flatten(0, -4) if x.dim() > 4 else x

    q, k, v = (fold(x, shape) for x, shape in zip((query, key, value), shapes, strict=True))
    return leading, q, k, v


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"query, key, value: had leading dimensions {listed}, must broadcast") from error


def _mask_of_four(attn_mask: Tensor, leading: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to (.., heads, seq_q, seq_kv) as one that does to (batch, heads, seq_q, seq_kv)."""
    if len(leading) <= 2 or attn_mask.dim() <= 3:
        return attn_mask
    batch = attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:])
    return batch.flatten(0, -4)
