"""Hardware: a machine's facts, either read off the machine at hand or loaded from ``machines/*.toml``.

Each number in a machine file stands beside its source. Unknown is ``None``, never a guess.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Hardware:
    """Facts of one machine. Bandwidth in bytes/s, rates in FLOP/s, sizes in bytes.

    ``on_chip_bytes``: the fast memory that one task's tiles live in (shared memory of a multiprocessor, L2 of a core).
    ``shared_cache_bytes``: the cache between that and the slow memory (GPU L2, CPU L3). ``units``: multiprocessors or
    cores. ``matrix_flops``: peak by dtype name, dense. ``sources``: where each number comes from.

    Of GPUs: ``block_bytes``: the most shared memory of one thread block (a program of Triton's). ``unit_registers``:
    32-bit registers of a multiprocessor, ``thread_registers``: the most of one thread. ``unit_warps``: warps that can
    be resident on a multiprocessor, of ``warp_size`` threads each. ``capability``: NVIDIA's compute capability,
    ``arch``: AMD's target ("gfx942"). ``matrix_shapes``: of its matrix instructions on 16-bit operands.
    """

    name: str
    kind: str  # "cpu" or "gpu"
    units: int
    bandwidth: float | None = None
    matrix_flops: dict[str, float] = field(default_factory=dict)
    on_chip_bytes: int | None = None
    shared_cache_bytes: int | None = None
    isas: tuple[str, ...] = ()
    capability: str | None = None
    arch: str | None = None
    block_bytes: int | None = None
    unit_registers: int | None = None
    thread_registers: int | None = None
    unit_warps: int | None = None
    warp_size: int | None = None
    matrix_shapes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.units))

    def flops_for(self, dtype: torch.dtype) -> float | None:
        """Peak matrix-product rate for a dtype, if the machine file states one."""
        return self.matrix_flops.get(str(dtype).removeprefix("torch."))


def machines() -> list[str]:
    """Names that ``load`` knows."""
    folder = resources.files("attnworks") / "machines"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


@cache
def load(name: str) -> Hardware:
    """The machine described in ``machines/<name>.toml``. Raises ``ValueError`` for an unknown name."""
    if name not in machines():
        raise ValueError(f"machine: was {name!r}, must be one of {machines()}")
    # Here, since most programs never load a machine's file and all of them import this one.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    facts: dict[str, Any] = tomllib.loads((resources.files("attnworks") / "machines" / f"{name}.toml").read_text())
    for name in ("isas", "matrix_shapes"):
        facts[name] = tuple(facts.get(name, ()))
    return Hardware(**facts)


@cache
def detect(device: str = "cpu") -> Hardware:
    """Facts of the machine at hand, as far as it tells them; rates and bandwidth are left to be measured."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Hardware(
            name=properties.name,
            kind="gpu",
            units=properties.multi_processor_count,
            on_chip_bytes=getattr(properties, "shared_memory_per_multiprocessor", None),
            shared_cache_bytes=getattr(properties, "L2_cache_size", None),
            capability=f"{properties.major}.{properties.minor}",
            # Where torch is built for CUDA the same property holds the card's name.
            arch=properties.gcnArchName.split(":")[0] if torch.version.hip else None,
            block_bytes=getattr(properties, "shared_memory_per_block_optin", None),
            unit_registers=getattr(properties, "regs_per_multiprocessor", None),
            unit_warps=properties.max_threads_per_multi_processor // properties.warp_size,
            warp_size=properties.warp_size,
            sources={"all": "CUDA device properties"},
        )
    caches = _cpu_caches()
    return Hardware(
        name=_cpu_name(),
        kind="cpu",
        units=os.cpu_count() or 1,
        on_chip_bytes=caches.get(2),
        shared_cache_bytes=caches.get(3),
        capability=torch.backends.cpu.get_cpu_capability(),
        sources={"caches": "/sys/devices/system/cpu", "name": "/proc/cpuinfo"},
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def _cpu_caches() -> dict[int, int]:
    """Bytes of each data or unified cache level of the first core, where the kernel tells."""
    sizes: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            size = (index / "size").read_text().strip()
            sizes[int((index / "level").read_text())] = int(size.rstrip("K")) * (1024 if size.endswith("K") else 1)
        except (OSError, ValueError):
            continue
    return sizes
