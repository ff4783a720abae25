"""The known faults as they are compared with a subject: each with the sizes, ways and calls it is tried with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal
from attnworks.scores import ALiBi, Bias
from attnworks.workbench import modifiers
from attnworks.workbench.cases import Case
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.oracle import visible
from attnworks.workbench.subjects import Outcome
from attnworks.workbench.ways import WAYS

# Faults whose answers depend on where tiles or partial results begin, and the tile sizes they are tried with.
TILED = (
    "accumulator not rescaled",
    "sum not rescaled",
    "sum and accumulator not rescaled",
    "tile borders counted twice",
    "V of another tile",
    "rescaled upside down",
    "rescaled after adding",
    "rescaled by another exponent",
    "sum overwritten by each tile",
    "a tile missing in the sum",
    "a tile missing in the accumulator",
    "running maximum rounded",
    "correction rounded",
    "K of another tile",
    "numbered within their tile",
    "moved tile numbered as unmoved",
    "masked in one tile only",
    "empty rows give the mean",
    "window by tile",
    "one window for all queries",
    "lse of one tile",
    "window's first tile skipped",
    "window's last tile skipped",
    "mask or bias at another address",
    "state of the rows before",
    "visible tiles of a mask skipped",
    "lse of another maximum",
    "stores reach the next sequence",
    "first tile only",
    "last tile only",
    "accumulator overwritten by each tile",
    "last partial tile dropped",
    "last whole tile dropped",
    "tail keys unmasked",
    "tail rows unwritten",
    "causal by tile",
    "diagonal tile skipped",
    "dq overwritten by each tile",
    "last tile missing in dq",
    "padding scored 0 in backward",
    "dk, dv of the last query tile",
    "last query tile missing in dk, dv",
    "last tile missing in dk, dv",
    "tail rows unwritten in dq",
    "K or V of another tile in backward",
    "dk, dv miss rows of the window",
    "delta missing in the last tile",
    "lse of some keys in backward",
    "bias gradient unwritten where hidden",
    "gradients of what is hidden unwritten",
)
# Those among them that leave the output right.
BACKWARD = TILED[TILED.index("dq overwritten by each tile") :]
# Their ways in which no size shows.
SIZELESS = {
    "one window for all queries": (0, 1),
    "mask or bias at another address": (1, 3, 4, 5, 6, 8, 9),
    "state of the rows before": (1,),
    "last partial tile dropped": (1,),
    "tail rows unwritten": (2, 3),
    "causal by tile": (4,),
    "empty rows give the mean": (0,),
}
# Faults that show elsewhere in kernels that take masks and biases as tensors.
WRITTEN = (
    "causal hides itself",
    "causal shows the next",
    "causal ignored",
    "causal upside down",
    "causal by tile",
    "diagonal tile skipped",
    "aligned top-left",
    "aligned bottom-right",
    "mask of head 0",
    "boolean mask inverted",
    "boolean mask ignored",
    "bias ignored",
    "bias rounded",
    "bias scaled",
    "bias of head 0",
    "bias of sequence 0",
    "bias of row 0",
    "mask or bias at another address",
    "visible tiles of a mask skipped",
)
SPLIT = (
    *("splits averaged", "splits summed", "splits merged by another weight", "a split left out"),
    *("splits overlap", "keys between splits left out"),
)
COARSE = (16, 32, 64, 128)  # those of all faults; the others are tried for faults that these bring near
TILE_SIZES = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)

SUMMED = ("fp16 accumulation", "sum in low precision")  # errors that grow from tile to tile
LONG_WAYS = (*SUMMED, "keys past a limit unread")  # whose ways thousands of keys tell apart
LONG_TILE, LONG_SPLIT = 512, 2048  # where there are thousands of keys
# Faults that leave elements unwritten: what these hold is anybody's.
UNWRITTEN = (
    "tail rows unwritten",
    "rows past the end unwritten",
    "lse not written",
    "heads left out",
    "sequences left out",
    "tail rows unwritten in dq",
    "last tile missing in dk, dv",
    "sequences left out in backward",
    "heads left out in backward",
    "gradients without queries unwritten",
    "gradients of what is hidden unwritten",
    "bias gradient unwritten where hidden",
)
# Faults that show in what a second call returns or in what the first one left behind.
UNSTEADY = ("changes from call to call", "writes into q")


@dataclass(frozen=True)
class Variant:
    """A fault with the sizes it is tried with."""

    fault: str
    tile_kv: int = modifiers.TILE
    split_kv: int = modifiers.SPLIT
    way: int = 0  # how the fault is made
    written: bool = False  # masks and ALiBi as SDPA takes them: tensors
    value: float | None = None  # the number in it, where a subject's answers show one

    @property
    def usual(self) -> bool:
        return (self.tile_kv, self.split_kv) == (modifiers.TILE, modifiers.SPLIT)

    @property
    def coarse(self) -> bool:
        """Whether its size is one that all faults are tried with."""
        return self.size in COARSE or self.size not in TILE_SIZES

    @property
    def size(self) -> int:
        """The one that the fault depends on: of tiles or of splits, -n for n splits."""
        return self.split_kv if self.fault in SPLIT else self.tile_kv

    def subject(self, long: bool = False) -> Mutant:
        """``long``: for thousands of keys, in large tiles."""
        kind = Written if self.written else Mutant
        tile_kv, split_kv = self.tile_kv, self.split_kv
        if long and self.usual and self.fault not in SUMMED:
            tile_kv, split_kv = LONG_TILE, LONG_SPLIT if self.fault in SPLIT else 0
        return kind(self.fault, tile_kv=tile_kv, split_kv=split_kv, way=self.way, value=self.value)


def distances(case: Case) -> Tensor:
    """How far each key is from each query, for ALiBi: (seq_q, seq_kv)."""
    return (torch.arange(case.seq_q)[:, None] + case.seq_kv - case.seq_q - torch.arange(case.seq_kv)).abs()


class Written(Mutant):
    """A mutant that is called as SDPA is: ``is_causal`` where that says it, else masks and ALiBi as tensors."""

    def __call__(self, inputs: Inputs, **options: Any) -> Outcome:
        case = inputs.case
        square = case.seq_q == case.seq_kv
        own = all(isinstance(m, Causal) and (square or m.align == "top-left") for m in inputs.masks)
        if case.form == "dense" and inputs.masks and not (own and not inputs.scores and len(inputs.masks) == 1):
            inputs.masks = [torch.stack([visible(inputs, b) for b in range(case.batch)])]
        if case.form == "dense":
            behind = distances(case)
            inputs.scores = [
                Bias(-s.slopes.view(-1, case.heads_q, 1, 1) * behind) if isinstance(s, ALiBi) else s
                for s in inputs.scores
            ]
        return super().__call__(inputs, **options)


def variants(faults: Iterable[str] = tuple(FAULTS)) -> list[Variant]:
    found = []
    for fault in faults:
        ways = range(WAYS.get(fault, 0) + 1)
        found += [Variant(fault, way=way) for way in ways]
        if fault in TILED:
            sized = [way for way in ways if way not in SIZELESS.get(fault, ())]
            found += [Variant(fault, size, 0, way) for size in TILE_SIZES for way in sized]
        if fault in WRITTEN:
            found += [Variant(fault, way=way, written=True) for way in ways]
        if fault in SPLIT:
            found += [Variant(fault, min(size, 32), size, way) for size in TILE_SIZES for way in ways]
            found += [Variant(fault, split_kv=-parts, way=way) for parts in (2, 3, 4, 8) for way in ways]
    return found
