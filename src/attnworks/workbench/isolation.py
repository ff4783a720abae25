"""Isolation: a kernel in a process of its own, so that its crash or hang is a finding and not the end of the run.

The process stays for all calls and is started anew after it died. Tensors travel through files that both sides map;
the kernel's inputs lie in one, between guard bands (``guards.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import weakref
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnworks.workbench.guards import Answer, Arena, Guarded, Runner, slots
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.packing import Packed, pack, unpack
from attnworks.workbench.subjects import Abilities, Declined, Finding, Outcome, Raised, abilities_of

if TYPE_CHECKING:
    from attnworks.workbench.conventions import Kernel

TIMEOUT = 60.0  # seconds for a call
LOAD_TIMEOUT = 300.0  # for importing torch and the kernel on a busy machine
MOST_DEATHS = 10  # a kernel that crashed or hung so often is not called any more
ROOM = 2 << 30  # free bytes that make shared memory the place for the files

Reply = tuple[str, Any]
"""("done", what was asked for) or ("raised" | "declined" | "finding" | "unusable", the message)."""


class Isolated(Guarded):
    """The kernel that ``load_subject(target, convention)`` gives, run in a process of its own.

    A call that takes longer than ``timeout`` seconds is killed. A crash, a hang or whatever the kernel raises is raised
    here as ``Finding``, with the signal or the exception and the line it came from. ``about``: the convention and the
    parameters, for reports. Close it, or use it as a context manager. Raises ``ValueError`` if the kernel cannot be
    loaded.
    """

    def __init__(self, target: str, convention: str | None = None, timeout: float = TIMEOUT) -> None:
        self.timeout, self.deaths, self.seen = timeout, 0, []
        self._target = target, convention
        place = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > ROOM else None
        self._directory = Path(tempfile.mkdtemp(prefix="attnworks-", dir=place))
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._files, self._numbers = itertools.count(), itertools.count()
        self._worker: _Worker | None = None
        try:
            self.name, self.abilities, self.about, self._called = self._running().about
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._remove()

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        if self.deaths >= MOST_DEATHS:
            return (f"not called any more: it crashed or hung {self.deaths} times",)
        found = self.abilities.reasons(inputs, differentiable)
        if not found and self._called is not None:
            return self._called.reasons(inputs, differentiable)
        if found:
            return found
        packed = pack(_bare(inputs))
        try:
            answer = self._ask("reasons", (packed.payload, self._share(packed.memory), differentiable))
        except Finding:
            return ()  # the call will show it
        return tuple(answer)

    def plan(self, inputs: Inputs) -> Any:
        return None

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        if self.deaths >= MOST_DEATHS:
            raise Declined(f"not called any more: it crashed or hung {self.deaths} times")
        return super().__call__(inputs, return_lse=return_lse, **options)

    # ---- the far side ------------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> Tensor:
        self._path = self._file()
        return _mapped(self._path, size)

    def _forward(self, number: int, packed: Packed, arena: Arena, return_lse: bool, options: dict[str, Any]) -> Answer:
        shared = self._path, [part.numel() for part in arena.slots]
        answer = self._ask("forward", (packed.payload, shared, number, return_lse, options))
        assert isinstance(answer, Answer)
        return answer

    def _backward(self, number: int, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        packed = pack(cotangents)
        return tuple(self._ask("backward", (packed.payload, self._share(packed.memory), number)))

    def _ask(self, what: str, message: tuple[Any, ...]) -> Any:
        """Send a request and unpack what it gave. Raises ``Finding`` or ``Declined``."""
        worker = self._running()
        try:
            kind, found = worker.ask((what, torch.get_num_threads(), self._file(), *message), self.timeout)
        except Finding:
            self.deaths += 1
            self._worker = None
            raise
        finally:
            Path(message[1][0]).unlink(missing_ok=True)
        if kind == "declined":
            raise Declined(found)
        if kind != "done":
            raise (Raised if kind == "raised" else Finding)(found)
        payload, (path, sizes) = found
        block = _mapped(path, Arena.size(sizes))
        Path(path).unlink()
        return unpack(payload, slots(block, sizes))

    def _share(self, memory: list[Tensor]) -> tuple[str, list[int]]:
        return write(self._file(), memory)

    def _file(self) -> str:
        return str(self._directory / str(next(self._files)))

    def _running(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker(*self._target, log=self._file(), timeout=max(LOAD_TIMEOUT, self.timeout))
        return self._worker


def _bare(inputs: Inputs) -> Inputs:
    return Inputs(**{**vars(inputs), "values": []})


def _mapped(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=max(size, 1), dtype=torch.uint8)


def write(path: str, memory: list[Tensor]) -> tuple[str, list[int]]:
    """Put storages into a file, as ``slots`` finds them there."""
    sizes = [part.numel() for part in memory]
    block = _mapped(path, Arena.size(sizes))
    for slot, part in zip(slots(block, sizes), memory, strict=True):
        slot.copy_(part)
    return path, sizes


# ---- the near end of the process -------------------------------------------------------------------------------------


class _Worker:
    """One process that has loaded the kernel."""

    def __init__(self, target: str, convention: str | None, log: str, timeout: float) -> None:
        here, there = socket.socketpair()
        self.log = Path(log)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        code = f"from attnworks.workbench.isolation import work; work({there.fileno()})"
        with there, self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Its threads wait asleep: spinning ones would take the cores from the oracle's.
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": paths},
            )
        self.connection = Connection(here.detach())
        weakref.finalize(self, _end, self.process)
        try:
            kind, about = self.ask(("load", target, convention), timeout)
        except Finding as error:
            raise ValueError(f"{target}: {error} while it was loaded\n{self._tail()}") from error
        if kind != "done":
            self.kill()
            raise ValueError(about)
        self.about: tuple[str, Abilities, dict[str, Any], Kernel | None] = about

    def ask(self, message: tuple[Any, ...], timeout: float) -> Reply:
        """Raises ``Finding`` if the process dies or does not answer in time."""
        try:
            self.connection.send(message)
            if not self.connection.poll(timeout):
                raise Finding(self._hung(timeout))
            reply: Reply = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise Finding(self._died()) from error
        return reply

    def kill(self) -> None:
        _end(self.process)
        self.connection.close()

    def _hung(self, timeout: float) -> str:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)  # it writes where it is
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.3)
        self.kill()
        return f"hung: no answer in {timeout:g} s, killed{self._place()}"

    def _died(self) -> str:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        how += ", as where memory runs out" if code == -signal.SIGKILL else ""
        return how + self._place()

    def _place(self) -> str:
        """The innermost Python line of the last traceback that the process wrote."""
        text = self.log.read_text(errors="replace")
        found = re.search(r'most recent call first\):\s+File "([^"]+)", line (\d+) in (\S+)', text)
        return f" in {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# ---- the process -----------------------------------------------------------------------------------------------------


def work(descriptor: int) -> None:
    """The process: load the kernel, then answer requests until the other end is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a hanging kernel must not outlive the run
    with contextlib.suppress(OSError):  # where memory runs out, this is the process to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(descriptor)
    _, target, convention = connection.recv()
    reply, runner = _load(target, convention)
    connection.send(reply)
    # What a kernel forgets to write shows: fresh memory holds NaN. torch.use_deterministic_algorithms would import for
    # seconds.
    torch.set_deterministic_debug_mode("warn")
    while runner is not None:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(_answer(runner, *request))


