"""Writes docs/support_matrix.json and .md: which backend runs which feature, asked of the backends' own verdicts.

`make matrix` runs it. The two files are committed; tests/test_support_matrix.py fails if they are stale, or if a cell
that they call supported has become a refusal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attnworks import ALiBi, Bias, Causal, Sink, Softcap, Window, masks, scores
from attnworks.backends import cpu, cuda, triton
from attnworks.dispatch import BACKENDS
from attnworks.hardware import Hardware, load
from attnworks.problem import Problem

DOCS = Path(__file__).parent
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"form": "dense"},
    "varlen": {"form": "varlen", "total_q": 256, "total_kv": 256},
    "decode": {"form": "decode", "layout": "bshd"},
    "paged": {"form": "decode", "layout": "bshd", "page_size": 16},
}
CPU = Hardware(name="any", kind="cpu", units=2)
# Backends are asked for a CPU, but for those that run on GPUs only. A verdict is pure: no such device is needed here.
PLACES = {name: ("cuda:0", load("h200-sxm")) for name in (cuda.NAME, triton.NAME)}
# What a backend without fp32 is asked in.
DTYPES = {cuda.NAME: torch.bfloat16}

# Everything that a row does not change.
PLAIN = Problem(
    form="dense",
    batch=2,
    heads_q=8,
    heads_kv=8,
    seq_q=128,
    seq_kv=128,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.float32,
    device="cpu",
    scale=0.125,
    q_strides=(65536, 8192, 64),
    k_strides=(65536, 8192, 64),
    v_strides=(65536, 8192, 64),
)


def masked(mask: object) -> dict[str, Any]:
    return {"mask": masks.split(mask)[0]}


def scored(*modifiers: object) -> dict[str, Any]:
    return {"scores": scores.split(modifiers)[0]}


def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def shifted(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + 1


ONES = torch.ones(128, 128)
# group → row → the fields of the Problem that it changes
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "dtype": {name: {"dtype": getattr(torch, name)} for name in ("float32", "bfloat16", "float16", "float64")},
    "mask": {
        "none": {},
        "causal": masked(Causal()),
        "causal, top-left": masked(Causal("top-left")),
        "window": masked(Window(16, 8)),
        "causal & window": masked(Causal() & Window(16, None)),
        "both alignments at once": masked(Causal() & Causal("top-left")),
        "boolean tensor": masked(ONES.bool()),
        "predicate": masked(visible),
    },
    "scores": {
        "softcap": scored(Softcap(50.0)),
        "ALiBi": scored(ALiBi(ONES[0, :8])),
        "bias": scored(Bias(ONES)),
        "sink": scored(Sink(ONES[0, :8])),
        "function": scored(shifted),
    },
    "heads": {
        "MHA": {},
        "GQA 8/2": {"heads_kv": 2},
        "MQA 8/1": {"heads_kv": 1},
    },
    "head_dim / head_dim_v": {
        f"{dim}/{dim_v}": {"head_dim": dim, "head_dim_v": dim_v}
        for dim, dim_v in ((1, 1), (40, 40), (64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (576, 512))
    },
    "layout": {
        "bhsd": {"layout": "bhsd"},
        "bshd": {"layout": "bshd"},
        "any strides, last dim contiguous": {"k_strides": (3, 2**33, 2**31)},
    },
    "cache dtype": {name: {"kv_dtype": getattr(torch, name)} for name in ("float8_e4m3fn", "float8_e5m2", "int8")},
    "result": {
        "LSE": {"return_lse": True},
        "gradients": {"differentiable": True},
        "forward-mode AD, vmap": {"transformed": True},
        "deterministic": {"deterministic": True},
        "batch_invariant": {"batch_invariant": True},
    },
}
# Rows that have no meaning in a form: packed and cached tensors have one layout, only caches are quantised.
MEANINGLESS = {("layout", form): ("bhsd", "bshd") for form in ("varlen", "decode", "paged")} | {
    ("cache dtype", form): ("float8_e4m3fn", "float8_e5m2", "int8") for form in ("dense", "varlen")
}


def cells() -> Iterator[tuple[str, str, str, str, tuple[str, ...]]]:
    """(group, feature, backend, form, reasons); no reasons: supported."""
    for group, rows in FEATURES.items():
        for feature, changes in rows.items():
            for backend in BACKENDS:
                device, hardware = PLACES.get(backend.NAME, ("cpu", CPU))
                plain = dataclasses.replace(PLAIN, device=device, dtype=DTYPES.get(backend.NAME, PLAIN.dtype))
                for form, fields in FORMS.items():
                    if feature not in MEANINGLESS.get((group, form), ()):
                        problem = dataclasses.replace(plain, **(fields | changes))
                        with patch.object(cuda, "missing", return_value=""):  # as on a machine with NVRTC
                            reasons = backend.verdict(problem, hardware).reasons
                        yield group, feature, backend.NAME, form, reasons


def matrix() -> dict[str, Any]:
    """group → feature → backend → form → True, or the reasons why not; and the CPU backend's instruction sets."""
    table: dict[str, Any] = {}
    for group, feature, backend, form, reasons in cells():
        row = table.setdefault(group, {}).setdefault(feature, {}).setdefault(backend, {})
        row[form] = list(reasons) or True
    native = DOCS.parent / "native"
    return {"features": table, "isas": sorted(path.stem.removeprefix("isa_") for path in native.glob("isa_*.cpp"))}


def markdown(found: dict[str, Any]) -> str:
    names = [backend.NAME for backend in BACKENDS]
    columns = [f"{name}: {form}" for name in names for form in FORMS]
    lines = [
        "# Support matrix",
        "",
        "Written by `make matrix` from the backends' own verdicts: of `cuda` and `triton` for an NVIDIA GPU of compute",
        "capability 9.0 ([gpu.md](gpu.md)), of the others for a CPU with the native extension built. In fp32 where the",
        "row says no other dtype; `cuda`, which has none, in bf16. A test fails if a",
        "cell that says yes here becomes a refusal. An empty cell has no meaning in that form. A backend",
        'refuses with its reasons (listed below); `backend="auto"` then goes on to the next, and the last can do all.',
        "",
    ]
    reasons: dict[str, None] = {}
    for group, rows in found["features"].items():
        lines += [f"| {group} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
        for feature, by_backend in rows.items():
            marks = []
            for name in names:
                for form in FORMS:
                    cell = by_backend[name].get(form)
                    marks.append("" if cell is None else "yes" if cell is True else "no")
                    reasons |= dict.fromkeys(f"{name}: {reason}" for reason in (cell if isinstance(cell, list) else ()))
            lines.append(f"| {feature} | " + " | ".join(marks) + " |")
        lines.append("")
    lines += ["## Reasons", "", *(f"- {reason}" for reason in reasons), ""]
    lines += [
        "## Instruction sets of the cpu backend",
        "",
        ", ".join(found["isas"]) + ": the best that the machine has is chosen at run time, a `Plan` names another.",
        "The tests run each one that their machine has, and a C++ test runs NEON under an emulator.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if not cpu.isas():
        raise SystemExit("the matrix is that of a machine with the native extension: run `make native` first")
    if not find_spec("triton"):
        raise SystemExit("the matrix is that of a machine with Triton: install requirements-dev.txt first")
    found = matrix()
    (DOCS / "support_matrix.json").write_text(json.dumps(found, indent=1) + "\n")
    (DOCS / "support_matrix.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
