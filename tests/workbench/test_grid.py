"""Tile maps in the model of bytes: what is hidden is neither loaded nor computed, held against loops over pairs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from attnworks import hardware, masks
from attnworks.masks import Causal
from attnworks.plan import Plan
from attnworks.workbench import counting, levels, loops, papers, schedules
from attnworks.workbench.grid import grid_of, maps_of, packed
from attnworks.workbench.providers import describe

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_mask.py"
TILE_Q, TILE_KV = 8, 16
D, D_V = 8, 4
DOCUMENT = torch.tensor([0] * 20 + [1] * 7 + [2] * 43)
BOOLEAN = torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.02
TABLE = torch.rand(4, 9, 5, generator=torch.Generator().manual_seed(2)) < 0.3
MASKS = {
    "document": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (k <= q),
    "prefix": lambda b, h, q, k: (k <= q) | (k < 20),
    "blocks of each head": lambda b, h, q, k: TABLE[h, q // 8, k // 16],
    "boolean": BOOLEAN,
    "causal and boolean": Causal() & BOOLEAN,
    "nothing": lambda b, h, q, k: q + k < 0,
}


def problem(mask, heads_q=4, heads_kv=2, batch=2):
    return describe(
        form="dense", batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=70, seq_kv=70, head_dim=D, head_dim_v=D_V,
        dtype=torch.float16, mask=mask,
    )  # fmt: skip


def dense(name):
    """(batch, heads, queries, keys), by the mask's own definition."""
    b, h, q, k = (
        torch.arange(n).view([-1 if m == axis else 1 for m in range(4)]) for axis, n in enumerate((2, 4, 70, 70))
    )
    whole = torch.ones(2, 4, 70, 70, dtype=torch.bool)
    if name == "boolean":
        return whole & BOOLEAN
    if name == "causal and boolean":
        return whole & BOOLEAN & (k <= q)
    return whole & MASKS[name](b, h, q, k)


def parts_of(length, tile):
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def asked(name):
    mask = MASKS[name]
    p = problem(mask)
    return p, maps_of(p, masks.split(mask)[1])


