"""The proof that the tests bite: which checks catch each known fault, and where ``diagnose`` ranks it.

The faults are put into a kernel that tiles otherwise than the one they are compared with (tiles of 44 keys, no splits),
so that a rank says more than that a kernel equals itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnworks.workbench.diagnose.nearest import Corpus, Progress
from attnworks.workbench.diagnose.variants import SPLIT
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.hunt import Kill, kill_table
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.verify import fresh_memory_poisoned

Found = TypeVar("Found")

TILE_KV, SPLIT_KV = 44, 88
ALIKE = 0.02  # faults whose distances from a kernel differ by no more than this are not told apart


@dataclass(frozen=True)
class Rank:
    """Where ``diagnose`` puts a fault: 1 is first, 0 where the probes do not show it. ``alike``: the other faults that
    are as near."""

    rank: int
    distance: float
    rival: str
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One fault, by seed."""

    fault: str
    kills: tuple[Kill, ...]
    ranks: tuple[Rank, ...]

    @property
    def caught(self) -> bool:
        """With every seed."""
        return all(kill.check for kill in self.kills)

    @property
    def named(self) -> bool:
        """First or second with every seed."""
        return all(1 <= found.rank <= 2 for found in self.ranks)

    def ranks_in_words(self) -> str:
        return "/".join(str(rank or "-") for rank in sorted({found.rank for found in self.ranks}))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"caught": self.caught, "named": self.named}


def elsewhere(fault: str) -> Mutant:
    """The fault in a kernel of other sizes."""
    return Mutant(fault, tile_kv=TILE_KV, split_kv=SPLIT_KV if fault in SPLIT else 0)


