"""The GPU bars: the Triton backend against cuDNN, FlashAttention-2, FlexAttention and standard attention. The CUDA
backend's are in hopper.py.

    python benchmarks/gpu.py                            about 9 minutes on an H200
    python benchmarks/gpu.py --section forward backward --lengths 4096 16384
    python benchmarks/gpu.py --markdown docs/results/gpu.md --json > rows.json

bf16, 16k tokens, heads · head_dim = 2048. Every round runs every competitor once, in an order drawn anew, the L2
flushed before each; device time, of replays of a CUDA graph (backward: of launches enqueued while the device
sleeps), so that no competitor waits for its host. FlexAttention is compiled with max-autotune for each shape.
Nobody is timed whose result is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnworks import Causal, Window, attention, attention_decode, masks, tilemap
from attnworks.plan import Plan
from attnworks.workbench import environment, statistics
from attnworks.workbench.device_time import Clock, Run
from rows import Row, show

TOKENS, WIDTH = 16384, 2048
HEAD_DIMS = (128, 64)
FORWARD_BARS = {"FA2": 1.2, "FlexAttention": 1.15}
BACKWARD_BARS = {"FA2": 1.1, "FlexAttention": 1.1}
MASK_BAR = 1.15
FOLLOWS_BAR = 0.15  # how far the time may lie from visible share x full time
HOST_BAR, COMPILE_BAR = 25.0, 4.0  # microseconds, seconds
DOCUMENTS, BATCH = "16 documents", "the documents as a batch, no mask"
FULL, FULL_FLEX = "full attention", "full attention, FlexAttention"
SECTIONS = ("forward", "backward", "masks", "decode", "host", "compile")

compiled_flex = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(competitors: dict[str, Run], rounds: int, *, graphs: bool = True) -> dict[str, list[float]]:
    """Device milliseconds of each competitor, one for each round."""
    found = Clock().interleaved(competitors, rounds, graphs=graphs)
    return {name: [1e3 * each for each in times] for name, times in found.items()}


_SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=...) under sdpa_kernel"
CALLS = {
    "attnworks": 'attention(q, k, v, mask=..., backend="triton")',
    "FA2": f"{_SDPA}(FLASH_ATTENTION)",
    "cuDNN": f"{_SDPA}(CUDNN_ATTENTION)",
    "FlexAttention": 'torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")(q, k, v, block_mask=...)',
    "Triton tutorial's tiles (128 x 64)": 'attention(q, k, v, mask=..., plan=Plan("triton", "q_outer", 128, 64, ...))',
    "standard attention": "(q @ k.mT / sqrt(d)).masked_fill(hidden, -inf).softmax(-1) @ v",
}


def rows_of(
    section: str,
    problem: str,
    times: dict[str, list[float]],
    bars: dict[str, float],
    flops: float,
    calls: dict[str, str] = CALLS,
) -> Iterator[Row]:
    own = times["attnworks"]
    rate = f"{flops / statistics.median(own) / 1e9:.0f} TFLOP/s, {statistics.median(own):.3f} ms"
    for name, other in times.items():
        if name == "attnworks":
            continue
        found = statistics.ratio(own, other, paired=True)
        bar = bars.get(name)
        held = None if bar is None else found.value >= bar
        theirs = f"{name} {statistics.median(other):.3f} ms"
        called = tuple(f"{each}: {calls[each]}" for each in ("attnworks", name) if each in calls)
        yield Row(section, problem, name, str(found), f">= {bar}" if bar else "", held, f"{rate}; {theirs}", called)


def close(got: Tensor, want: Tensor) -> bool:
    """Whether bf16 results agree as far as bf16 lets them."""
    return float((got.float() - want.float()).norm() / want.float().norm()) < 1e-2


def right(competitors: dict[str, Run]) -> dict[str, Run]:
    """Those whose results agree with FlashAttention-2's, or the first one's where that is not among them."""
    results = {name: run() for name, run in competitors.items()}
    first = results.get("FA2", next(iter(results.values())))
    kept = {}
    for name, found in results.items():
        pairs = zip(found, first, strict=True) if isinstance(found, tuple) else [(found, first)]
        if all(close(a, b) for a, b in pairs):
            kept[name] = competitors[name]
        else:
            print(f"{name}: its result is wrong, it is not timed", file=sys.stderr)
    return kept


# ---- competitors -----------------------------------------------------------------------------------------------------


def inputs(head_dim: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (TOKENS // length, WIDTH // head_dim, length, head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    return q, k, v


def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run:
    def run() -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").triu(1) if causal else None

    def run() -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1) @ v

    return run


def causal_predicate(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def forwards(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Run]:
    length = q.shape[2]
    mask = Causal() if causal else None
    block_mask = create_block_mask(causal_predicate, None, None, length, length, device="cuda") if causal else None
    tutorial = Plan("triton", "q_outer", 128, 64, warps=8, stages=3)
    found: dict[str, Run] = {
        "attnworks": lambda: attention(q, k, v, mask=mask, backend="triton"),
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "FlexAttention": lambda: compiled_flex(q, k, v, block_mask=block_mask),
        "Triton tutorial's tiles (128 x 64)": lambda: attention(q, k, v, mask=mask, plan=tutorial),
    }
    if length <= 4096:
        found["standard attention"] = standard(q, k, v, causal)
    return found


def products(q: Tensor, causal: bool, *, backward: bool = False) -> float:
    """FLOPs of the visible pairs' matrix products."""
    batch, heads, length, dim = q.shape
    pairs = length * (length + 1) / 2 if causal else length * length
    return batch * heads * pairs * dim * (10 if backward else 4)


