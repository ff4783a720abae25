"""Record: one kernel measured on one problem, with all it takes to judge the number. One format, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attnworks.workbench import statistics
from attnworks.workbench.statistics import Ratio

SCHEMA = 2


@dataclass(frozen=True)
class Record:
    """One measured run.

    ``session``: records with the same one were interleaved, round i of one with round i of the others. ``form``: the
    exact call that was timed. ``seconds``: every timed run, in order. ``check``: error against fp64 on this very
    problem (the largest, as a share of its bound). ``flops`` counts visible pairs; ``minimum_bytes`` and
    ``modelled_bytes`` as in ``attnworks.traffic``. ``peak_extra_bytes``: memory that was resident only during a call,
    the result left out. ``ceilings``: rates measured between the runs (bytes/s, FLOP/s; None where they could not
    be). ``conditions``: threads, flush, warm-up, inputs. ``load``: what others took of the machine meanwhile.
    ``notes``: what a reader must know.

    ``host_seconds``: on a GPU what the host needed for each of some calls, whose ``seconds`` are the device's; empty on
    a CPU. ``state``: clocks, power, temperature and throttling while it ran, as ``sampling.py`` says. ``profile``: what
    a profiler counted of one call (``counters.py``), None where none was asked or had.
    """

    session: str
    when: str
    provider: str
    form: str
    problem: dict[str, Any]
    plan: dict[str, Any] | None
    seconds: tuple[float, ...]
    check: dict[str, float]
    flops: int
    minimum_bytes: int
    modelled_bytes: int | None
    peak_extra_bytes: int | None
    ceilings: dict[str, float | None]
    conditions: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    load: dict[str, Any]
    notes: tuple[str, ...] = ()
    host_seconds: tuple[float, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] | None = None
    schema: int = field(default=SCHEMA)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def percentile_90(self) -> float:
        return statistics.percentile_90(self.seconds)

    @property
    def host_median(self) -> float | None:
        return statistics.median(self.host_seconds) if self.host_seconds else None

    @property
    def host_bound(self) -> bool:
        """Whether calls one after another leave the device waiting for the host."""
        return self.host_median is not None and self.host_median > self.median

    @property
    def measured_bytes(self) -> int | None:
        """Read from and written to the device's memory, by the profiler."""
        return self.profile.get("dram_bytes") if self.profile else None

    @property
    def flops_per_second(self) -> float:
        """Effective: only the products of visible pairs count."""
        return self.flops / self.median

    @property
    def share_of_peak_flops(self) -> float | None:
        peak = self.ceilings.get("flops_per_second")
        return self.flops_per_second / peak if peak else None

    @property
    def share_of_read_bandwidth(self) -> float | None:
        """Of the bytes that must move, which is what a decode step is bound by."""
        bandwidth = self.ceilings.get("read_bytes_per_second")
        return self.minimum_bytes / self.median / bandwidth if bandwidth else None

    def ratio_to(self, other: Record) -> Ratio:
        """How many times as fast this is as ``other``; paired by rounds where both are of one session."""
        return statistics.ratio(self.seconds, other.seconds, paired=self.session == other.session)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        """The record that ``to_json`` wrote, of this schema or an earlier one. Raises ``ValueError`` for another schema
        or missing fields."""
        values = _up_to_date(values)
        names = {f.name for f in fields(cls)}
        missing = names - values.keys()
        if missing:
            raise ValueError(f"record: lacked {sorted(missing)}")
        kept = {name: values[name] for name in names}
        return cls(**kept | {name: tuple(kept[name]) for name in ("seconds", "notes", "host_seconds")})


_DERIVED = (
    *("median", "percentile_90", "host_median", "host_bound", "measured_bytes"),
    *("flops_per_second", "share_of_peak_flops", "share_of_read_bandwidth"),
)
# What the schema after each one had that it lacks.
_ADDED: dict[int, dict[str, Any]] = {1: {"host_seconds": (), "state": {}, "profile": None}}


def _up_to_date(values: dict[str, Any]) -> dict[str, Any]:
    schema = values.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ValueError(f"record: was of schema {schema!r}, must be 1 to {SCHEMA}")
    for earlier in range(schema, SCHEMA):
        values = values | _ADDED[earlier]
    return values | {"schema": SCHEMA}


def save(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file, one JSON object on a line."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record.to_json()) + "\n")


def load(path: Path) -> list[Record]:
    """The records of a file that ``save`` wrote. Raises ``ValueError`` naming the first line that is none."""
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    return [_from_line(path, number, line) for number, line in lines if line.strip()]


def _from_line(path: Path, number: int, line: str) -> Record:
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"record: was {type(values).__name__}, must be an object")
        return Record.from_json(values)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: is no record of `bench --save` ({error})") from error
