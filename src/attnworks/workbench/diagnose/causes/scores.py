"""Causes in what changes the scores: sinks, softcap, ALiBi, bias."""

from __future__ import annotations

from attnworks.workbench.diagnose.causes.cause import ALIBI, BIAS, CAP, SINK, Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    "Sink, softcap, ALiBi, bias": {
        "sink ignored": Cause("With sinks: output too large, LSE too small.", SINK, "exp(sink - m) missing in l."),
        "sink scaled": Cause("With sinks: as with a sink nearer 0.", SINK, "The sink is in the units of S: no scale."),
        "sink rounded": Cause(
            "A sink: errors as large as its last bits in 16 bits.",
            SINK,
            "The sink is cast to the dtype of Q.",
        ),
        "sink counted twice": Cause(
            "With sinks: as with a larger one; the more so the more splits there are.",
            SINK,
            "Only one of the partial results may have the sink.",
        ),
        "sink only in the lse": Cause(
            "With sinks: the LSE is right, the output is that without a sink.",
            SINK,
            "Does the sink enter l before O is divided by it?",
        ),
        "sink of the wrong head": Cause(
            "With sinks: right for head 0, or for MHA.",
            SINK,
            "The index of the sink: the query head.",
        ),
        "sink outside the maximum": Cause(
            "Inf or NaN with a large sink.", SINK, "m starts from the sink, or takes it in."
        ),
        "sink without the maximum": Cause(
            "With sinks: right only where the row's maximum is 0.",
            SINK,
            "exp(sink - m), not exp(sink).",
        ),
        "sink has a value": Cause(
            "With sinks: LSE right, the output leans towards one key's value.",
            SINK,
            "A column beside the scores has no row of V.",
        ),
        "sink left out of the lse": Cause(
            "With sinks: output right, LSE too small.", SINK, "The LSE is of the l used."
        ),
        "softcap ignored": Cause("With a softcap: as without.", CAP, "Is the cap passed on?"),
        "softcap twice": Cause(
            "With a softcap: scores are flatter than they should be, most the large ones.",
            CAP,
            "Applied where scores are made and where they are modified, or in two passes.",
        ),
        "softcap without its factor": Cause(
            "With a softcap: wrong everywhere.",
            CAP,
            "The cap is both the divisor inside tanh and the factor outside.",
        ),
        "softcap by exponentials": Cause(
            "With a softcap: NaN for large scores.", CAP, "tanh from exp overflows: use tanh, or 1 - 2/(exp(2x) + 1)."
        ),
        "tanh approximated": Cause(
            "With a softcap: small errors, or a hard limit.",
            CAP,
            "The tanh: to fp32.",
        ),
        "softcap before scale": Cause(
            "With a softcap: wrong everywhere.", CAP, "The cap's argument is the scaled score."
        ),
        "scores in another order": Cause(
            "With a softcap and a bias: right with either alone.",
            "left to right",
            "The order in which they are applied.",
        ),
        "softcap after mask": Cause(
            "Softcap with a mask: hidden keys come back as scores of -cap.", CAP, "The order: cap first, then -inf."
        ),
        "alibi sign": Cause("ALiBi: far keys gain.", ALIBI, "The sign of the slope."),
        "alibi ignored": Cause(
            "ALiBi: as without.",
            ALIBI,
            "Are the slopes passed on, for every path?",
        ),
        "alibi distance signed": Cause(
            "ALiBi: right where causal; else keys ahead gain.", ALIBI, "The absolute value of the distance."
        ),
        "alibi scaled": Cause(
            "ALiBi: as with smaller slopes.",
            ALIBI,
            "The distance is subtracted after the scale.",
        ),
        "alibi from the first key": Cause(
            "ALiBi: right where seq_q = seq_kv (or causal, where a row's shift cancels).",
            ALIBI,
            "The origin seq_kv - seq_q.",
        ),
        "alibi of the wrong head": Cause(
            "ALiBi: heads, or sequences, have each other's slopes.", ALIBI, "The index into the slopes, with its batch."
        ),
        "bias of head 0": Cause("A bias: only the first head is right.", BIAS, "The bias's head stride."),
        "bias of row 0": Cause(
            "A bias or mask: every row has the first one's; right if it is broadcast over rows.",
            BIAS,
            "The row stride of the bias or mask.",
        ),
        "bias of sequence 0": Cause(
            "A bias: the sequences are wrong, or all but the first.", BIAS, "The bias's batch stride."
        ),
        "bias rounded": Cause(
            "A bias: errors as large as its last bits in 16 bits.",
            BIAS,
            "The bias is cast to the dtype of Q before it is added.",
        ),
        "bias scaled": Cause("A bias: as with a smaller one.", BIAS, "The bias is added after the scale."),
        "bias ignored": Cause("A bias: as without.", BIAS, "Is its pointer read, for every broadcast?"),
        "bias subtracted": Cause(
            "A bias: with the wrong sign.",
            BIAS,
            "The sign.",
        ),
    },
}
