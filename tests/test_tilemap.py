"""Tile maps against visibility written out pair by pair, and the cache's notion of the same mask."""

import gc
import math
import weakref

import pytest
import torch

from attnworks import Causal, Window, masks, tilemap

DOC = torch.tensor([[0] * 9 + [1] * 20 + [2] * 21, [0] * 30 + [1] * 20])
HEADS = torch.tensor([3, 0, 40])
ROWS = torch.rand(37, 50, generator=torch.Generator().manual_seed(1)) < 0.1
BY_HEAD = torch.rand(3, 1, 50, generator=torch.Generator().manual_seed(2)) < 0.5


def document(b, h, q, k):
    return DOC[b, q] == DOC[b, k]


MASKS = {
    "none": (None, lambda b, h, i, j: True),
    "causal": (Causal(), lambda b, h, i, j: j <= i + 13),
    "top-left": (Causal("top-left"), lambda b, h, i, j: j <= i),
    "window": (Window(5, 2), lambda b, h, i, j: i + 13 - 5 <= j <= i + 13 + 2),
    # The bounds' ends are a tile's last and first key.
    "window of tiles": (Window(6, 4), lambda b, h, i, j: i + 13 - 6 <= j <= i + 13 + 4),
    "two alignments": (
        Causal() & Window(10, None, "top-left"),
        lambda b, h, i, j: j <= i + 13 and j >= i - 10,
    ),
    "document": (document, lambda b, h, i, j: bool(DOC[b, i] == DOC[b, j])),
    "causal document": (Causal() & document, lambda b, h, i, j: j <= i + 13 and bool(DOC[b, i] == DOC[b, j])),
    "by head": (lambda b, h, q, k: k >= q + HEADS[h], lambda b, h, i, j: j >= i + int(HEADS[h])),
    "dense rows": (ROWS, lambda b, h, i, j: bool(ROWS[i, j])),
    "dense by head": (BY_HEAD, lambda b, h, i, j: bool(BY_HEAD[h, 0, j])),
    "dense by predicate": (
        masks.AllOf((BY_HEAD, document)),
        lambda b, h, i, j: bool(BY_HEAD[h, 0, j]) and bool(DOC[b, i] == DOC[b, j]),
    ),
    "nothing": (lambda b, h, q, k: (q < 0) & (k < 0), lambda b, h, i, j: False),
}
DEPENDS = {
    "document": (2, 1),
    "causal document": (2, 1),
    "by head": (1, 3),
    "dense by head": (1, 3),
    "dense by predicate": (2, 3),
}
SIZES = {"batch": 2, "heads": 3, "seq_q": 37, "seq_kv": 50}
TILES = {"tile_q": 8, "tile_kv": 16}


def build(mask, make=tilemap.build, **changes):
    spec, operands = masks.split(mask)
    return make(spec, operands, **(SIZES | TILES | {"device": "cpu"} | changes))


@pytest.mark.parametrize("block", [1, 700, 2**20])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_of_every_pair_written_out(name, block, monkeypatch):
    monkeypatch.setattr(tilemap, "BLOCK", block)
    mask, visible = MASKS[name]
    found = build(mask)
    assert (found.batch, found.heads) == DEPENDS.get(name, (1, 1))
    assert (found.tiles_q, found.tiles_kv) == (5, 4)
    pairs = hidden = 0
    for b in range(found.batch):
        for h in range(found.heads):
            shown = {"partial": {}, "full": {}}
            for t in range(5):
                rows = range(8 * t, min(8 * t + 8, 37))
                states = []
                for u in range(4):
                    keys = range(16 * u, min(16 * u + 16, 50))
                    seen = [visible(b, h, i, j) for i in rows for j in keys]
                    pairs += sum(seen)
                    full = all(seen) and len(keys) == 16 and len(rows) == 8
                    states.append("full" if full else "partial" if any(seen) else "hidden")
                hidden += states.count("hidden")
                row = (b * found.heads + h) * 5 + t
                for kind, by_tile in shown.items():
                    by_tile[t] = [u for u, state in enumerate(states) if state == kind]
                    assert getattr(found, kind).row(row) == by_tile[t], (b, h, t, kind)
            for u in range(4):
                row = (b * found.heads + h) * 4 + u
                for kind, by_tile in shown.items():
                    expected = [t for t in range(5) if u in by_tile[t]]
                    assert getattr(found.transposed, kind).row(row) == expected, (b, h, u, kind)
    assert found.visible_pairs == pairs
    assert found.hidden_tiles == hidden
    assert math.isclose(found.visible_share, pairs / (found.batch * found.heads * 37 * 50))
    for lists in (found.partial, found.full, found.transposed.partial, found.transposed.full):
        assert lists.offsets.dtype == lists.tiles.dtype == torch.int32


