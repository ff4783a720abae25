"""What ``flow`` and ``traffic`` take beside a problem's options: lengths of packed sequences or caches, any mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import click

from attnworks import masks, problem
from attnworks.masks import DenseMask
from attnworks.problem import Problem, Sizes
from attnworks.traffic import Lengths
from attnworks.workbench import schedules
from attnworks.workbench.cli.problems import Command, given, problem_from
from attnworks.workbench.grid import Maps, maps_of


class Posed(NamedTuple):
    """``lengths``: (seq_q, seq_kv) of each sequence, None for equal ones. ``maps``: None where closed bounds are all
    that hides tiles."""

    problem: Problem
    lengths: Lengths | None
    maps: Maps | None

    @property
    def notes(self) -> list[str]:
        hidden = self.maps is None and not all(isinstance(term, masks.Bounds) for term in self.problem.mask)
        return (
            ["The kernels have no tile map of packed sequences and caches: the mask hides no tile."] if hidden else []
        )


class _LengthsType(click.ParamType):  # type: ignore[type-arg]
    """N or QxK between commas."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if not isinstance(value, str):
            return list(value)
        found = []
        for part in value.split(","):
            sizes = part.strip().split("x")
            if len(sizes) > 2 or not all(size.isdecimal() for size in sizes):
                self.fail(f"{value!r} must be lengths between commas, N or QUERIESxKEYS: 300,200,1x4096", param, ctx)
            found.append((int(sizes[0]), int(sizes[-1])))
        return found


def posed_options(command: Command) -> Command:
    """``--lengths`` and ``--mask``, for ``posed_from``."""
    command = click.option(
        "--mask", "mask_name", metavar="FILE.py:NAME",
        help="A mask as attention() takes it: a function (b, h, q, k), a boolean tensor; with --causal, --window both.",
    )(command)  # fmt: skip
    return click.option(
        "--lengths", type=_LengthsType(),
        help="Packed sequences of these lengths, N or QUERIESxKEYS between commas; with --decode keys in each cache.",
    )(command)  # fmt: skip


def posed_from(ctx: click.Context, default_seq: int) -> Posed:
    """Raises ``click.UsageError`` or ``ValueError`` for options that do not go together."""
    lengths, name = ctx.params["lengths"], ctx.params["mask_name"]
    written = set(given(ctx))
    if "case" in written and (lengths or name):
        raise click.UsageError("--case names the whole problem: --lengths and --mask cannot be given beside it")
    if lengths and written & {"batch", "seq_kv", *(() if ctx.params["decode"] else ("seq",))}:
        raise click.UsageError("--lengths names every sequence: --batch, --seq and --seq-kv cannot be given beside it")
    posed = problem_from(ctx, default_seq)
    if lengths:
        posed, lengths = _of_lengths(posed, lengths)
    return Posed(posed, lengths, None) if name is None else _masked(posed, lengths, name)


def titled(p: Problem) -> str:
    """The problem over a table of bytes."""
    form = {"dense": "", "varlen": "packed: ", "decode": "decode: "}[p.form]
    sizes = f"heads {p.heads_q}/{p.heads_kv}, N {p.seq_q} x {p.seq_kv}, d {p.head_dim}/{p.head_dim_v}"
    dtype = str(p.dtype).removeprefix("torch.")
    return f"{form}batch {p.batch}, {sizes}, {dtype}, mask {masks.describe(p.mask)}"


def _of_lengths(p: Problem, lengths: Lengths) -> tuple[Problem, Lengths]:
    if p.form == "decode":
        if any(seq_q != seq_kv for seq_q, seq_kv in lengths):
            raise click.UsageError("--lengths: with --decode must be the keys in each cache, N between commas")
        lengths = [(p.seq_q, keys) for _, keys in lengths]
        return replace(p, batch=len(lengths), seq_kv=max(keys for _, keys in lengths)), lengths
    (longest_q, longest_kv), (total_q, total_kv) = (
        tuple(how(axis) for axis in zip(*lengths, strict=True)) for how in (max, sum)
    )
    packed = replace(
        p, form="varlen", batch=len(lengths), seq_q=longest_q, seq_kv=longest_kv, total_q=total_q, total_kv=total_kv,
        q_strides=(0, p.head_dim, p.heads_q * p.head_dim), k_strides=(0, p.head_dim, p.heads_kv * p.head_dim),
        v_strides=(0, p.head_dim_v, p.heads_kv * p.head_dim_v),
    )  # fmt: skip
    return packed, lengths


def _masked(p: Problem, lengths: Lengths | None, name: str) -> Posed:
    mask = schedules.loaded(name, f"--mask: was {name!r}, must be FILE.py:NAME")
    if mask is None:
        raise ValueError(f"--mask: was {name!r}, whose file has no such name")
    spec, operands = masks.split(mask)
    dense = [term for term in spec if isinstance(term, DenseMask)]
    if dense:
        sizes = Sizes(p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv, p.head_dim, p.head_dim_v)
        problem.check_mask_operands(tuple(dense), operands, sizes, operands[0])
    p = replace(p, mask=(*p.mask, *spec))
    return Posed(p, lengths, maps_of(p, operands))
