"""``attnworks explain``: which backend and plan a problem gets, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
from rich.markup import escape

from attnworks import dispatch
from attnworks.workbench.cli.output import in_bytes, json_option, print_json, print_table, table
from attnworks.workbench.cli.problems import problem_from, problem_options
from attnworks.workbench.environment import place

DEFAULT_SEQ = 1024


@click.command()
@problem_options(heads=8, seq=DEFAULT_SEQ, head_dim=64, dtype="float32")
@click.option("--backend", default="auto", show_default=True, help=f"auto, or one of {', '.join(dispatch.NAMES)}.")
@click.option("--device", default="cpu", show_default=True, help="Where the tensors are: cpu, cuda or cuda:1.")
@json_option
@click.pass_context
def explain(ctx: click.Context, /, backend: str, device: str, as_json: bool, **_: Any) -> None:
    """The backend and plan that a problem gets here, and every reason why not the others. Runs nothing."""
    problem = replace(problem_from(ctx, DEFAULT_SEQ), device=place(device))
    found = dispatch.explain(problem, backend)
    if as_json:
        print_json(found.to_json())
        return
    plan = ", ".join(f"{name} {value}" for name, value in found.plan.to_json().items() if value and name != "backend")
    on_chip = "".join(f"; {in_bytes(size)} of {name}" for name, size in found.resources.items())
    made = table("backend", "verdict", text_columns=2)
    for verdict in found.verdicts:
        made.add_row(verdict.backend, escape("supported" if verdict.supported else "\n".join(verdict.reasons)))
    print_table(f"{found.backend}: {plan}{on_chip}", made)
