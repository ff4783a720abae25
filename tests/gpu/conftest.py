"""Tests that need a GPU; elsewhere all are collected and one is left to say that. ``make gpu-test`` runs them."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's products warn without it, and warnings are errors

import pytest
import torch

HERE = Path(__file__).parent
GPU = torch.cuda.is_available()
# Fresh memory is filled by torch's deterministic mode, which also warns of operations that have no such mode.
MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="PyTorch finds no GPU"),
    pytest.mark.filterwarnings("ignore:.*determinis.*:UserWarning"),
    # A leaf that was differentiated on the capturing stream is differentiated again outside of it, on purpose.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        for mark in MARKS:
            item.add_marker(mark)
    if not GPU and len(ours) > 1:
        needless = set(ours[1:])
        items[:] = [item for item in items if item not in needless]
        config.hook.pytest_deselected(items=ours[1:])
