"""``attnworks traffic``: the bytes and FLOPs of a problem under each schedule, on a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from attnworks.hardware import Hardware
from attnworks.problem import Problem
from attnworks.traffic import SCHEDULES, Traffic, estimate, paper_tiles
from attnworks.workbench import levels, schedules
from attnworks.workbench.cli.levels import show
from attnworks.workbench.cli.output import (
    console,
    in_bytes,
    in_rate,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    table,
)
from attnworks.workbench.cli.posed import Posed, posed_from, posed_options, titled
from attnworks.workbench.cli.problems import machine_named, machine_option, problem_options

DEFAULT_SEQ = 4096
LABELS = {
    "standard": "standard attention",
    "kv_outer": "FA-1: KV outer",
    "q_outer": "FA-2: Q outer",
    "split_kv": "decode: split KV",
}
STATEMENT = "Tiling saves bytes, not FLOPs: without a mask every schedule does the same products."


@click.command()
@problem_options(heads=1, seq=DEFAULT_SEQ, head_dim=128, dtype="float16")
@posed_options
@machine_option
@click.option("--tile-q", type=click.IntRange(min=1), help="Rows of a Q tile.  [default: FlashAttention-1's formula]")
@click.option("--tile-kv", type=click.IntRange(min=1), help="Keys of a KV tile.  [default: FlashAttention-1's formula]")
@click.option(
    "--schedule",
    "names",
    multiple=True,
    help=f"Bytes by memory level, with the cache before the slow memory, of {', '.join(schedules.NAMES)} (the "
    "backend's plan on --machine), or of one of your own: FILE.py:NAME. Repeat it for several.",
)
@click.option("--backward", is_flag=True, help="The backward of --schedule.")
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON of what a profiler counted for --schedule, to stand beside the prediction: docs/traffic.md.",
)
@json_option
@click.pass_context
def traffic(
    ctx: click.Context, /, machine: str, tile_q: int | None, tile_kv: int | None, names: tuple[str, ...],
    backward: bool, measured: Path | None, as_json: bool, **_: Any,
) -> None:  # fmt: skip
    """Bytes across the slow memory and FLOPs: standard attention, FlashAttention-1 and -2.

    Without options: the well-known bill of one head, N = 4096, d = 128, fp16, on a card of 2 TB/s and 100 TFLOP/s.
    With --schedule: bytes by memory level, and the predicted time with what bounds it.
    """
    if not names and (backward or measured):
        raise click.UsageError("--backward and --measured are about a --schedule: name one")
    if measured and len(names) > 1:
        raise click.UsageError("--measured is about one --schedule: name one")
    posed, on = posed_from(ctx, DEFAULT_SEQ), machine_named(machine)
    problem = posed.problem
    if names:
        asked = [schedules.named(name, problem, on, backward=backward) for name in names]
        tiled = [one.with_tiles(tile_q or 0, tile_kv or 0) for one in asked]
        found = [levels.levels(problem, one, on, lengths=posed.lengths, maps=posed.maps) for one in tiled]
        show(problem, found, _read(measured) if measured else None, as_json, posed.notes)
        return
    tiles = (tile_q, tile_kv) if tile_q and tile_kv else paper_tiles(problem, on)
    tiles = (tile_q or tiles[0], tile_kv or tiles[1])
    bills = [_bill(posed, schedule, *tiles) for schedule in _schedules(problem)]
    if as_json:
        print_json(_summary(problem, on, bills))
    else:
        _print(problem, on, bills, posed.notes)


def _bill(posed: Posed, schedule: str, tile_q: int, tile_kv: int) -> Traffic:
    if posed.maps:
        return schedules.bill(posed.problem, schedule, tile_q, tile_kv, posed.maps)
    return estimate(posed.problem, schedule, tile_q, tile_kv, lengths=posed.lengths)


def _read(file: Path) -> levels.Measured:
    try:
        return levels.measured_from(json.loads(file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--measured: {file} is no JSON: {error}") from error


def _schedules(problem: Problem) -> tuple[str, ...]:
    return ("standard", "q_outer", "split_kv") if problem.form == "decode" else SCHEDULES


def _summary(problem: Problem, on: Hardware, bills: list[Traffic]) -> dict[str, Any]:
    standard = bills[0]
    return {
        "problem": problem.to_json(),
        "machine": {"name": on.name, "bandwidth": on.bandwidth, "flops": on.flops_for(problem.dtype)},
        "matrix_bytes": problem.seq_q * problem.seq_kv * problem.element_size,
        "scores_and_probs_bytes": standard.scores_and_probs,
        "scores_and_probs_seconds": standard.scores_and_probs / on.bandwidth if on.bandwidth else None,
        "minimum_bytes": standard.minimum_bytes,
        "flops": standard.flops,
        "flops_seconds": _flops_seconds(standard.flops, problem, on),
        "schedules": [
            bill.to_json()
            | {
                "memory_seconds": bill.memory_seconds(on),
                "compute_seconds": bill.compute_seconds(on, problem.dtype),
            }
            for bill in bills
        ],
        "statement": STATEMENT,
    }


def _flops_seconds(flops: int, problem: Problem, on: Hardware) -> float | None:
    rate = on.flops_for(problem.dtype)
    return flops / rate if rate else None


def _print(problem: Problem, on: Hardware, bills: list[Traffic], notes: list[str]) -> None:
    p, standard = problem, bills[0]
    columns = ("tiles", "all bytes", "take", "FLOPs", "take", "Q", "K, V", "out", "state", "S, P")
    made = table("schedule", *columns)
    for bill in bills:
        tiled = bill.schedule in ("kv_outer", "q_outer")
        parts = (bill.q, bill.kv, bill.out, bill.state, bill.scores_and_probs)
        made.add_row(
            LABELS[bill.schedule],
            f"{bill.tile_q} x {bill.tile_kv}" if tiled else "",
            in_bytes(bill.total_bytes),
            in_seconds(bill.memory_seconds(on)),
            in_rate(bill.executed_flops, "FLOP"),
            in_seconds(bill.compute_seconds(on, p.dtype)),
            *(in_bytes(part) if part else "0" for part in parts),
        )
    print_table(f"{titled(p)}\non {on.name}", made)
    console().print()
    console().print(escape(_matrix_sentence(p, on, standard)))
    rate = on.flops_for(p.dtype)
    time = f", {in_seconds(_flops_seconds(standard.flops, p, on))} at {in_rate(rate, 'FLOP/s')}" if rate else ""
    console().print(f"Q Kᵀ and P V of the visible pairs: {in_rate(standard.flops, 'FLOP')}{time}.")
    console().print(STATEMENT, style="bold")
    print_notes(_notes(p, on, bills) + notes)


def _matrix_sentence(p: Problem, on: Hardware, standard: Traffic) -> str:
    moved = standard.scores_and_probs
    time = f", {in_seconds(moved / on.bandwidth)} at {in_rate(on.bandwidth, 'B/s')}" if on.bandwidth else ""
    matrix = in_bytes(p.seq_q * p.seq_kv * p.element_size)
    return (
        f"Standard attention: {matrix} per {p.seq_q} x {p.seq_kv} matrix; "
        f"S and P written once and read once each are {moved:,} bytes{time}."
    )


def _notes(p: Problem, on: Hardware, bills: list[Traffic]) -> list[str]:
    notes = []
    if p.mask and bills[-1].executed_flops < bills[0].executed_flops:
        notes.append("A mask that hides whole tiles saves both: they are neither loaded nor computed.")
    if p.form != "decode":
        notes.append(
            f"Backward: {in_rate(bills[0].backward_flops, 'FLOP')} in four products with P stored, "
            f"{in_rate(bills[-1].backward_flops, 'FLOP')} in five where the tiled ones compute S again."
        )
    head = p.seq_kv * (p.head_dim + p.head_dim_v) * p.element_size
    if p.form != "decode" and on.shared_cache_bytes and head <= on.shared_cache_bytes:
        cache, least = in_bytes(on.shared_cache_bytes), in_bytes(bills[0].minimum_bytes)
        notes.append(
            f"K and V of a head ({in_bytes(head)}) fit the shared cache ({cache}): re-reads of them can be served "
            f"there, and the slow memory sees as little as {least}."
        )
    if not on.bandwidth:
        notes.append("No times: the rates are not known, for want of the native extension that measures them.")
    return notes
