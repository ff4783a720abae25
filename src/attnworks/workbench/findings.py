"""What a set of Records shows, apart from how it is drawn: who was compared with whom, sweeps, commits; and sentences.

Nothing is said that an interval does not carry: where noise leaves both answers open, the sentence is "undecided".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from attnworks.plan import Plan
from attnworks.workbench.providers import label
from attnworks.workbench.records import Record
from attnworks.workbench.statistics import Ratio

OWN = "attnworks"
# What of a problem follows from its lengths.
_LENGTHS = ("seq_q", "seq_kv", "total_q", "total_kv", "q_strides", "k_strides", "v_strides")


@dataclass(frozen=True)
class Comparison:
    """attnworks against another kernel in the same rounds. ``first`` marks one of those that share an ``own``."""

    own: Record
    other: Record
    ratio: Ratio
    first: bool


@dataclass(frozen=True)
class Cell:
    """A plan of a sweep."""

    plan: str
    record: Record
    ratio: Ratio


@dataclass(frozen=True)
class HeatMap:
    """One choice of warps and stages of a sweep, its cells by their ``place``."""

    title: str
    choice: str
    cells: dict[tuple[int, int], Cell]


@dataclass(frozen=True)
class Change:
    """The newest run of one kernel on one problem and machine at each commit, in order of time."""

    words: str
    runs: dict[str, Record]

    @property
    def order(self) -> list[str]:
        return list(self.runs)

    @property
    def first(self) -> Record:
        return self.runs[self.order[0]]


# ---- what belongs together -------------------------------------------------------------------------------------------


def measured(records: Sequence[Record]) -> list[Record]:
    """Those of benchmarks: neither of a sweep nor of a case study; of each kernel, problem, machine the newest."""
    found: dict[tuple[str, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.when):
        if not record.conditions.get("sweep") and not record.conditions.get("study"):
            found[_same(record)] = record
    return list(found.values())


def _same(record: Record) -> tuple[str, ...]:
    """What two runs of one kernel have in common."""
    problem = json.dumps(record.problem, sort_keys=True)
    return record.provider, problem, str(record.machine.get("name")), str(record.conditions.get("threads"))


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """attnworks with every competitor of its session, newest sessions only."""
    newest = measured(records)
    found = []
    for own in newest:
        if not own.provider.startswith(OWN):
            continue
        others = [one for one in newest if one.session == own.session and not one.provider.startswith(OWN)]
        found += [Comparison(own, other, own.ratio_to(other), place == 0) for place, other in enumerate(others)]
    return found


def by_session(records: Sequence[Record]) -> list[list[Record]]:
    """Records that were interleaved with each other, in their order."""
    sessions: dict[str, list[Record]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    return list(sessions.values())


def newest_attempt(heats: Sequence[Record]) -> list[list[Record]]:
    """Of the records of one sweep those of its newest attempt, by heats, each of which begins with the backend's
    choice: the final after the others. Nothing for no records."""
    begun = max((str(one.conditions["begun"]) for one in heats), default="")
    newest = [one for one in heats if one.conditions["begun"] == begun]
    return by_session(sorted(newest, key=lambda one: bool(one.conditions["final"])))


def sweeps(records: Sequence[Record]) -> list[list[list[Record]]]:
    """The newest attempt at each sweep."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.conditions.get("sweep"):
            found.setdefault(str(record.conditions["sweep"]), []).append(record)
    return [newest_attempt(heats) for heats in found.values()]


def heat_maps(records: Sequence[Record]) -> list[HeatMap]:
    """Of the newest attempt at each sweep, by warps and stages; finalists with their ratio of the final."""
    return [panel for heats in sweeps(records) for panel in _panels(heats)]


def _panels(heats: Sequence[Sequence[Record]]) -> list[HeatMap]:
    panels: dict[tuple[int, int], dict[tuple[int, int], Cell]] = {}
    for heat in heats:
        for record in heat:
            assert record.plan is not None, "a sweep's competitors are plans"
            plan = Plan(**record.plan)
            cell = Cell(record.provider, record, record.ratio_to(heat[0]))
            panels.setdefault((plan.warps, plan.stages), {})[place(plan)] = cell
    words, choice = problem_words(heats[0][0]), heats[0][0].provider
    return [
        HeatMap(f"{words}{f', {warps} warps, {stages} stages' if warps else ''}", choice, cells)
        for (warps, stages), cells in sorted(panels.items())
    ]


def studies(records: Sequence[Record]) -> list[list[Record]]:
    """The newest case study of each problem and machine, its baseline first."""
    sessions = by_session([record for record in records if record.conditions.get("study")])
    newest = {_same(steps[0]): steps for steps in sorted(sessions, key=lambda steps: steps[0].when)}
    return list(newest.values())


def place(plan: Plan) -> tuple[int, int]:
    """(row, column) of a heat map: tile_q and tile_kv; of the CPU's split-KV 0 and the keys of a task."""
    return (0, plan.split_kv) if plan.split_kv and plan.backend == "cpu" else (plan.tile_q, plan.tile_kv)


def commits_of(records: Sequence[Record]) -> list[Change]:
    """Kernels with runs at two commits or more."""
    found: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: record.when):
        if record.commit and not record.conditions.get("sweep") and not record.conditions.get("study"):
            runs = found.setdefault(_same(record), {})
            runs.pop(record.commit, None)
            runs[record.commit] = record
    changes = [
        Change(f"{label(key[0])}: {problem_words(next(iter(runs.values())))}", runs) for key, runs in found.items()
    ]
    return [change for change in changes if len(change.runs) > 1]


