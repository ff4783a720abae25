"""The schedules of the papers, forward and backward, with the words in which ``attnworks flow`` tells them.

FlashAttention-1 is arXiv:2205.14135, FlashAttention-2 arXiv:2307.08691, Flash-Decoding the blog post of that name
(PyTorch, October 2023). Their O, dQ and the rest are counted in the input dtype, as in ``attnworks.traffic``.
"""

from __future__ import annotations

from attnworks.workbench.loops import Pass, Schedule

LABELS = {
    "standard": "standard attention",
    "kv_outer": "FlashAttention-1: KV outer",
    "q_outer": "FlashAttention-2: Q outer",
    "split_kv": "Flash-Decoding: split KV",
}
# In the backward of both it is the keys' tiles that are outside.
BACKWARD_LABELS = {"standard": "standard attention", "kv_outer": "FlashAttention-1", "q_outer": "FlashAttention-2"}

# ---- forward ---------------------------------------------------------------------------------------------------------

_ONLINE = (
    "S{i},{j} = scale · Q{i} K{j}ᵀ, on chip only. m rises to the largest score so far; alpha = exp(m before − m now) "
    "shrinks what was summed; l = alpha · l + rowsum(exp(S − m)); acc = alpha · acc + exp(S − m) V{j}."
)

STANDARD = Schedule(
    "standard",
    (
        Pass(
            "S = Q Kᵀ", outer="q", inner="kv", keeps=("q",), once=("k",), writes=("s",), skips=False, products=(1, 0),
            says=(
                "Load the tile Q{i} of queries.",
                "S{i},{j} = scale · Q{i} K{j}ᵀ, and written out: as a whole S is far too large to stay on chip. What "
                "the mask hides is computed all the same.",
                "The rows of S for Q{i} lie in slow memory.",
            ),
        ),
        Pass(
            "P = softmax(S)", outer="q", inner="kv", streams=("s",), writes=("p",), skips=False, registers=("m", "l"),
            says=(
                "Next rows of S: their largest score m and the sum l of exp(S − m).",
                "Read S{i},{j} back, hide what the mask hides, write P{i},{j} = exp(S − m) / l.",
                "The rows of P for Q{i} lie in slow memory.",
            ),
        ),
        Pass(
            "O = P V", outer="q", inner="kv", streams=("p",), once=("v",), leaves=("out",), skips=False,
            products=(0, 1), registers=("acc",),
            says=("acc = 0.", "Read P{i},{j} back: acc = acc + P{i},{j} V{j}.", "Write O{i} = acc, once."),
        ),
    ),
)  # fmt: skip

KV_OUTER = Schedule(
    "kv_outer",
    (
        Pass(
            "begin", outer="q", leaves=("out", "m", "l"), programs="head",
            says=("Nothing was seen yet.", "", "Write O{i} = 0, m = −∞, l = 0 (line 2 of the paper's algorithm 1)."),
        ),
        Pass(
            "forward", outer="kv", inner="q", keeps=("k", "v"), streams=("q",), updates=("out", "m", "l"),
            programs="head", fused=True, products=(1, 1), registers=("m", "l"),
            says=(
                "Load K{j} and V{j}: they stay on chip while all tiles of queries that see them go by.",
                "Load Q{i}, and O{i}, m, l as they are so far. " + _ONLINE.replace("acc", "O{i}")
                + " O{i} is divided by l, and O{i}, m, l are written back: the next tile of keys will want them again.",
                "K{j} and V{j} have met all their queries, and are never loaded again.",
            ),
        ),
    ),
)  # fmt: skip

Q_OUTER = Schedule(
    "q_outer",
    (
        Pass(
            "forward", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("out", "lse"), products=(1, 1),
            registers=("m", "l", "acc"),
            says=(
                "Load Q{i}: it stays on chip. m = −∞, l = 0, acc = 0, in registers.",
                "Load K{j} and V{j}. " + _ONLINE,
                "All keys were seen: write O{i} = acc / l and LSE = m + ln l, once.",
            ),
        ),
    ),
)  # fmt: skip

SPLIT_KV = Schedule(
    "split_kv",
    (
        Pass(
            "each share", outer="q", inner="kv", keeps=("q",), streams=("k", "v"), leaves=("part",),
            products=(1, 1), together=True, splits=True, registers=("m", "l", "acc"),
            says=(
                "A program for each share of the keys, so that few queries keep a whole card busy. Load Q{i}, in whose "
                "rows the query heads of a group lie together. m = −∞, l = 0, acc = 0.",
                "Load K{j} and V{j}. " + _ONLINE,
                "This share of the keys was seen: write the partial result acc / l and its LSE = m + ln l, in fp32.",
            ),
        ),
        Pass(
            "merge", outer="q", keeps=("part",), together=True, splits=True, registers=("m", "l", "acc"),
            says=(
                "Load the partial result of the next share and its LSE. As between tiles: m rises to the largest LSE "
                "so far, alpha shrinks what was summed, the share counts with the weight exp(LSE − m).",
                "",
                "Nothing is written yet: the other shares are still to come.",
            ),
        ),
        Pass(
            "merge", outer="q", leaves=("out",), together=True, registers=("l", "acc"),
            says=("All shares were summed.", "", "Write O{i} = acc / l, once."),
        ),
    ),
    split_kv=256,
)  # fmt: skip

