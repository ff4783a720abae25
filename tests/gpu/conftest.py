"""Tests that need a GPU; elsewhere each is skipped. ``make gpu-test`` runs them."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's products warn without it, and warnings are errors

import pytest
import torch

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
# Fresh memory is filled by torch's deterministic mode, which also warns of operations that have no such mode.
MARKS = (
    pytest.mark.gpu,
    NO_GPU,
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
    # A leaf that was differentiated on the capturing stream is differentiated again outside of it, on purpose.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark)
