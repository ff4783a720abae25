"""``attnworks regress``: did it get worse? For continuous integration."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from attnworks.workbench import comparison
from attnworks.workbench.cli.compare import print_compared
from attnworks.workbench.cli.output import console, json_option, print_json
from attnworks.workbench.cli.stored import apart, db_option
from attnworks.workbench.history import History, selection

WORSE, NOTHING = 1, 2


@click.command()
@click.option(
    "--baseline", help="Selection to compare with.  [default: the commit measured before, on the same machine]"
)
@click.option("--candidate", help="Selection that must not be worse.  [default: the commit measured last]")
@click.option(
    "--control",
    default="sdpa",
    show_default=True,
    help='A kernel timed in the same sessions that did not change; "none" for plain times.',
)
@db_option
@json_option
def regress(baseline: str | None, candidate: str | None, control: str, db: Path | None, as_json: bool) -> None:
    """Exit with 1 if times or errors got worse than the noise, or a kernel fails that did not.

    Times are taken in units of the control's in the same rounds, so that a slower machine is no regression. Exit code
    2 if there is nothing to compare.
    """
    if (baseline is None) != (candidate is None):
        raise click.UsageError("--baseline and --candidate: give both or neither")
    history = History(db)
    try:
        if baseline is None or candidate is None:
            before, after = comparison.newest_two(history)
        else:
            before, after = (history.records(**selection(text)) for text in (baseline, candidate))
        apart(before, after)
        found = comparison.regress(history, before, after, None if control == "none" else control)
    except comparison.NothingToCompareError as error:
        click.echo(f"nothing to compare: {error}", err=True)
        if as_json:
            print_json({"nothing_to_compare": str(error)})
        sys.exit(NOTHING)
    if as_json:
        print_json(found.to_json())
    else:
        print_compared(found, None if control == "none" else control)
        _print_verdict(found)
    sys.exit(WORSE if found.worse else 0)


def _print_verdict(found: comparison.Compared) -> None:
    worse = sum(one.worse for one in found.comparisons) + len(found.lost)
    if worse:
        console().print(f"worse: {worse} of {len(found.comparisons) + len(found.lost)}", style="bold red")
    else:
        console().print(f"not worse: {len(found.comparisons)} compared", style="bold green")
