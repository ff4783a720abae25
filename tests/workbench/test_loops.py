"""Schedules as data: what is walked, what is counted and the traffic model's bill are the same bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from attnworks import hardware, traffic
from attnworks.backends.cuda import plans, split
from attnworks.masks import Causal, Window
from attnworks.plan import Plan
from attnworks.workbench import counting, papers, schedules
from attnworks.workbench.counting import count
from attnworks.workbench.loops import Array, Pass, Schedule, grid_of, walk
from attnworks.workbench.providers import describe

MASKS = [None, Causal(), Causal("top-left"), Window(5, 0), Window(3, 7), Window(None, 2, "top-left"), Window(2, None)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_schedule.py"
UNSEEN = [None, Causal()]  # standard attention takes no notice of what is hidden
SIZES = [(16, 16), (13, 29), (29, 13), (1, 21)]
TILES = [(4, 8), (5, 3), (64, 64)]
PARTS = ("q", "kv", "out", "state", "scores_and_probs")


def problem(seq_q=32, seq_kv=32, heads_q=6, heads_kv=2, mask=None, batch=2, form="dense", **others):
    made = describe(
        form=form, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=8,
        head_dim_v=4, dtype=torch.float16, mask=mask,
    )  # fmt: skip
    return replace(made, **others)


def walked(p, schedule) -> Counter[str]:
    """Bytes by the bill's names, of every head of every sequence: those of a group move the same but for the first."""
    total: Counter[str] = Counter()
    together = all(one.together for one in schedule.passes)
    times = {True: p.heads_kv, False: 0 if together else p.heads_q - p.heads_kv}
    for first, heads in times.items():
        for step in walk(p, schedule, first_of_group=first) if heads else ():
            for move in step.moves:
                total[move.part] += move.bytes * p.batch * heads
    return +total


def counted(p, schedule) -> Counter[str]:
    total: Counter[str] = Counter()
    for moved in count(p, schedule):
        total[moved.part] += moved.loaded + moved.stored
    return +total


def every(masks=MASKS):
    for mask, (seq_q, seq_kv), tiles in product(masks, SIZES, TILES):
        yield problem(seq_q, seq_kv, mask=mask), tiles


@pytest.mark.parametrize("name", traffic.SCHEDULES)
def test_the_bill_is_what_is_walked_and_counted(name):
    for p, (tile_q, tile_kv) in every(UNSEEN if name == "standard" else MASKS):
        schedule = papers.FORWARD[name].with_tiles(tile_q, tile_kv)
        bill = traffic.estimate(p, name, tile_q, tile_kv)
        expected = +Counter({part: getattr(bill, part) for part in PARTS})
        assert walked(p, schedule) == counted(p, schedule) == expected, (p, tile_q, tile_kv)
        assert counting.executed_flops(p, schedule) == bill.executed_flops


@pytest.mark.parametrize("name", traffic.SCHEDULES)
def test_the_backward_counts_what_is_walked(name):
    for p, tiles in every(UNSEEN if name == "standard" else MASKS):
        schedule = papers.BACKWARD[name].with_tiles(*tiles)
        assert walked(p, schedule) == counted(p, schedule), (p, tiles)


# ---- the backward against loops over pairs ---------------------------------------------------------------------------


def seen(p, i, j):
    for term in p.mask:
        shift = p.seq_kv - p.seq_q if term.align == "bottom-right" else 0
        if (term.left is not None and j < i + shift - term.left) or (
            term.right is not None and j > i + shift + term.right
        ):
            return False
    return True


def parts_of(length, tile):
    return [range(start, min(start + tile, length)) for start in range(0, length, tile)]


def fa2_backward(p, tile_q, tile_kv):
    """Bytes of FlashAttention-2's algorithm 2, line by line, d = 8 and d_v = 4 in fp16."""
    state = total = 0
    total += p.heads_q * p.seq_q * (4 + 4) * 2  # O, dO
    total += p.heads_q * p.seq_q * 8 * 2  # dQ = 0
    state += p.heads_q * p.seq_q * 4  # delta
    for keys in parts_of(p.seq_kv, tile_kv):
        met = [rows for rows in parts_of(p.seq_q, tile_q) if any(seen(p, i, j) for i in rows for j in keys)]
        if met:
            total += p.heads_kv * len(keys) * (8 + 4) * 2  # K, V
        for rows in met:
            total += p.heads_q * len(rows) * ((8 + 4) * 2 + 4)  # Q, dO, LSE
            state += p.heads_q * len(rows) * (4 + 2 * 8 * 2)  # delta; dQ read and written
        total += p.heads_kv * len(keys) * (8 + 4) * 2  # dK, dV
    return p.batch * total, p.batch * state


