"""What the native CPU kernels are told of a problem's scores and mask: steps, a sink, bounds and a tile map.

The kernels know one pair of closed bounds. Everything else that a mask says becomes a tile map: for tiles of MAP_ROWS
queries and MAP_KEYS keys whether they are hidden or full, and a bit for each pair of the others. Boolean tensors are
packed as they lie in memory, predicates are evaluated in blocks; a map is kept as long as its operands are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks.expressions.evaluation import evaluate
from attnworks.masks import UNLIMITED, Bounds, DenseMask, MaskSpec, Predicate
from attnworks.modifiers import mask_expression
from attnworks.problem import Operands, Problem, contiguous_strides
from attnworks.scores import ScoreSpec, ScoreTerm
from attnworks.tilemap import kept, reads

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_STEPS = 8

# Query-key pairs of a predicate that are evaluated at once.
BLOCK = 2**22


def refusals(problem: Problem) -> list[str]:
    """What of the problem's scores and mask the native kernels cannot do."""
    functions = [term for term in problem.scores if term.kind == "function"]
    found = [f"score function {term.name} (has softcap, ALiBi, bias and sink)" for term in functions]
    if len(_steps(problem.scores)) > MAX_STEPS:
        found.append(f"{len(_steps(problem.scores))} score modifiers (at most {MAX_STEPS})")
    predicates = [term for term in problem.mask if isinstance(term, Predicate)]
    return found + [f"mask {term.name}: {term.why_not}" for term in predicates if term.expression is None]


class Modifiers:
    """Of one problem: ``bounds``, what ``modify`` tells a native kernel once, what ``operands`` gives it each call."""

    def __init__(self, problem: Problem, native: Any) -> None:
        self._native = native
        self._steps = _steps(problem.scores)
        self._sink = next((term.operand for term in problem.scores if term.kind == "sink"), None)
        bounds, rest = _split(problem.mask)
        self.bounds = (_limit(bounds.left), _limit(bounds.right), bounds.align == "top-left")
        self._map = Map(rest, problem, native) if rest else None
        self._needed = bool(self._steps or self._sink or self._map)  # anything but bounds

    def modify(self, kernel: Any) -> Any:
        """The kernel, told of the steps and the shape of the map."""
        if self._needed:
            steps = [(t.kind, t.cap, DTYPES.get(_dtype(t), "float32"), _strides(t)) for t in self._steps]
            kernel.modify(steps, self._map.layout if self._map else (0, 0, 0, 1))
        return kernel

    def operands(self, o: Operands) -> tuple[Any, tuple[Tensor, ...]]:
        """What the kernel reads, by its address, None for nothing; and tensors that must live as long as it does."""
        if not self._needed:
            return None, ()
        made = [None if t.operand is None else _readable(o.scores[t.operand.index]) for t in self._steps]
        sink = None if self._sink is None else _readable(o.scores[self._sink.index]).contiguous()
        places, bits = (None, None) if self._map is None else self._map.tensors(o)
        sink_dtype = DTYPES[sink.dtype] if sink is not None else "float32"
        addresses = [0 if x is None else x.data_ptr() for x in (sink, places, bits)]
        steps = [0 if x is None else x.data_ptr() for x in made]
        native = self._native.ModifierOperands(steps, addresses[0], sink_dtype, *addresses[1:])
        return native, tuple(x for x in (*made, sink, places, bits) if x is not None)


# ---- scores ----------------------------------------------------------------------------------------------------------


def _steps(spec: ScoreSpec) -> list[ScoreTerm]:
    """The modifiers that change a score."""
    return [term for term in spec if term.kind != "sink"]


def _dtype(term: ScoreTerm) -> torch.dtype:
    return torch.float32 if term.operand is None else term.operand.dtype


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself where the kernels read its dtype, else a copy that they do."""
    return tensor if tensor.dtype in DTYPES else tensor.to(torch.float32).contiguous()


def _strides(term: ScoreTerm) -> tuple[int, ...]:
    """Of a step's operand by batch, head, row and key, in elements; 0 where it is broadcast."""
    if term.operand is None:
        return (0, 0, 0, 0)
    shape, strides = term.operand.shape, term.operand.strides
    if term.operand.dtype not in DTYPES:
        strides = contiguous_strides(shape)
    known = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    if term.kind == "alibi":
        known += (0, 0)
    return (0,) * (4 - len(known)) + known


# ---- masks -----------------------------------------------------------------------------------------------------------


def _split(spec: MaskSpec) -> tuple[Bounds, MaskSpec]:
    """The bounds that the kernels apply, and the terms for a map.

    Of two bounds the top-left one goes into the map: it does not depend on a sequence's length, as a map must not.
    """
    bounds = sorted((term for term in spec if isinstance(term, Bounds)), key=lambda term: term.align)
    if not bounds:
        return Bounds(None, None, "bottom-right"), spec
    return bounds[0], tuple(term for term in spec if term is not bounds[0])


def _limit(extent: int | None) -> int:
    return UNLIMITED if extent is None else min(extent, UNLIMITED)


class _Block(NamedTuple):
    """Some batches, heads and queries, with all keys."""

    batch: range
    heads: range
    rows: range


