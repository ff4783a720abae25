"""Inputs on another device. Here that is the CPU again, which takes the same way; tests/gpu does it with a GPU."""

import pytest
import torch

from attnworks.backends import reference
from attnworks.workbench import catalogue
from attnworks.workbench.cases import Case, PredicateRule
from attnworks.workbench.exact import same_bits
from attnworks.workbench.packing import as_bytes
from attnworks.workbench.subjects import BackendSubject, backend_subjects
from attnworks.workbench.transfer import OnDevice
from attnworks.workbench.verify import Answers, verify_case, verify_properties

ELSEWHERE = BackendSubject("reference", reference, device="cpu:0")
NAMES = (
    "strides: gapped, bshd",
    "strides: shared heads, bhsd",
    "varlen, strided, window, 80/72",
    "decode, strided, pages of 16, fp32",
    "decode, MLA 576/512, fp32",
    "boolean mask b1qk",
    "bias b1qk",
    "sink, fp32",
)


@pytest.mark.parametrize("name", NAMES)
def test_copies_lie_as_the_originals_do(name):
    inputs = catalogue.BY_NAME[name].build()
    moved = OnDevice(inputs, "cpu").inputs.tensors()
    for tensor_name, here in inputs.tensors().items():
        there = moved[tensor_name]
        assert (there.stride(), there.storage_offset()) == (here.stride(), here.storage_offset())
        assert there.data_ptr() != here.data_ptr()
        assert same_bits(as_bytes(there), as_bytes(here)), "what lies between the rows is part of the copy"
    shared = moved["k"].untyped_storage().data_ptr() == moved["v"].untyped_storage().data_ptr()
    assert shared == (inputs.k.untyped_storage().data_ptr() == inputs.v.untyped_storage().data_ptr())


def test_tensors_that_a_predicate_captured_move_too():
    limit = torch.tensor(5)
    inputs = Case("captured", "", mask=(PredicateRule(lambda b, h, q, k: k < limit),)).build()
    (mask,) = OnDevice(inputs, "cpu").inputs.masks
    limit.fill_(0)
    assert mask(0, 0, 0, 3) and not inputs.masks[0](0, 0, 0, 3)


def test_what_a_call_changed_comes_back():
    inputs = catalogue.BY_NAME["decode, append, fp32"].build()
    there = OnDevice(inputs, "cpu")
    there.inputs.k.fill_(7)
    assert not (inputs.k == 7).any()
    there.write_back()
    assert (inputs.k == 7).all()


@pytest.mark.parametrize("name", [*NAMES, "decode, append, pages of 16, fp32", "heads: 6/2 causal, fp32"])
def test_a_backend_elsewhere_is_verified(name):
    case = catalogue.BY_NAME[name]
    results = verify_case(ELSEWHERE, Answers(case))
    assert [r.message for r in results if r.status != "passed"] == []
    if case.new_keys:
        assert [r.message for r in verify_properties(ELSEWHERE, case) if r.status == "failed"] == []


@pytest.mark.parametrize(("device", "words"), [("cuda:99", "must be cpu, cuda"), ("abacus", "must be cpu, cuda")])
def test_a_device_that_is_not_here(device, words):
    with pytest.raises(ValueError, match=words):
        backend_subjects(device=device)