def test_fa2_backward_is_the_papers_algorithm():
    for p, tiles in every():
        found = counted(p, papers.Q_OUTER_BACKWARD.with_tiles(*tiles))
        total, state = fa2_backward(p, *tiles)
        assert found["state"] == state
        assert found.total() - found["state"] == total, (p, tiles)


def test_standard_backward_moves_seven_matrices_and_no_input_twice():
    p = problem(seq_q=64, seq_kv=64, heads_q=2, heads_kv=2, batch=1)
    found = counted(p, papers.STANDARD_BACKWARD)
    assert found["scores_and_probs"] == 7 * 2 * 64 * 64 * 2  # P twice, dP written and read, dS written and read twice
    assert found["q"] == 2 * 64 * (8 + 2 * 4) * 2  # Q; dO for dV and for dP
    assert found["kv"] == 2 * 64 * (8 + 4) * 2
    assert found["out"] == 2 * 64 * (8 + 8 + 4) * 2


def test_recomputation_costs_a_fifth_product():
    p = problem(seq_q=64, seq_kv=64)
    stored, again = (counting.executed_flops(p, one) for one in (papers.STANDARD_BACKWARD, papers.Q_OUTER_BACKWARD))
    assert again == p.flops(backward=True)
    assert again - stored == 2 * 2 * 6 * 64 * 64 * 8


# ---- the grid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_full_tiles_are_those_without_a_hidden_pair(mask):
    for (seq_q, seq_kv), (tile_q, tile_kv) in product(SIZES, TILES):
        p = problem(seq_q, seq_kv, mask=mask)
        grid = grid_of(p, tile_q, tile_kv)
        for i, rows in enumerate(parts_of(seq_q, tile_q)):
            for j, keys in enumerate(parts_of(seq_kv, tile_kv)):
                pairs = [seen(p, row, key) for row in rows for key in keys]
                full = int(grid.full_first[i]) <= j < int(grid.full_last[i])
                meet = int(grid.first[i]) <= j < int(grid.last[i])
                assert (meet, full) == (any(pairs), all(pairs)), (seq_q, seq_kv, tile_q, tile_kv, i, j)


# ---- plans -----------------------------------------------------------------------------------------------------------

PLANS = [
    Plan("triton", "q_outer", 16, 16),
    Plan("cuda", "q_outer", 128, 32),
    Plan("triton", "grouped", 16, 16),
    Plan("triton", "kv_outer", 16, 16),
    Plan("triton", "standard", 16, 16),
    Plan("triton", "split_kv", 16, 16, 16),
    Plan("cuda", "split_kv", 128, 16, 32),
    Plan("cpu", "tiled", 24, 16),
    Plan("cpu", "split_kv", split_kv=256),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.backend} {plan.schedule}")
def test_every_plan_counts_what_is_walked(plan):
    for mask in MASKS:
        p = problem(40, 72, mask=mask, return_lse=True)
        schedule = schedules.of_plan(p, plan)
        assert walked(p, schedule) == counted(p, schedule), mask


@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_every_backward_counts_what_is_walked(backend):
    for mask in MASKS:
        p = problem(40, 72, mask=mask)
        assert walked(p, schedules.backward_of(p, backend)) == counted(p, schedules.backward_of(p, backend)), mask


def test_splits_write_partial_results_and_read_them():
    p = problem(1, 64, heads_q=6, heads_kv=2, batch=1)
    found = counted(p, schedules.of_plan(p, Plan("triton", "split_kv", 16, 16, 16)))
    bill = traffic.estimate(p, "split_kv", 0, 16)
    assert found["state"] == bill.state == 2 * 6 * 4 * (4 + 1) * 4
    assert found["kv"] == bill.kv
    assert found["q"] == 4 * bill.q, "each of four programs reads Q"


# One head of 4 tiles of rows on 3 units: the last tile's 5 tiles of keys are dealt out to them, cut before 1 and 3.
CUT = Plan("cuda", "stream_k", 16, 16, warps=12, stages=2)


