"""What the sections of cpu.py share: settings, problems, measuring, and the row of a ratio."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import cpu_probes
from attnworks.backends import cpu
from attnworks.problem import Problem
from attnworks.workbench.bench import Protocol, Result, measure
from attnworks.workbench.providers import by_name, describe, label
from attnworks.workbench.statistics import Ratio
from rows import Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS = 8192  # heads times length, the same for every length
MIB = 2**20
NEEDS_BF16 = "the bar is for CPUs with avx512_bf16"


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    contexts: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    threads: int
    budget: float
    only: str

    def wants(self, row: str) -> bool:
        return self.only in row

    def protocol(self, **changes: Any) -> Protocol:
        return Protocol(**{"threads": self.threads, "budget_seconds": self.budget, "input_bytes": 256 * MIB} | changes)


def decode_problem(dtype: str, heads_q: int, heads_kv: int, context: int) -> Problem:
    return describe(
        form="decode",
        batch=1,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seq_q=1,
        seq_kv=context,
        head_dim=128,
        head_dim_v=128,
        dtype=DTYPES[dtype],
    )


def prefill_problem(dtype: str, head_dim: int, length: int, mask: Any, heads: int = 0, heads_kv: int = 0) -> Problem:
    heads = heads or max(1, TOKENS // length)
    return describe(
        form="dense",
        batch=1,
        heads_q=heads,
        heads_kv=heads_kv or heads,
        seq_q=length,
        seq_kv=length,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=DTYPES[dtype],
        mask=mask,
    )


def away_from(dtype: str) -> str:
    """Why a bar is not meant for this machine."""
    return NEEDS_BF16 if dtype == "bfloat16" and "avx512_bf16" not in cpu.isas() else ""


def backward_work(problem: Problem) -> float:
    """FLOPs of the backward in those of the forward, which the records count."""
    return problem.flops(backward=True) / problem.flops()


def best(result: Result, others: tuple[str, ...]) -> str:
    timed = [record for record in result.records if record.provider in others]
    return min(timed, key=lambda record: record.median).provider if timed else ""


def measure_providers(problem: Problem, names: tuple[str, ...], protocol: Protocol) -> Result:
    return measure(problem, [by_name(name) for name in names], protocol)


def measure_gradients(problem: Problem, names: tuple[str, ...], protocol: Protocol, forward: bool) -> Result:
    cpu_probes.verify(problem, names)
    providers = [cpu_probes.Differentiated(by_name(name), forward) for name in names]
    return measure(problem, providers, replace(protocol, fewest_runs=3))


def ratio_row(
    section: str,
    name: str,
    result: Result,
    other: str,
    bar: float,
    away: str = "",
    provider: str = "attnworks",
    work: float = 1.0,
) -> Row:
    """The ratio to one competitor. ``away``: why the bar is not meant for it. ``work``: FLOPs of what was timed, as a
    multiple of the record's."""
    own, theirs = result.record(provider), result.record(other)
    if own is None or theirs is None:
        reasons = result.failed | result.refused
        missing = provider if own is None else other
        passed = False if missing == provider else None
        return Row(section, name, label(other), "-", f">= {bar}", passed, f"{missing}: {reasons[missing]}")
    ratio: Ratio = own.ratio_to(theirs)
    share = own.share_of_peak_flops
    detail = [f"{own.median * 1e3:.3g} against {theirs.median * 1e3:.3g} ms, {len(own.seconds)} runs"]
    if own.problem["form"] == "decode":
        reads = own.share_of_read_bandwidth, theirs.share_of_read_bandwidth
        if None not in reads:  # 1 / theirs is the most that a ratio can be
            detail.append("{:.0%} against {:.0%} of a plain read".format(*reads))
    elif share is not None:
        detail.append(f"{work * share:.0%} of FMA peak")
    if not away and ratio.low < bar <= ratio.high:
        detail.append("the bar lies within the noise")
    if own.load["busy"]:
        detail.append(f"others used {own.load['other_cores']} cores")
    value = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    passed = None if away else ratio.value >= bar
    return Row(
        section,
        name,
        label(other),
        value,
        f">= {bar}" if not away else "",
        passed,
        "; ".join([*detail, away]).rstrip("; "),
        (f"{label(provider)}: {own.form}", f"{label(other)}: {theirs.form}"),
    )
