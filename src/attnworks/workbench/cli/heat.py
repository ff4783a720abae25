"""A measured sweep on the terminal: a heat map of ratios, what was rejected and why, and how it ended."""

from __future__ import annotations

from attnworks.plan import Plan
from attnworks.workbench.cli.counted import CPU_COUNTED, GPU_COUNTED, in_counts
from attnworks.workbench.cli.output import console, in_seconds, print_notes, print_table, table
from attnworks.workbench.findings import place
from attnworks.workbench.measured_sweep import Found, Standing, words

# From half as fast as the fastest and less to as fast: share of the fastest, colours of background and text.
SHADES = (
    (0.98, "black on spring_green3"),
    (0.95, "black on dark_sea_green2"),
    (0.9, "black on khaki1"),
    (0.75, "black on light_salmon1"),
    (0.0, "white on indian_red"),
)
MOST_REASONS = 12


def print_found(title: str, found: Found) -> None:
    """Heat maps, one for each choice of warps and stages, then the rejected and the outcome."""
    fastest = max((one.ratio.value for one in found.standings if one.ratio), default=1.0)
    for (warps, stages), panel in panels(found.standings).items():
        rows, columns, cells = grid(panel)
        made = table("tile_q \\ tile_kv" if rows != (0,) else "keys of a task", *(str(size) for size in columns))
        for row in rows:
            made.add_row(str(row or ""), *(_cell(cells.get((row, column)), found.table, fastest) for column in columns))
        choice = f", {warps} warps, {stages} stages" if warps else ""
        print_table(f"{title}{choice}\ntimes as fast as {words(found.table)}, the backend's choice (*)", made)
        console().print()
    print_notes(_rejected(found))
    _print_counted(found)
    for line in outcome(found):
        console().print(line, markup=False)


def panels(standings: tuple[Standing, ...]) -> dict[tuple[int, int], list[Standing]]:
    """By (warps, stages), in order."""
    found: dict[tuple[int, int], list[Standing]] = {}
    for one in standings:
        found.setdefault((one.plan.warps, one.plan.stages), []).append(one)
    return dict(sorted(found.items()))


def grid(panel: list[Standing]) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, int], Standing]]:
    """(rows, columns, what stands where): tile_q by tile_kv; of split_kv one row of the keys of a task."""
    cells = {place(one.plan): one for one in panel}
    rows, columns = (tuple(sorted({where[axis] for where in cells})) for axis in (0, 1))
    return rows, columns, cells


def _cell(one: Standing | None, choice: Plan, fastest: float) -> str:
    if one is None:
        return ""
    if one.rejected:
        return "[dim]x[/]"
    if one.ratio is None:
        return "[dim]...[/]" if one.plan != choice else "1.00*"
    style = next(style for share, style in SHADES if one.ratio.value >= share * fastest)
    return f"[{style}]{one.ratio.value:.2f}{'*' if one.plan == choice else ''}[/]"


def _print_counted(found: Found) -> None:
    """Of the finalists what a profiler counted, where it was asked to; why not, if it could not."""
    finalists = [(one, one.record) for one in found.standings if one.final and one.record]
    gpu = found.problem.device != "cpu"
    if any(record.profile for _, record in finalists):
        made = table("finalist", "ratio", *(GPU_COUNTED if gpu else CPU_COUNTED))
        for one, record in finalists:
            ratio = f"{one.ratio.value:.2f}" if one.ratio else ""
            made.add_row(words(one.plan), ratio, *in_counts(record, gpu))
        print_table("of one call on cold caches", made)
    said = [note for _, record in finalists for note in record.notes if note.startswith("no profile")]
    print_notes(list(dict.fromkeys(said)))


def _rejected(found: Found) -> list[str]:
    lines = [f"x {words(one.plan)}: {'; '.join(one.rejected)}" for one in found.standings if one.rejected]
    more = len(lines) - MOST_REASONS
    return lines[:MOST_REASONS] + ([f"and {more} more, which --json lists"] if more > 0 else [])


def outcome(found: Found) -> list[str]:
    """In sentences: the winner, or what is left to do."""
    timed = sum(one.ratio is not None for one in found.standings)
    if found.remaining:
        return [f"{timed} timed, {found.remaining} not reached in the time: run the same command again to go on."]
    if found.best is None or found.ratio is None:
        return ["All have run, the final is still to come: run the same command again."]
    record = next(one.record for one in found.standings if one.plan == found.best)
    took = in_seconds(record.median) if record else ""
    best, choice = words(found.best), words(found.table)
    if found.best == found.table:
        return [f"Fastest: the backend's choice, {choice}, {took}."]
    if found.ratio.verdict != "faster":
        return [f"Fastest: {best}, {took}; against {choice} {found.ratio}, so the backend's choice stays."]
    return [f"Fastest: {best}, {took}, {found.ratio} times as fast as {choice}."]
