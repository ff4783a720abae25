"""The bars of the CUDA backend on a Hopper GPU: against cuDNN, and against FlashAttention-3 and -4 where they are
installed.

    python benchmarks/hopper.py                         about 3 minutes on an H200
    python benchmarks/hopper.py --section forward --head-dims 128 --lengths 1024 4096 --rounds 15
    python benchmarks/hopper.py --markdown docs/results/hopper.md --json > rows.json

bf16, 16k tokens, heads · head_dim = 2048, unless a row says otherwise; measured as gpu.py measures. A plain matrix
product of the same run stands beside the rates: what the card gives at best under its power limit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import gpu
from attnworks import Causal, Plan, Window, attention, attention_varlen, explain
from attnworks.backends.cuda import plans
from attnworks.workbench import statistics
from attnworks.workbench.device_time import Run
from gpu import (
    FIRST_CALL,
    TOKENS,
    WIDTH,
    host_microseconds,
    inputs,
    introduction,
    measure,
    products,
    right,
    sdpa,
)
from rows import Row, show

CALLS = gpu.CALLS | {
    "attnworks": 'attention(q, k, v, mask=..., backend="cuda")',
    "attnworks, triton": 'attention(q, k, v, mask=..., backend="triton")',
    "FA3": "flash_attn_interface.flash_attn_func(q, k, v, causal=..., window_size=...), packed flash_attn_varlen_func",
    "FA4": "flash_attn.cute.flash_attn_func(q, k, v, causal=..., window_size=...)",
    "32 KV heads": "the same call, each KV head repeated four times beforehand",
    "whole tiles": 'attention(q, k, v, plan=...), the same tiles with schedule "q_outer"',
}
rows_of = partial(gpu.rows_of, calls=CALLS)
HEAD_DIMS = (128, 64, 256)
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
PEERS = ("cuDNN", "FA3", "FA4")
HOST_BAR, COMPILE_BAR, CACHED_BAR = 12.0, 2.5, 0.05  # microseconds, seconds, seconds
PER_FLOP, PER_FLOP_BAR = "dense at N=4096, as many FLOPs", 0.97  # of the dense rate
PER_TILE = "dense at N=4096, as many whole tiles"
WINDOW = 1024
WAVES = ((17, 1024, 4096), (9, 2048, 2048), (34, 512, 8192))  # heads, rows, keys: 136 to 144 tiles of 128 rows
PRODUCT = 8192  # rows and columns of the matrix product
SECTIONS = ("forward", "shapes", "host", "compile")


def bar(head_dim: int, causal: bool, length: int) -> float:
    """How many times as fast as the best peer the backend is meant to be."""
    if head_dim == 128:
        return 1.0 if causal else 1.03
    if head_dim == 64:
        return 1.02 if causal else 1.0 if length <= 1024 else 1.05
    return 1.0


def flash_attention(name: str = "flash_attn_func") -> dict[str, Callable[..., Any]]:
    """A function of FlashAttention-3's and -4's packages, where they can be imported."""
    found: dict[str, Callable[..., Any]] = {}
    for peer, module in (("FA3", "flash_attn_interface"), ("FA3", "fa3_fwd_interface"), ("FA4", "flash_attn.cute")):
        with suppress(ImportError, AttributeError):
            found.setdefault(peer, getattr(importlib.import_module(module), name))
    return found


def able(tried: dict[str, Run]) -> dict[str, Run]:
    """Those that do the problem at all, and right."""
    return right({name: run for name, run in tried.items() if _runs(name, run)})


def _runs(name: str, run: Run) -> bool:
    try:
        run()
    except Exception as error:  # whatever another library raises
        print(f"{name}: not timed, {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return False
    return True


def as_dense(function: Callable[..., Any], tensors: tuple[Tensor, ...], **options: Any) -> Run:
    """Their layout is (batch, rows, heads, dim)."""
    given = [x.transpose(1, 2).contiguous() for x in tensors]
    only_out = _first(lambda: function(*given, **options))
    return lambda: only_out().transpose(1, 2)


def _first(run: Run) -> Run:
    """Their functions may give the LSE too."""

    def first() -> Any:
        found = run()
        return found[0] if isinstance(found, tuple) else found

    return first


def matrix_product_rate(rounds: int) -> float:
    """FLOP/s of a product of bf16 matrices."""
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * PRODUCT**3 / statistics.median(measure({"product": lambda: a @ b}, rounds)["product"]) * 1e3


# ---- sections --------------------------------------------------------------------------------------------------------


def forward_rows(head_dims: list[int], lengths: list[int], rounds: int, without: list[str]) -> Iterator[Row]:
    rate = matrix_product_rate(rounds)
    detail = f"{rate / 1e12:.0f} TFLOP/s, {PRODUCT} x {PRODUCT} x {PRODUCT}"
    yield Row("Forward", "matrix product", "", "", "", None, detail)
    for head_dim in head_dims:
        for causal in (False, True):
            for length in lengths:
                q, k, v = inputs(head_dim, length)
                yield from _forward_of(q, k, v, f"D={head_dim}", causal, rounds, without)
    for causal in (False, True):
        for length in lengths[1::2]:
            shape = (TOKENS // length, WIDTH // 128, length)
            q, k, v = (torch.randn(*shape, d, dtype=torch.bfloat16, device="cuda") for d in (192, 192, 128))
            yield from _forward_of(q, k, v, "D=192/128", causal, rounds, without)


def _forward_of(
    q: Tensor, k: Tensor, v: Tensor, name: str, causal: bool, rounds: int, without: list[str]
) -> Iterator[Row]:
    mask, length = Causal() if causal else None, q.shape[2]
    tried: dict[str, Run] = {
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "attnworks": lambda: attention(q, k, v, mask=mask, backend="cuda"),
        "attnworks, triton": lambda: attention(q, k, v, mask=mask, backend="triton"),
        **{peer: as_dense(function, (q, k, v), causal=causal) for peer, function in flash_attention().items()},
    }
    times = measure(able({name: run for name, run in tried.items() if name not in without}), rounds)
    table = q.shape[3] == v.shape[3]  # of unequal head dims there is a table and no bar
    bars = dict.fromkeys(PEERS, bar(q.shape[3], causal, length)) if table else {}
    flops = products(q, causal) * (q.shape[3] + v.shape[3]) / (2 * q.shape[3])
    yield from rows_of("Forward", f"{name} N={length} {'causal' if causal else 'full'}", times, bars, flops)


def shape_rows(rounds: int) -> Iterator[Row]:
    """Packed sequences and grouped heads beside dense attention, per FLOP; a window beside the peers'; problems of
    little more than one wave of tiles."""
    yield from _packed_rows(rounds)
    yield from _wave_rows(rounds)
    length, heads = 4096, 32
    batch = TOKENS // length
    q, k, v = (torch.randn(batch, h, length, 128, dtype=torch.bfloat16, device="cuda") for h in (heads, 8, 8))
    wide = [x.repeat_interleave(4, 1) for x in (k, v)]
    for causal in (False, True):
        mask = Causal() if causal else None
        runs: dict[str, Run] = {
            "attnworks": lambda mask=mask: attention(q, k, v, mask=mask, backend="cuda"),
            "32 KV heads": lambda mask=mask: attention(q, *wide, mask=mask, backend="cuda"),
        }
        name = f"32 heads on 8, N={length} {'causal' if causal else 'full'}"
        times = measure(right(runs), rounds)
        yield from rows_of("Shapes", name, times, {"32 KV heads": PER_FLOP_BAR}, products(q, causal))
    q, k, v = inputs(128, TOKENS)
    window = (WINDOW - 1, 0)
    runs = {
        "attnworks": lambda: attention(q, k, v, mask=Window(*window), backend="cuda"),
        "attnworks, triton": lambda: attention(q, k, v, mask=Window(*window), backend="triton"),
        **{peer: as_dense(f, (q, k, v), causal=True, window_size=window) for peer, f in flash_attention().items()},
    }
    pairs = TOKENS * WINDOW - WINDOW * (WINDOW - 1) // 2
    times = measure(able(runs), rounds)
    name = f"window of {WINDOW}, N={TOKENS}, D=128"
    yield from rows_of("Shapes", name, times, dict.fromkeys(PEERS, 1.0), 4 * q.shape[1] * 128 * pairs)


def _wave_rows(rounds: int) -> Iterator[Row]:
    """Beside the peers, and beside the same kernel where each tile of rows is one thread block's ("q_outer")."""
    for heads, rows, keys in WAVES:
        q, k, v = (torch.randn(1, heads, n, 128, dtype=torch.bfloat16, device="cuda") for n in (rows, keys, keys))
        whole = replace(explain(q, k, v, backend="cuda").plan, schedule="q_outer")
        runs: dict[str, Run] = {
            "attnworks": lambda q=q, k=k, v=v: attention(q, k, v, backend="cuda"),
            "whole tiles": lambda q=q, k=k, v=v, whole=whole: attention(q, k, v, plan=whole),
            "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, False),
            **{peer: as_dense(function, (q, k, v)) for peer, function in flash_attention().items()},
        }
        times = measure(able(runs), rounds)
        name = f"{heads} heads of {rows} on {keys} keys, D=128 full"
        yield from rows_of("Shapes", name, times, {}, 4 * heads * rows * keys * 128)


