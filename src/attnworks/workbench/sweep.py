"""The sweep: cases that between them hold every pair of levels of all factors at least once.

A factor is a thing that a kernel may get wrong by itself (a length at a tile edge, a head dim, a layout, a mask), a
level one value of it. Faults mostly need one or two levels to meet [1], so a design that covers all pairs finds them
with a few hundred cases where the full product has billions. ``design`` makes one: greedy, one row at a time, each row
the best of a few candidates by the number of pairs that it newly covers, so that coverage grows fastest at the start.

A row is a case. Its name spells out its levels and is all that is needed to make it again:

    sweep: varlen, q 65, kv 257, heads 6/2, dim 192/128, bf16, causal, sink, gapped, rising maximum

Levels that a name leaves out are the first of their factor.

[1] D. R. Kuhn, D. R. Wallace, A. M. Gallo, "Software Fault Interactions and Implications for Software Testing", IEEE
Transactions on Software Engineering 30 (6), 2004.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch

from attnworks.masks import Causal, Window
from attnworks.scores import Softcap
from attnworks.workbench.cases import AddRule, AlibiRule, BiasRule, BooleanRule, Case, SinkRule
from attnworks.workbench.generators import GENERATORS
from attnworks.workbench.subjects import Subject

PREFIX = "sweep: "

# On both sides of every tile edge in use, and odd lengths that are near none.
LENGTHS = (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 101, 127, 128, 129, 255, 256, 257, 333)
HEADS = ((2, 2), (4, 2), (6, 2), (5, 1), (8, 1))
DIMS = ((64, 64), (1, 1), (8, 8), (16, 16), (37, 37), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128), (64, 96),
        (256, 256))  # fmt: skip
NOT_FINITE = ("nan query", "nan key", "nan value", "minus infinity")

Levels = dict[str, Any]
Row = tuple[str, ...]
"""The text of one level of each factor, in the order of ``FACTORS``."""

FACTORS: dict[str, Levels] = {
    "form": {"dense": 0, "varlen": 0, "decode": 0, "pages of 1": 1, "pages of 16": 16, "pages of 64": 64},
    "seq_q": {f"q {n}": n for n in LENGTHS},
    "seq_kv": {f"kv {n}": n for n in LENGTHS},
    "batch": {"one sequence": 1, "three sequences": 3},
    "heads": {f"heads {q}/{kv}": (q, kv) for q, kv in HEADS},
    "head_dim": {f"dim {d}" if d == dv else f"dim {d}/{dv}": (d, dv) for d, dv in DIMS},
    "dtype": {
        "fp32": (torch.float32, None),
        "bf16": (torch.bfloat16, None),
        "fp16": (torch.float16, None),
        "bf16 on e4m3": (torch.bfloat16, torch.float8_e4m3fn),
        "fp16 on e5m2": (torch.float16, torch.float8_e5m2),
        "bf16 on int8": (torch.bfloat16, torch.int8),
    },
    "layout": {"bhsd": "bhsd", "bshd": "bshd"},
    "memory": {
        name: name for name in ("contiguous", "gapped", "swapped", "strided channels", "shared heads", "halves")
    },
    "mask": {
        "no mask": (),
        "causal": (Causal(),),
        "causal top-left": (Causal("top-left"),),
        "window of 13": (Window(7, 5),),
        "causal window 15": (Causal(), Window(15, None)),
        "boolean": (BooleanRule("bhqk"),),
        "boolean of keys": (Causal(), BooleanRule("b11k")),
    },
    "scores": {
        "no scores": (),
        "softcap": (Softcap(5.0),),
        "alibi": (AlibiRule(),),
        "bias": (BiasRule("1hqk"),),
        "sink": (SinkRule(),),
        "score function": (AddRule(lambda s, b, h, q, k: s + 0.03 * (k - q) + 0.1 * h),),
    },
    "generator": {name: name for name in GENERATORS if name != "hand"},
    "scale": {"scale 1/sqrt(d)": None, "scale 0.25": 0.25},
    "gradients": {"no gradients": (False, False), "gradients": (True, False), "gradients and LSE's": (True, True)},
}

_PLACE = {name: place for place, name in enumerate(FACTORS)}
_OWNER = {level: factor for factor, levels in FACTORS.items() for level in levels}


def _is(row: Sequence[str | None], factor: str, *levels: str) -> bool:
    return row[_PLACE[factor]] in levels


def _known(row: Sequence[str | None], factor: str, *levels: str) -> bool:
    """Whether the factor is chosen and is none of the levels."""
    level = row[_PLACE[factor]]
    return level is not None and level not in levels


_CACHES = ("decode", "pages of 1", "pages of 16", "pages of 64")
_QUANTISED = ("bf16 on e4m3", "fp16 on e5m2", "bf16 on int8")

# What cannot go together, each a test of a row in which unchosen factors are None.
RULES: tuple[Callable[[Sequence[str | None]], bool], ...] = (
    # only dense tensors have a choice of layout, and these strides
    lambda row: _known(row, "form", "dense") and _is(row, "layout", "bhsd"),
    lambda row: _known(row, "form", "dense") and _is(row, "memory", "swapped", "strided channels", "shared heads"),
    # K and V as halves of one pool of pages have equal dims
    lambda row: _is(row, "form", "dense", "varlen", "decode") and _is(row, "memory", "halves"),
    lambda row: _is(row, "memory", "halves") and _is(row, "head_dim", "dim 192/128", "dim 64/96"),
    lambda row: _is(row, "form", *_CACHES[1:]) and _is(row, "memory", "gapped"),
    # 8-bit numbers are for caches, hold no NaN of the input's, and nobody differentiates through them
    lambda row: _is(row, "form", "dense", "varlen") and _is(row, "dtype", *_QUANTISED),
    lambda row: _is(row, "dtype", *_QUANTISED) and _is(row, "generator", *NOT_FINITE),
    lambda row: _is(row, "dtype", *_QUANTISED) and _known(row, "gradients", "no gradients"),
    # NaN in a key that only a mask hides may reach rows of its tile, and no gradient is defined where inputs are NaN
    lambda row: _is(row, "generator", *NOT_FINITE) and _known(row, "mask", "no mask"),
    lambda row: _is(row, "generator", *NOT_FINITE) and _known(row, "scores", "no scores", "sink"),
    lambda row: _is(row, "generator", *NOT_FINITE) and _known(row, "gradients", "no gradients"),
)


def legal(row: Sequence[str | None]) -> bool:
    """Whether no rule forbids what is chosen so far."""
    return not any(rule(row) for rule in RULES)


# ---- rows and cases --------------------------------------------------------------------------------------------------


def name_of(row: Row) -> str:
    """The name of a row's case: its levels without the defaults, but always with form, lengths, heads, dim, dtype."""
    always = ("form", "seq_q", "seq_kv", "heads", "head_dim", "dtype")
    said = (
        level
        for (factor, levels), level in zip(FACTORS.items(), row, strict=True)
        if factor in always or (level != next(iter(levels)) and (factor != "layout" or row[0] == "dense"))
    )
    return PREFIX + ", ".join(said)


