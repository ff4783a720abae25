"""Causes in the softmax itself: its running maximum and sum, precision, scale."""

from __future__ import annotations

from attnworks.workbench.diagnose.causes.cause import MERGE, RESCALE, SCALE, Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    "The online softmax": {
        "accumulator not rescaled": Cause(
            "Right on one tile of keys; wrong on more, most where scores rise along the keys; LSE right.",
            RESCALE,
            "Is acc multiplied by α = exp(m_old - m_new) in every tile, before P V is added?",
        ),
        "sum not rescaled": Cause(
            "Right on one tile of keys; on more each row is too small by a factor of its own; LSE wrong.",
            RESCALE,
            "Is the running sum multiplied by the same α as the accumulator?",
        ),
        "sum and accumulator not rescaled": Cause(
            "Wrong from two tiles of keys on where the maximum rises, or rises a little; weights still sum to 1.",
            RESCALE,
            "If the correction is skipped, the old maximum must stay: the two go together.",
        ),
        "V of another tile": Cause(
            "Right on one tile of keys; wrong on more, LSE right.",
            "O' = α O + P V of the same keys",
            "The stage that P V reads: K's and V's buffers, their indices and barriers.",
        ),
        "V of another key": Cause(
            "Wrong everywhere, LSE right: each weight meets a neighbour's value.",
            "O = Σ P[i, j] V[j]",
            "V's first row, against K's; an offset of one, an order turned round.",
        ),
        "K of another tile": Cause(
            "Right on one tile of keys; wrong on more, LSE too.",
            "S[i, j] = scale · Q[i] K[j]",
            "The stage that S reads: K's buffers, their indices and barriers.",
        ),
        "rescaled upside down": Cause(
            "Wrong on more than one tile; Inf or NaN where the maximum rises far.",
            RESCALE,
            "The sign in α: exp(old - new), which is at most 1, not exp(new - old).",
        ),
        "rescaled after adding": Cause(
            "Right where the maximum stands in the first tile; the latest tiles count too little where it rises.",
            RESCALE,
            "The order: acc *= α first, then acc += P V.",
        ),
        "rescaled by another exponent": Cause(
            "Right on one tile of keys, or where the maximum stands in the first; smooth errors where it rises.",
            RESCALE,
            "α and P must come from the same exponential of scores in the same units: both base 2, both scaled.",
        ),
        "sum overwritten by each tile": Cause(
            "Right on one tile of keys; on more every row is far too large, and the LSE too small.",
            RESCALE,
            "l = rowsum P for l = α l + rowsum P.",
        ),
        "a tile missing in the sum": Cause(
            "Weights sum to more than 1: some keys count in the output and not in the sum; the LSE is too small.",
            RESCALE,
            "The loop that adds up the sum: first and last tile, tiles that are not whole, paths of their own.",
        ),
        "a tile missing in the accumulator": Cause(
            "Weights sum to less than 1: some keys count in the sum and not in the output; LSE right.",
            RESCALE,
            "The P V of the first and the last tile, in the prologue and the epilogue of the pipeline.",
        ),
        "a tile counted twice": Cause(
            "Wrong everywhere: some keys weigh twice as much; LSE too large.",
            RESCALE,
            "Prologue and loop, or loop and epilogue, that take the same tile.",
        ),
        "one added to the sum": Cause(
            "Every row is too small by a factor of its own, as with a sink; LSE too large.",
            "l = Σ exp(S - m), and nothing else",
            "A 1, an exp(-m) or an epsilon that is added to the sum.",
        ),
        "sum of other rows": Cause(
            "Every row is off by a factor of its own; on one row right.",
            "O[i] = acc[i] / l[i]",
            "The lanes, or the rows of the tile, that hold the sum that a row is divided by.",
        ),
        "sum of part of the keys": Cause(
            "Weights sum to more than 1, in every row by another factor; LSE too small.",
            RESCALE,
            "The reduction of the row's sum over the lanes that share it.",
        ),
        "maximum over hidden keys": Cause(
            "Masks: right on ordinary scores; where hidden ones are far larger, rows come out as 0 or imprecise.",
            "m = rowmax of S, hidden keys being -inf",
            "The order: mask first, then the maximum.",
        ),
        "state of the rows before": Cause(
            "Right in the first tile of rows (or head); later rows are too small by factors of their own, or hold a "
            "part of the rows before.",
            "m = -inf, l = 0, O = 0 at the beginning of every tile of rows",
            "What a persistent loop clears before its next tile: all three.",
        ),
        "running maximum rounded": Cause(
            "Right on one tile of keys; small errors on more that grow with the scores.",
            RESCALE,
            "The dtype in which the maximum is kept from tile to tile: α must be made of the same number as P was.",
        ),
        "correction rounded": Cause(
            "Right on one tile of keys; errors of 16 bits on more, where the maximum rises.",
            RESCALE,
            "The dtype of α.",
        ),
        "maximum shared by rows": Cause(
            "Right on ordinary scores; rows far below others come out as 0 or NaN.",
            "m is each row's own",
            "Reductions over a warp or a tile that take in other rows.",
        ),
        "exp approximated": Cause(
            "Relative errors of a few per cent or mille everywhere.",
            "P = exp(S - m) to fp32",
            "A fast exponential, a polynomial of a low degree, a table.",
        ),
        "accumulator overwritten by each tile": Cause(
            "Right on one tile; on more the output is far too small: only the last tile's P V over the whole sum.",
            RESCALE,
            "acc = P V instead of acc = α acc + P V; in Triton a dot without its accumulator.",
        ),
        "not divided by the sum": Cause(
            "Every row is off by a positive factor of its own, larger with more keys; LSE right.",
            "O = acc / l at the end",
            "Is the epilogue's division by the running sum there, and by the sum of all lanes?",
        ),
        "maximum not subtracted": Cause(
            "NaN or Inf for large scores, 0 for very negative ones; right on unit-normal inputs.",
            "P = exp(S - m), m the row's maximum",
            "Is the row's maximum subtracted before exp, in the same units (scaled, base 2) as the scores?",
        ),
        "finite initial maximum": Cause(
            "Right until all scores of a row lie far below 0: then 0 or NaN, and a wrong LSE.",
            "m starts at -inf, so that the first tile sets it",
            "The initial running maximum: a finite stand-in (0, -1e4) must not take part as a value.",
        ),
        "exp2 for exp": Cause(
            "Everything is wrong, as if the scores were multiplied by ln 2 = 0.69.",
            "exp(x) = exp2(x · log2 e)",
            "Is log2 e folded into the scale wherever exp2 is used?",
        ),
        "a key counted twice": Cause(
            "One key, the last or the first, weighs twice as much.",
            "l = Σ over each key once",
            "Bounds of loops and loads that meet; a padded key that is a copy of the last one.",
        ),
        "tile borders counted twice": Cause(
            "Right where the tile divides seq_kv, or on one tile; some keys weigh twice as much.",
            "l = Σ over each key once",
            "A last tile moved back to be whole, whose overlap is not masked; inclusive ends of tiles.",
        ),
        "keys past a limit unread": Cause(
            "Right up to a length, from there on as if the other keys were not there.",
            "l = Σ over all keys",
            "A table, a grid or a loop of a fixed size.",
        ),
        "keys end with the queries": Cause(
            "Right where there are no more keys than queries; else as if the other keys were not there.",
            "l = Σ over all seq_kv keys",
            "The bound of the loop over keys: seq_q, or the queries' offsets of packed sequences.",
        ),
        "first tile only": Cause(
            "Right up to one tile of keys, then the later keys do not matter at all.",
            "O sums over all tiles of keys",
            "The KV loop's bound and step; a stage count that ends the pipeline after one tile.",
        ),
        "last tile only": Cause(
            "Right up to one tile of keys, then only the last ones matter, softmax and LSE included.",
            "O sums over all tiles of keys",
            "State (m, l, acc) initialised inside the KV loop instead of before it.",
        ),
        "last partial tile dropped": Cause(
            "Right where seq_kv is a multiple of the tile; else the last seq_kv mod tile keys are missing.",
            "number of tiles = ceil(seq_kv / tile_kv)",
            "Floor division in the number of tiles.",
        ),
        "last whole tile dropped": Cause(
            "Lengths that the tile divides are wrong, others right; one tile of keys is right.",
            "all keys take part",
            "(seq_kv - 1) // tile_kv tiles need no mask: one more comes after them, also where it is whole.",
        ),
        "tail keys unmasked": Cause(
            "Right where seq_kv is a multiple of the tile; else too small, worst for very negative scores.",
            "S = -inf for j ≥ seq_kv",
            "Padding keys score 0, not -inf: the bounds mask of the last tile.",
        ),
        "tail rows unwritten": Cause(
            "The last seq_q mod tile rows are 0 (or what lay in memory); the others are right.",
            "number of query tiles = ceil(seq_q / tile_q)",
            "The grid's size and the store mask of the last query tile.",
        ),
        "first key dropped": Cause(
            "Wrong everywhere, a little with many keys; exactly key 0 is missing.",
            "j runs over 0 … seq_kv - 1",
            "Off by one at the start of the loop, or < for ≤ in the mask.",
        ),
        "last key dropped": Cause(
            "Wrong where the last key is seen; exactly one key is missing. Causal: only the last row.",
            "j runs over 0 … seq_kv - 1",
            "Off by one in the bound: j < seq_kv - 1, or a length that leaves out the key just appended.",
        ),
        "softmax over queries": Cause(
            "Wrong everywhere; rows of the weights do not sum to 1 (try V = 1: the output must be 1).",
            "P = softmax over keys (the last axis of S)",
            "The axis of the reductions: row maxima and sums run along keys, also after a transposed product.",
        ),
        "splits averaged": Cause(
            "Right with one split; wrong from the length on at which the keys are split. LSE right.",
            MERGE,
            "The reduction of the splits: are the partial outputs weighted by exp(LSE_n - LSE)?",
        ),
        "splits summed": Cause(
            "Right with one split; with n splits about n times too large.",
            MERGE,
            "Partial outputs are normalised: they need the weights exp(LSE_n - LSE), not a plain sum.",
        ),
        "splits overlap": Cause(
            "Wrong with several splits: the keys behind each split's end count twice.",
            MERGE,
            "A split's end is its own, not that of the tile that holds it.",
        ),
        "keys between splits left out": Cause(
            "Wrong with several splits unless the keys divide evenly: some take no part.",
            "all keys take part",
            "The split's size rounded down; begins rounded up, ends rounded down to whole tiles.",
        ),
        "splits merged by another weight": Cause(
            "Right with one partial result; with more the output is off, the LSE right.",
            MERGE,
            "exp(LSE - max LSE), not exp of the maxima, in the base that the LSE is in.",
        ),
        "a split left out": Cause(
            "Right with one partial result; with more, the keys of one do not count; LSE right or as wrong.",
            MERGE,
            "The merge's loop: its bound, and the number of partial results that were written.",
        ),
        "NaN swallowed": Cause(
            "A NaN in q, k or v comes out as a number.",
            "a NaN among the visible inputs stays NaN",
            "max() that drops NaN, nan_to_num, or 'row is empty' tested as not (m > -inf).",
        ),
    },
    "Precision": {
        "partial results in 16 bits": Cause(
            "fp32 inputs: errors of 16 bits, in the output alone, where keys are split.",
            "partial outputs in fp32 until they are merged",
            "The dtype of the workspace that the splits' outputs wait in.",
        ),
        "fp16 accumulation": Cause(
            "Only in fp16 (bf16) and grows with the number of keys; every element near, the tensor's norm too far.",
            "acc and l in fp32, whatever the input",
            "The accumulator's type in the matrix product; acc cast to the input dtype between tiles.",
        ),
        "sum in low precision": Cause(
            "Only in 16 bits, grows with the number of keys: rows are too large once the sum no longer grows.",
            "l = Σ P in fp32",
            "The dtype of the running sum, and of the reduction that makes it.",
        ),
        "inputs in bf16": Cause(
            "fp32 or fp16 inputs: errors of bf16, LSE too.",
            "q, k, v as they are",
            "A cast on loading; the dtype of the tiles in shared memory.",
        ),
        "output in 16 bits": Cause(
            "fp32 inputs: errors of 16 bits in O, the LSE is right.",
            "O in the dtype of q",
            "The dtype of the output's buffer.",
        ),
        "scores clamped": Cause(
            "Wrong only with large scores: keys above the limit weigh alike.",
            "S as it is; exp(S - m) cannot overflow",
            "A clamp in the place of the maximum.",
        ),
        "scores rounded": Cause(
            "Only in 16 bits, and only where scores are large.",
            "S in fp32 until the exponential",
            "S stored or returned in the input dtype between Q Kᵀ and softmax.",
        ),
        "products in tf32": Cause(
            "Only in fp32: relative errors near 1e-3 everywhere, 16-bit inputs right.",
            "products of fp32 inputs in fp32",
            "allow_tf32 / input_precision of the products.",
        ),
        "scaled Q rounded": Cause(
            "16 bits: errors of a rounding of Q, in proportion to the scores.",
            SCALE,
            "Q times the scale (and log2 e) goes back into 16 bits before Q Kᵀ: multiply the fp32 scores.",
        ),
        "probs in fp8": Cause(
            "Relative errors of a few per cent everywhere, LSE right.",
            "P rounded to the input dtype, no coarser",
            "The dtype of P in the second product.",
        ),
    },
    "Scale": {
        "scale rounded": Cause(
            "Relative errors of 1e-3 where the scale is no power of two.",
            SCALE,
            "The scale's dtype: fp32 (or double) on its whole way.",
        ),
        "scale without its sign": Cause(
            "Right with positive scales.",
            "any finite scale",
            "abs, or a square root of its square.",
        ),
        "scale missing": Cause(
            "Wrong everywhere, weights too sharp: the output is near one row of V; LSE too large.",
            SCALE,
            "Is S (or Q) multiplied by the scale at all? With exp2: by scale · log2 e.",
        ),
        "scale twice": Cause(
            "Wrong everywhere, weights too flat: the output is near the mean of V.",
            SCALE,
            "Q scaled beforehand and S again; 1/head_dim for 1/sqrt(head_dim).",
        ),
        "scale without its root": Cause(
            "Wrong everywhere, weights too flat, unless a scale is given.",
            SCALE,
            "1/head_dim for 1/sqrt(head_dim).",
        ),
        "scale upside down": Cause(
            "Wrong everywhere, weights far too sharp, unless a scale is given.",
            SCALE,
            "· sqrt(head_dim) for / sqrt(head_dim).",
        ),
        "scale of a constant head_dim": Cause(
            "Right for one head dim, wrong for all others, unless a scale is given.",
            SCALE,
            "1/8 or 1/sqrt(128) written as a number.",
        ),
        "scale on top of the default": Cause(
            "Right without a scale argument; with one, weights are too flat.",
            SCALE,
            "The argument takes the default's place, it is not multiplied with it.",
        ),
        "scale of the output": Cause(
            "The output is off by the scale.",
            SCALE,
            "The scale belongs to S, not to V or O.",
        ),
        "scale of another size": Cause(
            "Wrong everywhere: S is a constant times the right one.",
            SCALE,
            "Every factor that S or Q is multiplied by, and what the default scale is made of.",
        ),
        "output of another size": Cause(
            "The output is a constant times the right one.",
            "O = softmax(S) V",
            "Factors of V and of the epilogue.",
        ),
        "scale argument ignored": Cause(
            "Right with the default scale, wrong with any other.",
            SCALE,
            "A scale worked out inside the kernel instead of the argument.",
        ),
        "scale of the padded head_dim": Cause(
            "Right where head_dim is a multiple of the padding; else as with a scale that is too small.",
            SCALE,
            "Is the default scale made before head_dim is padded?",
        ),
        "scale of the model width": Cause(
            "Right with one head; with more, weights are too even.",
            SCALE,
            "The default scale is made from one head's dimension, not from heads · head_dim.",
        ),
        "scale of head_dim_v": Cause(
            "Right unless head_dim_v differs from head_dim.",
            SCALE,
            "The head dim the scale is made from: Q's and K's, not V's (nor the padded one).",
        ),
    },
}
