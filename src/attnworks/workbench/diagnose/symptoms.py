"""docs/symptoms.md: the table of symptoms, causes and checks as a page to read.

``python -m attnworks.workbench.diagnose.symptoms > docs/symptoms.md`` writes it.
"""

from __future__ import annotations

from attnworks.workbench.diagnose.causes import SECTIONS

_INTRODUCTION = """# Symptoms, causes, checks

What wrong attention kernels look like from outside, the line of maths that is broken, and where to look.
`attnworks diagnose your.module:attention` compares a kernel with all of these and says which comes nearest
([diagnose.md](diagnose.md)); this page is for reading without it. It is generated from
`src/attnworks/workbench/diagnose/causes/`: `python -m attnworks.workbench.diagnose.symptoms > docs/symptoms.md`.

S are the scores, P the weights, m and l the running maximum and sum, O the output; i counts queries, j keys.

## Where to begin

Which calls fail (length, mask, heads, dtype), which tensors (O, LSE, gradients), and is it NaN, a factor, some rows,
or a little everywhere? Useful inputs: V = 1 (every row must come out as 1), V = the identity (the output is P itself),
K = 0 (the output is the mean of V), one key (the output is V, the LSE its score).
"""

FIRST_LOOKS = {
    "does not match PyTorch, everywhere": "the scale, 1/sqrt(head_dim) and once; the axis of the softmax",
    "does not match PyTorch, causal, seq_q ≠ seq_kv": "the alignment: PyTorch's is top-left, flash-attn's is not",
    "right on one length, wrong on others": "lengths off the tile: bounds of loops, loads, stores, masks",
    "right up to one tile of keys": "the rescaling of accumulator and sum; the merging of splits",
    "NaN everywhere": "an overflow: is the maximum subtracted? NaN behind the end, loaded and weighted by 0?",
    "NaN in some rows": "rows, or first tiles, without a visible key: -inf - (-inf), 0/0",
    "NaN only in gradients": "the recomputed P: exp(S - LSE) where the LSE is -inf, or of padding that scores 0",
    "a constant factor": "the scale in dQ or dK; ln 2 in the LSE; the scale of an 8-bit V",
    "each row off by a factor of its own": "the sum: not divided by, not rescaled, a mask after the softmax, a sink",
    "only in 16 bits": "where fp32 ends: scores, weights, the running sum, the accumulator",
    "a little wrong, more with more keys": "the precision of the accumulator or the sum",
    "only some heads are right": "the head map of grouped heads; the head strides of mask, bias, slopes",
    "only some sequences are right": "batch strides, offsets, lengths, pages",
    "forward right, gradients wrong": "delta, the scale, the mask in backward, sums over a group's heads, = for +=",
    "differs from run to run": "a race, atomics, memory never written",
}


def page() -> str:
    """The page's text, in Markdown."""
    lines = [_INTRODUCTION, "| you see | begin with |", "| --- | --- |"]
    lines += [f"| {seen} | {begin} |" for seen, begin in FIRST_LOOKS.items()]
    for section, causes in SECTIONS.items():
        lines += ["", f"## {section}", "", "| fault | symptom | must hold | look at |", "| --- | --- | --- | --- |"]
        lines += [f"| {fault} | {c.symptom} | {c.line} | {c.look} |" for fault, c in causes.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