@pytest.mark.parametrize("name", MASKS)
def test_a_grid_shows_what_the_mask_does(name):
    p, maps = asked(name)
    visible = dense(name)
    heads = loops.heads_of(p, papers.Q_OUTER.with_tiles(TILE_Q, TILE_KV), papers.Q_OUTER.passes[0], maps)
    told_apart = len(heads.of_q)
    for number, (grid, times) in enumerate(heads.of_q):
        assert times * told_apart == 2 * 4
        of_batch = 2 if name in ("boolean", "causal and boolean") else 1
        b, h = divmod(number, told_apart // of_batch)
        for (i, rows), (j, keys) in product(enumerate(parts_of(70, TILE_Q)), enumerate(parts_of(70, TILE_KV))):
            tile = visible[b, h, rows, keys]
            assert bool(grid.seen[i, j]) == bool(tile.any())
            assert not bool(grid.whole[i, j]) or bool(tile.all())
            assert (j in grid.tiles_of(i, 0, 5)) == bool(tile.any()) == (i in grid.rows_of(j))
            inside = [span for span in grid.spans(i) if span.start <= j < span.stop]
            assert len(inside) == bool(tile.any()) and all(span.whole == bool(grid.whole[i, j]) for span in inside)
    assert maps.visible_pairs == int(visible.sum())


def moved(p, schedule, maps):
    found = {}
    for one in counting.count(p, schedule, maps):
        found[one.array] = found.get(one.array, 0) + one.loaded + one.stored
    return found


@pytest.mark.parametrize("name", MASKS)
def test_bytes_of_the_forwards_are_those_of_loops_over_pairs(name):
    p, maps = asked(name)
    visible = dense(name)
    rows_of, keys_of = parts_of(70, TILE_Q), parts_of(70, TILE_KV)
    met = [
        (b, h, rows, keys)
        for b, h, rows, keys in product(range(2), range(4), rows_of, keys_of)
        if visible[b, h, rows, keys].any()
    ]
    size = lambda part: part.stop - part.start  # noqa: E731
    kept = {(b, h, rows.start): size(rows) for b, h, rows, _ in met}
    found = moved(p, papers.Q_OUTER.with_tiles(TILE_Q, TILE_KV), maps)
    assert found.get("q", 0) == 2 * D * sum(kept.values())
    assert found.get("k", 0) == 2 * D * sum(size(keys) for *_, keys in met)
    assert found["out"] == 2 * D_V * 2 * 4 * 70
    flops = 2 * (D + D_V) * sum(size(rows) * size(keys) for *_, rows, keys in met)
    assert counting.executed_flops(p, papers.Q_OUTER.with_tiles(TILE_Q, TILE_KV), maps) == flops
    first = moved(p, papers.KV_OUTER.with_tiles(TILE_Q, TILE_KV), maps)
    outer = {(b, h, keys.start): size(keys) for b, h, _, keys in met}
    assert first.get("v", 0) == 2 * D_V * sum(outer.values())
    assert first.get("q", 0) == 2 * D * sum(size(rows) for _, _, rows, _ in met)
    written = schedules.bill(p, "q_outer", TILE_Q, TILE_KV, maps)
    assert (written.q, written.kv, written.flops) == (
        found.get("q", 0), found.get("k", 0) + found.get("v", 0), 2 * int(visible.sum()) * (D + D_V)
    )  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_keys_of_the_backward_are_loaded_once_where_any_head_of_a_group_sees_them(name):
    p, maps = asked(name)
    visible = dense(name)
    found = moved(p, papers.Q_OUTER_BACKWARD.with_tiles(TILE_Q, TILE_KV), maps)
    of_groups = visible.view(2, 2, 2, 70, 70).any(2).any(2)  # (batch, heads_kv, keys)
    keys = sum(
        part.stop - part.start
        for b, h, part in product(range(2), range(2), parts_of(70, TILE_KV))
        if of_groups[b, h, part].any()
    )
    assert found.get("k", 0) == 2 * D * keys
    assert found["d_k"] == 2 * D * 2 * 2 * 70, "written whether seen or not"


def test_walk_and_count_are_the_same_bytes_where_heads_share_a_map():
    apart = tuple(replace(one, together=False) for one in papers.SPLIT_KV.passes)
    shared_out = replace(papers.SPLIT_KV, passes=apart, split_kv=2 * TILE_KV)
    for name in ("document", "prefix"):
        p, maps = asked(name)
        for known in (papers.FORWARD, papers.BACKWARD, {"split_kv": shared_out}):
            for schedule in (one.with_tiles(TILE_Q, TILE_KV) for one in known.values()):
                walked = sum(
                    move.bytes * heads
                    for first, heads in ((True, p.heads_kv), (False, p.heads_q - p.heads_kv))
                    for step in loops.walk(p, schedule, first_of_group=first, maps=maps)
                    for move in step.moves
                )
                assert p.batch * walked == sum(moved(p, schedule, maps).values()), (name, schedule.name)


def test_backends_read_a_mask_in_part_seen_tiles_alone_and_an_entry_of_the_map_for_each():
    mask = Causal() & torch.ones(64, 64, dtype=torch.bool).tril(20)
    p = replace(problem(mask), seq_q=64, seq_kv=64)
    maps = maps_of(p, masks.split(mask)[1])
    grid = loops.walked_grid(p, papers.Q_OUTER.with_tiles(16, 16), papers.Q_OUTER.passes[0], None, maps)
    assert (int(grid.seen.sum()), int(grid.whole.sum())) == (10, 6)
    triton = moved(p, schedules.of_plan(p, Plan("triton", "q_outer", 16, 16)), maps)
    assert triton["mask 0"] == 8 * 4 * 16 * 16 and triton["tile map"] == 8 * 10 * 4
    assert triton["tile map rows"] == 8 * 4 * 2 * 4, (
        "of each of 4 tiles of rows where its entries begin, and the partial"
    )
    steps = list(loops.walk(p, schedules.of_plan(p, Plan("triton", "q_outer", 16, 16)), maps=maps))
    reads = [move.bytes for step in steps for move in step.moves if move.array == "mask 0"]
    assert reads == [16 * 16] * 4 and sum(step.kind == "visit" for step in steps) == 10
    cuda = moved(p, schedules.of_plan(p, Plan("cuda", "q_outer", 16, 16)), maps)
    assert cuda["mask bits"] == 8 * 4 * 16 * 16 and "mask 0" not in cuda  # four words for each of 16 rows
    assert cuda["tile map rows"] == 8 * 4 * 4 * 4
    unknown = moved(p, schedules.of_plan(p, Plan("triton", "q_outer", 16, 16)), None)
    assert unknown["mask 0"] == 8 * 10 * 16 * 16, "bounds alone: any tile may be seen in part"


def test_hidden_tiles_take_no_time_and_heads_that_are_rows_of_one_tile_have_no_map():
    h200 = hardware.load("h200-sxm")
    document = torch.arange(4096) // 512
    mask = lambda b, h, q, k: document[q] == document[k]  # noqa: E731
    p = describe(
        form="dense", batch=2, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=128, head_dim_v=128,
        dtype=torch.bfloat16, mask=mask,
    )  # fmt: skip
    maps = maps_of(p, masks.split(mask)[1])
    plan = schedules.of_plan(p, Plan("triton", "q_outer", 64, 64))
    found, all_of_it = (levels.levels(p, plan, h200, maps=given) for given in (maps, None))
    assert found.flops * 8 == all_of_it.flops == p.flops()
    assert found.seconds < all_of_it.seconds / 4 and found.bound == "products"
    # Each document's keys are read by its own queries alone: nothing has to be read twice.
    of_map = sum(row.read for row in found.rows if row.array.startswith("tile map"))
    assert found.read - of_map == 3 * 2 * 16 * 4096 * 128 * 2
    grouped = schedules.of_plan(p, Plan("triton", "grouped", 64, 64))
    assert levels.levels(p, grouped, h200, maps=maps).flops == p.flops()


def test_there_is_no_map_of_bounds_and_caches():
    assert maps_of(problem(Causal()), ()) is None
    assert maps_of(replace(problem(MASKS["prefix"]), form="decode"), ()) is None


def test_what_reads_past_its_tensors_or_cannot_be_traced_is_said():
    short = torch.zeros(8, dtype=torch.long)
    past = lambda b, h, q, k: short[q] == short[k]  # noqa: E731
    with pytest.raises(ValueError, match="past the end of a tensor"):
        maps_of(problem(past), masks.split(past)[1]).at(16, 16)
    branching = lambda b, h, q, k: q >= k and k > 3  # noqa: E731
    with pytest.raises(ValueError, match="not traced"):
        maps_of(problem(branching), ()).at(16, 16)


def test_packed_sequences_lie_along_the_diagonal():
    p = problem(Causal())
    lengths = [(20, 20), (0, 5), (9, 33), (7, 0)]
    grid = packed(p, lengths, 8, 16)
    alone = [grid_of(replace(p, seq_q=seq_q, seq_kv=seq_kv), 8, 16) for seq_q, seq_kv in lengths]
    assert grid.rows.tolist() == [rows for one in alone for rows in one.rows.tolist()]
    assert grid.keys.tolist() == [keys for one in alone for keys in one.keys.tolist()]
    assert grid.pairs == sum(one.pairs for one in alone)
    for row in range(len(grid.rows)):
        low, high = grid.own[row].tolist()
        assert all(low <= tile < high for tile in grid.tiles_of(row, 0, 99))
    assert grid.own.tolist() == [[0, 2]] * 3 + [[3, 6]] * 2 + [[6, 6]]


def test_the_examples_hide_what_they_say():
    spec = importlib.util.spec_from_file_location("own_mask", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shares = {}
    for name in ("DOCUMENTS", "PREFIX", "BLOCKS"):
        mask = getattr(module, name)
        p = replace(problem(mask, heads_q=1, heads_kv=1, batch=1), seq_q=2048, seq_kv=2048)
        shares[name] = maps_of(p, masks.split(mask)[1]).at(128, 128).visible_share
    assert 0.3 < shares["DOCUMENTS"] < 0.4 and 0.5 < shares["PREFIX"] < 0.6 and 0.2 < shares["BLOCKS"] < 0.3
