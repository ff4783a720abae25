"""The torch custom ops that a tracer sees: ``torch.compile`` and ``torch.export`` put one node into their graph, and
what an eager call does (checks of values, choice of backend, prepared launchers) happens when the node runs.

- ``attnworks::forward``: attention over dense or packed tensors, (out, lse).
- ``attnworks::decode``: attention over a cache, (out, lse).
- ``attnworks::lengths``: the checked copies of kv_lens and page_table that decode goes by. New keys are written between
  the two by plain torch operations, which a compiler does in place and fuses with the rotary embedding; an op that
  mutates the caches would be opaque to it. The positions come out of ``lengths``, so its checks come before the write.
- ``attnworks::backward``: the gradients, for both.

Operands are tensors; the rest is one string without lengths or strides, so that a new length compiles nothing anew. An
eager call comes by none of this: ``api`` imports this file when something is traced. Import it yourself to load a
program that was exported with these ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from attnworks import cache, calls, problem, specs
from attnworks.autograd import Joined, no_second_derivative
from attnworks.cache import Rotary
from attnworks.masks import AllOf
from attnworks.problem import Operands

Result = Tensor | tuple[Tensor, Tensor]

# ---- what the tracer runs: from arguments to nodes -------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, return_lse: bool, **said: Any) -> Result:
    """``attnworks.attention`` while it is traced."""
    problem.check_flags(return_lse=return_lse)
    q, k, v = calls.autocast(q, k, v)
    spec, scores, mask = specs.split("dense", (q, k, v), **said)
    out, lse = torch.ops.attnworks.forward(q, k, v, scores, mask, None, None, None, None, scale, spec)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    scale: float | None,
    return_lse: bool,
    **said: Any,
) -> Result:
    """``attnworks.attention_varlen`` while it is traced."""
    problem.check_flags(return_lse=return_lse)
    q, k, v = calls.autocast(q, k, v)
    spec, scores, mask = specs.split("varlen", (q, k, v), **said)
    lengths = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    out, lse = torch.ops.attnworks.forward(q, k, v, scores, mask, *lengths, scale, spec)
    return (out, lse) if return_lse else out


def attention_decode(
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
    scale: float | None,
    return_lse: bool,
    validate: bool,
    **said: Any,
) -> Result:
    """``attnworks.attention_decode`` while it is traced."""
    problem.check_flags(return_lse=return_lse)
    q, k_new, v_new = calls.autocast_decode(q, k_cache, k_new, v_new)
    sizes, _ = cache.decode_sizes(q, k_cache, v_cache, page_table)
    cache.check_lengths_and_table(kv_lens, page_table, sizes.batch, q)
    cache.check_cache_dtypes(q, k_cache, v_cache, k_scale, v_scale)
    cache.check_new_keys(q, k_cache, v_cache, k_new, v_new, sizes)
    positions = None
    if rotary is not None:
        cache.check_rotary(rotary, q)
        positions = rotary.cos.shape[0]
    spec, scores, mask = specs.split("decode", (q, k_cache, v_cache), validate=validate, **said)
    new = 0 if k_new is None else k_new.shape[1]
    capacity, pages, page_size = cache.extent(k_cache, page_table)
    found = torch.ops.attnworks.lengths(kv_lens, page_table, capacity, new, pages, page_size, positions, validate)
    lens, table = found[0], None if page_table is None else found[1]
    q, totals = cache.append_new(q, k_cache, v_cache, lens, table, k_new, v_new, rotary)
    lengths = totals, table, k_scale, v_scale
    out, lse = torch.ops.attnworks.decode(q, k_cache, v_cache, scores, mask, *lengths, scale, spec)
    return (out, lse) if return_lse else out


# ---- what the nodes run ----------------------------------------------------------------------------------------------


def _call(o: Operands, seq_q: int | None, seq_kv: int | None, scale: float | None, spec: str) -> calls.Call:
    """The eager call that a node stands for, prepared."""
    said = specs.parse(spec)
    masked, scored = iter(o.mask), iter(o.scores)
    parts = tuple(next(masked) if part is None else part for part in said.mask)
    options: dict[str, Any] = {
        "mask": AllOf(parts) if parts else None,
        "scores": tuple(part(next(scored)) if isinstance(part, type) else part for part in said.scores),
        "scale": scale,
        "return_lse": True,
        "batch_invariant": said.batch_invariant,
        "backend": said.backend,
        "plan": said.plan,
        "validate": said.validate,
        "watchers": (said.differentiable, False, False, torch.are_deterministic_algorithms_enabled()),
    }
    if said.form == "decode":
        assert o.kv_lens is not None
        lengths: dict[str, Any] = {"kv_lens": o.kv_lens, "page_table": o.page_table}
        given = lengths | {"k_scale": o.k_scale, "v_scale": o.v_scale, "k_new": None, "v_new": None, "rotary": None}
        return calls.decode(o.q, o.k, o.v, **given, **options)
    options["deterministic"] = said.deterministic
    if said.form == "dense":
        return calls.dense(o.q, o.k, o.v, layout=said.layout, **options)
    lengths = {"cu_seqlens_q": o.cu_seqlens_q, "cu_seqlens_kv": o.cu_seqlens_kv}
    return calls.varlen(o.q, o.k, o.v, **lengths, max_seqlen_q=seq_q, max_seqlen_kv=seq_kv, **options)


def _run(call: calls.Call) -> tuple[Tensor, Tensor]:
    launch, o = call
    out, lse = launch.forward(o) if isinstance(launch, Joined) else launch(o)
    assert lse is not None
    return out.contiguous(), lse.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Sequence[Tensor],
    mask: Sequence[Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    scale: float | None,
    spec: str,
) -> tuple[Tensor, Tensor]:
    o = Operands(q, k, v, tuple(mask), tuple(scores), cu_seqlens_q, cu_seqlens_kv)
    return _run(_call(o, max_seqlen_q, max_seqlen_kv, scale, spec))


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Sequence[Tensor],
    mask: Sequence[Tensor],
    kv_lens: Tensor,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    spec: str,
) -> tuple[Tensor, Tensor]:
    o = Operands(q, k_cache, v_cache, tuple(mask), tuple(scores), None, None, kv_lens, page_table, k_scale, v_scale)
    return _run(_call(o, None, None, scale, spec))


def _lengths(
    kv_lens: Tensor,
    page_table: Tensor | None,
    capacity: int,
    new: int,
    pages: int,
    page_size: int,
    positions: int | None,
    validate: bool,
) -> list[Tensor]:
    values = validate or kv_lens.device.type == "cpu"
    lens, table = cache.read_lengths(kv_lens, page_table, capacity, new, pages, page_size, positions, values=values)
    return [lens] if table is None else [lens, table]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Sequence[Tensor],
    mask: Sequence[Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    kv_lens: Tensor | None,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    needs: Sequence[bool],
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    scale: float | None,
    spec: str,
) -> list[Tensor]:
    """Gradients of those of q, k, v and the scores' operands that ``needs`` asks for."""
    tensors = [x.detach().requires_grad_(need) for x, need in zip((q, k, v, *scores), needs, strict=True)]
    rest = cu_seqlens_q, cu_seqlens_kv, kv_lens, page_table, k_scale, v_scale
    leaves = [x for x in tensors if x.requires_grad]
    with _autograd():
        given = Operands.of((len(scores), len(mask)), (*tensors, *mask, *rest))
        launch, o = _call(given, max_seqlen_q, max_seqlen_kv, scale, spec)
        if isinstance(launch, Joined):
            found = launch.backward(o, out, lse, d_out, d_lse, tuple(needs))
            gradients = [d for d in (found.q, found.k, found.v, *found.scores) if d is not None]
        else:
            again = [(y, d) for y, d in zip(launch(o), (d_out, d_lse), strict=True) if d is not None]
            results, cotangents = zip(*[(y, d) for y, d in again if y is not None and y.requires_grad], strict=True)
            gradients = list(torch.autograd.grad(results, leaves, cotangents, materialize_grads=True))
    return [_as_like(d.detach(), x) for d, x in zip(gradients, leaves, strict=True)]


