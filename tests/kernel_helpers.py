"""Kernels that are not attnworks' for the tests of the workbench: right ones in other people's conventions, and faulty
ones. Loaded by path too, also in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnworks as aw


def _modifiers(causal, window, softcap, alibi):
    left, right = (None if end < 0 else end for end in window)
    mask = aw.Window(left, 0 if causal else right)
    return mask, (*((aw.Softcap(softcap),) if softcap else ()), *((aw.ALiBi(alibi),) if alibi is not None else ()))


def _result(out, lse, wanted):
    return (out, lse, None) if wanted else out


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """flash-attn's signature over our reference."""
    mask, scores = _modifiers(causal, window_size, softcap, alibi_slopes)
    out, lse = aw.attention(q, k, v, mask=mask, scores=scores, scale=softmax_scale, layout="bshd", return_lse=True)
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           return_attn_probs=False):  # fmt: skip
    mask, scores = _modifiers(causal, window_size, softcap, alibi_slopes)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_q[-1]) == q.shape[0]
    out, lse = aw.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, mask=mask,
                                   max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k, scores=scores,
                                   scale=softmax_scale, return_lse=True)  # fmt: skip
    return _result(out, lse, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                            return_softmax_lse=False):  # fmt: skip
    mask, scores = _modifiers(causal, window_size, softcap, alibi_slopes)
    out, lse = aw.attention_decode(q, k_cache, v_cache, kv_lens=cache_seqlens, page_table=block_table, k_new=k, v_new=v,
                                   mask=mask, scores=scores, scale=softmax_scale, return_lse=True)  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def into_out(query, key, value, attn_mask=None, is_causal=False, scale=None, out=None):
    """Writes into the output it is given; one row too far with the scale 0.125."""
    result = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    if out is None:
        return result
    out.copy_(result)
    if scale == 0.125:
        ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 7, 256)
    return None


def no_groups(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
    if query.dtype == torch.float16 or query.shape[1] != key.shape[1]:
        raise RuntimeError("not that")
    return scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal).detach()


# ---- faulty ----------------------------------------------------------------------------------------------------------

FAULTS = ("none", "segfault", "hang", "exit", "raise", "shape", "dtype", "no tensor", "writes behind", "writes into q",
          "writes into a gap", "declines", "prints", "writes in backward", "device", "layout", "killed")  # fmt: skip


def scale_of(fault: str) -> float:
    """The scale that makes ``faulty`` show a fault."""
    return 0.1 + 0.01 * FAULTS.index(fault)


class _WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, key: Tensor) -> Tensor:
        ctx.key = key
        return out.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        ctx.key.data.add_(1)
        return d_out, None


def faulty(query, key, value, attn_mask=None, is_causal=False, scale=0.1):
    fault = FAULTS[round((scale - 0.1) * 100)]
    out = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    if fault == "segfault":
        ctypes.string_at(0)
    elif fault == "hang":
        while True:
            time.sleep(0.01)
    elif fault == "exit":
        os._exit(3)
    elif fault == "raise":
        raise RuntimeError("out of luck")
    elif fault == "shape":
        return out[..., :-1]
    elif fault == "device":
        return out.to("meta")
    elif fault == "layout":
        return out.to_sparse()
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "dtype":
        return out.double()
    elif fault == "no tensor":
        return "attention"
    elif fault == "writes behind":
        # Behind the storage: the case's own 64 spare elements end there.
        ctypes.memset(key.data_ptr() + (key.numel() + 64) * key.element_size(), 7, 100)
    elif fault == "writes into q":
        query.data.mul_(2)
    elif fault == "writes into a gap":
        ctypes.memset(key.data_ptr() + key.numel() * key.element_size(), 7, 8)
    elif fault == "declines":
        raise NotImplementedError("not for this scale")
    elif fault == "prints":
        print("noise")
    elif fault == "writes in backward":
        return _WritesInBackward.apply(out, key)
    return out


def half_the_scale(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Its default scale is half of what it must be: what a test must fail on."""
    scale = query.shape[-1] ** -0.5 / 2 if scale is None else scale
    return scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