def row_of(name: str) -> Row:
    """The row that a case's name spells out. Raises ``ValueError`` for what is no name of a row."""
    row = [next(iter(levels)) for levels in FACTORS.values()]
    given: set[str] = set()
    for level in name.removeprefix(PREFIX).split(", "):
        factor = _OWNER.get(level)
        if factor is None or factor in given:
            why = "names no level" if factor is None else f"names a second level of {factor}"
            raise ValueError(f"case: {level!r} of {name!r} {why}; the levels are those of sweep.FACTORS")
        given.add(factor)
        row[_PLACE[factor]] = level
    if "layout" not in given and row[0] != "dense":
        row[_PLACE["layout"]] = "bshd"
    if not legal(row):
        raise ValueError(f"case: {name!r} combines levels that cannot go together (sweep.RULES)")
    return tuple(row)


def case_of(row: Row, seed: int = 0) -> Case:
    """The case of a row, with inputs of a seed."""
    (form, seq_q, seq_kv, batch, heads, dims, dtypes, layout, memory, mask, scores, generator, scale, gradients) = (
        levels[level] for levels, level in zip(FACTORS.values(), row, strict=True)
    )
    kind: Any = row[0] if row[0] in ("dense", "varlen") else "decode"
    return Case(
        name=name_of(row),
        stresses="every pair of levels",
        form=kind,
        batch=batch,
        heads_q=heads[0],
        heads_kv=heads[1],
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        mask=mask,
        scores=scores,
        scale=scale,
        layout=layout,
        generator=generator,
        memory=memory,
        lengths=_lengths(kind, seq_q, seq_kv, batch),
        spare=3 if kind == "varlen" else 0,
        page_size=form,
        gradients=gradients[0],
        lse_cotangent=gradients[1],
        seed=seed,
    )


