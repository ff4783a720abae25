"""The CPU bars: attnworks against torch's attention (and OpenVINO's, ONNX Runtime's) on the machine at hand.

    python benchmarks/cpu.py                          everything, about 20 minutes on 2 cores
    python benchmarks/cpu.py --quick                  fewer sizes and runs, about 2 minutes
    python benchmarks/cpu.py --section decode --dtype bfloat16
    python benchmarks/cpu.py --section scaling --threads 16
    python benchmarks/cpu.py --isa avx512_bf16 --dtype bfloat16
    python benchmarks/cpu.py --markdown docs/results/cpu.md --json > rows.json

Every row prints its bar and whether it holds. docs/benchmarking.md says how the numbers come about. From a source tree
set PYTHONPATH=src; beyond torch nothing is needed, except openvino, onnxruntime and onnx for the section "peers".
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import cpu_masks
import cpu_probes
import cpu_scaling
from attnworks import Causal, Window
from attnworks.backends import cpu
from attnworks.workbench import ceilings, environment
from attnworks.workbench.bench import Result, measure
from attnworks.workbench.providers import by_name, label
from cpu_rows import (
    DTYPES,
    MIB,
    Settings,
    away_from,
    backward_work,
    best,
    decode_problem,
    measure_gradients,
    measure_providers,
    prefill_problem,
    ratio_row,
)
from rows import Row, markdown, print_section

HEAD_DIMS = (64, 128)
LARGE_HEAD_DIM = 256  # backward in float32
LENGTHS = (1024, 2048, 4096, 8192)
CONTEXTS = (4096, 16384, 65536)
DECODE_HEADS = {"MHA 8/8": (8, 8), "GQA 32/8": (32, 8)}
MEMORY_LENGTHS = (4096, 8192, 16384, 32768)

PREFILL_BARS = {"float32": (1.15, 1.35), "bfloat16": (2.1, 2.5), "float16": (1.6, 1.9)}  # non-causal, causal
PEER_BARS = (1.0, 1.7)
WINDOW_BAR = 6.0
BACKWARD_BARS = {"float32": 1.4, "bfloat16": 1.7, "float16": 8.0}
TRAINING_BARS = {"float32": 1.5, "bfloat16": 2.0, "float16": None}  # forward and backward of a causal GQA layer
WINDOW_TRAINING_BAR = 5.0
DECODE_BARS = {
    ("MHA 8/8", "float32"): 1.7,
    ("MHA 8/8", "bfloat16"): 2.2,
    ("MHA 8/8", "float16"): 5.0,
    ("GQA 32/8", "float32"): 2.0,
    ("GQA 32/8", "bfloat16"): 2.2,
    ("GQA 32/8", "float16"): 7.0,
}
BANDWIDTH_BAR = 0.8
MEMORY_BAR = 64 * MIB
FLAT_BAR = 4 * MIB  # how much more at 32k than at 4k still counts as flat
OVERHEAD_BAR = 1.2
IMPORT_BAR = 0.1  # seconds
# What holds torch to older instructions, as --isa does attnworks: to those without AMX where both are set before it
# starts, ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and MKL_ENABLE_INSTRUCTIONS=AVX512_E3.
HOLDS_TORCH = "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
HELD_PRODUCT = 2048  # rows and columns of the product that shows whether they do


# ---- sections --------------------------------------------------------------------------------------------------------


def prefill(settings: Settings) -> Iterator[Row]:
    """Forward against SDPA."""
    for name, dtype, head_dim, causal, length in _grid(settings, settings.lengths):
        problem = prefill_problem(dtype, head_dim, length, Causal() if causal else None)
        result = measure_providers(problem, ("attnworks", "sdpa"), settings.protocol())
        bar = PREFILL_BARS[dtype][causal]
        yield ratio_row("prefill", name, result, "sdpa", bar, away_from(dtype))


def peers(settings: Settings) -> Iterator[Row]:
    """Forward against the other CPU implementations; the bar is for the best of them."""
    lengths = tuple(length for length in settings.lengths if length in (1024, 4096))
    for name, dtype, head_dim, causal, length in _grid(settings, lengths):
        problem = prefill_problem(dtype, head_dim, length, Causal() if causal else None)
        result = measure_providers(problem, ("attnworks", "openvino", "onnxruntime"), settings.protocol())
        fastest = best(result, ("openvino", "onnxruntime"))
        for peer in ("openvino", "onnxruntime"):
            away = "" if peer == fastest else "the bar is for the best peer"
            yield ratio_row("peers", name, result, peer, PEER_BARS[causal], away)


def window(settings: Settings) -> Iterator[Row]:
    """A window of 512 at the longest length, against SDPA's two ways to have one."""
    length = max(settings.lengths)
    for dtype in settings.dtypes:
        name = f"{dtype} window 512, D=64 N={length}"
        if not settings.wants(name):
            continue
        problem = prefill_problem(dtype, 64, length, Window(511, 0))
        result = measure_providers(problem, ("attnworks", "sdpa", "sdpa-causal"), settings.protocol())
        yield ratio_row("window", name, result, "sdpa", WINDOW_BAR, "the bar is for causal SDPA")
        yield ratio_row("window", name, result, "sdpa-causal", WINDOW_BAR)


