"""The benchmark protocol, on problems so small that nothing is slow; nothing is asserted of times."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnworks import Causal, Plan, Window, attention
from attnworks.problem import Problem
from attnworks.workbench import bench, ceilings, entrants, quick_check
from attnworks.workbench.bench import Protocol, measure
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.meters import Timed
from attnworks.workbench.providers import (
    Attnworks,
    Bound,
    Inputs,
    Provider,
    by_name,
    describe,
    label,
    random_inputs,
    user_mask,
)
from attnworks.workbench.quick_check import NotVerifiedError, check

SHORT = Protocol(runs=6, fewest_runs=6, warm_ups=1, budget_seconds=0.1, seed=1, input_bytes=1 << 20)


def problem(mask: Any = None, **sizes: Any) -> Problem:
    usual = {
        "form": "dense",
        "batch": 1,
        "heads_q": 2,
        "heads_kv": 2,
        "seq_q": 40,
        "seq_kv": 40,
        "head_dim": 16,
        "head_dim_v": 16,
        "dtype": torch.float32,
    }
    return describe(**usual | sizes, mask=mask)


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush of 1 MiB: what is tested is that it happens, not that it works on this machine."""
    monkeypatch.setattr(ceilings, "_LARGEST_FLUSH_BYTES", 1 << 20)


class Spy(Provider):
    """Right results; remembers the inputs of every call."""

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name, self.calls = name, calls

    def form(self, problem: Problem) -> str:
        return self.name

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        def run() -> Tensor:
            self.calls.append((self.name, id(inputs.q)))
            out = attention(*inputs, mask=user_mask(problem), backend="reference")
            assert isinstance(out, Tensor)
            return out

        return Bound(run, lambda out: out)


class Wrong(Spy):
    """``answer`` of the right result is what it gives."""

    def __init__(self, name: str, answer: Any) -> None:
        super().__init__(name, [])
        self.answer = answer

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        run, out = super().bind(problem, inputs)
        return Bound(lambda: self.answer(run()), out)


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_a_record_tells_everything_about_a_run() -> None:
    result = measure(problem(Causal()), [Attnworks(), by_name("sdpa"), by_name("standard")], SHORT)
    assert [record.provider for record in result.records] == ["attnworks", "sdpa", "standard"]
    for record in result.records:
        assert len(record.seconds) == 6
        assert all(seconds > 0 for seconds in record.seconds)
        assert 0 < record.check["worst_share_of_bound"] <= 1
        assert record.flops == 2 * 2 * (40 * 41 // 2) * (16 + 16)
        assert record.conditions["threads"] == torch.get_num_threads()
        assert "flush_is_real" in record.conditions
        assert record.form
        assert record.machine["name"]
    assert len({record.session for record in result.records}) == 1
    standard = result.record("standard")
    assert standard is not None
    assert standard.modelled_bytes == 4 * 2 * 40 * 40 * 4 + 4 * 2 * 40 * 16 * 4
    assert "attnworks/sdpa" in json.loads(json.dumps(result.to_json()))["ratios"]


def test_rounds_share_inputs_and_draw_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    flushes: list[int] = []
    monkeypatch.setattr(ceilings.Caches, "check", lambda self: 2.0)
    monkeypatch.setattr(ceilings.Caches, "flush", lambda self: flushes.append(1))
    names = ("a", "b", "c")
    measure(problem(), [Spy(name, calls) for name in names], replace(SHORT, runs=20, fewest_runs=20))
    seen = calls[: -3 * entrants.UNSEEN]
    timed = seen[-3 * 20 :]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(sorted(name for name, _ in one) == list(names) for one in rounds)
    assert all(len({inputs for _, inputs in one}) == 1 for one in rounds)
    assert len({tuple(name for name, _ in one) for one in rounds}) > 1, "always the same order"
    assert len({inputs for _, inputs in timed}) > 1, "always the same inputs"
    assert len(flushes) == 3 * (20 + entrants.UNSEEN), "a flush before every run"


def test_inputs_are_random_and_new() -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = random_inputs(problem(), rng), random_inputs(problem(), rng)
    for one, other in zip(first, second, strict=True):
        assert one.std() > 0.9
        assert not torch.equal(one, other)


def test_inputs_do_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(seq_q=3000, seq_kv=3000)
    many = random_inputs(asked, torch.Generator().manual_seed(3))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    alone = random_inputs(asked, torch.Generator().manual_seed(3))
    assert all(torch.equal(one, other) for one, other in zip(many, alone, strict=True))
    pieces = many.q.flatten().split(2**15)
    assert len(pieces) > 2 and not torch.equal(pieces[0], pieces[1])


def test_a_wrong_kernel_is_not_timed() -> None:
    result = measure(problem(), [Spy("right", []), Wrong("zeros", torch.zeros_like)], SHORT)
    assert [record.provider for record in result.records] == ["right"]
    assert "zeros" in result.failed
    assert "must be at most 1" in result.failed["zeros"]


def test_a_kernel_that_repeats_its_first_answer_is_found() -> None:
    first: list[Tensor] = []

    def remember(out: Tensor) -> Tensor:
        first.append(out)
        return first[0]

    with pytest.raises(NotVerifiedError, match="after the timing"):
        measure(problem(), [Wrong("cheat", remember)], SHORT)


def test_fewer_runs_and_missing_flush_are_said() -> None:
    result = measure(problem(), [Spy("a", [])], replace(SHORT, runs=50, budget_seconds=0.0, flush=False))
    notes = "; ".join(result.records[0].notes)
    assert "6 runs instead of 50" in notes
    assert "not flushed" in notes


def test_a_flush_that_does_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings.Caches, "check", lambda self: 1.02)
    record = measure(problem(), [Spy("a", [])], SHORT).records[0]
    assert record.conditions["flush_is_real"] is False
    assert any("was not seen to work" in note for note in record.notes)


