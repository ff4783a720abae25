"""``attnworks diagnose``: what is probably broken?"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click
from rich.padding import Padding
from rich.text import Text

from attnworks.workbench import catalogue
from attnworks.workbench.cli import output
from attnworks.workbench.conventions import BY_NAME, load_subject
from attnworks.workbench.diagnose import Diagnosis, kills
from attnworks.workbench.diagnose import diagnose as run
from attnworks.workbench.diagnose.explain import explain
from attnworks.workbench.diagnose.script import standalone
from attnworks.workbench.faults import FAULTS
from attnworks.workbench.isolation import TIMEOUT
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.probing import prepare
from attnworks.workbench.subjects import Subject


@click.command()
@click.argument("target", required=False)
@click.option(
    "--convention", type=click.Choice(list(BY_NAME)), help="How TARGET is called.  [default: by its parameters' names]"
)
@click.option("--in-process", is_flag=True, help="Run TARGET in this process: faster, but a crash ends the run.")
@click.option("--timeout", default=TIMEOUT, show_default=True, help="Seconds for a call of TARGET, then it is killed.")
@click.option("--mutant", help='Diagnose a known wrong kernel instead; "list" names them.')
@click.option("--case", "cases", multiple=True, help="Failing cases of verify, asked beside the probes.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--script", type=click.Path(path_type=Path), help="Write the smallest failing input to this file.")
@click.option("--kill-table", is_flag=True, help="Diagnose every known fault, and show which checks catch it.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="Seeds of the kill table.")
@click.option("--ranks/--no-ranks", default=True, show_default=True, help="Diagnose them too; that takes minutes.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes for the kill table.  [default: one for each core]")
@click.option("--write", type=click.Path(path_type=Path), help="Write the kill table to this file (Markdown).")
@output.json_option
def diagnose(
    target: str | None,
    convention: str | None,
    in_process: bool,
    timeout: float,
    mutant: str | None,
    cases: tuple[str, ...],
    seed: int,
    script: Path | None,
    kill_table: bool,
    seeds: int,
    ranks: bool,
    jobs: int | None,
    write: Path | None,
    as_json: bool,
) -> None:
    """Find out what is wrong with an attention kernel: TARGET is package.module:function or path/file.py:function.

    Its answers to small problems are compared with those of more than a hundred known faults; patterns in the errors
    and a small failing input come with it. Exit code 1 if the kernel is wrong.
    """
    if mutant == "list":
        click.echo("\n".join(FAULTS))
        return
    if kill_table:
        _kill_table(seeds, ranks, jobs or os.cpu_count() or 1, write, as_json)
        return
    if (target is None) == (mutant is None):
        raise click.UsageError("name either a kernel (package.module:function) or a --mutant")
    prepared = None if target is None else prepare(target, convention, isolated=not in_process, timeout=timeout)
    subject = Mutant(mutant or "") if prepared is None else prepared.subject
    chosen = catalogue.select(cases, seed=seed) if cases else ()
    with output.progress() as report:
        found = run(subject, cases=chosen, seed=seed, progress=report)
    if prepared is not None:
        prepared.close()
    text = ""
    if script or as_json:
        text = _script(subject if target is None else load_subject(target, convention), found, target or "")
    if script and text:
        script.write_text(text, encoding="utf-8")
    if as_json:
        output.print_json(found.to_json() | {"script": text})
    else:
        _print(found, script if text else None)
    sys.exit(0 if found.right else 1)


def _kill_table(seeds: int, ranks: bool, jobs: int, write: Path | None, as_json: bool) -> None:
    with output.progress() as report:
        rows = kills.table(seeds=seeds, ranks=ranks, jobs=jobs, progress=report)
        by_output = []
        if write and ranks:
            by_output = kills.spread(
                partial(kills.rank, output_only=True), tuple(FAULTS), jobs, report, "ranks by dense outputs"
            )
    if write:
        write.write_text(kills.page(rows, by_output), encoding="utf-8")
    if as_json:
        output.print_json([row.to_json() for row in rows])
    else:
        columns = ("rank", "distance", "rival") if ranks else ()
        listed = output.table("fault", "caught by", *columns, text_columns=2)
        for row in rows:
            check = row.kills[0].check if row.caught else "nothing"
            words = [row.fault, check]
            if ranks:
                distance = max(found.distance for found in row.ranks)
                words += [row.ranks_in_words(), f"{distance:.2f}", row.ranks[0].rival]
            listed.add_row(*words)
        named = f", {sum(row.named for row in rows)} named first or second" if ranks else ""
        output.print_table(f"of {len(rows)} faults {sum(row.caught for row in rows)} are caught{named}", listed)
    sys.exit(0 if all(row.caught for row in rows) else 1)


def _script(subject: Subject, found: Diagnosis, target: str) -> str:
    if found.smallest is None or found.smallest.case.form != "dense":
        return ""
    return standalone(subject, found.smallest.case, target)


def _print(found: Diagnosis, script: Path | None) -> None:
    console = output.console()
    for heading, lines in explain(found):
        style = "green" if found.right else "bold"
        console.print(Text(found.subject if found.right else heading, style=style))
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        console.print()
    if script:
        console.print(Text(f"written to {script}: needs torch and the kernel, exits 1 while it is wrong"))
    elif found.smallest is not None and found.smallest.case.form == "dense":
        console.print(Text("--script FILE writes it as a script of its own", style="dim"))
