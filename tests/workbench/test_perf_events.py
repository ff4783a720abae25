"""A CPU's hardware counters: read through the real system call with events that every kernel has, refused with the
reason where a machine has none."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from pathlib import Path

import pytest
import torch

from attnworks.workbench import counters, perf_events
from attnworks.workbench.perf_events import EVENTS, Counted, Event, count, events_of
from attnworks.workbench.profile import ProfilerError
from attnworks.workbench.providers import Sdpa, describe
from record_helpers import RECORD

_SOFTWARE = 1
CLOCK, FAULTS = Event("clock", _SOFTWARE, 1), Event("faults", _SOFTWARE, 2)  # the kernel counts them itself
REAL = perf_events._open


def problem():
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 2, "seq_q": 64, "seq_kv": 64, "head_dim": 16, "head_dim_v": 16}
    return describe(form="dense", dtype=torch.float32, **sizes)


def allowed():
    try:
        os.close(REAL(CLOCK, 0))
    except OSError as error:
        return error.strerror
    return ""


needs_perf = pytest.mark.skipif(bool(allowed()), reason=f"perf_event_open: {allowed()}")


def in_software(event, thread):
    """A machine whose cycles are nanoseconds of the scheduler's clock, with no counter of cache misses."""
    if event.name.startswith("llc"):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    return REAL(CLOCK, thread)


def busy(seconds=0.05):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@needs_perf
def test_counts_are_those_of_the_run_alone():
    busy()
    found = events_of(busy, (CLOCK,))["clock"]
    assert found is not None and found > 0.04e9, "nanoseconds of this thread, and of what else may run in the process"
    fresh = mmap.mmap(-1, 1 << 20)
    faults = events_of(lambda: fresh.write(b"x" * (1 << 20)), (FAULTS,))["faults"]
    assert faults is not None and faults > 0
    assert min(events_of(lambda: None, (CLOCK,))["clock"] for _ in range(5)) < found / 2


@needs_perf
def test_every_thread_is_counted_and_no_descriptor_left():
    torch.ones(600, 600) @ torch.ones(600, 600)  # threads of the products are there
    asked = []
    before = len(os.listdir("/proc/self/fd"))
    found = events_of(
        busy, EVENTS, lambda event, thread: asked.append((event.name, thread)) or in_software(event, thread)
    )
    assert len(os.listdir("/proc/self/fd")) == before
    threads = {int(name) for name in os.listdir("/proc/self/task")}
    assert {thread for name, thread in asked if name == "cycles"} == threads
    assert found["cycles"] > 0.04e9 and found["llc_read_misses"] is None, "unknown is not 0"


def test_a_thread_that_ended_is_left_out_and_a_refused_event_has_no_part(monkeypatch):
    monkeypatch.setattr(perf_events, "_threads", lambda: [1, 2])

    def opened(event, thread):
        raise ProcessLookupError(errno.ESRCH, "No such process")

    with pytest.raises(ProfilerError, match="no threads"):
        events_of(lambda: None, (CLOCK,), opened)


def test_counters_that_take_turns_are_scaled_to_the_whole_time():
    assert perf_events._read(struct.pack("QQQ", 100, 10, 5)) == 200
    assert perf_events._read(struct.pack("QQQ", 0, 10, 0)) is None, "its turn never came"
    assert perf_events._read(struct.pack("QQQ", 0, 0, 0)) == 0, "its thread never ran"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "the virtual machine it is, has no hardware counters"),
        (errno.EACCES, "is 4 and must be at most 2, or the container forbids the call"),
        (errno.EPERM, "is 4 and must be at most 2"),
        (errno.ENOSYS, "on Linux only"),
        (errno.EMFILE, "cannot be read (perf_event_open: Too many open files)"),
    ],
)
def test_why_there_are_no_counters_is_said(monkeypatch, tmp_path, code, words):
    level = tmp_path / "perf_event_paranoid"
    level.write_text("4\n")
    monkeypatch.setattr(perf_events, "PARANOID", level)

    def refused(event, thread):
        raise OSError(code, os.strerror(code))

    with pytest.raises(ProfilerError) as caught:
        events_of(lambda: None, EVENTS, refused)
    assert words in str(caught.value)
    monkeypatch.setattr(perf_events, "_open", refused)
    told = counters.with_profile(problem(), RECORD, Sdpa())
    assert told.profile is None and words in told.notes[-1] and told.notes[-1].startswith("no profile: ")


def test_this_machine_counts_or_says_why_not():
    told = counters.with_profile(problem(), RECORD, Sdpa())
    if told.profile is None:
        assert "counters" in told.notes[-1] and "perf_event_open: " in told.notes[-1]
    else:
        assert told.profile["cycles"] > 1000 and 0.05 < told.profile["instructions"] / told.profile["cycles"] < 10


@needs_perf
def test_a_call_is_counted_with_the_threads_that_were_asked_for(monkeypatch, tmp_path):
    seen = []

    class Spy(Sdpa):
        def bind(self, problem, inputs):
            bound = super().bind(problem, inputs)
            return bound._replace(run=lambda: seen.append(torch.get_num_threads()) or bound.run())

    before = torch.get_num_threads()
    monkeypatch.setattr(perf_events, "_open", in_software)
    found = count(Spy(), problem(), threads=1)
    assert set(seen) == {1} and len(seen) == perf_events.WARM_UPS + perf_events.RUNS
    assert torch.get_num_threads() == before
    assert found.cycles > 0 and (found.llc_read_misses, found.llc_bytes) == (None, None)


def test_missed_lines_are_bytes(monkeypatch, tmp_path):
    counts = {"cycles": 5.0, "instructions": 10.0, "llc_read_misses": 100.0, "llc_write_misses": None}
    monkeypatch.setattr(perf_events, "events_of", lambda run: counts)
    monkeypatch.setattr(perf_events, "LINE", Path(tmp_path / "line"))
    assert count(Sdpa(), problem()) == Counted(5.0, 10.0, 100.0, None, 6400.0)
    (tmp_path / "line").write_text("128\n")
    assert count(Sdpa(), problem()).llc_bytes == 12800
