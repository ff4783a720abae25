"""Conventions: how kernels are called. Any callable becomes a ``Subject`` through the convention of its parameters.

``load_subject("pkg.module:function")`` imports a kernel, infers the convention from its parameters' names and wraps it.
A kernel that is called in another way brings its own ``Subject`` in an attribute ``attnworks_subject`` (or is one).
What a kernel cannot do it may declare in an attribute ``declares``, a mapping of ``Abilities``' fields; or it raises
``NotImplementedError`` when called. Both are listed, not failed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnworks.problem import Form
from attnworks.workbench import adapters
from attnworks.workbench.adapters import Adapter, Call, Parameters
from attnworks.workbench.guards import Arena, leaves
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.subjects import Abilities, Declined, Finding, Outcome, Subject


@dataclass(frozen=True)
class Convention:
    """One way to call attention. ``required``: parameter names it is recognised by, "a|b" for either; at least one of
    ``marks`` as well, if there are any, and none of ``never``. ``layout``: of q, k, v in words."""

    name: str
    form: Form
    required: tuple[str, ...]
    layout: str
    causal: str
    adapter: Adapter
    marks: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def fits(self, parameters: Parameters) -> bool:
        return (
            all(any(part in parameters for part in name.split("|")) for name in self.required)
            and (not self.marks or any(mark in parameters for mark in self.marks))
            and not any(name in parameters for name in self.never)
        )

    def in_words(self) -> str:
        marks = f" and one of {', '.join(self.marks)}" if self.marks else ""
        return f"{self.name}: {', '.join(name.replace('|', ' or ') for name in self.required)}{marks}"


_BHSD = "(batch, heads, rows, dim)"
_BSHD = "(batch, rows, heads, dim)"
_PACKED = "(total, heads, dim)"
_OURS = ("mask", "scores", "layout")
_PAST = ("cu_seqlens_q", "k_cache", "score_mod", "block_mask")
_SDPA, _FLEX = ("attn_mask", "is_causal", "enable_gqa"), ("score_mod", "block_mask")
_FLASH = ("softmax_scale", "window_size", "softcap", "alibi_slopes", "return_attn_probs", "return_softmax_lse")

CONVENTIONS = (
    Convention("sdpa", "dense", ("query|q", "key|k", "value|v"), _BHSD, "top-left", adapters.sdpa, _SDPA, _PAST),
    Convention("flex", "dense", ("query|q", "key|k", "value|v"), _BHSD, "as asked", adapters.flex, _FLEX),
    Convention("flash", "dense", ("q", "k", "v"), _BSHD, "bottom-right", adapters.flash, _FLASH, _PAST),
    Convention("flash_varlen", "varlen", ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), _PACKED, "bottom-right",
               adapters.flash_varlen),
    Convention("flash_kvcache", "decode", ("q", "k_cache", "v_cache", "cache_seqlens"), _BSHD, "bottom-right",
               adapters.flash_kvcache),
    Convention("attnworks", "dense", ("q", "k", "v"), _BHSD, "as asked", adapters.attnworks, _OURS, _PAST),
    Convention("attnworks_varlen", "varlen", ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"), _PACKED, "as asked",
               adapters.attnworks),
    Convention("attnworks_decode", "decode", ("q", "k_cache", "v_cache", "kv_lens"), _BSHD, "as asked",
               adapters.attnworks),
)  # fmt: skip

BY_NAME = {convention.name: convention for convention in CONVENTIONS}


def infer(parameters: Parameters, name: str | None = None, owner: str = "the kernel") -> Convention:
    """The convention that a kernel's parameters show, or the one named. Raises ``ValueError`` with all conventions and
    their parameters where none fits, several do, or the name is unknown."""
    listed = "\n  ".join(convention.in_words() for convention in CONVENTIONS)
    if name is not None:
        if name not in BY_NAME:
            raise ValueError(f"convention: was {name!r}, must be one of\n  {listed}")
        return BY_NAME[name]
    fitting = [convention for convention in CONVENTIONS if convention.fits(parameters)]
    if len(fitting) == 1:
        return fitting[0]
    found = f"fit {' and '.join(c.name for c in fitting)}" if fitting else "fit no convention"
    raise ValueError(
        f"{owner}: its parameters ({', '.join(parameters)}) {found}; name one with --convention or convention=:\n  "
        + listed
    )


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Names of a function's parameters, True where one has no default. Built-in functions are read from the first line
    of their documentation. Raises ``ValueError`` where neither tells."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    return {p.name: p.default is p.empty for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _documented(function: Callable[..., Any]) -> dict[str, bool]:
    text = (inspect.getdoc(function) or "").split("->")[0].split("\n\n")[0].replace("\n", " ")
    name = getattr(function, "__name__", "")
    try:
        (made,) = ast.parse(f"def {text.strip().replace('*,', '') or 'f'}: ...").body
    except SyntaxError as error:
        raise ValueError(f"{name}: has no signature to read, wrap it in a Python function") from error
    assert isinstance(made, ast.FunctionDef)
    names = [a.arg for a in made.args.args]
    first_default = len(names) - len(made.args.defaults)
    return {name: place < first_default for place, name in enumerate(names)}


@dataclass(frozen=True)
class Kernel:
    """A function as a ``Subject``, called in this process through a convention."""

    name: str
    function: Callable[..., Any]
    convention: Convention
    parameters: Parameters
    abilities: Abilities

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        form = inputs.case.form
        if form != self.convention.form:
            return (f"the convention {self.convention.name} has no form {form}",)
        return self.abilities.reasons(inputs, differentiable) or tuple(self._call(inputs).reasons)

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        call = self._call(inputs)
        adapters.ask_lse(call, return_lse)
        options = {name: value for name, value in options.items() if name in self.parameters}
        # An output that the caller brings lies between guard bands too; autograd would not have it.
        around = None
        if call.has("out") and not leaves(inputs):
            shape = (*call.tensors[0].shape[:-1], inputs.case.head_dim_v)
            around = Arena.of(torch.full(shape, torch.nan, dtype=inputs.case.dtype))
            options["out"] = around.slots[0].view(inputs.case.dtype).view(shape)
        try:
            result = self.function(*call.tensors, **call.kwargs, **options)
        except NotImplementedError as error:
            raise Declined(f"NotImplementedError: {_first_line(error)}") from error
        if around is not None:
            result = options["out"] if result is None else result
            if overruns := around.overruns():
                raise Finding("; ".join(f"{what} out" for _, what in overruns))
        out, lse = adapters.read(result, call)
        _check_out(inputs, out, result)
        if lse is not None:
            _check_place(inputs, "lse", lse)
        return out, lse if return_lse else None

    def about(self) -> dict[str, Any]:
        """What was inferred, for reports."""
        c = self.convention
        return {"convention": c.name, "layout": c.layout, "causal": c.causal, "parameters": list(self.parameters)}

    def _call(self, inputs: Inputs) -> Call:
        call = Call(self.parameters)
        self.convention.adapter(inputs, call)
        return call


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _check_out(inputs: Inputs, out: Any, result: Any) -> None:
    """What cannot be compared at all is a finding in itself."""
    case = inputs.case
    if not isinstance(out, Tensor):
        raise Finding(f"returned {type(result).__name__}, must return a tensor or a tuple that begins with one")
    _check_place(inputs, "out", out)
    want = [*inputs.q.shape[:-1], case.head_dim_v]
    if case.form == "varlen":
        assert inputs.cu_seqlens_q is not None
        want[0] = int(inputs.cu_seqlens_q[-1])
    if list(out.shape) not in (want, [*inputs.q.shape[:-1], case.head_dim_v]):
        raise Finding(f"out was of shape {tuple(out.shape)}, must be {tuple(want)} (in the layout of the case)")
    if out.dtype != case.dtype:
        raise Finding(f"out was of dtype {out.dtype}, must be {case.dtype} like q")


def _check_place(inputs: Inputs, name: str, tensor: Tensor) -> None:
    if tensor.device != inputs.q.device:
        raise Finding(f"{name} was on device {tensor.device}, must be on {inputs.q.device} like q")
    if tensor.layout != torch.strided:
        raise Finding(f"{name} was of layout {tensor.layout}, must be {torch.strided}")


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_subject(target: str, convention: str | None = None) -> Subject:
    """The kernel that ``target`` names, "package.module:function" or "path/file.py:function", as a subject that runs in
    this process. ``convention``: a name of ``CONVENTIONS``; inferred from the parameters' names where it is None.

    Raises ``ValueError`` where nothing is found under the name or the convention is not clear.
    """
    return as_subject(_resolve(target), convention, name=target.rpartition(":")[2])


def as_subject(found: Any, convention: str | None = None, name: str = "") -> Subject:
    """Any callable, or an object that is or brings a ``Subject``, as a subject that runs in this process."""
    own = getattr(found, "attnworks_subject", None)
    if own is not None and convention is None:
        return _made(own)
    if _is_subject(found) and convention is None:
        return _made(found)
    if not callable(found):
        raise ValueError(f"{name or found!r}: was {type(found).__name__}, must be a function or a Subject")
    name = name or getattr(found, "__name__", type(found).__name__)
    parameters = parameters_of(found)
    return Kernel(
        name=name,
        function=found,
        convention=infer(parameters, convention, name),
        parameters=parameters,
        abilities=Abilities.declared(getattr(found, "declares", {}), name),
    )


def _is_subject(found: Any) -> bool:
    """A ``Subject`` or a class of them; a class's instances may get their names only when they are made."""
    return callable(getattr(found, "reasons", None)) and (isinstance(found, type) or hasattr(found, "name"))


def _made(own: Any) -> Subject:
    made: Subject = own() if isinstance(own, type) or not _is_subject(own) else own
    return made


def _resolve(target: str) -> Any:
    place, _, path = target.rpartition(":")
    if not place or not path:
        raise ValueError(f"target: was {target!r}, must be package.module:function or path/file.py:function")
    found: Any = _module(place)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"target: {place} has no {path!r}, only {', '.join(_public_like(path, found))}")
        found = getattr(found, part)
    return found


def _public_like(wanted: str, owner: Any) -> list[str]:
    """What an owner has: the names that are like the one wanted or, where none is, the first twenty."""
    names = [name for name, value in vars(owner).items() if not name.startswith("_") and callable(value)]
    return get_close_matches(wanted, names) or names[:20]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        # As `python -m` does: a module of the directory the command was started in.
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(error.name + ".")):
                raise ValueError(f"target: no module {place!r} is installed or lies in this directory") from error
            raise
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"target: no file {place}")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} (target)"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