def backward(settings: Settings) -> Iterator[Row]:
    """Gradients against SDPA's: the backward alone; forward and backward of a causal layer with grouped heads, and of a
    window of 512 at the longest length."""
    large = replace(settings, dtypes=("float32",) if "float32" in settings.dtypes else (), head_dims=(LARGE_HEAD_DIM,))
    grids = (_grid(chosen, settings.lengths) for chosen in (settings, large))
    for name, dtype, head_dim, causal, length in itertools.chain.from_iterable(grids):
        problem = prefill_problem(dtype, head_dim, length, Causal() if causal else None)
        result = measure_gradients(problem, ("attnworks", "sdpa"), settings.protocol(), forward=False)
        work = backward_work(problem)
        yield ratio_row("backward", name, result, "sdpa", BACKWARD_BARS[dtype], away_from(dtype), work=work)
    for dtype in settings.dtypes:
        for length in settings.lengths:
            name, bar = f"{dtype} causal GQA 8/2, D=128 N={length}, forward + backward", TRAINING_BARS[dtype]
            if not settings.wants(name):
                continue
            problem = prefill_problem(dtype, 128, length, Causal(), heads=8, heads_kv=2)
            result = measure_gradients(problem, ("attnworks", "sdpa"), settings.protocol(), forward=True)
            away = away_from(dtype) if bar else "no bar"
            yield ratio_row("backward", name, result, "sdpa", bar or 0.0, away, work=1 + backward_work(problem))
    for dtype in settings.dtypes:
        length = max(settings.lengths)
        name = f"{dtype} window 512, D=64 N={length}, forward + backward"
        if not settings.wants(name):
            continue
        problem = prefill_problem(dtype, 64, length, Window(511, 0))
        result = measure_gradients(problem, ("attnworks", "sdpa", "sdpa-causal"), settings.protocol(), forward=True)
        work = 1 + backward_work(problem)
        away = "the bar is for causal SDPA"
        yield ratio_row("backward", name, result, "sdpa", WINDOW_TRAINING_BAR, away, work=work)
        yield ratio_row("backward", name, result, "sdpa-causal", WINDOW_TRAINING_BAR, work=work)


def decode(settings: Settings) -> Iterator[Row]:
    """One query against a cache: the best of three ways in torch, which get a head-major cache, and the machine's read
    bandwidth. attnworks has its own layout (batch, capacity, heads, dim) and the head-major one."""
    owns, others = ("attnworks", "attnworks-head-major"), ("sdpa", "sdpa-grouped", "standard")
    for dtype in settings.dtypes:
        for heads, (heads_q, heads_kv) in DECODE_HEADS.items():
            for context in settings.contexts:
                name = f"{dtype} {heads}, D=128, context {context}"
                if not settings.wants(name):
                    continue
                problem = decode_problem(dtype, heads_q, heads_kv, context)
                result = measure_providers(problem, (*owns, *others), settings.protocol())
                fastest = best(result, others)
                for own, other in itertools.product(owns, others):
                    if other in result.refused:  # grouped rows where no heads are shared
                        continue
                    away = "" if other == fastest else "the bar is for torch's best"
                    yield ratio_row("decode", _stored(name, own), result, other, DECODE_BARS[heads, dtype], away, own)
                for own in owns:
                    yield _bandwidth_row(_stored(name, own), result, own)