def test_tiles_of_the_last_wave_are_cut_and_merged_by_hand():
    p = problem(64, 80, heads_q=1, heads_kv=1, batch=1, return_lse=True)
    schedule = schedules.of_plan(replace(p, seq_kv=240), CUT, 3)
    assert [one.cuts for one in schedule.passes] == [((5, 10),)] * 2  # 15 tiles of keys: stretches of at least four
    part = 16 * (4 + 1) * 4  # 16 rows of O and an LSE, in fp32
    moved = {(one.number, one.array, bool(one.stored), one.distinct): one.loaded + one.stored for one in count(
        replace(p, seq_kv=240), schedule)}  # fmt: skip
    assert moved == {
        (0, "q", False, 48 * 8 * 2): 48 * 8 * 2,
        (0, "q", False, 16 * 8 * 2): 3 * 16 * 8 * 2,  # by each of three parts
        (0, "k", False, 240 * 8 * 2): 4 * 240 * 8 * 2,
        (0, "v", False, 240 * 4 * 2): 4 * 240 * 4 * 2,
        (0, "out", True, 48 * 4 * 2): 48 * 4 * 2,
        (0, "lse", True, 48 * 4): 48 * 4,
        (0, "part", True, 3 * part): 3 * part,
        (1, "part", False, 3 * part): 3 * part,
        (1, "out", True, 16 * 4 * 2): 16 * 4 * 2,
        (1, "lse", True, 16 * 4): 16 * 4,
    }
    assert schedules.modelled_bytes(replace(p, seq_kv=240), CUT, 3) == sum(moved.values())


@pytest.mark.parametrize(("sizes", "units"), [((50, 200, 3, 2), 5), ((33, 500, 2, 1), 4), ((16, 400, 5, 3), 7)])
def test_cut_tiles_count_what_is_walked_and_are_those_of_the_launch(sizes, units):
    seq_q, seq_kv, heads, batch = sizes
    p = problem(seq_q, seq_kv, heads_q=heads, heads_kv=1, batch=batch, return_lse=True)
    schedule = schedules.of_plan(p, CUT, units)
    total: Counter[str] = Counter()
    for head in range(batch * heads):
        for step in walk(p, schedule, head=head):
            for move in step.moves:
                total[move.part] += move.bytes
    assert total == counted(p, schedule)
    cut, cuts = split.stretches(p, CUT, units), schedule.passes[0].cuts
    assert plans.tiles_of(p, CUT) - len(cuts) == cut.whole
    assert [len(edges) + 1 for edges in cuts] == [cut.parts_of(tile) for tile in range(len(cuts))]


def test_nothing_is_cut_where_the_last_wave_is_full_and_without_units_nothing_is_said():
    p = problem(32, 240, heads_q=2, heads_kv=2, batch=1)
    whole = schedules.of_plan(p, CUT, 4)
    assert len(whole.passes) == 1 and counted(p, whole) == counted(
        p, schedules.of_plan(p, replace(CUT, schedule="q_outer"))
    )
    with pytest.raises(ValueError, match="units: was 0"):
        schedules.of_plan(p, CUT)


@pytest.mark.parametrize("changes", [{"mask": Causal()}, {"form": "varlen", "total_q": 64, "total_kv": 64}])
def test_cut_tiles_under_a_mask_are_not_described(changes):
    body = replace(papers.Q_OUTER.passes[0], cuts=((1,),), parts=("part",))
    own = Schedule("cut", (body,), tile_q=16, tile_kv=16)
    assert count(problem(64, 64), own)
    with pytest.raises(ValueError, match="no mask or packed sequence"):
        count(problem(64, 64, **changes), own)


def test_cuts_are_for_their_own_tiles():
    body = replace(papers.Q_OUTER.passes[0], cuts=((1, 3),), parts=("part",))
    own = Schedule("cut", (body,), tile_q=16, tile_kv=16)
    assert count(problem(64, 64), own) == count(problem(64, 64), own.with_tiles(16, 0))
    for tiles in ((32, 0), (0, 32)):
        with pytest.raises(ValueError, match=r"must be \(16, 16\), for which 'cut' says where to cut"):
            own.with_tiles(*tiles)
    wrong = {
        ((4,),): r"held \(4,\), must be rising numbers of tiles of keys in 1..3",
        ((2, 1),): "rising",
        ((0,),): "rising",
        ((),) * 49: "of 49 tiles of queries, must be of at most 48",
    }
    for cuts, words in wrong.items():
        with pytest.raises(ValueError, match=words):
            count(problem(64, 64), replace(own, passes=(replace(body, cuts=cuts),)))


def test_a_plan_that_visits_all_tiles_moves_and_computes_as_without_a_mask():
    plan = Plan("triton", "q_outer", 16, 16, visit_all=True)
    p, free = problem(64, 64, mask=Causal()), problem(64, 64)
    schedule = schedules.of_plan(p, plan)
    assert walked(p, schedule) == counted(p, schedule) == counted(free, schedules.of_plan(free, plan))
    assert counting.executed_flops(p, schedule) == free.flops()


