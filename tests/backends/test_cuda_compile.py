"""The CUDA kernels compiled for Hopper, which need not be here, and the cache of what was compiled."""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from attnworks import ALiBi, Bias, Causal, Sink, Softcap, Window, masks, scores
from attnworks.backends import cuda
from attnworks.backends.cuda import compile as compiler
from attnworks.backends.cuda import launch, plans, source, split
from attnworks.backends.cuda.source import MERGE_PARTS, PARTS, Variant, text
from attnworks.problem import Problem
from gpu_mutant import FAULTS, PROBLEMS

needs_nvrtc = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing() or "NVRTC is here")
STRIDES = (4096, 256, 256)
PROBLEM = Problem(
    "dense", 2, 4, 2, 1000, 1000, 128, 128, torch.bfloat16, "cuda:0", 0.125, STRIDES, STRIDES, STRIDES, return_lse=True
)  # fmt: skip
NOTHING = 'extern "C" __global__ void nothing() {}'


def built(**changes: object) -> Variant:
    problem = replace(PROBLEM, **changes)
    return plans.variant(problem, plans.plan_for(problem))


def modified(*modifiers: object) -> dict[str, object]:
    return {"scores": scores.split(modifiers)[0]}


def of_line(line: plans.Line) -> Variant:
    """The variant that a line of the table stands for, under a causal mask where it has a choice."""
    mask = {"full": None, "packed": None, "map": SPARSE}.get(line.kind, Causal())
    found = {"head_dim": line.head_dim, "head_dim_v": line.head_dim_v, "seq_kv": max(line.keys, 1000)}
    found["seq_q"] = max(line.rows, 1000)
    if line.kind == "packed":
        found |= {"form": "varlen", "total_q": 9000, "total_kv": 9000}
    return built(
        **found, mask=masks.split(mask)[0], **(modified(Bias(torch.ones(1, 1000))) if line.kind == "bias" else {})
    )


def name_of(line: plans.Line) -> str:
    return f"{line.head_dim}/{line.head_dim_v} {line.kind or 'any'} from {line.keys}"


SPARSE = torch.ones(1000, 1000, dtype=torch.bool)
VARIANTS = {
    **{name_of(line): of_line(line) for line in plans.TABLE},
    "map, softcap, ALiBi, bias": built(
        mask=masks.split(Causal() & SPARSE)[0],
        **modified(Softcap(5.0), ALiBi(torch.ones(4)), Bias(torch.ones(1000, 1000))),
    ),
    "parts, bias": replace(built(**modified(Bias(torch.ones(1, 1000).bfloat16()))), split=True),
    "128/128 full from 4096, stream-K": replace(built(seq_kv=5000), stream_k=True),
    "192/128 full, stream-K": replace(built(head_dim=192), stream_k=True),
    "256/256 full, stream-K": replace(built(head_dim=256, head_dim_v=256), stream_k=True),
    "packed, window, softcap, sink, fp16, padded": built(
        form="varlen", total_q=9, total_kv=9, mask=masks.split(Window(9, 3))[0], head_dim=40, head_dim_v=72,
        scores=scores.split((Softcap(5.0), Sink(torch.zeros(4))))[0], dtype=torch.float16,
    ),
}  # fmt: skip


# Those whose registers are tightest, and all features at once: each takes seconds. tests/gpu runs the others. Of plain
# kernels the machine code: whoever changes it, also by a feature that they don't have, measures them again.
MEASURED_WITH = "13.0.88"
COMPILED = {
    "64/64 full from 2048": "0c8b88fb9e190a4a",
    "128/128 full from 4096": "cb8dbcac83cd9c95",
    "192/192 any from 0": "00dd42ad03dcae96",
    "packed, window, softcap, sink, fp16, padded": "7b315a42cb585c55",
    "256/256 map from 0": "",
    "map, softcap, ALiBi, bias": "",
    "parts, bias": "",
    "128/128 full from 4096, stream-K": "",
    "192/128 full, stream-K": "",
    "256/256 full, stream-K": "",
}


