"""Where a kernel finds its keys, in packed sequences and caches: with a switch for each fault and the ways it is made
(``ways.WAYS``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Addresses:
    """``has``: whether a fault is there; ``way``: how it is made, 0 … ``WAYS[fault]``; ``tile``: keys of a tile."""

    has: Callable[[str], bool]
    way: int
    tile: int

    # ---- packed sequences --------------------------------------------------------------------------------------------

    def packed(self, ends_q: Sequence[int], ends_kv: Sequence[int]) -> tuple[list[slice], list[int]]:
        """By sequence, the keys that are read and how many of them masks count."""
        own = [slice(a, b) for a, b in pairwise(ends_kv)]
        lengths = [s.stop - s.start for s in own]
        read = own
        if self.has("key offsets from queries"):
            read = [self._moved(n, ends_q, ends_kv, lengths) for n in range(len(own))]
        elif self.has("keys end with the queries") and self.way:
            longest = max(b - a for a, b in pairwise(ends_q))  # of all sequences
            return [slice(s.start, s.start + min(n, longest)) for n, s in zip(lengths, own, strict=True)], lengths
        elif self.has("sequences not apart") and self.way < 7:
            read = [self._mixed(n, s, ends_kv[-1], max(lengths)) for n, s in enumerate(own)]
        elif self.has("tail keys unmasked") and self.way == 1:
            read = [
                slice(s.start, min(s.start + self._rounded(n), ends_kv[-1])) for n, s in zip(lengths, own, strict=True)
            ]
        counted = [len(range(*s.indices(ends_kv[-1]))) for s in read]
        if (self.has("sequences not apart") and self.way in (1, 4, 5, *range(7, 13))) or self.has("tail keys unmasked"):
            counted = lengths  # they begin with a sequence's own keys, and masks know how many these are
        if self.way < 4 and self.has("causal from other lengths"):
            counted = self._of_others(ends_q, ends_kv)
        return read, counted

    def values(self, read: list[slice], ends_kv: Sequence[int]) -> tuple[list[slice], list[slice]]:
        """By sequence, the rows of K and of V, given those of both."""
        if self.way > 11 and self.has("key offsets from queries"):
            return [slice(a, b) for a, b in pairwise(ends_kv)], read
        return read, read

    def _moved(self, n: int, ends_q: Sequence[int], ends_kv: Sequence[int], lengths: Sequence[int]) -> slice:
        length, total = lengths[n], ends_kv[-1]
        if not self.way:
            return slice(ends_q[n], ends_q[n] + length)
        start = (
            ends_q[n],
            n * max(lengths),  # as in a padded batch
            ends_kv[max(n - 1, 0)],
            ends_kv[n + 1],
            0,
            n * length,
            ends_kv[n] + 1,
            ends_kv[n] - 1,
            ends_kv[sum(a < b for a, b in pairwise(ends_q[: n + 1]))],  # counted without sequences that have no queries
            -(-ends_kv[n] // 8) * 8,  # rounded for loads of 8 rows
            ends_kv[n] // 8 * 8,
            -(-ends_kv[n] // 8) * 8,  # those of V alone (``values``)
            ends_kv[n] // 8 * 8,
        )[self.way - 1]
        start = max(0, min(start, total - length))  # a read past the end would be a crash
        return slice(start, start + length)

    def _mixed(self, n: int, own: slice, total: int, longest: int) -> slice:
        return (
            slice(0, total),
            slice(own.start, min(own.start + longest, total)),
            slice(own.start + (n > 0), min(own.stop + 1, total)),  # the border lies one key too far
            slice(0, own.stop),
            slice(own.start, total),
            slice(own.start, min(own.stop + 1, total)),
            slice(max(own.start - 1, 0), own.stop),
        )[self.way]

    def rows(self, ends_q: Sequence[int], ends_kv: Sequence[int], counted: list[int]) -> tuple[list[slice], list[int]]:
        """By sequence, the queries that see its keys, and how many keys masks count then."""
        if self.has("query offsets from keys"):
            starts = [min(ends_kv[n], ends_q[-1] - (b - a)) for n, (a, b) in enumerate(pairwise(ends_q))]
            return [slice(s, s + b - a) for s, (a, b) in zip(starts, pairwise(ends_q), strict=True)], counted
        if not (self.has("sequences not apart") and self.way > 6):
            return [slice(a, b) for a, b in pairwise(ends_q)], counted
        last = ends_q[-1]
        if self.way > 10:  # the row at a border is taken for one of the sequence before, or of the one behind
            step = (1, -1)[self.way - 11]
            edges = [0, *(min(max(end + step, 0), last) for end in ends_q[1:-1]), last]
        else:
            tile = (16, 32, 64, 128)[self.way - 7]  # a tile of rows is its first row's sequence's
            edges = [min(-(-end // tile) * tile, last) for end in ends_q]
        shifts = [n - (b - a) - a for n, (a, b) in zip(counted, pairwise(ends_q), strict=True)]
        return [slice(a, b) for a, b in pairwise(edges)], [
            b + shift for shift, (_, b) in zip(shifts, pairwise(edges), strict=True)
        ]

    def _of_others(self, ends_q: Sequence[int], ends_kv: Sequence[int]) -> list[int]:
        """Keys from which masks are aligned that are not the sequence's own."""
        pairs = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_kv), strict=True)]
        longest = max(kv for _, kv in pairs) - max(q for q, _ in pairs)
        whole = ends_kv[-1] - ends_q[-1]  # one diagonal through all of the pack
        shifts = {0: longest, 1: pairs[0][1] - pairs[0][0], 3: pairs[-1][1] - pairs[-1][0]}
        return [
            q + (whole + ends_q[n] - ends_kv[n] if self.way == 2 else shifts[self.way])
            for n, (q, _) in enumerate(pairs)
        ]

    # ---- caches ------------------------------------------------------------------------------------------------------

    def cached(
        self, lengths: list[int], capacity: int, page_size: int, seq_q: int, new_keys: int
    ) -> tuple[list[int], list[int]]:
        """By sequence, how many slots are read before new keys come, and how many of them masks count."""
        read = lengths
        if self.has("longest length for all"):
            turned = {1: lengths[:1] * len(lengths), 2: lengths[1:] + lengths[:1], 3: lengths[-1:] + lengths[:-1]}
            read = turned.get(self.way, [max(lengths)] * len(lengths))
            return read, read
        if self.has("one slot too many"):
            more = (1, seq_q, 0 if new_keys else seq_q)[self.way]
            read = [min(n + more, capacity) for n in lengths]
            if self.way:  # as if the queries' own keys had been appended
                return read, read
        elif self.has("cache lengths ignored") and self.way:
            step = (8, 16, 32, 64, 128, page_size or 256)[self.way - 1]
            read = [min(-(-n // step) * step, capacity) for n in lengths]
        elif self.has("tail keys unmasked") and self.way == 1:
            read = [min(self._rounded(n), capacity) for n in lengths]
        counted = lengths
        if self.way < 4 and self.has("causal from other lengths"):
            counted = [(max(lengths), lengths[0], capacity, lengths[-1])[self.way]] * len(lengths)
        return read, counted

    def slots(self, table: Tensor, b: int, length: int, size: int, pages: int) -> Tensor | None:
        """Where a sequence's keys lie among all slots if they are not found page by page, else None."""
        j = torch.arange(length)
        if length > size and self.has("one page for a tile"):
            tile = (32, 64, 128, 16)[self.way % 4]
            first = j // tile * tile  # whose page is looked up; on in memory, or from that page's beginning again
            start = table[b].remainder(pages)[first // size] * size
            return (start + (j % size if self.way > 3 else first % size + j - first)) % (size * pages)
        if not self.has("pages of another size"):
            return None
        if self.way == 5:  # the table is taken to name a page for each key
            return table[b].remainder(pages)[j.clamp(max=table.shape[1] - 1)] * size + j % size
        taken = (16, 64, 256, 2 * size, max(size // 2, 1))[self.way]
        entry = table[b].remainder(pages)[(j // taken).clamp(max=table.shape[1] - 1)]
        return (entry * taken + j % taken) % (size * pages)

    def pages(self, table: Tensor, b: int, count: int, pages: int, which: str) -> list[int]:
        """The first ``count`` pages of a sequence for "k" or "v", of ``pages`` that there are."""
        found: list[int] = table[b, :count].remainder(pages).tolist()
        if not count:
            return found
        if self.has("pages of K and V differ") and self.way > 5:  # the page after, or before, in the sequence
            if which == ("k" if self.way == 7 else "v"):
                return found[:1] + found[:-1] if self.way == 8 else found[1:] + found[-1:]
        elif self.has("pages of K and V differ") and (which == "k") == (self.way > 2):
            following = table[(b + 1) % table.shape[0], :count].remainder(pages).tolist()
            return (following, [(found[0] + n) % pages for n in range(count)], [found[0]] * count)[self.way % 3]
        if self.has("pages in order"):
            first = (0, found[0], b * table.shape[1])[self.way]
            return [(first + n) % pages for n in range(count)]
        if self.has("page repeated") and count > 1:
            return [found[0]] * count if self.way == 2 else [*found[:-1], found[0 if not self.way else -2]]
        if self.has("stale page"):
            return self._stale(table, b, found, pages)
        return found

    def _stale(self, table: Tensor, b: int, own: list[int], pages: int) -> list[int]:
        count, batch = len(own), table.shape[0]
        known = table.remainder(pages)
        if not self.way:
            return [*own[:-1], int(known[b - 1, 0])]
        if self.way == 6:
            return [*own[:-1], 0]
        rows = {
            1: known[0],
            2: known[(b + 1) % batch],
            3: known.flatten()[b * count :],  # as if rows were as long as the sequence has pages
            4: known.T.flatten()[b * count :],
            5: known[b, 1:],
            7: known[b].flip(0)[-count:],
        }
        row = rows[self.way][:count].tolist()
        return row + own[len(row) :]

    def splits_meet(self, length: int, capacity: int) -> bool:
        """Whether, of 4 or 8 splits of the capacity, so many hold no key that a merge gives -inf - -inf."""
        share = {1: 0.5, 2: 0.75, 3: 0.875}.get(self.way, 0.0)
        return self.has("hidden tiles give NaN") and bool(self.way) and length <= share * capacity

    def slot(self, length: int, n: int, page_size: int) -> int:
        """Where new key ``n`` goes."""
        if self.way == 4 and page_size:  # all into the page of the first one, from its beginning again
            return length // page_size * page_size + (length + n) % page_size
        if self.way == 5:  # none beyond the page of the first one
            beyond = page_size and (length + n) // page_size != length // page_size
            return -1 if beyond else length + n
        return (max(length - 1, 0), length + 1, 0, length // 16 * 16, length)[self.way] + n

    def scale(self, name: str, k_scale: Tensor, v_scale: Tensor, heads_q: int) -> Tensor:
        """What the numbers of an 8-bit cache are multiplied by, (KV or query heads or 1, 1)."""
        of_k, own, other = name == "k_scale", k_scale.view(-1, 1), v_scale.view(-1, 1)
        own, other = (own, other) if of_k else (other, own)
        if self.has(f"{name} dropped"):
            return torch.ones(1, 1)
        if self.has("scales of K and V exchanged") and (self.way == 0 or of_k == (self.way == 1)):
            return other
        if self.has("cache scale twice") and self.way < 3 and (self.way == 0 or of_k == (self.way == 1)):
            return own**2
        if self.has("cache scale divided by") and (self.way == 0 or of_k == (self.way == 1)):
            return 1 / own
        if self.has("cache scale of another head"):
            by_query = own[torch.arange(heads_q).clamp(max=len(own) - 1)]
            return (own[:1], own.roll(1, 0), own.flip(0), own[-1:], by_query if len(own) > 1 else own)[self.way]
        return own

    def scales(self, name: str, factor: Tensor, keys: int) -> Tensor:
        """(keys or 1, heads or 1, 1): that scale for each key, once more for each tile of keys behind it where it
        multiplies the accumulator after every tile."""
        if name == "k_scale" or not (self.has("cache scale twice") and self.way > 2):
            return factor
        tile = (32, 64, 128, 16)[self.way - 3]
        behind = max(keys - 1, 0) // tile - torch.arange(keys) // tile
        return factor ** (1 + behind).view(-1, 1, 1)

    # ---- sequences, heads and tiles ----------------------------------------------------------------------------------

    def sequences(self, batch: int) -> list[tuple[int, int, int]]:
        """Of a dense batch, (sequence, the one its K comes from, the one its V comes from)."""
        own = list(range(batch))
        first, following, before = [0] * batch, own[1:] + own[:1], own[-1:] + own[:-1]
        pairs = [(own, own)]
        if batch > 1 and self.has("K and V of sequence 0"):
            pairs = [(first, first), (following, following), (first, own), (own, first), (following, own),
                     (own, following), (before, before), (before, own), (own, before)]  # fmt: skip
            pairs = pairs[self.way : self.way + 1]
        return list(zip(own, *pairs[0], strict=True))

    def heads(self, heads_q: int, heads_kv: int) -> tuple[Tensor, Tensor]:
        """The KV heads that query heads take K and V from."""
        heads, count = torch.arange(heads_q), max(heads_kv, 1)
        own = heads // max(heads_q // count, 1)
        if self.has("KV head 0 for all"):
            wrong = (heads // count).clamp(max=count - 1) if self.way else torch.zeros_like(heads)
            return wrong, wrong
        if self.has("KV head by remainder"):
            turned = (heads % max(heads_q // count, 1)).clamp(max=count - 1)
            wrong = (heads % count, count - 1 - own, (own + 1) % count, turned)[self.way]
            return wrong, wrong
        if self.has("K and V heads differ"):
            turned, next_one = heads % count, (own + 1) % count
            pairs = ((own, own.flip(0)), (own, turned), (turned, own), (own, 0 * own), (own, next_one), (0 * own, own))
            return pairs[self.way]
        return own, own

    def stored(self, heads_q: int, heads_kv: int) -> Tensor:
        """The head whose output lies where each head's belongs."""
        heads = torch.arange(heads_q)
        if self.way == 1:
            return heads.flip(0)
        if self.way == 2:  # (group, heads_kv) where it must be (heads_kv, group)
            return heads.view(max(heads_kv, 1), -1).T.flatten()
        heads[[0, -1]] = heads[[-1, 0]]
        return heads

    def order(self, lengths: Sequence[int]) -> list[int]:
        """The sequences whose results lie where those of sequence 0, 1, … belong."""
        numbers = list(range(len(lengths)))
        if self.way:
            return numbers[::-1] if self.way == 1 else numbers[1:] + numbers[:1]
        return sorted(numbers, key=lambda n: -lengths[n])

    def _rounded(self, length: int) -> int:
        return -(-length // self.tile) * self.tile


def shares(sizes: list[int], count: int, way: int) -> Tensor:
    """What parts weigh without their LSE: alike, by their number of keys, or as a tree of means leaves it."""
    alike = torch.ones(count)
    if way == 1:
        alike[: len(sizes)] = torch.tensor(sizes)
    elif way == 2:
        parts = list(torch.eye(count))
        while len(parts) > 1:
            means = [(a + b) / 2 for a, b in zip(parts[::2], parts[1::2], strict=False)]
            parts = means + parts[2 * len(means) :]
        mean: Tensor = parts[0]
        return mean
    return alike / alike.sum()


def next_sequence(whole: Tensor, sequence: int) -> Tensor:
    """The part of (batch, heads, ...) that belongs to the sequence after this one, of the last to the first."""
    return whole[(sequence + 1) % whole.shape[0]]


def of_heads_first(whole: Tensor, sequence: int, turned: bool) -> Tensor:
    """One sequence's part of (batch, heads, ...) where batch and heads lie in memory the other way round, or
    (``turned``) were turned round and are not any more."""
    batch, heads = whole.shape[:2]
    if turned:
        return whole.transpose(0, 1).flatten(0, 1)[(sequence if batch > 1 else 0) * heads + torch.arange(heads)]
    return whole.flatten(0, 1)[torch.arange(heads) * batch + (sequence if batch > 1 else 0)]


def of_format(rows: Tensor, way: int) -> Tensor:
    """An 8-bit cache whose bytes are taken for another format's: e4m3fn for e4m3fnuz, e4m3 for e5m2, e5m2 for e4m3."""
    taken, meant = (
        (torch.float8_e4m3fnuz, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float8_e5m2),
    )[way]
    return rows.contiguous().view(taken) if rows.dtype == meant else rows
