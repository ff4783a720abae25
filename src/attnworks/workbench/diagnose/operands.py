"""Which K and which V each query head is multiplied with, found by trying all that a dense call has: whatever map from
heads and sequences to KV heads a kernel has, it can be read off its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnworks.workbench.diagnose.probes import Answer, Bench, Observation
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.oracle import score, softmax

MOST_READ = 3  # probes
ALIKE = 1e-3  # what may be left, relative
_NAMES = {
    "heads of both": ("KV head by remainder", "KV head 0 for all"),
    "heads": ("K and V heads differ",),
    "sequences": ("K and V of sequence 0",),
    "both": ("batch and heads mixed", "layouts confused"),
}
Source = tuple[int, int]  # sequence, KV head


@dataclass(frozen=True)
class Found:
    """Of one query head: its own KV head, and those that K and V come from."""

    head: Source
    own: Source
    k: Source
    v: Source


def sources(benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Reading]:
    """Where K and V come from, of the first probe in which that explains every head."""
    read = 0
    for bench, s in zip(benches, seen, strict=True):
        case = bench.probe.case
        several = case.heads_kv * case.batch > 1
        plain = case.form == "dense" and case.dtype == torch.float32 and case.generator == "normal" and several
        if not plain or not s.answers or not s.answers["out"].failed or read == MOST_READ:
            continue
        read += 1
        found = _of_case(bench, s.answers["out"])
        if found and any((one.k, one.v) != (one.own, one.own) for one in found):
            said, kind = _in_words(found)
            return [Reading(f"{said} ({bench.probe.name})", _NAMES[kind])]
    return []


def _of_case(bench: Bench, answer: Answer) -> list[Found]:
    """By query head; none where some head's output is made of no K and V that there are."""
    case, inputs = bench.probe.case, bench.probe.case.build()
    if [x.shape for x in answer.parts] != [x.shape for x in bench.truths["out"].standard.want]:
        return []
    group = case.heads_q // case.heads_kv
    places = [(b, g) for b in range(case.batch) for g in range(case.heads_kv)]
    keys, values = (torch.stack([getattr(part, name) for part in inputs.values]).double() for name in "kv")
    found = []
    for b, part in enumerate(inputs.values):
        weights = {}
        for at in places:
            scored = score(inputs, b, part.q.double(), keys[at].expand(case.heads_q, -1, -1))
            weights[at] = softmax(scored.scores)[0][..., : case.seq_kv]
        for h in range(case.heads_q):
            pair = _pair(answer.parts[b][h].double(), {at: p[h] for at, p in weights.items()}, values, (b, h // group))
            if pair is None:
                return []
            found.append(Found((b, h), (b, h // group), *pair))
    return found


def _pair(got: Tensor, weights: dict[Source, Tensor], values: Tensor, own: Source) -> tuple[Source, Source] | None:
    """The K and V that one head's output is made of, its own if these do."""
    tried = sorted(weights, key=lambda at: at != own)
    for k in tried:
        for v in tried:
            if float((weights[k] @ values[v] - got).norm()) < ALIKE * float(got.norm()):
                return k, v
    return None


def _in_words(found: list[Found]) -> tuple[str, str]:
    """What is read, and which kind of mistake that is."""
    wrong = [one for one in found if (one.k, one.v) != (one.own, one.own)]
    other_sequence = any(one.k[0] != one.own[0] or one.v[0] != one.own[0] for one in wrong)
    other_head = any(one.k[1] != one.own[1] or one.v[1] != one.own[1] for one in wrong)
    kind = "both" if other_sequence and other_head else "sequences" if other_sequence else "heads"
    if kind == "heads" and all(one.k == one.v for one in wrong):
        kind = "heads of both"
    listed = []
    for one in wrong[:4]:
        where = f"of sequence {one.head[0]} " if other_sequence else ""
        k, v = (f"{at[1]}" + (f" of sequence {at[0]}" if other_sequence else "") for at in (one.k, one.v))
        listed.append(f"head {one.head[1]} {where}reads KV head {k}" if k == v else
                      f"head {one.head[1]} {where}reads K of KV head {k}, V of {v}")  # fmt: skip
    more = f" … ({len(wrong)} heads)" if len(wrong) > 4 else ""
    return "; ".join(listed) + more, kind