@pytest.mark.parametrize("empty", ["batch", "heads", "seq_q", "seq_kv"])
def test_empty_problems_have_empty_maps(empty):
    found = build(Causal(), **{empty: 0})
    assert found.partial_tiles == found.full_tiles == found.visible_pairs == 0
    assert found.visible_share == 0
    assert found.partial.offsets.tolist() == [0] * (found.batch * found.heads * found.tiles_q + 1)
    assert found.transposed.full.offsets.tolist() == [0] * (found.batch * found.heads * found.tiles_kv + 1)


def test_an_expanded_batch_is_one():
    assert build(ROWS.expand(2, 3, 37, 50)).batch == 1
    assert build(ROWS.expand(2, 3, 37, 50)).heads == 1


def test_blocks_are_bounded_and_bounds_leave_hidden_tiles_out():
    """A window over 32k keys: 256 rows of tiles, of which each evaluates its own few and no block exceeds the bound."""
    spec, _ = masks.split(Window(100, 0))
    sizes = tilemap.Sizes(1, 1, 2**15, 2**15, 128, 128)
    blocks = [(len(units), len(tiles)) for units, tiles in tilemap._blocks(spec, sizes)]
    assert len(blocks) == 256
    assert max(tiles for _, tiles in blocks) <= 2
    whole = [(len(units), len(tiles)) for units, tiles in tilemap._blocks((), sizes)]
    assert max(u * t for u, t in whole) * 128 * 128 <= tilemap.BLOCK
    assert sum(u * t for u, t in whole) == 256 * 256


def test_what_cannot_be_traced_has_no_map():
    def branching(b, h, q, k):
        return q >= k if h > 0 else q < k

    with pytest.raises(
        ValueError, match=r"^mask: predicate branching has no tile map, .*not traced: branches on h > 0"
    ):
        build(branching)


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_the_same_mask_has_the_same_map():
    first = build(document, tilemap.cached)
    assert build(document, tilemap.cached) is first
    assert build(lambda b, h, q, k: DOC[b, q] == DOC[b, k], tilemap.cached) is first
    assert build(document, tilemap.cached, tile_q=16) is not first
    assert build(document, tilemap.cached, seq_q=36) is not first
    assert build(Causal() & document, tilemap.cached) is not first


def test_a_written_tensor_has_a_new_map():
    doc = DOC.clone()
    first = build(lambda b, h, q, k: doc[b, q] == doc[b, k], tilemap.cached)
    doc[0, 20:] = 5
    second = build(lambda b, h, q, k: doc[b, q] == doc[b, k], tilemap.cached)
    assert second.visible_pairs != first.visible_pairs
    assert second.visible_pairs == build(lambda b, h, q, k: doc[b, q] == doc[b, k]).visible_pairs


def test_a_freed_tensor_has_a_new_map_and_its_old_one_goes():
    def once(value):
        doc = torch.full((2, 50), value)
        doc[:, 25:] = 1
        pairs = build(lambda b, h, q, k: doc[b, q] == doc[b, k], tilemap.cached).visible_pairs
        assert len(tilemap._CACHE) == 1
        return pairs

    tilemap._CACHE.clear()
    assert [once(0), once(1), once(0)] == [2 * (25 * 25 + 12 * 25), 2 * 37 * 50, 2 * (25 * 25 + 12 * 25)]
    assert not tilemap._CACHE


def test_what_a_graph_was_captured_with_stays(monkeypatch):
    monkeypatch.setattr(tilemap, "_CAPTURED", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        doc = DOC.clone()
        found = weakref.ref(build(lambda b, h, q, k, doc=doc: doc[b, q] == doc[b, k], tilemap.cached).partial.tiles)
        del doc
        gc.collect()
        assert (found() is not None) == capturing


def test_an_inference_tensor_is_read_anew():
    with torch.inference_mode():
        doc = DOC.clone()
        first = build(lambda b, h, q, k: doc[b, q] == doc[b, k], tilemap.cached)
        doc[:] = 0
        assert build(lambda b, h, q, k: doc[b, q] == doc[b, k], tilemap.cached).visible_pairs == 2 * 37 * 50
        assert first.visible_pairs < 2 * 37 * 50


def test_the_cache_is_bounded():
    for tile in range(1, 80):
        build(Causal(), tilemap.cached, tile_q=tile)
        assert len(tilemap._CACHE) <= tilemap.CACHE_LIMIT
