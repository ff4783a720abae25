"""What kernels with a tile map, ALiBi or a bias are given beyond a plain kernel's arguments.

A tile map's partial tiles come with bits, one for each query and key, worked out once for a mask and kept with the map:
whatever the mask is made of, the kernel only reads them. Bounds that stand beside it are in the bits too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnworks import tilemap
from attnworks.backends.cuda.plans import broadcast_strides, mapped
from attnworks.masks import MaskSpec
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem
from attnworks.scores import ScoreTerm

LANES = 4  # that share a row of S, as two columns of each eight
MOST_BITS_BYTES = 2**30  # that a map may come to take


class BitMap(NamedTuple):
    """A tile map as the kernel reads it (``Span`` and ``Params`` in schedule.cuh).

    ``rows`` (rows of the map, 4): where its tiles begin and end, where the partial ones begin, and what takes a place
    to the number of its bits. ``tiles``: the KV tile at each place. ``bits`` (partial tiles, tile_q, 4): see
    ``words_of``. ``by_batch``, ``by_head``: rows of the map from one to the next, 0 where they share it. ``stream``:
    where it was made.
    """

    rows: Tensor
    tiles: Tensor
    bits: Tensor
    by_batch: int
    by_head: int
    stream: int


class Given(NamedTuple):
    """Fields of ``Params``, and the tensors that must outlive the launch."""

    fields: dict[str, int]
    tensors: tuple[Tensor, ...]

    def put_into(self, params: Any) -> None:
        for name, value in self.fields.items():
            setattr(params, name, value)


def strides(p: Problem) -> dict[str, int]:
    """The fields that a problem alone decides."""
    found: dict[str, int] = {}
    for term in p.scores:
        if term.kind == "bias" and term.operand:
            names = ("bias_batch", "bias_head", "bias_row", "bias_key")
            found |= dict(zip(names, broadcast_strides(term.operand), strict=True))
        elif term.kind == "alibi" and term.operand:
            found["slopes_batch"] = p.heads_q if len(term.operand.shape) == 2 else 0
    return found


def given(p: Problem, plan: Plan, o: Operands, stream: int) -> Given:
    """The fields that a call on the current stream, which has this handle, decides."""
    fields: dict[str, int] = {}
    kept: list[Tensor] = []
    if mapped(p):
        found = bit_map(p, plan, o)
        kept += (found.rows, found.tiles, found.bits)
        fields |= dict(zip(("map_rows", "map_tiles", "map_bits"), (x.data_ptr() for x in kept), strict=True))
        fields |= {"map_batch": found.by_batch, "map_head": found.by_head}
        if stream != found.stream:  # its memory may be given to others only when this launch is over, too
            for tensor in kept:
                tensor.record_stream(torch.cuda.current_stream())
    for term in p.scores:
        if term.kind == "bias":
            fields["bias"] = _operand(term, o).data_ptr()
        elif term.kind == "alibi":
            kept.append(_operand(term, o).to(torch.float32).contiguous())
            fields["slopes"] = kept[-1].data_ptr()
    return Given(fields, tuple(kept))


def begins_with_a_pair(p: Problem, o: Operands) -> bool:
    """Whether the bias begins at a multiple of two of its elements."""
    biases = [_operand(term, o) for term in p.scores if term.kind == "bias"]
    return all(bias.data_ptr() % (2 * bias.element_size()) == 0 for bias in biases)


def _operand(term: ScoreTerm, o: Operands) -> Tensor:
    assert term.operand is not None
    return o.scores[term.operand.index]


def bit_map(p: Problem, plan: Plan, o: Operands) -> BitMap:
    """The problem's map for a plan's tiles, or the one that was made for the same mask, sizes and operands."""
    sizes = {"batch": p.batch, "heads": p.heads_q, "seq_q": p.seq_q, "seq_kv": p.seq_kv}
    sizes |= {"tile_q": plan.tile_q, "tile_kv": plan.tile_kv}
    key = ("bits", p.mask, *sizes.values(), str(o.q.device))
    return tilemap.kept(
        key, o.mask, lambda: with_bits(tilemap.build(p.mask, o.mask, **sizes, device=o.q.device), p.mask, o.mask)
    )


def with_bits(found: tilemap.TileMap, spec: MaskSpec, operands: tuple[Tensor, ...]) -> BitMap:
    """A map and the bits of its partial tiles. A row that sees no key, which a kernel has no way of its own for, is
    given one partial tile without a bit: the last place, which all such rows share."""
    offsets, whole, tiles = found.visited
    bits = torch.zeros(found.partial_tiles + 1, found.tile_q, LANES, dtype=torch.int32, device=tiles.device)
    for part, visible in tilemap.partly_visible(spec, operands, found):
        bits[part] = words_of(visible)
    first, last = offsets[:-1], offsets[1:]
    rows = torch.stack((first, last, whole, found.partial.offsets[:-1] - whole), 1)
    end = tiles.numel()
    none = torch.tensor([end, end + 1, end, found.partial_tiles - end], dtype=torch.int32, device=tiles.device)
    rows = torch.where((first == last)[:, None], none, rows).contiguous()
    tiles = torch.cat((tiles, tiles.new_zeros(1)))
    stream = 0
    if tiles.is_cuda:  # other streams, which may be the next to read it, don't wait for this one
        torch.cuda.current_stream(tiles.device).synchronize()
        stream = torch.cuda.current_stream(tiles.device).cuda_stream
    by_batch, by_head = found.tiles_q * found.heads, found.tiles_q
    return BitMap(
        rows, tiles, bits, by_batch if found.batch > 1 else 0, by_head if found.heads > 1 else 0, stream
    )  # fmt: skip


def words_of(visible: Tensor) -> Tensor:
    """Booleans (tiles, tile_q, tile_kv) as int32 (tiles, tile_q, 4): bit 2 i + e of word l is column 8 i + 2 l + e,
    which is how the lanes of a row hold its scores. ``tile_kv`` at most 128."""
    tiles, rows, keys = visible.shape
    lanes = visible.view(tiles, rows, keys // 8, LANES, 2).transpose(2, 3).reshape(tiles, rows, LANES, keys // LANES)
    values = [1 << bit if bit < 31 else -(2**31) for bit in range(keys // LANES)]
    return (lanes * torch.tensor(values, dtype=torch.int32, device=visible.device)).sum(-1, dtype=torch.int32)


def most_bits_bytes(p: Problem) -> int:
    """What the bits take if every tile is seen in part only."""
    sharing = {name: any(tilemap.reads(term, name) for term in p.mask) for name in "bh"}
    maps = (p.batch if sharing["b"] else 1) * (p.heads_q if sharing["h"] else 1)
    return maps * (-(-p.seq_q // 128) * 128) * (-(-p.seq_kv // 128) * 128) // 8
