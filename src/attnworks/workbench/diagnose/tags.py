"""Whose values a packed call or a cache reads: each row of V is a tag of the sequence or page that it belongs to, and
of whether it lies past the end, so that the output is the weight that each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attnworks.workbench.cases import Case
from attnworks.workbench.diagnose.probes import Bench, Observation
from attnworks.workbench.diagnose.readings import Reading
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.oracle import score, softmax
from attnworks.workbench.subjects import Subject

MOST_READ = 3  # probes
CLEAR = 1e-3  # of a row's weight
_PAST = (
    *("cache lengths ignored", "one slot too many", "longest length for all", "tail keys unmasked"),
    "tail weighted by 0",
)
_PAGES = (
    *("stale page", "pages in order", "page repeated", "pages of another size", "pages of K and V differ"),
    "page stride from sizes",
)
_LACKING = ("full last page left out", "last partial tile dropped", "a split left out", "page repeated")
_PACKED = ("sequences not apart", "key offsets from queries")
_SEQUENCES = ("K and V of sequence 0", "sequences exchanged", "batch and heads mixed")


def read(subject: Subject, benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Reading]:
    """What rows get weight that are not a sequence's own, or whole pages of its own that get none."""
    tried = 0
    for bench, s in zip(benches, seen, strict=True):
        case = bench.probe.case
        kept = case.form != "dense" and case.dtype == torch.float32 and not case.new_keys and not bench.long
        if not kept or case.cache_dtype is not None or not s.answers or not s.answers["out"].failed:
            continue
        if tried == MOST_READ:
            break
        tried += 1
        try:
            found = _of_case(subject, case)
        except Exception:  # whatever a kernel under test raises: nothing is read
            return []
        if found is not None:
            return [Reading(f"{found.said} ({bench.probe.name})", found.faults)]
    return []


def _of_case(subject: Subject, case: Case) -> Reading | None:
    inputs = case.build(1.0)  # what lies past the end is a number
    tags, words = _tags(inputs)
    if len(words) > inputs.v.shape[-1]:
        return None
    right = [_shares(case, n, tags, len(words)) for n, (_, seq_kv) in enumerate(case.sequences) if seq_kv]
    inputs.v.copy_(torch.nn.functional.one_hot(tags, inputs.v.shape[-1])[..., None, :].expand_as(inputs.v))
    outs = inputs.gather(subject(inputs)[0].detach())
    outs = [out for out, (_, seq_kv) in zip(outs, case.sequences, strict=True) if seq_kv]
    numbers = [n for n, (_, seq_kv) in enumerate(case.sequences) if seq_kv]
    for n, out, want in zip(numbers, outs, right, strict=True):
        got = out[..., : len(words)].double()
        more = ((want < 1e-9) & (got > CLEAR)).flatten(0, 1).any(0)
        none = ((want > CLEAR) & (got.abs() < 1e-9)).flatten(0, 1).all(0) & (want > CLEAR).flatten(0, 1).any(0)
        if not bool(more.any()) and not (bool(none.any()) and inputs.page_table is not None):
            continue
        said = [f"gives weight to {words[tag](n)}" for tag in more.nonzero().flatten().tolist()[:3]]
        said += [f"gives none to {words[tag](n)}" for tag in none.nonzero().flatten().tolist()[:3]]
        return Reading(f"sequence {n} {', '.join(said)}", _faults(case, more, n))
    return None


def _faults(case: Case, more: Tensor, sequence: int) -> tuple[str, ...]:
    if case.form == "varlen":
        return _PACKED
    if case.page_size:
        return _PAGES if bool(more.any()) else _LACKING
    return _PAST if bool(more[2 * sequence + 1]) else _SEQUENCES


def _tags(inputs: Inputs) -> tuple[Tensor, list[Callable[[int], str]]]:
    """The tag of each row of V as it is stored, and what each tag is called of a sequence."""
    case = inputs.case
    lengths = [seq_kv for _, seq_kv in case.sequences]
    if case.form == "varlen":
        tags = torch.full((inputs.v.shape[0],), len(lengths))
        assert inputs.cu_seqlens_kv is not None
        for n, (first, last) in enumerate(pairwise(inputs.cu_seqlens_kv.tolist())):
            tags[first:last] = n
        return tags, [*(_owned(n) for n in range(len(lengths))), lambda n: "rows that belong to no sequence"]
    if inputs.page_table is None:
        slots = torch.arange(inputs.v.shape[1])
        past = slots >= torch.tensor(lengths)[:, None]
        tags = 2 * torch.arange(len(lengths))[:, None] + past.long()
        return tags, [name for n in range(len(lengths)) for name in (_owned(n), _behind(n))]
    pages, size = inputs.v.shape[:2]
    owner: dict[int, tuple[int, int]] = {}
    for n, length in enumerate(lengths):
        for place in range(-(-length // size)):
            owner[int(inputs.page_table[n, place]) % pages] = (n, place)
    return torch.arange(pages)[:, None].expand(pages, size), [_page(owner.get(page)) for page in range(pages)]


def _owned(owner: int) -> Callable[[int], str]:
    return lambda n: "its own keys" if n == owner else f"keys of sequence {owner}"


def _behind(owner: int) -> Callable[[int], str]:
    return lambda n: f"slots past {'its' if n == owner else f'sequence {owner}' + chr(39) + 's'} end"


def _page(owner: tuple[int, int] | None) -> Callable[[int], str]:
    if owner is None:
        return lambda n: "a page that is nobody's"
    return lambda n: f"page {owner[1]} of {'its own' if owner[0] == n else f'sequence {owner[0]}'}"


def _shares(case: Case, sequence: int, tags: Tensor, count: int) -> Tensor:
    """(heads, rows, tags): the weight that rows of each tag should get of a sequence's queries."""
    inputs = case.build()
    part, group = inputs.values[sequence], case.heads_q // case.heads_kv
    scored = score(inputs, sequence, part.q.double(), part.k.double().repeat_interleave(group, 0))
    probs = softmax(scored.scores)[0][..., : case.sequences[sequence][1]]
    own = torch.cat([view.flatten() for view in inputs.rows(tags[..., None, None], sequence, keys=True)])
    shares = torch.zeros(*probs.shape[:2], count, dtype=probs.dtype)
    return shares.index_add(2, own, probs)
