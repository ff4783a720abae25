"""Every number of docs/maths.md: each test states the text it checks, so that neither can change alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnworks import Plan, Sink, Softcap, hardware, merge
from attnworks.backends.reference import backward, online
from attnworks.problem import Operands
from attnworks.traffic import estimate
from helpers import problem_of
from reference_helpers import EAGER, grad, run, with_grad

f64 = torch.float64
DOC = " ".join((Path(__file__).parents[2] / "docs" / "maths.md").read_text(encoding="utf-8").split())


def stated(*texts: str) -> None:
    for text in texts:
        assert text in DOC, f"docs/maths.md no longer says: {text}"


def dense(length: int = 4096, dim: int = 128) -> torch.Tensor:
    """fp16, without memory behind it."""
    return torch.zeros(1, dtype=torch.float16).expand(1, 1, length, dim)


def test_standard_attention_bill() -> None:
    stated("one such matrix is 32 MiB", "four passes are 134,217,728 bytes, beside 4,194,304 bytes")
    bill = estimate(problem_of(dense(), dense(), dense(), backend="reference"), "standard")
    assert bill.scores_and_probs == 4 * 32 * 2**20 == 134_217_728
    assert bill.q + bill.kv + bill.out == 4_194_304


def test_where_exp_ends() -> None:
    stated("above $x = 88.72$", "104 below the sentinel", "from 87.3 on")
    assert math.log(torch.finfo(torch.float32).max) == pytest.approx(88.72, abs=0.005)
    assert math.log(torch.finfo(torch.float32).smallest_normal) == pytest.approx(-87.3, abs=0.05)
    exp = torch.exp(torch.tensor([-103.0, -104.0]))
    assert exp[0] > 0 and exp[1] == 0


def test_online_softmax_example(monkeypatch: pytest.MonkeyPatch) -> None:
    stated("After the first tile $m = \\ln 2$, $\\ell = 3/2$, acc = (3, 3).")
    stated("$\\alpha = 1/2$, $\\ell = 9/4$, acc = (12, 12). $O$ = (16/3, 16/3) and $L = \\ln 9$.", "alone gives (6, 6)")
    q = torch.tensor([[[[math.log(2)]]]], dtype=f64)
    k = torch.tensor([0, 1, 1, 2], dtype=f64).view(1, 1, 4, 1)
    v = torch.tensor([[6, 0], [0, 3], [3, -3], [9, 12]], dtype=f64).view(1, 1, 4, 2)
    problem = problem_of(q, k, v, scale=1.0)
    state = online.initial_state(problem, Operands(q, k, v), q, 1, -math.inf, f64)
    scores = q @ k.transpose(-1, -2)
    for tile, sums in (((0, 1), (1.5, 3.0)), ((2, 3), (2.25, 12.0))):
        state = online.step(state, scores[..., tile], v[:, :, tile])
        assert state.running_max.item() == pytest.approx(math.log(2) * (1 if tile[0] == 0 else 2))
        assert state.running_sum.item() == pytest.approx(sums[0])
        assert state.acc.flatten().tolist() == pytest.approx([sums[1], sums[1]])
    plan = Plan("reference", "q_outer", 1, 2)
    out, lse = run(q, k, v, scale=1.0, plan=plan)
    assert out.flatten().tolist() == pytest.approx([16 / 3, 16 / 3]) and lse.item() == pytest.approx(math.log(9))
    monkeypatch.setattr(online, "rescale_acc", lambda acc, alpha: acc)
    # (3 + 10.5) / (9/4)
    assert run(q, k, v, scale=1.0, plan=plan)[0].flatten().tolist() == pytest.approx([6.0, 6.0])


def test_sentinel_example() -> None:
    stated("One key with a score of $-10^5$ has $O = V$ and $L = -10^5$.", "−65,504, fp16's lowest number")
    assert torch.finfo(torch.float16).min == -65504
    assert math.exp(-100000 + 65504) == 0
    q, k, v = (torch.tensor(x, dtype=f64).view(1, 1, 1, 1) for x in (1e5, -1.0, 7.0))
    problem = problem_of(q, k, v, scale=1.0)
    for initial_max, expected in ((-math.inf, (7.0, -1e5)), (-65504.0, (0.0, -math.inf))):
        out, lse = online.q_outer(problem, Operands(q, k, v), q, k, v, tile_q=1, tile_kv=1, initial_max=initial_max)
        assert (out.item(), lse.item()) == expected


def test_sink() -> None:
    stated("start from $m = z$, $\\ell = 1$, acc = 0", "A row without visible keys then has $O = 0$ and $L = z$.")
    q, k, v = (torch.randn(1, 2, rows, 3, dtype=f64) for rows in (2, 4, 4))
    z = torch.tensor([100.0, -3.0], dtype=f64)
    for plan in (EAGER, Plan("reference", "q_outer", 1, 3)):
        out, lse = run(q, k[:, :, :0], v[:, :, :0], scores=(Sink(z),), plan=plan)
        assert not out.any() and torch.equal(lse, z.view(1, 2, 1).expand(1, 2, 2))
        _, lse = run(q, k, v, scores=(Sink(z),), plan=plan)
        assert lse[0, 0].tolist() == pytest.approx([100.0, 100.0])


def test_merging_example() -> None:
    stated("(2, 2) with $\\ln 3$ and (7, 7) with $\\ln 6$", "The plain mean, 4.5,")
    halves = [torch.full((1, 1, 1, 2), value, dtype=f64) for value in (2.0, 7.0)]
    weights = [torch.full((1, 1, 1), math.log(total), dtype=f64) for total in (3.0, 6.0)]
    out, lse = merge(halves[0], weights[0], halves[1], weights[1])
    assert out.flatten().tolist() == pytest.approx([16 / 3, 16 / 3]) and lse.item() == pytest.approx(math.log(9))
    q = torch.tensor([[[[math.log(2)]]]], dtype=f64)
    k = torch.tensor([0, 1, 1, 2], dtype=f64).view(1, 1, 4, 1)
    v = torch.tensor([[6, 0], [0, 3], [3, -3], [9, 12]], dtype=f64).view(1, 1, 4, 2)
    for half, (part, total) in enumerate(zip(halves, weights, strict=True)):
        keys = slice(2 * half, 2 * half + 2)
        out, lse = run(q, k[:, :, keys], v[:, :, keys], scale=1.0)
        assert out.flatten().tolist() == pytest.approx(part.flatten().tolist())
        assert lse.item() == pytest.approx(total.item())


# ---- the bytes ----


@pytest.mark.parametrize(("tile_q", "tile_kv"), [(16, 16), (32, 8), (8, 64)])
def test_bytes_of_both_loop_orders(tile_q: int, tile_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas, the traffic model and what the loops themselves load agree (model: fp32 for m, l and the LSE)."""
    stated("$$2Nd + \\frac{2N^2 d}{B_r}$$", "$$3Nd + 2N + \\frac{N}{B_c} (3Nd + 4N)$$")
    n, d = 64, 8
    q, k, v = (torch.randn(1, 1, n, d) for _ in range(3))
    loaded = {"q": 0, "kv": 0}

    def counted(key: str, inner: object) -> object:
        def load(*args: object) -> object:
            tile = inner(*args)  # type: ignore[operator]
            loaded[key] += tile.numel()
            return tile

        return load

    monkeypatch.setattr(online, "load", counted("q", online.load))
    monkeypatch.setattr(online, "load_shared", counted("kv", online.load_shared))
    problem = problem_of(q, k, v, backend="reference")
    run(q, k, v, plan=Plan("reference", "q_outer", tile_q, tile_kv))
    assert loaded["q"] + loaded["kv"] + n * d == 2 * n * d + 2 * n * n * d // tile_q
    assert estimate(problem, "q_outer", tile_q, tile_kv).total_bytes == 4 * (2 * n * d + 2 * n * n * d // tile_q + n)
    loaded.update(q=0, kv=0)
    run(q, k, v, plan=Plan("reference", "kv_outer", tile_q, tile_kv))
    visits = n // tile_kv
    assert loaded == {"q": visits * n * d, "kv": 2 * n * d}
    total = 3 * n * d + 2 * n + visits * (3 * n * d + 4 * n)
    assert estimate(problem, "kv_outer", tile_q, tile_kv).total_bytes == 4 * total


def test_the_law_and_its_constants() -> None:
    stated(
        "| Q outer | $8\\, N^2 d^2 / M$ | $4\\, N^2 d^2 / M$ |",
        "| KV outer | $12\\, N^2 d^2 / M$ | $6\\, N^2 d^2 / M$ |",
    )
    stated("Standard attention's $4N^2$ is $M / 2d^2$ times the 8 of the table")
    n, d = 2**16, 64
    problem = problem_of(dense(n, d), dense(n, d), dense(n, d), backend="reference")
    for memory in (2**15, 2**16, 2**17):
        law = n * n * d * d / memory
        quarter, half = memory // (4 * d), memory // (2 * d)
        # 2 bytes a number; the terms of order N·d, and m and l beside O, are the slack.
        for schedule, tiles, constant in (
            ("q_outer", (quarter, quarter), 8),
            ("kv_outer", (quarter, quarter), 12),
            ("q_outer", (half, 1), 4),
            ("kv_outer", (1, half), 6),
        ):
            assert estimate(problem, schedule, *tiles).total_bytes / 2 / law == pytest.approx(constant, rel=0.06)
        standard = estimate(problem, "standard").scores_and_probs / 2
        assert standard / (8 * law) == memory / (2 * d * d)


def test_the_numbers_for_4096() -> None:
    problem = problem_of(dense(), dense(), dense(), backend="reference")
    standard = estimate(problem, "standard").total_bytes
    for name, schedule, tiles, share in (
        ("standard", "standard", (0, 0), "1"),
        ("KV outer", "kv_outer", (128, 128), "0.77"),
        ("Q outer", "q_outer", (128, 128), "0.50"),
        ("Q outer, 256 by 64", "q_outer", (256, 64), "0.26"),
    ):
        total = estimate(problem, schedule, *tiles).total_bytes
        stated(f"| {name} | {total:,} | {share} |")
        assert float(share) == pytest.approx(total / standard, abs=0.005)


def test_flops_for_each_byte() -> None:
    stated(
        "Each byte of $K$ and $V$ that is read serves `tile_q` FLOPs in fp16", "does 50 FLOPs in the time of one byte"
    )
    bill = estimate(problem_of(dense(), dense(), dense(), backend="reference"), "q_outer", 128, 64)
    assert bill.flops / bill.kv == 128
    machine = hardware.load("textbook")
    assert machine.bandwidth == 2e12 and machine.matrix_flops["float16"] / machine.bandwidth == 50


# ---- backward ----


def test_delta_example() -> None:
    stated("$S = (0, \\ln 3)$, $P = (1/4, 3/4)$, $V = (0, 8)$, so $O = 6$", "$dP = (0, 8)$, $D = 6$", "= (-1.5,\\ 1.5)")
    stated("Without delta the answer would be (0, 6)")
    (s,) = with_grad(torch.tensor([[0.0, math.log(3)]], dtype=f64))
    v = torch.tensor([[0.0], [8.0]], dtype=f64)
    probs = torch.softmax(s, 1)
    out = probs @ v
    out.sum().backward()
    p, d_out = probs.detach(), torch.ones(1, 1, dtype=f64)
    d_p, row_delta = d_out @ v.T, backward.delta(d_out, out.detach())
    assert p[0].tolist() == pytest.approx([0.25, 0.75]) and out.item() == pytest.approx(6)
    assert d_p[0].tolist() == [0.0, 8.0] and row_delta.item() == pytest.approx(6)
    none = torch.zeros_like(row_delta)
    d_s = backward.dscores(p, d_p, row_delta, none)[0]
    assert d_s.tolist() == pytest.approx([-1.5, 1.5]) and grad(s)[0].tolist() == pytest.approx([-1.5, 1.5])
    without = backward.dscores(p, d_p, none, none)[0]
    assert without.tolist() == pytest.approx([0.0, 6.0])
    # It is the gradient with the denominator held constant: sum of exp(s) v / 4.
    (s2,) = with_grad(s.detach())
    ((torch.exp(s2) @ v) / 4).sum().backward()
    assert grad(s2)[0].tolist() == pytest.approx(without.tolist())
    # Raising both scores changes nothing; only with delta does the gradient say so.
    assert torch.softmax(s.detach() + 1, 1).tolist()[0] == pytest.approx([0.25, 0.75])
    assert d_s.sum().item() == pytest.approx(0) and without.sum().item() == pytest.approx(row_delta.item())


def test_padded_keys_and_softcap() -> None:
    stated(
        "with $L = -300$ the $e^{300}$ of a key that is not there is infinite in fp32", "at $S = c$ the factor is 0.42"
    )
    assert torch.exp(torch.tensor(300.0)) == math.inf
    q, one = (torch.tensor(x, dtype=f64).view(1, 1, 1, 1) for x in (50.0, 1.0))
    for plan in (EAGER, Plan("reference", "q_outer", 1, 1)):
        for score, factor in ((50.0, 0.42), (5000.0, 0.0)):
            (leaf,) = with_grad(torch.full_like(q, score))
            run(leaf, one, one, scale=1.0, scores=(Softcap(50.0),), plan=plan)[1].sum().backward()
            assert grad(leaf).item() == pytest.approx(factor, abs=5e-4)


def test_products_of_forward_and_backward() -> None:
    """Counted by torch while the code runs: 2 forward, 4 backward with P stored, 5 with P recomputed."""
    n, d = 32, 8
    product = 2 * n * n * d
    counts = {}
    for plan in (EAGER, Plan("reference", "q_outer", 8, 16)):
        leaves = with_grad(*(torch.randn(1, 1, n, d) for _ in range(3)))
        with FlopCounterMode(display=False) as forward:
            out, _ = run(*leaves, plan=plan)
        with FlopCounterMode(display=False) as back:
            out.sum().backward()
        counts[plan.schedule] = forward.get_total_flops() / product, back.get_total_flops() / product
    assert counts == {"eager": (2, 4), "q_outer": (2, 5)}
    assert sum(counts["q_outer"]) / sum(counts["eager"]) == 7 / 6
    stated("makes the backward 5/4 as many FLOPs, forward and backward together 7/6")
    big = problem_of(dense(), dense(), dense(), backend="reference")
    stated(
        f"$4N^2d$ | {big.flops():,} |", f"$10N^2d$ | {big.flops(backward=True):,} |", f"$8N^2d$ | {2 * big.flops():,} |"
    )
