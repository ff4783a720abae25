"""Tuned plans: what was measured to be fastest on one device, in one format, read when a plan is chosen.

``plans/<device>.json`` beside this file is shipped. A user's file of that name overlays it row by row: in the folder
given to ``attnworks.use_plans``, else in ``plans`` of the user's configuration folder (platformdirs knows where that is
on each system). Nothing is measured at a call; ``workbench/tune.py`` makes such files.

    {"schema": 1, "device": "NVIDIA H200", "rows": {KEY: {"plan": {...}, "ratio": 1.1, "kernels": "0f3a...",
     "driver": "...", "compiler": "...", "commit": "..."}}}

A row is a fact only for the kernels it was measured with: where the hash of their sources is another one, it no longer
decides calls, and is a hint where the next tuning should look.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from attnworks.hardware import Hardware
from attnworks.masks import Bounds
from attnworks.plan import Plan
from attnworks.problem import Problem

SCHEMA = 1

# Tasks of so many rows of Q; a device with this many for each of its units is full, and more change nothing.
_TASK_ROWS = 64
_FULL_TASKS_PER_UNIT = 8
# Longer sequences share a row with this.
_LONGEST = 16384


@dataclass(frozen=True)
class Row:
    """One measured plan. ``ratio``: how many times as fast as the backend's own first choice. ``kernels``: hash of the
    sources it was measured with (``kernels_hash``); ``driver``, ``compiler``, ``commit``: with what else."""

    plan: Plan
    ratio: float
    kernels: str
    driver: str
    compiler: str
    commit: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": {name: value for name, value in self.plan.to_json().items() if value}}


@dataclass(frozen=True)
class Found:
    """A row for a problem, and where it stands."""

    row: Row
    path: Path
    key: str

    def __str__(self) -> str:
        return f"tuned, {self.row.ratio:.2f} times as fast as the table's choice ({self.path.name}, {self.row.commit})"


# ---- what a row is for -----------------------------------------------------------------------------------------------


def key_of(problem: Problem, hardware: Hardware, backend: str) -> str:
    """What of a problem decides which plan is fastest, in words. Lengths count up to the next power of two."""
    p = problem
    rows = p.total_q * p.heads_q if p.form == "varlen" else p.batch * p.heads_kv * p.seq_q * p.group
    tasks = max(math.ceil(rows / _TASK_ROWS), p.batch * p.heads_kv)
    full = tasks >= _FULL_TASKS_PER_UNIT * max(hardware.units, 1)
    dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype or p.dtype))
    said = [
        f"{backend}: {p.form}",
        dtype if kv_dtype == dtype else f"{dtype} on {kv_dtype}",
        f"dim {p.head_dim}/{p.head_dim_v}",
        f"group {p.group}",
        "full" if full else f"tasks {_bucket(tasks)}",
        f"q {_bucket(p.seq_q)}",
        f"kv {_bucket(p.seq_kv)}",
        _mask_words(p),
    ]
    if p.page_size:
        said.append(f"pages of {p.page_size}")
    said += sorted({term.kind for term in p.scores} - {"sink"})
    return ", ".join(said)


def _bucket(length: int) -> int:
    return min(1 << max(length - 1, 0).bit_length(), _LONGEST)


def _mask_words(p: Problem) -> str:
    if not p.mask:
        return "no mask"
    if not all(isinstance(term, Bounds) for term in p.mask):
        return "mask by tiles"
    causal = all(isinstance(term, Bounds) and (term.left, term.right) == (None, 0) for term in p.mask)
    return "causal" if causal else "window"


@cache
def kernels_hash(sources: tuple[Path, ...]) -> str:
    """Of what sources in Python and CUDA C++ say, where comments, docstrings and layout don't count; of compiled ones
    every byte."""
    digest = hashlib.sha256()
    for path in sources:
        if path.suffix == ".cuh":
            digest.update(" ".join(_COMMENT.sub(" ", path.read_text(encoding="utf-8")).split()).encode())
            continue
        if path.suffix != ".py":
            digest.update(path.read_bytes())
            continue
        with tokenize.open(path) as source:
            for word in _words(list(tokenize.generate_tokens(source.readline))):
                digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:16]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAYOUT = (tokenize.COMMENT, tokenize.NL)
_STARTS_STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def _words(tokens: Sequence[tokenize.TokenInfo]) -> list[str]:
    words: list[str] = []
    starts = True  # a statement
    kept = iter([token for token in tokens if token.type not in _LAYOUT])
    for token in kept:
        if starts and token.type == tokenize.STRING and token.string.startswith('"""'):
            next(kept)  # the end of its line
            continue
        words.append(f"{tokenize.tok_name[token.type]} {token.string.strip()}")
        starts = token.type in _STARTS_STATEMENT
    return words


