"""Attention shapes of real models, as data with their source.

Lengths are what the model is used at; ``Shape.case`` takes shorter ones for verification on a CPU, and scales windows
with them. Sources are the models' own configuration files (published with the weights) or papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnworks import masks, scores
from attnworks.masks import Causal, Window
from attnworks.problem import Problem
from attnworks.scores import Softcap
from attnworks.workbench.cases import AlibiRule, BiasRule, Case, MaskRule, ScoreRule, SinkRule


@dataclass(frozen=True)
class Shape:
    """Heads, dims, lengths, mask and scores of one kind of attention layer. ``decode``: one query on a cache."""

    name: str
    source: str
    heads_q: int
    heads_kv: int
    head_dim: int
    seq_q: int
    seq_kv: int
    head_dim_v: int = 0  # 0: as head_dim
    mask: tuple[MaskRule, ...] = ()
    scores: tuple[ScoreRule, ...] = ()
    scale: float | None = None
    decode: bool = False

    def case(self, dtype: torch.dtype, *, longest: int = 0, most_heads: int = 0, gradients: bool = False) -> Case:
        """The shape as a case. ``longest`` > 0 divides lengths and windows so that the longer side is at most that long
        ``most_heads`` > 0 divides the heads and
        keeps their ratio."""
        shrink = max(1, -(-max(self.seq_q, self.seq_kv) // longest)) if longest else 1
        seq_q, seq_kv = (max(1, n // shrink) for n in (self.seq_q, self.seq_kv))
        group = self.heads_q // self.heads_kv
        heads_kv = max(1, min(self.heads_kv, most_heads // group)) if most_heads else self.heads_kv
        mask = tuple(
            Window(rule.left if rule.left is None else max(1, rule.left // shrink), rule.right, rule.align)
            if isinstance(rule, Window)
            else rule
            for rule in self.mask
        )
        return Case(
            name=f"model: {self.name}, {str(dtype).removeprefix('torch.')}",
            stresses="a real model's shape",
            form="decode" if self.decode else "dense",
            batch=2 if self.decode else 1,
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_kv=seq_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            dtype=dtype,
            mask=mask,
            scores=self.scores,
            scale=self.scale,
            memory="latent" if self.decode and self.head_dim_v else "contiguous",
            lengths=((seq_q, seq_kv), (seq_q, max(1, seq_kv - seq_kv // 3))) if self.decode else (),
            gradients=gradients and not self.decode,
            source=self.source,
        )

    def problem(self, dtype: torch.dtype, *, batch: int = 1) -> Problem:
        """The shape at full length, without tensors: contiguous, "bhsd" (a cache: "bshd"). Scores that need tensors are
        left out."""
        dim_v = self.head_dim_v or self.head_dim

        def strides(heads: int, rows: int, dim: int) -> tuple[int, int, int]:
            head, row = (dim, heads * dim) if self.decode else (rows * dim, dim)
            return heads * rows * dim, head, row

        (user_mask,) = self.mask or (None,)
        return Problem(
            form="decode" if self.decode else "dense",
            batch=batch,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            seq_q=self.seq_q,
            seq_kv=self.seq_kv,
            head_dim=self.head_dim,
            head_dim_v=dim_v,
            dtype=dtype,
            device="cpu",
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            q_strides=strides(self.heads_q, self.seq_q, self.head_dim),
            k_strides=strides(self.heads_kv, self.seq_kv, self.head_dim),
            v_strides=strides(self.heads_kv, self.seq_kv, dim_v),
            mask=masks.split(user_mask)[0],
            scores=scores.split(tuple(rule for rule in self.scores if isinstance(rule, Softcap)))[0],
            layout="bshd" if self.decode else "bhsd",
        )


_CAUSAL = (Causal(),)

SHAPES = (
    Shape("Llama-3-8B", "config.json of meta-llama/Meta-Llama-3-8B", 32, 8, 128, 8192, 8192, mask=_CAUSAL),
    Shape("Llama-3-8B decode", "config.json of meta-llama/Meta-Llama-3-8B", 32, 8, 128, 1, 8192, decode=True),
    Shape("Qwen2.5-7B", "config.json of Qwen/Qwen2.5-7B", 28, 4, 128, 32768, 32768, mask=_CAUSAL),
    Shape("Qwen3-0.6B", "config.json of Qwen/Qwen3-0.6B", 16, 8, 128, 32768, 32768, mask=_CAUSAL),
    Shape("Qwen3-8B decode", "config.json of Qwen/Qwen3-8B", 32, 8, 128, 1, 32768, decode=True),
    Shape(
        "Mistral-7B-v0.1",
        "config.json of mistralai/Mistral-7B-v0.1 (sliding_window 4096)",
        32,
        8,
        128,
        8192,
        8192,
        mask=(Window(4095, 0),),
    ),
    Shape(
        "Gemma-2-9B global",
        "config.json of google/gemma-2-9b (attn_logit_softcapping 50)",
        16,
        8,
        256,
        8192,
        8192,
        mask=_CAUSAL,
        scores=(Softcap(50.0),),
    ),
    Shape(
        "Gemma-2-9B local",
        "config.json of google/gemma-2-9b (sliding_window 4096)",
        16,
        8,
        256,
        8192,
        8192,
        mask=(Window(4095, 0),),
        scores=(Softcap(50.0),),
    ),
    Shape(
        "Gemma-2-27B global",
        "config.json of google/gemma-2-27b (query_pre_attn_scalar 144)",
        32,
        16,
        128,
        8192,
        8192,
        mask=_CAUSAL,
        scores=(Softcap(50.0),),
        scale=144**-0.5,
    ),
    Shape(
        "Gemma-3-4B local",
        "config.json of google/gemma-3-4b-pt (sliding_window 1024)",
        8,
        4,
        256,
        8192,
        8192,
        mask=(Window(1023, 0),),
    ),
    Shape("Gemma-3-1B global", "config.json of google/gemma-3-1b-pt", 4, 1, 256, 32768, 32768, mask=_CAUSAL),
    Shape(
        "gpt-oss-20b local",
        "config.json of openai/gpt-oss-20b (sliding_window 128, learned sinks)",
        64,
        8,
        64,
        4096,
        4096,
        mask=(Window(127, 0),),
        scores=(SinkRule(),),
    ),
    Shape(
        "Phi-3-mini-4k",
        "config.json of microsoft/Phi-3-mini-4k-instruct (sliding_window 2047)",
        32,
        32,
        96,
        4096,
        4096,
        mask=(Window(2046, 0),),
    ),
    Shape("Falcon-7B", "config.json of tiiuae/falcon-7b (multi_query)", 71, 1, 64, 2048, 2048, mask=_CAUSAL),
    Shape(
        "MPT-7B", "config.json of mosaicml/mpt-7b (alibi)", 32, 32, 128, 2048, 2048, mask=_CAUSAL, scores=(AlibiRule(),)
    ),
    Shape("GPT-2", "config.json of openai-community/gpt2", 12, 12, 64, 1024, 1024, mask=_CAUSAL),
    Shape("BERT-base", "config.json of google-bert/bert-base-uncased", 12, 12, 64, 512, 512),
    Shape(
        "T5-base encoder",
        "config.json of google-t5/t5-base; no 1/sqrt(d), arXiv:1910.10683",
        12,
        12,
        64,
        512,
        512,
        scores=(BiasRule("1hqk"),),
        scale=1.0,
    ),
    Shape("ViT-B/16", "arXiv:2010.11929, table 1: 14 x 14 patches and a class token", 12, 12, 64, 197, 197),
    Shape(
        "Swin-T",
        "arXiv:2103.14030, section 3: 7 x 7 windows, relative position bias",
        3,
        3,
        32,
        49,
        49,
        scores=(BiasRule("1hqk"),),
    ),
    Shape(
        "Whisper-large-v3 cross",
        "config.json of openai/whisper-large-v3: 1500 encoder positions, up to 448 tokens",
        20,
        20,
        64,
        448,
        1500,
    ),
    Shape("Whisper-large-v3 encoder", "config.json of openai/whisper-large-v3", 20, 20, 64, 1500, 1500),
    Shape(
        "SDXL self",
        "unet/config.json of stabilityai/stable-diffusion-xl-base-1.0: 10 heads at 64 x 64",
        10,
        10,
        64,
        4096,
        4096,
    ),
    Shape(
        "SDXL cross",
        "unet/config.json of stabilityai/stable-diffusion-xl-base-1.0: 77 text tokens",
        20,
        20,
        64,
        1024,
        77,
    ),
    Shape(
        "Stable Diffusion 1.5 self",
        "unet/config.json of stable-diffusion-v1-5: 320 channels, 8 heads",
        8,
        8,
        40,
        4096,
        4096,
    ),
    Shape(
        "FLUX.1",
        "transformer/config.json of black-forest-labs/FLUX.1-dev: 4096 image and 512 text tokens",
        24,
        24,
        128,
        4608,
        4608,
    ),
    Shape(
        "DeepSeek-V3 MLA prefill",
        "config.json of deepseek-ai/DeepSeek-V3: 128 + 64 rotary, v 128",
        128,
        128,
        192,
        4096,
        4096,
        head_dim_v=128,
        mask=_CAUSAL,
    ),
    Shape(
        "DeepSeek-V3 MLA decode",
        "config.json of deepseek-ai/DeepSeek-V3: latent 512 + 64 rotary",
        128,
        1,
        576,
        1,
        4096,
        head_dim_v=512,
        scale=192**-0.5,
        decode=True,
    ),
)

BY_NAME = {shape.name: shape for shape in SHAPES}