def memory(settings: Settings) -> Iterator[Row]:
    """Peak extra memory of a forward, each in a process of its own."""
    for dtype in settings.dtypes:
        found = {length: _probe_memory("attnworks", length, dtype, settings) for length in settings.memory_lengths}
        growth = found[max(found)] - found[min(found)]
        for length, size in found.items():
            name = f"{dtype} forward, {cpu_probes.HEADS} heads, D={cpu_probes.HEAD_DIM}, N={length}"
            yield _memory_row(name, "attnworks", size, MEMORY_BAR)
        name = f"{dtype} growth from N={min(found)} to {max(found)}"
        yield _memory_row(name, "attnworks", growth, FLAT_BAR)
    for length in settings.memory_lengths:
        name = f"float32 forward, {cpu_probes.HEADS} heads, D={cpu_probes.HEAD_DIM}, N={length}"
        for other in ("sdpa", "standard"):
            if cpu_probes.fits(other, length):
                yield _memory_row(name, other, _probe_memory(other, length, "float32", settings), None)


def overhead(settings: Settings) -> Iterator[Row]:
    """A call with almost nothing to compute, caches warm, many calls timed as one."""
    problem = prefill_problem("float32", 64, 16, None, heads=1)
    providers = [cpu_probes.Repeated(by_name(name)) for name in ("attnworks", "sdpa")]
    result = measure(problem, providers, settings.protocol(flush=False, budget_seconds=2.0))
    own, other = result.records
    ratio = own.ratio_to(other)
    times = 1 / ratio.value
    each = [f"{record.median / cpu_probes.CALLS * 1e6:.1f} µs" for record in (own, other)]
    detail = f"{each[0]} against {each[1]} a call"
    value = f"{times:.2f} x its time"
    calls = tuple(f"{label(record.provider)}: {record.form}" for record in (own, other))
    passed = times <= OVERHEAD_BAR
    yield Row("overhead", "B1 H1 N16 D64", label("sdpa"), value, f"<= {OVERHEAD_BAR}", passed, detail, calls)


def import_time(settings: Settings) -> Iterator[Row]:
    """What importing attnworks adds to importing torch."""
    code = "import time, torch; t = time.perf_counter(); import attnworks; print(time.perf_counter() - t)"
    # An installed package has its bytecode. A source tree's is written by the first of these processes.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    runs = [float(subprocess.run(command, check=True, capture_output=True, env=env).stdout) for _ in range(7)]
    middle = sorted(runs)[len(runs) // 2]
    spread = f"7 processes, {min(runs) * 1e3:.0f} to {max(runs) * 1e3:.0f} ms"
    value, bar = f"{middle * 1e3:.0f} ms", f"< {IMPORT_BAR * 1e3:.0f} ms"
    yield Row("import", "import attnworks", "after import torch", value, bar, middle < IMPORT_BAR, spread)


SECTIONS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "prefill": prefill,
    "window": window,
    "backward": backward,
    "masks": cpu_masks.masks,
    "decode": decode,
    "memory": memory,
    "overhead": overhead,
    "import": import_time,
    "scaling": cpu_scaling.scaling,
    "peers": peers,
}


# ---- from results to rows --------------------------------------------------------------------------------------------


def _grid(settings: Settings, lengths: tuple[int, ...]) -> Iterator[tuple[str, str, int, bool, int]]:
    for dtype in settings.dtypes:
        for head_dim in settings.head_dims:
            for causal in (False, True):
                for length in lengths:
                    name = f"{dtype} {'causal' if causal else 'full'}, D={head_dim} N={length}"
                    if settings.wants(name):
                        yield name, dtype, head_dim, causal, length


def _stored(name: str, own: str) -> str:
    return name if own == "attnworks" else f"{name}, head-major"


def _bandwidth_row(name: str, result: Result, provider: str) -> Row:
    own = result.record(provider)
    bar = f">= {BANDWIDTH_BAR:.0%}"
    share = own.share_of_read_bandwidth if own else None
    if own is None or share is None:
        return Row("decode", name, "plain read", "-", bar, None, "no ceiling: the native extension is not built")
    rate = own.ceilings["read_bytes_per_second"] or 0.0
    detail = f"{share * rate / 1e9:.3g} of {rate / 1e9:.3g} GB/s"
    return Row("decode", name, "plain read", f"{share:.0%}", bar, share >= BANDWIDTH_BAR, detail)


