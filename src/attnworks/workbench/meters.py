"""Meters: how competitors are timed, on a CPU and on a GPU.

Both flush the last-level cache before every run, run all competitors in every round in an order drawn anew on the same
inputs, and measure the machine's ceilings beside them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attnworks.problem import Problem
from attnworks.workbench import ceilings, sampling, statistics
from attnworks.workbench.device_time import Clock, capturable
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.providers import Bound, Inputs
from attnworks.workbench.sampling import Sampler

# One library's threads spin on after their work; before another library's turn they must have gone to sleep.
SETTLE_SECONDS = 0.01
HOST_CALLS = 50  # of each competitor, for the host's time on a GPU

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rounds done and rounds in all."""


@dataclass(frozen=True)
class Entry:
    """A competitor to a meter: one ``bound`` call for each set of inputs."""

    name: str
    bound: Sequence[Bound]
    brings_threads: bool = False


@dataclass(frozen=True)
class Timed:
    """``seconds`` and ``host_seconds`` by competitor; ``last``: of each, the set of inputs and a copy of the result of
    the last run, made before anything else could touch it; ``means``: by which times were taken, in words."""

    seconds: Mapping[str, list[float]]
    host_seconds: Mapping[str, list[float]]
    last: Mapping[str, tuple[int, Tensor]]
    ceilings: dict[str, float | None]
    state: dict[str, Any]
    means: str

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def joined(self, later: Timed) -> Timed:
        """With the rounds of ``later``, whose state and ceilings are those of the meter's whole time."""
        both = (self.seconds, later.seconds), (self.host_seconds, later.host_seconds)
        seconds, host = ({name: [*a[name], *b[name]] for name in a} for a, b in both)
        return replace(later, seconds=seconds, host_seconds=host)


class Meter(Protocol):
    """``negligible_seconds``: by less than this one call may take longer than another for no reason."""

    negligible_seconds: float

    def place(self, inputs: Inputs) -> Inputs:
        """Inputs, made on the CPU, where the competitors run."""

    def first(self, bound: Bound) -> tuple[Tensor, int | None]:
        """A copy of the result of a call, and the bytes that were only there during it, the result left out."""

    def once(self, bound: Bound, flush: bool) -> tuple[float, Tensor]:
        """Seconds of one call, and a copy of its result made at once: what a call leaves to do later is not in it."""

    def rounds(
        self, entries: Sequence[Entry], rounds: int, order: random.Random, flush: bool, report: Progress
    ) -> Timed:
        """Time all of them. Called again, the ceilings and the state are of all the calls together."""

    def flush_conditions(self) -> dict[str, Any]:
        """Of the flush: its size, by how much it slows a read, and whether that is enough to believe in it."""


def meter_for(problem: Problem, threads: int) -> Meter:
    if problem.device == "cpu":
        return CpuMeter(problem.dtype, threads)
    return GpuMeter(Clock(problem.device), problem.device, problem.dtype)


def _of_flush(size: int, slowdown: float) -> dict[str, Any]:
    real = slowdown >= ceilings.REAL_FLUSH
    return {"flush_bytes": size, "flush_slows_a_read_by": round(slowdown, 2), "flush_is_real": real}


class CpuMeter:
    """Wall-clock time of each call."""

    negligible_seconds = 1e-3

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self._dtype = str(dtype).removeprefix("torch.")
        self._threads = threads
        self._caches = ceilings.Caches(threads)
        self._sampler = sampling.sampler("cpu")
        self._bandwidths: list[float] = []
        self._peaks: list[float] = []
        # What the first parallel call of a process loads belongs to no competitor.
        (torch.ones(512, 512) @ torch.ones(512, 512)).sum()

    def place(self, inputs: Inputs) -> Inputs:
        return inputs

    def first(self, bound: Bound) -> tuple[Tensor, int | None]:
        result, extra = peak_extra(bound.run)
        out = bound.out(result).clone()
        return out, None if extra is None else max(extra - out.nbytes, 0)

    def once(self, bound: Bound, flush: bool) -> tuple[float, Tensor]:
        if flush:
            self._caches.flush()
        start = time.perf_counter()
        result = bound.run()
        seconds = time.perf_counter() - start
        return seconds, bound.out(result).clone()

    def rounds(
        self, entries: Sequence[Entry], rounds: int, order: random.Random, flush: bool, report: Progress
    ) -> Timed:
        seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
        last: dict[str, tuple[int, Tensor]] = {}
        settle = SETTLE_SECONDS if any(entry.brings_threads for entry in entries) else 0.0
        gc.collect()
        gc.disable()
        try:
            for done in range(rounds):
                report("timing", done, rounds)
                chosen = order.randrange(len(entries[0].bound))
                for entry in order.sample(list(entries), len(entries)):
                    self._bandwidths += _known(self._caches.flush() if flush else None)
                    run = entry.bound[chosen].run
                    if settle:
                        time.sleep(settle)
                    start = time.perf_counter()
                    result = run()
                    seconds[entry.name].append(time.perf_counter() - start)
                    if done == rounds - 1:
                        last[entry.name] = chosen, entry.bound[chosen].out(result).clone()
                    del result
                self._peaks += _known(ceilings.peak_flops(self._dtype, self._threads) if flush else None)
                self._sampler.sample()
        finally:
            gc.enable()
        report("timing", rounds, rounds)
        rates = {
            "read_bytes_per_second": statistics.median(self._bandwidths) if self._bandwidths else None,
            "flops_per_second": statistics.median(self._peaks) if self._peaks else None,
        }
        return Timed(seconds, {}, last, rates, self._sampler.state(), "wall clock")

    def flush_conditions(self) -> dict[str, Any]:
        return _of_flush(self._caches.buffer_bytes, self._caches.check())