# ---- sections --------------------------------------------------------------------------------------------------------


def forward_rows(head_dims: list[int], lengths: list[int], rounds: int, without: list[str]) -> Iterator[Row]:
    for head_dim in head_dims:
        for causal in (False, True):
            for length in lengths:
                torch.compiler.reset()
                q, k, v = inputs(head_dim, length)
                tried = {name: run for name, run in forwards(q, k, v, causal).items() if name not in without}
                times = measure(right(tried), rounds)
                problem = f"D={head_dim} N={length} {'causal' if causal else 'full'}"
                yield from rows_of("Forward", problem, times, FORWARD_BARS, products(q, causal))


def backward_rows(head_dims: list[int], lengths: list[int], rounds: int, without: list[str]) -> Iterator[Row]:
    for head_dim in head_dims:
        for causal in (False, True):
            for length in lengths:
                torch.compiler.reset()
                q, k, v = (x.requires_grad_() for x in inputs(head_dim, length))
                d_out = torch.randn_like(q)
                tried = forwards(q, k, v, causal)
                names = [name for name in ("attnworks", "FA2", "cuDNN", "FlexAttention") if name not in without]
                outs = {name: tried[name]() for name in names}
                leaves = (q, k, v)

                def backward(out: Tensor, leaves: tuple[Tensor, ...] = leaves, d_out: Tensor = d_out) -> Any:
                    return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

                runs = {name: (lambda out=out: backward(out)) for name, out in outs.items()}
                times = measure(right(runs), rounds, graphs=False)
                problem = f"D={head_dim} N={length} {'causal' if causal else 'full'}"
                flops = products(q, causal, backward=True)
                yield from rows_of("Backward", problem, times, BACKWARD_BARS, flops)


