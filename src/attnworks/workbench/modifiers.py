"""From scale · q k to scores: masks, biases, softcap and ALiBi, with a switch for each fault of theirs.

Part of the kernel that ``mutants.py`` breaks; the softmax over these scores is in ``tiled.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import AllOf, Causal, Window
from attnworks.scores import ALiBi, Bias, Sink, Softcap
from attnworks.workbench.addresses import Addresses, next_sequence, of_heads_first
from attnworks.workbench.causal_tiles import by_tile, loop_end
from attnworks.workbench.mask_tiles import mirrored, seen_in_blocks, without_skipped
from attnworks.workbench.numbering import numbers
from attnworks.workbench.window_tiles import from_first_tile, last_tile_end, up_to_last_tile
from attnworks.workbench.windows import ends

TILE = 32
SPLIT = 96
Has = Callable[[str], bool]
HIDDEN = {"hidden scores are -10000": -1e4, "empty rows give the mean": -1e9, "hidden scores are 0": 0.0}


@dataclass
class Modifiers:
    """What turns scale · q k into scores, for one sequence, a tile of keys at a time."""

    has: Has
    scale: float
    masks: list[Any]
    scores: tuple[Any, ...]
    sequence: int
    seq_q: int
    seq_kv: int
    limit: int  # keys of the sequence; more may have been loaded
    tile_kv: int = TILE
    split_kv: int = SPLIT  # keys of a partial result; 0 for one of all keys, -n for n equal ones
    biases: dict[int, Tensor] = field(default_factory=dict)  # by place among the scores, (heads_q, seq_q, seq_kv)
    addresses: Addresses = field(default_factory=lambda: Addresses(lambda fault: False, 0, TILE))
    default_scale: float = 1.0
    group: int = 1  # query heads of a KV head
    heads_q: int = 1
    value: float = 1.0  # the number in a fault that has one
    tops: list[Tensor] = field(default_factory=list)  # the maxima of the partial results, in their order
    longest: int = 0  # keys of the longest sequence of the batch
    first_rows: int = 0  # queries of the first one
    packed_apart: int = 0  # how much further on queries begin in their pack than keys in theirs
    shown: Tensor = field(default_factory=lambda: torch.empty(0))  # what the masks let through of the last tile
    unmasked: Tensor = field(default_factory=lambda: torch.empty(0))  # its scores before they were hidden

    def tile(self, q: Tensor, k: Tensor, first: int, backward: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """Scores (heads_q, seq_q, keys) of the keys from ``first`` on, hidden ones -inf, and each modifier's slope."""
        has = self.has
        i = torch.arange(self.seq_q).view(1, -1, 1)
        j = torch.arange(first, first + k.shape[1]).view(1, 1, -1)
        of_masks = of_scores = i, j
        if k.shape[1] and (self.masks or self.scores):
            of_masks, of_scores = numbers(has, self.addresses.way, self.tile_kv, i, j, self.seq_q)
        plain = backward and has("scores plain in backward")
        if self.leaves_out(q.shape[-1]) and self.addresses.way < 4:
            channels = slice(None, kept_channels(q.shape[-1], self.addresses.way))
            q, k = q[..., channels], k[..., channels]
        if self.dtype.itemsize == 2 and not backward and has("scaled Q rounded"):
            carried = self.scale * math.log2(math.e)
            q = (q * carried).to(self.dtype).to(q.dtype) / carried
        s = q @ k.transpose(-1, -2)
        if not has("softcap before scale"):
            s = s * self.recomputed_scale(backward)
        if has("scale of another size"):
            s = s * self.value
        if has("scale missing") or (self.addresses.way == 1 and has("scale of the output")):
            s = s / self.scale
        if has("scale twice"):
            s = s * self.scale
        if has("scores rounded"):
            s = s.to((self.dtype, torch.float16, torch.bfloat16)[self.addresses.way]).to(s.dtype)
        if has("exp2 for exp") and self.addresses.way:  # exp of what was made for exp2
            s = s * math.log2(math.e)
        if has("NaN swallowed"):
            s = s.nan_to_num(0)
        if bool((s.abs() > 60).any()) and has("scores clamped"):
            s = s.clamp(-60 if self.addresses.way else None, 60)
        again = has("tail keys unmasked") and self.addresses.way == 4
        if again or has("a key counted twice") or has("tile borders counted twice"):
            s = torch.where(self._twice(j), s + math.log(2), s)
        shown = self.shown = self._shown(of_masks[0], j, backward, of_masks[1])
        if has("masked after softmax") and not backward:
            shown = (j < self.limit).expand_as(shown)
        if has("softcap after mask"):
            s = torch.where(shown, s, -torch.inf)
        slopes: list[Tensor | None] = []
        for place, modifier in enumerate(self.scores):
            s, slope = (s, None) if plain else self._modify(modifier, place, s, of_scores[0], j, of_scores[1])
            slopes.append(slope)
        if any(isinstance(mask, Tensor) for mask in self.masks) and has("boolean mask added as numbers"):
            s = sum((self._own(mask, j).to(s.dtype) for mask in self.masks if isinstance(mask, Tensor)), s)
        if has("softcap before scale"):
            s = s * self.scale
        hidden = next((value for fault, value in HIDDEN.items() if has(fault)), -torch.inf)
        self.unmasked = s
        if not has("softcap after mask"):
            s = torch.where(shown, s, hidden)
        if self.addresses.way and has("empty rows give the mean"):  # of the tiles that its block of rows goes through
            s = torch.where(seen_in_blocks(shown, self.tile_kv), s, -torch.inf)
        return s, slopes

    dtype: torch.dtype = torch.float32

    @property
    def causal(self) -> bool:
        return any(isinstance(mask, Causal) for mask in self.masks)

    def recomputed_scale(self, backward: bool) -> float:
        """The scale, but for backward if that takes its own."""
        if backward and self.has("scores scaled otherwise in backward"):
            return (1.0, self.scale**2, self.scale * math.log2(math.e), self.scale * math.log(2))[self.addresses.way]
        ignored = backward and self.has("scale argument ignored in backward") and not self.addresses.way
        return self.default_scale if ignored else self.scale

    def leaves_out(self, channels: int) -> bool:
        """Whether not all of so many channels are used; asked where that can be."""
        return any(kept_channels(channels, way) < channels for way in range(4)) and self.has("channels left out")

    def _twice(self, j: Tensor) -> Tensor:
        """Which keys count twice."""
        last, way = self.limit - 1, self.addresses.way
        if self.has("a key counted twice"):
            return j == (0 if way else last)
        if self.has("tail keys unmasked"):  # past the end the first keys come again
            return j < -self.limit % self.tile_kv
        if way:  # the first key of a tile is also the last one of the tile before
            return (j > 0) & (j % self.tile_kv == 0)
        whole = self.limit // self.tile_kv * self.tile_kv  # the last tile is moved back to be a whole one
        return (j >= self.limit - self.tile_kv) & (j < whole) & (whole < self.limit) & (whole > 0)

    def _modify(
        self, modifier: Any, place: int, s: Tensor, i: Tensor, j: Tensor, seen_as: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        has = self.has
        if isinstance(modifier, Softcap):
            if has("softcap ignored"):
                return s, None
            x = s / modifier.cap
            if has("softcap by exponentials"):
                e = torch.exp(2 * x)
                ratio = (e - 1) / (e + 1)
            else:
                ratio = torch.tanh(x)
            if has("tanh approximated"):
                ratio = x.clamp(-1, 1) if self.addresses.way else (x * (27 + x * x) / (27 + 9 * x * x)).clamp(-1, 1)
            if has("softcap twice"):
                again = torch.tanh(ratio)
                return modifier.cap * again, (1 - ratio * ratio) * (1 - again * again)
            if has("softcap without its factor"):
                log2e = math.log2(math.e)  # scores are for exp2, the cap is not
                capped = (modifier.cap * torch.tanh(s), ratio, modifier.cap / log2e * torch.tanh(log2e * x))
                return capped[self.addresses.way], None
            if has("softcap slope missing"):
                return modifier.cap * ratio, 1 - torch.tanh(ratio) ** 2 if self.addresses.way else None
            return modifier.cap * ratio, 1 - ratio * ratio
        if isinstance(modifier, ALiBi):
            slopes = modifier.slopes if modifier.slopes.dim() == 1 else modifier.slopes[self.sequence]
            if has("alibi ignored"):
                return s, None
            if has("alibi of the wrong head"):
                slopes = self._other_slopes(slopes, modifier.slopes.view(-1, len(slopes)))
            shift = self.seq_kv - self.seq_q
            if has("alibi from the first key"):
                shift = (0, -shift, self.packed_apart)[self.addresses.way]
            behind = i + shift - seen_as
            if has("alibi scaled"):
                slopes = slopes * self._factor()
            penalty = slopes.view(-1, 1, 1) * (behind if has("alibi distance signed") else behind.abs())
            return (s + penalty if has("alibi sign") else s - penalty), None
        if isinstance(modifier, Bias):
            bias = self._columns(self.biases[place], j).to(s.dtype)
            if has("bias ignored"):  # what hides may be left of it
                return torch.where(bias == -torch.inf, bias, s) if self.addresses.way else s, None
            if has("bias rounded"):
                bias = bias.to((torch.bfloat16, torch.float16)[self.addresses.way]).to(s.dtype)
            if has("bias of head 0"):
                bias = self._of_other_heads(bias, self.addresses.way)
            if has("bias scaled"):
                bias = bias * self._factor()
            if has("bias subtracted"):
                bias = torch.where(bias == -torch.inf, bias, -bias)
            return s + bias, None
        if isinstance(modifier, Sink):
            return s, None
        h = torch.arange(s.shape[0]).view(-1, 1, 1)
        return modifier(s, torch.tensor(self.sequence), h, i, j).to(s.dtype), None

    def _factor(self) -> float:
        """What a term that is added to the scores is multiplied by, and should not be."""
        return (self.scale, math.log2(math.e), math.log(2), 1 / self.scale, 2.0, self.value)[self.addresses.way]

    def _of_other_heads(self, x: Tensor, way: int) -> Tensor:
        """(heads, ...) of the first head, of the KV head's number, of the head before, or from the last head to the
        first."""
        heads = torch.arange(x.shape[0])
        return x[(heads[:1], heads // self.group, heads.roll(1), heads.flip(0))[way]]

    def _other_slopes(self, own: Tensor, by_sequence: Tensor) -> Tensor:
        heads = torch.arange(len(own))
        ways = (
            own.flip(0),
            by_sequence[0],
            own[heads // self.group],
            own[heads % max(len(own) // self.group, 1)],
            by_sequence[(self.sequence + 1) % len(by_sequence)],
            own.roll(1),
            own[:1].expand(len(own)),
            torch.exp2(-8 * (heads + 1) / len(own)).to(own.dtype),  # made by the paper's rule, not read
            torch.exp2(-8 * heads / len(own)).to(own.dtype),
        )
        return ways[self.addresses.way]

    def _columns(self, whole: Tensor, j: Tensor) -> Tensor:
        """What a mask or bias (heads, seq_q, seq_kv) holds for the keys of a tile."""
        first = int(j.min())
        if self.has("mask or bias transposed"):  # read at (j, i), the strides being those of rows or of columns
            i, step = torch.arange(whole.shape[1]).view(-1, 1), whole.shape[2 - self.addresses.way]
            return whole.flatten(1)[:, (j.flatten() * step + i).clamp(max=whole.shape[1] * whole.shape[2] - 1)]
        if not self.has("mask or bias at another address"):
            return whole[..., first : int(j.max()) + 1]
        way, rows, keys = self.addresses.way, whole.shape[1], whole.shape[2]
        if not way:  # its pointer stays at the first tile
            return whole[..., : j.numel()]
        if way > 7:  # bits read from the other end of a byte or a word
            turned = mirrored(whole, 8 if way == 8 else 32) if whole.dtype == torch.bool else whole
            return turned[..., first : int(j.max()) + 1]
        if way > 2:  # an element, a row or a tile beside its own
            shift, dim = ((1, 2), (-1, 2), (1, 1), (-1, 1), (self.tile_kv, 2))[way - 3]
            return whole.roll(shift, dim)[..., first : int(j.max()) + 1]
        # A row is taken to be as long as there are queries, or as whole tiles.
        row = self.seq_q if self.addresses.way == 1 else -(-whole.shape[-1] // self.tile_kv) * self.tile_kv
        places = torch.arange(rows).view(-1, 1) * row + j.flatten()
        return whole.flatten(1)[:, places.clamp(max=rows * keys - 1)]

    def _shown(self, i: Tensor, j: Tensor, backward: bool, seen_as: Tensor) -> Tensor:
        has, way = self.has, self.addresses.way
        end = self.limit - (1 if has("last key dropped") and not self.addresses.way else 0)
        if end > 128 and has("keys past a limit unread"):
            end = min(end, 8192 >> self.addresses.way)
        if end > self.seq_q and has("keys end with the queries") and not way:
            end = self.seq_q
        shown = ((j < end) & (j > 0 if has("first key dropped") else j >= 0)).expand(1, self.seq_q, -1)
        if backward and has("mask missing in backward"):
            return shown
        if self.masks and has("keys shown against the mask"):
            own = i + (self.seq_kv - self.seq_q)
            return self._masked(shown, i, j, backward, seen_as) | (shown & (j == (0, own, self.limit - 1)[way]))
        if self.masks and has("masked in one tile only"):
            last = int(j.max()) >= self.limit - 1
            if not ((int(j.min()) == 0) if way == 1 else last):
                return shown
        shown = self._masked(shown, i, j, backward, seen_as)
        return without_skipped(shown, self.tile_kv, way) if self._skips_tiles() else shown

    def _skips_tiles(self) -> bool:
        return bool(self.masks) and self.seq_q > 0 and self.has("visible tiles of a mask skipped")

    def _masked(self, shown: Tensor, i: Tensor, j: Tensor, backward: bool, seen_as: Tensor) -> Tensor:
        """What all masks show of ``shown``."""
        has = self.has
        if len(self.masks) > 1 and has("masks joined by or"):
            return self._joined(shown, i, j, backward, seen_as)
        for mask in self.masks:
            if isinstance(mask, Tensor):
                if not (has("boolean mask ignored") or has("boolean mask added as numbers")):
                    shown = shown & self._own(mask, j)
            elif isinstance(mask, Causal | Window):
                if not self._dropped(mask, backward):
                    shown = shown & self._bounded(mask, i, seen_as, backward)
            else:
                h = torch.arange(1).view(-1, 1, 1)
                shown = shown & mask(torch.tensor(self.sequence), h, i, j)
        return shown

    def _joined(self, shown: Tensor, i: Tensor, j: Tensor, backward: bool, seen_as: Tensor) -> Tensor:
        """What any of the masks shows."""
        every, found = self.masks, torch.zeros_like(shown)
        for mask in every:
            self.masks = [mask]
            found = found | self._masked(shown, i, j, backward, seen_as)
        self.masks = every
        return found

    def _own(self, mask: Tensor, j: Tensor) -> Tensor:
        """What a boolean mask says of this sequence's rows and the keys of a tile."""
        has = self.has
        whole = mask.expand(1, 1, 1, 1) if mask.dim() == 0 else mask[(None,) * (4 - mask.dim())]
        own = whole[self.sequence if whole.shape[0] > 1 else 0]
        if has("boolean mask inverted"):
            own = ~own
        if has("mask of head 0"):
            turned = [of_heads_first(whole, self.sequence, turned) for turned in (False, True)]
            others = [self._of_other_heads(own, way) for way in (1, 2, 3)]
            own = (own[:1], whole[0], *turned, next_sequence(whole, self.sequence), *others)[self.addresses.way]
        if has("bias of row 0"):
            own = own[..., :1] if self.addresses.way else own[:, :1]
        own = own.expand(-1, self.seq_q if own.shape[1] == 1 else -1, self.seq_kv if own.shape[2] == 1 else -1)
        return self._columns(own[:, : self.seq_q], j)

    def _dropped(self, mask: Causal | Window, backward: bool) -> bool:
        """Whether a mask of bounds is not applied at all."""
        both = any(isinstance(m, Causal) for m in self.masks) and any(isinstance(m, Window) for m in self.masks)
        if both and self.has("one of causal and window dropped"):
            return isinstance(mask, Causal) == bool(self.addresses.way)
        if isinstance(mask, Window):
            return self.has("window ignored") or (backward and self.has("window missing in backward"))
        return self.has("causal ignored")

    def _bounded(self, mask: Causal | Window, i: Tensor, j: Tensor, backward: bool) -> Tensor:
        """What causal or a window shows."""
        has, way, causal = self.has, self.addresses.way, isinstance(mask, Causal)
        shift = self.seq_kv - self.seq_q
        if shift and has("causal shift of the wrong sign"):
            shift = -shift
        if mask.align == "top-left" and not has("aligned bottom-right"):
            shift = 0
        if has("aligned top-left") and not (way and causal):
            shift = 0
        if causal and has("causal further by a number"):
            shift += round(self.value)
        if causal and mask.align == "bottom-right" and has("causal from other lengths") and way == 4:  # padded ones
            step_kv, step_q = divmod(round(self.value), 1000)
            shift = -(-self.seq_kv // step_kv) * step_kv - -(-self.seq_q // step_q) * step_q
        if backward and has("mask from the top left in backward"):
            shift = 0
        if backward and has("mask off by one in backward"):
            shift += (1, -1)[way]
        if self.group > 1 and has("packed rows in the mask"):
            i, shift = self._packed(i, shift)
        left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
        if isinstance(mask, Window):
            left, right = ends(has, way, self.value, left, right, self.seq_q, self.seq_kv)
        return self._bounds(i + shift, j, left, right, causal)

    def _packed(self, i: Tensor, shift: int) -> tuple[Tensor, int]:
        """Rows of a group's heads that share a tile, numbered as they lie there."""
        way, member = self.addresses.way, torch.arange(self.heads_q).view(-1, 1, 1) % self.group
        numbers = i * self.group + member if way < 2 else member * self.seq_q + i
        return numbers, shift - (way % 2) * (self.group - 1) * self.seq_q

    def _bounds(self, origin: Tensor, j: Tensor, left: int | None, right: int | None, causal: bool) -> Tensor:
        has = self.has
        shown = torch.ones_like(origin + j, dtype=torch.bool)
        if causal:
            off = -1 if has("causal hides itself") else 1 if has("causal shows the next") else 0
            if has("causal by tile"):
                return by_tile(origin, j, self.tile_kv, self.addresses.way, round(self.value))
            if has("diagonal tile skipped"):
                return (j <= origin) & (j < loop_end(origin, self.tile_kv, self.addresses.way))
            if has("causal upside down"):
                return j >= origin
            return j <= origin + off
        if has("one window for all queries"):
            rows = torch.arange(origin.shape[1])
            if self.addresses.way > 1:  # of a tile's first or last query
                of = rows - rows % self.tile_kv + (self.tile_kv - 1) * (self.addresses.way == 2)
            else:
                of = rows * 0 + (0 if self.addresses.way else origin.shape[1] - 1)
            started = origin[:, of.clamp(max=origin.shape[1] - 1)]
        else:
            started = origin
        short = has("window one short")
        off = -(not self.addresses.way) if short else 1 if has("window one long") else 0
        further = -self.addresses.way if short else 1 if has("window one long on the right") else 0
        if left is not None and not has("window without left end"):
            begin = started - left - off
            if has("window by tile"):
                shown = shown & from_first_tile(origin, j, begin, self.tile_kv, self.addresses.way)
            else:
                shown = shown & (j >= begin)
        if left is not None and has("window's first tile skipped"):
            row = origin - origin[:, :1]
            oldest = (origin - row % self.tile_kv - left).clamp(min=0)  # key of the block of rows
            begin = -(-oldest // self.tile_kv) * self.tile_kv
            if self.addresses.way:  # one for the batch, from its longest sequence
                begin = torch.tensor(self.longest - -(-(left + self.seq_q) // self.tile_kv) * self.tile_kv)
            shown = shown & (j >= begin)
        if right is not None and has("window's last tile skipped"):
            shown = shown & (j < last_tile_end(origin + right, self.tile_kv, self.addresses.way))
        if right is not None and not has("window without right end"):
            end = origin + right + further
            if has("window by tile") and self.addresses.way > 3:
                shown = shown & up_to_last_tile(origin, j, end, self.tile_kv, self.addresses.way)
            else:
                shown = shown & (j <= end)
        return shown


def kept_channels(channels: int, way: int) -> int:
    """The channels up to a fixed number of them, or to whole chunks."""
    return (min(channels, 128), min(channels, 64), channels // 16 * 16, channels // 32 * 32)[way % 4]


def flatten_mask(mask: Any) -> list[Any]:
    if mask is None:
        return []
    return reduce(lambda found, part: found + flatten_mask(part), mask.parts, []) if isinstance(mask, AllOf) else [mask]
