"""Wrong kernels: each is the package's source with one snippet replaced, and the suite's cases must reject it.

A snippet that is no longer in the source, or is there more than once, fails: it says where the mutant has to go now.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from attnworks import prepared
from attnworks.backends import triton
from attnworks.workbench.subjects import BackendSubject
from attnworks.workbench.verify import Answers, fresh_memory_poisoned, verify_case
from interpreter_cases import BY_NAME, DESCRIBED, GROUPED, SMALL
from interpreter_repairs import repair


class Mutant(NamedTuple):
    """``cases``: those that must reject it, one is enough, when ``subject`` runs them."""

    file: str
    right: str
    wrong: str
    cases: tuple[str, ...]
    subject: BackendSubject = SMALL


FP16_HEADS = "heads 6/2, few, fp16"
FORWARD, BACKWARD, PARTS = "forward.py", "backward.py", "parts.py"
MUTANTS = {
    "causal off by one": Mutant(PARTS, "rows + high, end - 1)", "rows + high + 1, end - 1)", ("top-left",)),
    "window off by one": Mutant(PARTS, "(rows + low)[", "(rows + low + 1)[", ("window to the left",)),
    "tail keys unmasked": Mutant(PARTS, "rows + high, end - 1)", "rows + high, FAR)", ("one tile and a tail",)),
    "acc not rescaled": Mutant(FORWARD, "v, acc * alpha[:, None],", "v, acc,", ("decode, rising maximum",)),
    "sum not rescaled": Mutant(FORWARD, "= running_sum * alpha +", "= running_sum +", ("decode, rising maximum",)),
    "a maximum kept though it is too low": Mutant(
        FORWARD, "if all_are < 1:", "if all_are < 0:", ("rising maximum, fp16",)
    ),
    "a maximum kept though it is too high": Mutant(
        FORWARD, "& (running_sum >= LEAST_SUM)", "", ("strongly negative, rows that see nothing at first",)
    ),
    "rows out of range not given another maximum": Mutant(
        FORWARD,
        "tl.where(in_range, shift, tl.where",
        "tl.where(in_range | True, shift, tl.where",
        ("rising maximum, fp16",),
    ),
    "the first try's sums kept": Mutant(
        FORWARD,
        "tl.zeros_like(acc), tl.zeros_like(running_sum)",
        "tl.zeros_like(acc), running_sum",
        ("rising maximum",),
    ),
    "tiles before the first one left out": Mutant(
        FORWARD, "end = one + (stop_place - first_place)", "end = stop_place", ("window of whole tiles",)
    ),
    "scale missing": Mutant(
        FORWARD, "        factor = scale * LOG2E if", "        factor = LOG2E if", ("one tile and a tail",)
    ),
    "wrong KV head": Mutant(
        FORWARD, "head + rows * 0, head // group", "head + rows * 0, head % group", ("heads 6/2, few",)
    ),
    "LSE in base 2": Mutant(
        FORWARD,
        "(running_max + tl.math.log2(running_sum)) * LN2",
        "running_max + tl.math.log2(running_sum)",
        ("one tile and a tail",),
    ),
    "rows without keys NaN": Mutant(
        FORWARD,
        'shift = tl.where(new_max == -float("inf"), 0.0, new_max)  # no key',
        "shift = new_max  # no key",
        ("decode, 4 queries, causal",),
    ),
    "splits without weights": Mutant(
        FORWARD, "weight = tl.math.exp2(tl.load(from_lse) * LOG2E - shift)", "weight = 1.0", ("decode",)
    ),
    "page table of sequence 0": Mutant(
        FORWARD, "page_table + b.to(tl.int64) *", "page_table + 0 *", ("decode, pages, the longest first",)
    ),
    "the first columns again": Mutant(
        FORWARD, "load_tile(k_tile + HEAD_DIM, k_offsets", "load_tile(k_tile, k_offsets", ("head dim 520",)
    ),
    "gradients of keys past the length": Mutant(
        "gradients.py",
        'torch.zeros_like if p.form == "decode"',
        'torch.empty_like if p.form == ""',
        ("decode, window",),
    ),
    "rows past the packed ones of one head": Mutant(
        FORWARD, "for member in range(group):", "for member in range(1):", ("varlen, heads 6/2",), GROUPED
    ),
    "positions of heads as rows": Mutant(
        FORWARD,
        "first_position = row_tile * TILE_Q // group if",
        "first_position = row_tile * TILE_Q if",
        ("heads 6/2, causal",),
        GROUPED,
    ),
    "sink left out of the maximum": Mutant(
        FORWARD, "new_max = tl.maximum(running_max, logit)", "new_max = running_max", ("sink 100", "sink and no keys")
    ),
    "delta left out": Mutant(
        BACKWARD, "grad = probs * (grad_probs - row_delta)", "grad = probs * grad_probs", ("size 16",)
    ),
    "dLSE left out": Mutant(
        BACKWARD, "total -= tl.load(grad_lse", "total -= 0 * tl.load(grad_lse", ("scale -0.7, few",)
    ),
    "dQ without scale": Mutant(BACKWARD, "valid, acc * scale,", "valid, acc,", ("one tile and a tail",)),
    "dK of one head of the group": Mutant(
        BACKWARD, "for member in range(group):", "for member in range(1):", ("one tile and a tail",)
    ),
    "rows of a sequence over those of the next": Mutant(
        PARTS, "tl.load(cu_seqlens + b) // PAD + b)", "tl.load(cu_seqlens + b) // PAD)", ("varlen",)
    ),
    "delta's padding left as it was": Mutant(
        BACKWARD, "tl.store(delta + places, total)", "tl.store(delta + places, total, mask=valid)", ("size 17",)
    ),
    "described V of the first KV head": Mutant(
        FORWARD,
        "load_described(v_head, b, kv_head,",
        "load_described(v_head, b, 0 * kv_head,",
        (FP16_HEADS,),
        DESCRIBED,
    ),
    "described Q of the first head of the group": Mutant(
        BACKWARD, "load_described(q, b, head,", "load_described(q, b, head // 3 * 3,", (FP16_HEADS,), DESCRIBED
    ),
    "slope left out": Mutant(BACKWARD, "grad = grad * slope.to(tl.float32)", "grad = grad * 1.0", ("softcap, few",)),
}

# What is loaded anew, so that all of it sees the wrong source; each after those it imports.
MODULES = ("parts", "forward", "backward", "grad_bias", "calls", "gradients")

repair()


@pytest.fixture
def mutated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mutant]:
    """The backend with one file wrong: its modules loaded anew, that one from a changed copy. By their files, as the
    finder of an editable install knows only the package's own."""
    mutant = MUTANTS[request.param]
    folder = Path(triton.__file__).parent
    source = (folder / mutant.file).read_text()
    assert source.count(mutant.right) == 1, f"{mutant.right!r} is {source.count(mutant.right)} times in {mutant.file}"
    (tmp_path / mutant.file).write_text(source.replace(mutant.right, mutant.wrong))
    names = [f"{triton.__name__}.{module}" for module in MODULES]
    for name in names:
        import_module(name)
    prepared.forget()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in zip(names, MODULES, strict=True):
            changed = tmp_path / f"{module}.py"
            spec = spec_from_file_location(name, changed if changed.exists() else folder / changed.name)
            assert spec and spec.loader
            loaded = module_from_spec(spec)
            patch.setitem(sys.modules, name, loaded)
            patch.setattr(triton, module, loaded)
            spec.loader.exec_module(loaded)
        yield mutant
        prepared.forget()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize("mutated", MUTANTS, indirect=True)
def test_the_cases_reject(mutated: Mutant) -> None:
    with fresh_memory_poisoned(), np.errstate(all="ignore"):
        results = [result for name in mutated.cases for result in verify_case(mutated.subject, Answers(BY_NAME[name]))]
    messages = [result.message for result in results if result.status == "failed"]
    assert messages, "no case rejected it"
    assert not any("raised" in message for message in messages), messages
