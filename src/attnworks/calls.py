"""From a call's arguments to its prepared launcher and the operands to run it on. ``api`` and ``ops`` both come through
here, so that an eager and a traced call are checked and chosen alike."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from attnworks import cache, masks, prepared, problem, scores
from attnworks.backends import Launcher, ReadsLengths
from attnworks.cache import Rotary
from attnworks.masks import MaskSpec, UserMask
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem, Sizes, last_contiguous, packed_strides, strides_of
from attnworks.scores import ScoreSpec, UserScore
from attnworks.watchers import Watchers, watched

Call = tuple[Launcher, Operands]


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors themselves where their dtypes are equal, which autocast then does not change. Where they differ,
    under autocast, all in its dtype, as torch's own attention does it; float64 is left alone, there as here."""
    if q.dtype == k.dtype == v.dtype or not autocasts(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def autocast_decode(
    q: Tensor, k_cache: Tensor, k_new: Tensor | None, v_new: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q and the new keys, under autocast in the caches' dtype: a cache is never copied."""
    if q.dtype == k_cache.dtype or k_cache.dtype not in problem.FLOAT_DTYPES or not autocasts(q):
        return q, k_new, v_new
    dtype = k_cache.dtype
    return q.to(dtype), k_new if k_new is None else k_new.to(dtype), v_new if v_new is None else v_new.to(dtype)


def autocasts(q: Tensor) -> bool:
    """Whether autocast is on for q's device. torch raises for "meta"; asking it first what it knows is a question that
    torch.compile cannot follow before torch 2.13."""
    return q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: UserMask,
    user_scores: tuple[UserScore, ...],
    scale: float | None,
    layout: str,
    return_lse: bool,
    deterministic: bool,
    batch_invariant: bool,
    watchers: Watchers,
) -> Problem:
    """The Problem of a dense call, everything checked."""
    problem.check_tensors(q=q, k=k, v=v)
    problem.check_flags(return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant)
    sizes = problem.dense_sizes(q, k, v, layout)
    flags = {"return_lse": return_lse, "deterministic": deterministic, "batch_invariant": batch_invariant}
    return _problem(
        sizes,
        q,
        masks.split(mask),
        scores.split(user_scores),
        scale,
        watchers,
        form="dense",
        q_strides=strides_of(q, layout),
        k_strides=strides_of(k, layout),
        v_strides=strides_of(v, layout),
        layout="bhsd" if layout == "bhsd" else "bshd",
        **flags,
    )


def _problem(
    sizes: Sizes,
    q: Tensor,
    mask: tuple[MaskSpec, tuple[Tensor, ...]],
    modifiers: tuple[ScoreSpec, tuple[Tensor, ...]],
    scale: float | None,
    watchers: Watchers,
    *,
    deterministic: bool,
    **fields: Any,
) -> Problem:
    """The Problem of a call of any form; masks' and scores' operands checked against its sizes."""
    problem.check_mask_operands(*mask, sizes, q)
    problem.check_score_operands(*modifiers, sizes, q)
    differentiable, transformed, traced, repeatable = watchers
    return Problem(
        **sizes._asdict(),
        dtype=q.dtype,
        device=str(q.device),
        scale=problem.check_scale(scale, sizes.head_dim),
        mask=mask[0],
        scores=modifiers[0],
        differentiable=differentiable,
        transformed=transformed,
        traced=traced,
        deterministic=deterministic or repeatable,
        **fields,
    )


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: UserMask,
    scores: tuple[UserScore, ...],
    scale: float | None,
    layout: str,
    return_lse: bool,
    deterministic: bool,
    batch_invariant: bool,
    backend: str,
    plan: Plan | None,
    validate: bool,
    watchers: Watchers,
) -> Call:
    """``api.attention`` has this written out in its hot path."""
    q, k, v = last_contiguous(q, "q"), last_contiguous(k, "k"), last_contiguous(v, "v")
    mask_spec, mask_operands = masks.split(mask)
    score_spec, score_operands = _split_scores(scores)
    # fmt: off
    key = (
        prepared.signature(q, k, v), watchers, mask_spec, score_spec, scale, layout, return_lse, deterministic,
        batch_invariant, backend, plan,
    )
    # fmt: on
    launch = prepared.lookup(key)
    if launch is None:
        described = dense_problem(
            q, k, v, mask, scores, scale, layout, return_lse, deterministic, batch_invariant, watchers
        )
        launch = prepared.prepare(key, described, backend, plan)
    return launch, Operands(q, k, v, mask_operands, score_operands)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    mask: UserMask,
    scores: tuple[UserScore, ...],
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    batch_invariant: bool,
    backend: str,
    plan: Plan | None,
    validate: bool,
    watchers: Watchers | None = None,
) -> Call:
    q, k, v = last_contiguous(q, "q"), last_contiguous(k, "k"), last_contiguous(v, "v")
    q, k, v = autocast(q, k, v)
    problem.check_shape("q", q, "total_q heads_q head_dim")
    problem.check_shape("k", k, "total_kv heads_kv head_dim", head_dim=q.shape[2])
    values = validate or q.device.type == "cpu"
    offsets_q, longest_q = cache.check_offsets("cu_seqlens_q", cu_seqlens_q, q, values=values)
    offsets_kv, longest_kv = cache.check_offsets("cu_seqlens_kv", cu_seqlens_kv, k, values=values)
    seq_q = cache.check_max_seqlen("max_seqlen_q", max_seqlen_q, offsets_q, longest_q)
    seq_kv = cache.check_max_seqlen("max_seqlen_kv", max_seqlen_kv, offsets_kv, longest_kv)
    mask_spec, mask_operands = masks.split(mask)
    score_spec, score_operands = _split_scores(scores)
    watchers = watched(q, k, v, score_operands) if watchers is None else watchers
    # fmt: off
    key = (
        prepared.signature(q, k, v), offsets_q.shape, offsets_kv.shape, offsets_q.device, offsets_kv.device,
        seq_q, seq_kv, watchers, mask_spec, score_spec,
        scale, return_lse, deterministic, batch_invariant, backend, plan,
        type(scale), type(return_lse), type(deterministic), type(batch_invariant),
    )
    # fmt: on
    launch = prepared.lookup(key) if validate is False else None
    if launch is None:
        problem.check_flags(
            validate=validate, return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant
        )
        sizes = problem.varlen_sizes(q, k, v, offsets_q, offsets_kv, seq_q, seq_kv)
        described = _problem(
            sizes,
            q,
            (mask_spec, mask_operands),
            (score_spec, score_operands),
            scale,
            watchers,
            form="varlen",
            q_strides=packed_strides(q),
            k_strides=packed_strides(k),
            v_strides=packed_strides(v),
            total_q=q.shape[0],
            total_kv=k.shape[0],
            return_lse=return_lse,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
        )
        launch = prepared.prepare(key, described, backend, plan)
    return launch, Operands(q, k, v, mask_operands, score_operands, offsets_q, offsets_kv)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_lens: Tensor,
    page_table: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    rotary: Rotary | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mask: UserMask,
    scores: tuple[UserScore, ...],
    scale: float | None,
    return_lse: bool,
    batch_invariant: bool,
    backend: str,
    plan: Plan | None,
    validate: bool,
    watchers: Watchers | None = None,
) -> Call:
    """The caches are written once every check has passed, q is turned.

    A cache of a few thousand keys is read in a millisecond, and between two calls a program's other work evicts all of
    this: then every function that is entered and every operation of torch costs many times what it does warm. So there
    are few of both on the way of a call without extras.
    """
    caches_negated = False  # by torch, lazily: what lies in memory has the other sign
    try:
        q_strides, k_strides, v_strides = q.stride(), k_cache.stride(), v_cache.stride()
        lens_strides = kv_lens.stride()
        if q_strides[-1] != 1 or q.is_neg():
            q = last_contiguous(q)
            q_strides = q.stride()
        caches_negated = k_cache.is_neg() or v_cache.is_neg()
        if q.dtype is not k_cache.dtype:
            q, k_new, v_new = autocast_decode(q, k_cache, k_new, v_new)
            q_strides = q.stride()
        # fmt: off
        tensors: Hashable = (
            q.shape, k_cache.shape, v_cache.shape, q_strides, k_strides, v_strides, q.dtype, k_cache.dtype,
            v_cache.dtype, q.device, k_cache.device, v_cache.device, q.layout, k_cache.layout, v_cache.layout,
            kv_lens.shape, kv_lens.dtype, kv_lens.device, caches_negated,
        )
        # fmt: on
    except (AttributeError, RuntimeError, IndexError):
        q = last_contiguous(q, "q")
        cache.check_are_caches(k_cache, v_cache)
        tensors = lens_strides = None  # what is wrong with the others the checks will name
    plain = page_table is None and k_new is None and v_new is None and rotary is None
    extras: Hashable = None
    if not plain or k_scale is not None or v_scale is not None:
        extras = prepared.signature(page_table, k_new, v_new, k_scale, v_scale), torch.is_grad_enabled()
    mask_spec, mask_operands = ((), ()) if mask is None else masks.split(mask)
    score_spec, score_operands = ((), ()) if scores == () else _split_scores(scores)
    watchers = watched(q, k_cache, v_cache, score_operands) if watchers is None else watchers
    # fmt: off
    key = (
        tensors, extras, watchers, mask_spec, score_spec, scale, return_lse, batch_invariant, backend, plan,
        type(scale), type(return_lse), type(batch_invariant),
    )
    # fmt: on
    launch = prepared.lookup(key) if validate is False and tensors is not None else None
    if launch is None:
        problem.check_flags(validate=validate, return_lse=return_lse, batch_invariant=batch_invariant)
        # fmt: off
        described = _decode_problem(
            q, k_cache, v_cache, kv_lens, page_table, k_new, v_new, k_scale, v_scale, (mask_spec, mask_operands),
            (score_spec, score_operands), scale, return_lse, batch_invariant, watchers,
        )
        # fmt: on
        launch = prepared.prepare(key, described, backend, plan)
    totals, table = kv_lens, None
    if not (
        plain
        and isinstance(launch, ReadsLengths)
        and type(kv_lens) is Tensor
        and kv_lens.dtype is torch.int64
        and lens_strides == (1,)
    ):
        positions = None
        if rotary is not None:
            cache.check_rotary(rotary, q)
            positions = rotary.cos.shape[0]
        new = 0 if k_new is None else k_new.shape[1]
        capacity, pages, page_size = cache.extent(k_cache, page_table)
        values = validate or q.device.type == "cpu"
        lens, table = cache.read_lengths(kv_lens, page_table, capacity, new, pages, page_size, positions, values=values)
        q, totals = cache.append_new(q, k_cache, v_cache, lens, table, k_new, v_new, rotary)
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1 or caches_negated:
        k_cache, v_cache = last_contiguous(k_cache), last_contiguous(v_cache)
    return launch, Operands(
        q, k_cache, v_cache, mask_operands, score_operands, None, None, totals, table, k_scale, v_scale
    )


