"""Problem: what is asked of an attention kernel, as one frozen, hashable value; Operands: the tensors it is asked of.

Everything a kernel is chosen and built by is in the Problem; nothing in it refers to memory. A user's call becomes a
Problem only when no prepared call is found for it (``api.py``); the workbench starts from Problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnworks import masks, scores
from attnworks.expressions import in_memory
from attnworks.masks import MaskSpec
from attnworks.scores import ScoreSpec

Form = Literal["dense", "varlen", "decode"]
Layout = Literal["bhsd", "bshd"]
LAYOUTS = ("bhsd", "bshd")
Strides = tuple[int, int, int]  # (batch, head, row) in elements; in a paged cache "batch" is the page

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    ``form``: "dense" (batch of equal lengths), "varlen" (packed sequences; ``seq_q``/``seq_kv`` are the maxima,
    ``total_q``/``total_kv`` the packed lengths) or "decode" (a cache of capacity ``seq_kv`` with its own length for
    each sequence; ``page_size`` > 0 if it is paged). Strides are in elements, (batch, head, row), whatever the layout.
    ``differentiable``: q, k, v or a score operand requires grad, so autograd wants the first derivative.
    ``transformed``: forward-mode AD or a functorch transform (vmap, grad, ...) is active, which only torch operations
    are sure to follow. ``traced``: a tracer or a tensor subclass must see torch operations (fake tensors have no memory
    at all). ``aligned``: q, k and v begin at addresses that are multiples of 16 bytes.
    """

    form: Form
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: str
    scale: float
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    mask: MaskSpec = ()
    scores: ScoreSpec = ()
    layout: Layout = "bhsd"
    kv_dtype: torch.dtype | None = None  # the cache's, where it is not ``dtype``
    total_q: int = 0
    total_kv: int = 0
    page_size: int = 0
    return_lse: bool = False
    differentiable: bool = False
    transformed: bool = False
    traced: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    aligned: bool = True

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def element_size(self) -> int:
        return self.dtype.itemsize

    def visible_pairs(self) -> int:
        """Query-key pairs of one head that closed bounds leave visible; other masks count as hiding nothing."""
        bounds = [term for term in self.mask if isinstance(term, masks.Bounds)]
        if not bounds:
            return self.seq_q * self.seq_kv
        rows = torch.arange(self.seq_q, dtype=torch.int64, device="cpu")
        low = torch.zeros_like(rows)
        high = torch.full_like(rows, self.seq_kv)
        for term in bounds:
            origin = rows + (self.seq_kv - self.seq_q if term.align == "bottom-right" else 0)
            if term.left is not None:
                low = torch.maximum(low, origin - term.left)
            if term.right is not None:
                high = torch.minimum(high, origin + term.right + 1)
        return int((high - low).clamp_min(0).sum())

    def flops(self, *, backward: bool = False) -> int:
        """Floating-point operations of the matrix products: 2·(head_dim + head_dim_v) for each visible pair forward
        (Q Kᵀ and P V); backward has five products (S again, dP, dV, dQ, dK)."""
        pairs = self.batch * self.heads_q * self.visible_pairs()
        if backward:
            return 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    def minimum_bytes(self) -> int:
        """Bytes that must cross the slow memory: q, k, v read once, out (and lse if asked for) written once."""
        rows_q = self.total_q if self.form == "varlen" else self.batch * self.seq_q
        rows_kv = self.total_kv if self.form == "varlen" else self.batch * self.seq_kv
        kv_size = (self.kv_dtype or self.dtype).itemsize
        q_and_out = rows_q * self.heads_q * (self.head_dim + self.head_dim_v) * self.element_size
        kv = rows_kv * self.heads_kv * (self.head_dim + self.head_dim_v) * kv_size
        return q_and_out + kv + (4 * rows_q * self.heads_q if self.return_lse else 0)

    def result_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of out and lse."""
        if self.form == "varlen":
            return (self.total_q, self.heads_q, self.head_dim_v), (self.heads_q, self.total_q)
        middle = (self.heads_q, self.seq_q) if self.layout == "bhsd" else (self.seq_q, self.heads_q)
        return (self.batch, *middle, self.head_dim_v), (self.batch, self.heads_q, self.seq_q)

    def result_strides(self) -> tuple[Strides, Strides]:
        """(batch, head, row) strides of out and lse, both contiguous."""
        d = self.head_dim_v
        if self.form == "varlen":
            return (0, d, self.heads_q * d), (0, self.total_q, 1)
        heads_rows = (self.seq_q * d, d) if self.layout == "bhsd" else (d, self.heads_q * d)
        return (self.heads_q * self.seq_q * d, *heads_rows), (self.heads_q * self.seq_q, self.seq_q, 1)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict for records and reports; masks and scores in words."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("mask", "scores")}
        for name in ("dtype", "kv_dtype"):
            values[name] = str(values[name]).removeprefix("torch.") if values[name] is not None else None
        return values | {"mask": masks.describe(self.mask), "scores": scores.describe(self.scores)}


@dataclass(slots=True)
class Operands:
    """The tensors of one call, in the layout that the Problem names. Values in ``cu_seqlens``, ``kv_lens`` and
    ``page_table`` are checked copies (int64), so that a caller's later writes cannot lead a kernel astray."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    kv_lens: Tensor | None = None
    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them in a row: q, k, v, the scores', the masks', the rest; what autograd wants to be given."""
        rest = (self.cu_seqlens_q, self.cu_seqlens_kv, self.kv_lens, self.page_table, self.k_scale, self.v_scale)
        return (self.q, self.k, self.v, *self.scores, *self.mask, *rest)

    @classmethod
    def of(cls, counts: tuple[int, int], tensors: Sequence[Any]) -> Operands:
        """From what ``tensors`` gave, with the numbers of the scores' and of the masks' operands."""
        q, k, v, *others = tensors
        masks, rest = counts[0], sum(counts)
        return cls(q, k, v, tuple(others[masks:rest]), tuple(others[:masks]), *others[rest:])


class Sizes(NamedTuple):
    """The sizes read off q, k and v."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int


