import os

import pytest
import torch

from attnworks import hardware


@pytest.mark.parametrize("name", hardware.machines())
def test_every_machine_file_states_its_sources(name):
    machine = hardware.load(name)
    assert machine.kind in ("cpu", "gpu")
    assert machine.units >= 1
    assert machine.bandwidth is None or 1e9 < machine.bandwidth < 1e14
    assert all(1e9 < rate < 1e17 for rate in machine.matrix_flops.values())
    assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in machine.matrix_flops)
    assert machine.sources
    assert all(machine.sources.values())


def test_the_textbook_machine_is_the_one_of_the_well_known_bill():
    machine = hardware.load("textbook")
    assert machine.bandwidth == 2e12
    assert machine.flops_for(torch.float16) == 100e12


def test_an_unknown_machine_is_named():
    with pytest.raises(ValueError, match=r"machine: was 'abacus', must be one of \["):
        hardware.load("abacus")


def test_detect_tells_facts_of_this_machine():
    machine = hardware.detect("cpu")
    assert machine.kind == "cpu"
    assert machine.units == os.cpu_count()
    assert machine.name
    assert machine.bandwidth is None, "a rate is measured, not detected"
    for size in (machine.on_chip_bytes, machine.shared_cache_bytes):
        assert size is None or size >= 2**15
    assert hash(machine) == hash(hardware.detect("cpu"))
