"""Probes that are asked where no other one fails: two features together, and lengths that few tiles have.

Kernels take a path of their own for a group of 3 in a cache, for a bias under causal, for keys of three half tiles. A
fault on one of these shows nowhere else, so that they need not be asked where a commoner probe fails.
"""

from __future__ import annotations

from typing import Any

import torch

from attnworks.masks import Causal, Window
from attnworks.scores import Softcap
from attnworks.workbench.cases import AlibiRule, BiasRule, BooleanRule, Case, SinkRule
from attnworks.workbench.diagnose.probes import Bench, Probe, named
from attnworks.workbench.subjects import Subject

MOST = 4  # failing ones that are compared with the known faults


def _lengths() -> tuple[Case, ...]:
    causal: dict[str, Any] = {"mask": (Causal(),), "gradients": True}
    return (
        named("96 keys", 40, 96),
        named("keys of whole small tiles", 33, 48),
        named("one tile more", 17, 257),
        named("one query", 1, 90, heads_q=4),
        named("one query, causal", 1, 90, heads_q=4, mask=(Causal(),)),
        named("one key", 5, 1),
        named("300 on 300, causal", 300, 300, mask=(Causal(),)),
        named("300 on 700", 300, 700),
        named("more queries than keys", 150, 40, gradients=True),
        named("three sequences, 3 heads", 40, 72, batch=3, heads_q=3, heads_kv=3, gradients=True),
        named("one KV head", 40, 72, batch=2, heads_q=4, heads_kv=1, **causal),
        named("10 heads on 2", 40, 72, heads_q=10, **causal),
        named("head_dim 96", 40, 72, head_dim=96, head_dim_v=96, gradients=True),
        named("head_dim 128, causal", 70, 72, head_dim=128, head_dim_v=128, **causal),
        named("head_dim 256", 40, 72, head_dim=256, head_dim_v=256, gradients=True),
        named("head_dim 16", 40, 72, head_dim=16, head_dim_v=16, gradients=True),
        named("swapped strides", 37, 75, batch=2, memory="swapped", heads_q=4, heads_kv=4),
    )


def _together() -> tuple[Case, ...]:
    """Two features in a call."""
    grads: dict[str, Any] = {"gradients": True}
    heads: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 4, **grads}
    bf16 = torch.bfloat16
    return (
        named("bias, causal", 50, 70, scores=(BiasRule("b1qk"),), mask=(Causal(),), **heads),
        named("bias, grouped", 50, 70, scores=(BiasRule("bhqk"),), **{**heads, "heads_kv": 2}),
        named("bias, scale 0.3", 50, 70, scores=(BiasRule("bhqk"),), scale=0.3, **heads),
        named("boolean mask, causal", 50, 70, mask=(BooleanRule(), Causal()), **grads),
        named("boolean mask, grouped", 33, 70, batch=2, heads_q=4, mask=(BooleanRule("bhqk"),), **grads),
        named("window, grouped", 90, 90, batch=2, heads_q=6, mask=(Window(20, 0),), **grads),
        named("window, more queries", 90, 40, mask=(Window(9, 4),), **grads),
        named("window, fewer queries", 40, 170, mask=(Window(30, 0),), **grads),
        named("sink, causal", 70, 70, scores=(SinkRule(),), mask=(Causal(),), **heads),
        named("sink, window", 70, 70, scores=(SinkRule(),), mask=(Window(20, 0),), **heads),
        named("sink, grouped", 50, 70, scores=(SinkRule(),), **{**heads, "heads_kv": 2}),
        named("softcap, scale 0.3", 50, 70, scores=(Softcap(2.0),), scale=0.3, **grads),
        named("softcap, window", 70, 70, scores=(Softcap(2.0),), mask=(Window(20, 0),), **grads),
        named("alibi, window", 70, 70, scores=(AlibiRule(),), mask=(Window(20, 0),), **heads),
        named("alibi, scale 0.3", 50, 70, scores=(AlibiRule(),), scale=0.3, **heads),
        named("causal, scale 0.3", 50, 70, mask=(Causal(),), scale=0.3, **grads),
        named("bf16, causal", 90, 90, dtype=bf16, mask=(Causal(),), **grads),
        named("bf16, grouped", 40, 72, dtype=bf16, heads_q=8, **grads),
        named("bf16, window", 90, 90, dtype=bf16, mask=(Window(20, 0),), **grads),
        named("bf16, bias", 50, 70, dtype=bf16, scores=(BiasRule("b1qk"),)),
        named("bf16, sink", 50, 70, dtype=bf16, scores=(SinkRule(),)),
    )


def _packed_and_cached() -> tuple[Case, ...]:
    few: dict[str, Any] = {"form": "varlen", "lengths": ((70, 70), (9, 9), (130, 130), (33, 33)), "heads_q": 4}
    decode: dict[str, Any] = {"form": "decode", "heads_q": 4, "lengths": ((1, 1), (1, 200), (1, 77))}
    several: dict[str, Any] = {**decode, "lengths": ((4, 9), (4, 150), (4, 77)), "mask": (Causal(),)}
    return (
        named("varlen, as many queries", 130, 130, **few, mask=(Causal(),), gradients=True),
        named("varlen, alike", 40, 40, **{**few, "lengths": ((40, 40),) * 3}, gradients=True),
        named("varlen, one sequence", 50, 70, **{**few, "lengths": ((50, 70),)}, mask=(Causal(),)),
        named("varlen, 6 heads on 2", 130, 130, **{**few, "heads_q": 6}),
        named("varlen, more queries", 90, 40, **{**few, "lengths": ((90, 40), (20, 7))}, mask=(Causal(),)),
        named("cache, 6 heads on 2", 1, 220, **{**decode, "heads_q": 6}),
        named("cache, one KV head", 1, 220, **decode, heads_kv=1),
        named("cache, several queries", 4, 170, **several),
        named("cache, several queries of 6 heads", 4, 170, **{**several, "heads_q": 6}),
        named("cache, long", 1, 900, **{**decode, "lengths": ((1, 900), (1, 20))}),
        named("cache, alike", 1, 128, **{**decode, "lengths": ((1, 128),) * 2}),
        named("cache, bf16", 1, 220, **decode, dtype=torch.bfloat16),
        named("cache, window of one query", 1, 220, **decode, mask=(Window(30, 0),)),
        named("pages, scale 0.3", 1, 220, **decode, scale=0.3, page_size=16),
        named("pages of 32, several queries", 4, 170, **several, page_size=32),
        named("append, 6 heads on 2", 4, 170, **{**several, "heads_q": 6}, new_keys=4),
        named("int8 cache, scale 0.3", 1, 77, **{**decode, "lengths": ((1, 40), (1, 77))}, scale=0.3,
              dtype=torch.bfloat16, cache_dtype=torch.int8),
        named("int8 cache, several queries", 4, 170, **several, dtype=torch.bfloat16, cache_dtype=torch.int8),
    )  # fmt: skip


def second_look(subject: Subject, seed: int) -> list[Probe]:
    """The first of these probes that a subject fails on."""
    found: list[Probe] = []
    for case in (*_lengths(), *_together(), *_packed_and_cached()):
        probe = Probe(case.with_seed(seed))
        if Bench(probe).observe(subject, properties=False, wrong_ones=False).failed:
            found.append(probe)
        if len(found) == MOST:
            break
    return found
