"""``attnworks flow``: a page that steps through the tile loops of schedules, with the bytes that they move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnworks.workbench import flow as page
from attnworks.workbench import papers, schedules
from attnworks.workbench.cli.output import console, in_bytes, json_option, print_json, print_notes, print_table, table
from attnworks.workbench.cli.posed import Posed, posed_from, posed_options
from attnworks.workbench.cli.problems import machine_named, machine_option, problem_options

DEFAULT_SEQ = 1024
DEFAULT_TILE = 128
PAPERS = [*papers.FORWARD.values(), *papers.DECODE.values(), *papers.BACKWARD.values()]


@click.command()
@problem_options(heads=1, seq=DEFAULT_SEQ, head_dim=64, dtype="float16")
@posed_options
@click.option(
    "--schedule",
    "names",
    multiple=True,
    help=f"{', '.join(schedules.NAMES)} (the backend's plan on --machine), or one of your own: FILE.py:NAME. Repeat it "
    "for several side by side.  [default: standard, kv_outer, q_outer; standard, q_outer, split_kv with --decode]",
)
@click.option("--tile-q", type=click.IntRange(min=1), help=f"Rows of a Q tile.  [default: {DEFAULT_TILE}]")
@click.option("--tile-kv", type=click.IntRange(min=1), help=f"Keys of a KV tile.  [default: {DEFAULT_TILE}]")
@click.option("--backward", is_flag=True, help="The backward of the same schedules.")
@machine_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="flow.html", show_default=True)
@json_option
@click.pass_context
def flow(
    ctx: click.Context, /, names: tuple[str, ...], tile_q: int | None, tile_kv: int | None, backward: bool,
    machine: str, out: Path, as_json: bool, **_: Any,
) -> None:  # fmt: skip
    """Draw the data movement: standard attention, FlashAttention-1 and -2 side by side, one tile loop step at a time.

    Writes one HTML page that works offline; open it in a browser. docs/flow.md says how to read it.
    """
    posed = posed_from(ctx, DEFAULT_SEQ)
    problem, on = posed.problem, machine_named(machine)
    asked = []
    for name in names or (papers.DECODE if problem.form == "decode" and not backward else papers.FORWARD):
        schedule = schedules.named(name, problem, on, backward=backward)
        default = DEFAULT_TILE if schedule in PAPERS else 0  # others have tiles of their own
        asked.append(schedule.with_tiles(tile_q or default, tile_kv or default))
    told = page.story(problem, asked, lengths=posed.lengths, maps=posed.maps)
    try:
        text = page.render(told)
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    out.write_text(text, encoding="utf-8")
    if as_json:
        kept = ("name", "steps", "head_bytes", "all_bytes")
        found = [{name: one[name] for name in kept} for one in told["schedules"]]
        print_json({"problem": problem.to_json(), "page": str(out), "schedules": found})
    else:
        _print(posed, out, told)


def _print(posed: Posed, out: Path, told: dict[str, Any]) -> None:
    made = table("schedule", "steps", "bytes stepped through", "of all heads")
    for one in told["schedules"]:
        made.add_row(
            one["label"], str(one["steps"]), in_bytes(sum(one["head_bytes"].values())), in_bytes(one["all_bytes"])
        )
    print_table(told["problem"], made)
    print_notes([*filter(None, [told["stepped"]]), *posed.notes])
    console().print(f"{out}: {in_bytes(out.stat().st_size)}, open it in a browser", markup=False)