def _probe_memory(provider: str, length: int, dtype: str, settings: Settings) -> int:
    script = Path(__file__).with_name("cpu_probes.py")
    command = [sys.executable, str(script), provider, str(length), dtype, str(settings.threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _memory_row(name: str, provider: str, size: int, bar: int | None) -> Row:
    passed = None if bar is None else size < bar
    text = "" if bar is None else f"< {bar // MIB} MiB"
    return Row("memory", name, label(provider), f"{size / MIB:.1f} MiB", text, passed)


# ---- the command -----------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="only these (default: all)")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="only these (default: all)")
    parser.add_argument("--length", action="append", type=int, choices=list(LENGTHS), help="only these prefill lengths")
    parser.add_argument(
        "--only", default="", help="only rows whose problem has this text in it (not: memory, tiny call)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of all sections; scaling: the most (default: 2)")
    parser.add_argument(
        "--isa", choices=cpu.isas(), help="as if this were the best instruction set here (not: memory). See HOLDS_TORCH"
    )
    parser.add_argument("--budget", type=float, help="seconds of timed runs for each problem (default: 2; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    parser.add_argument("--json", action="store_true", help="JSON on stdout, progress on stderr")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Settings:
    quick = arguments.quick
    return Settings(
        dtypes=tuple(arguments.dtype or DTYPES),
        lengths=tuple(arguments.length or ((1024, 4096) if quick else LENGTHS)),
        head_dims=HEAD_DIMS[:1] if quick else HEAD_DIMS,
        contexts=CONTEXTS[:2] if quick else CONTEXTS,
        memory_lengths=(MEMORY_LENGTHS[0], MEMORY_LENGTHS[-1]) if quick else MEMORY_LENGTHS,
        threads=arguments.threads,
        budget=arguments.budget or (1.0 if quick else 2.0),
        only=arguments.only,
    )


def _hold_to(isa: str) -> None:
    """From here on the backend, its plans, the ceilings and the tables know no better instruction set than ``isa``."""
    known = cpu.isas()
    cpu.isas = lambda: known[known.index(isa) :]


def _torch_products(settings: Settings) -> dict[str, float]:
    """How fast torch multiplies two large matrices of each dtype, the best of several, over the peak of the instruction
    set that attnworks is held to. More than 1 says that torch is not."""
    found = {}
    for name in settings.dtypes:
        a, b = (torch.randn(HELD_PRODUCT, HELD_PRODUCT).to(DTYPES[name]) for _ in range(2))
        rates, peaks = [], []
        for _ in range(5):
            started = time.perf_counter()
            a @ b
            rates.append(2 * HELD_PRODUCT**3 / (time.perf_counter() - started))
            peaks.append(ceilings.peak_flops(name, settings.threads) or math.nan)
        found[name] = round(max(rates) / max(peaks), 2)
    return found


def main() -> int:
    arguments = _arguments()
    if arguments.isa:
        _hold_to(arguments.isa)
    settings = _settings(arguments)
    torch.set_num_threads(settings.threads)
    header: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "commit": environment.commit(),
        "threads": settings.threads,
        "torch_held_by": {name: os.environ[name] for name in HOLDS_TORCH if name in os.environ},
        "torch_products": _torch_products(settings) if arguments.isa else {},
    }
    for name, share in header["torch_products"].items():
        print(f"torch multiplies {name} at {share:.0%} of the FMA peak of {cpu.isas()[0]}", file=sys.stderr)
    rows: list[Row] = []
    started = time.perf_counter()
    for name in arguments.section or SECTIONS:
        section = []
        for row in SECTIONS[name](settings):
            section.append(row)
            if arguments.markdown:  # so that a run that is cut short leaves what it found
                arguments.markdown.write_text(markdown([*rows, *section], *_title(header)), encoding="utf-8")
            print(f"\r\033[K{name}: {row.problem}: {row.value}", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr)
        rows += section
        if section and not arguments.json:
            print_section(section)
    header["seconds"] = round(time.perf_counter() - started)
    failed = sum(row.passed is False for row in rows)
    if arguments.json:
        print(json.dumps(header | {"rows": [asdict(row) for row in rows]}, indent=2))
    else:
        barred = sum(row.passed is not None for row in rows)
        native = "" if not ceilings.native_missing() else "; the native extension is not built"
        print(f"\n{barred - failed} of {barred} bars hold; {header['seconds']} s{native}")
    return 1 if failed else 0


def _title(header: dict[str, Any]) -> tuple[str, str]:
    machine = header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    held = "".join(f", torch with {name}={value}" for name, value in header["torch_held_by"].items())
    held += "".join(f", {name} products at {share:.0%} of FMA peak" for name, share in header["torch_products"].items())
    return f"CPU bars, {header['when']}", (
        f"{machine['name']}, {header['threads']} threads, kernels {machine['isas'][0] if machine['isas'] else 'none'}"
        f"{held}; {versions}; commit {header['commit']}. Ratios are how many times as fast attnworks is: medians of "
        "interleaved runs, with a 99 % interval (`benchmarks/cpu.py`, protocol in `docs/benchmarking.md`)."
    )


if __name__ == "__main__":
    sys.exit(main())
