"""A model end to end: transformers' "sdpa" against "attnworks" in a Llama of 297 M parameters, random weights, batch 1.

    python benchmarks/models.py                          everything; hours where torch's bf16 products are slow
    python benchmarks/models.py --section generate --dtype bfloat16 --context 8192
    python benchmarks/models.py --section prompt --dtype float32 --context 1024 --json > rows.json

"generate": one token after a cache of ``context`` keys, which is filled at random, as keys from a real prompt cost the
same. "prompt": a prompt of ``context`` tokens into an empty cache. Every round runs both implementations once, in an
order drawn anew, on the same model and the same cache, which is cut back after each step. Time within the attention
function is counted apart; the rest of a step (products with the weights, norms, the cache's growing) is the same for
both. Both must give the same logits within rounding, or the run ends. From a source tree set PYTHONPATH=src; needs
transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from attnworks.integrations.transformers import register
from attnworks.workbench import environment, statistics
from rows import Row, markdown, print_section

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
CACHES = ("dynamic", "static")
SECTIONS = ("generate", "prompt")
PAIR = ("attnworks", "sdpa")
LIMITS = {torch.bfloat16: 0.05, torch.float32: 1e-3}  # how far apart logits may lie, in norm, after 18 layers
BARS = {("generate", "dynamic", "bfloat16", 8192): 1.5}
ROOM = 8  # keys that a static cache has beyond the context
LONG = 10.0  # seconds; a step that takes so long loses nothing by being the first
# fmt: off
SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None,
}
# fmt: on


class Stopwatch:
    """Seconds spent in the attention functions since the last ``reset``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, name: str) -> str:
        """Register ``name`` anew with its time counted; the new name."""
        function, masks = AttentionInterface()[name], AttentionMaskInterface()[name]

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **options)
            self.seconds += time.perf_counter() - started
            return result

        AttentionInterface.register(f"{name}-timed", timed)
        AttentionMaskInterface.register(f"{name}-timed", masks)
        return f"{name}-timed"


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).to(dtype).eval()


def filled(model: Any, kind: str, context: int) -> Any:
    """A cache with ``context`` keys and values, at random."""
    config = model.config
    cache = hf.DynamicCache(config=config) if kind == "dynamic" else hf.StaticCache(config, context + ROOM)
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        cache.update(*(torch.randn(shape, dtype=model.dtype) for _ in range(2)), layer)
    return cache


