"""``attnworks devices``: the machine at hand, as kernels see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import torch
from rich.markup import escape

from attnworks import hardware
from attnworks.backends import Backend, cuda, triton
from attnworks.hardware import Hardware
from attnworks.workbench import ceilings, environment
from attnworks.workbench.cli.output import UNKNOWN, in_bytes, in_rate, json_option, print_json, print_table, table
from attnworks.workbench.providers import describe

GPU_BACKENDS: tuple[Backend, ...] = (cuda, triton)


@click.command()
@click.option("--measure", is_flag=True, help="Also measure read bandwidth and multiply-adds per second.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to measure with.  [default: torch's]")
@json_option
def devices(measure: bool, threads: int | None, as_json: bool) -> None:
    """CPU, caches, instruction sets, GPUs; with --measure the ceilings that kernels are held against."""
    found = _describe()
    if measure:
        found["ceilings"] = _measure(threads or torch.get_num_threads())
    if as_json:
        print_json(found)
    else:
        _print(found)


def _describe() -> dict[str, Any]:
    native = ceilings.native()
    return {
        "cpu": environment.machine()
        | {
            "isas_compiled": list(native.compiled_isas()) if native else [],
            "native_extension": "built" if native else "not built",
            "torch_threads": torch.get_num_threads(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "triton": _refusals(triton, "cpu", hardware.detect("cpu")),
        "versions": environment.versions(),
        "machine_files": hardware.machines(),
    }


def _gpu(index: int) -> dict[str, Any]:
    found = hardware.detect(f"cuda:{index}")
    return {
        "name": found.name,
        "units": found.units,
        "capability": found.capability,
        "on_chip_bytes": found.on_chip_bytes,
        "shared_cache_bytes": found.shared_cache_bytes,
        **{backend.NAME: _refusals(backend, f"cuda:{index}", found) for backend in GPU_BACKENDS},
    }


def _refusals(backend: Backend, device: str, hardware: Hardware) -> list[str]:
    """Why a backend does not run an ordinary bf16 problem on a device; nothing if it does."""
    problem = describe(
        form="dense", batch=1, heads_q=8, heads_kv=8, seq_q=1024, seq_kv=1024, head_dim=64, head_dim_v=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return list(backend.verdict(replace(problem, device=device), hardware).reasons)


def _measure(threads: int) -> dict[str, Any] | None:
    found = ceilings.measure(threads)
    if found is None:
        return None
    return {
        "threads": threads,
        "read_bytes_per_second": found.read_bytes_per_second,
        "flops_per_second": found.flops_per_second,
    }


def _print(found: dict[str, Any]) -> None:
    processor = found["cpu"]
    made = table("", "", text_columns=2)
    rows = {
        "CPU": processor["name"],
        "cores": f"{processor['units']}, torch uses {processor['torch_threads']} threads",
        "caches": f"L2 {in_bytes(processor['on_chip_bytes'])} a core, L3 {in_bytes(processor['shared_cache_bytes'])}",
        "kernels run": ", ".join(processor["isas"]) or UNKNOWN,
        "kernels compiled": ", ".join(processor["isas_compiled"]) or UNKNOWN,
        "native extension": processor["native_extension"],
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "known machines": ", ".join(found["machine_files"]),
    }
    for index, gpu in enumerate(found["gpus"]):
        rows[f"GPU {index}"] = f"{gpu['name']}, {gpu['units']} multiprocessors, compute capability {gpu['capability']}"
        for backend in GPU_BACKENDS:
            rows[f"{backend.NAME} on GPU {index}"] = "; ".join(gpu[backend.NAME]) or "runs"
    if not found["gpus"]:
        rows["triton"] = "; ".join(["PyTorch finds no GPU", *found["triton"]])
    if "ceilings" in found:
        rows |= _ceiling_rows(found["ceilings"])
    for name, value in rows.items():
        made.add_row(name, escape(str(value)))
    print_table("This machine", made)


def _ceiling_rows(measured: dict[str, Any] | None) -> dict[str, str]:
    if measured is None:
        return {"ceilings": "cannot be measured: the native extension is not built"}
    threads = f"with {measured['threads']} threads"
    rates = ", ".join(f"{name} {in_rate(rate, 'FLOP/s')}" for name, rate in measured["flops_per_second"].items())
    read = in_rate(measured["read_bytes_per_second"], "B/s")
    return {"read": f"{read} {threads}", "multiply-adds": f"{rates} {threads}"}
