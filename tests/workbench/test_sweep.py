"""The sweep: legal cases that between them hold every pair of levels, the same ones every time."""

import os
import subprocess
import sys
from collections import Counter
from functools import reduce
from itertools import combinations
from typing import Any

import pytest

from attnworks.workbench import schedule, summary, sweep
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.subjects import Abilities, backend_subjects
from attnworks.workbench.verify import verify

DESIGN = sweep.design()
FEW = tuple(tuple(levels)[:3] for levels in sweep.FACTORS.values())


def random_legal_row(number: int) -> sweep.Row | None:
    """A row drawn without the code under test; None where it is not legal."""
    row = []
    for levels in sweep.FACTORS.values():
        number, place = divmod(number, len(levels))
        row.append(list(levels)[place])
    return tuple(row) if sweep.legal(row) else None


def test_levels_have_names_of_their_own() -> None:
    names = Counter(level for levels in sweep.FACTORS.values() for level in levels)
    assert max(names.values()) == 1
    assert all(", " not in name for name in names)


def test_every_legal_pair_is_covered() -> None:
    """Counted without the generator's bookkeeping: which pairs occur in the rows, and which in any legal row."""
    counted = Counter(pair for row in DESIGN for pair in combinations(row, 2))
    assert all(sweep.legal(row) for row in DESIGN)
    missing = sweep.legal_pairs() - set(counted)
    assert not missing
    assert len(sweep.legal_pairs()) == len(counted) > 5000
    # The longest two factors alone need this many rows.
    assert len(sweep.LENGTHS) ** 2 <= len(DESIGN) <= 1.15 * len(sweep.LENGTHS) ** 2


def test_legal_pairs_are_all_there_are() -> None:
    """Pairs of legal rows drawn at random are among the legal ones, and rules alone tell which are not."""
    total = reduce(lambda product, levels: product * len(levels), sweep.FACTORS.values(), 1)
    rows = [random_legal_row((n * 0x9E3779B97F4A7C15) % total) for n in range(1, 20_000)]
    drawn = {pair for row in rows if row for pair in combinations(row, 2)}
    assert len(drawn) > 4000
    assert drawn <= sweep.legal_pairs()
    assert ("varlen", "bhsd") not in sweep.legal_pairs()
    # No rule names this pair: it follows from two.
    assert ("gradients", "nan key") not in sweep.legal_pairs() and ("nan key", "gradients") not in sweep.legal_pairs()


def test_the_first_rows_cover_most() -> None:
    pairs, covered, new = sweep.legal_pairs(), frozenset[sweep.Pair](), []
    for row in DESIGN:
        new.append(len(sweep.pairs_of(row) - covered))
        covered |= sweep.pairs_of(row)
    assert sum(new[:100]) > 0.7 * len(pairs)
    assert sum(new[:50]) > sum(new[50:100]) > sum(new[100:150])


def test_same_seed_same_rows_in_every_process() -> None:
    """Whatever the order in which sets of strings are walked there."""
    code = f"from attnworks.workbench import sweep\nprint(*map(sweep.name_of, sweep.design(3, {FEW!r})), sep=chr(10))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
        assert found.stdout.splitlines() == [sweep.name_of(row) for row in sweep.design(3, FEW)]
    assert sweep.design(3, FEW) != sweep.design(4, FEW)


