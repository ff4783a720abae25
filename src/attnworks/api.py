"""attention() and its siblings: find or build the prepared call, run it.

A call's way: the key of everything a launcher depends on → the prepared launcher; on a miss Problem →
``dispatch.choose`` (pure) → Plan → ``prepare``. The hot path builds no Problem and checks nothing that the key already
settles; a call like an earlier one is known again even without a key (``known.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from attnworks import cache, calls, dispatch, known, masks, prepared, problem, scores
from attnworks.dispatch import Explanation
from attnworks.masks import UserMask
from attnworks.plan import Plan
from attnworks.problem import Layout, Operands, last_contiguous
from attnworks.scores import ScoreSpec, UserScore
from attnworks.watchers import watched

Result = Tensor | tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: UserMask = None,
    scores: tuple[UserScore, ...] = (),
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
    validate: bool = False,
) -> Result:
    """Exact attention, O = softmax(S) V with S = scores applied to scale · Q Kᵀ, then masked.

    Shapes for ``layout="bhsd"``: q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim),
    v (batch, heads_kv, seq_kv, head_dim_v), heads_q a multiple of heads_kv; for ``"bshd"`` the middle two swap. Dtype
    float32, bfloat16 or float16 (float64 on the reference), the same for all three. Any strides; where the last
    dimension is not contiguous the tensor is copied. ``scale`` defaults to 1/sqrt(head_dim).

    Returns out, in q's dtype and layout with head_dim_v; with ``return_lse`` (out, lse), lse (batch, heads_q, seq_q)
    fp32 (fp64 for fp64), natural log. A row without a visible key gives 0 and -inf.

    ``mask``: None, ``Causal()``, ``Window()``, a boolean tensor, a predicate (b, h, q, k), or an intersection (``&``).
    ``scores``: modifiers (``Softcap``, ``ALiBi``, ``Bias``, ``Sink``, functions), applied left to right.
    ``deterministic``: backward repeats bitwise. ``batch_invariant``: a row's bits depend on nothing else in the batch.
    ``backend``: "auto" or a name, which is used or refused, never replaced. ``plan``: a ``Plan`` to use as it is.
    ``validate``: check values inside tensors on a GPU too, at the price of a synchronisation.

    Raises ``TypeError`` or ``ValueError`` naming the argument, ``UnsupportedError`` with every backend's reasons.
    Source: FlashAttention (arXiv:2205.14135), FlashAttention-2 (arXiv:2307.08691).
    """
    if is_dynamo_compiling():
        # fmt: off
        return _traced(
            "attention", q, k, v, mask=mask, scores=scores, scale=scale, layout=layout, return_lse=return_lse,
            deterministic=deterministic, batch_invariant=batch_invariant, backend=backend, plan=plan, validate=validate,
        )
        # fmt: on
    options = "dense", scores, layout, return_lse, deterministic, batch_invariant, backend, plan, validate
    launch = known.find(mask, scale, options, q, k, v)
    if launch is not None:
        out, lse = launch(Operands(q, k, v))
        return out if lse is None else (out, lse)
    given = q, k, v
    mask_spec: Any
    try:
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        negated = q.is_neg() or k.is_neg() or v.is_neg()  # by torch, lazily: memory holds the other sign
        if q_strides[-1] != 1 or k_strides[-1] != 1 or v_strides[-1] != 1 or negated:
            q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
            q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
        if q_dtype is not k_dtype or k_dtype is not v_dtype:
            q, k, v = calls.autocast(q, k, v)
            q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
            q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    except (AttributeError, RuntimeError, IndexError):
        problem.check_tensors(q=q, k=k, v=v)
        problem.dense_sizes(q, k, v, layout)
        raise
    mask_spec, mask_operands = (mask, ()) if isinstance(mask, masks.OWN_KEY) else masks.split(mask)
    score_spec, score_operands = ((), ()) if scores == () else _split_scores(scores)
    watchers = watched(q, k, v, score_operands)
    # fmt: off
    key = (
        q.shape, k.shape, v.shape, q_strides, k_strides, v_strides,
        q_dtype, k_dtype, v_dtype, q.device, k.device, v.device, watchers,
        mask_spec, score_spec, scale, layout, return_lse, deterministic, batch_invariant, backend, plan,
        type(scale), type(return_lse), type(deterministic), type(batch_invariant),  # 1 == True, but is no bool
    )
    # fmt: on
    launch = prepared.lookup(key) if validate is False else None
    if launch is None:
        problem.check_flags(validate=validate, return_lse=return_lse)
        if is_compiling():  # torch.export by running this function on fake tensors
            # fmt: off
            return _traced(
                "attention", q, k, v, mask=mask, scores=scores, scale=scale, layout=layout, return_lse=return_lse,
                deterministic=deterministic, batch_invariant=batch_invariant, backend=backend, plan=plan,
                validate=validate,
            )
            # fmt: on
        described = calls.dense_problem(
            q, k, v, mask, scores, scale, layout, return_lse, deterministic, batch_invariant, watchers
        )
        launch = prepared.prepare(key, described, backend, plan)
    if given[0] is q and given[1] is k and given[2] is v:  # no copies
        known.remember(launch, mask, scale, options, q, k, v)
    out, lse = launch(Operands(q, k, v, mask_operands, score_operands))
    return out if lse is None else (out, lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    mask: UserMask = None,
    scores: tuple[UserScore, ...] = (),
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
    validate: bool = False,
) -> Result:
    """``attention`` over packed sequences of different lengths.

    q (total_q, heads_q, head_dim), k (total_kv, heads_kv, head_dim), v (total_kv, heads_kv, head_dim_v);
    ``cu_seqlens_q``, ``cu_seqlens_kv`` (sequences + 1,) int32 or int64: sequence b owns rows cu[b] to cu[b + 1] - 1.
    ``max_seqlen_*``: no smaller than the longest sequence; read from cu_seqlens if not given. Masks and scores see
    indices local to each sequence.

    Returns out (total_q, heads_q, head_dim_v); with ``return_lse`` also lse (heads_q, total_q). Rows past
    ``cu_seqlens_q[-1]`` are 0 with lse -inf. The other arguments and errors are those of ``attention``; offsets that
    fall, do not begin at 0 or end past the rows raise ``ValueError`` (on a GPU only with ``validate=True``).
    """
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "mask": mask,
        "scores": scores,
        "scale": scale,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        "backend": backend,
        "plan": plan,
        "validate": validate,
    }
    if is_compiling() or (backend == "auto" and plan is None and _only_shapes(q)):
        return _traced("attention_varlen", q, k, v, **options)
    launch, operands = calls.varlen(q, k, v, **options)
    out, lse = launch(operands)
    return out if lse is None else (out, lse)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_lens: Tensor,
    page_table: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary: cache.Rotary | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    mask: UserMask = None,
    scores: tuple[UserScore, ...] = (),
    scale: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
    validate: bool = False,
) -> Result:
    """Attention of a few new queries over a KV cache.

    q (batch, seq_q, heads_q, head_dim); caches (batch, capacity, heads_kv, dim), or with ``page_table`` (batch,
    pages_per_sequence) int32/int64: (pages, page_size, heads_kv, dim). Page strides are read from the tensors; v_cache
    may be a view of k_cache (MLA). ``kv_lens`` (batch,): keys in the cache before the append. ``k_new``, ``v_new``
    (batch, seq_new, heads_kv, dim) are written into the caches first. ``rotary``: a ``Rotary`` that turns q and k_new.
    ``k_scale``, ``v_scale``: fp32, one element or (heads_kv,), for float8 and int8 caches: value = stored · scale.
    ``mask=None`` hides nothing, also for seq_q > 1; ``Causal()`` aligns the last query with the last key.

    Returns out (batch, seq_q, heads_q, head_dim_v) in q's dtype; with ``return_lse`` also lse (batch, heads_q, seq_q).
    Nothing past a sequence's length, and no table entry past its last page, influences a bit. The other arguments and
    errors are those of ``attention``. The caches are written only once every check has passed.
    """
    compiling = is_dynamo_compiling()
    # fmt: off
    options = (
        "decode", scores, page_table, k_new, v_new, rotary, k_scale, v_scale, return_lse, batch_invariant, backend,
        plan, validate,
    )
    # fmt: on
    if not compiling and (launch := known.find(mask, scale, options, q, k_cache, v_cache, kv_lens)) is not None:
        out, lse = launch(Operands(q, k_cache, v_cache, kv_lens=kv_lens))
        return out if lse is None else (out, lse)
    # Where torch.export runs this function, it does so on tensors of types of its own.
    if (
        compiling
        or (type(q) is not Tensor and is_compiling())
        or (backend == "auto" and plan is None and _only_shapes(q))
    ):
        # fmt: off
        return _traced(
            "attention_decode", q, k_cache, v_cache, kv_lens=kv_lens, page_table=page_table, k_new=k_new, v_new=v_new,
            rotary=rotary, k_scale=k_scale, v_scale=v_scale, mask=mask, scores=scores, scale=scale,
            return_lse=return_lse, batch_invariant=batch_invariant, backend=backend, plan=plan, validate=validate,
        )
        # fmt: on
    # fmt: off
    launch, operands = calls.decode(
        q, k_cache, v_cache, kv_lens=kv_lens, page_table=page_table, k_new=k_new, v_new=v_new, rotary=rotary,
        k_scale=k_scale, v_scale=v_scale, mask=mask, scores=scores, scale=scale, return_lse=return_lse,
        batch_invariant=batch_invariant, backend=backend, plan=plan, validate=validate,
    )
    # fmt: on
    if operands.q is q and operands.k is k_cache and operands.v is v_cache and operands.kv_lens is kv_lens:  # no copies
        known.remember(launch, mask, scale, options, q, k_cache, v_cache, kv_lens)
    out, lse = launch(operands)
    return out if lse is None else (out, lse)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: UserMask = None,
    scores: tuple[UserScore, ...] = (),
    scale: float | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    plan: Plan | None = None,
    validate: bool = False,
) -> Explanation:
    """The backend and plan that ``attention`` would use for the same arguments, and every reason why not the others.

    Printable; ``to_json()`` for programs. Runs nothing. Raises what ``attention`` raises.
    """
    problem.check_flags(validate=validate)
    q, k, v = last_contiguous(q, "q"), last_contiguous(k, "k"), last_contiguous(v, "v")
    q, k, v = calls.autocast(q, k, v)
    watchers = watched(q, k, v, _split_scores(scores)[1])
    described = calls.dense_problem(
        q, k, v, mask, scores, scale, layout, return_lse, deterministic, batch_invariant, watchers
    )
    _, transformed, traced, _ = watchers
    if not (transformed or traced):  # such tensors have no address
        described = dataclasses.replace(described, aligned=problem.aligned(q, k, v))
    return dispatch.explain(described, backend, plan)


# attention()'s parameter ``scores`` hides the module of that name.
_split_scores: Callable[[object], tuple[ScoreSpec, tuple[Tensor, ...]]] = scores.split


def _only_shapes(q: object) -> bool:
    """Whether q has no values, on "meta" or as a fake tensor: nor have then the lengths, which a call would read. A
    backend that was named must be asked all the same: most refuse."""
    return getattr(q, "is_meta", False) or (type(q) is not Tensor and hasattr(q, "fake_mode"))


def _traced(name: str, *tensors: Tensor, **options: Any) -> Result:
    """What runs under torch.compile, under torch.export and without values, imported with the first such call."""
    from attnworks import ops

    run: Callable[..., Result] = getattr(ops, name)
    return run(*tensors, **options)