def _packed_rows(rounds: int) -> Iterator[Row]:
    """Lengths of 128 to 8k, 64k tokens in all; the dense problem of as many FLOPs has sequences of one length."""
    drawn = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < 4 * TOKENS:
        lengths.append(min(round(2 ** drawn.uniform(7, 13)), 4 * TOKENS - sum(lengths)))
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    heads = WIDTH // 128
    q, k, v = (torch.randn(4 * TOKENS, heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    longest = max(lengths)
    given = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    dense = inputs(128, 4096)
    for causal in (False, True):
        mask = Causal() if causal else None
        runs: dict[str, Run] = {
            "attnworks": lambda mask=mask: attention_varlen(
                q,
                k,
                v,
                cu_seqlens_q=cu,
                cu_seqlens_kv=cu,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                mask=mask,
                backend="cuda",
            )
        }
        for peer, function in flash_attention("flash_attn_varlen_func").items():
            if peer == "FA3":
                ends = cu.int()
                runs[peer] = lambda f=function, ends=ends, causal=causal: f(q, k, v, ends, ends, causal=causal, **given)
        flops = sum(4 * heads * 128 * (n * (n + 1) / 2 if causal else n * n) for n in lengths)
        runs[PER_FLOP] = lambda mask=mask: attention(*dense, mask=mask, backend="cuda")
        times = measure({name: _first(run) for name, run in runs.items()}, rounds)
        found = explain(*dense, mask=mask, backend="cuda")
        packed = plans.plan_for(replace(found.problem, form="varlen", seq_q=longest, seq_kv=longest))
        tiles = sum(_pairs_of_tiles(n, packed, causal) for n in lengths) * heads
        dense_tiles = _pairs_of_tiles(4096, found.plan, causal) * dense[0].shape[0] * dense[0].shape[1]
        times[PER_TILE] = [taken * tiles / dense_tiles for taken in times[PER_FLOP]]
        times[PER_FLOP] = [taken * flops / products(dense[0], causal) for taken in times[PER_FLOP]]
        name = f"{len(lengths)} packed sequences of {min(lengths)} to {longest} {'causal' if causal else 'full'}"
        yield from rows_of("Shapes", name, times, {PER_FLOP: PER_FLOP_BAR}, flops)


def _pairs_of_tiles(length: int, plan: Plan, causal: bool) -> int:
    """Of a query and a key, in the tiles that a sequence visits: also of rows that it has not, and of hidden keys."""
    ends = (min(begin + plan.tile_q, length) if causal else length for begin in range(0, length, plan.tile_q))
    return sum(-(-end // plan.tile_kv) * plan.tile_kv for end in ends) * plan.tile_q


def host_rows() -> Iterator[Row]:
    tensors = [torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(9)]
    runs: dict[str, Callable[[int], Any]] = {
        "the same tensors": lambda _: attention(*tensors[:3], backend="cuda"),
        "other tensors each call": lambda i: attention(*(tensors[(i + j) % 9] for j in range(3)), backend="cuda"),
        "with LSE": lambda _: attention(*tensors[:3], return_lse=True, backend="cuda"),
        "SDPA": lambda _: F.scaled_dot_product_attention(*tensors[:3]),
    }
    for name, taken in host_microseconds(runs).items():
        held = None if name == "SDPA" else taken <= HOST_BAR
        yield Row("Host time", name, "", f"{taken:.1f} us", f"<= {HOST_BAR} us", held)


def compile_rows() -> Iterator[Row]:
    """The first call of a process, with nothing kept of the kernel, and with what the process before left. NVRTC keeps
    what it compiled in the driver's cache, which is turned off. Python's byte code is there, as an installed package
    has it: a source tree that it is not kept for takes twice as long."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", Path(plans.__file__).parents[2]], check=True)
    script = FIRST_CALL.replace("mask=Causal()", 'mask=Causal(), backend="cuda"')
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"XDG_CACHE_HOME": folder, "CUDA_CACHE_DISABLE": "1"}
        bars = {"nothing cached": COMPILE_BAR, "cached by the process before": CACHED_BAR}
        for name, limit in bars.items():
            ran = subprocess.run(
                [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
            )
            seconds = float(ran.stdout.split()[-1])
            yield Row("First call", name, "", f"{seconds:.3f} s", f"<= {limit} s", seconds <= limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="competitors to leave out of forward")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; tables go to stderr")
    chosen = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("needs a Hopper GPU that torch sees")
    warnings.filterwarnings("ignore", module="torch")
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "forward": lambda: forward_rows(chosen.head_dims, chosen.lengths, chosen.rounds, chosen.without),
        "shapes": lambda: shape_rows(chosen.rounds),
        "host": host_rows,
        "compile": compile_rows,
    }
    title = f"The CUDA backend's bars, {time.strftime('%Y-%m-%d')}"
    about = introduction("hopper")
    show(sections, chosen.section, as_json=chosen.json, path=chosen.markdown, title=title, introduction=about)


if __name__ == "__main__":
    main()
