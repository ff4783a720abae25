"""``attnworks generations``: standard attention, FlashAttention-1 and -2 side by side, and what the papers claim."""

from __future__ import annotations

import click
import torch
from rich.markup import escape

from attnworks.hardware import detect
from attnworks.masks import Causal
from attnworks.workbench import environment
from attnworks.workbench import generations as comparison
from attnworks.workbench.cli.output import (
    UNKNOWN,
    in_bytes,
    in_seconds,
    json_option,
    print_json,
    print_notes,
    print_table,
    progress,
    table,
)
from attnworks.workbench.cli.problems import DTYPES, Numbers
from attnworks.workbench.cli.traffic import LABELS
from attnworks.workbench.providers import describe

GPU_LENGTHS, CPU_LENGTHS = "1024,2048,4096,8192,16384", "256,512,1024"
VERDICTS = {True: "seen", False: "not seen", None: "can't tell"}
ON_CPU = (
    "On the CPU these are the reference's schedules, written to be read: their times say nothing of GPU kernels, and "
    "no cache was flushed."
)
SIZE = click.IntRange(min=1)


@click.command()
@click.option("--lengths", type=Numbers(), help=f"N, between commas.  [default: {GPU_LENGTHS}; CPU: {CPU_LENGTHS}]")
@click.option("--batch", type=SIZE, default=1, show_default=True, help="Sequences.")
@click.option("--heads", type=SIZE, help="Query and KV heads.  [default: 16; CPU: 2]")
@click.option("--head-dim", type=SIZE, default=64, show_default=True, help="Channels of q, k and v.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bfloat16; CPU: float32]")
@click.option("--causal", is_flag=True, help="The last query sees all keys, each earlier one a key less.")
@click.option("--device", help="cpu or cuda.  [default: cuda where there is one]")
@click.option("--runs", type=click.IntRange(min=5), default=50, show_default=True, help="Timed rounds.")
@click.option("--budget", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Seconds for a length.")
@json_option
def generations(
    lengths: tuple[int, ...] | None, batch: int, heads: int | None, head_dim: int, dtype: str | None, causal: bool,
    device: str | None, runs: int, budget: float, as_json: bool,
) -> None:  # fmt: skip
    """Standard attention, FlashAttention-1 and FlashAttention-2 at growing lengths, and the papers' claims beside them.

    Time, bytes by the traffic model, and the memory that a call holds beside its inputs and results.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    if gpu and not torch.cuda.is_available():
        raise click.UsageError(f"--device: was {device!r}, but torch sees no GPU")
    if device not in ("cpu", "cuda") and not device.startswith("cuda:"):
        raise click.UsageError(f"--device: was {device!r}, must be cpu, cuda or cuda:N")
    count, kind = heads or (16 if gpu else 2), DTYPES[dtype or ("bfloat16" if gpu else "float32")]
    shape = describe(
        form="dense", batch=batch, heads_q=count, heads_kv=count, seq_q=1, seq_kv=1, head_dim=head_dim,
        head_dim_v=head_dim, dtype=kind, mask=Causal() if causal else None,
    )  # fmt: skip
    asked = lengths or tuple(int(n) for n in (GPU_LENGTHS if gpu else CPU_LENGTHS).split(","))
    with progress() as report:
        found = comparison.measure(shape, asked, device, runs=runs, budget_seconds=budget, progress=report)
    claims = comparison.claims(found, device)
    title = (
        f"batch {batch}, heads {count}, d {head_dim}, {str(kind).removeprefix('torch.')}{', causal' if causal else ''} "
        f"on {detect(device).name}"
    )
    notes = _notes(gpu, found)
    if as_json:
        print_json(
            {
                "title": title,
                "device": device,
                "machine": detect(device).name,
                "versions": environment.versions(),
                "commit": environment.commit(),
                "lengths": [at.to_json() for at in found],
                "claims": [claim.to_json() for claim in claims],
                "notes": notes,
            }
        )
    else:
        _print(title, found, claims, notes)


def _notes(gpu: bool, found: list[comparison.AtLength]) -> list[str]:
    fewest = min((len(row.seconds) for at in found for row in at.rows if row.seconds), default=0)
    rounds = f"Medians of interleaved rounds, {fewest} or more."
    return [rounds + " Device time between events, the L2 flushed before each run."] if gpu else [rounds, ON_CPU]


def _print(title: str, found: list[comparison.AtLength], claims: list[comparison.Claim], notes: list[str]) -> None:
    made = table("N", "", "time", "x standard", "x FA-1", "bytes (model)", "extra memory", text_columns=2)
    for at in found:
        for row in at.rows:
            over = [_times(at, old, row.schedule) for old in ("standard", "kv_outer")]
            made.add_row(
                str(at.length) if row is at.rows[0] else "",
                LABELS[row.schedule],
                row.refused or in_seconds(row.median),
                *over,
                in_bytes(row.modelled_bytes),
                in_bytes(row.extra_bytes),
            )
    print_table(title, made)
    said = table("claim", "found here", "", "source", text_columns=4)
    for claim in claims:
        said.add_row(escape(claim.says), escape(claim.found), VERDICTS[claim.seen], escape(claim.source))
    print_table("\nWhat the papers claim", said)
    print_notes(notes)


def _times(at: comparison.AtLength, old: str, new: str) -> str:
    """How many times as fast as ``old``; nothing for what is not newer."""
    order = comparison.SCHEDULES
    ratio = at.speedup(old, new) if order.index(new) > order.index(old) else None
    return UNKNOWN if ratio is None else f"{ratio.value:.2f}"
