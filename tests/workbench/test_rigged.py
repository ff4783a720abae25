"""Benchmarks rigged in the ways that are known: each is found out, or cannot be done here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnworks import Causal, attention
from attnworks.masks import Bounds
from attnworks.problem import Problem
from attnworks.workbench import ceilings, entrants, meters, statistics
from attnworks.workbench.bench import Protocol, Result, measure
from attnworks.workbench.entrants import UNSEEN
from attnworks.workbench.providers import Bound, Inputs, Provider, describe
from attnworks.workbench.quick_check import NotVerifiedError

SHORT = Protocol(runs=8, fewest_runs=8, warm_ups=1, budget_seconds=0.1, seed=1, input_bytes=1 << 20)
PROBLEM = describe(
    form="dense", batch=1, heads_q=2, heads_kv=2, seq_q=40, seq_kv=40, head_dim=16, head_dim_v=16, dtype=torch.float32
)


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ceilings either: they take longer than the kernels here."""
    monkeypatch.setattr(ceilings, "_LARGEST_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "peak_flops", lambda dtype, threads: None)


def right(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    out = attention(q, k, v, mask=mask, backend="reference")
    assert isinstance(out, Tensor)
    return out


class Kernel(Provider):
    """``function`` of q, k and v."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor, Tensor], Any] = right) -> None:
        self.name, self.function = name, function

    def form(self, problem: Problem) -> str:
        return f"{self.name}(q, k, v)"

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        return Bound(lambda: self.function(*inputs), lambda out: out)


def bench(*kernels: Kernel, protocol: Protocol = SHORT) -> Result:
    return measure(PROBLEM, kernels, protocol)


# ---- no synchronisation ----------------------------------------------------------------------------------------------


def later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns at once; a thread writes the result when the clock has stopped."""
    out = torch.full_like(q, torch.nan)
    inputs = q.clone(), k.clone(), v.clone()

    def work() -> None:
        time.sleep(0.02)
        out.copy_(right(*inputs))

    threading.Thread(target=work, daemon=True).start()
    return out


def test_a_kernel_that_returns_before_it_is_done_is_not_timed() -> None:
    result = bench(Kernel("honest"), Kernel("later", later))
    assert "later" in result.failed
    assert [record.provider for record in result.records] == ["honest"]


class OnlyAtFirst:
    """Waits for its thread in the first calls, which are checked, and not any more when it is timed."""

    def __init__(self, honest_calls: int) -> None:
        self.calls, self.honest_calls = 0, honest_calls

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return right(q, k, v) if self.calls <= self.honest_calls else later(q, k, v)


def test_nor_one_that_does_so_only_while_it_is_timed() -> None:
    with pytest.raises(NotVerifiedError, match="after the timing"):
        bench(Kernel("later", OnlyAtFirst(2)))


# ---- warm caches, and results kept -----------------------------------------------------------------------------------


def test_caches_are_cold_for_everybody_or_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(ceilings.Caches, "check", lambda self: 2.0)
    monkeypatch.setattr(ceilings.Caches, "flush", lambda self: events.append("flush"))

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        events.append("run")
        return right(q, k, v)

    bench(Kernel("a", spy), Kernel("b", spy))
    timed = events[events.index("flush") :]
    assert timed == ["flush", "run"] * (2 * (8 + UNSEEN)), "a flush before every run"
    notes = bench(Kernel("a"), protocol=replace(SHORT, flush=False)).records[0].notes
    assert "caches were not flushed between runs" in notes


@pytest.mark.parametrize("key", [lambda q: id(q), lambda q: q.data_ptr(), lambda q: float(q[0, 0, 0, 0])])
def test_a_kernel_that_keeps_its_results_is_found(key: Callable[[Tensor], Any]) -> None:
    kept: dict[Any, Tensor] = {}

    def remember(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if key(q) not in kept:
            time.sleep(0.005)  # a kernel's work
            kept[key(q)] = right(q, k, v)
        return kept[key(q)]

    with pytest.raises(NotVerifiedError, match="after the timing"):
        bench(Kernel("remembers", remember), protocol=replace(SHORT, runs=20, fewest_runs=20, input_sets=2))


def test_nobody_is_accused_where_others_begin_to_use_the_machine_after_the_timing(monkeypatch) -> None:
    rounds, busy = meters.CpuMeter.rounds, []

    def until_busy(*arguments: Any) -> Any:
        timed = rounds(*arguments)
        busy.append(True)
        return timed

    def slowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if busy:
            time.sleep(0.1)
        return right(q, k, v)

    monkeypatch.setattr(meters.CpuMeter, "rounds", until_busy)
    [record] = bench(Kernel("slowed", slowed)).records
    assert busy and record.median < 0.01
    monkeypatch.setattr(entrants, "_look_again", lambda one, *_: pytest.fail(f"{one.provider.name} looked suspicious"))
    busy.clear()
    with pytest.raises(pytest.fail.Exception, match="looked suspicious"):
        bench(Kernel("slowed", slowed))


# ---- zeros -----------------------------------------------------------------------------------------------------------


def test_nobody_is_timed_on_zeros_or_on_one_set_of_inputs() -> None:
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, k, v))
        return right(q, k, v)

    bench(Kernel("spy", spy))
    assert all(0.8 < float(x.std()) < 1.2 and abs(float(x.mean())) < 0.2 for x in seen)
    assert len({id(x) for x in seen}) > 3


def test_nobody_can_make_them_zeros() -> None:
    def zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v)
        v.zero_()
        return out

    with pytest.raises(NotVerifiedError, match="wrote to q, k or v"):
        bench(Kernel("zero", zero), Kernel("after it"))


