"""Can a benchmark be trusted? The same kernel against itself, and against itself slowed on purpose.

    python benchmarks/trust.py                        # on the CPU, about 3 minutes
    python benchmarks/trust.py --device cuda          # slowed by 5 % and by 2 %
    python benchmarks/trust.py --section same --trials 20 --json

Every trial is a whole benchmark as `attnworks bench` makes it, on new inputs. "same": how often a difference is claimed
between a kernel and itself. "slowed": how often one is found where a kernel does its work and then waits for a share of
its time: by the host's clock on a CPU, by cycles of the device on a GPU. "errors": how much the errors of a kernel that
did not change vary, by which `attnworks compare` judges. From a source tree set PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attnworks.problem import Problem
from attnworks.workbench import comparison, environment, statistics
from attnworks.workbench.bench import Protocol, measure
from attnworks.workbench.device_time import Clock
from attnworks.workbench.providers import Attnworks, Bound, Inputs, describe
from rows import Row, show

SAME_BAR = 0.05  # of the trials, in which a difference may be claimed
FOUND_BARS = {("cpu", 0.05): 0.9, ("cuda", 0.05): 0.95, ("cuda", 0.02): 0.8}
SECTIONS = ("same", "slowed", "errors")
SLEEP = 1_000_000  # cycles, to learn how long the device sleeps for one


class Slowed(Attnworks):
    """attnworks, and then a wait of ``share`` of its own time: on a CPU of this very call's, on a GPU, where the host
    does not know it, of ``seconds``, in cycles of the device."""

    def __init__(self, name: str, share: float = 0.0, seconds: float = 0.0) -> None:
        super().__init__(name)
        self._share, self._seconds = share, seconds

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        bound = super().bind(problem, inputs)
        if not self._share:
            return bound
        if problem.device != "cpu":
            sleep: Callable[[int], None] = torch.cuda._sleep
            cycles = round(self._share * self._seconds / seconds_of_a_cycle(problem.device))

            def wait(started: float) -> None:
                sleep(cycles)
        else:

            def wait(started: float) -> None:
                now = time.perf_counter()
                end = now + self._share * (now - started)
                while time.perf_counter() < end:
                    pass

        def run() -> Any:
            started = time.perf_counter()
            result = bound.run()
            wait(started)
            return result

        return Bound(run, bound.out)


@cache
def seconds_of_a_cycle(device: str) -> float:
    clock, sleep = Clock(device), torch.cuda._sleep
    return statistics.median([clock.seconds(lambda: sleep(SLEEP)) for _ in range(20)]) / SLEEP


def slowed(problem: Problem, share: float) -> Slowed:
    own = 0.0
    if problem.device != "cpu":
        own = measure(problem, [Attnworks()], Protocol(seed=0)).records[0].median
    return Slowed("slowed", share, own)


def verdicts(problem: Problem, trials: int, other: Slowed, protocol: Protocol) -> list[str]:
    """Of the kernel against ``other``, one for each trial."""
    found = []
    for trial in range(trials):
        result = measure(problem, [Slowed("attnworks"), other], replace(protocol, seed=trial))
        first, second = result.records
        found.append(first.ratio_to(second).verdict)
        told = f"{trial + 1} of {trials}: {first.ratio_to(second)}, {len(first.seconds)} runs"
        print(told, file=sys.stderr, flush=True)
    return found


def same_rows(problem: Problem, trials: int, protocol: Protocol) -> Iterator[Row]:
    found = verdicts(problem, trials, Slowed("the same"), protocol)
    claimed = len(found) - found.count("undecided")
    detail = f"faster {found.count('faster')}, slower {found.count('slower')}"
    most = max(1, int(SAME_BAR * trials))
    value, bar = f"{claimed} of {trials} claimed", f"<= {most}"
    yield Row("The same kernel twice", in_words(problem), "itself", value, bar, claimed <= most, detail)


def slowed_rows(problem: Problem, trials: int, protocol: Protocol, shares: list[float] | None = None) -> Iterator[Row]:
    kind = "cpu" if problem.device == "cpu" else "cuda"
    for (where, share), bar in FOUND_BARS.items():
        if where != kind or (shares and share not in shares):
            continue
        found = verdicts(problem, trials, slowed(problem, share), protocol)
        right = found.count("faster")
        detail = f"undecided {found.count('undecided')}, wrong {found.count('slower')}"
        value = f"found in {right} of {trials}"
        yield Row(
            f"Slowed by {share:.0%}", in_words(problem), "itself", value, f">= {bar:.0%}", right >= bar * trials, detail
        )


def error_rows(problem: Problem, trials: int, protocol: Protocol) -> Iterator[Row]:
    """Largest over smallest of the errors of one kernel on other inputs."""
    short = replace(protocol, runs=5, fewest_runs=5, most_runs=None, flush=False, budget_seconds=0.0)
    checks = [measure(problem, [Attnworks()], replace(short, seed=trial)).records[0].check for trial in range(trials)]
    for name, factor in (
        ("relative_error", comparison.RELATIVE_ERROR_FACTOR),
        ("worst_share_of_bound", comparison.LARGEST_ERROR_FACTOR),
    ):
        found = [check[name] for check in checks]
        spread = max(found) / min(found)
        detail = f"{min(found):.3g} to {max(found):.3g} in {trials} benchmarks"
        yield Row(
            "Errors on other inputs", in_words(problem), name, f"{spread:.2f}", f"< {factor}", spread < factor, detail
        )


def in_words(problem: Problem) -> str:
    p = problem.to_json()
    return f"heads {problem.heads_q}, N={problem.seq_q}, D={problem.head_dim}, {p['dtype']}, {p['mask']}"


def described(device: str, length: int | None) -> Problem:
    gpu = device != "cpu"
    n = length or (4096 if gpu else 1024)
    sizes = {"form": "dense", "batch": 1, "seq_q": n, "seq_kv": n, "head_dim": 64, "head_dim_v": 64}
    heads, dtype = (16, torch.bfloat16) if gpu else (8, torch.float32)
    return replace(describe(**sizes, heads_q=heads, heads_kv=heads, dtype=dtype), device=environment.place(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--length", type=int, help="queries and keys; 1024 on a CPU, 4096 on a GPU")
    parser.add_argument("--threads", type=int)
    shares = sorted({share for _, share in FOUND_BARS})
    parser.add_argument("--slower", type=float, nargs="+", choices=shares, help="slowed by these shares only")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON; tables go nowhere")
    chosen = parser.parse_args()
    problem = described(chosen.device, chosen.length)
    protocol = Protocol(most_runs=400, threads=chosen.threads, budget_seconds=30)
    made = {"same": same_rows, "slowed": partial(slowed_rows, shares=chosen.slower), "errors": error_rows}
    sections = {name: partial(rows, problem, chosen.trials, protocol) for name, rows in made.items()}
    machine = environment.machine(problem.device)
    introduction = (
        f"{machine['name']}; {', '.join(f'{n} {v}' for n, v in environment.versions().items())}; commit "
        f"{environment.commit()}. {chosen.trials} benchmarks of 50 to 400 runs each, `benchmarks/trust.py`; "
        f"attnworks is called as {Attnworks().form(problem)}."
    )
    title = f"Can the benchmark be trusted? {time.strftime('%Y-%m-%d')}"
    found = show(
        sections, chosen.section, as_json=chosen.json, path=chosen.markdown, title=title, introduction=introduction
    )
    if not all(row.passed for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
