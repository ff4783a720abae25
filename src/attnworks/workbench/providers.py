"""Providers: the competitors of a benchmark. Each binds a problem's inputs to a call without arguments, in its best
form.

Inputs are contiguous (batch, heads, rows, dim). A provider that likes another layout makes its copy when it binds,
outside the timing: a caller who uses it would keep the data that way."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnworks import api, dispatch, masks
from attnworks.masks import Bounds, Causal, Window
from attnworks.plan import Plan
from attnworks.problem import Layout, Problem, Strides, check_heads
from attnworks.workbench.quick_check import visible_keys

_PIECE = 2**15  # numbers that a thread draws at a time: as many as torch copies without threads of its own


class Inputs(NamedTuple):
    """q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (batch, heads_kv, seq_kv,
    head_dim_v)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self)


class Bound(NamedTuple):
    """``run`` is what is timed; ``out`` turns its result into (batch, heads_q, seq_q, head_dim_v), outside the
    timing."""

    run: Callable[[], Any]
    out: Callable[[Any], Tensor]


def _as_it_is(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _swap_rows_and_heads(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


class Provider:
    """One competitor. ``name`` is what users type. ``brings_threads``: it runs threads of its own beside OpenMP's."""

    name = ""
    brings_threads = False

    def form(self, problem: Problem) -> str:
        """The call that is timed, as a user would write it."""
        raise NotImplementedError

    def refuses(self, problem: Problem) -> str:
        """Why it cannot run the problem; "" if it can."""
        return ""

    def answers(self, problem: Problem) -> Problem:
        """The problem that it solves, where that is another one (marked in every table)."""
        return problem

    def plan(self, problem: Problem) -> Plan | None:
        """How the problem is tiled, where that is known: for the modelled bytes."""
        return None

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        raise NotImplementedError


# ---- attnworks -------------------------------------------------------------------------------------------------------


class Attnworks(Provider):
    """attnworks' public functions, with any backend and plan."""

    def __init__(self, name: str = "attnworks", backend: str = "auto", explicit: Plan | None = None) -> None:
        self.name = name
        self._backend = backend
        self._explicit = explicit

    def form(self, problem: Problem) -> str:
        mask = f", mask={_written(problem)}" if problem.mask else ""
        chosen = "" if self._backend == "auto" else f", backend={self._backend!r}"
        if problem.form == "decode":
            return f"attention_decode(q, k_cache, v_cache, kv_lens=kv_lens{mask}{chosen})"
        layout = ', layout="bshd"' if problem.layout == "bshd" else ""
        return f"attention(q, k, v{mask}{layout}{chosen})"

    def refuses(self, problem: Problem) -> str:
        if problem.form == "varlen":
            return "packed sequences are not benchmarked yet"
        if problem.scores:
            return "score modifiers are not benchmarked yet"
        return ""

    def plan(self, problem: Problem) -> Plan | None:
        return dispatch.choose(problem, self._backend, self._explicit)[1]

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        options: dict[str, Any] = {
            "mask": user_mask(problem),
            "scale": problem.scale,
            "backend": self._backend,
            "plan": self._explicit,
        }
        if problem.form == "decode":
            q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
            lens = _full_lens(problem)
            return Bound(lambda: api.attention_decode(q, k, v, kv_lens=lens, **options), _swap_rows_and_heads)
        if problem.layout == "bshd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
            return Bound(lambda: api.attention(q, k, v, layout="bshd", **options), _swap_rows_and_heads)
        q, k, v = inputs
        return Bound(lambda: api.attention(q, k, v, **options), _as_it_is)


class AttnworksHeadMajor(Attnworks):
    """``attention_decode`` on a cache stored (batch, heads_kv, capacity, head_dim) like torch's, passed as a view."""

    def __init__(self) -> None:
        super().__init__("attnworks-head-major")

    def form(self, problem: Problem) -> str:
        return super().form(problem).replace("k_cache, v_cache", "k.transpose(1, 2), v.transpose(1, 2)")

    def refuses(self, problem: Problem) -> str:
        return "only a cache can be stored so" if problem.form != "decode" else super().refuses(problem)

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        lens = _full_lens(problem)
        options: dict[str, Any] = {"mask": user_mask(problem), "scale": problem.scale}
        return Bound(lambda: api.attention_decode(q, k, v, kv_lens=lens, **options), _swap_rows_and_heads)


def _full_lens(problem: Problem) -> Tensor:
    """Of a cache filled to its capacity; on a GPU in the type that its kernels read."""
    dtype = torch.int64 if problem.device == "cpu" else torch.int32
    return torch.full((problem.batch,), problem.seq_kv, dtype=dtype, device=problem.device)


def _written(problem: Problem) -> str:
    """The mask as a user would write it."""
    parts = []
    for term in problem.mask:
        assert isinstance(term, Bounds), "refuses() and user_mask() come before"
        causal, align = (term.left, term.right) == (None, 0), f"align={term.align!r}"
        extents = [] if causal else [str(term.left), str(term.right)]
        arguments = extents + ([] if term.align == "bottom-right" else [align])
        parts.append(f"{'Causal' if causal else 'Window'}({', '.join(arguments)})")
    return " & ".join(parts)


def user_mask(problem: Problem) -> Any:
    """The mask a user would write for the problem's closed bounds."""
    joined: Any = None
    for term in problem.mask:
        if not isinstance(term, Bounds):
            raise ValueError(f"mask: was {term}, must be made of Causal() and Window() to be benchmarked")
        causal = (term.left, term.right) == (None, 0)
        window = Causal(term.align) if causal else Window(term.left, term.right, term.align)
        joined = window if joined is None else joined & window
    return joined


# ---- torch -----------------------------------------------------------------------------------------------------------


class _Torch(Provider):
    def refuses(self, problem: Problem) -> str:
        return "score modifiers are not benchmarked yet" if problem.scores else ""


class Sdpa(_Torch):
    """torch.nn.functional.scaled_dot_product_attention in its best form: is_causal where that is the mask, a boolean
    mask for others, enable_gqa for shared KV heads."""

    name = "sdpa"

    def form(self, problem: Problem) -> str:
        arguments = "is_causal=True" if _is_torch_causal(problem) else "attn_mask=boolean" if problem.mask else ""
        gqa = "enable_gqa=True" if problem.group > 1 else ""
        return "F.scaled_dot_product_attention(" + ", ".join(filter(None, ("q, k, v", arguments, gqa))) + ")"

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        q, k, v = inputs
        causal = _is_torch_causal(problem)
        mask = None if causal or not problem.mask else _visible(problem)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": problem.scale}
        if problem.group > 1:
            options["enable_gqa"] = True
        sdpa = F.scaled_dot_product_attention
        return Bound(lambda: sdpa(q, k, v, **options), _as_it_is)


class SdpaCausal(Sdpa):
    """SDPA with is_causal alone in place of a window: what torch users run when the boolean mask is too slow."""

    name = "sdpa-causal"

    def refuses(self, problem: Problem) -> str:
        if not problem.mask or _is_torch_causal(problem):
            return "the problem has no window to do without"
        return super().refuses(problem)

    def answers(self, problem: Problem) -> Problem:
        return replace(problem, mask=(Bounds(None, 0, "top-left"),))

    def form(self, problem: Problem) -> str:
        return super().form(self.answers(problem))

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        return super().bind(self.answers(problem), inputs)


class SdpaGrouped(_Torch):
    """SDPA with the query heads of a group as rows of one head: right where no mask tells rows apart."""

    name = "sdpa-grouped"

    def form(self, problem: Problem) -> str:
        return "F.scaled_dot_product_attention(q.view(batch, heads_kv, group * seq_q, head_dim), k, v)"

    def refuses(self, problem: Problem) -> str:
        if problem.group == 1:
            return "the problem has no shared KV heads"
        if problem.mask:
            return "a mask tells the rows of a group apart"
        return super().refuses(problem)

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        q, k, v = inputs
        rows, shape = _group_rows(problem, q), (*q.shape[:3], problem.head_dim_v)
        sdpa, scale = F.scaled_dot_product_attention, problem.scale
        return Bound(lambda: sdpa(rows, k, v, scale=scale).view(shape), _as_it_is)


class Standard(_Torch):
    """Standard attention, S and P written out, as one would write it by hand: shared KV heads as rows of one product,
    the mask made beforehand and applied in place."""

    name = "standard"

    def form(self, problem: Problem) -> str:
        mask = ".masked_fill_(hidden, -inf)" if problem.mask else ""
        rows = "q.view(batch, heads_kv, group * seq_q, head_dim)" if problem.group > 1 else "q"
        return f"torch.softmax((scale * {rows} @ k.mT){mask}, -1) @ v"

    def refuses(self, problem: Problem) -> str:
        if problem.mask and problem.seq_q > problem.seq_kv:
            return "softmax gives NaN in rows without a visible key"
        return super().refuses(problem)

    def plan(self, problem: Problem) -> Plan | None:
        return Plan("reference", "standard")

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        q, k, v = inputs
        rows, shape, scale = _group_rows(problem, q), (*q.shape[:3], problem.head_dim_v), problem.scale
        transposed = k.mT
        if not problem.mask:
            return Bound(lambda: (torch.softmax((rows * scale) @ transposed, -1) @ v).view(shape), _as_it_is)
        hidden = ~_visible(problem)
        full = (*q.shape[:3], problem.seq_kv)

        def run() -> Tensor:
            scores = ((rows * scale) @ transposed).view(full).masked_fill_(hidden, -torch.inf)
            probs = torch.softmax(scores, -1).view(*rows.shape[:3], problem.seq_kv)
            return (probs @ v).view(shape)

        return Bound(run, _as_it_is)


def _visible(problem: Problem) -> Tensor:
    """(seq_q, seq_kv), on the problem's device."""
    return visible_keys(problem, torch.arange(problem.seq_q)).to(problem.device)


def _group_rows(problem: Problem, q: Tensor) -> Tensor:
    return q.view(problem.batch, problem.heads_kv, problem.group * problem.seq_q, problem.head_dim)


def _is_torch_causal(problem: Problem) -> bool:
    """Whether ``is_causal=True``, which is top-left, is the problem's mask."""
    if len(problem.mask) != 1 or not isinstance(problem.mask[0], Bounds):
        return False
    term = problem.mask[0]
    return (term.left, term.right) == (None, 0) and (term.align == "top-left" or problem.seq_q == problem.seq_kv)


# ---- by name ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    make: Callable[[], Provider]
    label: str


def _peer(name: str) -> Callable[[], Provider]:
    def make() -> Provider:
        from attnworks.workbench import peers  # imports openvino or onnxruntime only when asked for

        return peers.PEERS[name]()

    return make


_ENTRIES = {
    "attnworks": _Entry(Attnworks, "attnworks"),
    "attnworks-head-major": _Entry(AttnworksHeadMajor, "attnworks, head-major cache"),
    "sdpa": _Entry(Sdpa, "torch SDPA"),
    "sdpa-grouped": _Entry(SdpaGrouped, "torch SDPA, grouped rows"),
    "sdpa-causal": _Entry(SdpaCausal, "torch SDPA, causal only"),
    "sdpa-flash": _Entry(_peer("sdpa-flash"), "torch SDPA, FlashAttention-2"),
    "sdpa-cudnn": _Entry(_peer("sdpa-cudnn"), "torch SDPA, cuDNN"),
    "sdpa-efficient": _Entry(_peer("sdpa-efficient"), "torch SDPA, efficient"),
    "standard": _Entry(Standard, "standard attention"),
    "openvino": _Entry(_peer("openvino"), "OpenVINO"),
    "onnxruntime": _Entry(_peer("onnxruntime"), "ONNX Runtime"),
    "flash-attn-3": _Entry(_peer("flash-attn-3"), "FlashAttention-3"),
    "flash-attn-4": _Entry(_peer("flash-attn-4"), "FlashAttention-4"),
}
NAMES = tuple(_ENTRIES)


def by_name(name: str) -> Provider:
    """One of ``NAMES``, or anybody's kernel, "package.module:function" or "path/file.py:function". Raises
    ``ValueError`` for an unknown name; a peer that is not installed refuses every problem with that reason."""
    if ":" in name:
        from attnworks.workbench.foreign import Foreign  # with the cases and conventions of verify

        return Foreign(name)
    if name not in _ENTRIES:
        raise ValueError(f"provider: was {name!r}, must be one of {NAMES}")
    return _ENTRIES[name].make()


def label(name: str) -> str:
    """The name for tables."""
    return _ENTRIES[name].label if name in _ENTRIES else name


# ---- problems and inputs ---------------------------------------------------------------------------------------------


def contiguous_strides(heads: int, rows: int, dim: int, layout: str) -> Strides:
    """(batch, head, row) strides of a contiguous tensor in ``layout``."""
    return (heads * rows * dim, rows * dim, dim) if layout == "bhsd" else (heads * rows * dim, dim, heads * dim)


def describe(*, mask: Any = None, **sizes: Any) -> Problem:
    """A Problem of contiguous tensors on the CPU, from the sizes by their names in ``Problem`` and a user's mask; a
    cache in flash-attn's layout, the rest in SDPA's. Raises ``ValueError`` for heads that do not divide."""
    check_heads(sizes["heads_q"], sizes["heads_kv"])
    layout: Layout = "bshd" if sizes["form"] == "decode" else "bhsd"
    return Problem(
        **sizes,
        device="cpu",
        scale=1 / math.sqrt(sizes["head_dim"]),
        q_strides=contiguous_strides(sizes["heads_q"], sizes["seq_q"], sizes["head_dim"], layout),
        k_strides=contiguous_strides(sizes["heads_kv"], sizes["seq_kv"], sizes["head_dim"], layout),
        v_strides=contiguous_strides(sizes["heads_kv"], sizes["seq_kv"], sizes["head_dim_v"], layout),
        mask=masks.split(mask)[0],
        layout=layout,
    )


def random_inputs(problem: Problem, generator: torch.Generator) -> Inputs:
    """Unit-normal inputs in the problem's dtype."""
    p = problem
    shapes = (
        (p.batch, p.heads_q, p.seq_q, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v),
    )
    return Inputs(*(_normal(shape, p.dtype, generator) for shape in shapes))


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Drawn on all cores, since one alone takes longer over a GPU's inputs than a whole benchmark should; pieces have
    seeds of their own, so that the numbers do not depend on how many cores there are."""
    made = torch.empty(shape, dtype=dtype)
    pieces = torch.split(made.view(-1), _PIECE)
    seeds = torch.randint(2**62, (len(pieces),), generator=generator).tolist()

    def draw(piece: Tensor, seed: int) -> None:
        piece.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(seed)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(draw, pieces, seeds))
    return made
