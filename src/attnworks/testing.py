"""For the tests of those who write attention kernels: one assertion that holds a kernel to fp64, with stress inputs.

    from attnworks.testing import assert_attention_matches

    def test_my_attention():
        assert_attention_matches(my_attention)

With the pytest plugin, which comes installed, ``attention_case`` makes a test of every case:

    def test_my_attention(attention_case):
        assert_attention_matches(my_attention, attention_case)
"""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from attnworks.workbench import catalogue
from attnworks.workbench.cases import Case
from attnworks.workbench.metrics import Check, Measure
from attnworks.workbench.probing import Prepared, prepare, prepare_function
from attnworks.workbench.verify import Result, verify

MOST_SHOWN = 3  # failing cases told in full; of the others the names
MOST_NAMED = 12


def assert_attention_matches(
    fn: Callable[..., Any] | str,
    cases: Case | str | Sequence[Case | str] = (),
    convention: str | None = None,
    quick: bool = True,
    gradients: bool = True,
    seed: int = 0,
) -> None:
    """Assert that ``fn`` computes attention: forward, LSE and gradients against fp64 within the error bounds of its
    dtype, NaN, writes outside its outputs, and the properties that need no reference.

    ``fn``: a function, run in this process; or "package.module:function" or "path/file.py:function", run in a process
    of its own, so that its crash or hang fails the test and does not end it. ``cases``: a case, or cases, patterns of
    names and tags as of ``attnworks verify --case``; all by default, ``quick`` the short list. ``convention``: how it
    is called, inferred from its parameters' names if None. ``gradients=False``: only forward. ``seed``: of the inputs.

    Raises ``AssertionError`` telling what is wrong where, or that nothing could be checked; for a single ``Case`` that
    the kernel does not do it raises ``unittest.SkipTest``, which pytest takes as a skip. Raises ``ValueError`` if the
    kernel cannot be loaded or its convention is not clear.
    """
    prepared = _prepared(fn, convention)
    single = isinstance(cases, Case)
    given: Sequence[Case | str] = [cases] if isinstance(cases, Case | str) else cases
    chosen = [case for case in given if isinstance(case, Case)]
    patterns = [pattern for pattern in given if isinstance(pattern, str)]
    if patterns or not chosen:
        chosen += catalogue.select(patterns, quick=quick, seed=seed)
    chosen = [replace(case, gradients=case.gradients and gradients) for case in chosen]
    results = verify(subjects=[prepared.subject], cases=chosen)
    failed = [result for result in results if result.status == "failed"]
    if failed:
        raise AssertionError(_complaint(prepared, results, failed))
    if not any(result.status == "passed" for result in results):
        why = Counter(result.message for result in results)
        message = "; ".join(f"{reason} ({count} checks)" for reason, count in why.most_common())
        if single:
            raise unittest.SkipTest(message)
        raise AssertionError(f"{prepared.subject.name}: nothing was checked: {message}")


@lru_cache(maxsize=4)
def _prepared(fn: Callable[..., Any] | str, convention: str | None) -> Prepared:
    return prepare(fn, convention) if isinstance(fn, str) else prepare_function(fn, convention)


# ---- what a colleague would say --------------------------------------------------------------------------------------


def _complaint(prepared: Prepared, results: list[Result], failed: list[Result]) -> str:
    by_case: dict[str, list[Result]] = {}
    for result in failed:
        by_case.setdefault(result.case.name, []).append(result)
    ran = {result.case.name for result in results if result.status != "skipped"}
    called = f", called by the convention {prepared.about['convention']}" if prepared.about else ""
    parts = [f"{prepared.subject.name} is wrong on {len(by_case)} of the {len(ran)} cases it was given{called}."]
    for case_results in list(by_case.values())[:MOST_SHOWN]:
        parts += ["", *_case_complaint(case_results)]
    if rest := list(by_case)[MOST_SHOWN:]:
        more = f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
        parts += ["", f"Wrong as well: {'; '.join(rest[:MOST_NAMED])}{more}."]
    if right := [name for name in ran if name not in by_case]:
        more = f" and {len(right) - MOST_NAMED} more" if len(right) > MOST_NAMED else ""
        parts.append(f"Right: {'; '.join(sorted(right)[:MOST_NAMED])}{more}.")
    return "\n".join(parts)


def _case_complaint(results: list[Result]) -> list[str]:
    case = results[0].case
    lines = [f"Case {case.name!r} ({case.stresses}): {in_words(case)}"]
    for result in results:
        wrong = [measure for measure in result.measures if not measure.passed]
        lines += [f"  {_measure_complaint(measure)}" for measure in wrong]
        if not wrong:
            lines.append(f"  {result.check}: {result.message}")
    return lines


def _measure_complaint(measure: Measure) -> str:
    worst = max((check for check in measure.checks if not check.passed), key=_share)
    if worst.name in ("shape and dtype", "non-finite"):
        counts = f"{measure.nan} NaN and {measure.inf} Inf, must be {measure.nan_expected} and {measure.inf_expected}"
        return f"{measure.tensor}: {worst.where if worst.name != 'non-finite' else f'{counts}, first at {worst.where}'}"
    place = f" at {worst.where}" if worst.where else ""
    return (
        f"{measure.tensor}: {worst.name} error {worst.error:.2g}{place}, where {worst.budget:.2g} is allowed "
        f"({_share(worst):.3g} times as much); largest error {measure.max_abs:.2g} at {measure.worst}; relative "
        f"{measure.frobenius:.2g}, where a kernel of this precision has {measure.yardstick:.2g}"
    )


def _share(check: Check) -> float:
    return check.share


def in_words(case: Case) -> str:
    """A case's problem in one line."""
    dtype = str(case.dtype).removeprefix("torch.")
    heads = f"{case.heads_q} heads" if case.heads_q == case.heads_kv else f"{case.heads_q}/{case.heads_kv} heads"
    dims = f"{case.head_dim}" if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
    if case.form == "dense":
        lengths = f"batch {case.batch}, {case.seq_q} queries on {case.seq_kv} keys"
    else:
        lengths = "queries on keys " + ", ".join(f"{q} on {kv}" for q, kv in case.sequences)
    modifiers = [repr(part) for part in (*case.mask, *case.scores)]
    words = [case.form, dtype, heads, lengths, f"head dim {dims}", *modifiers]
    words += [f"{case.generator} inputs", f"{case.memory} memory", f"layout {case.layout}"]
    return ", ".join(words + ([f"scale {case.scale:.3g}"] if case.scale is not None else []))
