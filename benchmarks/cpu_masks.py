"""The section "masks" of cpu.py: masks beyond causal and windows, biases and other score modifiers, forward.

Each call is checked against its competitor's result, or against one with the scores written out, before it is timed;
both run in turn, in random order, the caches flushed between. Bars: issue 5's, and 1.2 times torch's time for a call
with almost nothing to compute.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attnworks import ALiBi, Bias, Causal, Sink, Softcap, Window, attention, attention_decode
from attnworks.workbench import ceilings, statistics
from rows import Row

DOCUMENTS = 16
LENGTH = 8192
BIAS_LENGTH, BIAS_HEADS = 2048, 4
HEAD_DIM = 64
MASK_BAR, BIAS_BAR, TINY_BAR = 5.0, 1.2, 1.2
CALLS = 200
DECODE_CONTEXTS = (512, 4096, 16384)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Call = Callable[[], Tensor]


class Settings(Protocol):
    """What the section reads of cpu.py's settings."""

    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def threads(self) -> int: ...
    @property
    def budget(self) -> float: ...
    def wants(self, row: str) -> bool: ...


class Timed(NamedTuple):
    """Seconds of the runs of both, round by round."""

    own: list[float]
    other: list[float]

    @property
    def ratio(self) -> statistics.Ratio:
        return statistics.ratio(self.own, self.other, paired=True)

    @property
    def milliseconds(self) -> str:
        own, other = (statistics.median(x) * 1e3 for x in self)
        return f"{own:.3g} against {other:.3g} ms, {len(self.own)} runs"


# By whom a row is held against.
CALLS = {
    "attnworks": "attention(q, k, v, mask=..., scores=...)",
    "torch SDPA": "F.scaled_dot_product_attention(q, k, v, attn_mask=...), what it adds or hides made beforehand",
    "written out in torch": "torch.softmax(scale * q @ k.mT, -1) @ v with the scores changed between the two",
}


def masks(settings: Settings) -> Iterator[Row]:
    for name in settings.dtypes:
        dtype = getattr(torch, name)
        yield from _documents(name, dtype, settings)
        yield from _biases(name, dtype, settings)
        if dtype == torch.float32:  # in 16 bits torch's products for a hand-written attention are some 40 times slower
            yield from _other_scores(name, dtype, settings)
    yield from _tiny(settings)
    yield from _threads(settings)


def _documents(name: str, dtype: torch.dtype, settings: Settings) -> Iterator[Row]:
    q, k, v = (torch.randn(1, 1, LENGTH, HEAD_DIM, dtype=dtype) for _ in range(3))
    document = torch.arange(LENGTH) // (LENGTH // DOCUMENTS)
    dense = document[:, None] == document
    after = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    near = after & after.triu(-511)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return document[q] == document[k]

    def sdpa(mask: Tensor) -> Call:
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    problem = f"{name} {DOCUMENTS} documents, D={HEAD_DIM} N={LENGTH}"
    start = time.perf_counter()
    attention(q, k, v, mask=same)
    first = time.perf_counter() - start
    yield from _row(problem, lambda: attention(q, k, v, mask=same), sdpa(dense), MASK_BAR, settings, dtype)
    causal = Causal() & same
    yield from _row(
        f"{problem}, causal", lambda: attention(q, k, v, mask=causal), sdpa(dense & after), MASK_BAR, settings, dtype
    )
    yield from _row(
        f"{problem}, boolean tensor", lambda: attention(q, k, v, mask=dense), sdpa(dense), MASK_BAR, settings, dtype
    )
    fresh = dense.clone()

    def written_anew() -> Tensor:
        fresh[0, 0] = True  # a new version: its map is made anew
        return attention(q, k, v, mask=fresh)

    yield from _row(f"{problem}, tensor new in each call", written_anew, sdpa(dense), None, settings, dtype)
    window = Window(511, 0)
    yield from _row(
        f"{name} window 512, D={HEAD_DIM} N={LENGTH}",
        lambda: attention(q, k, v, mask=window), sdpa(near), MASK_BAR, settings, dtype,
    )  # fmt: skip
    if settings.wants(f"{problem}: first call"):
        yield Row(
            "masks", f"{problem}: first call", "later calls", f"{first * 1e3:.0f} ms", "", None, "makes the tile map"
        )


def _biases(name: str, dtype: torch.dtype, settings: Settings) -> Iterator[Row]:
    n, heads = BIAS_LENGTH, BIAS_HEADS
    q, k, v = (torch.randn(1, heads, n, HEAD_DIM, dtype=dtype) for _ in range(3))
    for shape in ((1, heads, n, n), (1, 1, n, n), (1, 1, 1, n)):
        bias = torch.randn(shape, dtype=dtype)
        scores = (Bias(bias),)
        yield from _row(
            f"{name} bias {shape}, D={HEAD_DIM} N={n}",
            lambda scores=scores: attention(q, k, v, scores=scores),  # type: ignore[misc]
            lambda bias=bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(1, heads, n, n)),  # type: ignore[misc]
            BIAS_BAR, settings, dtype,
        )  # fmt: skip


