"""A small Llama that generates through attnworks: the same tokens as with torch's attention, and how fast.

    python examples/llama_generation.py [tokens of the prompt]

Random weights, so what it says means nothing. Needs transformers. benchmarks/models.py measures the same with care.
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from attnworks.integrations.transformers import register

logging.set_verbosity_error()
register()  # from here on attn_implementation="attnworks" names us

config = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    eos_token_id=None,
)
length, new = int(sys.argv[1]) if len(sys.argv) > 1 else 2048, 16
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(config.vocab_size, (1, length))

tokens = {}
for name in ("sdpa", "attnworks"):
    model.set_attn_implementation(name)
    model.generate(prompt[:, :8], max_new_tokens=2, do_sample=False, pad_token_id=0)  # warm-up
    started = time.perf_counter()
    tokens[name] = model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0)
    seconds = time.perf_counter() - started
    print(f"{name:10} {length} tokens read, {new} written in {seconds:.2f} s")
print("the same tokens:", torch.equal(tokens["sdpa"], tokens["attnworks"]))
