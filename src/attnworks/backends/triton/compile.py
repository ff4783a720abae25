"""Compile a launch for a GPU that need not be here, and read what the compiler says of it.

Triton compiles for any target it knows without a device (ptxas comes with it), so tiles can be judged by the shared
memory, registers and spills they take on a card one doesn't have.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel: bytes of shared memory, registers a thread, bytes of registers spilled to
    memory, and how many matrix instructions it emitted. ``error`` is its own message where it failed."""

    shared: int = 0
    registers: int | None = None
    spills: int | None = None
    matrix_instructions: int | None = None
    error: str = ""
    asm: dict[str, Any] | None = None


def compile_for(target: GPUTarget, kernel: Any, arguments: dict[str, Any], **options: int) -> Compiled:
    """``kernel`` as it would be compiled for ``arguments`` (tensors may be of device "meta") on ``target``."""
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    chosen, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, specialization, options)
    try:
        made = triton.compile(
            ASTSource(kernel, signature, constants, attributes), target=target, options=chosen.__dict__
        )
    except Exception as error:  # the compiler raises a dozen kinds, and its message is the result
        return Compiled(error=f"{type(error).__name__}: {error}".strip())
    registers, spills = _registers(made.asm.get("ptx"), target) if target.backend == "cuda" else _amd(made.asm)
    return Compiled(made.metadata.shared, registers, spills, _matrix_instructions(made.asm), asm=dict(made.asm))


def _registers(ptx: str, target: GPUTarget) -> tuple[int | None, int | None]:
    """Registers and spilled bytes, from ptxas itself."""
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
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)


def _amd(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    text = asm.get("amdgcn", "")
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    return (int(registers[1]) if registers else None), (4 * int(spills[1]) if spills else None)


def _matrix_instructions(asm: dict[str, Any]) -> int:
    text = asm.get("ptx") or asm.get("amdgcn") or ""
    return len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma|v_wmma)", text))