def test_nor_while_they_are_timed() -> None:
    calls = []

    def grow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            v.mul_(1.001)
        return right(q, k, v)  # of what the inputs are now

    with pytest.raises(NotVerifiedError, match="somebody wrote to them"):
        bench(Kernel("grow", grow))


# ---- a mean with one spike -------------------------------------------------------------------------------------------


def test_one_spike_moves_neither_median_nor_verdict() -> None:
    turns = {"a": 0, "b": 0}

    def spiky(name: str, at: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turns[name] += 1
            time.sleep(0.2 if turns[name] == at else 0.004)
            return right(q, k, v)

        return run

    result = bench(
        Kernel("a", spiky("a", 0)), Kernel("b", spiky("b", 6)), protocol=replace(SHORT, runs=11, fewest_runs=11)
    )
    a, b = result.records
    assert max(b.seconds) > 0.2, "the spike was timed"
    assert b.median < 0.02
    assert statistics.ratio(a.seconds, b.seconds, paired=True).value < 2


# ---- different inputs per side ---------------------------------------------------------------------------------------


def test_a_kernel_that_does_less_is_not_timed() -> None:
    def fewer_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k[:, :, :20], v[:, :, :20])

    assert "fewer" in bench(Kernel("honest"), Kernel("fewer", fewer_keys)).failed


def test_both_sides_of_a_round_get_the_same_inputs() -> None:
    seen: list[tuple[str, int]] = []

    def spy(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append((name, q.data_ptr()))
            return right(q, k, v)

        return run

    bench(Kernel("a", spy("a")), Kernel("b", spy("b")))
    timed = seen[-2 * (8 + 3) : -2 * 3]
    for first, second in zip(timed[::2], timed[1::2], strict=True):
        assert first[0] != second[0] and first[1] == second[1]


def test_one_that_solves_another_problem_is_marked() -> None:
    class CausalInstead(Kernel):
        def answers(self, problem: Problem) -> Problem:
            return replace(problem, mask=(Bounds(None, 0, "top-left"),))

    causal = CausalInstead("causal", lambda q, k, v: right(q, k, v, mask=Causal("top-left")))
    honest, other = bench(Kernel("honest"), causal).records
    marked = "it solves another problem: see its form"
    assert marked in other.notes and marked not in honest.notes
