"""Small cases for Triton's interpreter, which takes milliseconds for each operation on each tile: every path of the
kernels with as few tiles as show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnworks.backends import triton
from attnworks.masks import Causal, Window
from attnworks.plan import Plan
from attnworks.scores import Softcap
from attnworks.workbench.cases import AddRule, AlibiRule, BiasRule, BooleanRule, Case, PredicateRule, SinkRule
from attnworks.workbench.subjects import BackendSubject

BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = (Causal(),)


def _tiles_of_16(plan: Plan) -> Plan:
    if plan.schedule == "split_kv":
        return replace(plan, tile_q=16, tile_kv=16, split_kv=32)
    return replace(plan, schedule="q_outer", tile_q=16, tile_kv=16)


def _wide_tiles(plan: Plan) -> Plan | None:
    return replace(plan, tile_q=16, tile_kv=32) if plan.schedule == "q_outer" else None


def _splits(plan: Plan) -> Plan | None:
    return None if plan.schedule == "split_kv" else Plan("triton", "split_kv", 32, 16, 16, warps=4, stages=1)


def _grouped(plan: Plan) -> Plan:
    return Plan("triton", "grouped", 16, 16, warps=4, stages=1)


def _described(plan: Plan) -> Plan:
    return Plan("triton", "q_outer", 16, 16, isa="tma", warps=4, stages=2)


PREFERRED = BackendSubject("triton", triton)
SMALL = BackendSubject("triton, tiles of 16", triton, _tiles_of_16)
GROUPED = BackendSubject("triton, grouped", triton, _grouped)
WIDE = BackendSubject("triton, 16 x 32", triton, _wide_tiles)
DESCRIBED = BackendSubject("triton, tensor descriptors", triton, _described)
SPLITS = BackendSubject("triton, splits of 16", triton, _splits)


def dense(name: str, **fields: Any) -> Case:
    shape: dict[str, Any] = {"heads_kv": 1, "seq_q": 17, "seq_kv": 34, "head_dim": 16, "head_dim_v": 24}
    return Case(name, "the interpreter", **shape | {"gradients": True} | fields)


def two_tiles(name: str, **fields: Any) -> Case:
    """Of keys, the second a tail: for what a third would do no otherwise."""
    return dense(name, **{"seq_kv": 18} | fields)


def varlen(name: str, **fields: Any) -> Case:
    lengths = ((0, 7), (3, 20), (5, 0), (17, 3))
    return dense(name, form="varlen", **{"lengths": lengths, "spare": 6} | fields)


def decode(name: str, **fields: Any) -> Case:
    shape: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "seq_q": 1, "seq_kv": 70, "head_dim_v": 16}
    return dense(name, form="decode", **shape | {"lengths": ((1, 1), (1, 66), (1, 0)), "gradients": False} | fields)


MASKS = (
    dense("no mask", seq_kv=50),
    dense("causal", mask=CAUSAL, seq_q=33, seq_kv=50),
    dense("top-left", mask=(Causal("top-left"),)),
    dense("rows without keys", mask=CAUSAL, seq_q=34, seq_kv=17, lse_cotangent=True),
    dense("window", mask=(Window(7, 5),), seq_q=50, seq_kv=50),
    dense("window of whole tiles", mask=(Window(40, 5),), seq_q=50, seq_kv=50, heads_q=1),
    dense("window to the left", mask=(Window(3, 0),)),
    dense("window without a left end", mask=(Window(None, 2),)),
    dense("two alignments", mask=(Causal("top-left"), Window(20, 30))),
    dense("two alignments, nothing to the left", mask=(Window(0, None, "top-left"), Window(0, None))),
    dense("boolean mask", batch=2, mask=(BooleanRule("bhqk", empty_row=True),)),
    dense("boolean mask of few keys and causal", mask=(Causal(), BooleanRule("11qk", keep=0.05))),
    dense("boolean mask of a batch's keys", batch=2, mask=(BooleanRule("b11k"),), seq_q=5),
    dense("predicate", mask=(PredicateRule(lambda b, h, q, k: (k // 16 == q // 16) | ((k < 5) & (h == 1))),)),
)
SCORES = (
    two_tiles("softcap", scores=(Softcap(2.0),), mask=CAUSAL),
    two_tiles("alibi", batch=2, scores=(AlibiRule(True),), mask=CAUSAL, seq_q=5),
    two_tiles("bias bhqk", batch=2, scores=(BiasRule("bhqk"),)),
    *(two_tiles(f"bias {form}", batch=2, scores=(BiasRule(form),), seq_q=3) for form in ("b1qk", "qk", "1")),
    two_tiles("bias 1h1k", batch=2, scores=(BiasRule("1h1k"),), seq_q=33),  # sums over two tiles of queries
    two_tiles("bias 1hq1", scores=(BiasRule("1hq1"),), seq_q=3),  # and over two of keys
    two_tiles("bias that hides", scores=(BiasRule("bhqk", hide=True),)),
    two_tiles("bias then softcap", scores=(BiasRule("1hqk"), Softcap(2.0))),
    two_tiles("softcap then bias, window", scores=(Softcap(2.0), BiasRule("1hqk")), mask=(Window(9, 0),)),
    two_tiles("sink", scores=(SinkRule(),), mask=CAUSAL, seq_q=34, seq_kv=17, lse_cotangent=True),
    two_tiles("sink 100", scores=(SinkRule(100.0),)),
    two_tiles("sink -100", scores=(SinkRule(-100.0),)),
    two_tiles("sink and no keys", scores=(SinkRule(0.5),), seq_kv=0),
    two_tiles("score function", scores=(AddRule(lambda s, b, h, q, k: s + 0.03 * (k - q) + 0.1 * h),)),
    two_tiles("scale -0.7", scale=-0.7, lse_cotangent=True),
)
NUMBERS = (
    *(two_tiles(f"causal, {str(dtype).removeprefix('torch.')}", mask=CAUSAL, dtype=dtype) for dtype in (BF16, FP16)),
    two_tiles("softcap, sink, bf16", scores=(Softcap(20.0), SinkRule()), dtype=BF16),
    dense("rising maximum", generator="rising maximum"),
    dense("rising maximum, fp16", generator="rising maximum", dtype=FP16, gradients=False),
    dense(
        "strongly negative, rows that see nothing at first",
        generator="strongly negative",
        mask=(Window(3, 0),),
        gradients=False,
    ),
    *(two_tiles(name, generator=name) for name in ("large scores", "strongly negative", "one hot rows")),
    *(two_tiles(name, generator=name, gradients=False) for name in ("nan key", "nan value", "minus infinity")),
)
SIZES = (
    *(dense(f"size {n}", seq_q=n, seq_kv=n, mask=CAUSAL) for n in (1, 15, 16, 17)),
    *(dense(f"empty {name}", **{name: 0}) for name in ("batch", "seq_q", "seq_kv")),
    dense("empty heads", heads_q=0, heads_kv=0),
    dense("head dim 1", head_dim=1, head_dim_v=3, seq_q=17, seq_kv=17),
    dense("head dim 520", head_dim=520, seq_q=3, seq_kv=18, gradients=False),
    dense("heads 6/2", heads_q=6, heads_kv=2, seq_q=17, seq_kv=20),
    *(
        dense(f"{memory}, {layout}", batch=2, seq_q=3, seq_kv=20, head_dim_v=16, memory=memory, layout=layout)
        for memory, layout in (
            ("gapped", "bhsd"),
            ("gapped", "bshd"),
            ("swapped", "bshd"),
            ("strided channels", "bhsd"),
            ("shared heads", "bshd"),
        )
    ),
)
PACKED = (
    varlen("varlen"),
    varlen("varlen, causal", mask=CAUSAL, lse_cotangent=True),
    varlen("varlen, window, gapped", mask=(Window(9, 3),), memory="gapped"),
    varlen("varlen, softcap, sink, bf16", scores=(Softcap(20.0), SinkRule()), mask=CAUSAL, dtype=BF16),
    varlen("varlen, alibi, bias", scores=(AlibiRule(), BiasRule("b1qk"))),
    varlen("varlen, boolean mask", mask=(BooleanRule("bhqk"),)),
    varlen("varlen, predicate", mask=(PredicateRule(lambda b, h, q, k: k <= q + b),)),
)
SHORT: dict[str, Any] = {"lengths": ((1, 35), (1, 1), (1, 0)), "seq_kv": 40}  # two splits, the second with a tail
FOUR: dict[str, Any] = {"seq_q": 4, "lengths": ((4, 4), (4, 66), (4, 2))}
CACHES = (
    decode("decode"),
    decode("decode, window", mask=(Window(19, 0),), gradients=True),
    decode("decode, 4 queries, causal", mask=CAUSAL, gradients=True, **FOUR),
    decode("decode, softcap, sink", scores=(Softcap(3.0), SinkRule()), mask=CAUSAL),
    decode("decode, boolean mask", mask=(BooleanRule("b11k"),)),
    decode("decode, 576/512", heads_kv=1, head_dim=576, head_dim_v=512, page_size=16, lengths=((1, 3), (1, 40))),
    decode("decode, strided", memory="gapped"),
    decode("decode, rising maximum", generator="rising maximum"),
    *(decode(f"decode, pages of {size}", page_size=size) for size in (16, 17)),
    *(decode(f"decode, pages of {size}", page_size=size, **SHORT) for size in (1, 32)),
    decode("decode, pages, the longest first", page_size=16, lengths=((1, 66), (1, 40)), gradients=True),
    decode("decode, halves, 4 queries", page_size=16, memory="halves", mask=CAUSAL, **FOUR),
    decode("decode, append", page_size=16, seq_q=2, lengths=((2, 2), (2, 66)), new_keys=2, mask=CAUSAL),
    decode("decode, bf16", dtype=BF16, page_size=16, **SHORT),
    decode(
        "decode, int8", dtype=FP16, cache_dtype=torch.int8, page_size=16, **SHORT
    ),  # the interpreter has no int8 → bf16
    decode("decode, fp8 e4m3", dtype=BF16, cache_dtype=torch.float8_e4m3fn, page_size=16, **SHORT),
    decode("decode, fp8 e5m2", dtype=BF16, cache_dtype=torch.float8_e5m2, page_size=17, **SHORT),
)
FEW: dict[str, Any] = {"seq_q": 3, "seq_kv": 18}
PACKED_HEADS = (
    dense("heads 6/2, causal", heads_q=6, heads_kv=2, seq_q=17, seq_kv=50, mask=CAUSAL, gradients=False),
    varlen("varlen, heads 6/2", heads_q=6, heads_kv=2, mask=CAUSAL, memory="gapped", gradients=False),
)
MUTANTS = (  # what mutants are tried on: two tiles
    dense("one tile and a tail", **FEW),
    dense("softcap, few", scores=(Softcap(2.0),), **FEW),
    dense("scale -0.7, few", scale=-0.7, lse_cotangent=True, heads_q=1, **FEW),
    dense("heads 6/2, few", heads_q=6, **FEW | {"heads_kv": 2}),
    dense("heads 6/2, few, fp16", heads_q=6, mask=CAUSAL, dtype=FP16, **FEW | {"heads_kv": 2}),
    dense("rising maximum, few", generator="rising maximum", gradients=False, **FEW),
)
CASES = (*MASKS, *SCORES, *NUMBERS, *SIZES, *PACKED, *CACHES)
BY_NAME = {case.name: case for case in (*CASES, *PACKED_HEADS, *MUTANTS)}

# (subject, case): tiles of 16 run everything, the others what they do otherwise.
PAIRS = (
    *((SMALL, case) for case in CASES),
    *((PREFERRED, BY_NAME[name]) for name in ("no mask", "boolean mask", "decode")),
    *((WIDE, BY_NAME[name]) for name in ("window", "two alignments", "boolean mask")),
    *((GROUPED, replace(BY_NAME[name], gradients=False))
      for name in ("heads 6/2, causal", "window", "two alignments, nothing to the left", "predicate", "alibi",
                   "varlen, heads 6/2", "varlen, softcap, sink, bf16", "decode, 4 queries, causal")),
    *((DESCRIBED, replace(BY_NAME[name], dtype=FP16))
      for name in ("no mask", "window", "boolean mask", "heads 6/2", "softcap", "swapped, bshd", "size 1", "size 17")),
    *((SPLITS, replace(BY_NAME[name], gradients=False))
      for name in ("no mask", "causal", "rows without keys", "window", "boolean mask", "sink", "sink 100")),
)  # fmt: skip
# Of properties, each of which calls several times: one small case of each form.
TRIED = (
    dense("properties, dense", mask=CAUSAL, seq_q=5, seq_kv=18, heads_q=1, memory="gapped"),
    varlen("properties, varlen", mask=CAUSAL, heads_q=1, lengths=((3, 18), (0, 2), (5, 3)), spare=2),
    decode("properties, pages", heads_q=2, heads_kv=1, seq_kv=40, page_size=17, lengths=((1, 3), (1, 36))),
)
