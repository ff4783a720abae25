"""attention() and its siblings: find or build the prepared call, run it.

A call's way: the key of everything a launcher depends on → the prepared launcher; on a miss Problem →
``dispatch.choose`` (pure) → Plan → ``prepare``. The hot path builds no Problem and checks nothing that the key already
settles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from attnworks import cache, dispatch, masks, problem, scores
from attnworks.backends import Launcher
from attnworks.dispatch import Explanation
from attnworks.masks import Causal, MaskSpec, UserMask, Window
from attnworks.plan import Plan
from attnworks.problem import Layout, Operands, Problem, Sizes, packed_strides, strides_of
from attnworks.scores import ScoreSpec, UserScore

Result = Tensor | tuple[Tensor, Tensor]

# Prepared calls. Emptied when full rather than evicted one by one: a program that meets this many distinct problems
# has no working set worth an LRU's cost on every hit.
_PREPARED: dict[Hashable, Launcher] = {}
_PREPARED_LIMIT = 4096
# Masks that are their own key; the others are split into a spec first, whose operands come anew with each call.
_PLAIN_MASKS = (type(None), Causal, Window)


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
    mask_spec: Any
    try:
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        if q_strides[-1] != 1 or k_strides[-1] != 1 or v_strides[-1] != 1:
            q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
            q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
    except (AttributeError, RuntimeError, IndexError):
        problem.check_tensors(q=q, k=k, v=v)
        problem.dense_sizes(q, k, v, layout)
        raise
    mask_spec, mask_operands = (mask, ()) if isinstance(mask, _PLAIN_MASKS) else masks.split(mask)
    score_spec, score_operands = ((), ()) if scores == () else _split_scores(scores)
    differentiable, traced = _differentiable(q, k, v, score_operands), _traced(q, k, v)
    # fmt: off
    key = (
        q.shape, k.shape, v.shape, q_strides, k_strides, v_strides,
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, differentiable, traced,
        mask_spec, score_spec, scale, layout, return_lse, deterministic, batch_invariant, backend, plan,
        type(scale), type(return_lse), type(deterministic), type(batch_invariant),  # 1 == True, but is no bool
    )
    # fmt: on
    launch = _lookup(key) if validate is False else None
    if launch is None:
        problem.check_flags(validate=validate, return_lse=return_lse)
        described = _dense_problem(
            q, k, v, mask, scores, scale, layout, return_lse, deterministic, batch_invariant, differentiable
        )
        launch = _prepare(key, described, backend, plan)
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
    q, k, v = _last_contiguous(q, "q"), _last_contiguous(k, "k"), _last_contiguous(v, "v")
    problem.check_tensors(q=q, k=k, v=v)
    problem.check_flags(
        validate=validate, return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant
    )
    problem.check_shape("q", q, "total_q heads_q head_dim")
    problem.check_shape("k", k, "total_kv heads_kv head_dim", head_dim=q.shape[2])
    problem.check_shape("v", v, "total_kv heads_kv head_dim_v", total_kv=k.shape[0], heads_kv=k.shape[1])
    problem.check_heads(q.shape[1], k.shape[1])
    problem.check_head_dims(q.shape[2], v.shape[2])
    values = validate or q.device.type == "cpu"
    offsets_q = cache.check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], q, values=values)
    offsets_kv = cache.check_offsets("cu_seqlens_kv", cu_seqlens_kv, k.shape[0], q, values=values)
    if offsets_kv.shape != offsets_q.shape:
        raise ValueError(
            f"cu_seqlens_kv: had {offsets_kv.numel()} entries, must have {offsets_q.numel()} like cu_seqlens_q"
        )
    sizes = Sizes(
        batch=offsets_q.numel() - 1,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=cache.check_max_seqlen("max_seqlen_q", max_seqlen_q, offsets_q, values=values),
        seq_kv=cache.check_max_seqlen("max_seqlen_kv", max_seqlen_kv, offsets_kv, values=values),
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
    )
    mask_spec, mask_operands, score_spec, score_operands = _modifiers(mask, scores, sizes, q)
    described = Problem(
        form="varlen",
        **sizes._asdict(),
        dtype=q.dtype,
        device=str(q.device),
        scale=problem.check_scale(scale, sizes.head_dim),
        q_strides=packed_strides(q),
        k_strides=packed_strides(k),
        v_strides=packed_strides(v),
        mask=mask_spec,
        scores=score_spec,
        total_q=q.shape[0],
        total_kv=k.shape[0],
        return_lse=return_lse,
        differentiable=_differentiable(q, k, v, score_operands),
        traced=_traced(q, k, v),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    key = (described, backend, plan)
    launch = _lookup(key) or _prepare(key, described, backend, plan)
    out, lse = launch(
        Operands(q, k, v, mask_operands, score_operands, cu_seqlens_q=offsets_q, cu_seqlens_kv=offsets_kv)
    )
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
    problem.check_flags(validate=validate, return_lse=return_lse, batch_invariant=batch_invariant)
    q = _last_contiguous(q, "q")
    sizes, page_size = cache.decode_sizes(q, k_cache, v_cache, page_table)
    kv_dtype = cache.check_cache_dtypes(q, k_cache, v_cache, k_scale, v_scale)
    new = cache.check_new_keys(q, k_cache, v_cache, k_new, v_new, sizes)
    values = validate or q.device.type == "cpu"
    lens = cache.check_kv_lens(kv_lens, sizes.batch, sizes.seq_kv, new, q, values=values)
    totals = lens + new
    table = None
    if page_table is not None:
        table = cache.check_page_table(page_table, totals, k_cache.shape[0], page_size, q, values=values)
    if rotary is not None:
        cache.check_rotary(rotary, q, totals, values=values)
    mask_spec, mask_operands, score_spec, score_operands = _modifiers(mask, scores, sizes, q)
    k_read, v_read = _last_contiguous(k_cache), _last_contiguous(v_cache)
    described = Problem(
        form="decode",
        **sizes._asdict(),
        dtype=q.dtype,
        device=str(q.device),
        scale=problem.check_scale(scale, sizes.head_dim),
        q_strides=strides_of(q, "bshd"),
        k_strides=strides_of(k_read, "bshd"),
        v_strides=strides_of(v_read, "bshd"),
        mask=mask_spec,
        scores=score_spec,
        layout="bshd",
        kv_dtype=kv_dtype,
        page_size=page_size,
        return_lse=return_lse,
        differentiable=_differentiable(q, k_cache, v_cache, score_operands),
        traced=_traced(q, k_cache, v_cache),
        batch_invariant=batch_invariant,
    )
    key = (described, backend, plan)
    launch = _lookup(key) or _prepare(key, described, backend, plan)
    if rotary is not None:
        q = cache.rotate(q, totals[:, None] - sizes.seq_q + torch.arange(sizes.seq_q, device=q.device), rotary)
    if k_new is not None and v_new is not None:
        positions = lens[:, None] + torch.arange(new, device=q.device)
        cache.append(k_cache, k_new if rotary is None else cache.rotate(k_new, positions, rotary), positions, table)
        cache.append(v_cache, v_new, positions, table)
        k_read, v_read = _last_contiguous(k_cache), _last_contiguous(v_cache)
    out, lse = launch(
        Operands(
            q,
            k_read,
            v_read,
            mask_operands,
            score_operands,
            kv_lens=totals,
            page_table=table,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    )
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
    q, k, v = _last_contiguous(q, "q"), _last_contiguous(k, "k"), _last_contiguous(v, "v")
    differentiable = _differentiable(q, k, v, _split_scores(scores)[1])
    described = _dense_problem(
        q, k, v, mask, scores, scale, layout, return_lse, deterministic, batch_invariant, differentiable
    )
    return dispatch.explain(described, backend, plan)


# ---- from arguments to a prepared call -------------------------------------------------------------------------------


def _dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: UserMask,
    user_scores: tuple[UserScore, ...],
    scale: float | None,
    layout: Layout,
    return_lse: bool,
    deterministic: bool,
    batch_invariant: bool,
    differentiable: bool,
) -> Problem:
    problem.check_tensors(q=q, k=k, v=v)
    problem.check_flags(return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant)
    sizes = problem.dense_sizes(q, k, v, layout)
    mask_spec, _, score_spec, _ = _modifiers(mask, user_scores, sizes, q)
    return Problem(
        form="dense",
        **sizes._asdict(),
        dtype=q.dtype,
        device=str(q.device),
        scale=problem.check_scale(scale, sizes.head_dim),
        q_strides=strides_of(q, layout),
        k_strides=strides_of(k, layout),
        v_strides=strides_of(v, layout),
        mask=mask_spec,
        scores=score_spec,
        layout=layout,
        return_lse=return_lse,
        differentiable=differentiable,
        traced=_traced(q, k, v),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )


def _modifiers(
    mask: UserMask, user_scores: tuple[UserScore, ...], sizes: Sizes, q: Tensor
) -> tuple[MaskSpec, tuple[Tensor, ...], ScoreSpec, tuple[Tensor, ...]]:
    mask_spec, mask_operands = masks.split(mask)
    score_spec, score_operands = _split_scores(user_scores)
    problem.check_mask_operands(mask_spec, mask_operands, sizes, q)
    problem.check_score_operands(score_spec, score_operands, sizes, q)
    return mask_spec, mask_operands, score_spec, score_operands


# attention()'s parameter ``scores`` hides the module of that name.
_split_scores: Callable[[object], tuple[ScoreSpec, tuple[Tensor, ...]]] = scores.split


def _prepare(key: Hashable, described: Problem, backend: str, plan: Plan | None) -> Launcher:
    chosen, best, verdicts = dispatch.choose(described, backend, plan)
    if backend == "auto" and plan is None:
        dispatch.warn_if_quadratic(described, chosen, verdicts)
    launch = chosen.prepare(described, best)
    # A user's function would be kept alive, with all it captured, for a key that a fresh lambda never meets again.
    if not _holds_functions(described):
        if len(_PREPARED) >= _PREPARED_LIMIT:
            _PREPARED.clear()
        _PREPARED[key] = launch
    return launch


def _lookup(key: Hashable) -> Launcher | None:
    try:
        return _PREPARED.get(key)
    except TypeError:  # an argument that cannot be hashed is a wrong one: the checks that follow name it
        return None


def _holds_functions(described: Problem) -> bool:
    return any(isinstance(term, masks.Predicate) for term in described.mask) or any(
        term.kind == "function" for term in described.scores
    )


def _last_contiguous(tensor: Tensor, name: str = "") -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a copy; a readable error for what is no tensor."""
    if name and not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: was {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.layout != torch.strided or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous() if tensor.shape[-1] != 1 else tensor.clone(memory_format=torch.contiguous_format)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, operands: tuple[Tensor, ...]) -> bool:
    """Whether autograd, forward-mode AD or a functorch transform watches the call."""
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(operand.requires_grad for operand in operands)
    ):
        return True
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _traced(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a torch-dispatch mode (fake tensors, FX) or a tensor subclass of that kind watches the call."""
    plain = Tensor.__torch_dispatch__
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or type(q).__torch_dispatch__ is not plain
        or type(k).__torch_dispatch__ is not plain
        or type(v).__torch_dispatch__ is not plain
    )