# ---- looking a plan up -----------------------------------------------------------------------------------------------


def find(problem: Problem, hardware: Hardware, backend: str, sources: tuple[Path, ...]) -> Found | None:
    """The row that decides the problem on this device: the user's, else the shipped one, measured with the kernels as
    they are now. None for a backend without ``sources``, whose plans are not tuned."""
    rows = _rows_for(problem, hardware, backend, sources)
    return next((found for found in rows if found.row.kernels == kernels_hash(sources)), None)


def hint(problem: Problem, hardware: Hardware, backend: str, sources: tuple[Path, ...]) -> Found | None:
    """The first row for the problem, whatever kernels it was measured with."""
    return next(iter(_rows_for(problem, hardware, backend, sources)), None)


def _rows_for(problem: Problem, hardware: Hardware, backend: str, sources: tuple[Path, ...]) -> list[Found]:
    if not sources:
        return []
    key = key_of(problem, hardware, backend)
    paths = [folder / file_name(hardware) for folder in (users_folder(), _shipped_folder())]
    return [Found(rows[key], path, key) for path in paths if key in (rows := read(path, hardware.name))]


def file_name(hardware: Hardware) -> str:
    """Of a device's file: its name in small letters, what is no letter or digit as "-"."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.name.lower()).strip("-") + ".json"


_given: list[Path] = []


def use(folder: str | Path | None) -> None:
    """``attnworks.use_plans``, without forgetting the calls that were prepared with other plans."""
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"folder: was {str(folder)!r}, must be an existing folder of <device>.json files, or None")
    _given[:] = [] if folder is None else [Path(folder)]
    read.cache_clear()


def users_folder() -> Path:
    if _given:
        return _given[0]
    from platformdirs import user_config_path  # with the first call that could use it

    return user_config_path("attnworks") / "plans"


def _shipped_folder() -> Path:
    return Path(str(resources.files("attnworks"))) / "plans"


# ---- files -----------------------------------------------------------------------------------------------------------


@cache
def read(path: Path, device: str) -> Mapping[str, Row]:
    """The rows of a file by their key; none where there is no file. Raises ``ValueError`` naming the file for one of
    another schema or device, and for rows that are no plans."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        held = json.loads(text)
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema was {held['schema']!r}, must be {SCHEMA}")
        if held["device"] != device:
            raise ValueError(f"device was {held['device']!r}, must be {device!r} by the file's name")
        return {key: Row(**row | {"plan": Plan(**row["plan"])}) for key, row in held["rows"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"tuned plans {path}: {type(error).__name__}: {error}") from None


def write(path: Path, device: str, rows: Mapping[str, Row | None]) -> None:
    """Put ``rows`` into a file in the place of those with equal keys; None takes a row away. One row to a line, so that
    a change shows which. Raises what ``read`` raises for a file that is there."""
    read.cache_clear()
    held: dict[str, Row | None] = {**read(path, device), **rows}
    merged = {key: row for key, row in held.items() if row is not None}
    lines = [f"  {json.dumps(key)}: {json.dumps(merged[key].to_json())}" for key in sorted(merged)]
    head = f'{{\n "schema": {SCHEMA},\n "device": {json.dumps(device)},\n "rows": {{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    read.cache_clear()
