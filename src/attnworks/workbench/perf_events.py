"""What a CPU's hardware counters say of one call: cycles, instructions, misses of the last-level cache.

Through Linux's perf_event_open(2), for the threads of this process in user space. A virtual machine often has no
counters, a container or a strict kernel closes them: that is said, not guessed around.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnworks.problem import Problem
from attnworks.workbench import statistics
from attnworks.workbench.ceilings import Caches
from attnworks.workbench.profile import ProfilerError
from attnworks.workbench.providers import Provider, random_inputs

WARM_UPS = 2
RUNS = 5
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
LINE = Path("/sys/devices/system/cpu/cpu0/cache/index3/coherency_line_size")
USUAL_LINE_BYTES = 64


class Event(NamedTuple):
    """``kind`` and ``config`` as in linux/perf_event.h."""

    name: str
    kind: int
    config: int


_HARDWARE, _CACHE = 0, 3
_LAST_LEVEL, _WRITE, _MISS = 2, 1 << 8, 1 << 16
EVENTS = (
    Event("cycles", _HARDWARE, 0),
    Event("instructions", _HARDWARE, 1),
    Event("llc_read_misses", _CACHE, _LAST_LEVEL | _MISS),
    Event("llc_write_misses", _CACHE, _LAST_LEVEL | _WRITE | _MISS),
)

Open = Callable[[Event, int], int]
"""A file descriptor that counts an event of a thread, from when it is enabled. Raises ``OSError``."""


@dataclass(frozen=True)
class Counted:
    """Of one call on cold caches, all threads together, the median of a few; None for what this CPU does not count.

    ``llc_bytes``: of the lines that a load or a store missed in the last-level cache. What the hardware had fetched
    ahead is not among them, so more than that crossed the memory."""

    cycles: float | None
    instructions: float | None
    llc_read_misses: float | None
    llc_write_misses: float | None
    llc_bytes: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count(provider: Provider, problem: Problem, threads: int | None = None, seed: int = 0) -> Counted:
    """Of a provider on a problem on the CPU, with torch's number of threads or ``threads``. Raises ``ProfilerError``
    where the machine does not let its counters be read."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        bound = provider.bind(problem, random_inputs(problem, torch.Generator().manual_seed(seed)))
        caches, found = Caches(torch.get_num_threads()), []
        with torch.no_grad():
            for _ in range(WARM_UPS):
                bound.run()
            for _ in range(RUNS):
                caches.flush()
                found.append(events_of(bound.run))
    finally:
        torch.set_num_threads(before)
    middle = {event.name: _middle([one[event.name] for one in found]) for event in EVENTS}
    misses = [middle[name] for name in ("llc_read_misses", "llc_write_misses")]
    known = [one for one in misses if one is not None]
    return Counted(**middle, llc_bytes=sum(known) * _line_bytes() if known else None)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _line_bytes() -> int:
    try:
        return int(LINE.read_text())
    except (OSError, ValueError):
        return USUAL_LINE_BYTES


# ---- the system call -------------------------------------------------------------------------------------------------

_SYSCALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_ATTRIBUTES = struct.Struct("IIQQQQQIIQ")  # the first version of perf_event_attr, 64 bytes
_TIMES = 1 | 2  # of the counter: enabled, and running, where counters take turns on too few registers
_DISABLED, _INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 0, 1 << 1, 1 << 5, 1 << 6
_ENABLE, _DISABLE = 0x2400, 0x2401
_NONE_HERE = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)


def events_of(
    run: Callable[[], object], events: Sequence[Event] = EVENTS, opened: Open | None = None
) -> dict[str, float | None]:
    """Counts of ``run`` by event, None for one that is not there. Raises ``ProfilerError`` where none is."""
    from fcntl import ioctl  # which Windows has not

    refused: dict[str, OSError] = {}
    with _counters(events, opened or _open, refused) as counters:
        if not counters:
            raise ProfilerError(_why(next(iter(refused.values()), None)))
        for descriptor, _ in counters:
            ioctl(descriptor, _ENABLE, 0)
        run()
        for descriptor, _ in counters:
            ioctl(descriptor, _DISABLE, 0)
        found: dict[str, float | None] = {event.name: None for event in events}
        for descriptor, name in counters:
            value = _read(os.read(descriptor, 24))
            if value is not None:
                found[name] = (found[name] or 0.0) + value
    return found


@contextmanager
def _counters(events: Sequence[Event], opened: Open, refused: dict[str, OSError]) -> Iterator[list[tuple[int, str]]]:
    """(descriptor, event) for each event of each thread that there is; threads begun later are counted with the one
    that began them."""
    found: list[tuple[int, str]] = []
    try:
        for event in events:
            if error := _add(event, opened, found):
                refused[event.name] = error
        yield [one for one in found if one[1] not in refused]
    finally:
        for descriptor, _ in found:
            os.close(descriptor)


def _add(event: Event, opened: Open, found: list[tuple[int, str]]) -> OSError | None:
    """A descriptor for each thread; or what was said where the event cannot be counted."""
    try:
        for thread in _threads():
            with suppress(ProcessLookupError):  # it ended meanwhile
                found.append((opened(event, thread), event.name))
    except OSError as error:
        return error
    return None


def _threads() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc/self/task"))
    except OSError:
        return [0]


def _open(event: Event, thread: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = _DISABLED | _INHERIT | _NO_KERNEL | _NO_HYPERVISOR
    packed = _ATTRIBUTES.pack(event.kind, _ATTRIBUTES.size, event.config, 0, 0, _TIMES, flags, 0, 0, 0)
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.syscall(number, ctypes.c_char_p(packed), thread, -1, -1, 0))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def _read(data: bytes) -> float | None:
    """The count, for the whole time where it was kept in turns; None if its turn never came."""
    value, enabled, running = map(int, struct.unpack("QQQ", data))
    if running == 0:
        return 0.0 if enabled == 0 else None
    return value * enabled / running


def _why(error: OSError | None) -> str:
    said = f"perf_event_open: {error.strerror}" if error else "perf_event_open: no threads"
    code = error.errno if error else 0
    if code in _NONE_HERE:
        return f"this CPU, or the virtual machine it is, has no hardware counters ({said})"
    if code in (errno.EACCES, errno.EPERM):
        try:
            level = f"{PARANOID} is {PARANOID.read_text().strip()} and must be at most 2, or "
        except OSError:
            level = ""
        return f"the CPU's counters are closed: {level}the container forbids the call ({said})"
    if code == errno.ENOSYS:
        return f"the CPU's counters are read on Linux only ({said})"
    return f"the CPU's counters cannot be read ({said})"
