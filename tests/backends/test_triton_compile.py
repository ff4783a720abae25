"""The Triton kernels compiled for a GPU that need not be here: the interpreter takes Python that the compiler refuses,
such as a variable that changes its type from one turn of a loop to the next."""

import os
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

if not find_spec("triton") or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, and not its interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget

from attnworks import Bias, Causal, Sink, Softcap, Window, masks, scores
from attnworks.backends.triton import calls, gradients, launch, plans, prepare
from attnworks.backends.triton.compile import compile_for
from attnworks.hardware import load
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem
from attnworks.tilemap import TileLists, TileMap

N, D, HEADS = 64, 16, 2
DOCUMENT = torch.zeros(N, dtype=torch.int64)
Q_OUTER = Plan("triton", "q_outer", 16, 16, warps=4, stages=2)

PROBLEMS = {
    "full": (None, ()),
    "causal": (Causal(), ()),
    "window": (Window(9, 3), ()),
    "document": (lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], ()),
    "scores": (Causal(), (Softcap(2.0), Bias(torch.zeros(1, HEADS, N, N)), Sink(torch.zeros(HEADS)))),
}


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def posed(name: str) -> tuple[Problem, Operands]:
    mask, modifiers = PROBLEMS[name]
    (mask_spec, mask_operands), (score_spec, score_operands) = masks.split(mask), scores.split(modifiers)
    strides = (HEADS * N * D, N * D, D)
    problem = Problem(
        "dense", 1, HEADS, HEADS, N, N, D, D, torch.bfloat16, "meta", 0.25, strides, strides, strides,
        mask=mask_spec, scores=score_spec, return_lse=True,
    )  # fmt: skip
    q, k, v = (torch.empty(1, HEADS, N, D, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return problem, Operands(q, k, v, tuple(map(meta, mask_operands)), tuple(map(meta, score_operands)))


def compiled(arch: int, overlapping: bool = False) -> list[str]:
    """The errors of every kernel that was noted, and its name; that its products wait for each other is one if they are
    to be ``overlapping``."""
    noted = list(launch.NOTED)
    launch.NOTED.clear()
    errors = []
    for one, varying in noted:
        arguments = dict(zip(one.kernel.arg_names, varying, strict=False)) | one.fixed
        found = compile_for(GPUTarget("cuda", arch, 32), one.kernel, arguments, **one.options)
        error = found.warning if overlapping and found.warning else found.error
        errors += [f"{one.kernel.__name__}: {error}"] if error else []
    assert noted
    return errors


@pytest.fixture(autouse=True)
def _without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of device "meta" have no values to make a tile map of."""
    some = torch.empty(8, dtype=torch.int32, device="meta")
    lists = TileLists(some, some)
    tiles = TileMap(1, 1, N, N, 16, 16, lists, lists, 1)
    tiles.__dict__["transposed"] = tiles
    monkeypatch.setattr(calls.Modifiers, "tile_map", lambda *_: tiles)
    launch.NOTED.clear()


@pytest.mark.parametrize(
    ("name", "isa"), [*((name, "") for name in PROBLEMS), ("causal", plans.TMA), ("full", plans.TMA)]
)
def test_forward_and_backward(name: str, isa: str) -> None:
    problem, operands = posed(name)
    plan = replace(Q_OUTER, isa=isa)
    prepare(problem, plan)(operands)
    run = gradients.prepare_backward(replace(problem, differentiable=True), plan)
    needs = (True,) * (3 + len(operands.scores))
    lse = torch.empty(1, HEADS, N, device="meta")
    run(operands, operands.q, lse, operands.q, lse, needs)
    assert compiled(90) == []


@pytest.mark.parametrize("schedule", ["kv_outer", "standard"])
@pytest.mark.parametrize("name", ["causal", "document"])
def test_older_schedules(name: str, schedule: str) -> None:
    problem, operands = posed(name)
    prepare(problem, replace(Q_OUTER, schedule=schedule))(operands)
    assert compiled(80) == []


def test_splits() -> None:
    problem, operands = posed("scores")
    prepare(problem, replace(Q_OUTER, schedule="split_kv", split_kv=16))(operands)
    assert compiled(80) == []


def test_backward_through_caches() -> None:
    problem, operands = posed("scores")
    posed_as = replace(problem, form="decode", layout="bshd", differentiable=True)
    operands = replace(operands, kv_lens=torch.empty(1, dtype=torch.int64, device="meta"))
    lse = torch.empty(1, HEADS, N, device="meta")
    gradients.prepare_backward(posed_as, Q_OUTER)(operands, operands.q, lse, operands.q, None, (True,) * 5)
    assert compiled(90) == []


def test_a_head_in_two_blocks() -> None:
    problem, operands = posed("causal")
    strides = (HEADS * N * 520, N * 520, 520)
    prepare(replace(problem, head_dim=520, q_strides=strides, k_strides=strides), Q_OUTER)(operands)
    assert compiled(90) == []


@pytest.mark.parametrize("schedule", ["q_outer", "grouped"])
def test_packed_sequences(schedule: str) -> None:
    problem, _ = posed("causal")
    strides = (0, D, HEADS * D)
    packed = replace(
        problem, form="varlen", batch=2, total_q=N, total_kv=N, q_strides=strides, k_strides=strides, v_strides=strides
    )
    q, k, v = (torch.empty(N, HEADS, D, dtype=torch.bfloat16, device="meta") for _ in range(3))
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    operands = Operands(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    prepare(packed, replace(Q_OUTER, schedule=schedule))(operands)
    if schedule == "grouped":
        assert compiled(80) == []
        return
    run = gradients.prepare_backward(replace(packed, differentiable=True), Q_OUTER)
    run(operands, q, torch.empty(HEADS, N, device="meta"), q, None, (True, True, True))
    assert compiled(80) == []


@pytest.mark.parametrize("isa", ["", plans.TMA])
def test_matrix_products_overlap_off_the_tile(isa: str) -> None:
    seq, dim, heads = 4000, 64, 4
    strides = (heads * seq * dim, seq * dim, dim)
    problem = replace(
        posed("causal")[0], batch=2, heads_q=heads, heads_kv=heads, seq_q=seq, seq_kv=seq, head_dim=dim, head_dim_v=dim,
        q_strides=strides, k_strides=strides, v_strides=strides,
    )  # fmt: skip
    x = torch.empty(2, heads, seq, dim, dtype=torch.bfloat16, device="meta")
    plan = replace(plans.candidates(problem, load("h200-sxm"))[0], isa=isa)
    prepare(problem, plan)(Operands(x, x, x))
    run = gradients.prepare_backward(replace(problem, differentiable=True), plan)
    run(Operands(x, x, x), x, torch.empty(2, heads, seq, device="meta"), x, None, (True,) * 3)
    assert compiled(90, overlapping=True) == []


@pytest.mark.parametrize(("arch", "copies"), [(90, True), (80, False)])
def test_described_tiles_come_by_the_copy_engine_where_there_is_one(arch: int, copies: bool) -> None:
    problem, operands = posed("causal")
    prepare(problem, replace(Q_OUTER, isa=plans.TMA))(operands)
    [(one, varying)] = launch.NOTED
    launch.NOTED.clear()
    arguments = dict(zip(one.kernel.arg_names, varying, strict=False)) | one.fixed
    found = compile_for(GPUTarget("cuda", arch, 32), one.kernel, arguments, **one.options)
    assert found.asm is not None, found.error
    assert ("cp.async.bulk.tensor" in found.asm["ptx"]) is copies


def test_rows_of_lse_and_delta_are_read_aligned_whatever_the_length() -> None:
    """Four bytes at a time dK and dV took half as long again."""
    seq = 67
    strides = (HEADS * seq * D, seq * D, D)
    problem = replace(
        posed("causal")[0], mask=(), seq_q=seq, seq_kv=seq, q_strides=strides, k_strides=strides, v_strides=strides
    )
    x = torch.empty(1, HEADS, seq, D, dtype=torch.bfloat16, device="meta")
    run = gradients.prepare_backward(replace(problem, differentiable=True), Q_OUTER)
    run(Operands(x, x, x), x, torch.empty(1, HEADS, seq, device="meta"), x, None, (False, True, True))
    [(one, varying)] = [noted for noted in launch.NOTED if noted[0].kernel.__name__ == "grad_kv"]
    launch.NOTED.clear()
    arguments = dict(zip(one.kernel.arg_names, varying, strict=False)) | one.fixed
    found = compile_for(GPUTarget("cuda", 90, 32), one.kernel, arguments, **one.options)
    assert found.asm is not None, found.error
    sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", found.asm["ptx"]))
    assert sizes and "0x4" not in sizes and "4" not in sizes
