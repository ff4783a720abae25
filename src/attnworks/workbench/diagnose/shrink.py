"""The smallest problem that still fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose.probes import Bench, Observation, Probe
from attnworks.workbench.subjects import Subject

MOST_TRIALS = 150
Kind = tuple[str, ...]


def kind(seen: Observation) -> Kind:
    """In which way something failed: the first tensor that is wrong (gradients of a wrong output are wrong anyway), and
    whether by NaN or Inf alone."""
    if seen.raised:
        return ("raised", seen.raised.split(":")[0])
    for name, answer in seen.answers.items():
        if answer.failed:
            strange = answer.wrong.any() and not bool(answer.got[answer.wrong].isfinite().any())
            return (name, "not finite" if strange else "value")
    return ("changes",) if seen.changes else ("writes",) if seen.writes else ()


def shrink(subject: Subject, probe: Probe) -> Probe:
    """Halve sizes, drop masks, scores and whatever else can go, as long as the same kind of failure shows."""
    wanted = kind(_observe(subject, probe))
    trials, smaller = 0, True
    while smaller and trials < MOST_TRIALS:
        smaller = False
        for case in _smaller(probe.case):
            if case == probe.case:
                continue
            trials += 1
            if trials > MOST_TRIALS:
                break
            tried = replace(probe, case=case)
            if kind(_observe(subject, tried)) == wanted:
                probe, smaller = tried, True
                break
    return probe


def _observe(subject: Subject, probe: Probe) -> Observation:
    try:
        return Bench(probe).observe(subject)
    except (ValueError, RuntimeError, IndexError):  # a case that cannot be built that small
        return Observation()


def _smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the largest step first."""
    if case.generator != "normal":
        yield replace(case, generator="normal")
    if case.dtype != torch.float32 and case.cache_dtype is None:
        yield replace(case, dtype=torch.float32)
    for name in ("mask", "scores"):
        rules = getattr(case, name)
        for n in range(len(rules)):
            yield replace(case, **{name: rules[:n] + rules[n + 1 :]})
    if case.memory != "contiguous":
        yield replace(case, memory="contiguous")
    if case.gradients:
        yield replace(case, gradients=False, lse_cotangent=False)
    if case.lse_cotangent:
        yield replace(case, lse_cotangent=False)
    if case.scale is not None:
        yield replace(case, scale=None)
    if len(case.lengths) > 1:
        for n in range(len(case.lengths)):
            yield replace(case, lengths=case.lengths[:n] + case.lengths[n + 1 :])
    if case.form == "dense" and case.batch > 1:
        yield replace(case, batch=1)
    group = case.heads_q // max(case.heads_kv, 1)
    if case.heads_kv > 1:
        yield replace(case, heads_q=1, heads_kv=1)
        yield replace(case, heads_q=2, heads_kv=2)
        yield replace(case, heads_q=case.heads_q // case.heads_kv * 2, heads_kv=2)
    elif group > 1:
        yield replace(case, heads_q=1)
        yield replace(case, heads_q=2)
    if case.form == "dense":
        square = case.seq_q == case.seq_kv
        for n in _fewer(case.seq_kv):
            yield replace(case, seq_kv=n, seq_q=n if square else case.seq_q)
        for n in _fewer(case.seq_q):
            yield replace(case, seq_q=n)
    if case.head_dim == case.head_dim_v and case.head_dim > 1:
        yield replace(case, head_dim=case.head_dim // 2, head_dim_v=case.head_dim // 2)
    elif case.head_dim > 1:
        yield replace(case, head_dim=case.head_dim // 2, head_dim_v=max(case.head_dim_v // 2, 1))


def _fewer(n: int) -> Iterator[int]:
    if n > 1:
        yield n // 2
        step = n // 4
        while step:
            yield n - step
            step //= 2