def measure(
    run: Callable[[], Tensor], model: Any, rounds: int, watch: Stopwatch
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, seconds in attention) of every round for each implementation; the first round is not counted unless its
    steps are ``LONG``."""
    names = {name: watch.watch(name) for name in PAIR}
    found: list[dict[str, tuple[float, float]]] = []
    warm = False
    while len(found) < rounds:
        logits, times = {}, {}
        for name in random.sample(PAIR, len(PAIR)):
            model.set_attn_implementation(names[name])
            watch.seconds, started = 0.0, time.perf_counter()
            logits[name] = run()
            times[name] = (time.perf_counter() - started, watch.seconds)
        if warm or min(total for total, _ in times.values()) > LONG:
            found.append(times)
        warm = True
        own, other = (logits[name].double() for name in PAIR)
        apart = float((own - other).norm() / other.norm())
        if not apart <= LIMITS[model.dtype]:
            raise RuntimeError(f"the implementations disagree: logits {apart:.2g} apart")
    return {name: [times[name] for times in found] for name in PAIR}


@torch.no_grad()
def generate(model: Any, dtype: str, context: int, kind: str, rounds: int) -> Row:
    cache = filled(model, kind, context)

    def step() -> Tensor:
        logits = model(torch.tensor([[1]]), cache=cache, logits_to_keep=1).logits
        cache.crop(-1)
        return logits

    times = measure(step, model, rounds, Stopwatch())
    return row("generate", dtype, f"{dtype}, {context} keys, {kind} cache", times, 1, (kind, dtype, context))


@torch.no_grad()
def prompt(model: Any, dtype: str, context: int, kind: str, rounds: int) -> Row:
    ids = torch.randint(SIZES["vocab_size"], (1, context))

    def run() -> Tensor:
        cache = hf.DynamicCache(config=model.config) if kind == "dynamic" else hf.StaticCache(model.config, context)
        return model(ids, cache=cache, logits_to_keep=1).logits

    times = measure(run, model, rounds, Stopwatch())
    return row("prompt", dtype, f"{dtype}, {context} tokens, {kind} cache", times, context, (kind, dtype, context))


def row(
    section: str,
    dtype: str,
    problem: str,
    times: dict[str, list[tuple[float, float]]],
    tokens: int,
    key: tuple[str, str, int],
) -> Row:
    seconds = {name: [total for total, _ in runs] for name, runs in times.items()}
    attention = {name: statistics.median([inside for _, inside in runs]) for name, runs in times.items()}
    ratio = statistics.ratio(seconds["attnworks"], seconds["sdpa"], paired=True)
    middle = {name: statistics.median(runs) for name, runs in seconds.items()}
    own, other = (f"{tokens / middle[name]:.3g}" for name in PAIR)
    shares = [f"{attention[name] / middle[name]:.0%}" for name in PAIR]
    inside = f"attention {attention['attnworks'] * 1e3:.3g} ms ({shares[0]} of the time) against "
    detail = (
        f"{own} against {other} tokens/s, {ratio.runs} rounds; {inside}{attention['sdpa'] * 1e3:.3g} ms ({shares[1]})"
    )
    bar = BARS.get((section, *key))
    value = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    text, passed = ("", None) if bar is None else (f">= {bar}", ratio.value >= bar)
    return Row(section, problem, 'transformers\' "sdpa"', value, text, passed, detail)


# ---- the command -----------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only these (default: all)")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="only these (default: all)")
    parser.add_argument("--context", action="append", type=int, help=f"only these (default: {CONTEXTS})")
    parser.add_argument("--cache", action="append", choices=CACHES, help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each row (default: 10)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="JSON on stdout, progress on stderr")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args()


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    for dtype in arguments.dtype or DTYPES:
        print(f"building the model in {dtype}", end="", file=sys.stderr, flush=True)
        model = build(DTYPES[dtype])
        for section in arguments.section or SECTIONS:
            run = generate if section == "generate" else prompt
            for context in arguments.context or CONTEXTS:
                for kind in arguments.cache or CACHES:
                    print(f"\r\033[K{section}: {dtype}, {context}, {kind}", end="", file=sys.stderr, flush=True)
                    yield run(model, dtype, context, kind, arguments.rounds)
        print("\r\033[K", end="", file=sys.stderr)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    hf.logging.set_verbosity_error()
    register()
    started = time.perf_counter()
    rows = []
    for row_ in rows_of(arguments):
        rows.append(row_)
        if not arguments.json:
            print("\r\033[K", end="", file=sys.stderr)
            print_section([row_])
    machine, versions = environment.machine(), environment.versions() | {"transformers": hf.__version__}
    header = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine,
        "versions": versions,
        "commit": environment.commit(),
        "threads": arguments.threads,
        "seconds": round(time.perf_counter() - started),
    }
    if arguments.json:
        print(json.dumps(header | {"rows": [asdict(row) for row in rows]}, indent=2))
    if arguments.markdown:
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        about = (
            f"{machine['name']}, {arguments.threads} threads, kernels {(machine['isas'] or ['none'])[0]}; {named}; "
            f"commit {header['commit']}. Ratios are how many times as many tokens a second attnworks gives "
            "(`benchmarks/models.py`)."
        )
        text = markdown(rows, f"Models on a CPU, {header['when']}", about)
        arguments.markdown.write_text(text, encoding="utf-8")
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