# ---- validation ------------------------------------------------------------------------------------------------------


def check_tensors(**tensors: object) -> None:
    """q, k, v: tensors of one floating dtype and device; ``TypeError`` or ``ValueError`` names the first that isn't."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: was {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.is_nested:
            raise TypeError(f"{name}: was a nested tensor, must be a strided one (packed sequences: attention_varlen)")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: was a tensor of layout {tensor.layout}, must be torch.strided")
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name}: was {tensor.dtype}, must be one of float64, float32, bfloat16, float16")
        reference = tensors[first]
        assert isinstance(reference, Tensor)
        if tensor.dtype != reference.dtype:
            raise TypeError(f"{name}: was {tensor.dtype}, must be {reference.dtype} like {first}")
        check_device(name, tensor, reference, first)


def check_device(name: str, tensor: Tensor, reference: Tensor, reference_name: str = "q") -> None:
    if tensor.device != reference.device:
        raise ValueError(f"{name}: was on {tensor.device}, must be on {reference.device} like {reference_name}")


def check_shape(name: str, tensor: Tensor, form: str, **must: int) -> None:
    """``form`` spells the shape, e.g. "batch heads_kv seq_kv head_dim"; the named sizes in ``must`` are enforced."""
    names = form.split()
    if tensor.dim() != len(names):
        raise ValueError(f"{name}: was of shape {tuple(tensor.shape)}, must be ({', '.join(names)})")
    for size, dim in zip(tensor.shape, names, strict=True):
        if dim in must and size != must[dim]:
            raise ValueError(f"{name}: was of shape {tuple(tensor.shape)}, must have {dim} = {must[dim]}")


def check_heads(heads_q: int, heads_kv: int, owners: str = "k and v") -> None:
    if heads_q != heads_kv and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"q: had {heads_q} heads, must have a multiple of the {heads_kv} heads of {owners}")


def check_head_dims(head_dim: int, head_dim_v: int, owner_v: str = "v") -> None:
    for name, owner, size in (("head_dim", "q", head_dim), ("head_dim_v", owner_v, head_dim_v)):
        if size < 1:
            raise ValueError(f"{owner}: had {name} 0, must be at least 1")


def check_scale(scale: object, head_dim: int) -> float:
    """The scale to use: 1/sqrt(head_dim) where ``scale`` is None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale: was {scale!r}, must be None or a number (a Python int or float)")
    if not abs(scale) <= torch.finfo(torch.float32).max:  # also NaN; kernels hold it in fp32
        raise ValueError(f"scale: was {scale}, must be finite in float32")
    return float(scale)


def check_mask_operands(spec: MaskSpec, operands: tuple[Tensor, ...], sizes: Sizes, q: Tensor) -> None:
    for term in spec:
        if isinstance(term, masks.DenseMask):
            tensor = operands[term.operand.index]
            check_device("mask", tensor, q)
            _check_broadcast("mask", tensor, sizes)
        elif isinstance(term, masks.Predicate):
            for tensor in term.own(operands):
                check_device(f"mask: a tensor captured by {term.name}", tensor, q)


def check_score_operands(spec: ScoreSpec, operands: tuple[Tensor, ...], sizes: Sizes, q: Tensor) -> None:
    for term in spec:
        for tensor in term.own(operands):
            check_device(f"scores: a tensor captured by {term.name}", tensor, q)
        if term.operand is None:
            continue
        tensor = operands[term.operand.index]
        name = f"scores {term.kind}"
        check_device(name, tensor, q)
        if term.kind == "bias":
            _check_broadcast(name, tensor, sizes)
            continue
        shapes: list[tuple[int, ...]] = [(sizes.heads_q,)]
        if term.kind == "alibi":
            shapes.append((sizes.batch, sizes.heads_q))
        if tuple(tensor.shape) not in shapes:
            raise ValueError(f"{name}: was of shape {tuple(tensor.shape)}, must be {' or '.join(map(str, shapes))}")


