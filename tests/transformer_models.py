"""Small models of transformers, initialised at random so that attention decides what comes out."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied ones repeat the last token for ever
}
MIXED = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**SIZES),
    "gemma2": hf.Gemma2Config(
        **SIZES, sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=40, attn_logit_softcapping=3.0
    ),
    "gemma3": hf.Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=40),
    "qwen3": hf.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, layer_types=MIXED),
    "gpt-oss": hf.GptOssConfig(
        **SIZES, sliding_window=6, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=1
    ),
}


def decoder(name: str, implementation: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model; the same weights for every implementation."""
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[name])  # a model's layers ask its config, of which from_config makes no copy
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


def whisper(implementation: str = "eager") -> Any:
    torch.manual_seed(1)
    # fmt: off
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=24, max_target_positions=40, attention_dropout=0.0, dropout=0.0, activation_dropout=0.0,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=None, init_std=0.3,
        attn_implementation=implementation, suppress_tokens=None, begin_suppress_tokens=None,
    )
    # fmt: on
    return hf.WhisperForConditionalGeneration(config).eval()


def tokens(batch: int = 2, length: int = 15) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padded(ids: Tensor, sides: tuple[int, ...]) -> Tensor:
    """An attention mask (batch, positions): so many tokens of padding, on the left if positive, else on the right."""
    mask = torch.ones_like(ids)
    for row, side in zip(mask, sides, strict=True):
        if side > 0:
            row[:side] = 0
        elif side < 0:
            row[side:] = 0
    return mask