@needs_nvrtc
@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_without_spills_and_plain_ones_to_what_was_measured(name: str) -> None:
    code, log = compiler.compiled(text(VARIANTS[name]))
    assert log == "", "also a warning that registers can't be handed over, or that products can't overlap"
    assert compiler.frame_bytes(code) == 0
    assert VARIANTS[name].shared_bytes <= plans.SHARED_LIMIT
    assert VARIANTS[name].extended == (not COMPILED[name])
    if COMPILED[name] and nvrtc_version() == MEASURED_WITH:
        assert hashlib.sha256(code).hexdigest()[:16] == COMPILED[name], "measure again, then write down the new one"


def nvrtc_version() -> str:
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({"mask": Causal(), "seq_q": 8192, "seq_kv": 8192}, (192, 64, 3)),
        ({"mask": Causal(), "seq_q": 4096, "seq_kv": 4096}, (128, 128, 2)),
        ({"mask": Causal(), "seq_q": 128, "seq_kv": 16384}, (128, 128, 2)),
        ({"mask": Window(1023, 0), "seq_q": 8192, "seq_kv": 8192}, (128, 128, 2)),
        ({"mask": Causal(), "seq_q": 8192, "seq_kv": 8192, "head_dim": 80, "head_dim_v": 80}, (192, 96, 3)),
        ({"mask": None, "seq_q": 8192, "seq_kv": 8192}, (128, 160, 2)),
        ({"mask": None, "form": "varlen", "seq_q": 8192, "seq_kv": 8192}, (192, 64, 3)),
        ({"mask": Causal(), "form": "varlen", "seq_q": 8192, "seq_kv": 8192}, (192, 64, 3)),
        ({"mask": None, "form": "varlen", "seq_q": 1000, "seq_kv": 1000}, (128, 128, 2)),
    ],
)
def test_the_tiles_of_a_problem(changes: dict[str, object], tiles: tuple[int, int, int]) -> None:
    changes = changes | {"mask": masks.split(changes["mask"])[0], "total_q": 9000, "total_kv": 9000}
    plan = plans.plan_for(replace(PROBLEM, **changes))
    assert (plan.tile_q, plan.tile_kv, plan.stages) == tiles


@needs_nvrtc
def test_a_kernel_that_spills_is_seen() -> None:
    spills = replace(VARIANTS["64/64 full from 2048"], head_dim_v=128)
    assert compiler.frame_bytes(compiler.compiled(text(spills))[0]) > 0


def test_the_arguments_are_those_that_the_kernel_reads() -> None:
    """Names, types and order of the struct's fields, from its text: both sides lay them out by C's rules."""
    for file, name, mirror in (
        ("schedule.cuh", "Params", launch.Params),
        ("merge.cuh", "MergeParams", split.MergeParams),
        ("stream_k.cuh", "Stretches", split.Stretches),
    ):
        source = (Path(cuda.__file__).parent / file).read_text()
        body = re.search(rf"struct {name} \{{(.*?)\}};", source, re.DOTALL).group(1)
        assert fields_of(body) == list(mirror._fields_)