def _autograd() -> AbstractContextManager[object]:
    """Autograd, which the dispatcher has switched off below an op: a launcher made of torch operations is run again and
    differentiated by it."""
    stack = ExitStack()
    autograd_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    stack.enter_context(torch._C._ForceDispatchKeyGuard(included, excluded - autograd_keys))
    stack.enter_context(torch.enable_grad())
    return stack


def _as_like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides that ``torch.empty_like(x)`` has, as the fake implementation says."""
    if gradient.is_contiguous() and x.is_contiguous():
        return gradient
    like = torch.empty_like(x)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


# ---- what the nodes give, without running them -----------------------------------------------------------------------


def _results(q: Tensor, shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return q.new_empty(shape), q.new_empty(lse_shape, dtype=torch.promote_types(q.dtype, torch.float32))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, scores: Any, mask: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    said = specs.parse(rest[-1])
    problem.check_tensors(q=q, k=k, v=v)
    if said.form == "varlen":
        problem.check_shape("q", q, "total_q heads_q head_dim")
        problem.check_shape("k", k, "total_kv heads_kv head_dim", head_dim=q.shape[2])
        problem.varlen_sizes(q, k, v, rest[0], rest[1], 0, 0)
        return _results(q, (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0]))
    sizes = problem.dense_sizes(q, k, v, said.layout)
    return _results(q, (*q.shape[:3], v.shape[3]), (sizes.batch, sizes.heads_q, sizes.seq_q))


def _decode_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, seq_q, heads_q, _ = q.shape
    return _results(q, (batch, seq_q, heads_q, v_cache.shape[3]), (batch, heads_q, seq_q))


def _lengths_fake(kv_lens: Tensor, page_table: Tensor | None, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=torch.int64) for x in (kv_lens, page_table) if x is not None]


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, scores: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    needs = rest[-5]
    return [torch.empty_like(x) for x, need in zip((q, k, v, *scores), needs, strict=True) if need]


# ---- autograd --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Both ops begin with q, k, v, scores, mask and end with scale, spec."""
    q, k, v, scores, mask, *rest, ctx.scale, ctx.spec = inputs
    ctx.counts = len(scores), len(mask)
    if specs.parse(ctx.spec).form == "decode":
        tensors, ctx.longest = (None, None, *rest), (None, None)
    else:
        tensors, ctx.longest = (*rest[:2], None, None, None, None), tuple(rest[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, q, k, v, *scores, *mask, *tensors)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    o = Operands.of(ctx.counts, tensors)
    wants = ctx.needs_input_grad
    needs = [*wants[:3], *wants[3]]
    if any(want is True for want in wants[5:]):
        raise ValueError("k_scale, v_scale: required grad, must not in a traced call")
    lengths = o.cu_seqlens_q, o.cu_seqlens_kv, o.kv_lens, o.page_table, o.k_scale, o.v_scale
    found = iter(
        torch.ops.attnworks.backward(
            o.q, o.k, o.v, o.scores, o.mask, *lengths, out, lse, d_out, d_lse, needs, *ctx.longest, ctx.scale, ctx.spec
        )
    )
    q, k, v, *scores = (next(found) if need else None for need in needs)
    return q, k, v, scores, [None] * len(o.mask), *[None] * (len(wants) - 5)


def _differentiate_again(ctx: Any, *cotangents: Any) -> None:
    raise NotImplementedError(no_second_derivative("chosen by a traced call"))


# ---- registration ----------------------------------------------------------------------------------------------------

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor[] scores, Tensor[] mask"
_OFFSETS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv"
_LONGEST = "SymInt? max_seqlen_q, SymInt? max_seqlen_kv"
_CACHED = "Tensor? page_table, Tensor? k_scale, Tensor? v_scale"
_RESULTS = "Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, bool[] needs"
_SAID = "float? scale, str spec"
_SIZES = "SymInt capacity, SymInt new, SymInt pages, SymInt page_size, SymInt? positions"

LIBRARY = torch.library.Library("attnworks", "DEF")  # type: ignore[no-untyped-call]

for _name, _schema, _kernel, _fake in (
    ("forward", f"({_OPERANDS}, {_OFFSETS}, {_LONGEST}, {_SAID}) -> (Tensor, Tensor)", _forward, _forward_fake),
    ("decode", f"({_OPERANDS}, Tensor kv_lens, {_CACHED}, {_SAID}) -> (Tensor, Tensor)", _decode, _decode_fake),
    ("lengths", f"(Tensor kv_lens, Tensor? page_table, {_SIZES}, bool validate) -> Tensor[]", _lengths, _lengths_fake),
    (
        "backward",
        f"({_OPERANDS}, {_OFFSETS}, Tensor? kv_lens, {_CACHED}, {_RESULTS}, {_LONGEST}, {_SAID}) -> Tensor[]",
        _backward,
        _backward_fake,
    ),
):
    LIBRARY.define(_name + _schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"attnworks::{_name}", _fake, lib=LIBRARY)

for _name in ("forward", "decode"):
    torch.library.register_autograd(f"attnworks::{_name}", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("attnworks::backward", _differentiate_again, lib=LIBRARY)