def test_a_group_as_rows_of_one_tile_reads_its_keys_once():
    p = problem(16, 64, batch=1)
    apart = counted(p, schedules.of_plan(p, Plan("triton", "q_outer", 64, 16)))
    together = counted(p, schedules.of_plan(p, Plan("triton", "grouped", 64, 16)))
    assert apart["kv"] == 3 * together["kv"]


def test_masks_and_biases_with_an_element_for_each_pair_are_read_in_visited_tiles():
    p = problem(64, 64, mask=Causal() & torch.ones(64, 64, dtype=torch.bool), batch=1)
    found = count(p, schedules.of_plan(p, Plan("triton", "q_outer", 16, 16)))
    assert [moved.loaded for moved in found if moved.array == "mask 0"] == [6 * 10 * 16 * 16]


def test_a_page_table_is_read_once_for_every_tile_of_queries():
    p = problem(1, 64, form="decode", batch=1, page_size=16)
    found = count(p, schedules.of_plan(p, Plan("triton", "split_kv", 16, 16, 64)))
    assert [moved.loaded for moved in found if moved.array == "page_table"] == [2 * 4 * 8]


@pytest.mark.parametrize("backend", ["triton", "cuda", "cpu"])
def test_plans_are_chosen_for_a_machine_that_is_not_here(backend):
    p = replace(problem(2048, 2048), head_dim=128, head_dim_v=128)
    on = hardware.detect("cpu") if backend == "cpu" else hardware.load("h200-sxm")
    plan = schedules.plan_on(p, backend, on)
    assert plan.backend == backend
    assert counted(p, schedules.of_plan(p, plan)).total() >= p.minimum_bytes()


@pytest.mark.parametrize(("backend", "machine"), [("cpu", "h200-sxm"), ("cuda", "t4"), ("eager", "t4")])
def test_a_backend_is_not_shown_where_it_does_not_run(backend, machine):
    with pytest.raises(ValueError, match="backend"):
        schedules.plan_on(problem(), backend, hardware.load(machine))


def test_nor_is_the_hopper_kernel_in_a_dtype_that_it_refuses():
    with pytest.raises(ValueError, match="'cuda' runs bfloat16 and float16, not float32"):
        schedules.plan_on(problem(dtype=torch.float32), "cuda", hardware.load("h200-sxm"))


# ---- a schedule of one's own -----------------------------------------------------------------------------------------

OWN = """
from attnworks.workbench.loops import Pass, Schedule

MINE = Schedule("mine", (
    Pass("forward", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("out", "lse"), products=(1, 1)),
), tile_q=16, tile_kv=8)
"""


def test_a_schedule_of_ones_own_is_read_from_a_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    found = schedules.from_file(f"{file}:MINE")
    p = problem(40, 72, mask=Causal())
    assert counted(p, found) == counted(p, papers.Q_OUTER.with_tiles(16, 8))
    with pytest.raises(ValueError, match="YOURS"):
        schedules.from_file(f"{file}:YOURS")
    with pytest.raises(ValueError, match=r"FILE\.py:NAME"):
        schedules.from_file("nowhere.py:MINE")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Pass("x", outer="q", inner="q"), "outer, inner"),
        (lambda: Pass("x", outer="q", streams=("k",)), "inner"),
        (lambda: Pass("x", outer="kv", inner="q", splits=True), "splits"),
        (lambda: Pass("x", outer="kv", inner="q", cuts=((1,),)), "cuts"),
        (lambda: Pass("x", outer="q", inner="kv", parts=("part",)), "parts"),
        (lambda: Schedule("x", (Pass("x", outer="q", keeps=("z",)),)), "'z' is no matrix"),
        (lambda: Schedule("x", (), tile_q=0), "tile_q"),
    ],
)
def test_what_cannot_be_is_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_the_examples_are_what_they_say():
    forward, backward = (schedules.from_file(f"{EXAMPLE}:{name}") for name in ("PAIRED", "KV_FIRST"))
    p = problem(300, 290, mask=Causal())
    assert counted(p, forward) == counted(p, papers.Q_OUTER.with_tiles(256, 128))
    assert walked(p, backward) == counted(p, backward)
    assert counting.executed_flops(p, backward) > counting.executed_flops(
        p, papers.Q_OUTER_BACKWARD.with_tiles(64, 128)
    )


def test_arrays_of_ones_own_are_counted():
    one = Pass("x", outer="q", inner="kv", streams=("index",))
    own = Schedule("x", (one,), 16, 16, arrays=(Array("index", "kv", lambda p: 4),))
    assert counted(problem(32, 32, batch=1), own).total() == 6 * 2 * 32 * 4
