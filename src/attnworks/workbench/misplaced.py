"""Whole tensors read from, or written to, the wrong place: a head, a row, a sequence, a layout that is not theirs.

A switch for each fault and the ways it is made (``ways.WAYS``). What a kernel does between is right, so that each
fault is a function of the sequences' tensors, (heads, rows, dim) each, before attention or after it. ``addresses.py``
has what is wrong with offsets, lengths and page tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor, Tensor]
Result = tuple[Tensor, Tensor]

# Which tensors a fault of one tensor of q, k, v has: each alone, or all of them.
_CHOSEN = ((1,), (2,), (0,), (0, 1, 2))


@dataclass(frozen=True)
class Misplaced:
    """``has``: whether a fault is there; ``way``: how it is made, 0 … ``WAYS[fault]``; ``tile``: rows of a tile."""

    has: Callable[[str], bool]
    way: int
    tile: int

    def operands(self, parts: list[Part]) -> list[Part]:
        """q, k and v of each sequence as a kernel with a fault reads them."""
        if any(q.shape[0] > 1 for q, _, _ in parts) and self.has("layouts confused") and self.way < 8:
            chosen = _CHOSEN[self.way // 2]
            parts = [_on(part, chosen, lambda x: _relaid(x, self.way % 2)) for part in parts]
        if self.has("K reshaped instead of transposed"):
            parts = [(q, k.reshape(k.shape[0], k.shape[2], k.shape[1]).mT, v) for q, k, v in parts]
        if self.has("channels in another order"):
            parts = [_on(part, _CHOSEN[self.way // 3], self._reordered) for part in parts]
        if self.has("Q of another place"):
            parts = [(self._other_q(parts, n), k, v) for n, (_, k, v) in enumerate(parts)]
        if self.has("V of another key"):
            parts = [(q, k, v.flip(1) if self.way == 2 else v.roll((1, -1)[self.way], 1)) for q, k, v in parts]
        if len(parts) > 1 and _alike(parts) and self.has("batch and heads mixed") and self.way < 2:
            parts = self._mixed(parts)
        return parts

    def results(self, pairs: list[Result], heads_kv: int) -> list[Result]:
        """out and LSE of each sequence as a kernel with a fault leaves them."""
        if any(out.shape[0] > 1 for out, _ in pairs):
            if self.has("layouts confused") and self.way in (8, 9):
                pairs = [(_relaid(out, self.way % 2), lse) for out, lse in pairs]
            if self.has("heads left out"):
                pairs = [tuple(self._without_heads(x, heads_kv) for x in pair) for pair in pairs]  # type: ignore[misc]
        if any(bool((lse == -torch.inf).any()) for _, lse in pairs) and self.has("empty rows hold other rows"):
            pairs = [(self._kept(pairs, n), lse) for n, (_, lse) in enumerate(pairs)]
        if any(out.shape[1] > 1 for out, _ in pairs) and self.has("rows of the output exchanged"):
            pairs = [(self._other_rows(out), lse) for out, lse in pairs]
        same = len({out.shape for out, _ in pairs}) == 1
        if len(pairs) > 1 and same and self.has("batch and heads mixed") and self.way > 1:
            outs = torch.stack([out for out, _ in pairs])
            batch, heads = outs.shape[:2]
            turned = outs.transpose(0, 1).reshape(outs.shape)
            if self.way == 3:
                turned = outs.reshape(heads, batch, *outs.shape[2:]).transpose(0, 1)
            pairs = [(out, lse) for out, (_, lse) in zip(turned, pairs, strict=True)]
        return pairs

    def overrun(self, outs: list[Tensor]) -> list[Tensor]:
        """Outputs of packed sequences stored in whole tiles of rows, the last sequence first, so that what is stored
        behind a sequence's end stays in the next ones': zeros, or the sequence's last row again."""
        left = [out.clone() for out in outs]
        for n, out in enumerate(outs):
            more = -out.shape[1] % self.tile
            for later in left[n + 1 :]:
                taken = min(more, later.shape[1])
                later[:, :taken] = out[:, -1:] if self.way else 0
                more -= taken
        return left

    @staticmethod
    def at_offsets(outs: list[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """Outputs of packed sequences, (heads, rows, dim), stored from other offsets on; the rest is 0."""
        sizes = [out.shape[1] for out in outs]
        whole = torch.zeros(outs[0].shape[0], sum(sizes), outs[0].shape[2], dtype=outs[0].dtype)
        for out, start in zip(outs, starts, strict=False):
            taken = max(min(out.shape[1], whole.shape[1] - start), 0)
            whole[:, start : start + taken] = out[:, :taken]
        return list(torch.split(whole, sizes, 1))

    def _kept(self, pairs: Sequence[Result], n: int) -> Tensor:
        """Rows without keys as what was computed before left them: the sequence before, or the last row with keys."""
        out, lse = pairs[n]
        empty = (lse == -torch.inf)[..., None]
        if self.way:
            seen = torch.where(empty.squeeze(-1), 0, torch.arange(out.shape[1])).cummax(1).values
            return torch.where(empty, out.gather(1, seen[..., None].expand_as(out)), out)
        before = pairs[n - 1][0]
        if before.shape[1] == 0:
            return out
        return torch.where(empty, before[:, torch.arange(out.shape[1]) % before.shape[1]], out)

    def lse(self, lse: Tensor, heads_kv: int) -> Tensor:
        """The LSE, (batch, heads, rows) or packed (heads, rows), with its numbers in other places."""
        heads = torch.arange(lse.shape[-2])
        group = max(len(heads) // max(heads_kv, 1), 1)
        if self.way == 3:  # (group, heads_kv) where it must be (heads_kv, group)
            return lse[..., heads.view(-1, group).T.flatten(), :]
        if self.way == 4:
            return lse.transpose(0, -2).reshape(lse.shape)
        return (lse.mT.reshape(lse.shape), lse.flip(-2), lse.roll(1, -1))[self.way]

    def _reordered(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        order = torch.arange(dim)
        if self.way % 3 == 0:
            return x[..., order.roll(dim // 2)]
        return x[..., torch.cat((order[::2], order[1::2]))] if self.way % 3 == 1 else x.flip(-1)

    def _other_q(self, parts: Sequence[Part], n: int) -> Tensor:
        q = parts[n][0]
        if self.way < 2:
            return q.roll((1, -1)[self.way], 1)
        if self.way == 2:
            return q.flip(0)
        if self.way == 3:
            other = parts[(n + 1) % len(parts)][0]
            return other if other.shape == q.shape else q
        if self.way == 4:
            return parts[0][0] if parts[0][0].shape == q.shape else q
        rows = torch.arange(q.shape[1])
        return q[:, rows % self.tile]  # every tile of rows has the first one's

    def _without_heads(self, x: Tensor, heads_kv: int) -> Tensor:
        heads, kept = x.shape[0], x.clone()
        group = max(heads // max(heads_kv, 1), 1)
        of_group = torch.arange(heads) % group
        missing = (slice(heads - 1, None), slice(0, 1), slice(heads // 2, None), slice(1, None),
                   (of_group >= group // 2 * 2) & (group > 1),  # pairs of a group's heads share a block
                   of_group == group - 1)[self.way]  # fmt: skip
        kept[missing] = 0
        return kept

    def _other_rows(self, out: Tensor) -> Tensor:
        if self.way < 2:
            return out.roll((1, -1)[self.way], 1)
        if self.way == 2:
            return out.flip(1)
        if self.way == 4:  # rows 8 apart, as a fragment of a matrix unit holds them
            rows = torch.arange(out.shape[1])
            return out[:, torch.where((rows ^ 8) < len(rows), rows ^ 8, rows)]
        return torch.cat(
            torch.split(out, self.tile, 1)[::-1], 1
        )  # the tiles in the order of a grid that is turned round

    def _mixed(self, parts: Sequence[Part]) -> list[Part]:
        """K and V by a number of (sequence, head) that is taken apart otherwise than it was made."""
        batch, heads_q = len(parts), parts[0][0].shape[0]
        found = []
        for b, (q, _, _) in enumerate(parts):
            pair = []
            for which in (1, 2):
                whole = torch.stack([part[which] for part in parts])
                heads_kv = whole.shape[1]
                own = torch.arange(heads_q) // max(heads_q // max(heads_kv, 1), 1)
                number = b * heads_q + torch.arange(heads_q) if self.way else own * batch + b
                pair.append(whole.flatten(0, 1)[number % (batch * heads_kv)])
            found.append((q, pair[0], pair[1]))
        return found


def _on(part: Part, chosen: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Part:
    q, k, v = (change(x) if place in chosen else x for place, x in enumerate(part))
    return q, k, v


def _relaid(x: Tensor, turned: int) -> Tensor:
    """(heads, rows, dim) read as if it were (rows, heads, dim) in memory, or (``turned``) the other way round."""
    heads, rows, dim = x.shape
    return x.transpose(0, 1).reshape(heads, rows, dim) if turned else x.reshape(rows, heads, dim).transpose(0, 1)


def next_channels(x: Tensor, way: int) -> Tensor:
    """(heads, rows, dim) with what lies behind a row's channels, up to a multiple of 16, 32, 64 or 128: of the next
    row or, if heads lie together, of the next head."""
    heads, rows, dim = x.shape
    wide = -(-dim // (16, 32, 64, 128)[way % 4]) * (16, 32, 64, 128)[way % 4]
    lying = x.transpose(0, 1) if way > 3 else x
    flat = torch.cat((lying.flatten(), x.new_zeros(wide)))
    read = flat[torch.arange(heads * rows).view(-1, 1) * dim + torch.arange(wide)]
    return read.view(rows, heads, wide).transpose(0, 1) if way > 3 else read.view(heads, rows, wide)


def _alike(parts: Sequence[Part]) -> bool:
    return len({tuple(x.shape for x in part) for part in parts}) == 1
