"""A cause, and the lines of maths that causes break, as they must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """``symptom``: what a user sees; ``line``: the line of maths that is broken, as it must be; ``look``: what to check
    in the kernel."""

    symptom: str
    line: str
    look: str


RESCALE = "m' = max(m, rowmax S); α = exp(m - m'); l' = α l + rowsum P; O' = α O + P V"
SCALE = "S = scale · Q Kᵀ, scale = 1/sqrt(head_dim) unless given"
CAUSAL = "query i sees key j where j ≤ i + (seq_kv - seq_q)"
WINDOW = "key j is seen where i' - left ≤ j ≤ i' + right, i' = i + (seq_kv - seq_q)"
MERGE = "O = Σ exp(LSE_n - LSE) O_n, LSE = log Σ exp LSE_n over the parts n"
EMPTY = "a row without a visible key: O = 0, LSE = -inf, gradients 0"
LSE = "LSE = m + log l, natural logarithm"
SINK = "l = Σ exp(S - m) + exp(sink - m), m = max(rowmax S, sink)"
CAP = "S = cap · tanh(scale · Q Kᵀ / cap), then masks"
ALIBI = "S = scale · Q Kᵀ - slope_h · |i + (seq_kv - seq_q) - j|"
BIAS = "S = scale · Q Kᵀ + bias[b, h, i, j]"
GROUP = "KV head of query head h: h // (heads_q / heads_kv)"
PAGES = "key j lies in page page_table[b, j // page_size], at j % page_size"
DS = "dS = P ∘ (dP - delta), delta = rowsum(dO ∘ O)"
DQ = "dQ = scale · Σ over KV tiles of dS K"
DK = "dK = scale · Σ over queries and the heads of the group of dSᵀ Q; dV likewise of Pᵀ dO"
PBACK = "P = exp(S - LSE), masked as in forward"
MASK = "S = -inf where hidden, before the softmax"
LENGTHS = "keys j < kv_lens[b] of the sequence's own cache, and no others"
