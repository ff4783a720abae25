"""CUDA C++ compiled at run time: NVRTC, which PyTorch brings, through ctypes; and the cache of what it compiled.

A kernel's machine code is kept on disk under a hash of all it depends on: text, options, architecture and compiler.
Files are written whole or not at all, so that processes can share a folder; one that is damaged is compiled anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
import tempfile
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from attnworks.backends import Compiled

ARCH = "sm_90a"  # 90a: wgmma and setmaxnreg are in no other
OPTIONS = (f"--gpu-architecture={ARCH}", "--std=c++17")
OLDEST = 12  # of NVRTC: the first that knows the architecture
_DIGEST = 32  # bytes of SHA-256 before the machine code in a file


class CompileError(RuntimeError):
    """A kernel that the CUDA compiler refused: the message holds what was asked for and what it said."""


@cache
def library_path() -> str:
    """Where NVRTC lies, of the CUDA version that torch was built with if it was; "" if there is none."""
    major = (torch.version.cuda or "").split(".")[0]
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found: dict[int, str] = {}
    for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
        for folder in folders:
            for path in folder.glob(pattern):
                version = path.name.rsplit(".", 1)[1]
                if version.isdigit() and int(version) >= OLDEST and major in ("", version):
                    found.setdefault(int(version), str(path))
    if found:
        return found[max(found)]
    for folder in (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64", Path(torch.__file__).parent / "lib"):
        for path in sorted(folder.glob("libnvrtc.so.*" if not major else f"libnvrtc.so.{major}")):
            return str(path)
    return ""


class _Nvrtc:
    """The library's functions that are used here. Raises ``CompileError`` where it can't be loaded."""

    def __init__(self, path: str) -> None:
        try:
            # NVRTC opens this one by its name alone, which finds it where it is loaded, in whatever folder.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise CompileError(f"NVRTC could not be loaded from {path!r}: {error}") from error
        self.library.nvrtcGetErrorString.restype = c_char_p
        major, minor = c_int(), c_int()
        self.library.nvrtcVersion(byref(major), byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, text: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """(machine code, what the compiler said). Raises ``CompileError`` with that where it refused."""
        program = c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(byref(program), text.encode(), b"attnworks.cu", 0, None, None), "create"
        )
        try:
            listed = (c_char_p * len(options))(*(option.encode() for option in options))
            status = self.library.nvrtcCompileProgram(program, len(options), listed)
            log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
            if status:
                raise CompileError(f"{self._error(status)}\n{log}")
            return self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(byref(program))

    def _read(self, program: c_void_p, size_of: str, get: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self.library, size_of)(program, byref(size)), size_of)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, get)(program, buffer), get)
        return buffer.raw

    def _check(self, status: int, what: str) -> None:
        if status:
            raise CompileError(f"NVRTC {what}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self.library.nvrtcGetErrorString(status).decode())


@cache
def _nvrtc() -> _Nvrtc:
    return _Nvrtc(library_path())


def version() -> str:
    """Of NVRTC. Raises ``CompileError``."""
    return _nvrtc().version


def cubin(text: str, options: tuple[str, ...] = OPTIONS, folder: Path | None = None) -> bytes:
    """Machine code of ``text``, from ``folder`` (by default ``cache_folder()``) if it was compiled before. Raises
    ``CompileError``."""
    path = _path(text, options, folder)
    return read(path) or write(path, compiled(text, options)[0])


def compiled(text: str, options: tuple[str, ...] = OPTIONS) -> tuple[bytes, str]:
    """(machine code, the compiler's log), not cached."""
    return _nvrtc().compile(text, options)


def judged(text: str, shared: int, folder: Path | None = None) -> Compiled:
    """What the compiler makes of ``text``, whose kernel takes ``shared`` bytes of shared memory; the machine code is
    cached as ``cubin`` does, from where a launch takes it. Matrix instructions are in all of these kernels, and are not
    counted."""
    try:
        code, log = compiled(text)
    except CompileError as error:
        return Compiled(error=str(error).strip())
    write(_path(text, OPTIONS, folder), code)
    return Compiled(shared, _registers(code), frame_bytes(code), warning=log.strip())


@cache
def _identity() -> str:
    """Which NVRTC this is, by its file: to load 100 MB for its version takes a cached call longer than all else. Raises
    ``CompileError``."""
    path = library_path()
    try:
        found = os.stat(path)
    except OSError as error:
        raise CompileError(f"NVRTC could not be loaded from {path!r}: {error}") from error
    return f"{Path(path).name} {found.st_size} {found.st_mtime_ns}"


def _path(text: str, options: tuple[str, ...], folder: Path | None) -> Path:
    key = hashlib.sha256("\0".join((text, *options, _identity())).encode()).hexdigest()
    return (folder or cache_folder()) / f"{key}.cubin"


# Entries of the table .nv.info: the format of a pair of words, its attribute, the size of the pair.
_FRAME_SIZE, _REGISTERS = b"\x04\x11\x08\x00", b"\x04\x2f\x08\x00"
_CUDA_INFO = 0x70000000  # the type of their section (SHT_LOPROC)


def frame_bytes(code: bytes) -> int:
    """What a thread keeps in memory for want of registers (EIATTR_FRAME_SIZE)."""
    return _most(code, _FRAME_SIZE)


def _registers(code: bytes) -> int:
    """That a thread is launched with (EIATTR_REGCOUNT), before groups of warps hand some over to others."""
    return _most(code, _REGISTERS)


def _most(code: bytes, entry: bytes) -> int:
    """Of the functions in machine code, the most that such entries say. They are looked for in their own sections: an
    instruction may hold the same bytes."""
    found = [
        int.from_bytes(info[place + 8 : place + 12], "little")  # after the entry and the function's number
        for info in _sections(code, _CUDA_INFO)
        for place in range(0, len(info), 4)
        if info.startswith(entry, place)
    ]
    if not found:
        raise CompileError(f"the machine code has no entry {entry.hex()} in .nv.info")
    return max(found)


def _sections(code: bytes, kind: int) -> list[bytes]:
    """The contents of the sections of one type of a 64-bit ELF file."""
    (headers,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    found = []
    for header in range(headers, headers + size * count, size):
        if struct.unpack_from("<I", code, header + 4)[0] == kind:
            start, length = struct.unpack_from("<QQ", code, header + 24)
            found.append(code[start : start + length])
    return found


def cache_folder() -> Path:
    """Where machine code is kept: ``attnworks`` in the user's cache folder, as the operating system has it."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "attnworks" / "cuda"


def read(path: Path) -> bytes | None:
    """The code in a file of the cache; None if there is no such file, or not all of it."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, code = whole[:_DIGEST], whole[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def write(path: Path, code: bytes) -> bytes:
    """Put code into the cache, replacing what is there in one step; a folder that can't be written to keeps nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return code
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
    return code
