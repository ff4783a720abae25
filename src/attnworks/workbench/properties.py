"""Properties beside values, which need no reference: the list of them, and the cases that they are tried on.

What must not change a bit is in ``exact.py``, what must change nothing but rounding in ``relations.py``. Some are asked
only of a subject that claims them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attnworks.masks import Causal
from attnworks.workbench import exact, memory, relations
from attnworks.workbench.cases import BooleanRule, Case
from attnworks.workbench.subjects import Subject, abilities_of

LONG = 4096  # keys; what needs the oracle's answer takes seconds from here on
MEMORY_LENGTHS = (2048, 4096)


def memory_growth(subject: Subject, case: Case) -> str:
    """The peak memory of a call does not grow with N²: between two lengths it grows by less than half a byte for each
    new score, where a kernel that writes scores, or a mask of one byte, needs at least one."""
    shape = {"batch": 1, "heads_q": 1, "heads_kv": 1, "memory": "contiguous", "generator": "normal"}
    peaks = []
    for length in (MEMORY_LENGTHS[0] // 4, *MEMORY_LENGTHS):  # the first call pays for what is loaded once
        inputs = replace(case, name="memory growth", seq_q=length, seq_kv=length, **shape).build()  # type: ignore[arg-type]
        peaks.append(memory.peak_extra(lambda inputs=inputs: subject(inputs, return_lse=False))[1])  # type: ignore[misc]
    small, large = peaks[1:]
    if small is None or large is None:
        return ""
    new_scores = MEMORY_LENGTHS[1] ** 2 - MEMORY_LENGTHS[0] ** 2
    lengths = " and ".join(map(str, MEMORY_LENGTHS))
    took = f"at {lengths} queries and keys it took {small / 2**20:.1f} and {large / 2**20:.1f} MiB"
    return "" if large - small < new_scores / 2 else f"memory grows with the square of the length: {took}"


@dataclass(frozen=True)
class Property:
    """``claim``: what a subject must claim to be asked for the property (``claims``); ``gradients``: it must
    differentiate."""

    name: str
    holds: Callable[[Subject, Case], str]
    applies: Callable[[Case], bool]
    claim: str = ""
    gradients: bool = False


# What a subject may leave undeclared (``Abilities``), and what is then said instead of asking for the property.
UNDECLARED = {
    "batch_invariant": "batch invariance is not declared",
    "thread_invariant": "thread invariance is not declared",
    "deterministic": "deterministic gradients are not declared",
    "linear_memory": "memory linear in the length is not declared",
    "lse": "it returns no LSE",
}


def claims(subject: Subject, claim: str) -> bool:
    """Whether a subject claims one of ``UNDECLARED``, by an attribute of its own or of its abilities."""
    return bool(getattr(subject, claim, getattr(abilities_of(subject), claim)))


def _tensors_per_batch(case: Case) -> bool:
    return any(isinstance(rule, BooleanRule) for rule in case.mask) or bool(case.scores)


def _with_gradients(case: Case) -> bool:
    return case.gradients and case.form != "decode"


def _plain(case: Case) -> bool:
    """Whether values may be exchanged for others."""
    return case.unit_normal and case.memory not in ("latent", "shared heads") and not case.new_keys


PROPERTIES = (
    Property("repeatable", exact.repeatable, lambda case: True),
    Property("ignores what is outside", exact.ignores_what_is_outside, lambda case: case.generator != "hand"),
    Property("changes no input", exact.changes_no_input, lambda case: not case.new_keys),
    Property(
        "causal",
        exact.causal,
        lambda case: case.mask in ((Causal(),), (Causal("top-left"),)) and case.unit_normal and not case.new_keys,
    ),
    Property("ignores threads", exact.ignores_threads, lambda case: True, claim="thread_invariant"),
    Property(
        "batch invariant",
        exact.batch_invariant,
        lambda case: (
            len(case.sequences) > 1 and not _tensors_per_batch(case) and not case.cache_dtype and not case.new_keys
        ),
        claim="batch_invariant",
    ),
    Property("scales with V", exact.scales_with_v, _plain),
    Property(
        "permutation of keys",
        relations.permutation_of_keys,
        lambda case: _plain(case) and not case.mask and case.seq_kv < LONG,
    ),
    Property("shift invariance", relations.shift_invariance, lambda case: _plain(case) and case.seq_kv < LONG),
    Property(
        "merges",
        relations.merges,
        lambda case: case.form == "dense" and not case.mask and not case.scores and case.seq_kv > 2,
        claim="lse",
    ),
    Property(
        "gradients repeatable",
        exact.gradients_repeatable,
        _with_gradients,
        claim="deterministic",
        gradients=True,
    ),
    Property(
        "gradients ignore what is outside",
        exact.gradients_ignore_what_is_outside,
        _with_gradients,
        claim="deterministic",
        gradients=True,
    ),
    Property(
        "memory growth",
        memory_growth,
        lambda case: case.name == MEMORY_CASE and memory.measurable(),
        claim="linear_memory",
    ),
)

MEMORY_CASE = "size: 513, causal, bf16"

# The cases that properties are tried on: one of each form and path, with tails, grouped heads, poison and strides.
CASES = (
    "rows without keys, fp32",
    "rows without keys, fp16",
    "size: 513, causal, bf16",
    "heads: 8/2",
    "heads: 6/2 causal, fp32",
    "strides: gapped, bshd",
    "strides: gapped, bhsd, causal, bf16",
    "stress: few queries on 16k keys, fp16",
    "varlen unequal, causal, fp32",
    "varlen with empty, causal, bf16",
    "varlen ragged",
    "decode, fp32",
    "decode, grouped, bf16",
    "decode, 4 queries, causal, fp16",
    "decode, pages of 16, bf16",
    "decode, 4 queries, causal, pages of 17",
    "decode, strided, pages of 16, fp32",
    "decode, append, pages of 16, fp32",
    "decode, window, fp32",
    "decode, 16k keys, bf16",
)
