"""The committed support matrix is what the verdicts say, and no supported cell turns into a refusal."""

import importlib.util
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnworks.backends import cpu

DOCS = Path(__file__).parent.parent / "docs"
pytestmark = [
    pytest.mark.skipif(not cpu.isas(), reason="the matrix is that of a machine with the native extension"),
    pytest.mark.skipif(not find_spec("triton"), reason="the matrix is that of a machine with Triton"),
]


def generator():
    spec = importlib.util.spec_from_file_location("support_matrix", DOCS / "support_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed():
    return json.loads((DOCS / "support_matrix.json").read_text())["features"]


def test_no_supported_cell_has_become_a_refusal():
    now = {cell[:4]: cell[4] for cell in generator().cells()}
    lost = []
    for group, rows in committed().items():
        for feature, by_backend in rows.items():
            for backend, forms in by_backend.items():
                for form, was in forms.items():
                    reasons = now.get((group, feature, backend, form), ("no longer asked",))
                    if was is True and reasons:
                        lost.append(f"{backend} {form}, {group} {feature}: {'; '.join(reasons)}")
    assert lost == []


def test_the_committed_files_are_fresh():
    module = generator()
    found = module.matrix()
    stale = "run `make matrix` and commit what it writes"
    assert (DOCS / "support_matrix.json").read_text() == json.dumps(found, indent=1) + "\n", stale
    assert (DOCS / "support_matrix.md").read_text() == module.markdown(found), stale


def test_the_last_backend_supports_every_cell():
    assert all(not reasons for *_, backend, _, reasons in generator().cells() if backend == "reference")


def test_compiled_instruction_sets_are_listed():
    listed = json.loads((DOCS / "support_matrix.json").read_text())["isas"]
    assert set(cpu._native.compiled_isas()) <= set(listed)
