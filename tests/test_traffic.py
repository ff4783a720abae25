"""The traffic model against a tile loop that counts what it loads, and against the papers' bills and laws."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from attnworks import hardware, masks, traffic
from attnworks.masks import Causal, Window
from attnworks.problem import Problem
from attnworks.traffic import Traffic, estimate

TEXTBOOK = hardware.load("textbook")


def problem(
    seq_q: int = 4096,
    seq_kv: int | None = None,
    heads_q: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    mask: object = None,
    **others: object,
) -> Problem:
    described = Problem(
        form="dense",
        batch=1,
        heads_q=heads_q,
        heads_kv=heads_kv or heads_q,
        seq_q=seq_q,
        seq_kv=seq_q if seq_kv is None else seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        dtype=torch.float16,
        device="cpu",
        scale=1.0,
        q_strides=(0, 0, 0),
        k_strides=(0, 0, 0),
        v_strides=(0, 0, 0),
        mask=masks.split(mask)[0],
    )
    return replace(described, **others)  # type: ignore[arg-type]


# ---- the simulator: loops over tiles and looks at every pair -------------------------------------------------------


@functools.cache
def dense_visibility(p: Problem) -> torch.Tensor:
    """(seq_q, seq_kv), element by element from the masks' definition."""
    seen = torch.ones(p.seq_q, p.seq_kv, dtype=torch.bool)
    for term in p.mask:
        assert isinstance(term, masks.Bounds)
        shift = p.seq_kv - p.seq_q if term.align == "bottom-right" else 0
        for i, j in itertools.product(range(p.seq_q), range(p.seq_kv)):
            below = term.left is not None and j < i + shift - term.left
            above = term.right is not None and j > i + shift + term.right
            if below or above:
                seen[i, j] = False
    return seen