def test_competitors_that_do_not_fit_say_why() -> None:
    result = measure(problem(), [by_name("sdpa-grouped"), by_name("sdpa-causal")], SHORT)
    assert not result.records
    assert set(result.refused) == {"sdpa-grouped", "sdpa-causal"}


def test_the_thread_count_is_given_back() -> None:
    before = torch.get_num_threads()
    record = measure(problem(), [Spy("a", [])], replace(SHORT, threads=1)).records[0]
    assert record.conditions["threads"] == 1
    assert torch.get_num_threads() == before


class Noisy:
    """A meter of a kernel and one ``ratio`` times as slow, with so much noise; nothing runs."""

    def __init__(self, noise: float, ratio: float = 1.0) -> None:
        self.rng, self.noise, self.ratio = random.Random(0), noise, ratio
        self.calls: list[int] = []

    def rounds(self, entries: Any, rounds: int, *_: Any) -> Timed:
        self.calls.append(rounds)
        times = {name: [ratio * math.exp(self.rng.gauss(0, self.noise)) for _ in range(rounds)]
                 for name, ratio in (("a", 1.0), ("b", self.ratio))}  # fmt: skip
        return Timed(times, {}, {}, {}, {"samples": len(self.calls)}, "made up")


def timed_by(meter: Noisy, **protocol: Any) -> Timed:
    usual = {"runs": 50, "most_runs": 400, "budget_seconds": 1e9}
    return bench._timed([], meter, Protocol(**usual | protocol), 50, 0, lambda *_: None)  # type: ignore[arg-type]


def test_close_races_get_more_runs_until_they_are_precise() -> None:
    assert timed_by(Noisy(0.02)).rounds == 50
    long = timed_by(noisy := Noisy(0.06))
    assert noisy.calls == [50, 50, 100] and long.rounds == 200
    assert long.state == {"samples": 3}, "the newest"
    assert timed_by(Noisy(0.5)).rounds == 400, "no more than most_runs"
    assert timed_by(Noisy(0.5), most_runs=None).rounds == 50
    assert timed_by(Noisy(0.5), budget_seconds=0).rounds == 50
    assert timed_by(Noisy(0.06, ratio=2)).rounds == 50, "far from 1"


