"""What is read again and not found: programs run in turns, and what one turn reads the next looks for in the cache.

Programs that read the same keys and run at the same time walk over them in step and share what one of them loads. Where
there are more of them than run at once, or where a turn of the machine ends in their middle, those of the next turn
read the keys anew. What else was touched meanwhile decides whether they are still there: the cache is one of ``WAYS``
ways whose lines are spread at random over its sets, each of which forgets what was touched longest ago, so that a line
is lost if at least ``WAYS`` others came into its set (A. J. Smith, "Cache Memories", ACM Computing Surveys 14 (3),
1982: set-associative caches by their stack distances).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WAYS = 16
"""Of the L2 of NVIDIA's V100 (Z. Jia et al., arXiv:1804.06826, table 3.1); of later ones it is not published."""


class Turns(NamedTuple):
    """Programs in the order in which they begin: ``programs`` of them, ``at_once`` at a time, ``block`` in a row that
    read the same keys."""

    programs: int
    at_once: int
    block: int


def lost(touched: Tensor, capacity: float) -> Tensor:
    """The share of lines that a cache of ``capacity`` bytes has lost after so many others were touched: that a Poisson
    variable is at least ``WAYS``."""
    others = WAYS * touched / max(capacity, 1e-9)
    found: Tensor = torch.special.gammainc(torch.full_like(others, WAYS), others)
    return found


def head_after_head(turns: Turns, common: Tensor | None) -> tuple[Tensor, Tensor]:
    """Wherever a turn ends in the middle of a block: the share of all keys that is read again, and of how many blocks
    the keys are touched meanwhile. Of blocks that shared the turn before it is what they had still to read, of those
    that share the next what they have read by then: half of them on average. ``common``: the share of the block's keys
    that programs before and behind each of its places both read, its beginning and its end among them; None for all."""
    ends = torch.arange(turns.at_once, turns.programs, turns.at_once, device="cpu")
    ends = ends[ends % turns.block > 0]
    own = ends // turns.block
    before = own - (ends - turns.at_once) // turns.block
    after = ((ends + turns.at_once).clamp(max=turns.programs) - 1) // turns.block - own
    share = common[ends % turns.block] if common is not None else torch.ones(len(ends), dtype=torch.float64)
    return share * turns.block / turns.programs, 1 + (before + after).double() / 2


def longest_first(turns: Turns, heads: int, common: Tensor) -> tuple[Tensor, Tensor]:
    """The same where a block is ``heads`` heads that begin together, each with its last tile of queries; ``common`` is
    that of one head. The shortest tiles, which end a block, hardly keep the next one from beginning a turn of its own;
    and what the longest alone have read is not touched again."""
    ends = torch.arange(turns.at_once, max(turns.at_once, turns.block), turns.at_once, device="cpu")
    place = len(common) - 1 - ends // heads
    ahead = ends % heads  # heads that have begun one tile more in the turn before
    share = (common[place] * (heads - ahead) + common[(place - 1).clamp(min=0)] * ahead) / heads
    return share, share