# ---- in words --------------------------------------------------------------------------------------------------------


def problem_words(record: Record) -> str:
    return f"{without_lengths(record)}, N {size_of(record)}"


def size_of(record: Record) -> int:
    """The keys of a sequence."""
    return int(record.problem.get("seq_kv", 0))


def without_lengths(record: Record) -> str:
    """A problem's family in words: those that differ in their lengths alone share it."""
    p = record.problem
    if "batch" not in p:
        return str(p.get("form", "?"))
    mask = "" if p["mask"] == "none" else f", {p['mask']}"
    queries = "" if p["seq_q"] == p["seq_kv"] else f", {p['seq_q']} queries"
    dim = p["head_dim"] if p["head_dim"] == p["head_dim_v"] else f"{p['head_dim']}/{p['head_dim_v']}"
    return (
        f"{p['form']}, batch {p['batch']}, heads {p['heads_q']}/{p['heads_kv']}, d {dim}, {p['dtype']}{mask}{queries}"
    )


def findings(records: Sequence[Record]) -> list[str]:
    """Sentences, the most wanted first."""
    return [
        *_against_peers(records),
        *_of_studies(records),
        *_of_sweeps(records),
        *_over_commits(records),
        *_of_errors(records),
        *_doubts(records),
    ]


def _against_peers(records: Sequence[Record]) -> list[str]:
    peers: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons(records):
        peers.setdefault((label(one.own.provider), label(one.other.provider)), []).append(one)
    lines = []
    for (own, peer), found in peers.items():
        won, lost, open_ = ([c for c in found if c.ratio.verdict == v] for v in ("faster", "slower", "undecided"))
        said = []
        if won:
            said.append(
                f"faster in {len(won)} of {len(found)} problems, {_spread([c.ratio for c in won])} times as fast"
            )
        if lost:
            worst = min(lost, key=lambda c: c.ratio.value)
            said.append(f"slower in {len(lost)}, at worst {worst.ratio} times as fast ({problem_words(worst.own)})")
        if open_:
            where = "; ".join(problem_words(c.own) for c in open_[:2]) + (" and more" if len(open_) > 2 else "")
            said.append(f"undecided in {len(open_)} ({where})")
        lines.append(f"{own} against {peer}: " + "; ".join(said) + ".")
    return lines


def _spread(ratios: Sequence[Ratio]) -> str:
    least, most = min(ratios, key=lambda r: r.value), max(ratios, key=lambda r: r.value)
    return str(least) if least is most else f"from {least} to {most}"


def _of_studies(records: Sequence[Record]) -> list[str]:
    lines = []
    for steps in studies(records):
        told = [f"{step.conditions['study']} {1 / step.ratio_to(steps[0]).value:.2f}" for step in steps]
        error = max(step.check["largest_error"] for step in steps)
        lines.append(
            f"Case study ({problem_words(steps[0])}), relative times: {', '.join(told)}; errors up to {error:.1g}."
        )
    return lines


def _of_sweeps(records: Sequence[Record]) -> list[str]:
    lines = []
    for heats in sweeps(records):
        final, choice = bool(heats[-1][0].conditions["final"]), heats[0][0].provider
        ratios = {one.provider: one.ratio_to(heat[0]) for heat in (heats[-1:] if final else heats) for one in heat[1:]}
        if not ratios:
            continue
        best, ratio = max(ratios.items(), key=lambda found: found[1].value)
        said = {
            "faster": f"{best} is {ratio} times as fast as {choice}",
            "slower": f"the backend's choice, {choice}, was not beaten; next comes {best}, {ratio} times as fast",
            "undecided": f"undecided between {best} and {choice}",
        }[ratio.verdict]
        lines.append(f"Tiles ({problem_words(heats[0][0])}{'' if final else '; without a final yet'}): {said}.")
    return lines


def _over_commits(records: Sequence[Record]) -> list[str]:
    changes = commits_of(records)
    if not changes:
        return []
    verdicts: dict[str, list[str]] = {}
    for change in changes:
        before, after = change.order[-2:]
        ratio = change.runs[after].ratio_to(change.runs[before])
        verdicts.setdefault(ratio.verdict, []).append(f"{change.words}: {ratio} times as fast from {before} to {after}")
    lines = [f"Slower since the commit before: {line}." for line in verdicts.get("slower", [])[:5]]
    counts = ", ".join(f"{len(found)} {verdict}" for verdict, found in sorted(verdicts.items()))
    return [*lines, f"From the last commit but one to the last, of {len(changes)} kernels and problems: {counts}."]


def _of_errors(records: Sequence[Record]) -> list[str]:
    shares = [
        (record.check["worst_share_of_bound"], record) for record in records if "worst_share_of_bound" in record.check
    ]
    if not shares:
        return []
    worst, record = max(shares, key=lambda pair: pair[0])
    where = f"{label(record.provider)}, {problem_words(record)}"
    return [
        f"All {len(shares)} runs passed the check against fp64; the largest error: {worst:.2g} of its bound ({where})."
    ]


def _doubts(records: Sequence[Record]) -> list[str]:
    busy = sum(bool(record.load.get("busy")) for record in records)
    if not busy:
        return []
    return [f"{busy} of {len(records)} runs were taken while others used the machine: trust ratios more than times."]
