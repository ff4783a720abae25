"""The command ``attnworks``. A package of its own, because what torch reads when it is loaded must be said before.

Arguments and commands are in ``attnworks.workbench.cli``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    if "verify" in sys.argv[1:2]:
        # The oracle's threads wait asleep: spinning ones take the cores from the kernel and from each other, for half
        # of the time of a quick run on two cores. No time that is measured here is a result.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from attnworks.workbench.cli import main as command

    command()