def _load(target: str, convention: str | None) -> tuple[Reply, Runner | None]:
    from attnworks.workbench.conventions import Kernel, load_subject

    try:
        subject = load_subject(target, convention)
    except ValueError as error:
        return ("unusable", str(error)), None
    except Exception as error:  # whatever importing the kernel raises
        return ("unusable", f"{target}: {_raised(error)} while it was loaded"), None
    # What the convention cannot express the near side finds by itself, without the function.
    called = replace(subject, function=_elsewhere) if isinstance(subject, Kernel) else None
    about = {} if called is None else called.about()
    return ("done", (subject.name, abilities_of(subject), about, called)), Runner(subject)


def _elsewhere(*_: Any, **__: Any) -> Any:
    raise AssertionError("the kernel is in another process")


def _answer(runner: Runner, what: str, threads: int, path: str, payload: bytes, shared: Any, *rest: Any) -> Reply:
    torch.set_num_threads(threads)
    source, sizes = shared
    try:
        value = unpack(payload, slots(_mapped(source, Arena.size(sizes)), sizes))
        if what == "forward":
            number, return_lse, options = rest
            answer: Any = runner.forward(number, value, return_lse, options)
        elif what == "backward":
            answer = runner.backward(rest[0], value)
        else:
            answer = runner.subject.reasons(value, rest[0])
    except Declined as error:
        return "declined", str(error)
    except Finding as error:
        return "finding", str(error)
    except Exception as error:  # whatever a kernel under test raises
        return "raised", _raised(error)
    packed = pack(answer)
    return "done", (packed.payload, write(path, packed.memory))


def _raised(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
