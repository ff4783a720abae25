"""The small jitted pieces that every Triton kernel of this backend is composed of.

Names as in the papers and in ``docs/maths.md``: scores S, probs P, running_max m, running_sum l, acc O. Scores are kept
in base 2 (S · log2 e), because the hardware's exponential is one of base 2. Positions are int32 within a sequence,
offsets into memory int64 wherever a whole tensor's extent may pass 2**31 elements.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# "No limit" of a bound: beyond every position, far from overflowing int32 when a position is added.
FAR = tl.constexpr(2**30)


@triton.jit
def sequence(b, seq, cu_seqlens, stride_batch, stride_row):
    """(rows of sequence b, offset of its first element): from ``cu_seqlens`` where sequences are packed."""
    if cu_seqlens is None:
        length = seq
        start = b.to(tl.int64) * stride_batch
    else:
        first = tl.load(cu_seqlens + b).to(tl.int64)
        length = (tl.load(cu_seqlens + b + 1) - first).to(tl.int32)
        start = first * stride_row
    return length, start


@triton.jit
def padded_start(b, cu_seqlens, stride_batch, PAD: tl.constexpr):
    """The first row of sequence b where each begins on a multiple of PAD rows and is padded to one."""
    if cu_seqlens is None:
        start = b.to(tl.int64) * stride_batch
    else:
        start = (tl.load(cu_seqlens + b) // PAD + b).to(tl.int64) * PAD
    return start


@triton.jit
def task(program, tiles, heads, UNEVEN: tl.constexpr, LATE_FIRST: tl.constexpr):
    """(tile, head, batch entry) of a program. Tiles are UNEVEN under a causal bound: then the longest of all heads go
    first, so that no long one is left for the end. Otherwise a head's tiles run side by side and share its keys in the
    cache."""
    if UNEVEN:
        tile, head = program // heads % tiles, program % heads
    else:
        tile, head = program % tiles, program // tiles % heads
    return tiles - 1 - tile if LATE_FIRST else tile, head, program // tiles // heads


@triton.jit
def diagonals(seq_q, seq_kv, low_bottom, high_bottom, low_top, high_top):
    """(low, high): query i sees keys i + low to i + high. Bounds of both alignments, intersected."""
    shift = seq_kv - seq_q
    low = tl.maximum(tl.maximum(low_bottom + shift, low_top), -FAR)
    high = tl.minimum(tl.minimum(high_bottom + shift, high_top), FAR)
    return low, high


@triton.jit
def tile_ranges(begin, end, first, last, low, high, TILE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(start, full_start, full_end, end), in tiles: which tiles of the axis [begin, end) the rows first..last see.

    Row r sees [r + low, r + high]. Tiles in [full_start, full_end) are seen whole by every row, the others between
    start and end in part, and all the rest not at all. ``begin`` must lie on a tile's edge.
    """
    seen_from, seen_to = begin, end
    whole_from, whole_to = begin, end
    if LEFT:
        seen_from = tl.maximum(begin, tl.minimum(first + low, end))
        whole_from = tl.maximum(begin, tl.minimum(last + low, end))
    if RIGHT:
        seen_to = tl.maximum(begin, tl.minimum(end, last + high + 1))
        whole_to = tl.maximum(begin, tl.minimum(end, first + high + 1))
    start = seen_from // TILE
    stop = tl.maximum(start, tl.cdiv(seen_to, TILE))
    full_start = tl.minimum(tl.maximum(tl.cdiv(whole_from, TILE), start), stop)
    full_end = tl.minimum(tl.maximum(whole_to // TILE, full_start), stop)
    return start, full_start, full_end, stop


@triton.jit
def visited_tiles(
    begin, end, first, last, low, high, tile_map, b, head, tile,
    TILE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """(start, full_start, full_end, stop): ``tile_ranges``, or where there is a MASK what it leaves of them. With a
    tile map those are places in its list, of which each row's tiles seen whole come first (``tile_at``); without one
    every tile may be seen in part."""
    start, full_start, full_end, stop = tile_ranges(begin, end, first, last, low, high, TILE, LEFT, RIGHT)
    if MASK is not None:
        full_start, full_end = start, start
        if tile_map is not None:
            row = b * tile_map[3] + head * tile_map[4] + tile
            start, full_end = tl.load(tile_map[0] + row), tl.load(tile_map[1] + row)
            full_start, stop = start, tl.load(tile_map[0] + row + 1)
    return start, full_start, full_end, stop


@triton.jit
def tile_at(place, tile_map, stop):
    """The tile at a place between ``start`` and ``stop`` of ``visited_tiles``; any number from ``stop`` on."""
    return place if tile_map is None else tl.load(tile_map[2] + place, mask=place < stop, other=0)


@triton.jit
def in_part(place, full_start, full_end, LEFT: tl.constexpr):
    """Whether the tile at ``place`` is seen in part only. LEFT: some before the full ones may be."""
    return (place < full_start) | (place >= full_end) if LEFT else place >= full_end


@triton.jit
def seen(
    b, head, rows, keys, seq_q, seq_kv, low, high, mask_operands,
    LEFT: tl.constexpr, MASK: tl.constexpr, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """(rows, keys) of booleans, (keys, rows) if KEYS_FIRST: whether the row sees the key."""
    visible = inside(rows, keys, seq_kv, low, high, LEFT)
    if KEYS_FIRST:
        visible = tl.trans(visible)
        if MASK is not None:
            visible = visible & MASK(b, head, rows[None, :], keys[:, None], seq_kv - seq_q, mask_operands)
    elif MASK is not None:
        visible = visible & MASK(b, head, rows[:, None], keys[None, :], seq_kv - seq_q, mask_operands)
    return visible


@triton.jit
def offsets_of(rows, stride, WIDE: tl.constexpr):
    """Element offsets of ``rows``; 64-bit where the rows of one tile lie 2**31 elements apart."""
    return rows.to(tl.int64) * stride if WIDE else rows * stride


@triton.jit
def load_tile(base, offsets, valid, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows at ``offsets`` from ``base``, DIM columns of each, as (rows, BLOCK). 0 past DIM and, if MASKED, where not
    ``valid``."""
    columns = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED and DIM == BLOCK:
        tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=valid[:, None] & (columns < DIM)[None, :], other=0.0)
    elif DIM == BLOCK:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_described(tensor, b, head, start, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows start to start + TILE - 1 of a head as (TILE, BLOCK), 0 past the last row and column, through a tensor
    descriptor (``launch.Described``): one copy that the hardware makes by itself."""
    return tensor.load([b, head, start, 0]).reshape(TILE, BLOCK)


@triton.jit
def store_tile(base, offsets, valid, value, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """``value`` (rows, BLOCK) to the valid rows and the first DIM columns, converted to the memory's dtype."""
    columns = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=valid[:, None] & (columns < DIM)[None, :])


@triton.jit
def inside(rows, keys, end, low, high, LEFT: tl.constexpr):
    """(rows, keys) of booleans: keys before ``end`` that the closed bounds let the row see."""
    visible = keys[None, :] <= tl.minimum(rows + high, end - 1)[:, None]
    if LEFT:
        visible = visible & (keys[None, :] >= (rows + low)[:, None])
    return visible