def _known(rate: float | None) -> list[float]:
    return [] if rate is None else [rate]


class GpuMeter:
    """Device time between two events, of replays of CUDA graphs where all competitors can be captured, else with the
    device asleep while the host enqueues; the host's time of each call apart."""

    negligible_seconds = 2e-5

    def __init__(self, clock: Clock, device: str, dtype: torch.dtype, sampler: Sampler | None = None) -> None:
        self._clock = clock
        self._device = device
        self._dtype = dtype
        self._sampler = sampler or sampling.sampler(device)
        self._rates = ceilings.GpuCeilings(clock, device, dtype)  # draws random numbers: before any capture

    def place(self, inputs: Inputs) -> Inputs:
        return Inputs(*(x.to(self._device) for x in inputs))

    def first(self, bound: Bound) -> tuple[Tensor, int | None]:
        bound.run()  # compiles, and builds what is kept
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        result = bound.run()
        out = bound.out(result)
        torch.cuda.synchronize(self._device)
        extra = torch.cuda.max_memory_allocated(self._device) - before - out.nbytes
        return out.clone(), max(extra, 0)

    def once(self, bound: Bound, flush: bool) -> tuple[float, Tensor]:
        results: list[Any] = []
        seconds = self._clock.seconds(lambda: results.append(bound.run()), flush=flush, asleep=True)
        results.append(bound.run())
        return seconds, bound.out(results[-1]).clone()

    def rounds(
        self, entries: Sequence[Entry], rounds: int, order: random.Random, flush: bool, report: Progress
    ) -> Timed:
        graphs = all(capturable(entry.bound[0].run) for entry in entries)
        runs = {entry.name: [bound.run for bound in entry.bound] for entry in entries}
        report("timing", 0, rounds)
        self._rates.measure()
        with sampling.meanwhile(self._sampler):
            seconds = self._clock.interleaved(runs, rounds, graphs=graphs, order=order, flush=flush)
            self._sampler.sample()
        self._rates.measure()
        report("timing the host", rounds, rounds)
        host = self._host_seconds(entries, order, min(rounds, HOST_CALLS))
        # A copy enqueued right behind the call lacks what the timed stream does not wait for. Memory that is handed out
        # again must not hold the right result by chance: no result is given back, and set 0 was the host's.
        last, kept = {}, []
        for entry in entries:
            chosen = 1 + order.randrange(len(entry.bound) - 1)
            kept.append(entry.bound[chosen].run())
            last[entry.name] = chosen, entry.bound[chosen].out(kept[-1]).clone()
        means = "CUDA graph replays" if graphs else "events, the device asleep while the host enqueues"
        return Timed(seconds, host, last, self._rates.rates(), self._sampler.state(), means)

    def _host_seconds(self, entries: Sequence[Entry], order: random.Random, calls: int) -> dict[str, list[float]]:
        """Until a call returns, with the device idle: what a caller's thread cannot use for anything else."""
        found: dict[str, list[float]] = {entry.name: [] for entry in entries}
        for _ in range(calls):
            for entry in order.sample(list(entries), len(entries)):
                torch.cuda.synchronize(self._device)
                start = time.perf_counter()
                entry.bound[0].run()
                found[entry.name].append(time.perf_counter() - start)
        torch.cuda.synchronize(self._device)
        return found

    def flush_conditions(self) -> dict[str, Any]:
        return _of_flush(self._clock.flush_bytes, self._clock.flush_slowdown())
