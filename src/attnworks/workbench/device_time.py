"""Device time on a GPU: the caches flushed between runs, competitors interleaved, none of them waiting for its host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from attnworks.hardware import detect

Run = Callable[[], Any]

# Four times any L2, and longer to write than the host takes to launch a few kernels, so that the device never waits for
# it between two events.
FEWEST_FLUSH_BYTES = 512 << 20
WARM_UPS = 3
SLEEP_CYCLES = 1_000_000  # half a millisecond, longer than the host needs to enqueue any competitor


class Clock:
    """Times what it runs on one GPU by events on the current stream, each run after a flush of the L2."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        l2 = detect(device).shared_cache_bytes or 0
        self._flush = torch.empty(max(4 * l2, FEWEST_FLUSH_BYTES), dtype=torch.int8, device=device)

    def seconds(self, run: Run) -> float:
        """Of one run."""
        pair = self._enqueue(run, asleep=False)
        torch.cuda.synchronize(self._device)
        return _seconds(pair)

    def interleaved(
        self, competitors: dict[str, Run], rounds: int, *, graphs: bool = True, order: random.Random | None = None
    ) -> dict[str, list[float]]:
        """Seconds of each competitor, one for each of ``rounds``, in every one of which each runs once, in an order
        drawn anew; a few rounds before them warm up. Replays of CUDA graphs; without ``graphs`` (autograd's backward
        runs on a stream of its own choosing, which capture does not follow) the device sleeps while the host
        enqueues."""
        drawn = order or random.Random()
        ready = {name: graphed(run) if graphs else run for name, run in competitors.items()}
        pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ready}
        for turn in range(WARM_UPS + rounds):
            for name in drawn.sample(list(ready), len(ready)):
                pair = self._enqueue(ready[name], asleep=not graphs)
                if turn >= WARM_UPS:
                    pairs[name].append(pair)
        torch.cuda.synchronize(self._device)
        return {name: [_seconds(pair) for pair in found] for name, found in pairs.items()}

    def _enqueue(self, run: Run, *, asleep: bool) -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flush.random_(0, 2)
        if asleep:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        return begin, end


def _seconds(pair: tuple[Any, Any]) -> float:
    begin, end = pair
    return float(begin.elapsed_time(end)) / 1e3


def graphed(run: Run) -> Run:
    """Replays of ``run`` as a CUDA graph, after warm-up on a stream of its own."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
