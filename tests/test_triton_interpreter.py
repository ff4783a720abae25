"""Starts the tests of tests/triton_interpreter in a process whose kernels Triton interprets on the CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton_interpreter"


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
