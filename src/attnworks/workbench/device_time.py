"""Device time on a GPU: the caches flushed between runs, competitors interleaved, none of them waiting for its host."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attnworks.hardware import detect
from attnworks.workbench import statistics

Run = Callable[[], Any]

# Four times any L2, and longer to write than the host takes to launch a few kernels, so that the device never waits for
# it between two events.
FEWEST_FLUSH_BYTES = 512 << 20
UNKNOWN_L2_BYTES = 64 << 20
WARM_UPS = 3
SLEEP_CYCLES = 1_000_000  # half a millisecond, longer than the host needs to enqueue any competitor


class Clock:
    """Times what it runs on one GPU by events on the current stream, each run after a flush of the L2."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._l2 = detect(device).shared_cache_bytes or UNKNOWN_L2_BYTES
        self._flush = torch.empty(max(4 * self._l2, FEWEST_FLUSH_BYTES), dtype=torch.int8, device=device)

    @property
    def flush_bytes(self) -> int:
        return self._flush.nbytes

    def seconds(self, run: Run, *, flush: bool = True, asleep: bool = False) -> float:
        """Of one run. ``asleep``: the device sleeps while the host enqueues, so that it never waits for its host."""
        pair = self._enqueue(run, asleep=asleep, flush=flush)
        torch.cuda.synchronize(self._device)
        return _seconds(pair)

    def interleaved(
        self,
        competitors: Mapping[str, Run | Sequence[Run]],
        rounds: int,
        *,
        graphs: bool = True,
        order: random.Random | None = None,
        flush: bool = True,
    ) -> dict[str, list[float]]:
        """Seconds of each competitor, one for each of ``rounds``, in every one of which each runs once, in an order
        drawn anew; a few rounds before them warm up. A competitor is a run, or one for each set of inputs, of which a
        round takes the same for all. Replays of CUDA graphs; without ``graphs`` (autograd's backward runs on a stream
        of its own choosing, which capture does not follow) the device sleeps while the host enqueues."""
        drawn = order or random.Random()
        runs = {name: [one] if callable(one) else list(one) for name, one in competitors.items()}
        pool = torch.cuda.graph_pool_handle() if graphs else None  # replays take turns: they can share their memory
        ready = {name: [graphed(run, pool) if graphs else run for run in sets] for name, sets in runs.items()}
        pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ready}
        for turn in range(WARM_UPS + rounds):
            chosen = drawn.randrange(min(map(len, ready.values())))
            for name in drawn.sample(list(ready), len(ready)):
                pair = self._enqueue(ready[name][chosen], asleep=not graphs, flush=flush)
                if turn >= WARM_UPS:
                    pairs[name].append(pair)
        torch.cuda.synchronize(self._device)
        return {name: [_seconds(pair) for pair in found] for name, found in pairs.items()}

    def flush_slowdown(self, attempts: int = 15) -> float:
        """How many times as long a read of a third of the L2 takes after a flush as right after itself: medians, less
        what a launch takes that reads next to nothing. About 1: the flush does nothing."""
        probe = torch.ones(self._l2 // 3 // 4, device=self._device)
        launch, warm, cold = [], [], []
        for _ in range(attempts):
            launch.append(self.seconds(probe[:1].sum, flush=False, asleep=True))
            probe.sum()
            warm.append(self.seconds(probe.sum, flush=False, asleep=True))
            cold.append(self.seconds(probe.sum, asleep=True))
        empty, again, anew = (statistics.median(times) for times in (launch, warm, cold))
        return (anew - empty) / max(again - empty, 1e-9)

    def _enqueue(self, run: Run, *, asleep: bool, flush: bool) -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if flush:
            self._flush.add_(1)  # no random numbers: after a capture that failed torch refuses to draw any
        if asleep:
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        return begin, end


def _seconds(pair: tuple[Any, Any]) -> float:
    begin, end = pair
    return float(begin.elapsed_time(end)) / 1e3


def capturable(run: Run) -> bool:
    """Whether ``run`` becomes a CUDA graph: it neither waits for the device nor leaves work on other streams."""
    stream = torch.cuda.current_stream()
    try:
        graphed(run)
    except RuntimeError:  # what of CUDA's errors it is depends on what the run did
        torch.cuda.set_stream(stream)  # which a capture that failed does not give back
        # Nor does it tell the random numbers that it is over, which are refused from then on.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.synchronize()
        return False
    return True


def graphed(run: Run, pool: Any = None) -> Run:
    """Replays of ``run`` as a CUDA graph, after warm-up on a stream of its own. Its memory comes from ``pool``."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay
