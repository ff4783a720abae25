"""Naming a problem on the command line: one set of options for every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click
import torch

from attnworks import hardware
from attnworks.hardware import Hardware
from attnworks.masks import Causal, Window
from attnworks.problem import Problem
from attnworks.workbench.providers import describe

if TYPE_CHECKING:
    from attnworks.workbench.cases import Case

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
TIME = click.FloatRange(min=0)  # seconds or minutes that a command may take
NAMES = (
    "batch",
    "heads",
    "heads_kv",
    "seq",
    "seq_kv",
    "head_dim",
    "head_dim_v",
    "dtype",
    "causal",
    "window",
    "decode",
    "case",
)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Positive numbers between commas."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} must be positive numbers between commas, e.g. 64,128", param, ctx)
        return tuple(int(part) for part in parts)


class _WindowType(click.ParamType):  # type: ignore[type-arg]
    """L,R: neighbours to the left and right; "-" for unlimited."""

    name = "L,R"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Window:
        if isinstance(value, Window):
            return value
        sides = [side.strip() for side in str(value).split(",")]
        if len(sides) != 2 or not all(side in ("", "-") or side.isdecimal() for side in sides):
            self.fail(f'{value!r} is not L,R: two counts of neighbours, "-" for unlimited, e.g. 511,0', param, ctx)
        left, right = (None if side in ("", "-") else int(side) for side in sides)
        return Window(left, right)


def problem_options(*, heads: int, seq: int, head_dim: int, dtype: str) -> Callable[[Command], Command]:
    """The options that name a problem, with a command's own defaults. The command takes them as ``**options`` and hands
    them to ``problem_from``."""
    size = click.IntRange(min=1)
    options = (
        click.option("--batch", type=size, default=1, show_default=True, help="Sequences."),
        click.option("--heads", type=size, default=heads, show_default=True, help="Query heads."),
        click.option("--heads-kv", type=size, help="KV heads, a divisor of --heads.  [default: --heads]"),
        click.option("--seq", type=size, help=f"Queries of a sequence.  [default: {seq}; 1 with --decode]"),
        click.option("--seq-kv", type=size, help=f"Keys of a sequence.  [default: --seq; {seq} with --decode]"),
        click.option("--head-dim", type=size, default=head_dim, show_default=True, help="Channels of q and k."),
        click.option("--head-dim-v", type=size, help="Channels of v and out.  [default: --head-dim]"),
        click.option("--dtype", type=click.Choice(list(DTYPES)), default=dtype, show_default=True),
        click.option("--causal", is_flag=True, help="The last query sees all keys, each earlier one a key less."),
        click.option("--window", type=_WindowType(), help='Neighbours beside self, "-" for unlimited: 511,0.'),
        click.option("--decode", is_flag=True, help="A KV cache filled with --seq-kv keys, few queries."),
        click.option("--case", help='A named case or real model\'s shape, e.g. "Llama-3-8B"; with --batch, --dtype.'),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command_with_default_seq(command, seq)

    return decorate


def command_with_default_seq(command: Command, seq: int) -> Command:
    """Remember the default length where ``problem_from`` finds it."""
    command.__dict__["default_seq"] = seq
    return command


def machine_option(command: Command) -> Command:
    """``--machine`` as the parameter ``machine``, for ``machine_named``."""
    known = ", ".join(hardware.machines())
    return click.option(
        "--machine", default="textbook", show_default=True, help=f"cpu (this one, measured), or one of {known}."
    )(command)


def machine_named(name: str) -> Hardware:
    """The machine of that name, or this one's CPU. Raises ``ValueError`` for an unknown name."""
    from attnworks.workbench import ceilings

    if name not in ("cpu", *hardware.machines()):
        raise ValueError(f"--machine: was {name!r}, must be cpu or one of {', '.join(hardware.machines())}")
    return ceilings.measured_hardware(torch.get_num_threads()) if name == "cpu" else hardware.load(name)


def given(ctx: click.Context) -> list[str]:
    """The problem options that the user wrote."""
    return [name for name in NAMES if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]


def problem_from(ctx: click.Context, default_seq: int) -> Problem:
    """The Problem that a command's options name. Raises ``click.UsageError`` or ``ValueError`` for options that do
    not go together."""
    o = ctx.params
    if o["case"]:
        return _from_case(ctx)
    decode = o["decode"]
    seq = o["seq"] or (1 if decode else default_seq)
    seq_kv = o["seq_kv"] or (default_seq if decode else seq)
    return describe(
        form="decode" if decode else "dense",
        batch=o["batch"],
        heads_q=o["heads"],
        heads_kv=o["heads_kv"] or o["heads"],
        seq_q=seq,
        seq_kv=seq_kv,
        head_dim=o["head_dim"],
        head_dim_v=o["head_dim_v"] or o["head_dim"],
        dtype=DTYPES[o["dtype"]],
        mask=_mask(o["causal"], o["window"]),
    )


def _mask(causal: bool, window: Window | None) -> Any:
    if causal and window:
        return Causal() & window
    return Causal() if causal else window


def _from_case(ctx: click.Context) -> Problem:
    found = named_case(ctx)
    return found if isinstance(found, Problem) else replace(found.build().problem(), return_lse=False)


def named_case(ctx: click.Context) -> Problem | Case:
    """What ``--case`` names: a real model's Problem, or a case of the catalogue. Raises ``click.UsageError`` for
    options that do not go with it, ``ValueError`` for an unknown name."""
    from attnworks.workbench import catalogue, shapes  # hundreds of cases: only where one is asked for

    name, o, written = ctx.params["case"], ctx.params, set(given(ctx)) - {"case"}
    shape = next((shape for shape in shapes.SHAPES if shape.name.lower() == name.lower()), None)
    allowed = {"batch", "dtype"} if shape else set()
    if extra := written - allowed:
        names = ", ".join(f"--{option.replace('_', '-')}" for option in sorted(extra))
        raise click.UsageError(f"--case {name!r} names the whole problem: {names} cannot be given beside it")
    if shape:
        return shape.problem(DTYPES[o["dtype"]], batch=o["batch"])
    found = [catalogue.BY_NAME[name]] if name in catalogue.BY_NAME else list(catalogue.select([name]))
    if len(found) > 1:
        listed = ", ".join(repr(case.name) for case in found[:5])
        raise click.UsageError(f"--case {name!r} names {len(found)} cases, must name one: {listed} …")
    return found[0]