def _other_scores(name: str, dtype: torch.dtype, settings: Settings) -> Iterator[Row]:
    """What torch has no fused call for: against the same written out in torch, and against the plain call."""
    n, heads, cap = BIAS_LENGTH, BIAS_HEADS, 30.0
    q, k, v = (torch.randn(1, heads, n, HEAD_DIM, dtype=dtype) for _ in range(3))
    slopes, logits = torch.rand(heads), torch.randn(heads)
    far = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    lower = (slopes[:, None, None] * far).to(dtype)
    scale = HEAD_DIM**-0.5

    def with_sink() -> Tensor:
        scores = torch.cat([scale * q @ k.mT, logits.to(dtype).view(1, -1, 1, 1).expand(1, heads, n, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    written_out: dict[str, tuple[Any, Call]] = {
        "softcap": (Softcap(cap), lambda: torch.softmax(cap * torch.tanh(scale / cap * q @ k.mT), -1) @ v),
        "ALiBi": (ALiBi(slopes), lambda: torch.softmax(scale * q @ k.mT - lower, -1) @ v),
        "sink": (Sink(logits), with_sink),
    }
    for kind, (modifier, other) in written_out.items():
        problem = f"{name} {kind}, D={HEAD_DIM} N={n}"

        def own(modifier: Any = modifier) -> Tensor:
            return attention(q, k, v, scores=(modifier,))

        if not settings.wants(problem):
            continue
        yield from _row(problem, own, other, None, settings, dtype, against="written out in torch")
        plain = _time(own, lambda: attention(q, k, v), settings)
        value = f"{plain.ratio.value:.2f} ({plain.ratio.low:.2f} to {plain.ratio.high:.2f})"
        yield Row("masks", problem, "attnworks without", value, "", None, plain.milliseconds)


def _tiny(settings: Settings) -> Iterator[Row]:
    q, k, v = (torch.randn(1, 1, 16, 64) for _ in range(3))
    bias = torch.randn(16, 16)
    mask, sdpa = bias > 0, F.scaled_dot_product_attention
    mask[:, 0] = True  # torch gives NaN for rows that see nothing
    calls: dict[str, tuple[Call, Call]] = {
        "plain": (lambda: attention(q, k, v), lambda: sdpa(q, k, v)),
        "bias": (lambda: attention(q, k, v, scores=(Bias(bias),)), lambda: sdpa(q, k, v, attn_mask=bias)),
        "boolean mask": (lambda: attention(q, k, v, mask=mask), lambda: sdpa(q, k, v, attn_mask=mask)),
    }
    for kind, (own, other) in calls.items():
        problem = f"B1 H1 N16 D64 {kind}"
        if not settings.wants(problem):
            continue
        _check(own(), other(), torch.float32)
        timed = _time(_repeated(own), _repeated(other), settings, flush=False)
        times = 1 / timed.ratio.value
        each = [f"{statistics.median(x) / CALLS * 1e6:.1f} µs" for x in timed]
        detail = f"{each[0]} against {each[1]} a call"
        bar = f"<= {TINY_BAR}"
        value, called = f"{times:.2f} x its time", _called("torch SDPA")
        yield Row("masks", problem, "torch SDPA", value, bar, times <= TINY_BAR, detail, called)


def _threads(settings: Settings) -> Iterator[Row]:
    """Decode with a softcap and a bias by key, on all threads and on one: it must not slow down."""
    for context in DECODE_CONTEXTS:
        q, k = torch.randn(1, 1, 32, 128), torch.randn(1, context, 8, 128)
        lens, scores = torch.tensor([context]), (Softcap(30.0), Bias(torch.randn(context)))

        def on(threads: int, q: Tensor = q, k: Tensor = k, lens: Tensor = lens, scores: Any = scores) -> Call:
            def call() -> Tensor:
                torch.set_num_threads(threads)
                return attention_decode(q, k, k, kv_lens=lens, scores=scores)

            return call

        name = f"float32 decode GQA 32/8, D=128, softcap and bias, context {context}, {settings.threads} threads"
        if not settings.wants(name):
            continue
        timed = _time(on(settings.threads), on(1), settings)
        torch.set_num_threads(settings.threads)
        ratio = timed.ratio
        value = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        yield Row("masks", name, "1 thread", value, ">= 1", ratio.high >= 1, timed.milliseconds)


# ---- measuring -------------------------------------------------------------------------------------------------------


def _row(
    problem: str,
    own: Call,
    other: Call,
    bar: float | None,
    settings: Settings,
    dtype: torch.dtype,
    against: str = "torch SDPA",
) -> Iterator[Row]:
    if not settings.wants(problem):
        return
    _check(own(), other(), dtype)
    timed = _time(own, other, settings)
    ratio = timed.ratio
    value = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    passed = None if bar is None else ratio.value >= bar
    text, called = "" if bar is None else f">= {bar}", _called(against)
    yield Row("masks", problem, against, value, text, passed, timed.milliseconds, called)


def _called(against: str) -> tuple[str, ...]:
    return tuple(f"{name}: {CALLS[name]}" for name in ("attnworks", against))


def _check(own: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    """Raises ``AssertionError`` where the two results are not the same within what the dtype can hold."""
    torch.testing.assert_close(own.float(), other.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _repeated(call: Call) -> Call:
    def repeat() -> Tensor:
        for _ in range(CALLS - 1):
            call()
        return call()

    return repeat


def _time(own: Call, other: Call, settings: Settings, flush: bool = True) -> Timed:
    """Rounds of both in random order until the budget is used, 5 to 50 of them, after a warm-up of up to 3 that lasts
    no longer than half a second."""
    caches, order = ceilings.Caches(settings.threads), random.Random(0)
    calls, found = (own, other), Timed([], [])
    with torch.no_grad():
        started = time.perf_counter()
        for call in calls * 3:
            if time.perf_counter() - started < 0.5:
                call()
        started = time.perf_counter()
        while len(found.own) < 5 or (len(found.own) < 50 and time.perf_counter() - started < settings.budget):
            for which in order.sample((0, 1), 2):
                if flush:
                    caches.flush()
                start = time.perf_counter()
                calls[which]()
                found[which].append(time.perf_counter() - start)
    return found
