"""Compile a launch for a GPU that need not be here, and read what the compiler says of it.

Triton compiles for any target it knows without a device (ptxas comes with it), so tiles can be judged by the shared
memory, registers and spills they take on a card one doesn't have.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from attnworks.backends import Compiled
from attnworks.backends.triton.launch import NOTED
from attnworks.backends.triton.plans import holds_q
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Operands, Problem


def compile_for(target: GPUTarget, kernel: Any, arguments: dict[str, Any], **options: int) -> Compiled:
    """``kernel`` as it would be compiled for ``arguments`` (tensors may be of device "meta") on ``target``."""
    backend = make_backend(target)
    known = backend.parse_options({}).__dict__  # a limit of registers is an option of NVIDIA's alone
    options = {name: value for name, value in options.items() if name in known}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    chosen, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, options)
    try:
        made = triton.compile(
            ASTSource(kernel, signature, constants, attributes), target=target, options=chosen.__dict__
        )
    except Exception as error:  # the compiler raises a dozen kinds, and its message is the result
        return Compiled(error=f"{type(error).__name__}: {error}".strip())
    warning = ""
    if target.backend == "cuda":
        registers, spills, warning = _ptxas(made.asm["ptx"], target)
    else:
        registers, spills = _amd(made.asm)
    shared, instructions = made.metadata.shared, _matrix_instructions(made.asm)
    return Compiled(shared, registers, spills, instructions, asm=dict(made.asm), warning=warning)


def compile_plan(target: GPUTarget, problem: Problem, plan: Plan) -> list[tuple[str, Compiled]]:
    """Every kernel that a forward call of ``problem`` under ``plan`` launches, by name, as compiled for ``target``.

    The problem's own device is not looked at. Raises ``ValueError`` for masks and scores with operands, of which a
    Problem doesn't hold the tensors.
    """
    from attnworks.backends.triton import prepare

    if any(term.operand for term in problem.scores) or not all(isinstance(term, Bounds) for term in problem.mask):
        raise ValueError("problem: has masks or scores with operands, must have closed bounds and constants only")
    NOTED.clear()
    prepare(replace(problem, device="meta"), plan)(_operands(problem))
    noted = list(NOTED)
    NOTED.clear()
    found = []
    for launch, tensors in noted:
        names = launch.kernel.arg_names[: len(tensors)]
        arguments = dict(zip(names, tensors, strict=True)) | launch.fixed
        if "KEEP_MAXIMUM" in arguments:  # as calls.prepare would have it there
            cuda = target.backend == "cuda"
            arguments["KEEP_MAXIMUM"] &= cuda
            arguments["HOLD_Q"] = cuda and arguments["DESCRIBED"] and holds_q(problem, plan, divmod(target.arch, 10))
        found.append((launch.kernel.__name__, compile_for(target, launch.kernel, arguments, **launch.options)))
    return found


def _operands(p: Problem) -> Operands:
    """Tensors without memory, as many and of such dtypes as a call of the problem has."""

    def of(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    offsets = lens = table = scale = None
    if p.form == "varlen":
        offsets = of(p.batch + 1)
    if p.form == "decode":
        lens = of(p.batch)
        table = of(p.batch, p.seq_kv // p.page_size) if p.page_size else None
        scale = of(p.heads_kv, dtype=torch.float32) if p.kv_dtype else None
    kv_dtype = p.kv_dtype or p.dtype
    # Nothing is read but the dtype: strides are the Problem's.
    q, k, v = of(1, dtype=p.dtype), of(1, dtype=kv_dtype), of(1, dtype=kv_dtype)
    return Operands(q, k, v, (), (), offsets, offsets, lens, table, scale, scale)


def _ptxas(ptx: str, target: GPUTarget) -> tuple[int | None, int | None, str]:
    """Registers, spilled bytes and, where ptxas says so, that Hopper's matrix products wait for each other, which costs
    a tenth to a half of the speed."""
    arch = f"sm_{target.arch}{'a' if target.arch >= 90 else ''}"
    ptxas = triton.knobs.nvidia.ptxas_blackwell if target.arch >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ran = subprocess.run(
            [ptxas.path, "-v", "-arch", arch, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", ran.stderr)
    spills = re.search(r"(\d+) bytes spill stores", ran.stderr)
    warning = "the matrix products wait for each other" if "instructions are serialized" in ran.stderr else ""
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None), warning


def _amd(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    text = asm.get("amdgcn", "")
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    return (int(registers[1]) if registers else None), (4 * int(spills[1]) if spills else None)


def _matrix_instructions(asm: dict[str, Any]) -> int:
    text = asm.get("ptx") or asm.get("amdgcn") or ""
    return len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma|v_wmma)", text))
