"""Causes in the backward."""

from __future__ import annotations

from attnworks.workbench.diagnose.causes.cause import DK, DQ, DS, PBACK, Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    "Gradients": {
        "delta missing": Cause(
            "dV right, dQ and dK wrong: the softmax's denominator was held constant.",
            DS,
            "delta = rowsum(dO ∘ O) and its place in dS.",
        ),
        "delta of the wrong sign": Cause("dV right, dQ and dK wrong.", DS, "The sign of delta."),
        "delta of other rows": Cause(
            "dV right, dQ and dK wrong: delta is another row's, or one for several.",
            DS,
            "The row index of delta, also past tile borders.",
        ),
        "delta of another size": Cause(
            "dQ and dK wrong, dV right; right where delta is 0.",
            DS,
            "dP and delta must both have the scale, or neither.",
        ),
        "delta of some channels": Cause(
            "dV right, dQ and dK wrong from a head dim on.",
            DS,
            "The sum runs over all channels of dO ∘ O, beyond one chunk or one thread's.",
        ),
        "delta missing in the last tile": Cause(
            "dQ wrong in the rows past the last whole tile (or past the first one), dK with it; dV right.",
            DS,
            "The grid of the kernel that makes delta: a block for a part of a tile as well.",
        ),
        "delta of the accumulator": Cause(
            "dV right, dQ and dK wrong, more with more keys; right where a row's sum is 1.",
            DS,
            "delta is of the normalised output: O, not l · O.",
        ),
        "dO of another place": Cause(
            "All gradients wrong, forward right; right with one head, or one row.",
            DS,
            "The strides by which dO is read: they are its own, not those of a contiguous tensor.",
        ),
        "dP of some channels": Cause(
            "dV right, dQ and dK wrong where head_dim_v is large, or larger than head_dim.",
            "dP = dO Vᵀ over all of head_dim_v",
            "The extent of V and dO in the backward: head_dim_v, not head_dim, nor one chunk.",
        ),
        "dS without probs": Cause("dV right, dQ and dK far too large.", DS, "The factor P."),
        "probs not normalised in backward": Cause(
            "All gradients too large by the softmax's denominator of each row.",
            PBACK,
            "P from the saved LSE, not from the maximum alone.",
        ),
        "lse cotangent ignored": Cause(
            "Right unless the LSE takes part in the loss.", "dS = P ∘ (dP - delta + dLSE)", "delta - dLSE."
        ),
        "lse cotangent of the wrong sign": Cause(
            "Right unless the LSE takes part in the loss.", "dS = P ∘ (dP - delta + dLSE)", "delta - dLSE, not + dLSE."
        ),
        "dq not scaled": Cause("dQ too large by 1/scale, dK and dV right.", DQ, "The factor scale."),
        "dk not scaled": Cause(
            "dK too large by 1/scale, dQ and dV right.", DK, "The factor scale (a scaled Q has it)."
        ),
        "dq scaled twice": Cause("dQ too small by the scale.", DQ, "Scale in dS and again in dQ."),
        "dk scaled twice": Cause("dK too small by the scale.", DK, "A scaled Q, and the scale again."),
        "dS not scaled": Cause(
            "dQ and dK too large by 1/scale, dV right.",
            DS,
            "The scale: in dS, or in both products.",
        ),
        "dS scaled twice": Cause(
            "dQ and dK too small by the scale, dV right.",
            DS,
            "The scale: in dS or in the products, not in both.",
        ),
        "last query tile missing in dk, dv": Cause(
            "dK and dV lack some queries, dQ right.",
            DK,
            "The loop over queries: first and last tile, the bound that causal gives.",
        ),
        "dk, dv miss rows of the window": Cause(
            "Windows: dK and dV too small in all but one key of each tile, dQ right.",
            DK,
            "The rows of a tile of keys: from the first that sees its first key to the last that sees its last.",
        ),
        "dk, dv at the queries' offsets": Cause(
            "Packed sequences: forward and dQ right, dK and dV lie elsewhere.",
            "dK and dV of sequence b: rows cu_seqlens_k[b] … cu_seqlens_k[b + 1]",
            "Which of the two offsets dK and dV are stored at.",
        ),
        "gradients of what is hidden unwritten": Cause(
            "dK and dV of keys that no query sees, or dQ of rows that see no key, are what the memory held.",
            "a key that no row sees: dK = dV = 0; a row that sees no key: dQ = 0",
            "Tiles that are skipped must still be stored, or the buffers be cleared.",
        ),
        "gradients without queries unwritten": Cause(
            "Packed sequences, some without queries: dK and dV of their keys hold what the memory held.",
            "dK = dV = 0 where no query is",
            "Blocks that leave early, and whether somebody clears the buffers.",
        ),
        "dk, dv begin at the key's number": Cause(
            "Causal: dK and dV wrong where seq_q ≠ seq_kv, dQ right.",
            DK,
            "The first query that sees a key is j - (seq_kv - seq_q), not j.",
        ),
        "dq overwritten by each tile": Cause(
            "dQ wrong from two tiles of keys on: only the last one counts.",
            DQ,
            "= for +=; an atomic add that is a store.",
        ),
        "last tile missing in dq": Cause(
            "dQ lacks the last tile of keys.", DQ, "The loop's bound; an unfinished last stage."
        ),
        "tail rows unwritten in dq": Cause(
            "dQ is 0 from a row on, dK and dV right.",
            "every row of dQ is written",
            "The grid over queries in the backward.",
        ),
        "last tile missing in dk, dv": Cause(
            "dK, dV or both are 0 past the last whole tile of keys.",
            "every row of dK and dV is written",
            "The grid over keys in the backward; the mask of the store.",
        ),
        "dk, dv averaged over the group": Cause(
            "Grouped heads: dK, dV or both too small by the group's size.",
            DK,
            "A mean for a sum.",
        ),
        "heads mapped otherwise in backward": Cause(
            "Forward right; grouped heads: gradients belong to another KV head, or come of another one's keys.",
            "KV head of query head h: h // (heads_q / heads_kv), in backward as in forward",
            "h % heads_kv in backward; a reshape to (group, heads_kv).",
        ),
        "dk, dv of one query head": Cause(
            "Grouped heads: dK and dV too small, dQ right.", DK, "The sum over the group's query heads."
        ),
        "dv scaled": Cause(
            "dV too small by the scale, dQ and dK right.",
            DK,
            "The scale belongs to dK, not to dV.",
        ),
        "dk and dv exchanged": Cause(
            "dK and dV wrong, dQ right.",
            "backward returns (dQ, dK, dV)",
            "The order in which they are returned.",
        ),
        "gradients in another base": Cause(
            "dQ, dK or both off by ln 2 or 1/ln 2, dV right.",
            DQ,
            "A scale with log2 e in it, meant for exp2, also multiplies dS.",
        ),
        "gradients in another place": Cause(
            "The gradients' numbers are right, and lie in other rows or heads.",
            "dQ[b, h, i] of Q[b, h, i]",
            "Row and head offsets of the stores in the backward.",
        ),
        "a gradient is 0": Cause(
            "One of dQ, dK, dV is 0.",
            "backward returns (dQ, dK, dV)",
            "Is it stored, and returned?",
        ),
        "a gradient of another size": Cause(
            "One of dQ, dK, dV is a constant times the right one.",
            DS,
            "Factors of its product and of its store.",
        ),
        "sequences left out in backward": Cause(
            "Gradients of later sequences are 0.",
            "every sequence has gradients",
            "The batch in the backward's grid and offsets.",
        ),
        "heads left out in backward": Cause(
            "Gradients of some heads are 0.",
            "every head has gradients",
            "The heads in the backward's grid and offsets.",
        ),
        "lse of the other base in backward": Cause(
            "Forward right, all gradients wrong.",
            PBACK,
            "exp2 wants S and LSE in base 2, exp both natural.",
        ),
        "lse of some keys in backward": Cause(
            "Forward right; gradients wrong from two tiles of keys on, far too large.",
            PBACK,
            "Which LSE forward saves: that of all keys, after the last tile or the merge.",
        ),
        "lse without the sink in backward": Cause(
            "With sinks: forward right, all gradients too large, each row by a factor of its own.",
            PBACK,
            "Which LSE is saved for backward: with the sink in it.",
        ),
        "K or V of another tile in backward": Cause(
            "Forward right; gradients right on one tile of keys.",
            PBACK,
            "The stage or chunk that S, dP and dQ read in backward: K's and V's buffers and their indices.",
        ),
        "lse of other rows in backward": Cause(
            "Forward right, all gradients wrong.",
            PBACK,
            "The index by which the LSE is read: (batch, heads, rows).",
        ),
        "dk, dv of the last query tile": Cause(
            "dK and dV wrong from two tiles of queries on.", DK, "= for +=; accumulators initialised in the loop."
        ),
        "mask missing in backward": Cause(
            "Forward right, gradients wrong with a mask.", PBACK, "The mask in the recomputed S."
        ),
        "mask from the top left in backward": Cause(
            "Forward right; gradients wrong with causal where seq_q ≠ seq_kv.",
            PBACK,
            "The mask's origin in the backward.",
        ),
        "mask off by one in backward": Cause(
            "Forward right; gradients wrong with causal or a window.",
            PBACK,
            "≤ for <, the same in forward and backward.",
        ),
        "window missing in backward": Cause(
            "Forward right; gradients wrong with a window.",
            PBACK,
            "Is the window handed to the backward?",
        ),
        "scale argument ignored in backward": Cause(
            "Forward right; gradients wrong with a scale of one's own.",
            PBACK,
            "Is the scale handed to the backward?",
        ),
        "scores scaled otherwise in backward": Cause(
            "Forward right; all gradients wrong, most where scores are large.",
            PBACK,
            "The scale of the recomputed scores: there once, with log2 e only for exp2.",
        ),
        "scores plain in backward": Cause(
            "Forward right; gradients wrong with a softcap, ALiBi or a bias.",
            PBACK,
            "The score modifiers in the recomputed S.",
        ),
        "softcap slope missing": Cause(
            "With a softcap: dV right, dQ and dK too large.", "dS ∘ (1 - tanh²)", "The slope, of the capped score."
        ),
        "bias gradient not summed": Cause(
            "dBias wrong where the bias is broadcast over heads or the batch.",
            "dBias = Σ dS over what the bias is broadcast over",
            "The reduction; an atomic add that is a store.",
        ),
        "bias gradient missing": Cause(
            "dBias is 0.",
            "dBias = dS",
            "Is it returned?",
        ),
        "bias gradient unwritten where hidden": Cause(
            "dBias under a mask: what the memory held in tiles that are skipped.",
            "dBias = dS, 0 where hidden",
            "The buffer is not cleared, and skipped tiles are not stored.",
        ),
        "bias gradient scaled": Cause("dBias off by the scale.", "dBias = dS", "dS before the scale is multiplied in."),
        "bias gradient in another place": Cause(
            "dBias has the right numbers in other heads or rows.",
            "dBias[b, h, i, j] = dS[b, h, i, j]",
            "The strides of its store.",
        ),
        "sink gradient missing": Cause(
            "dSink is 0, or has the wrong sign.", "dSink = -Σ exp(sink - LSE) · delta", "Is it returned, and its sign?"
        ),
        "sink gradient not summed": Cause(
            "dSink is one row's.",
            "dSink = -Σ exp(sink - LSE) · delta",
            "The sum over rows; an atomic add that is a store.",
        ),
        "empty rows leak into gradients": Cause(
            "NaN in gradients if there are rows without keys.", PBACK, "exp(S - (-inf)): guard LSE = -inf."
        ),
        "padding scored 0 in backward": Cause(
            "NaN in dQ for very negative scores, seq_kv off the tile.",
            PBACK,
            "exp(0 - LSE) of padding overflows: mask it.",
        ),
        "backward in 16 bits": Cause(
            "fp32 inputs: gradients with errors of 16 bits, forward right.",
            "P, dS, dO in fp32",
            "The dtype of the backward's products.",
        ),
        "dS in fp8": Cause("dQ and dK off by a few per cent.", "dS rounded to the input dtype", "The dtype of dS."),
    },
}
