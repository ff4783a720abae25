"""The command ``attnworks``, as it is installed."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnworks_command

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize(
    ("command", "given", "said"), [("verify", None, "passive"), ("verify", "active", "active"), ("bench", None, None)]
)
def test_threads_wait_asleep_in_verify_alone_and_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, command: str, given: str | None, said: str | None
) -> None:
    seen = []
    cli = SimpleNamespace(main=lambda: seen.append(os.environ.get("OMP_WAIT_POLICY")))
    monkeypatch.setitem(sys.modules, "attnworks.workbench.cli", cli)
    monkeypatch.setattr(sys, "argv", ["attnworks", command, "--help"])
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_WAIT_POLICY": given})
    attnworks_command.main()
    assert seen == [said]


def test_torch_is_not_there_yet() -> None:
    code = "import sys, attnworks_command; print('torch' in sys.modules, 'attnworks' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_it_is_what_is_installed() -> None:
    said = PROJECT.read_text()
    assert 'attnworks = "attnworks_command:main"' in said
    assert '"src/attnworks_command"' in said
