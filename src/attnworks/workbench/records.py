"""Record: one kernel measured on one problem, with all it takes to judge the number. One format, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attnworks.workbench import statistics
from attnworks.workbench.statistics import Ratio

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One measured run.

    ``session``: records with the same one were interleaved, round i of one with round i of the others. ``form``: the
    exact call that was timed. ``seconds``: every timed run, in order. ``check``: error against fp64 on this very
    problem (the largest, as a share of its bound). ``flops`` counts visible pairs; ``minimum_bytes`` and
    ``modelled_bytes`` as in ``attnworks.traffic``. ``peak_extra_bytes``: memory that was resident only during a call,
    the result left out. ``ceilings``: rates measured between the runs (bytes/s, FLOP/s; None where they could not
    be). ``conditions``: threads, flush, warm-up, inputs. ``load``: what others took of the machine meanwhile.
    ``notes``: what a reader must know."""

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
    schema: int = field(default=SCHEMA)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def percentile_90(self) -> float:
        return statistics.percentile_90(self.seconds)

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
        derived = ("median", "percentile_90", "flops_per_second", "share_of_peak_flops", "share_of_read_bandwidth")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        """The record that ``to_json`` wrote. Raises ``ValueError`` for another schema or missing fields."""
        if values.get("schema") != SCHEMA:
            raise ValueError(f"record: was of schema {values.get('schema')!r}, must be {SCHEMA}")
        names = {f.name for f in fields(cls)}
        missing = names - values.keys()
        if missing:
            raise ValueError(f"record: lacked {sorted(missing)}")
        kept = {name: values[name] for name in names}
        return cls(**kept | {"seconds": tuple(values["seconds"]), "notes": tuple(values["notes"])})


def save(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file, one JSON object on a line."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record.to_json()) + "\n")


def load(path: Path) -> list[Record]:
    """The records of a file that ``save`` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Record.from_json(json.loads(line)) for line in lines if line.strip()]