# ---- backward --------------------------------------------------------------------------------------------------------

STANDARD_BACKWARD = Schedule(
    "standard",
    (
        Pass(
            "dV = Pᵀ dO", outer="kv", inner="q", streams=("p",), once=("d_out",), leaves=("d_v",), skips=False,
            shared=True, products=(0, 1), registers=("d_v",),
            says=(
                "dV{j} = 0.",
                "Read P{i},{j}, which the forward kept: dV{j} = dV{j} + P{i},{j}ᵀ dO{i}.",
                "Write dV{j}.",
            ),
        ),
        Pass(
            "dP = dO Vᵀ", outer="q", inner="kv", keeps=("d_out",), once=("v",), writes=("d_p",), skips=False,
            products=(0, 1),
            says=("Load dO{i}.", "dP{i},{j} = dO{i} V{j}ᵀ, and written out.", "The rows of dP lie in slow memory."),
        ),
        Pass(
            "dS = P ∘ (dP − delta)", outer="q", inner="kv", streams=("p", "d_p"), writes=("d_s",), skips=False,
            registers=("delta",),
            says=(
                "Next rows: delta = rowsum(P ∘ dP), what the softmax's denominator takes back.",
                "Read P{i},{j} and dP{i},{j}, write dS{i},{j} = P ∘ (dP − delta).",
                "The rows of dS lie in slow memory.",
            ),
        ),
        Pass(
            "dQ = scale · dS K", outer="q", inner="kv", streams=("d_s",), once=("k",), leaves=("d_q",), skips=False,
            products=(1, 0), registers=("d_q",),
            says=("dQ{i} = 0.", "Read dS{i},{j}: dQ{i} = dQ{i} + scale · dS{i},{j} K{j}.", "Write dQ{i}."),
        ),
        Pass(
            "dK = scale · dSᵀ Q", outer="kv", inner="q", streams=("d_s",), once=("q",), leaves=("d_k",), skips=False,
            shared=True, products=(1, 0), registers=("d_k",),
            says=("dK{j} = 0.", "Read dS{i},{j} again: dK{j} = dK{j} + scale · dS{i},{j}ᵀ Q{i}.", "Write dK{j}."),
        ),
    ),
    backward=True,
)  # fmt: skip

_AGAIN = (
    "Compute P{i},{j} again from Q{i}, K{j} and the statistics of the row, rather than read it. dV{j} += Pᵀ dO{i}; "
    "dP = dO{i} V{j}ᵀ; dS = P ∘ (dP − delta); dK{j} += scale · dSᵀ Q{i}; dQ{i} += scale · dS K{j}"
)

KV_OUTER_BACKWARD = Schedule(
    "kv_outer",
    (
        Pass(
            "begin", outer="q", leaves=("d_q",), programs="head",
            says=("Nothing was added yet.", "", "Write dQ{i} = 0 (line 5 of the paper's algorithm 4)."),
        ),
        Pass(
            "backward", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "out", "d_out", "m", "l"),
            updates=("d_q",), leaves=("d_k", "d_v"), shared=True, programs="head", fused=True, products=(3, 2),
            registers=("d_k", "d_v"),
            says=(
                "Load K{j} and V{j}. dK{j} = dV{j} = 0, and stay on chip.",
                "Load Q{i}, O{i}, dO{i}, m, l and dQ{i} as it is so far. delta = rowsum(dO ∘ O), anew for every tile. "
                + _AGAIN + ", which is written back.",
                "Write dK{j} and dV{j}, once.",
            ),
        ),
    ),
    backward=True,
)  # fmt: skip

Q_OUTER_BACKWARD = Schedule(
    "q_outer",
    (
        Pass(
            "delta = rowsum(dO ∘ O)", outer="q", keeps=("out", "d_out"), leaves=("delta", "d_q"),
            says=("Load O{i} and dO{i}.", "", "Write delta, a number for each row, and dQ{i} = 0, to be added to."),
        ),
        Pass(
            "backward", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "d_out", "lse", "delta"),
            updates=("d_q",), leaves=("d_k", "d_v"), shared=True, products=(3, 2), registers=("d_k", "d_v"),
            says=(
                "Load K{j} and V{j}; in the backward it is the keys that own a program. dK{j} = dV{j} = 0.",
                "Load Q{i}, dO{i}, LSE and delta. " + _AGAIN + " in slow memory, since other programs add to it too.",
                "Write dK{j} and dV{j}, once.",
            ),
        ),
    ),
    backward=True,
)  # fmt: skip

FORWARD = {one.name: one for one in (STANDARD, KV_OUTER, Q_OUTER)}
DECODE = {one.name: one for one in (STANDARD, Q_OUTER, SPLIT_KV)}
BACKWARD = {one.name: one for one in (STANDARD_BACKWARD, KV_OUTER_BACKWARD, Q_OUTER_BACKWARD)}