class OutputOnly:
    """A mutant as most kernels are: dense, no LSE, no gradients."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, mutant.name

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        return ("dense, without gradients",) if differentiable or inputs.case.form != "dense" else ()

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> tuple[Tensor, None]:
        return self.mutant(inputs)[0].detach(), None


def table(
    faults: Iterable[str] = tuple(FAULTS),
    *,
    seeds: int = 1,
    ranks: bool = True,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """Every fault with seeds 0 … ``seeds`` - 1; without ``ranks`` only what catches it, in a fraction of the time.
    ``jobs``: processes that share the faults."""
    faults = tuple(faults)
    kills = [
        spread(partial(kill_table, seed=seed), faults, jobs, progress, f"kills, seed {seed}") for seed in range(seeds)
    ]
    ranked = [
        spread(partial(rank, seed=seed), faults, jobs, progress, f"ranks, seed {seed}")
        for seed in range(seeds if ranks else 0)
    ]
    return [
        Row(fault, tuple(one[place] for one in kills), tuple(one[place] for one in ranked))
        for place, fault in enumerate(faults)
    ]


def spread(
    run: Callable[..., list[Found]], faults: Sequence[str], jobs: int, progress: Progress | None, what: str
) -> list[Found]:
    """``run(faults)``, one result for each fault in their order, by ``jobs`` processes."""
    if jobs <= 1:
        return run(faults, progress=progress)
    found: dict[str, Found] = {}
    parts = [faults[n::jobs] for n in range(min(jobs, len(faults)))]
    with ProcessPoolExecutor(len(parts), get_context("spawn"), partial(torch.set_num_threads, 1)) as pool:
        waiting = {pool.submit(run, part): part for part in parts}
        for done in as_completed(waiting):
            found.update(zip(waiting[done], done.result(), strict=True))
            if progress:
                progress(what, len(found), len(faults))
    return [found[fault] for fault in faults]


def rank(
    faults: Sequence[str],
    *,
    seed: int = 0,
    output_only: bool = False,
    corpus: Corpus | None = None,
    progress: Progress | None = None,
) -> list[Rank]:
    """Where ``diagnose`` puts each fault, by all a kernel returns or by its dense outputs alone."""
    corpus, found = corpus or Corpus(seed=seed), []
    with fresh_memory_poisoned():
        for done, fault in enumerate(faults):
            if progress:
                progress(f"seed {seed}: {fault}", done, len(faults))
            mutant = elsewhere(fault)
            near = corpus.rank(corpus.observe(OutputOnly(mutant) if output_only else mutant))
            place = next((n for n, candidate in enumerate(near) if candidate.fault == fault), -1)
            rival = next((candidate.fault for candidate in near if candidate.fault != fault), "")
            if place < 0:
                found.append(Rank(0, 1.0, rival))
                continue
            own = near[place].distance
            alike = [c.fault for c in near if c.fault != fault and abs(c.distance - own) <= ALIKE and c.distance < 0.5]
            found.append(Rank(place + 1, own, rival, tuple(alike)))
    return found


def page(rows: Sequence[Row], by_output: Sequence[Rank] = ()) -> str:
    """docs/kill_table.md; what ``diagnose`` makes of the faults is left out where it was not measured. ``by_output``:
    the ranks, seed 0, by dense outputs alone."""
    seeds, ranked = len(rows[0].kills), bool(rows[0].ranks)
    caught = sum(row.caught for row in rows)
    option = "" if ranked else " --no-ranks"
    lines = [
        "# Kill table",
        "",
        f"Written by `attnworks diagnose --kill-table{option} --seeds {seeds} --write docs/kill_table.md`.",
        "",
        f"{len(rows)} wrong kernels, one fault each, {seeds} {'seed' if seeds == 1 else 'seeds'}."
        f" `attnworks verify` catches {caught} with every seed.",
        *(_about_ranks(rows, by_output) if ranked else ()),
        "",
        "*caught by*: the checks that fail on the first case that shows the fault (seed 0).",
        "",
        "| fault | on | caught by |" + (" rank | distance | rival |" if ranked else ""),
        "| --- | --- | --- |" + (" --- | --- | --- |" if ranked else ""),
    ]
    for row in rows:
        kill = row.kills[0]
        words = [row.fault, kill.case, ", ".join(kill.checks[:6]) + (" …" if len(kill.checks) > 6 else "") or "nothing"]
        if ranked:
            words += [row.ranks_in_words(), f"{max(one.distance for one in row.ranks):.2f}", row.ranks[0].rival]
        lines.append(f"| {' | '.join(words)} |")
    if ranked:
        lines += ["", "## What it cannot tell apart", "", "By all that a kernel returns (seed 0):", ""]
        lines += _alike([(row.fault, row.ranks[0]) for row in rows])
        lines += ["", "By dense outputs alone, without LSE and gradients (seed 0):", ""]
        lines += _alike([(row.fault, one) for row, one in zip(rows, by_output, strict=True)])
    return "\n".join(lines) + "\n"


def _about_ranks(rows: Sequence[Row], by_output: Sequence[Rank]) -> list[str]:
    named = sum(row.named for row in rows)
    first = sum(all(found.rank == 1 for found in row.ranks) for row in rows)
    shown = [found for found in by_output if found.rank]
    return [
        f"`attnworks diagnose` names {named} first or second with every seed, {first} of them first.",
        f"{len(shown)} show in dense outputs alone;",
        f"by them it names {sum(found.rank <= 2 for found in shown)} first or second.",
        "",
        f"*rank*: for this the fault is put into a kernel with tiles of {TILE_KV} keys and no splits, as no known",
        "fault is. *distance* is the largest over the seeds, *rival* what came nearest besides (seed 0).",
        "`-`: the probes of `diagnose` don't show the fault; it then goes on to the cases of `verify`.",
    ]


def _alike(ranks: Sequence[tuple[str, Rank]]) -> list[str]:
    groups = {frozenset((fault, *found.alike)) for fault, found in ranks if found.alike}
    lines = [f"- {', '.join(sorted(group))}" for group in sorted(groups, key=sorted)]
    unseen = [fault for fault, found in ranks if not found.rank]
    return lines + [f"- not shown by the probes: {', '.join(unseen)}"] * bool(unseen)
