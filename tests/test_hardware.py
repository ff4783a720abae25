import os
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from attnworks import hardware
from attnworks.workbench.tile_sweep import target_of


@pytest.mark.parametrize("name", hardware.machines())
def test_every_machine_file_states_its_sources(name):
    machine = hardware.load(name)
    assert machine.kind in ("cpu", "gpu")
    assert machine.units >= 1
    assert machine.bandwidth is None or 1e9 < machine.bandwidth < 1e14
    assert all(1e9 < rate < 1e17 for rate in machine.matrix_flops.values())
    assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in machine.matrix_flops)
    assert all(machine.sources.values())
    facts = [f.name for f in fields(machine) if f.name not in ("name", "kind", "sources") and getattr(machine, f.name)]
    assert [name for name in facts if name not in machine.sources] == []


GPUS = [name for name in hardware.machines() if hardware.load(name).kind == "gpu" and name != "textbook"]


@pytest.mark.parametrize("name", GPUS)
def test_the_facts_of_a_gpu_go_together(name):
    machine = hardware.load(name)
    assert (machine.capability is None) != (machine.arch is None)
    assert machine.warp_size == (32 if machine.capability else 64)
    assert machine.on_chip_bytes and machine.block_bytes
    assert machine.on_chip_bytes - 1024 <= machine.block_bytes <= machine.on_chip_bytes
    assert 255 <= machine.thread_registers <= 512 and machine.unit_registers >= 65536
    assert 32 <= machine.unit_warps <= 64
    assert machine.flops_for(torch.float16) > machine.flops_for(torch.float32)


def test_the_cards_people_ask_about_are_here():
    assert {"t4", "rtx-2080-ti", "rtx-3090", "rtx-4090", "rtx-5090", "l4", "h100-sxm", "h200-sxm", "b200"} <= set(GPUS)
    assert {"a100-sxm-40gb", "a100-sxm-80gb", "mi50", "mi100", "mi300x"} <= set(GPUS)


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


def test_the_card_of_a_cuda_build_is_compiled_for_as_one(monkeypatch):
    """There torch's gcnArchName holds the card's name, which is no architecture of AMD's."""
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, gcnArchName="NVIDIA H200", multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    machine = hardware.detect("cuda")
    assert (machine.arch, machine.capability) == (None, "9.0")
    assert target_of(machine) == ("cuda", 90, 32)
