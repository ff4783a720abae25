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
        "dS without probs": Cause("dV right, dQ and dK far too large.", DS, "The factor P."),
        "probs not normalised in backward": Cause(
            "All gradients too large by the softmax's denominator of each row.",
            PBACK,
            "P from the saved LSE, not from the maximum alone.",
        ),
        "lse cotangent ignored": Cause(
            "Right unless the LSE takes part in the loss.", "dS = P ∘ (dP - delta + dLSE)", "delta - dLSE."
        ),
        "dq not scaled": Cause("dQ too large by 1/scale, dK and dV right.", DQ, "The factor scale."),
        "dk not scaled": Cause(
            "dK too large by 1/scale, dQ and dV right.", DK, "The factor scale (a scaled Q has it)."
        ),
        "dq scaled twice": Cause("dQ too small by the scale.", DQ, "Scale in dS and again in dQ."),
        "dk scaled twice": Cause("dK too small by the scale.", DK, "A scaled Q, and the scale again."),
        "dq overwritten by each tile": Cause(
            "dQ wrong from two tiles of keys on: only the last one counts.",
            DQ,
            "= for +=; an atomic add that is a store.",
        ),
        "last tile missing in dq": Cause(
            "dQ lacks the last tile of keys.", DQ, "The loop's bound; an unfinished last stage."
        ),
        "dk, dv of one query head": Cause(
            "Grouped heads: dK and dV too small, dQ right.", DK, "The sum over the group's query heads."
        ),
        "dk, dv of the last query tile": Cause(
            "dK and dV wrong from two tiles of queries on.", DK, "= for +=; accumulators initialised in the loop."
        ),
        "mask missing in backward": Cause(
            "Forward right, gradients wrong with a mask.", PBACK, "The mask in the recomputed S."
        ),
        "softcap slope missing": Cause(
            "With a softcap: dV right, dQ and dK too large.", "dS ∘ (1 - tanh²)", "The slope, of the capped score."
        ),
        "bias gradient scaled": Cause("dBias off by the scale.", "dBias = dS", "dS before the scale is multiplied in."),
        "sink gradient missing": Cause("dSink is 0.", "dSink = -Σ exp(sink - LSE) · delta", "Is it returned?"),
        "empty rows leak into gradients": Cause(
            "NaN in gradients if there are rows without keys.", PBACK, "exp(S - (-inf)): guard LSE = -inf."
        ),
        "padding scored 0 in backward": Cause(
            "NaN in dQ for very negative scores, seq_kv off the tile.",
            PBACK,
            "exp(0 - LSE) of padding overflows: mask it.",
        ),
        "dS in fp8": Cause("dQ and dK off by a few per cent.", "dS rounded to the input dtype", "The dtype of dS."),
    },
}
