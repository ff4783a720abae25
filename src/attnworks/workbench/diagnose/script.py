"""A failing case as a script of its own: torch and the kernel under test, nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.scores import ALiBi, Bias, Sink, Softcap
from attnworks.workbench import generators
from attnworks.workbench.cases import AlibiRule, BiasRule, BooleanRule, Case, SinkRule
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.subjects import Subject

_HEAD = '''"""{title}

Made by attnworks diagnose. Needs torch and the kernel; exits 1 while the kernel is wrong.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# ---- the kernel: the lines to change ---------------------------------------------------------------------------------
{kernel}

# ---- the input -------------------------------------------------------------------------------------------------------
'''

_REFERENCE = """
# ---- the reference, in fp64 ------------------------------------------------------------------------------------------
group = heads_q // heads_kv
wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
i = torch.arange(seq_q)[:, None] + seq_kv - seq_q  # a query's place among the keys, counted from the last ones
j = torch.arange(seq_kv)[None]
s = scale * (q.double() @ wide_k.mT)
{scores}shown = torch.ones(1, 1, seq_q, seq_kv, dtype=torch.bool)
{masks}s = s.masked_fill(~shown, -math.inf)
{sink}lse = torch.logsumexp(torch.cat((s, sink), -1), -1)
want = torch.exp(s - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0)) @ wide_v
"""

_COMPARE = """
# ---- the comparison --------------------------------------------------------------------------------------------------
tolerance = {tolerance:g}


def compare(name: str, got: Tensor, right: Tensor) -> bool:
    error = (got.double() - right).abs()
    same = (got == right) | (got.isnan() & right.isnan())
    error = torch.where(same, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))
    worst = int(error.argmax())
    place = [int(n) for n in torch.unravel_index(torch.tensor(worst), error.shape)]
    print(f"{{name}}: max abs error {{float(error.max()):.3g}} at {{place}} (batch, head, row, channel): "
          f"{{float(got.flatten()[worst]):.6g}}, must be {{float(right.flatten()[worst]):.6g}}")
    largest = float(torch.where(right.isfinite(), right.abs(), 0).max())
    return float(error.max()) <= tolerance * max(1.0, largest)


"""


def standalone(subject: Subject, case: Case, target: str = "", title: str = "") -> str:
    """A script that builds the case's inputs, calls the kernel and compares it with a reference of a few lines.

    ``target``: "package.module:function" or "path/file.py:function", where the kernel is imported from. Raises
    ``ValueError`` for a case that is not dense: those need attnworks to lay out their caches and offsets.
    """
    if case.form != "dense":
        raise ValueError(f"case: was of form {case.form}, must be dense to become a script that needs torch alone")
    call = _call(subject, case)
    text = _HEAD.format(title=title or f"A wrong answer of {subject.name}.", kernel=_imports(subject, target, call))
    text += _inputs(case)
    text += _REFERENCE.format(scores=_scores(case), masks=_masks(case), sink=_sink(case))
    text += _COMPARE.format(tolerance=1e-4 if case.dtype == torch.float32 else 2e-2)
    return text + _run(case, call)


# ---- the kernel ------------------------------------------------------------------------------------------------------


def _call(subject: Subject, case: Case) -> str:
    """The call's arguments, as the subject's own convention has them."""
    inputs = case.build()
    made: Callable[[Inputs], Any] | None = getattr(subject, "_call", None)
    if made is None:
        given = ", ".join(
            f"{name}={_word(value, inputs)}" for name, value in inputs.kwargs().items() if name not in "qkv"
        )
        return f"q, k, v, {given}" + ", return_lse=True"
    call = made(inputs)
    tensors = [f"{n}.transpose(1, 2)" if call.transposed else n for n in "qkv"]
    kwargs = [f"{name}={_word(value, inputs)}" for name, value in call.kwargs.items()]
    return ", ".join([*(tensors if call.tensors else []), *kwargs])


def _word(value: Any, inputs: Inputs) -> str:
    """A value of a call, by the names that the script has for it."""
    if isinstance(value, Tensor):
        for name in "qkv":
            if value is getattr(inputs, name):
                return name
        if value.dtype == torch.bool:
            return "shown"
        return "slopes" if any(isinstance(s, ALiBi) for s in inputs.scores) and value.dim() < 3 else "added"
    if isinstance(value, tuple):
        inner = [_word(part, inputs) for part in value]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    names = {Bias: "Bias(bias)", ALiBi: "ALiBi(slopes)", Sink: "Sink(sink_logits)"}
    found = next((word for kind, word in names.items() if isinstance(value, kind)), None)
    return found or repr(value)


def _imports(subject: Subject, target: str, call: str) -> str:
    names = ("AllOf", "Causal", "Window")
    ours = [f"from attnworks.masks import {n}" for n in names if f"{n}(" in call]
    ours += [f"from attnworks.scores import {n}" for n in ("ALiBi", "Bias", "Sink", "Softcap") if f"{n}(" in call]
    place, _, name = target.rpartition(":")
    if not place:
        fault = getattr(subject, "fault", None)
        if fault is None:
            return "\n".join([*ours, "from your_module import attention as kernel"])
        made = f"kernel = Mutant({fault!r}).attention"
        return "\n".join([*ours, "from attnworks.workbench.mutants import Mutant", "", made])
    if place.endswith(".py"):
        lines = [
            "import runpy",
            "",
            f"kernel = runpy.run_path({place!r})[{name!r}]",
        ]
    else:
        lines = [f"from {place} import {name.split('.')[0]}", "", f"kernel = {name}"]
    return "\n".join([*ours, *lines])


# ---- the input -------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> str:
    generator: Any = generators.GENERATORS[case.generator]
    parts = [inspect.getsource(generators.Extents)]
    names = [name for name in ("LARGEST_SCORE",) if name in inspect.getsource(generator)]
    parts += [f"{name} = {getattr(generators, name)!r}\n" for name in names]
    parts += [inspect.getsource(function) for function in _needed(generator)]
    e = (case.heads_q, case.heads_kv, case.seq_q, case.seq_kv, case.head_dim, case.head_dim_v)
    dtype, words = str(case.dtype), ("heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    code = "\n\n".join(part.rstrip() + "\n" for part in parts).replace("-> Triple", "-> tuple[Tensor, Tensor, Tensor]")
    return f"""{code}

batch = {case.batch}
{", ".join(words)} = {", ".join(map(str, e))}
scale = {case.softmax_scale!r}
rng = torch.Generator().manual_seed({case._number})
rows = []
for _ in range(batch):
    extents = Extents(heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, scale)
    q, k, v = (x.to({dtype}) for x in {generator.__name__}(rng, extents))
    d_out = torch.randn(heads_q, seq_q, head_dim_v, generator=rng).to({dtype})
    rows.append((q, k, v, d_out))
q, k, v, d_out = (torch.stack(parts) for parts in zip(*rows))
rng = torch.Generator().manual_seed({case._number + 1})  # of masks and scores
"""


def _needed(function: Any) -> list[Any]:
    """A generator and the functions of its module that it calls, the called ones first."""
    text, found = inspect.getsource(function), []
    for name, other in vars(generators).items():
        if inspect.isfunction(other) and other is not function and f"{name}(" in text:
            found += [f for f in _needed(other) if f not in found]
    return [*found, function]


def _masks(case: Case) -> str:
    lines = []
    for rule in case.mask:
        if isinstance(rule, Causal | Window):
            origin = "i" if rule.align == "bottom-right" else "(i - seq_kv + seq_q)"
            left, right = (None, 0) if isinstance(rule, Causal) else (rule.left, rule.right)
            if right is not None:
                lines.append(f"shown = shown & (j <= {origin} + {right})")
            if left is not None:
                lines.append(f"shown = shown & (j >= {origin} - {left})")
        elif isinstance(rule, BooleanRule):
            shape = case._broadcast_shape(rule.form)
            lines.append(f"mask = torch.rand({shape}, generator=rng) < {rule.keep}")
            if rule.empty_row:
                lines.append("mask[..., -1, :] = False")
            lines.append("shown = shown & mask")
        else:
            raise ValueError("case: a mask that is a function cannot be written into a script")
    return "".join(line + "\n" for line in lines)


def _scores(case: Case) -> str:
    lines = []
    for rule in case.scores:
        if isinstance(rule, Softcap):
            lines.append(f"s = {rule.cap} * torch.tanh(s / {rule.cap})")
        elif isinstance(rule, AlibiRule):
            lines += [
                "slopes = 2.0 ** (-8 * torch.arange(1, heads_q + 1) / heads_q)",
                "added = -slopes.view(-1, 1, 1) * (i - j).abs()",
                "s = s + added",
            ]
        elif isinstance(rule, BiasRule):
            lines.append(f"bias = added = torch.randn({case._broadcast_shape(rule.form)}, generator=rng)")
            if rule.hide:
                lines.append("bias.view(-1)[::5] = -math.inf")
            lines.append("s = s + bias.double()")
        elif not isinstance(rule, SinkRule):
            raise ValueError("case: a score function cannot be written into a script")
    return "".join(line + "\n" for line in lines)


def _sink(case: Case) -> str:
    rule = next((rule for rule in case.scores if isinstance(rule, SinkRule)), None)
    if rule is None:
        return "sink = torch.full((batch, heads_q, seq_q, 1), -math.inf, dtype=torch.float64)\n"
    value = "" if rule.value is None else f"\nsink_logits = torch.full_like(sink_logits, {rule.value})"
    shape = "(batch, heads_q, seq_q, 1)"
    return (
        f"sink_logits = torch.randn(heads_q, generator=rng){value}\n"
        f"sink = sink_logits.double().view(1, -1, 1, 1).expand{shape}\n"
    )


def _run(case: Case, call: str) -> str:
    back = ".transpose(1, 2)" if "q.transpose" in call else ""
    lines = []
    if case.gradients:
        lines.append("q, k, v = (x.detach().requires_grad_() for x in (q, k, v))")
    lines += [
        f"result = kernel({call})",
        f"out = (result[0] if isinstance(result, tuple) else result){back}",
        'right = compare("out", out.detach(), want)',
        "if isinstance(result, tuple) and isinstance(result[1], Tensor) and result[1].shape == lse.shape:",
        '    right = compare("lse", result[1].detach(), lse) and right',
    ]
    if case.gradients:
        lines += [
            "grads = torch.autograd.grad(out, (q, k, v), d_out)",
            "p = torch.exp(s - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0))",
            "dp = d_out.double() @ wide_v.mT",
            "ds = p * (dp - (p * dp).sum(-1, keepdim=True))",
        ]
        for rule in reversed(case.scores):
            if isinstance(rule, Softcap):
                lines.append(f"ds = ds * (1 - torch.tanh(scale * (q.double() @ wide_k.mT) / {rule.cap}) ** 2)")
        lines += [
            "dk, dv = scale * (ds.mT @ q.double()), p.mT @ d_out.double()",
            "dk, dv = (x.unflatten(1, (heads_kv, group)).sum(2) for x in (dk, dv))",
            "right_grads = (scale * (ds @ wide_k), dk, dv)",
            'for name, got, correct in zip(("dq", "dk", "dv"), grads, right_grads):',
            "    right = compare(name, got, correct.detach()) and right",
        ]
    return "\n".join([*lines, "raise SystemExit(0 if right else 1)", ""])
