"""One record with easy numbers, for tests of what is made of records."""

from __future__ import annotations

from attnworks.workbench.records import Record

RECORD = Record(
    session="s",
    when="2026-01-01T00:00:00+00:00",
    provider="attnworks",
    form="attention(q, k, v)",
    problem={"form": "dense"},
    plan={"schedule": "tiled"},
    seconds=(0.5, 0.25, 0.25),
    check={"worst_share_of_bound": 0.1},
    flops=1000,
    minimum_bytes=400,
    modelled_bytes=None,
    peak_extra_bytes=10,
    ceilings={"read_bytes_per_second": 3200.0, "flops_per_second": None},
    conditions={"threads": 2},
    machine={"name": "cpu"},
    versions={"torch": "2"},
    commit=None,
    load={"busy": False},
    notes=("3 runs instead of 50",),
)
