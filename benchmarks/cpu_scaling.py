"""The section "scaling" of cpu.py: prefill, backward and decode with 1, 2, 4, … threads, ours and SDPA's. No bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from attnworks import Causal
from attnworks.problem import Problem
from attnworks.workbench.bench import Protocol, Result
from cpu_rows import (
    Settings,
    backward_work,
    best,
    decode_problem,
    measure_gradients,
    measure_providers,
    prefill_problem,
    ratio_row,
)
from rows import Row

HEADS = 16
LENGTH = 1024
HEAD_DIM = 128
DECODE_HEADS = 32, 8
CONTEXT = 16384
OWN, OTHERS = "attnworks", ("sdpa", "sdpa-grouped")

Measure = Callable[[Problem, Protocol], Result]


def scaling(settings: Settings) -> Iterator[Row]:
    """Each problem with every number of threads up to the settings': the ratio to SDPA at as many threads, and how many
    times as fast as on one thread each is."""
    for dtype in settings.dtypes:
        dense = prefill_problem(dtype, HEAD_DIM, LENGTH, Causal(), heads=HEADS)
        sizes = f"{HEADS} heads, D={HEAD_DIM} N={LENGTH}"
        cache = decode_problem(dtype, *DECODE_HEADS, CONTEXT)
        heads = "/".join(map(str, DECODE_HEADS))
        yield from _rows(f"{dtype} causal prefill, {sizes}", dense, _forward, 1.0, settings)
        yield from _rows(f"{dtype} causal backward, {sizes}", dense, _backward, backward_work(dense), settings)
        yield from _rows(f"{dtype} decode, {heads} heads, D=128, context {CONTEXT}", cache, _decode, 1.0, settings)


def thread_counts(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    return [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]


def _forward(problem: Problem, protocol: Protocol) -> Result:
    return measure_providers(problem, (OWN, OTHERS[0]), protocol)


def _backward(problem: Problem, protocol: Protocol) -> Result:
    return measure_gradients(problem, (OWN, OTHERS[0]), protocol, forward=False)


def _decode(problem: Problem, protocol: Protocol) -> Result:
    return measure_providers(problem, (OWN, *OTHERS), protocol)


def _rows(name: str, problem: Problem, measure: Measure, work: float, settings: Settings) -> Iterator[Row]:
    alone: dict[str, float] = {}  # seconds on one thread
    for threads in thread_counts(settings.threads):
        row = f"{name}, {threads} threads"
        if not settings.wants(row):
            continue
        result = measure(problem, settings.protocol(threads=threads))
        other = best(result, OTHERS) or OTHERS[0]
        made = ratio_row("scaling", row, result, other, 0.0, "no bar", work=work)
        if made.value == "-":  # one of them failed its check
            yield made
            continue
        yield replace(made, detail=made.detail.removesuffix("; no bar") + _told(result, other, threads, alone))


def _told(result: Result, other: str, threads: int, alone: dict[str, float]) -> str:
    """What the other sections' rows don't say. ``alone``: seconds on one thread, kept from row to row."""
    own, torch_own = result.record(OWN), result.record(other)
    assert own is not None and torch_own is not None
    told = ""
    if own.problem["form"] == "decode" and own.share_of_read_bandwidth is not None:
        told = f"; {own.share_of_read_bandwidth:.0%} of a plain read"
    if threads == 1:
        alone |= {record.provider: record.median for record in result.records}
    elif {OWN, other} <= alone.keys():
        speeds = (alone[OWN] / own.median, alone[other] / torch_own.median)
        told += "; {:.2f} and {:.2f} times as fast as on 1 thread".format(*speeds)
    return told