def _lengths(form: str, seq_q: int, seq_kv: int, batch: int) -> tuple[tuple[int, int], ...]:
    """The row's lengths come first; then shorter ones, the other way round and none at all."""
    if form == "varlen":
        return ((seq_q, seq_kv), (seq_kv // 2, seq_q), (0, 5))[:batch]
    if form == "decode":
        return ((seq_q, seq_kv), (seq_q, 0), (seq_q, seq_kv // 2))[:batch]
    return ()


# ---- the design ------------------------------------------------------------------------------------------------------


def allowed_by(subject: Subject) -> tuple[Row, ...]:
    """For each factor the levels worth trying on a subject: those it runs at least once when all the others are plain.

    A pairwise design over what it refuses anyway would spend its cases on refusals.
    """
    found = []
    for factor, levels in FACTORS.items():
        kept = (level for level in levels if any(_runs(subject, row) for row in _plain_rows(factor, level)))
        found.append(tuple(kept))
    return tuple(found)


def _plain_rows(factor: str, level: str) -> Iterable[Row]:
    """Rows of every form that are plain but for one level."""
    for form in FACTORS["form"]:
        row = [next(iter(levels)) for levels in FACTORS.values()]
        row[0] = form
        row[_PLACE["layout"]] = "bhsd" if form == "dense" else "bshd"
        row[_PLACE["seq_q"]], row[_PLACE["seq_kv"]] = "q 15", "kv 17"
        row[_PLACE[factor]] = level
        if legal(row):
            yield tuple(row)


def _runs(subject: Subject, row: Row) -> bool:
    case = case_of(row)
    return not subject.reasons(case.outline(), differentiable=case.gradients)


_ALL: tuple[Row, ...] = tuple(tuple(levels) for levels in FACTORS.values())


@lru_cache(maxsize=8)
def design(seed: int = 0, allowed: tuple[Row, ...] = _ALL) -> tuple[Row, ...]:
    """Rows that hold every legal pair of the allowed levels, the same ones for a seed, those that add most first.

    ``allowed``: for each factor its levels (``allowed_by``); all of them by default. A factor without a level means
    that nothing can be run: no rows.
    """
    return _Design(seed, allowed).rows() if all(allowed) else ()


Pair = tuple[str, str]


def pairs_of(row: Row) -> frozenset[Pair]:
    """The pairs of levels that a row holds."""
    return frozenset(combinations(row, 2))


@lru_cache(maxsize=8)
def legal_pairs(allowed: tuple[Row, ...] = _ALL) -> frozenset[Pair]:
    """Every pair of levels of two factors that some legal row holds."""
    found = set()
    for (a, left), (b, right) in combinations(enumerate(allowed), 2):
        for first in left:
            for second in right:
                row: list[str | None] = [None] * len(allowed)
                row[a], row[b] = first, second
                if legal(row) and _complete(row, allowed) is not None:
                    found.add((first, second))
    return frozenset(found)


def _complete(row: list[str | None], allowed: Sequence[Row]) -> Row | None:
    """A legal row that holds what is chosen in ``row``, or None. Backtracks over the factors left open."""
    if None not in row:
        return tuple(level for level in row if level is not None)
    place = row.index(None)
    for level in allowed[place]:
        row[place] = level
        if legal(row):
            found = _complete(row, allowed)
            if found is not None:
                row[place] = None
                return found
    row[place] = None
    return None


class _Design:
    """The greedy search for one design."""

    CANDIDATES = 6

    def __init__(self, seed: int, allowed: tuple[Row, ...]) -> None:
        self.allowed = allowed
        self.random = random.Random(seed)
        self.uncovered = set(legal_pairs(allowed))
        # In an order of their own, since that of a set of strings changes from process to process.
        self.queue = sorted(self.uncovered)
        self.random.shuffle(self.queue)

    def rows(self) -> tuple[Row, ...]:
        found = []
        while self.uncovered:
            candidates = [self._candidate() for _ in range(self.CANDIDATES)]
            best = max(candidates, key=lambda row: len(pairs_of(row) & self.uncovered))
            self.uncovered -= pairs_of(best)
            found.append(best)
        return tuple(found)

    def _candidate(self) -> Row:
        """A row around an uncovered pair, each further factor at the level that covers most with what is there."""
        self.queue = [pair for pair in self.queue if pair in self.uncovered]
        pair = self.queue[self.random.randrange(len(self.queue))]
        row: list[str | None] = [None] * len(self.allowed)
        for level in pair:
            row[_PLACE[_OWNER[level]]] = level
        places = [place for place, level in enumerate(row) if level is None]
        self.random.shuffle(places)
        for place in places:
            gains = {level: (self._gain(row, place, level), self.random.random()) for level in self.allowed[place]}
            ranked = sorted(gains, key=gains.__getitem__, reverse=True)
            row[place] = next(level for level in ranked if self._fits(row, place, level))
        return tuple(level for level in row if level is not None)

    def _fits(self, row: Sequence[str | None], place: int, level: str) -> bool:
        tried = [*row[:place], level, *row[place + 1 :]]
        return legal(tried) and _complete(tried, self.allowed) is not None

    def _gain(self, row: Sequence[str | None], place: int, level: str) -> int:
        before = sum((other, level) in self.uncovered for other in row[:place])
        return before + sum((level, other) in self.uncovered for other in row[place + 1 :])


# ---- what a run covered ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """What a subject's sweep covered: ``pairs`` of the ``legal`` ones of the levels that it runs, in ``cases`` that it
    ran; it refused ``refused`` more."""

    subject: str
    cases: int
    refused: int
    pairs: int
    legal: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def coverage(subject: Subject, ran: Iterable[str], refused: int = 0) -> Coverage:
    """The coverage of the cases of these names."""
    rows = [row_of(name) for name in ran]
    wanted = legal_pairs(allowed_by(subject))
    covered = wanted & frozenset[Pair]().union(*map(pairs_of, rows))
    return Coverage(subject.name, len(rows), refused, len(covered), len(wanted))