@pytest.mark.parametrize("wrong", [{"most_runs": 3}, {"fewest_runs": 0}, {"runs": 3, "fewest_runs": 5}, {"threads": 0}])
def test_a_protocol_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Protocol(**wrong)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        measure(problem(), [Spy("a", []), Spy("b", []), Spy("a", [])], SHORT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_not_measured() -> None:
    with pytest.raises(ValueError, match="no GPU here"):
        measure(replace(problem(), device="cuda:0"), [Attnworks()], SHORT)


# ---- competitors -----------------------------------------------------------------------------------------------------

PROBLEMS = {
    "full": problem(),
    "causal": problem(Causal()),
    "causal, more keys": problem(Causal(), seq_kv=64),
    "window": problem(Window(7, 0)),
    "grouped": problem(heads_q=6),
    "grouped causal": problem(Causal(), heads_q=6),
    "unequal dims": problem(head_dim_v=8),
    "bf16": problem(Causal(), dtype=torch.bfloat16),
    "fp16": problem(dtype=torch.float16),
    "batch": problem(batch=3),
    "decode": problem(form="decode", seq_q=1, seq_kv=300, heads_q=6),
    "decode, 3 queries": problem(form="decode", seq_q=3, seq_kv=300, heads_q=6),
    "decode causal": problem(Causal(), form="decode", seq_q=3, seq_kv=300),
    "rows, heads swapped": replace(problem(Causal()), layout="bshd"),
}
PEER_MODULES = {"openvino": ("openvino",), "onnxruntime": ("onnxruntime", "onnx")}
COMPETITORS = ["attnworks", "attnworks-head-major", "sdpa", "sdpa-grouped", "sdpa-causal", "standard", *PEER_MODULES]


@pytest.mark.parametrize("described", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("name", COMPETITORS)
def test_every_competitor_gives_what_it_says_it_does(name: str, described: Problem) -> None:
    if missing := [module for module in PEER_MODULES.get(name, ()) if not importlib.util.find_spec(module)]:
        pytest.skip(f"{missing} not installed")
    provider = by_name(name)
    if refusal := provider.refuses(described):
        assert len(refusal) > 10, "a reason"
        return
    if name == "attnworks":
        layout = {k: getattr(described, k) for k in ("q_strides", "k_strides", "v_strides")} | {
            "layout": described.layout
        }
        described = replace(described, **layout)
    inputs = random_inputs(described, torch.Generator().manual_seed(3))
    bound = provider.bind(described, inputs)
    out = bound.out(bound.run())
    found = check(provider.answers(described), *inputs, out)
    assert found.passed, found
    assert provider.form(described)
    assert label(name) != ""


def test_kernels_of_gpus_say_so_on_a_cpu() -> None:
    for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash-attn-3", "flash-attn-4"):
        provider = by_name(name)
        assert "GPU" in provider.refuses(problem()) and provider.name == name
        assert provider.form(problem()) and label(name) != name


def test_nobody_is_unknown_quietly() -> None:
    with pytest.raises(ValueError, match="fastest"):
        by_name("fastest")


# ---- the check before the timing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (problem(Causal()), problem()),
        (problem(Causal(), seq_kv=64), problem(Causal("top-left"), seq_kv=64)),
        (problem(Window(7, 0)), problem(Window(8, 0))),
        (problem(), replace(problem(), scale=1.0)),
        (problem(heads_q=6), replace(problem(heads_q=6), scale=0.26)),
    ],
    ids=["no mask", "other corner", "window off by one", "no scale", "a little scale"],
)
def test_the_check_tells_other_problems_apart(asked: Problem, given: Problem) -> None:
    inputs = random_inputs(asked, torch.Generator().manual_seed(0))
    run, out = Attnworks(explicit=Plan("reference", "eager")).bind(given, inputs)
    found = check(asked, *inputs, out(run()))
    assert not found.passed
    assert found.rows > 0


def test_the_check_finds_nan_low_precision_and_wrong_shapes() -> None:
    p = problem()
    inputs = random_inputs(p, torch.Generator().manual_seed(0))
    out = attention(*inputs)
    assert isinstance(out, Tensor)
    assert check(p, *inputs, out).passed
    spoilt = out.clone()
    spoilt[0, 1, 39, 15] = torch.nan
    assert check(p, *inputs, spoilt).where == (0, 1, 39, 15)
    assert not check(p, *inputs, out.half().float()).passed
    with pytest.raises(NotVerifiedError, match="shape"):
        check(p, *inputs, out[:, :1])


def test_rows_without_keys_must_be_zero() -> None:
    p = problem(Causal(), seq_q=40, seq_kv=20)
    inputs = random_inputs(p, torch.Generator().manual_seed(0))
    out = attention(*inputs, mask=Causal())
    assert isinstance(out, Tensor)
    assert check(p, *inputs, out).passed
    assert not check(p, *inputs, out + 1e-6).passed


def test_samples_hold_both_ends() -> None:
    import random

    for size in (0, 1, 2, 47, 48, 49, 1000):
        picked = quick_check.sample(size, 48, random.Random(0))
        assert len(picked) == min(size, 48)
        assert picked == sorted(set(picked))
        if size:
            assert {0, size - 1} <= set(picked)


# ---- memory and ceilings ---------------------------------------------------------------------------------------------


def test_peak_extra_sees_what_a_call_took_and_gave_back() -> None:
    size = 64 << 20

    def take() -> float:
        return float(torch.ones(size // 4).sum())

    _, extra = peak_extra(take)
    if extra is None:
        pytest.skip("no /proc here")
    assert 0.95 * size <= extra < 1.5 * size  # the kernel counts pages in batches
    assert (peak_extra(lambda: None)[1] or 0) < size // 8


def test_ceilings_are_measured_where_the_extension_is() -> None:
    found = ceilings.measure(1, repeats=2)
    if ceilings.native_missing():
        assert found is None
        assert ceilings.peak_flops("float32", 1) is None
        return
    assert found is not None
    assert found.read_bytes_per_second > 1e8
    assert set(found.flops_per_second) == {"float32", "bfloat16", "float16"}
    assert ceilings.measured_hardware(1).bandwidth is not None