class Memory:
    """Counts what is loaded from and stored to the slow memory."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(("q", "kv", "out", "state", "scores_and_probs"), 0)
        self.products = 0

    def move(self, what: str, rows: int, width: int, size: int) -> None:
        self.bytes[what] += rows * width * size


def simulate(p: Problem, schedule: str, tile_q: int, tile_kv: int) -> Memory:
    memory = Memory()
    seen = dense_visibility(p)
    loop = {"standard": simulate_standard, "q_outer": simulate_q_outer, "kv_outer": simulate_kv_outer}[schedule]
    heads = p.heads_kv if schedule == "standard" else p.heads_q
    for _ in range(p.batch * heads):
        loop(p, memory, seen, tile_q, tile_kv)
    return memory


def tiles(length: int, tile: int) -> list[range]:
    return [range(start, min(start + tile, length)) for start in range(0, length, tile)]


def any_visible(seen: torch.Tensor, rows: range, keys: range) -> bool:
    return bool(seen[rows.start : rows.stop, keys.start : keys.stop].any())


def simulate_standard(p: Problem, memory: Memory, seen: torch.Tensor, tile_q: int, tile_kv: int) -> None:
    size, rows = p.element_size, p.seq_q * p.group  # of all query heads that share a KV head
    memory.move("q", rows, p.head_dim, size)
    memory.move("kv", p.seq_kv, p.head_dim, size)
    for _ in ("S written", "S read", "P written", "P read"):
        memory.move("scores_and_probs", rows, p.seq_kv, size)
    memory.move("kv", p.seq_kv, p.head_dim_v, size)
    memory.move("out", rows, p.head_dim_v, size)
    memory.products += rows * p.seq_kv


def simulate_q_outer(p: Problem, memory: Memory, seen: torch.Tensor, tile_q: int, tile_kv: int) -> None:
    size = p.element_size
    for rows in tiles(p.seq_q, tile_q):
        met = [keys for keys in tiles(p.seq_kv, tile_kv) if any_visible(seen, rows, keys)]
        if met:
            memory.move("q", len(rows), p.head_dim, size)
        for keys in met:
            memory.move("kv", len(keys), p.head_dim, size)
            memory.move("kv", len(keys), p.head_dim_v, size)
            memory.products += len(rows) * len(keys)
        memory.move("out", len(rows), p.head_dim_v, size)
        memory.move("out", len(rows), 1, 4)  # LSE


def simulate_kv_outer(p: Problem, memory: Memory, seen: torch.Tensor, tile_q: int, tile_kv: int) -> None:
    size = p.element_size
    memory.move("out", p.seq_q, p.head_dim_v, size)
    memory.move("out", p.seq_q, 2, 4)  # m and l
    for keys in tiles(p.seq_kv, tile_kv):
        met = [rows for rows in tiles(p.seq_q, tile_q) if any_visible(seen, rows, keys)]
        if met:
            memory.move("kv", len(keys), p.head_dim, size)
            memory.move("kv", len(keys), p.head_dim_v, size)
        for rows in met:
            memory.move("q", len(rows), p.head_dim, size)
            for _ in ("read", "written"):
                memory.move("state", len(rows), p.head_dim_v, size)
                memory.move("state", len(rows), 2, 4)
            memory.products += len(rows) * len(keys)


MASKS = [
    None,
    Causal(),
    Causal("top-left"),
    Window(5, 0),
    Window(0, 0),
    Window(3, 7),
    Window(None, 2, "top-left"),
    Window(2, None),
    Window(40, 3, "top-left"),
]
SHAPES = [(16, 16), (13, 29), (29, 13), (1, 21), (21, 1), (0, 9), (9, 0)]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("schedule", traffic.SCHEDULES)
def test_bytes_equal_a_loop_that_counts(schedule: str, mask: object) -> None:
    for (seq_q, seq_kv), (tile_q, tile_kv) in itertools.product(SHAPES, [(4, 8), (5, 3), (64, 64), (1, 1)]):
        p = problem(seq_q, seq_kv, heads_q=6, heads_kv=2, head_dim=8, head_dim_v=4, mask=mask, batch=2)
        counted, modelled = simulate(p, schedule, tile_q, tile_kv), estimate(p, schedule, tile_q, tile_kv)
        found = {name: getattr(modelled, name) for name in counted.bytes}
        assert found == counted.bytes, (seq_q, seq_kv, tile_q, tile_kv)
        assert modelled.total_bytes == sum(counted.bytes.values())
        assert modelled.executed_flops == 2 * counted.products * (8 + 4)
        visible = int(dense_visibility(p).sum())
        assert modelled.flops == 2 * 2 * 6 * visible * (8 + 4) == p.flops()


# ---- the well-known bill -------------------------------------------------------------------------------------------


def test_the_bill_of_standard_attention() -> None:
    bill = estimate(problem(), "standard")
    assert bill.scores_and_probs == 134_217_728 == 4 * 32 * 2**20
    assert bill.flops == 8_589_934_592
    assert bill.q + bill.kv + bill.out == bill.minimum_bytes == 4 * 2**20
    assert TEXTBOOK.bandwidth is not None
    assert bill.scores_and_probs / TEXTBOOK.bandwidth == pytest.approx(67e-6, abs=0.5e-6)
    assert bill.compute_seconds(TEXTBOOK, torch.float16) == pytest.approx(86e-6, abs=0.5e-6)


def test_tiling_saves_bytes_not_flops() -> None:
    tiles = traffic.paper_tiles(problem(), TEXTBOOK)
    bills = [estimate(problem(), schedule, *tiles) for schedule in traffic.SCHEDULES]
    assert len({bill.flops for bill in bills}) == 1
    assert all(bill.total_bytes < bills[0].total_bytes for bill in bills[1:])
    assert bills[2].total_bytes < bills[1].total_bytes, "FA2 does not write O back for every KV tile"


def test_backward_counts_five_products_where_scores_are_recomputed() -> None:
    p = problem(64, head_dim=16, head_dim_v=8, mask=Causal())
    pairs = 64 * 65 // 2
    assert estimate(p, "standard").backward_flops == 2 * pairs * (8 + 8 + 16 + 16)  # dV, dP, dQ, dK
    assert estimate(p, "q_outer", 16, 16).backward_flops == 2 * pairs * (16 + 8 + 8 + 16 + 16) == p.flops(backward=True)


# ---- FlashAttention's theorem 2: N² d² / M -------------------------------------------------------------------------


def elements(moved: Traffic) -> float:
    return moved.total_bytes / 2


def paper_bill(seq: int, head_dim: int, on_chip_elements: int) -> float:
    p = problem(seq, head_dim=head_dim)
    machine = replace(TEXTBOOK, on_chip_bytes=2 * on_chip_elements)
    return elements(estimate(p, "kv_outer", *traffic.paper_tiles(p, machine)))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_kv_outer_follows_theorem_2(head_dim: int) -> None:
    """The bill over N² d² / M stays between constants while N, d and M change (d <= M <= N d)."""
    ratios = [
        paper_bill(seq, head_dim, on_chip) / (seq**2 * head_dim**2 / on_chip)
        for seq in (2048, 8192, 32768)
        for on_chip in (8 * head_dim, 64 * head_dim, 512 * head_dim)
    ]
    # Line by line of the algorithm: N/B_c = 4 N d / M visits, each moving 3 N d of Q and O, and m, l four times fp32.
    assert all(12 <= ratio <= 12 * 1.5 for ratio in ratios)


def test_doubling_on_chip_memory_halves_the_bill() -> None:
    bills = [paper_bill(32768, 64, 2**power) for power in (12, 13, 14, 15)]
    assert all(small / large == pytest.approx(2, rel=0.05) for small, large in itertools.pairwise(bills))


# ---- forms other than dense ----------------------------------------------------------------------------------------


def test_decode_counts_the_lengths_not_the_capacity() -> None:
    p = problem(1, 1000, heads_q=8, heads_kv=2, head_dim=16, form="decode", batch=2)
    full = estimate(p, "split_kv")
    part = estimate(p, "split_kv", lengths=[(1, 100), (1, 300)])
    assert full.kv == 2 * 2 * 1000 * (16 + 16) * 2, "once for each KV head, not for each query head"
    assert part.kv == 2 * (100 + 300) * (16 + 16) * 2
    assert part.minimum_bytes < full.minimum_bytes
    assert part.flops == full.flops * 400 // 2000


def test_splits_write_and_read_partial_results() -> None:
    p = problem(1, 1000, heads_q=8, heads_kv=2, head_dim=16, form="decode")
    assert estimate(p, "split_kv").state == estimate(p, "split_kv", 0, 1000).state == 0
    assert estimate(p, "split_kv", 0, 256).state == 2 * 8 * 4 * (16 + 1) * 4


def test_decode_reads_only_what_a_window_shows() -> None:
    p = problem(2, 1000, heads_q=2, head_dim=16, form="decode", mask=Window(9, 0))
    assert estimate(p, "split_kv").kv == 2 * 11 * (16 + 16) * 2


def test_quantised_caches_are_read_at_their_own_size() -> None:
    p = problem(1, 64, heads_q=1, head_dim=16, form="decode", kv_dtype=torch.int8)
    assert estimate(p, "split_kv").kv == 64 * 32


def test_varlen_is_the_sum_of_its_sequences() -> None:
    mask = Causal()
    whole = problem(50, 60, heads_q=2, head_dim=8, mask=mask, form="varlen", batch=3, total_q=57, total_kv=100)
    lengths = [(50, 60), (7, 0), (0, 40)]
    for schedule in traffic.SCHEDULES:
        together = estimate(whole, schedule, 16, 8, lengths=lengths)
        alone = [estimate(problem(q, kv, heads_q=2, head_dim=8, mask=mask), schedule, 16, 8) for q, kv in lengths]
        assert together.total_bytes == sum(one.total_bytes for one in alone)
        assert together.flops == sum(one.flops for one in alone)


def test_varlen_without_lengths_is_dealt_out_evenly() -> None:
    p = problem(30, 30, form="varlen", batch=3, total_q=50, total_kv=31)
    assert list(traffic.default_lengths(p)) == [(17, 11), (17, 10), (16, 10)]


def test_boolean_masks_are_read_for_every_pair_that_is_computed() -> None:
    p = problem(64, mask=torch.ones(64, 64, dtype=torch.bool))
    assert estimate(p, "standard").operands == estimate(p, "q_outer", 16, 16).operands == 64 * 64


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("fastest", 16, 16), "schedule"),
        (("q_outer", 0, 16), "tile_q"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, int, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        estimate(problem(), *arguments)
    with pytest.raises(ValueError, match="lengths"):
        estimate(problem(), "standard", lengths=[])


def test_plans_are_compared_by_a_finite_time() -> None:
    small, large = (traffic.modelled_seconds(problem(), "q_outer", tile, 128, TEXTBOOK) for tile in (16, 128))
    assert 0 < large < small < math.inf


def test_a_last_wave_that_is_shared_leaves_nobody_idle() -> None:
    p, machine = problem(4 * 64, 64, heads_q=1, heads_kv=1), replace(TEXTBOOK, units=3)  # 4 tiles, 3 units: two waves
    alone, shared = (traffic.modelled_seconds(p, name, 64, 64, machine) for name in ("q_outer", "stream_k"))
    assert alone == pytest.approx(shared * 6 / 4)


# ---- machines ------------------------------------------------------------------------------------------------------


def test_paper_tiles_need_the_on_chip_memory() -> None:
    with pytest.raises(ValueError, match="on_chip_bytes"):
        traffic.paper_tiles(problem(), replace(TEXTBOOK, on_chip_bytes=None))