def mask_rows(rounds: int) -> Iterator[Row]:
    """A window, documents and a user's mask at 16k, D=128: ratio to FlexAttention, and whether the time follows the
    visible tiles of full attention's, which takes turns with them. The documents also as a batch of sequences without a
    mask, which shows what of their time is the mask's and what is that of short loops, and FlexAttention's beside its
    own full attention."""
    length, head_dim, documents = TOKENS, 128, 16
    document = torch.arange(length, device="cuda") // (length // documents)
    window = 1024

    def of_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return document[i] == document[j]

    def in_window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < window)

    def prefix_and_strided(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j < 512) | ((i >= j) & (i - j < 256)) | ((i >= j) & (j // 64 % 8 == 7))

    q, k, v = inputs(head_dim, length)
    alone = [x[0].unflatten(1, (documents, -1)).transpose(0, 1) for x in (q, k, v)]
    tried = (
        ("user's mask (prefix, local, strided blocks)", prefix_and_strided, prefix_and_strided),
        (DOCUMENTS, of_document, of_document),
        ("window of 1k", Window(window - 1, 0), in_window),
    )
    for name, mask, predicate in tried:
        torch.compiler.reset()
        block_mask = create_block_mask(predicate, None, None, length, length, device="cuda")
        runs: dict[str, Run] = {
            "attnworks": lambda mask=mask: attention(q, k, v, mask=mask, backend="triton"),
            "FlexAttention": lambda block_mask=block_mask: compiled_flex(q, k, v, block_mask=block_mask),
        }
        kept = right(runs)
        if name == DOCUMENTS:
            kept[BATCH] = lambda: attention(*alone, backend="triton")
            if not close(kept[BATCH]().transpose(0, 1).flatten(1, 2), kept["attnworks"]()[0]):
                raise RuntimeError(f"{BATCH}: its result is not that of the documents")
            kept[FULL_FLEX] = lambda: compiled_flex(q, k, v)
        times = measure(kept | {FULL: lambda: attention(q, k, v, backend="triton")}, rounds)
        fulls = dict.fromkeys(("attnworks", BATCH), statistics.median(times.pop(FULL)))
        if FULL_FLEX in times:
            fulls["FlexAttention"] = statistics.median(times.pop(FULL_FLEX))
        spec, operands = masks.split(mask)
        found = tilemap.build(
            spec, operands, batch=1, heads=1, seq_q=length, seq_kv=length, tile_q=64, tile_kv=64, device="cuda"
        )
        yield from rows_of("Masks", name, times, {"FlexAttention": MASK_BAR}, products(q, False) * found.visible_share)
        share = (found.partial_tiles + found.full_tiles) / (found.tiles_q * found.tiles_kv)
        for timed, full in fulls.items():
            if timed not in times:
                continue
            own = statistics.median(times[timed])
            off = own / (share * full) - 1
            detail = f"{share:.1%} of the tiles (64 x 64) visible, full {full:.3f} ms, this {own:.3f} ms"
            ours = timed == "attnworks"
            bar, held = (f"within {FOLLOWS_BAR:.0%}", abs(off) <= FOLLOWS_BAR) if ours else ("", None)
            problem = {"attnworks": name, BATCH: BATCH}.get(timed, f"{name}, {timed}")
            yield Row("Masks", problem, "visible tiles x full time", f"{off:+.0%}", bar, held, detail)


def decode_rows(rounds: int) -> Iterator[Row]:
    """One query for each sequence, 32 query and 8 KV heads, D=128, beside SDPA's two kernels for grouped heads. No bar;
    with it at how many GB/s the caches are read."""
    for batch, length in ((1, 16384), (8, 4096), (8, 16384), (64, 4096)):
        q = torch.randn(batch, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(batch, length, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]

        def by(kind: SDPBackend, given: list[Tensor] = heads_first) -> Run:
            def run() -> Tensor:
                with sdpa_kernel(kind):
                    return F.scaled_dot_product_attention(*given, enable_gqa=True).transpose(1, 2)

            return run

        tried: dict[str, Run] = {
            "attnworks": lambda q=q, k=k, v=v, lens=lens: attention_decode(q, k, v, kv_lens=lens, backend="triton"),
            "FA2": by(SDPBackend.FLASH_ATTENTION),
            "cuDNN": by(SDPBackend.CUDNN_ATTENTION),
        }
        times = measure(right(tried), rounds)
        own = times["attnworks"]
        speed = (k.nbytes + v.nbytes) / statistics.median(own) / 1e6
        for name in [name for name in times if name != "attnworks"]:
            found = statistics.ratio(own, times[name], paired=True)
            detail = (
                f"{speed:.0f} GB/s, {statistics.median(own):.4f} ms; {name} {statistics.median(times[name]):.4f} ms"
            )
            called = (
                'attnworks: attention_decode(q, k, v, kv_lens=lens, backend="triton")',
                f"{name}: {CALLS[name]}, enable_gqa=True in the place of is_causal",
            )
            yield Row("Decode", f"batch {batch}, {length} keys, heads 32/8", name, str(found), "", None, detail, called)


def host_microseconds(runs: dict[str, Callable[[int], Any]], laps: int = 100, calls: int = 100) -> dict[str, float]:
    """Of a call of each, which is given its number: the median of laps that take turns, as a machine's processors may
    be twice as fast a second later."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(laps):
        for name, run in random.sample(list(runs.items()), len(runs)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(calls):
                run(i)
            taken[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(found) for name, found in taken.items()}


def host_rows() -> Iterator[Row]:
    """Host time of an eager call whose device work is too little to wait for."""
    q, k, v = (torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    runs: dict[str, Callable[[int], Any]] = {
        "attention": lambda _: attention(q, k, v, backend="triton"),
        "attention, backend auto, causal": lambda _: attention(q, k, v, mask=Causal()),
        "SDPA": lambda _: F.scaled_dot_product_attention(q, k, v),
    }
    for name, taken in host_microseconds(runs).items():
        held = None if name == "SDPA" else taken <= HOST_BAR
        yield Row("Host time", name, "", f"{taken:.1f} us", f"<= {HOST_BAR} us", held)


FIRST_CALL = """
import time, torch
from attnworks import attention, Causal
q = torch.randn(2, 4, 1024, 128, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize(); start = time.perf_counter()
attention(q, q, q, mask=Causal()); torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def compile_rows() -> Iterator[Row]:
    """The first call of a process, with Triton's cache empty and with what the process before left there."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"TRITON_CACHE_DIR": folder}
        for name, bar in (("first call, nothing cached", COMPILE_BAR), ("first call of the next process", COMPILE_BAR)):
            command = [sys.executable, "-c", FIRST_CALL]
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            seconds = float(ran.stdout.split()[-1])
            yield Row("First call", name, "", f"{seconds:.2f} s", f"<= {bar} s", seconds <= bar)


def introduction(script: str) -> str:
    """Of the tables that a script here writes."""
    return (
        f"{torch.cuda.get_device_name()}; {', '.join(f'{n} {v}' for n, v in environment.versions().items())}; "
        f"commit {environment.commit()}. Ratios are how many times as fast attnworks is: medians of interleaved "
        f"runs, with a 99 % interval; device times of CUDA graph replays (`benchmarks/{script}.py`)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--lengths", nargs="+", type=int, help="[default: 1024 4096 16384]")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="competitors to leave out of the first two"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; tables go to stderr")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch sees")
    warnings.filterwarnings("ignore", module="torch")
    lengths = chosen.lengths or [1024, 4096, 16384]
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "forward": lambda: forward_rows(chosen.head_dims, lengths, chosen.rounds, chosen.without),
        "backward": lambda: backward_rows(chosen.head_dims, lengths, chosen.rounds, chosen.without),
        "masks": lambda: mask_rows(chosen.rounds),
        "decode": lambda: decode_rows(chosen.rounds),
        "host": host_rows,
        "compile": compile_rows,
    }
    title = f"GPU bars, {time.strftime('%Y-%m-%d')}"
    about = introduction("gpu")
    show(sections, chosen.section, as_json=chosen.json, path=chosen.markdown, title=title, introduction=about)


if __name__ == "__main__":
    main()
