"""Imports go one way (the layers of the package), and importing attnworks stays cheap: held by reading the source."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import attnworks

PACKAGE = Path(attnworks.__file__).parent

# A module may import its own layer's predecessors and, inside a layer, those named before it. Anything not listed here
# fails, so that a new module gets its place on purpose.
LAYERS: list[tuple[str, ...]] = [
    (
        "errors",
        "expressions",
        "masks",
        "scores",
        "modifiers",
        "tilemap",
        "problem",
        "cache",
        "merge",
        "hardware",
        "memory",
        "watchers",
    ),
    ("traffic", "plan", "tuned"),
    ("backends",),
    ("dispatch",),
    ("autograd",),
    ("known",),
    ("prepared",),
    ("calls",),
    ("specs", "ops"),
    ("api",),
    ("workbench", "integrations", "testing"),
]
ORDER = {name: (layer, place) for layer, names in enumerate(LAYERS) for place, name in enumerate(names)}
HEAVY = (
    "click",
    "rich",
    "platformdirs",
    "triton",
    "matplotlib",
    "jinja2",
    "openvino",
    "onnxruntime",
    "pytest",
    "transformers",
)
# What only some calls need comes with the first of them.
LATER = (
    "ops",
    "specs",
    "tuned",
    "tilemap",
    "modifiers",
    "traffic",
    "workbench",
    "expressions.tracing",
    "backends.cpu.maps",
)


@cache
def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> set[str]:
    """What a file imports from attnworks, at its top or inside functions, as dotted paths without the package name."""
    names: set[str] = set()
    known = {name_of(module) for module in modules()} | {"_native"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("attnworks.") for alias in node.names if alias.name.startswith("attnworks.")
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "attnworks":
            inside = node.module.removeprefix("attnworks").removeprefix(".")
            for alias in node.names:
                deeper = f"{inside}.{alias.name}".removeprefix(".")
                names.add(deeper if deeper in known else inside)
    return names - {""}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_every_import_points_to_an_earlier_layer(path):
    name = name_of(path)
    top = name.split(".")[0]
    assert top in ORDER, f"{name} has no place in LAYERS"
    for other in imported(path):
        other_top = other.split(".")[0]
        if other_top == top:
            continue
        assert other_top in ORDER, f"{name} imports {other}, which has no place in LAYERS"
        assert ORDER[other_top] < ORDER[top], f"{name} imports {other}, which comes after it"


@pytest.mark.parametrize("path", [p for p in modules() if name_of(p).startswith("backends")], ids=name_of)
def test_backends_never_import_each_other(path):
    own = name_of(path).split(".")[1:2]
    for other in imported(path):
        parts = other.split(".")
        if parts[0] == "backends" and len(parts) > 1:
            assert parts[1:2] == own, f"{name_of(path)} imports {other}"


def test_the_checks_above_see_what_they_check():
    found = set().union(*(imported(path) for path in modules()))
    assert {"masks", "backends.cpu", "backends.reference", "dispatch"} <= found


def test_importing_loads_torch_and_nothing_of_the_cli_or_plots():
    """A module counts only if torch alone did not load it already."""
    script = f"""
import sys
import torch
before = set(sys.modules)
import attnworks
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & set({HEAVY!r})), [name for name in {LATER!r} if "attnworks." + name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[] []"
    assert set(LATER) <= {name_of(path) for path in modules()}
