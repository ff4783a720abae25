"""How a case's tensors lie in memory: strides, gaps and pages, with poison in every element that is not the problem's.

All functions take the logical tensor in (batch, heads, rows, dim) and return a tensor of the wanted layout whose values
are equal and whose strides are not what a careless kernel expects.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MEMORY = ("contiguous", "gapped", "swapped", "strided channels", "shared heads")


def _poisoned(shape: Sequence[int], dtype: torch.dtype, poison: float) -> Tensor:
    if not dtype.is_floating_point:
        return torch.full(tuple(shape), 113, dtype=dtype)
    return torch.full(tuple(shape), poison, dtype=torch.float32).to(dtype)


def store(x: Tensor, layout: str, memory: str, poison: float) -> Tensor:
    """Lay a dense tensor out. ``memory``: "contiguous" (with guard elements around it), "gapped" (odd strides, an odd
    offset, poison between rows, heads and batch entries), "swapped" (heads and rows stored in the other order),
    "strided channels" (last dimension not contiguous), "shared heads" (one head stored once, head stride 0)."""
    x = x if layout == "bhsd" else x.transpose(1, 2)
    batch, first, second, dim = x.shape
    if memory == "contiguous":
        buffer = _poisoned((x.numel() + 2 * 64,), x.dtype, poison)
        view = buffer[64 : 64 + x.numel()].view(x.shape)
    elif memory == "gapped":
        view = _poisoned((batch, first + 1, second + 3, dim + 5), x.dtype, poison)[
            :, :first, 2 : second + 2, 3 : dim + 3
        ]
    elif memory == "swapped":
        view = _poisoned((batch, second, first, dim), x.dtype, poison).transpose(1, 2)
    elif memory == "strided channels":
        view = _poisoned((batch, first, dim, second + 2), x.dtype, poison)[..., :second].transpose(2, 3)
    elif memory == "shared heads":
        heads = 1 if layout == "bhsd" else 2
        one = _poisoned(x.narrow(heads, 0, min(1, x.shape[heads])).shape, x.dtype, poison)
        return one.copy_(x.narrow(heads, 0, one.shape[heads])).expand(x.shape)
    else:
        raise ValueError(f"memory: was {memory!r}, must be one of {MEMORY}")
    view.copy_(x)
    return view


def pack(parts: Sequence[Tensor], spare: int, memory: str, poison: float) -> Tensor:
    """Pack sequences (heads, rows, dim) into (total, heads, dim), with ``spare`` poisoned rows after the last."""
    heads, _, dim = parts[0].shape
    total = sum(part.shape[1] for part in parts)
    gap = 3 if memory == "gapped" else 0
    packed = _poisoned((total + spare, heads + gap, dim + gap), parts[0].dtype, poison)[:, :heads, :dim]
    packed[:total] = torch.cat([part.transpose(0, 1) for part in parts])
    return packed


def cache(parts: Sequence[Tensor], capacity: int, memory: str, poison: float) -> Tensor:
    """Put sequences (heads, rows, dim) into a dense cache (batch, capacity, heads, dim), poison past their ends."""
    heads, _, dim = parts[0].shape
    gap = 3 if memory == "gapped" else 0
    stored = _poisoned((len(parts), capacity + gap, heads, dim + gap), parts[0].dtype, poison)[:, :capacity, :, :dim]
    for sequence, part in enumerate(parts):
        stored[sequence, : part.shape[1]] = part.transpose(0, 1)
    return stored


def table_width(lengths: Sequence[int], page_size: int) -> int:
    """Entries for each sequence: one more than the longest needs."""
    return -(-max(lengths, default=0) // page_size) + 1


def page_table(lengths: Sequence[int], page_size: int, rng: torch.Generator) -> tuple[Tensor, int]:
    """Pages in random order, (batch, pages_per_sequence) int32, and how many pages there are; two of them stay unused.

    Entries past a sequence's last page hold numbers that name no page: whoever reads them reads out of bounds.
    """
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 2
    order = torch.randperm(pages, generator=rng).tolist()
    table = torch.full((len(lengths), table_width(lengths, page_size)), 2**31 - 1, dtype=torch.int32)
    for sequence, count in enumerate(counts):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table, pages


def paged(
    pair: tuple[Sequence[Tensor], Sequence[Tensor]],
    table: Tensor,
    pages: int,
    page_size: int,
    memory: str,
    poison: float,
) -> tuple[Tensor, Tensor]:
    """Put the keys and values of sequences into (pages, page_size, heads, dim) caches. ``memory="halves"``: both are
    halves of one buffer (equal dims), so that the page stride is twice the dense one."""
    (heads, _, dim), dim_v = pair[0][0].shape, pair[1][0].shape[2]
    dtype = pair[0][0].dtype
    if memory == "halves":
        whole = _poisoned((pages, 2, page_size, heads, dim), dtype, poison)
        stored = (whole[:, 0], whole[:, 1])
    else:
        stored = (
            _poisoned((pages, page_size, heads, dim), dtype, poison),
            _poisoned((pages, page_size, heads, dim_v), dtype, poison),
        )
    for target, parts in zip(stored, pair, strict=True):
        for sequence, part in enumerate(parts):
            for start in range(0, part.shape[1], page_size):
                rows = part[:, start : start + page_size].transpose(0, 1)
                target[int(table[sequence, start // page_size]), : rows.shape[0]] = rows
    return stored
