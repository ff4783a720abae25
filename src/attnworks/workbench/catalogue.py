"""The named cases, shared by verification, tests and benchmarks.

``CASES`` is the whole list; ``QUICK`` the names of the ones a quick run takes. ``select`` picks by pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from attnworks.masks import Causal, Window
from attnworks.scores import Softcap
from attnworks.workbench.cases import AddRule, AlibiRule, BiasRule, BooleanRule, Case, PredicateRule, SinkRule
from attnworks.workbench.hand import HAND
from attnworks.workbench.shapes import SHAPES

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
_SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP64: "fp64"}
CAUSAL = (Causal(),)


def _in_dtypes(case: Case, dtypes: Sequence[torch.dtype] = (FP32, BF16, FP16)) -> list[Case]:
    return [replace(case, name=f"{case.name}, {_SHORT[dtype]}", dtype=dtype) for dtype in dtypes]


def _square(n: int, **fields: Any) -> dict[str, Any]:
    return {"seq_q": n, "seq_kv": n, **fields}


def _dims(d: int, dv: int = 0) -> dict[str, Any]:
    return {"head_dim": d, "head_dim_v": dv or d}


# ---- stress inputs ---------------------------------------------------------------------------------------------------

_STRESS = {
    "normal": "what everybody tests",
    "large scores": "the maximum must be subtracted",
    "one hot rows": "rescaling factors near 0",
    "constant rows": "rows of one number",
    "identical queries": "rows must come out alike",
    "similar query": "one query similar to every key",
    "rising maximum": "the accumulator and the sum are rescaled in every tile",
    "falling maximum": "later tiles add almost nothing",
    "common offset": "an offset that softmax does not see",
    "outlier channels": "a few large channels",
    "strongly negative": "scores below any stand-in for -inf, keys off the tile",
    "tiny": "subnormal values",
}


def _stress_cases() -> list[Case]:
    found = []
    for generator, why in _STRESS.items():
        base = Case(f"stress: {generator}", why, seq_q=70, seq_kv=333, generator=generator, gradients=True)
        found += _in_dtypes(base)
        found += _in_dtypes(replace(base, name=f"{base.name}, causal", mask=CAUSAL, seq_q=101, seq_kv=101), (FP32,))
    small = {**_square(37), "gradients": False}
    for generator in ("nan query", "nan key", "nan value", "minus infinity"):
        found += _in_dtypes(Case(f"stress: {generator}", "what is not finite stays so", generator=generator, **small))
    long = Case("stress: few queries on 16k keys", "many tiles, sums of many terms", seq_q=3, seq_kv=16_411)
    found += _in_dtypes(long)
    gqa = replace(long, name="stress: few grouped queries on 16k keys", heads_q=4, heads_kv=1, seq_q=1, mask=CAUSAL)
    found += _in_dtypes(gqa)
    found += _in_dtypes(
        replace(long, name="stress: rising maximum on 16k keys", generator="rising maximum"), (FP32, BF16)
    )
    one = Case("stress: one key of score -1e4", "gives V and the true LSE", **_square(1), generator="strongly negative")
    return found + _in_dtypes(replace(one, gradients=True))


# ---- sizes, masks, layouts -------------------------------------------------------------------------------------------


def _size_cases() -> list[Case]:
    found = []
    fields: dict[str, Any]
    for n in (1, 2, 7, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 191, 193, 256, 511, 513):
        found.append(Case(f"size: {n}", "tile edges", **_square(n), gradients=n <= 256))
        found.append(Case(f"size: {n}, causal, bf16", "tile edges", **_square(n), mask=CAUSAL, dtype=BF16))
    found.append(Case("size: 64 on 90", "whole tiles of queries, a part of one of keys", seq_q=64, seq_kv=90))
    for d in (1, 2, 3, 8, 16, 17, 31, 32, 40, 48, 65, 72, 80, 96, 100, 127, 128, 129, 160, 192, 200, 255, 256):
        fields = {**_square(50), **_dims(d), "mask": CAUSAL}
        found.append(Case(f"head dim: {d}", "padding on chip", **fields, gradients=d < 129))
        found.append(Case(f"head dim: {d}, bf16", "padding on chip", **fields, dtype=BF16))
    for d, dv in ((192, 128), (128, 192), (64, 40), (40, 64), (1, 256), (256, 1), (576, 512), (512, 512)):
        fields = {"heads_q": 4, "seq_q": 33, "seq_kv": 65, **_dims(d, dv), "mask": CAUSAL}
        found += _in_dtypes(Case(f"unequal dims: {d}/{dv}", "V's extent is its own", **fields, gradients=d < 256))
    for hq, hkv in ((8, 2), (6, 3), (5, 1), (4, 4), (9, 3)):
        fields = {"batch": 2, "heads_q": hq, "heads_kv": hkv, "seq_q": 40, "seq_kv": 72}
        found.append(Case(f"heads: {hq}/{hkv}", "which KV head a query head reads", **fields, gradients=True))
    found += _in_dtypes(Case("heads: 6/2 causal", "grouped heads",
                             heads_q=6, **_square(80), mask=CAUSAL, gradients=True))  # fmt: skip
    for empty in ("batch", "heads_q", "seq_q", "seq_kv"):
        fields = {"batch": 2, "seq_q": 5, "seq_kv": 6, "gradients": True, empty: 0}
        if empty == "heads_q":
            fields["heads_kv"] = 0
        found.append(Case(f"empty: {empty}", "size 0", **fields))
    found += _in_dtypes(Case("double precision", "fp64 inputs", batch=2, seq_q=50, seq_kv=60, gradients=True), (FP64,))
    fields = {"batch": 2, "heads_q": 33_000, "heads_kv": 33_000, "seq_q": 1, "seq_kv": 2}
    many = Case("many heads: 66000", "batch·heads beyond 65,535", **fields, **_dims(4))
    return [*found, many]


def _mask_cases() -> list[Case]:
    found = []
    for seq_q, seq_kv in ((64, 64), (3, 128), (1, 8), (100, 40), (40, 100), (130, 130)):
        for align in ("bottom-right", "top-left"):
            fields: dict[str, Any] = {"seq_q": seq_q, "seq_kv": seq_kv, "mask": (Causal(align),), "gradients": True}
            found.append(Case(f"causal {align}: {seq_q} on {seq_kv}", "mask origin where Nq is not Nk", **fields))
    found += _in_dtypes(Case("rows without keys", "more queries than keys, causal",
                             seq_q=150, seq_kv=70, mask=CAUSAL, gradients=True, lse_cotangent=True))  # fmt: skip
    windows = ((0, 0), (0, 5), (3, 0), (7, 5), (None, 2), (15, None), (64, 0), (400, 400))
    for left, right in windows:
        for seq_q, seq_kv in ((100, 100), (70, 130), (130, 70)):
            fields = {"seq_q": seq_q, "seq_kv": seq_kv, "mask": (Window(left, right),), "gradients": True}
            found.append(Case(f"window {left}, {right}: {seq_q} on {seq_kv}", "inclusive ends", **fields))
    found += [
        Case(f"window of 16 on {n}", "N = W, W + 1, W + 2", **_square(n), mask=(Window(15, 0),)) for n in (16, 17, 18)
    ]
    found += _in_dtypes(
        Case("window 31, 0 on 700", "whole tiles skipped on both sides", **_square(700), mask=(Window(31, 0),))
    )
    found.append(
        Case("window top-left", "mask origin", seq_q=90, seq_kv=50, mask=(Window(9, 4, "top-left"),), gradients=True)
    )
    both = (Causal(), Window(20, None))
    found.append(Case("causal and window", "bounds intersected", **_square(90), mask=both, gradients=True))
    both = (Causal("top-left"), Window(20, 30))
    found.append(Case("two alignments", "bounds of both origins", seq_q=60, seq_kv=90, mask=both, gradients=True))
    for form in ("bhqk", "1hqk", "b1qk", "11qk", "b11k", "qk", "1"):
        fields = {"batch": 2, "seq_q": 33, "seq_kv": 70, "mask": (BooleanRule(form, empty_row=form[-2:] == "qk"),)}
        found.append(Case(f"boolean mask {form}", "every broadcast", **fields, gradients=True))
    found.append(
        Case(
            "boolean mask and causal", "intersection", **_square(70), mask=(Causal(), BooleanRule("qk")), gradients=True
        )
    )
    prefix = PredicateRule(lambda b, h, q, k: (k <= q) | (k < 5))
    return [*found, Case("predicate: prefix", "a function of indices", **_square(20), mask=(prefix,), gradients=True)]


def _score_cases() -> list[Case]:
    fields: dict[str, Any] = {"batch": 2, "heads_q": 4, "seq_q": 50, "seq_kv": 90, "gradients": True}
    found = _in_dtypes(Case("softcap 50", "cap·tanh(s/cap)", **fields, scores=(Softcap(50.0),), mask=CAUSAL))
    found.append(Case("softcap 2", "its slope in dS", **fields, scores=(Softcap(2.0),)))
    found.append(Case("softcap 2, causal", "mask after cap", **fields, scores=(Softcap(2.0),), mask=CAUSAL))
    found.append(
        Case(
            "softcap 20 of large scores",
            "tanh must not overflow",
            **fields,
            generator="large scores",
            scores=(Softcap(20.0),),
        )
    )
    found.append(Case("alibi", "sign, slope, origin", **fields, scores=(AlibiRule(),), mask=CAUSAL))
    found.append(Case("alibi, not causal", "distance on both sides", **fields, scores=(AlibiRule(True),)))
    top_left = (Causal("top-left"),)
    found.append(Case("alibi, top-left mask", "its own origin", **fields, scores=(AlibiRule(),), mask=top_left))
    for form in ("bhqk", "1hqk", "b1qk", "11qk", "b11k", "1h1k", "qk", "1"):
        found.append(Case(f"bias {form}", "every broadcast", **fields, scores=(BiasRule(form),)))
    square: dict[str, Any] = {**fields, "seq_q": 90, "mask": CAUSAL}
    found.append(Case("bias b1qk, causal", "tiles that are skipped", **square, scores=(BiasRule("b1qk"),)))
    found.append(Case("bias that hides", "-inf hides", **fields, scores=(BiasRule("bhqk", hide=True),)))
    found.append(Case("bias then softcap", "left to right", **fields, scores=(BiasRule("1hqk"), Softcap(2.0))))
    found.append(Case("softcap then bias", "left to right", **fields, scores=(Softcap(2.0), BiasRule("1hqk"))))
    found += _in_dtypes(Case("sink", "denominator and LSE", **fields, scores=(SinkRule(),), mask=CAUSAL))
    for value in (100.0, -100.0, 30000.0):
        found.append(Case(f"sink {value:g}", "extreme sinks", **fields, scores=(SinkRule(value),), lse_cotangent=True))
    alone = {**fields, "seq_q": 20, "seq_kv": 6}
    found.append(Case("sink and rows without keys", "LSE is the sink", **alone, scores=(SinkRule(0.5),), mask=CAUSAL))
    nothing = {**fields, "seq_kv": 0}
    found.append(Case("sink and no keys", "LSE is the sink", **nothing, scores=(SinkRule(0.5),)))
    relative = AddRule(lambda s, b, h, q, k: s + 0.03 * (k - q) + 0.1 * h)
    found.append(Case("score function", "a function of the score and indices", **fields, scores=(relative,)))
    return [*found, Case("scale -0.7", "any finite scale", **fields, scale=-0.7, lse_cotangent=True)]


def _memory_cases() -> list[Case]:
    found = []
    for layout in ("bhsd", "bshd"):
        for memory in ("contiguous", "gapped", "swapped", "strided channels", "shared heads"):
            fields: dict[str, Any] = {
                "batch": 2,
                "heads_q": 4,
                "seq_q": 37,
                "seq_kv": 75,
                "layout": layout,
                **_dims(48),
            }
            name = f"strides: {memory}, {layout}"
            case = Case(name, "NaN between the rows", memory=memory, gradients=True, **fields)
            found += [case, replace(case, name=f"{case.name}, causal, bf16", dtype=BF16, mask=CAUSAL)]
    return found


# ---- packed sequences and caches -------------------------------------------------------------------------------------


def _varlen_cases() -> list[Case]:
    lists = {
        "ragged": ((5, 5), (64, 64), (1, 1), (97, 97)),
        "unequal": ((5, 50), (64, 10), (1, 130), (97, 97)),
        "with empty": ((0, 7), (20, 30), (5, 0), (0, 0), (33, 17), (0, 4)),
        "of one query": ((1, 40), (0, 3), (1, 9)),
        "one sequence": ((45, 45),),
        "of nothing": ((0, 0),),
    }
    found = []
    for name, lengths in lists.items():
        base = Case(
            f"varlen {name}", "sequences apart", form="varlen", heads_q=4, lengths=lengths, spare=6, gradients=True
        )
        found += [base, *_in_dtypes(replace(base, name=f"{base.name}, causal", mask=CAUSAL))]
    odd = replace(
        found[0], name="varlen, strided, window, 80/72", memory="gapped", mask=(Window(9, 3),), **_dims(80, 72)
    )
    scored = replace(found[0], name="varlen, softcap, sink", scores=(Softcap(20.0), SinkRule()), mask=CAUSAL)
    # Lengths that differ: where they are equal any origin of the distance will do.
    alibi = replace(found[0], name="varlen alibi", scores=(AlibiRule(),), lengths=lists["unequal"])
    return [*found, odd, scored, alibi]


def _decode_cases() -> list[Case]:
    found = []
    lengths = ((1, 1), (1, 300), (1, 77), (1, 0))
    base = Case("decode", "a cache with lengths", form="decode", heads_q=4, seq_q=1, seq_kv=320, lengths=lengths)
    dense: dict[str, dict[str, Any]] = {
        "": {},
        ", grouped": {"heads_q": 8},
        ", one kv head": {"heads_q": 5, "heads_kv": 1},
        ", strided": {"memory": "gapped"},
        ", window": {"mask": (Window(31, 0),)},
        ", 4 queries": {"seq_q": 4, "lengths": ((4, 4), (4, 300), (4, 2), (4, 77))},
        ", 4 queries, causal": {"seq_q": 4, "lengths": ((4, 4), (4, 300), (4, 2), (4, 77)), "mask": CAUSAL},
        ", odd dims": _dims(80, 72),
        ", append": {"seq_q": 2, "lengths": ((2, 2), (2, 300)), "new_keys": 2, "mask": CAUSAL},
    }
    for page_size in (0, 1, 16, 17, 256):
        for name, fields in dense.items():
            if page_size and name in (", strided", ", odd dims") and page_size != 16:
                continue
            kind = f", pages of {page_size}" if page_size else ""
            case = replace(base, name=f"decode{name}{kind}", page_size=page_size, **fields)
            if page_size and case.memory == "gapped":
                case = replace(case, memory="halves")
            found += _in_dtypes(case) if page_size in (0, 16) else [case]
    full: dict[str, Any] = {"page_size": 16, "lengths": ((1, 48), (1, 64), (1, 16))}
    found.append(replace(base, name="decode, full pages of 16", stresses="lengths that fill their last page", **full))
    long = replace(
        base, name="decode, 16k keys", heads_q=4, heads_kv=1, seq_kv=16_400, lengths=((1, 16_391), (1, 9_000))
    )
    found += _in_dtypes(long)
    mla = replace(long, name="decode, MLA 576/512", heads_q=16, **_dims(576, 512), scale=192**-0.5, memory="latent")
    found += _in_dtypes(replace(mla, seq_kv=600, lengths=((1, 513), (1, 600))))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        found += _quantised_cases(replace(base, dtype=BF16, cache_dtype=dtype), str(dtype).removeprefix("torch."))
    capped = replace(base, name="decode, softcap, sink", scores=(Softcap(30.0), SinkRule()), mask=CAUSAL)
    return [*found, capped, replace(base, name="decode, gradients", gradients=True, page_size=16)]


def _quantised_cases(base: Case, kind: str) -> list[Case]:
    """Caches of 8-bit numbers with a scale for each head of K and one for V."""
    base = replace(base, name=f"decode, {kind} cache", stresses="8-bit numbers and their scales")
    queries: dict[str, Any] = {"seq_q": 4, "lengths": ((4, 4), (4, 300), (4, 2), (4, 77)), "mask": CAUSAL}
    found = [
        replace(base, page_size=16),
        replace(base, name=f"{base.name}, 4 grouped queries, causal", heads_q=8, dtype=FP16, **queries),
        replace(base, name=f"{base.name}, outlier channels", generator="outlier channels", dtype=FP32, page_size=17),
    ]
    if base.cache_dtype is not None and base.cache_dtype.is_floating_point:
        # What a matrix unit that multiplies 8-bit numbers by 8-bit numbers needs.
        found.append(replace(base, name=f"{base.name}, P in {kind}", page_size=16, probs_dtype=base.cache_dtype))
    return found


def _model_cases() -> list[Case]:
    found = []
    for shape in SHAPES:
        # Whisper's and SDXL's odd key lengths stay, with fewer heads; many query heads on one KV head get short ones.
        cross, many = shape.name.endswith("cross"), shape.heads_q // shape.heads_kv > 16
        longest = 1500 if cross else 130 if many else 1000 if shape.decode else 300
        for dtype in (FP32, BF16):
            case = shape.case(dtype, longest=longest, most_heads=2 if cross else 8, gradients=dtype == FP32)
            found.append(case)
    return found


CASES: tuple[Case, ...] = (
    *(hand.case for hand in HAND),
    *_stress_cases(),
    *_size_cases(),
    *_mask_cases(),
    *_score_cases(),
    *_memory_cases(),
    *_varlen_cases(),
    *_decode_cases(),
    *_model_cases(),
)

BY_NAME = {case.name: case for case in CASES}

# One or two of every kind: tail tiles, grouped heads, causal with unequal lengths, 16k keys, every form, every stress.
_QUICK_PATTERNS = (
    "hand: *",
    "stress: *, fp32",
    "stress: few queries on 16k keys, *",
    "stress: rising maximum, *",
    "stress: large scores, bf16",
    "size: [17]",
    "size: 97*",
    "size: 256*",  # all tiles whole, whatever their size: often a path of its own
    "size: 513*",
    "size: 64 on 90",
    "head dim: 1",
    "head dim: 80*",
    "unequal dims: 192/128, *",
    "unequal dims: 40/64, fp32",  # V is the wider one
    "heads: 6/*",
    "heads: 8/2",
    "empty: *",
    "causal *: 40 on 100",
    "causal *: 100 on 40",
    "rows without keys*",
    "window 7, 5: *",
    "window 0, 5: 100 on 100",  # a size of 0 is none that was not given
    "window None, 2: 100 on 100",  # nor is one that was not given a number
    "window 15, None: 100 on 100",
    "window 400, 400: 130 on 70",  # a right size beyond the keys, which it may not be held to
    "causal and window",
    "boolean mask bhqk",
    "boolean mask b1qk",
    "softcap*",
    "alibi*",
    "bias b1qk*",
    "bias that hides",
    "scale -0.7",
    "bias then softcap",
    "sink*",
    "strides: gapped, *",
    "varlen with empty*",
    "varlen unequal, causal, *",
    "varlen, strided, window, *",
    "decode, grouped, *",
    "decode, 4 queries, causal, pages of 16, *",
    "decode, 4 queries, causal, pages of 17",
    "decode, strided, pages of 16, fp32",
    "decode, full pages of 16",
    "decode, append, fp32",
    "decode, append, pages of 16, fp32",
    "decode, 16k keys, bf16",
    "decode, MLA 576/512, fp32",
    "decode, int8 cache",
    "decode, float8_e4m3fn cache, P *",
    "model: Llama-3-8B, bfloat16",
    "model: ViT*",
    "model: Gemma-2-27B*",
)


def select(patterns: Iterable[str] = (), *, quick: bool = False, seed: int = 0) -> tuple[Case, ...]:
    """Cases whose name matches one of the glob patterns, or holds one as a part, or that carry one as a tag (form,
    dtype, generator, memory); all of them without patterns. Raises ``ValueError`` for a pattern that matches
    nothing."""
    chosen = CASES if not quick else tuple(c for c in CASES if any(fnmatchcase(c.name, p) for p in _QUICK_PATTERNS))
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(_matches(case, pattern) for case in chosen):
            raise ValueError(f"case: {pattern!r} matched none of the {len(chosen)} cases, must match at least one")
    kept = (case for case in chosen if not patterns or any(_matches(case, pattern) for pattern in patterns))
    return tuple(case.with_seed(seed) for case in kept)


def _matches(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, pattern) or pattern in case.name or pattern in case.tags
