"""Starts the tests of tests/triton_interpreter in processes whose kernels Triton interprets on the CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton_interpreter"
FILES = sorted(FOLDER.glob("test_*.py"))
LONG = ("test_conformance", "test_generations", "test_mutants")


@pytest.mark.timeout(900)
@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[pytest.mark.long] * (file.stem in LONG)) for file in FILES],
    ids=[file.stem for file in FILES],
)
def test_kernels_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True, timeout=880
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
