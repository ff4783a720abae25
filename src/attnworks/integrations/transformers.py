"""Hugging Face transformers' attention interface, answered by attnworks: ``attn_implementation="attnworks"``.

``register`` hands transformers two functions. One makes a forward pass's mask, once for all layers of a kind; the other
is called with it in every layer. Between the two travels a ``LazyMask``, which says what is visible in attnworks' own
masks, so that (seq_q, seq_kv) is never written out for causal and windowed layers, padded or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from attnworks import dispatch
from attnworks.api import attention
from attnworks.masks import AllOf, Causal, UserMask, Window
from attnworks.scores import Bias, Sink, Softcap, UserScore


def register(name: str = "attnworks", *, backend: str = "auto") -> None:
    """Make ``name`` an attention implementation of transformers: ``from_pretrained(..., attn_implementation=name)``.

    Holds for the process; registering a name again replaces it. ``backend``: as for ``attention``; with "auto" a layer
    whose call one backend refuses goes to the next.

    A model's results are those of its ``eager`` implementation, except at tokens of padding that see no key: they get
    0, where eager gives them the mean of all values. What attnworks does not have is refused by a layer's first call:
    ``ValueError`` for attention dropout in training, for ``output_attentions=True`` and for sinks that differ from
    query to query; ``TypeError`` for a mask that is no tensor.
    """
    if backend != "auto" and backend not in dispatch.NAMES:
        raise ValueError(f"backend: was {backend!r}, must be 'auto' or one of {dispatch.NAMES}")
    AttentionInterface.register(name, partial(_attend, backend=backend))
    AttentionMaskInterface.register(name, _make_mask)


class LazyMask(Tensor):
    """A boolean mask (batch, 1, seq_q, seq_kv), True where visible, that is written out only if somebody computes with
    it, as a model that slices its mask does; the result is an ordinary tensor.

    ``keys``: the slice of the keys outside of which all is hidden. ``visible``: the mask among these.
    """

    keys: slice
    visible: UserMask
    write_out: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: Any, keys: slice, visible: UserMask, write_out: Callable[[], Tensor]
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.keys, mask.visible, mask.write_out = keys, visible, write_out
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        written = tree_map_only(cls, lambda mask: mask.write_out(), (args, kwargs or {}))
        return func(*written[0], **written[1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, keys={self.keys}, visible={self.visible})"


# ---- the mask of a forward pass --------------------------------------------------------------------------------------


def _make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """transformers' mask interface: a ``LazyMask`` for causal, windowed and bidirectional masks, else a boolean tensor.

    ``mask_function`` speaks of positions; the queries' begin at q_offset, the keys' at kv_offset. ``attention_mask``:
    (batch, positions), False at padding. Under torch.compile what torch's SDPA gets, None where it would do without.
    """
    # fmt: off
    write_out = partial(
        sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
        device=device,
    )
    # fmt: on
    if torch.compiler.is_compiling():
        return cast("Tensor | None", write_out(**options))
    write_out = partial(write_out, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    window = _window(mask_function, local_size)
    first = int(q_offset) - int(kv_offset)  # the first query's place among the keys
    if window is None or not _fits(window, first + q_length, kv_length):
        return cast("Tensor", write_out())
    keys, visible = _visible(window, first, q_length, kv_length)
    padding = prepare_padding_mask(attention_mask, kv_length, int(kv_offset))
    if padding is not None:
        shown = padding[:, int(kv_offset) :][:, keys]
        if not bool(shown.all()):
            shown = shown[:, None, None, :]
            visible = shown if visible is None else AllOf((visible, shown))
    return LazyMask((batch_size, 1, q_length, kv_length), device, keys, visible, write_out)


def _window(mask_function: object, size: int | None) -> Window | None:
    """The window that a mask function of transformers' own is; None for all others."""
    known = [(Window(None, 0), causal_mask_function), (Window(), bidirectional_mask_function)]
    if size is not None:
        known.append((Window(size - 1, 0), sliding_window_causal_mask_function(size)))
        known.append((Window(size, size), sliding_window_bidirectional_mask_function(size)))
    return next((window for window, function in known if _same(mask_function, function)), None)


def _same(a: object, b: object) -> bool:
    """Whether two functions come from the same line and captured the same; so they do the same, whatever that is."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        captured = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (a, b)]
        return a.__code__ is b.__code__ and _same(*captured)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _fits(window: Window, last: int, kv_length: int) -> bool:
    """Whether the last query's place, ``last`` - 1, is the last of the keys that it sees: what bottom-right means."""
    return window == Window() or last == kv_length or (window.right == 0 and last < kv_length)


def _visible(window: Window, first: int, q_length: int, kv_length: int) -> tuple[slice, UserMask]:
    """(the keys that any query sees, what hides some of them from others): fewer keys rather than more masking."""
    if window == Window():
        return slice(0, kv_length), None
    start = 0 if window.left is None else max(0, first - window.left)
    stop = first + q_length
    left = None if window.left is None or window.left >= stop - start - 1 else window.left
    keys = slice(start, stop)
    if window.right != 0:
        return keys, Window(left, window.right)
    if left is not None:
        return keys, Window(left, 0)
    return keys, Causal() if q_length > 1 else None


# ---- a layer's attention ---------------------------------------------------------------------------------------------


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (batch, heads_q, seq_q, dim), key and value (batch, heads_kv, seq_kv,
    dim); returns (batch, seq_q, heads_q, dim_v) and no weights. ``sliding_window`` among the options is in the mask."""
    _refuse(dropout, attention_mask, options)
    mask: UserMask = None
    scores: tuple[UserScore, ...] = () if softcap is None else (Softcap(softcap),)
    if isinstance(attention_mask, LazyMask):
        if attention_mask.shape[2:] != (query.shape[2], key.shape[2]):
            raise ValueError(
                f"attention_mask: was for {tuple(attention_mask.shape[2:])} queries and keys, must be for "
                f"{(query.shape[2], key.shape[2])}"
            )
        keys, mask = attention_mask.keys, attention_mask.visible
        key, value = key[:, :, keys], value[:, :, keys]
        position_bias = position_bias if position_bias is None else position_bias[..., keys]
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Causal("top-left") if causal and query.shape[2] > 1 else None  # as transformers' "sdpa" takes it
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        scores += (Bias(attention_mask),)
    if position_bias is not None:
        scores += (Bias(position_bias),)
    if s_aux is not None:
        scores += (Sink(s_aux),)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = attention(q, k, v, mask=mask, scores=scores, scale=scaling, layout="bshd", backend=backend)
    return cast("Tensor", out), None


def _refuse(dropout: float, attention_mask: object, options: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"dropout: was {dropout}, must be 0: attnworks has no dropout (set the config's attention dropout to 0)"
        )
    if options.get("output_attentions"):
        raise ValueError("output_attentions: was True, must be False: the weights are never written out (use 'eager')")
    if options.get("sinks") is not None:
        raise ValueError("sinks: were given for each query, must be None (s_aux, one for each head, is supported)")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: was {type(attention_mask).__name__}, must be None or a tensor")
