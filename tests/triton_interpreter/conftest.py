"""Tests that run kernels in Triton's interpreter. The mode is fixed when a kernel is decorated, so they have a pytest
process of their own, started with TRITON_INTERPRET=1 by tests/test_triton_interpreter.py; elsewhere none is collected.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    torch.set_num_threads(1)  # beside a kernel that runs in Python a second has nothing to do