class Map:
    """The tile map of a mask's terms; its layout depends on the spec alone, its values on the operands of a call."""

    def __init__(self, spec: MaskSpec, problem: Problem, native: Any) -> None:
        self._spec, self._native, self._keys = spec, native, problem.seq_kv
        self._expression = mask_expression(spec)
        self._packed = isinstance(spec[0], DenseMask) and len(spec) == 1
        on = {name: any(reads(term, name) for term in spec) for name in "bhq"}
        self._batch = problem.batch if on["b"] else min(problem.batch, 1)
        self._heads = problem.heads_q if on["h"] else min(problem.heads_q, 1)
        self._rows = problem.seq_q if on["q"] else min(problem.seq_q, 1)
        self._tile_rows = native.MAP_ROWS if on["q"] else 1
        self._tiles_q, self._tiles_kv = -(-self._rows // self._tile_rows), -(-self._keys // native.MAP_KEYS)
        tiles = self._tiles_q * self._tiles_kv
        self.layout = (
            tiles * self._heads if on["b"] else 0,
            tiles if on["h"] else 0,
            self._tiles_kv,
            self._tile_rows,
        )

    def tensors(self, o: Operands) -> tuple[Tensor, Tensor]:
        """places int32 (batch, heads, tiles of queries, tiles of keys) and bits int64 (partial tiles, rows of a tile),
        as ``native/attention.h`` describes them; batch and heads 1 where the mask does not depend on them."""
        key = ("cpu", self._spec, self._batch, self._heads, self._rows, self._keys)
        return kept(key, o.mask, lambda: self._build(o.mask))

    def _build(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        shape = (self._batch, self._heads, self._tiles_q, self._tiles_kv)
        places = torch.empty(shape, dtype=torch.int32, device="cpu")
        bits: list[Tensor] = []
        known = 0
        visible = self._slice(operands[0]) if self._packed else self._evaluated(operands)
        for block in self._blocks():
            some, words = self._pack(visible(block))
            partial = some >= 0
            words = words.view(-1, self._tile_rows)[partial.view(-1)]
            some[partial] = torch.arange(known, known + words.shape[0], dtype=torch.int32, device="cpu")
            known += words.shape[0]
            bits.append(words)
            first = block.rows.start // self._tile_rows
            rows = slice(first, first + some.shape[2])
            places[block.batch.start : block.batch.stop, block.heads.start : block.heads.stop, rows] = some
        empty = torch.empty(0, self._tile_rows, dtype=torch.int64, device="cpu")
        return places, torch.cat(bits) if bits else empty

    def _blocks(self) -> Iterator[_Block]:
        """All of the mask at once where it is small, else some rows of one head."""
        batch, heads, rows = range(self._batch), range(self._heads), range(self._rows)
        if self._batch * self._heads * self._rows * self._keys <= BLOCK:
            yield _Block(batch, heads, rows)
            return
        step = max(BLOCK // self._keys // self._tile_rows, 1) * self._tile_rows
        for b in batch:
            for h in heads:
                for row in range(0, self._rows, step):
                    yield _Block(range(b, b + 1), range(h, h + 1), range(row, min(row + step, self._rows)))

    def _pack(self, visible: Tensor) -> tuple[Tensor, Tensor]:
        """places of a boolean tensor (batch, heads, rows, keys), and the bits of all its tiles."""
        shape = (*visible.shape[:2], -(-visible.shape[2] // self._tile_rows), self._tiles_kv)
        places = torch.empty(shape, dtype=torch.int32, device="cpu")
        bits = torch.empty(places.numel() * self._tile_rows, dtype=torch.int64, device="cpu")
        # fmt: off
        self._native.pack_mask(visible.data_ptr(), tuple(visible.shape), visible.stride(), self._tile_rows,
                               places.data_ptr(), bits.data_ptr(), torch.get_num_threads())
        # fmt: on
        return places, bits

    def _slice(self, mask: Tensor) -> Callable[[_Block], Tensor]:
        """The mask's own memory; where it is broadcast by strides of 0 the map has one batch, head or row."""
        shape = (self._batch, self._heads, self._rows, self._keys)
        whole = mask[(None,) * (4 - mask.dim())]
        for axis, size in enumerate(shape):
            whole = whole[(slice(None),) * axis + (slice(size),)]
        whole = whole.expand(shape)
        return lambda block: whole[tuple(slice(x.start, x.stop) for x in block)]

    def _evaluated(self, operands: tuple[Tensor, ...]) -> Callable[[_Block], Tensor]:
        k = torch.arange(self._keys, device="cpu")

        def visible(block: _Block) -> Tensor:
            shape = (*map(len, block), self._keys)
            at = {
                name: torch.arange(x.start, x.stop, device="cpu").view([-1 if n == axis else 1 for n in range(4)])
                for axis, (name, x) in enumerate(zip("bhq", block, strict=True))
            } | {"k": k}
            found = torch.ones((), dtype=torch.bool, device="cpu")
            if self._expression is not None:
                # Pairs past a sequence's end are evaluated, too: what a predicate captured need not reach there.
                found = evaluate(self._expression, at, operands, nearest=True)
            for term in self._spec:
                if isinstance(term, Bounds):
                    ahead = k - at["q"]
                    found = found if term.left is None else found & (ahead >= -term.left)
                    found = found if term.right is None else found & (ahead <= term.right)
            return found.expand(shape)

        return visible
