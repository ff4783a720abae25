"""What cpu.py measures other than by timing one call: memory in a process of its own, many calls as one, gradients.

As a script: ``cpu_probes.py PROVIDER LENGTH DTYPE THREADS`` prints the peak extra bytes of one forward.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench.memory import peak_extra
from attnworks.workbench.providers import Bound, Inputs, Provider, by_name, describe, random_inputs, user_mask
from attnworks.workbench.quick_check import NotVerifiedError

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


class Differentiated(Provider):
    """A provider's backward, or its forward and backward, in the place of its forward. The result that ``measure``
    checks is the forward's; ``verify`` checks the gradients."""

    def __init__(self, provider: Provider, forward: bool) -> None:
        self.name = provider.name
        self._provider, self._forward = provider, forward

    def form(self, problem: Problem) -> str:
        out = self._provider.form(problem)
        return f"torch.autograd.grad({out if self._forward else 'out'}, (q, k, v), d_out)"

    def refuses(self, problem: Problem) -> str:
        return self._provider.refuses(problem)

    def answers(self, problem: Problem) -> Problem:
        return self._provider.answers(problem)

    def plan(self, problem: Problem) -> Plan | None:
        return self._provider.plan(problem)

    @torch.enable_grad()
    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        leaves = Inputs(*(x.detach().requires_grad_() for x in inputs))
        run, out = self._provider.bind(problem, leaves)
        kept = run()
        d_out = torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)).to(kept.dtype)

        @torch.enable_grad()
        def differentiate() -> tuple[Tensor, ...]:
            of = run() if self._forward else kept
            return torch.autograd.grad(of, leaves, d_out, retain_graph=not self._forward)

        return Bound(differentiate, lambda gradients: out(kept).detach())


def verify(problem: Problem, names: tuple[str, ...]) -> None:
    """Raise ``NotVerifiedError`` unless the named providers' gradients are those of SDPA in fp64, on half the rows."""
    short = describe(
        form="dense",
        batch=1,
        heads_q=problem.group,
        heads_kv=1,
        seq_q=min(problem.seq_q, 1024) // 2,
        seq_kv=min(problem.seq_kv, 1024) // 2,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
        mask=user_mask(problem),
    )
    inputs = random_inputs(short, torch.Generator().manual_seed(2))
    for name in names:
        provider = Differentiated(by_name(name), forward=False)
        if provider.refuses(short):
            continue
        exact = replace(provider.answers(short), dtype=torch.float64)
        wanted = Differentiated(by_name("sdpa"), forward=False).bind(exact, Inputs(*(x.double() for x in inputs))).run()
        for what, got, want in zip("qkv", provider.bind(short, inputs).run(), wanted, strict=True):
            error = float((got.double() - want).norm() / want.norm())
            if not error < 8 * torch.finfo(problem.dtype).eps:
                raise NotVerifiedError(f"{name}: relative error of d{what} was {error:.2g}: not benchmarked")


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
