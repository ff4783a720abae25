"""The sweep of tiles: what is rejected and why, and a few real compilations for cards that are not here."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from click.testing import CliRunner

from attnworks import Causal, Plan, hardware, masks
from attnworks.backends import Compiled, cuda
from attnworks.backends.cuda import compile as nvrtc
from attnworks.backends.cuda import plans as cuda_plans
from attnworks.backends.cuda.source import Variant, text
from attnworks.workbench import tile_sweep
from attnworks.workbench.cli import main
from attnworks.workbench.cli.sweep import NOTE, find_machines
from attnworks.workbench.providers import describe

if not find_spec("triton") or os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

needs_nvrtc = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing() or "NVRTC is here")
A100 = hardware.load("a100-sxm-40gb")
PLAN = tile_sweep.candidates([64], [64], [4], [2])[0]
GOOD = Compiled(shared=49152, registers=168, spills=0, matrix_instructions=32)


def problem(seq: int = 256, dtype: torch.dtype = torch.float16, head_dim: int = 64):
    return describe(
        form="dense", batch=1, heads_q=2, heads_kv=2, seq_q=seq, seq_kv=seq, head_dim=head_dim, head_dim_v=head_dim,
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shared": 170000}, "170000 bytes of shared memory, the card gives a program 166912"),
        ({"spills": 96}, "96 bytes of registers spilled to memory"),
        ({"matrix_instructions": 0}, "no matrix instructions"),
        ({"error": "OutOfResources: shared memory\n  at line 3\nvalue too large"}, "value too large"),
    ],
)
def test_each_reason_to_reject(change, reason):
    assert tile_sweep.judge(problem(), PLAN, GOOD, A100).rejected == ()
    assert tile_sweep.judge(problem(), PLAN, replace(GOOD, **change), A100).rejected == (reason,)


def test_a_program_of_too_many_registers_does_not_fit():
    plan = replace(PLAN, warps=16)
    found = tile_sweep.judge(problem(), plan, replace(GOOD, registers=255), A100)
    assert found.programs == 0
    assert found.rejected == ("255 registers a thread, the card holds not one such program",)


def test_what_has_no_matrix_instructions_is_not_asked_for_them():
    none = replace(GOOD, matrix_instructions=0)
    assert tile_sweep.judge(problem(dtype=torch.float32), PLAN, none, A100).rejected == ()
    assert tile_sweep.judge(problem(), PLAN, none, hardware.load("mi50")).rejected == ()


@pytest.mark.parametrize(
    ("change", "programs"),
    [
        ({}, 3),  # registers: 168 x 32 a warp, 3 warps in each quarter of 16384; shared memory alone: 3 of 164 KiB
        ({"shared": 0}, 3),
        ({"registers": 32}, 3),
        ({"registers": 32, "shared": 0}, 16),  # 64 warps
        ({"registers": 169}, 2),  # rounded up to 176: 2 warps in a quarter
        ({"shared": 82 * 1024}, 1),  # 1 KiB more for each block
    ],
)
def test_programs_on_a_multiprocessor(change, programs):
    assert tile_sweep.resident(PLAN, replace(GOOD, **change), A100) == programs


def test_a_fact_that_is_missing_is_not_guessed():
    assert tile_sweep.resident(PLAN, GOOD, replace(A100, unit_registers=None)) is None


def test_targets():
    assert tile_sweep.target_of(A100) == ("cuda", 80, 32)
    assert tile_sweep.target_of(hardware.load("rtx-5090")) == ("cuda", 120, 32)
    assert tile_sweep.target_of(hardware.load("mi300x")) == ("hip", "gfx942", 64)
    with pytest.raises(ValueError, match="must be a GPU whose file states its capability or arch"):
        tile_sweep.target_of(hardware.load("textbook"))


def test_machines_by_how_they_begin():
    assert find_machines("t4") == ["t4"]
    assert find_machines("a100") == ["a100-sxm-40gb", "a100-sxm-80gb"]
    with pytest.raises(ValueError, match="--on: was 'abacus', must be, or begin, one of"):
        find_machines("abacus")


@pytest.mark.parametrize("card", ["a100-sxm-40gb", "h100-sxm"])
def test_compiled_for_a_card_that_is_not_here(card):
    plans = tile_sweep.candidates([64], [32], [4], [2])
    [found] = tile_sweep.sweep(problem(), plans, hardware.load(card))
    assert not found.compiled.error
    assert found.compiled.matrix_instructions > 0 and found.compiled.spills == 0 and found.rejected == ()
    assert 16384 <= found.compiled.shared <= 65536
    assert 32 < found.compiled.registers <= 255 and found.programs >= 1


def test_where_calls_take_the_cuda_backend_it_is_named(monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: "")
    monkeypatch.setattr(tile_sweep, "compile_all", lambda target, asked, jobs: ((n, GOOD) for n in range(len(asked))))
    for card, named in (("h100-sxm", True), ("a100-sxm-40gb", False)):
        ran = CliRunner().invoke(main, ["sweep", "--on", card, "--tile-q", "64", "--tile-kv", "64", "--json"])
        assert any("--backend cuda" in note for note in json.loads(ran.stdout)["notes"]) == named


def test_turing_gets_no_tensor_cores_and_the_command_says_so():
    arguments = ["sweep", "--on", "t4", "--seq", "256", "--head-dim", "32", "--tile-q", "32", "--tile-kv", "32"]
    ran = CliRunner().invoke(main, [*arguments, "--warps", "4", "--stages", "1", "--jobs", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    [one] = found["candidates"]
    assert one["error"] or one["matrix_instructions"] == 0
    assert "emitted no matrix instruction for sm_75" in found["notes"][0] or one["error"]


def test_a_card_that_triton_does_not_compile_for_is_told_in_its_own_words():
    found = tile_sweep.sweep(problem(), tile_sweep.candidates([64], [32], [4], [2]), hardware.load("mi50"))
    assert [one.programs for one in found] == [None]
    assert "gfx906" in found[0].rejected[0]
    assert "none of 1 candidates for gfx906" in tile_sweep.statements(found, hardware.load("mi50"))[0]


def test_plans_that_no_kernel_runs_are_rejected_uncompiled(monkeypatch):
    monkeypatch.setattr(tile_sweep, "_processes", lambda count: pytest.fail("compiled"))
    [found] = tile_sweep.sweep(problem(), tile_sweep.candidates([48], [32], [4], [2]), A100)
    assert found.rejected == ("plan tile_q: was 48, must be a power of two, at least 16",)
    assert found.to_json()["shared"] is None and found.programs is None
    with pytest.raises(ValueError, match="plans: were none"):
        tile_sweep.sweep(problem(), [], A100)


@needs_nvrtc
def test_tiles_of_the_cuda_backend_are_judged_by_its_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = lambda target, asked, jobs: ((at, tile_sweep._compile(target, *one)) for at, one in enumerate(asked))  # noqa: E731
    monkeypatch.setattr(tile_sweep, "compile_all", here)
    arguments = ["sweep", "--on", "h200", "--backend", "cuda", "--seq", "2048", "--head-dim", "64", "--causal"]
    arguments += ["--tile-q", "128,192", "--tile-kv", "128,136", "--stages", "3"]
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    by_tiles = {(one["plan"]["tile_q"], one["plan"]["tile_kv"]): one for one in found["candidates"]}
    assert set(by_tiles) == {(128, 128), (128, 136), (192, 128), (192, 136)}
    good, odd = by_tiles[128, 128], by_tiles[192, 136]
    assert (good["rejected"], good["registers"], good["spills"], good["programs"]) == ([], 168, 0, 1)
    assert good["shared"] == cuda_plans.variant(posed_for_cuda(), Plan(**good["plan"])).shared_bytes
    assert odd["rejected"] == ["plan tile_kv: was 136, must be a multiple of 16 in 16..256"] and odd["shared"] is None
    assert found["porting"] is None and found["notes"] == [NOTE]
    assert len(list(tmp_path.rglob("*.cubin"))) == 2, "a launch finds what was compiled"


def posed_for_cuda():
    return replace(problem(2048), mask=masks.split(Causal())[0], device="cuda")


@needs_nvrtc
def test_a_kernel_that_spills_is_rejected_in_the_compilers_words(tmp_path, monkeypatch):
    monkeypatch.setattr(Variant, "most_accumulators", 255)
    plan = Plan("cuda", "q_outer", 192, 128, warps=16, stages=2)
    wide = replace(posed_for_cuda(), head_dim_v=128)
    assert tile_sweep.refusal(wide, plan, cuda) == ""
    built = cuda_plans.variant(wide, plan)
    made = nvrtc.judged(text(built), built.shared_bytes, tmp_path)
    serialized, spilled = tile_sweep.judge(wide, plan, made, hardware.load("h200-sxm")).rejected
    assert "wgmma.mma_async instructions are serialized" in serialized
    assert spilled == f"{made.spills} bytes of registers spilled to memory" and made.spills > 100
    broken = nvrtc.judged(text(built).replace("x = fmaxf(x, y);", "x = fmaxg(x, y);"), 0, tmp_path)
    assert 'identifier "fmaxg" is undefined' in broken.error
    assert len(list(tmp_path.iterdir())) == 1


def test_cards_and_problems_that_the_cuda_backend_refuses_are_told_so():
    for arguments, told in (
        (["--on", "a100", "--backend", "cuda"], "compute capability 8.0 (its kernels are for 9.0)"),
        (["--on", "h200", "--backend", "cuda", "--dtype", "float32"], "dtype torch.float32"),
        (["--on", "h200", "--backend", "cuda", "--warps", "4"], "--warps: was given, but those of backend cuda follow"),
        (["--on", "h200", "--backend", "cpu"], "must be 'auto', 'triton' or 'cuda' with --on"),
    ):
        ran = CliRunner().invoke(main, ["sweep", *arguments])
        assert ran.exit_code != 0 and told in ran.output, ran.output
