"""From a case's ``Inputs`` to the call that a kernel of some convention expects: one function for each convention.

What the convention or the kernel's parameters cannot express becomes a reason, so that "is it possible?" and "make the
call" are the same code. Masks written out for a kernel come from their definitions in the reference backend, which
share nothing with the oracle that judges the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from attnworks import masks, scores
from attnworks.backends.reference import definitions
from attnworks.expressions.evaluation import evaluate
from attnworks.masks import Bounds, DenseMask, MaskSpec, Predicate
from attnworks.scores import ALiBi, Bias, Sink, Softcap
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.subjects import mask_kinds, score_kinds

Parameters = Mapping[str, bool]
"""A function's parameters by name: whether each must be given."""

LSE_NAMES = ("return_lse", "return_softmax_lse", "return_attn_probs")
SCALE_NAMES = ("scale", "softmax_scale", "sm_scale")
CAUSAL_NAMES = ("causal", "is_causal")
SINK_NAMES = ("learnable_sink", "sinks", "s_aux")


@dataclass
class Call:
    """A call in the making: ``tensors`` go first and by position, ``kwargs`` by name. ``reasons``: why it cannot be
    made, empty if it can. ``transposed``: heads and rows of the result are the other way round in the case."""

    parameters: Parameters
    tensors: tuple[Tensor, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    transposed: bool = False

    def give(self, what: str, value: Any, *names: str) -> None:
        """Pass ``value`` as the first of the names that the kernel has."""
        name = self.has(*names)
        if name:
            self.kwargs[name] = value
        else:
            self.reasons.append(f"no parameter {' or '.join(names)}: cannot be given {what}")

    def has(self, *names: str) -> str:
        return next((name for name in names if name in self.parameters), "")

    def must(self, *names: str) -> bool:
        return any(self.parameters.get(name, False) for name in names)

    def lacks(self, reason: str) -> None:
        self.reasons.append(reason)


Adapter = Callable[[Inputs, Call], None]


def _common(inputs: Inputs, call: Call) -> None:
    """Scale and what only has to be there because it has no default."""
    case = inputs.case
    if case.scale is not None or call.must(*SCALE_NAMES):
        call.give("a scale", case.softmax_scale, *SCALE_NAMES)
    if call.must("dropout_p"):
        call.kwargs["dropout_p"] = 0.0
    if call.must(*CAUSAL_NAMES):
        call.kwargs.setdefault(call.has(*CAUSAL_NAMES), False)


def _dense(inputs: Inputs, call: Call, layout: str) -> None:
    """q, k and v as views in the kernel's layout."""
    call.transposed = inputs.case.layout != layout
    tensors = (inputs.q, inputs.k, inputs.v)
    call.tensors = tuple(x.transpose(1, 2) for x in tensors) if call.transposed else tensors


def _spec(inputs: Inputs) -> tuple[MaskSpec, tuple[Tensor, ...]]:
    return masks.split(inputs.kwargs()["mask"])


def modifiers_of(inputs: Inputs) -> list[str]:
    """The masks and score modifiers of a case in words."""
    return [f"{kind} mask" for kind in sorted(mask_kinds(inputs))] + sorted(score_kinds(inputs))


def _is_square(inputs: Inputs) -> bool:
    """As many queries as keys, where all alignments agree."""
    return all(seq_q == seq_kv for seq_q, seq_kv in inputs.case.sequences)


# ---- torch.nn.functional.scaled_dot_product_attention ----------------------------------------------------------------


def sdpa(inputs: Inputs, call: Call) -> None:
    """(batch, heads, rows, dim); causal from the top left; every other mask, bias and ALiBi through ``attn_mask``."""
    case = inputs.case
    _dense(inputs, call, "bhsd")
    spec, operands = _spec(inputs)
    others = score_kinds(inputs) - {"bias", "alibi"}
    if others:
        call.lacks(f"the convention has no {', '.join(sorted(others))}")
    if case.heads_q != case.heads_kv and call.has("enable_gqa"):
        call.kwargs["enable_gqa"] = True
    causal = len(spec) == 1 and isinstance(spec[0], Bounds) and (spec[0].left, spec[0].right) == (None, 0)
    from_top = causal and (_is_square(inputs) or (isinstance(spec[0], Bounds) and spec[0].align == "top-left"))
    if from_top and not inputs.scores and call.has(*CAUSAL_NAMES):
        call.give("causal", True, *CAUSAL_NAMES)
    elif (spec or inputs.scores) and not others:
        if not call.has("attn_mask"):
            what = "causal from the bottom right" if causal and not from_top else ", ".join(modifiers_of(inputs))
            call.lacks(f"no parameter attn_mask: cannot be given {what}")
        else:
            call.kwargs["attn_mask"] = written_mask(inputs, spec, operands)
    _common(inputs, call)


def written_mask(inputs: Inputs, spec: MaskSpec, operands: tuple[Tensor, ...]) -> Tensor:
    """Masks, biases and ALiBi as one tensor of at least two dimensions that broadcasts to (batch, heads, seq_q,
    seq_kv): boolean, True where visible, or something to add."""
    case = inputs.case
    if len(spec) == 1 and isinstance(spec[0], DenseMask) and not inputs.scores:
        return operands[0] if operands[0].dim() >= 2 else operands[0][None]
    if len(inputs.scores) == 1 and isinstance(inputs.scores[0], Bias) and not spec:
        bias = inputs.scores[0].tensor
        return bias if bias.dim() >= 2 else bias[None]
    rows, keys = range(case.seq_q), range(case.seq_kv)
    at = definitions.positions(
        0, case.batch, case.heads_q, rows, keys, case.seq_q, case.seq_kv, torch.device(inputs.q.device)
    )
    sees = definitions.visible(spec, operands, at)
    if not inputs.scores:
        return sees
    terms, score_operands = scores.split(tuple(inputs.scores))
    added = definitions.modify(terms, score_operands, torch.zeros(1, 1, 1, 1, device=inputs.q.device), at)
    return torch.where(sees, added, -torch.inf)


# ---- flash-attn's three functions ------------------------------------------------------------------------------------


def flash(inputs: Inputs, call: Call) -> None:
    """(batch, rows, heads, dim); causal and window from the bottom right."""
    _dense(inputs, call, "bshd")
    _flash_modifiers(inputs, call)


def flash_varlen(inputs: Inputs, call: Call) -> None:
    """(total, heads, dim) packed by int32 offsets; rows past the last offset are not passed: nobody promises them."""
    lengths = inputs.case.lengths
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None
    total_q, total_kv = int(inputs.cu_seqlens_q[-1]), int(inputs.cu_seqlens_kv[-1])
    call.tensors = (inputs.q[:total_q], inputs.k[:total_kv], inputs.v[:total_kv])
    call.give("offsets", inputs.cu_seqlens_q, "cu_seqlens_q")
    call.give("offsets", inputs.cu_seqlens_kv, "cu_seqlens_k", "cu_seqlens_kv")
    for place, names in ((0, ("max_seqlen_q",)), (1, ("max_seqlen_k", "max_seqlen_kv"))):
        if call.has(*names):
            call.give("a length", max((pair[place] for pair in lengths), default=0), *names)
    _flash_modifiers(inputs, call)


def flash_kvcache(inputs: Inputs, call: Call) -> None:
    """q (batch, rows, heads, dim) over a cache with lengths, dense or paged, new keys appended in place."""
    call.tensors = (inputs.q, inputs.k, inputs.v)
    call.give("the cache's lengths", inputs.kv_lens, "cache_seqlens")
    if inputs.page_table is not None:
        call.give("a paged cache", inputs.page_table, "block_table", "page_table")
    if inputs.k_new is not None:
        call.give("new keys", inputs.k_new, "k")
        call.give("new values", inputs.v_new, "v")
    if inputs.k_scale is not None:
        call.lacks("the convention has no 8-bit caches with a scale for each head")
    _flash_modifiers(inputs, call)


def _flash_modifiers(inputs: Inputs, call: Call) -> None:
    spec, _ = _spec(inputs)
    if len(spec) > 1 or not all(isinstance(term, Bounds) for term in spec):
        call.lacks(f"the convention has no such mask: {', '.join(modifiers_of(inputs))}")
    for term in spec:
        if not isinstance(term, Bounds):
            continue
        if term.align == "top-left" and not _is_square(inputs):
            call.lacks("the convention aligns masks bottom-right only")
        left, right = term.left, term.right
        if right == 0 and call.has(*CAUSAL_NAMES):
            call.give("causal", True, *CAUSAL_NAMES)
        if left is not None or right != 0 or not call.has(*CAUSAL_NAMES):
            ends = (-1 if left is None else left, -1 if right is None else right)
            call.give("a window", ends, "window_size")
    kinds = [type(score) for score in inputs.scores]
    if ALiBi in kinds and Softcap in kinds[kinds.index(ALiBi) :]:
        call.lacks("the convention applies softcap before ALiBi")
    for score in inputs.scores:
        if isinstance(score, Softcap):
            call.give("softcap", score.cap, "softcap")
        elif isinstance(score, ALiBi):
            call.give("ALiBi", score.slopes, "alibi_slopes")
        elif isinstance(score, Sink):
            call.give("sinks", score.logits, *SINK_NAMES)
        else:
            call.lacks(f"the convention has no {'bias' if isinstance(score, Bias) else 'score function'}")
    _common(inputs, call)


# ---- ours ------------------------------------------------------------------------------------------------------------


def attnworks(inputs: Inputs, call: Call) -> None:
    """``attention``, ``attention_varlen`` or ``attention_decode``: all by name; what is at its default only where it
    must be given."""
    case = inputs.case
    if (case.form == "dense") and not call.has("layout"):
        _dense(inputs, call, "bhsd")
        given = inputs.kwargs() | dict(zip("qkv", call.tensors, strict=True))
        del given["layout"]
        call.tensors = ()
    else:
        given = inputs.kwargs()
    plain = {"mask": None, "scores": (), "scale": None, "layout": "bhsd"}
    for name, value in given.items():
        if name not in plain or value != plain[name] or call.must(name):
            call.give(name.replace("_", " "), value, name)


# ---- torch.nn.attention.flex_attention -------------------------------------------------------------------------------


def flex(inputs: Inputs, call: Call) -> None:
    """(batch, heads, rows, dim); masks become a ``BlockMask``, scores a ``score_mod``."""
    from torch.nn.attention.flex_attention import create_block_mask  # slow to import, and only needed here

    case = inputs.case
    _dense(inputs, call, "bhsd")
    if case.heads_q != case.heads_kv and call.has("enable_gqa"):
        call.kwargs["enable_gqa"] = True
    spec, operands = _spec(inputs)
    if any(isinstance(score, Sink) for score in inputs.scores):
        call.lacks("the convention has no sinks")
    elif inputs.scores:
        call.give("score modifiers", _score_mod(inputs), "score_mod")
    if spec and 0 in (case.batch, case.heads_q, case.seq_q, case.seq_kv):
        call.lacks("a BlockMask cannot be made for a size of 0")
    elif spec:
        whole = any(not isinstance(term, Bounds) for term in spec)
        batch, heads = (case.batch, case.heads_q) if whole else (None, None)
        mask_mod = _mask_mod(spec, operands, case.seq_q, case.seq_kv)
        made = create_block_mask(mask_mod, batch, heads, case.seq_q, case.seq_kv, device=str(inputs.q.device))
        call.give("a mask", made, "block_mask")
    _common(inputs, call)


def _mask_mod(spec: MaskSpec, operands: tuple[Tensor, ...], seq_q: int, seq_kv: int) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sees = (q >= 0) & (k >= 0)
        for term in spec:
            if isinstance(term, Bounds):
                origin = q + (seq_kv - seq_q if term.align == "bottom-right" else 0)
                sees = sees if term.left is None else sees & (k >= origin - term.left)
                sees = sees if term.right is None else sees & (k <= origin + term.right)
            elif isinstance(term, DenseMask):
                sees = sees & _picked(operands[term.operand.index], b, h, q, k)
            else:
                sees = sees & _asked(term, operands, b, h, q, k)
        return sees

    return mask_mod


def _asked(term: Predicate, operands: tuple[Tensor, ...], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if term.expression is not None:
        return evaluate(term.expression, {"b": b, "h": h, "q": q, "k": k}, term.own(operands))
    assert term.function is not None
    return cast("Tensor", term.function(b, h, q, k))


def _score_mod(inputs: Inputs) -> Callable[..., Tensor]:
    shift = inputs.case.seq_kv - inputs.case.seq_q

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for score in inputs.scores:
            if isinstance(score, Softcap):
                s = score.cap * torch.tanh(s / score.cap)
            elif isinstance(score, ALiBi):
                slope = score.slopes[h] if score.slopes.dim() == 1 else score.slopes[b, h]
                s = s - slope * (q + shift - k).abs()
            elif isinstance(score, Bias):
                s = s + _picked(score.tensor, b, h, q, k)
            else:
                s = score(s, b, h, q, k)
        return s

    return score_mod


def _picked(tensor: Tensor, *index: Tensor) -> Tensor:
    """The element of a broadcast of (batch, heads, seq_q, seq_kv) at an index."""
    kept = index[4 - tensor.dim() :]
    return tensor[tuple(i if size > 1 else torch.zeros_like(i) for i, size in zip(kept, tensor.shape, strict=True))]


# ---- back from a kernel's result -------------------------------------------------------------------------------------


def ask_lse(call: Call, wanted: bool) -> None:
    """Ask for the LSE in the kernel's words, where it has some."""
    if wanted and call.has("return_aux"):
        from torch.nn.attention.flex_attention import AuxRequest

        call.kwargs["return_aux"] = AuxRequest(lse=True)
    elif call.has(*LSE_NAMES):
        call.kwargs[call.has(*LSE_NAMES)] = wanted


def read(result: Any, call: Call) -> tuple[Any, Any]:
    """(out, lse) of whatever the kernel returned, out in the case's layout; lse None where there is none."""
    out, lse = result, None
    if isinstance(result, tuple | list) and result:
        out = result[0]
        second = result[1] if len(result) > 1 else None
        lse = getattr(second, "lse", second)
    if call.transposed and isinstance(out, Tensor) and out.dim() == 4:
        out = out.transpose(1, 2)
    return out, lse if isinstance(lse, Tensor) and lse.is_floating_point() else None
