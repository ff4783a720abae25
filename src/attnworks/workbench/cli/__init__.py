"""The command line, ``attnworks COMMAND``.

Each command is a file of its own beside this one, loaded when it is asked for, and holds a click command of its own
name. Every command takes ``--json``: only JSON on stdout then, progress on stderr."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

import attnworks
from attnworks.errors import UnsupportedError
from attnworks.workbench.quick_check import NotVerifiedError

COMMANDS = (
    *("verify", "diagnose", "bench", "history", "compare", "regress", "report"),
    *("generations", "sweep", "casestudy", "traffic", "flow", "explain", "devices"),
)


class _Commands(click.Group):
    """Loads commands by name; turns the library's errors into one line without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if find_spec(f"{__name__}.{name}")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        command = getattr(import_module(f"{__name__}.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, UnsupportedError, NotVerifiedError) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:  # not about a file: a closed pipe is click's own to handle
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(attnworks.__version__, prog_name="attnworks")
def main() -> None:
    """Prove attention kernels right, measure them, count the bytes they move."""
