"""What cpu.py measures other than by timing one call: memory in a process of its own, many calls as one.

As a script: ``cpu_probes.py PROVIDER LENGTH DTYPE THREADS`` prints the peak extra bytes of one forward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.providers import Bound, Inputs, Provider, by_name, describe, random_inputs

CALLS = 200
HEADS = 2
HEAD_DIM = 64


class Repeated(Provider):
    """``CALLS`` calls of a provider as one, so that the clock is not what is measured."""

    def __init__(self, provider: Provider) -> None:
        self.name = provider.name
        self._provider = provider

    def form(self, problem: Problem) -> str:
        return f"{CALLS} times {self._provider.form(problem)}"

    def plan(self, problem: Problem) -> Plan | None:
        return self._provider.plan(problem)

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        run, out = self._provider.bind(problem, inputs)

        def repeat() -> Any:
            for _ in range(CALLS - 1):
                run()
            return run()

        return Bound(repeat, out)


def fits(provider: str, length: int) -> bool:
    """Whether the provider's S and P, if it writes them, take less than half of the free memory."""
    if provider != "standard":
        return True
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return 2 * HEADS * length**2 * 4 < int(available.split()[1]) * 1024 / 2


def extra_bytes(provider: str, length: int, dtype: str) -> int:
    """Peak extra memory of the first forward of this process, without the result."""
    problem = describe(
        form="dense",
        batch=1,
        heads_q=HEADS,
        heads_kv=HEADS,
        seq_q=length,
        seq_kv=length,
        head_dim=HEAD_DIM,
        head_dim_v=HEAD_DIM,
        dtype=getattr(torch, dtype),
    )
    inputs = random_inputs(problem, torch.Generator().manual_seed(0))
    # Threads and libraries that any first product loads are nobody's.
    (torch.ones(512, 512) @ torch.ones(512, 512)).sum()
    bound = by_name(provider).bind(problem, inputs)
    with torch.no_grad():
        result, extra = peak_extra(bound.run)
    if extra is None:
        raise OSError("/proc does not tell the peak memory of this process")
    return max(extra - bound.out(result).nbytes, 0)


if __name__ == "__main__":
    chosen, length, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(extra_bytes(chosen, int(length), dtype))
