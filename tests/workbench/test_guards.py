"""Guards: writes around inputs, between their rows, into them and around an output are seen; gradients go through."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernel_helpers as kernels
from attnworks.workbench import catalogue
from attnworks.workbench.conventions import as_subject
from attnworks.workbench.guards import BAND, Arena, Guarded
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.packing import pack, unpack
from attnworks.workbench.subjects import Finding
from attnworks.workbench.verify import verify

CASE = catalogue.BY_NAME["size: 97"]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("none", []),
        ("writes behind", ["wrote up to 100 bytes after the memory of k"]),
        ("writes into q", ["changed its input q"]),
        ("writes into a gap", ["wrote 8 bytes between the rows of, or beside, k"]),
    ],
)
def test_writes_are_seen(fault: str, seen: list[str]) -> None:
    guarded = Guarded(as_subject(kernels.faulty))
    guarded(replace(CASE, scale=kernels.scale_of(fault)).build())
    assert guarded.seen == seen


def test_writes_are_failures_beside_the_values() -> None:
    case = replace(CASE, scale=kernels.scale_of("writes into a gap"), gradients=False)
    guarded = Guarded(as_subject(kernels.faulty))
    guarded.abilities = replace(guarded.abilities, lse=False)
    (result, *_) = verify(subjects=[guarded], cases=[case])
    assert result.status == "failed" and "beside, k" in result.message
    assert result.measures and all(m.passed for m in result.measures)


def test_writes_in_backward_are_seen() -> None:
    guarded = Guarded(as_subject(kernels.faulty))
    inputs = replace(CASE, scale=kernels.scale_of("writes in backward")).build()
    leaves = inputs.differentiable()
    out, _ = guarded(inputs)
    assert guarded.seen == []
    torch.autograd.grad([out], list(leaves.values()), [torch.ones_like(out)])
    assert guarded.seen == ["in backward changed its input k"]


def test_an_output_that_is_brought_lies_between_bands() -> None:
    subject = as_subject(kernels.into_out)
    out, _ = subject(CASE.build())
    assert not bool(out.isnan().any())
    with pytest.raises(Finding, match="wrote up to 256 bytes after the memory of out"):
        subject(replace(CASE, scale=0.125).build())


def test_every_band_and_both_sides() -> None:
    memory = [torch.arange(n, dtype=torch.uint8) for n in (5, 64, 200)]
    arena = Arena(memory, torch.empty(Arena.size([5, 64, 200]), dtype=torch.uint8))
    assert arena.overruns() == [] and arena.changed() == []
    first = arena.slots[1].storage_offset()
    arena.block[first - 3] += 1
    arena.block[first + 64 + BAND - 1] += 1
    arena.slots[2][7] = 0
    assert arena.overruns() == [
        (1, "wrote up to 3 bytes before the memory of"),
        (1, f"wrote up to {BAND} bytes after the memory of"),
    ]
    assert arena.changed() == [2]


def test_gradients_go_through() -> None:
    for name in ("rows without keys, fp32", "bias b1qk", "sink, fp32"):
        case = catalogue.BY_NAME[name]

        def gradients(subject: Guarded | Mutant, case=case) -> list[Tensor]:
            inputs = case.build()
            leaves = inputs.differentiable()
            out, lse = subject(inputs)
            assert lse is not None
            cotangents = [torch.ones_like(out), torch.ones_like(lse)]
            return list(torch.autograd.grad([out, lse], list(leaves.values()), cotangents))

        for direct, guarded in zip(gradients(Mutant()), gradients(Guarded(Mutant())), strict=True):
            assert torch.equal(direct, guarded)


def test_appended_keys_are_no_finding_and_reach_the_caller() -> None:
    inputs = catalogue.BY_NAME["decode, append, pages of 16, fp32"].build()
    before = inputs.k.clone()
    guarded = Guarded(as_subject(kernels.flash_attn_with_kvcache))
    guarded(inputs)
    assert guarded.seen == [] and not torch.equal(inputs.k.nan_to_num(), before.nan_to_num())


def test_packing_keeps_views_strides_and_functions() -> None:
    base = torch.arange(24.0).view(4, 6)
    view, offset = base.t()[1:3], torch.tensor(3.0)
    packed = pack({"base": base, "view": view, "again": view, "function": lambda x: torch.sin(x) + offset})
    assert len(packed.memory) == 2  # views of one storage stay so
    copies = [part.clone() for part in packed.memory]
    found = unpack(packed.payload, copies)
    assert torch.equal(found["view"], view) and found["view"].stride() == view.stride()
    assert found["again"] is found["view"]
    found["base"].zero_()
    assert bool((found["view"] == 0).all()) and bool((base != 0).any())
    assert torch.equal(found["function"](base), torch.sin(base) + 3)


def test_same_bits_as_without_guards() -> None:
    inputs = CASE.build()
    out, _ = Guarded(as_subject(scaled_dot_product_attention))(inputs)
    assert torch.equal(out, scaled_dot_product_attention(inputs.q, inputs.k, inputs.v))
