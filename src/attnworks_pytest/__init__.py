"""The pytest plugin of attnworks: the argument ``attention_case`` makes one test of every case.

A package of its own, because pytest loads plugins in every session, and attnworks would bring torch into all of them.
"""

from __future__ import annotations

from typing import Any

MARKER = (
    "attention_cases(*patterns, quick=True, seed=0): the cases of `attention_case`, by name, part of a name or tag "
    "(attnworks verify --list shows them)"
)


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: Any) -> None:
    if "attention_case" not in metafunc.fixturenames:
        return
    from attnworks.workbench import catalogue

    marker = metafunc.definition.get_closest_marker("attention_cases")
    patterns, options = (marker.args, marker.kwargs) if marker else ((), {})
    cases = catalogue.select(patterns, quick=options.get("quick", True), seed=options.get("seed", 0))
    metafunc.parametrize("attention_case", cases, ids=[case.name for case in cases])