def test_names_say_everything() -> None:
    assert all(sweep.row_of(sweep.name_of(row)) == row for row in DESIGN)
    case = sweep.case_of(
        sweep.row_of("sweep: varlen, q 65, kv 257, heads 6/2, dim 192/128, bf16, causal, sink, gapped, tiny"), seed=5
    )
    assert (case.form, case.lengths, case.seed) == ("varlen", ((65, 257),), 5)
    assert (case.heads_q, case.heads_kv, case.head_dim, case.head_dim_v) == (6, 2, 192, 128)
    assert (case.memory, case.generator, len(case.mask), len(case.scores)) == ("gapped", "tiny", 1, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sweep: dense, q 65, kv 2", "'kv 2' .* names no level"),
        ("sweep: dense, q 65, q 63", "'q 63' .* names a second level of seq_q"),
        ("sweep: varlen, q 65, swapped", "cannot go together"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep.row_of(name)


@pytest.mark.parametrize("row", DESIGN[:12], ids=sweep.name_of)
def test_rows_build_and_have_an_answer(row: sweep.Row) -> None:
    results = verify(subjects=[Mutant()], cases=[sweep.name_of(row)], seed=1)
    assert {"oracle"} <= {result.layer for result in results}
    assert all(result.status == "passed" for result in results), [r.message for r in results]


def test_a_subject_is_not_asked_for_what_it_refuses_anyway() -> None:
    cpu = next((subject for subject in backend_subjects(quick=True) if subject.name == "cpu"), None)
    if cpu is None or cpu.reasons(sweep.case_of(DESIGN[0]).build()) == ("the native extension is missing",):
        pytest.skip("no native extension")
    allowed = sweep.allowed_by(cpu)
    refused = {"dtype": {"bf16 on e4m3", "fp16 on e5m2", "bf16 on int8"}, "scores": {"score function"}}
    for (name, levels), left in zip(sweep.FACTORS.items(), allowed, strict=True):
        assert set(levels) - set(left) == refused.get(name, set()), name
    few = tuple(levels[:4] for levels in allowed)
    taken = [not cpu.reasons(sweep.case_of(row).build()) for row in sweep.design(0, few)[:20]]
    assert taken.count(True) >= 0.9 * len(taken)


def test_a_subject_that_runs_nothing_has_no_sweep() -> None:
    class Nothing(Mutant):
        def reasons(self, inputs: Any, differentiable: bool = False) -> tuple[str, ...]:
            return ("nothing",)

    subject = Nothing()
    assert schedule.jobs([subject], (), quick=False, seed=0)
    assert not [j for j in schedule.jobs([subject], (), quick=False, seed=0) if j.case.name.startswith(sweep.PREFIX)]
    assert list(schedule.further_sweeps([subject], 0)) == []


def test_coverage_is_counted() -> None:
    subject = Mutant()
    whole = sweep.coverage(subject, map(sweep.name_of, sweep.design(0, sweep.allowed_by(subject))))
    assert whole.pairs == whole.legal > 5000
    part = sweep.coverage(subject, map(sweep.name_of, DESIGN[:2]), refused=1)
    factors = len(sweep.FACTORS)
    assert factors * (factors - 1) // 2 < part.pairs <= factors * (factors - 1) and part.refused == 1
    assert sweep.coverage(subject, ()).pairs == 0


def test_a_budget_ends_the_run_and_changes_no_verdict() -> None:
    seen: list[tuple[str, int, int]] = []
    stopped = verify(subjects=[Mutant()], budget=0.02, progress=lambda *step: seen.append(step))
    names = [result.case.name for result in stopped]
    first = [job.case.name for job in schedule.jobs([Mutant()], (), quick=False, seed=0)]
    assert 0 < len(names) < 400
    assert list(dict.fromkeys(names)) == list(dict.fromkeys(first))[: len(dict.fromkeys(names))]
    assert seen[-1] == ("", 1, 1) and all(total == 1 for _, _, total in seen)
    again = verify(subjects=[Mutant()], cases=list(dict.fromkeys(r.case for r in stopped))[:20])
    verdicts = {(r.case.name, r.check): [m.to_json() for m in r.measures] for r in stopped}
    assert all(verdicts[r.case.name, r.check] == [m.to_json() for m in r.measures] for r in again)


def test_time_that_is_left_goes_to_further_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "allowed_by", lambda subject: FEW)
    further = schedule.further_sweeps([Mutant()], 0)
    assert next(further).case.seed == 1
    rows = sweep.design(1, FEW)
    for _ in range(len(rows) - 1):
        job = next(further)
    assert job.case.seed == 1 and next(further).case.seed == 2


def test_order_of_a_run() -> None:
    kinds = []
    for job in schedule.jobs([Mutant()], (), quick=False, seed=0):
        kind = "sweep" if job.case.name.startswith(sweep.PREFIX) else "property" if job.properties else "named"
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    assert kinds == ["named", "property", "sweep", "named"]


def test_cases_of_a_kernel_without_an_lse_count_as_covered() -> None:
    class Silent(Mutant):
        abilities = Abilities(lse=False)

        def __call__(self, inputs: Any, *, return_lse: bool = True, **options: Any) -> Any:
            return super().__call__(inputs, return_lse=return_lse, **options)[0], None

    results = verify(subjects=[Silent()], cases=[sweep.name_of(DESIGN[3])])
    (covered,) = summary.coverage([Silent()], results)
    assert (covered.cases, covered.refused) == (1, 0) and covered.pairs > 0