def fields_of(body: str) -> list[tuple[str, type]]:
    types = {"i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float, "Stretches": split.Stretches}
    found = []
    for declaration in re.sub(r"//.*|#.*", "", body).split(";"):
        names = declaration.replace("const ", "").split(None, 1)
        for name in names[1].split(",") if names else ():
            kind = ctypes.c_void_p if "*" in declaration else types[names[0]]
            found.append((name.strip(" *"), kind))
    return found


@needs_nvrtc
def test_shared_memory_is_what_the_kernel_lays_out() -> None:
    variant = VARIANTS["192/192 any from 0"]
    laid_out = "GROUPS * Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 2 * WORK_BYTES + 8 * (2 * GROUPS + 4 * STAGES + 4)"
    for size, right in ((variant.shared_bytes, True), (variant.shared_bytes + 8, False)):
        check = f"{text(variant)}\nstatic_assert({laid_out} == {size});"
        if right:
            assert compiler.compiled(check)[0]
        else:
            with pytest.raises(compiler.CompileError, match="static assertion failed"):
                compiler.compiled(check)


@needs_nvrtc
def test_what_the_compiler_says_names_the_part_and_its_line(tmp_path: Path) -> None:
    broken = text(VARIANTS["64/64 full from 2048"]).replace("x = fmaxf(x, y);", "x = fmaxg(x, y);")
    with pytest.raises(compiler.CompileError, match=r'softmax.cuh\(\d+\): error: identifier "fmaxg" is undefined'):
        compiler.cubin(broken, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_nvrtc
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiler.cubin(NOTHING, folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: pytest.fail("NVRTC was loaded, which takes longer than all else"))
    assert compiler.cubin(NOTHING, folder=tmp_path) == code
    assert [kept] == list(tmp_path.iterdir())


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_compiled_anew(damage: bytes | None, tmp_path: Path) -> None:
    code = compiler.cubin(NOTHING, folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    assert compiler.read(kept) is None
    assert compiler.cubin(NOTHING, folder=tmp_path) == code
    assert kept.read_bytes() == whole


@needs_nvrtc
def test_text_options_and_compiler_each_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.cubin(NOTHING, folder=tmp_path)
    compiler.cubin(NOTHING + " ", folder=tmp_path)
    compiler.cubin(NOTHING, (*compiler.OPTIONS, "--use_fast_math"), tmp_path)
    monkeypatch.setattr(compiler, "_identity", lambda: "libnvrtc.so.99 1 1")
    compiler.cubin(NOTHING, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    """Threads here, and another process in between: readers see a whole file or none."""
    path, code = tmp_path / "x.cubin", os.urandom(1 << 20)
    script = f"""
from pathlib import Path
from attnworks.backends.cuda.compile import write
for _ in range(8): write(Path({str(path)!r}), bytes.fromhex({code[:64].hex()!r}) * 9)
"""
    other = subprocess.Popen([sys.executable, "-c", script])
    seen = set()
    with ThreadPoolExecutor(4) as pool:
        while other.poll() is None:
            list(pool.map(lambda _: compiler.write(path, code), range(4)))
            seen.add(len(compiler.read(path) or b"none"))
    assert other.returncode == 0
    assert seen <= {len(code), 64 * 9}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert compiler.write(tmp_path / "file" / "x.cubin", b"code") == b"code"


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: "NVRTC is not installed")
    from attnworks.hardware import load

    assert "NVRTC is not installed" in cuda.verdict(PROBLEM, load("h200-sxm")).reasons
    with pytest.raises(compiler.CompileError, match="could not be loaded from '/nowhere'"):
        compiler._Nvrtc("/nowhere")


def test_the_parts_are_data_of_the_package() -> None:
    assert {path.name for path in Path(cuda.__file__).parent.glob("*.cuh")} == {*PARTS, *MERGE_PARTS}


def test_the_parts_are_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core.build", reason="what builds wheels is not installed")
    root = Path(__file__).parents[2]
    script = (
        "import sys; from scikit_build_core.build import build_wheel; "
        "build_wheel(sys.argv[1], {'wheel.cmake': 'false', 'build-dir': sys.argv[1] + '/build'})"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {Path(name).name for name in ZipFile(wheel).namelist() if "/backends/cuda/" in name}
    assert {*PARTS, *MERGE_PARTS} <= held


@pytest.mark.parametrize("fault", FAULTS)
def test_the_faults_that_are_tried_on_a_card_have_their_place_in_the_text(fault: str) -> None:
    problem, file, old, new = FAULTS[fault]
    text = source._part(file)
    assert problem in PROBLEMS and text.count(old) == 1 and new != old