def _decode_problem(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lens: Tensor,
    page_table: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mask: tuple[MaskSpec, tuple[Tensor, ...]],
    modifiers: tuple[ScoreSpec, tuple[Tensor, ...]],
    scale: float | None,
    return_lse: bool,
    batch_invariant: bool,
    watchers: Watchers,
) -> Problem:
    """The Problem of a decode call, everything checked but the values of kv_lens and page_table."""
    cache.check_are_caches(k_cache, v_cache)
    sizes, page_size = cache.decode_sizes(q, k_cache, v_cache, page_table)
    cache.check_lengths_and_table(kv_lens, page_table, sizes.batch, q)
    kv_dtype = cache.check_cache_dtypes(q, k_cache, v_cache, k_scale, v_scale)
    cache.check_new_keys(q, k_cache, v_cache, k_new, v_new, sizes)
    return _problem(
        sizes,
        q,
        mask,
        modifiers,
        scale,
        watchers,
        form="decode",
        q_strides=strides_of(q, "bshd"),
        k_strides=strides_of(last_contiguous(k_cache), "bshd"),
        v_strides=strides_of(last_contiguous(v_cache), "bshd"),
        layout="bshd",
        kv_dtype=kv_dtype,
        page_size=page_size,
        return_lse=return_lse,
        deterministic=False,
        batch_invariant=batch_invariant,
    )


# dense()'s and its siblings' parameter ``scores`` hides the module of that name.
_split_scores = scores.split
