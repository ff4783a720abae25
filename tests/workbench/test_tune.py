"""The tuner's choices, with scripted times: no GPU is needed to decide who may win."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

if not find_spec("triton"):
    pytest.skip("the backend's own candidates and the compiler's results come with Triton", allow_module_level=True)

from attnworks import Plan, tuned
from attnworks.backends import cuda, triton
from attnworks.backends.cuda import compile as nvrtc
from attnworks.backends.triton.compile import Compiled
from attnworks.errors import Verdict
from attnworks.hardware import load
from attnworks.workbench import tile_sweep, tune

H200 = load("h200-sxm")


def test_candidates_begin_with_the_backends_choice_and_all_run():
    problems = tune.usual_problems()
    assert len({tuned.key_of(problem, H200, "triton") for problem in problems}) == len(problems)
    for problem in problems:
        found = tune.candidates(problem, H200)
        assert found[0] == triton.candidates(problem, H200)[0]
        assert len(set(found)) == len(found) > 10
        for plan in found:
            triton.check_plan(problem, plan)


def test_heads_of_a_group_as_rows_of_one_tile_are_tried_for_short_prefills():
    short, long = (tune.dense(1, 32, 8, 4096, 128, tune.CAUSAL, seq_q) for seq_q in (64, 4096))
    assert {plan.schedule for plan in tune.candidates(short, H200)} == {"q_outer", "grouped"}
    assert {plan.schedule for plan in tune.candidates(long, H200)} == {"q_outer"}


def test_the_compiler_rejects_what_does_not_fit_and_is_asked_once_for_like_kernels(monkeypatch):
    """Lengths change no kernel, but for a batch of 1, which becomes a constant."""
    plans = [Plan("triton", "q_outer", 128, 64, warps=8, stages=stages) for stages in (2, 4)]
    sizes = ((4, 4096), (2, 8192), (1, 16384))
    asked = [(tune.dense(batch, 16, 16, seq, 128), plan) for batch, seq in sizes for plan in plans]

    def compile_all(target, first, jobs):
        assert (target, jobs) == (("cuda", 90, 32), 3)
        assert first == [*asked[:2], *asked[4:]]
        shared = {2: 98304, 4: 294912}
        yield from ((i, Compiled(shared[plan.stages], 128, 0, 8)) for i, (_, plan) in enumerate(first))

    monkeypatch.setattr(tile_sweep, "compile_all", compile_all)
    seen = []
    kept = tune._that_fit(asked, H200, 3, lambda what, done, total: seen.append((done, total)))
    assert kept == [one for one in asked if one[1].stages == 2]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Scripted:
    """A clock by which each plan takes the time that its tile says."""

    def __init__(self, device="cuda"):
        pass

    def interleaved(self, competitors, rounds):
        for run in competitors.values():
            run()
        tiles = {name: run.plan.tile_kv for name, run in competitors.items()}
        return {name: [SECONDS[tiles[name]] * (1 + 0.001 * (turn % 3)) for turn in range(rounds)] for name in tiles}


SECONDS = {64: 1.0, 32: 0.8, 128: 0.5}
TABLE, FAST, WRONG = (Plan("triton", "q_outer", 64, tile, warps=4, stages=3) for tile in (64, 32, 128))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(tune, "Clock", Scripted)
    monkeypatch.setattr(tune, "detect", lambda device: H200)
    monkeypatch.setattr(tune, "candidates", lambda problem, hardware: [TABLE, FAST, WRONG])
    monkeypatch.setattr(tune, "_that_fit", lambda asked, *_: asked)
    monkeypatch.setattr(triton, "verdict", lambda problem, hardware: Verdict("triton", ()))

    def run(problem, plan, o):
        def once():
            k, v = (x.transpose(1, 2) if problem.form == "decode" else x for x in (o.k, o.v))
            q = o.q.transpose(1, 2) if problem.form == "decode" else o.q
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            out = out.transpose(1, 2) if problem.form == "decode" else out
            return out * 1.1 if plan == WRONG else out

        once.plan = plan
        return once

    monkeypatch.setattr(tune, "_run", run)
    return monkeypatch


@pytest.mark.parametrize("problem", [tune.dense(2, 2, 2, 64, 16), tune.decode(2, 4, 2, 64, 16)], ids=["dense", "cache"])
def test_the_fastest_that_is_right_becomes_a_row(scripted, problem, tmp_path):
    [found] = tune.tune([problem], "cpu")
    assert (found.table, found.best, found.tried) == (TABLE, FAST, 3)
    assert found.not_right == (str(WRONG),)
    assert found.row is not None and found.row.plan == FAST and found.row.ratio == pytest.approx(1.25, abs=0.01)
    path = tmp_path / tuned.file_name(H200)
    tuned.write(path, H200.name, tune.rows_of([found]))
    assert tuned.read(path, H200.name) == {tuned.key_of(replace(problem, device="cpu"), H200, "triton"): found.row}


def test_no_row_where_the_table_is_as_good(scripted):
    scripted.setitem(SECONDS, 32, 0.995)
    [found] = tune.tune([tune.dense(2, 2, 2, 64, 16)], "cpu")
    assert found.best == FAST and found.row is None and tune.rows_of([found]) == {found.key: None}


def test_a_wrong_choice_of_the_backends_own_is_an_error(scripted):
    scripted.setattr(tune, "candidates", lambda problem, hardware: [WRONG, FAST])
    with pytest.raises(tune.NotVerifiedError, match="its result is wrong for triton: dense"):
        tune.tune([tune.dense(2, 2, 2, 64, 16)], "cpu")


def test_problems_that_the_time_does_not_suffice_for_are_left_out(scripted):
    assert tune.tune([tune.dense(2, 2, 2, 64, 16)], "cpu", seconds=-1.0) == []
    scripted.setattr(triton, "verdict", lambda problem, hardware: Verdict("triton", ("no",)))
    with pytest.raises(ValueError, match="no"):
        tune.tune([tune.dense(2, 2, 2, 64, 16)], "cpu")


def test_scripted_results_are_right_by_torch():
    """What the scripted clock runs is attention: else the wrong plan would not stand out."""
    problem = tune.dense(1, 2, 2, 32, 16)
    o = tune._inputs(replace(problem, device="cpu"))
    expected = torch.softmax(problem.scale * o.q.double() @ o.k.double().mT, -1) @ o.v.double()
    assert tune._checker(problem, o)(expected.to(problem.dtype))
    assert not tune._checker(problem, o)((expected * 1.1).to(problem.dtype))


@pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing() or "NVRTC is here")
def test_a_row_says_which_compiler_made_its_kernels():
    table = Plan("cuda", "q_outer", 128, 128, warps=12, stages=2)
    times = {table: [2.0, 2.01, 2.02, 2.0, 2.01, 2.0], replace(table, tile_kv=96): [1.0, 1.01, 1.02, 1.0, 1.01, 1.0]}
    best, _, row = tune.decide(times, table, cuda, "cuda:0")
    assert row.plan == best == replace(table, tile_kv=96) and row.kernels == tuned.kernels_hash(cuda.KERNELS)
    assert row.compiler == f"NVRTC {nvrtc.version()}, torch {torch.__version__}"
    assert tune._made_with("triton", "cuda:0")[1].startswith("triton ")
