"""Tile maps as the native CPU kernels read them: for tiles of MAP_ROWS queries and MAP_KEYS keys whether they are
hidden or full, and a bit for each pair of the others.

Boolean tensors are packed as they lie in memory, predicates are evaluated in blocks; a map is kept as long as its
operands are the same. Imported by the first call whose mask needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks.expressions.evaluation import evaluate
from attnworks.masks import Bounds, DenseMask, MaskSpec
from attnworks.modifiers import mask_expression
from attnworks.problem import Operands, Problem
from attnworks.tilemap import kept, reads

# Query-key pairs of a predicate that are evaluated at once.
BLOCK = 2**22


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