def _check_broadcast(name: str, tensor: Tensor, sizes: Sizes) -> None:
    full = (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.seq_kv)
    missing = 4 - tensor.dim()
    if missing < 0 or any(size not in (1, whole) for size, whole in zip(tensor.shape, full[missing:], strict=True)):
        raise ValueError(
            f"{name}: was of shape {tuple(tensor.shape)}, must broadcast to (batch, heads_q, seq_q, seq_kv) = {full}"
        )


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: was {value!r}, must be a bool")


def dense_sizes(q: Tensor, k: Tensor, v: Tensor, layout: str) -> Sizes:
    """Sizes of a dense call; raises ``ValueError`` where shapes or the layout do not fit."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: was {layout!r}, must be one of {LAYOUTS}")
    middle = "heads_{0} seq_{0}" if layout == "bhsd" else "seq_{0} heads_{0}"
    check_shape("q", q, f"batch {middle.format('q')} head_dim")
    batch, head_dim = q.shape[0], q.shape[3]
    check_shape("k", k, f"batch {middle.format('kv')} head_dim", batch=batch, head_dim=head_dim)
    heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
    sizes = Sizes(batch, q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows], head_dim, v.shape[-1])
    check_shape(
        "v", v, f"batch {middle.format('kv')} head_dim_v", batch=batch, heads_kv=sizes.heads_kv, seq_kv=sizes.seq_kv
    )
    check_heads(sizes.heads_q, sizes.heads_kv)
    check_head_dims(sizes.head_dim, sizes.head_dim_v)
    return sizes


def varlen_sizes(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_kv: Tensor, seq_q: int, seq_kv: int
) -> Sizes:
    """Sizes of packed q (total_q, heads_q, head_dim) and k, seq_q and seq_kv the longest; raises ``TypeError`` or
    ``ValueError`` where tensors do not fit each other."""
    check_tensors(q=q, k=k, v=v)
    check_shape("v", v, "total_kv heads_kv head_dim_v", total_kv=k.shape[0], heads_kv=k.shape[1])
    check_heads(q.shape[1], k.shape[1])
    check_head_dims(q.shape[2], v.shape[2])
    if offsets_kv.shape != offsets_q.shape:
        raise ValueError(
            f"cu_seqlens_kv: had {offsets_kv.numel()} entries, must have {offsets_q.numel()} like cu_seqlens_q"
        )
    return Sizes(offsets_q.numel() - 1, q.shape[1], k.shape[1], seq_q, seq_kv, q.shape[2], v.shape[2])


def strides_of(tensor: Tensor, layout: str) -> Strides:
    """(batch, head, row) strides of a four-dimensional tensor in ``layout``."""
    first, second, third, _ = tensor.stride()
    return (first, second, third) if layout == "bhsd" else (first, third, second)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a fresh tensor has. Where a call gives them with its shape, ``torch.empty_strided`` takes half the time of
    ``torch.empty``, which has more to decide."""
    return torch.empty(shape, device="meta").stride()


def packed_strides(tensor: Tensor) -> Strides:
    """(batch, head, row) strides of a packed (total, heads, dim) tensor; its batch stride means nothing and is 0."""
    return (0, tensor.stride(1), tensor.stride(0))


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all begin at addresses that are multiples of 16 bytes."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0


def last_contiguous(tensor: Tensor, name: str = "") -> Tensor:
    """The tensor itself where its last dimension is contiguous and its memory holds its values, else a copy; a readable
    error for what is no tensor."""
    if name and not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: was {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.layout != torch.strided or tensor.dim() == 0 or tensor.is_nested:
        return tensor
    tensor = in_memory(tensor)
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous() if tensor.shape[-1] != 1 else tensor.clone(memory_format=torch.contiguous_format)


def restrided(problem: Problem, o: Operands) -> Problem:
    """The problem with the strides that the operands have now; itself where they are as it says."""
    packed = problem.form == "varlen"
    q, k, v = (packed_strides(x) if packed else strides_of(x, problem.layout) for x in (o.q, o.k, o.v))
    mask = tuple(_restrided_term(term, o.mask) for term in problem.mask)
    scores = tuple(_restrided_term(term, o.scores) for term in problem.scores)
    if (q, k, v, mask, scores) == (
        problem.q_strides,
        problem.k_strides,
        problem.v_strides,
        problem.mask,
        problem.scores,
    ):
        return problem
    return replace(problem, q_strides=q, k_strides=k, v_strides=v, mask=mask, scores=scores)


def _restrided_term(term: Any, operands: tuple[Tensor, ...]) -> Any:
    operand, expression = getattr(term, "operand", None), getattr(term, "expression", None)
    if operand is not None and operand.strides != operands[operand.index].stride():
        return replace(term, operand=replace(operand, strides=operands[operand.index].stride()))
    if expression is not None:  # what a user's function captured
        specs = tuple(
            replace(spec, strides=tensor.stride())
            for spec, tensor in zip(expression.operands, term.own(operands), strict=True)
        )
        if specs != expression.operands:
            return replace(term, expression=type(expression)(expression.nodes, specs))
    return term
