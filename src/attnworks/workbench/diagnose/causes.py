"""What each known fault looks like, the line of maths it breaks, and where to look: the experience behind ``diagnose``.

``CAUSES`` has an entry for every fault of ``mutants.FAULTS``; docs/symptoms.md is this table (``symptoms.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """``symptom``: what a user sees; ``line``: the line of maths that is broken, as it must be; ``look``: what to check
    in the kernel."""

    symptom: str
    line: str
    look: str


_RESCALE = "m' = max(m, rowmax S); α = exp(m - m'); l' = α l + rowsum P; O' = α O + P V"
_SCALE = "S = scale · Q Kᵀ, scale = 1/sqrt(head_dim) unless given"
_CAUSAL = "query i sees key j where j ≤ i + (seq_kv - seq_q)"
_WINDOW = "key j is seen where i' - left ≤ j ≤ i' + right, i' = i + (seq_kv - seq_q)"
_MERGE = "O = Σ exp(LSE_n - LSE) O_n, LSE = log Σ exp LSE_n over the parts n"
_EMPTY = "a row without a visible key: O = 0, LSE = -inf, gradients 0"
_LSE = "LSE = m + log l, natural logarithm"
_SINK = "l = Σ exp(S - m) + exp(sink - m), m = max(rowmax S, sink)"
_CAP = "S = cap · tanh(scale · Q Kᵀ / cap), then masks"
_ALIBI = "S = scale · Q Kᵀ - slope_h · |i + (seq_kv - seq_q) - j|"
_BIAS = "S = scale · Q Kᵀ + bias[b, h, i, j]"
_GROUP = "KV head of query head h: h // (heads_q / heads_kv)"
_PAGES = "key j lies in page page_table[b, j // page_size], at j % page_size"
_DS = "dS = P ∘ (dP - delta), delta = rowsum(dO ∘ O)"
_DQ = "dQ = scale · Σ over KV tiles of dS K"
_DK = "dK = scale · Σ over queries and the heads of the group of dSᵀ Q; dV likewise of Pᵀ dO"
_PBACK = "P = exp(S - LSE), masked as in forward"
_MASK = "S = -inf where hidden, before the softmax"
_LENGTHS = "keys j < kv_lens[b] of the sequence's own cache, and no others"

SECTIONS: dict[str, dict[str, Cause]] = {
    "The online softmax": {
        "accumulator not rescaled": Cause(
            "Right on one tile of keys; wrong on more, most where scores rise along the keys; LSE right.",
            _RESCALE,
            "Is acc multiplied by α = exp(m_old - m_new) in every tile, before P V is added?",
        ),
        "sum not rescaled": Cause(
            "Right on one tile of keys; on more each row is too small by a factor of its own; LSE wrong.",
            _RESCALE,
            "Is the running sum multiplied by the same α as the accumulator?",
        ),
        "rescaled upside down": Cause(
            "Wrong on more than one tile; Inf or NaN where the maximum rises far.",
            _RESCALE,
            "The sign in α: exp(old - new), which is at most 1, not exp(new - old).",
        ),
        "rescaled after adding": Cause(
            "Right where the maximum stands in the first tile; the latest tiles count too little where it rises.",
            _RESCALE,
            "The order: acc *= α first, then acc += P V.",
        ),
        "accumulator overwritten by each tile": Cause(
            "Right on one tile; on more the output is far too small: only the last tile's P V over the whole sum.",
            _RESCALE,
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
            _MERGE,
            "The reduction of the splits: are the partial outputs weighted by exp(LSE_n - LSE)?",
        ),
        "splits summed": Cause(
            "Right with one split; with n splits about n times too large.",
            _MERGE,
            "Partial outputs are normalised: they need the weights exp(LSE_n - LSE), not a plain sum.",
        ),
        "NaN swallowed": Cause(
            "A NaN in q, k or v comes out as a number.",
            "a NaN among the visible inputs stays NaN",
            "max() that drops NaN, nan_to_num, or 'row is empty' tested as not (m > -inf).",
        ),
    },
    "Precision": {
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
        "probs in fp8": Cause(
            "Relative errors of a few per cent everywhere, LSE right.",
            "P rounded to the input dtype, no coarser",
            "The dtype of P in the second product.",
        ),
    },
    "Scale": {
        "scale missing": Cause(
            "Wrong everywhere, weights too sharp: the output is near one row of V; LSE too large.",
            _SCALE,
            "Is S (or Q) multiplied by the scale at all? With exp2: by scale · log2 e.",
        ),
        "scale twice": Cause(
            "Wrong everywhere, weights too flat: the output is near the mean of V.",
            _SCALE,
            "Q scaled beforehand and S again; 1/head_dim for 1/sqrt(head_dim).",
        ),
        "scale argument ignored": Cause(
            "Right with the default scale, wrong with any other.",
            _SCALE,
            "A scale worked out inside the kernel instead of the argument.",
        ),
        "scale of the padded head_dim": Cause(
            "Right where head_dim is a multiple of the padding; else as with a scale that is too small.",
            _SCALE,
            "Is the default scale made before head_dim is padded?",
        ),
        "scale of head_dim_v": Cause(
            "Right unless head_dim_v differs from head_dim.",
            _SCALE,
            "The head dim the scale is made from: Q's and K's, not V's (nor the padded one).",
        ),
    },
    "Masks": {
        "causal hides itself": Cause(
            "Causal: every row misses its own key; the first row is 0 or NaN.", _CAUSAL, "< for ≤ in the mask."
        ),
        "causal shows the next": Cause(
            "Causal: every row but the last sees one key of the future.", _CAUSAL, "An offset of one in the mask."
        ),
        "causal ignored": Cause(
            "Causal: as without a mask; right only in the last row.",
            _CAUSAL,
            "Is the flag passed on, and the mask applied in the diagonal tiles?",
        ),
        "causal upside down": Cause(
            "Causal: rows see the future and not the past.", _CAUSAL, "≥ for ≤; queries and keys exchanged in the mask."
        ),
        "diagonal tile skipped": Cause(
            "Causal: each row misses its latest keys, those in the tile that holds the diagonal.",
            _CAUSAL,
            "The KV loop's end: ceil((last row + shift + 1) / tile_kv) tiles, not floor of the first row's.",
        ),
        "causal before the append": Cause(
            "Causal with appended keys: each query misses as many of the latest keys as were appended.",
            _CAUSAL,
            "seq_kv in the shift is the cache's length after the append.",
        ),
        "causal by tile": Cause(
            "Causal: rows see keys of the future up to the end of their tile; the last row of each tile is right.",
            _CAUSAL,
            "Whole tiles are skipped, but the diagonal tile has no mask of its own.",
        ),
        "aligned top-left": Cause(
            "Causal or window: right only where seq_q = seq_kv.",
            _CAUSAL,
            "The offset seq_kv - seq_q is missing. (PyTorch's is_causal is top-left by definition.)",
        ),
        "aligned bottom-right": Cause(
            "Causal from the top left (PyTorch's is_causal): right only where seq_q = seq_kv.",
            "top-left: query i sees key j where j ≤ i",
            "The offset seq_kv - seq_q, which this alignment does not have.",
        ),
        "window one short": Cause("A window misses its outermost key.", _WINDOW, "< for ≤ at the window's end."),
        "window one long": Cause("A window shows one key too many.", _WINDOW, "Off by one at the window's end."),
        "window one long on the right": Cause(
            "A window shows one key too many ahead.", _WINDOW, "Is the right end inclusive of right, and no more?"
        ),
        "window without left end": Cause(
            "A window shows all of the past.", _WINDOW, "The left bound, also in the loop's first tile."
        ),
        "window without right end": Cause(
            "A window shows all of the future.", _WINDOW, "The right bound where it is not causal."
        ),
        "mask of head 0": Cause(
            "A mask with heads: only the first head is right.",
            "mask[b, h, i, j]",
            "The mask's head stride (0 or lost).",
        ),
        "boolean mask inverted": Cause(
            "A boolean mask: exactly the hidden keys are seen.",
            "True is visible (PyTorch's SDPA), where others have True for hidden",
            "The meaning of True.",
        ),
        "boolean mask ignored": Cause(
            "A boolean mask: as without it.", _MASK, "Is the mask's pointer read? Added as numbers (0 or 1) instead?"
        ),
        "masked after softmax": Cause(
            "Masked rows are too small by a factor of their own; LSE counts hidden keys.",
            _MASK,
            "P is set to 0 after the sum was taken: mask S, before the maximum and the sum.",
        ),
        "hidden scores are 0": Cause(
            "With any mask: hidden keys count as if they scored 0.",
            _MASK,
            "S multiplied by the mask, or other=0 in a masked load of scores.",
        ),
        "hidden scores are -10000": Cause(
            "Right but for rows without keys (a mean of V, not 0) and very negative scores.",
            _MASK,
            "A finite stand-in for -inf: with very negative scores hidden keys come back.",
        ),
        "empty rows give the mean": Cause(
            "Rows without keys give the mean of V instead of 0, and a finite LSE.",
            _EMPTY,
            "A finite stand-in (-1e9, finfo.min) cancels in S - m: test whether the row saw a key.",
        ),
        "empty rows give NaN": Cause(
            "NaN exactly in rows without keys.", _EMPTY, "0/0 in the last division: guard l = 0."
        ),
        "hidden tiles give NaN": Cause(
            "NaN in rows whose first tile is hidden altogether, even if later keys are seen.",
            _EMPTY,
            "exp(-inf - (-inf)): use 0 for the maximum while it is -inf.",
        ),
        "finite lse of empty rows": Cause(
            "Rows without keys: the output is right, the LSE is finite; merging goes wrong.",
            _EMPTY,
            "The stand-in for -inf escapes through the LSE.",
        ),
    },
    "LSE": {
        "lse in base 2": Cause(
            "LSE too large by a factor of 1.44 = 1/ln 2.", _LSE, "m and log2 l must both be times ln 2."
        ),
        "lse not written": Cause("LSE is 0 (or what lay in memory).", _LSE, "The store, its mask and its strides."),
        "lse without the maximum": Cause("LSE is log l alone.", _LSE, "The maximum is missing in m + log l."),
    },
    "Sink, softcap, ALiBi, bias": {
        "sink ignored": Cause("With sinks: output too large, LSE too small.", _SINK, "exp(sink - m) missing in l."),
        "sink scaled": Cause("With sinks: as with a sink nearer 0.", _SINK, "The sink is in the units of S: no scale."),
        "sink outside the maximum": Cause(
            "Inf or NaN with a large sink.", _SINK, "m starts from the sink, or takes it in."
        ),
        "sink left out of the lse": Cause(
            "With sinks: output right, LSE too small.", _SINK, "The LSE is of the l used."
        ),
        "softcap ignored": Cause("With a softcap: as without.", _CAP, "Is the cap passed on?"),
        "softcap by exponentials": Cause(
            "With a softcap: NaN for large scores.", _CAP, "tanh from exp overflows: use tanh, or 1 - 2/(exp(2x) + 1)."
        ),
        "softcap before scale": Cause(
            "With a softcap: wrong everywhere.", _CAP, "The cap's argument is the scaled score."
        ),
        "softcap after mask": Cause(
            "Softcap with a mask: hidden keys come back as scores of -cap.", _CAP, "The order: cap first, then -inf."
        ),
        "alibi sign": Cause("ALiBi: far keys gain.", _ALIBI, "The sign of the slope."),
        "alibi distance signed": Cause(
            "ALiBi: right where causal; else keys ahead gain.", _ALIBI, "The absolute value of the distance."
        ),
        "alibi from the first key": Cause(
            "ALiBi: right where seq_q = seq_kv (or causal, where a row's shift cancels).",
            _ALIBI,
            "The origin seq_kv - seq_q.",
        ),
        "alibi of the wrong head": Cause(
            "ALiBi: heads have each other's slopes.", _ALIBI, "The index into the slopes."
        ),
        "bias of head 0": Cause("A bias: only the first head is right.", _BIAS, "The bias's head stride."),
        "bias of sequence 0": Cause("A bias: only the first sequence is right.", _BIAS, "The bias's batch stride."),
        "bias scaled": Cause("A bias: as with a smaller one.", _BIAS, "The bias is added after the scale."),
        "bias ignored": Cause("A bias: as without.", _BIAS, "Is its pointer read, for every broadcast?"),
    },
    "Heads, sequences, memory": {
        "KV head by remainder": Cause(
            "Grouped heads: wrong unless heads_kv is 1 or heads_q; first head right.",
            _GROUP,
            "h % heads_kv for h // group; repeat for repeat_interleave.",
        ),
        "KV head 0 for all": Cause(
            "Only query heads of KV head 0 are right.", _GROUP, "The head index or stride of K and V."
        ),
        "K and V heads differ": Cause(
            "Wrong unless there is one head: K's and V's heads do not belong together.",
            _GROUP,
            "K's and V's head offsets: each its own stride, one index.",
        ),
        "K and V exchanged": Cause(
            "Wrong everywhere; with K = V right.", "O = softmax(scale · Q Kᵀ) V", "The arguments' order."
        ),
        "K and V of sequence 0": Cause(
            "Only the first sequence of the batch is right.", "K[b], V[b]", "The batch index or stride of K and V."
        ),
        "strides ignored": Cause(
            "Right for contiguous tensors, wrong for views.",
            "address = base + Σ index · stride",
            "Strides worked out from sizes; a missing .contiguous().",
        ),
        "sequences not apart": Cause(
            "Packed sequences: each sees its neighbours' keys.",
            "cu_seqlens[b] ≤ j < cu_seqlens[b + 1]",
            "Both offsets.",
        ),
        "key offsets from queries": Cause(
            "Packed sequences: right where queries and keys are equally long.",
            "keys by cu_seqlens_kv, queries by cu_seqlens_q",
            "Which offsets K and V are read by.",
        ),
        "rows past the end unwritten": Cause(
            "Packed sequences: rows past cu_seqlens[-1] hold whatever lay in memory.",
            "rows past cu_seqlens[-1] are 0",
            "empty() for zeros() for the output.",
        ),
    },
    "Caches": {
        "cache lengths ignored": Cause(
            "Decode: keys behind the end count (NaN where they are NaN).", _LENGTHS, "Is kv_lens read?"
        ),
        "longest length for all": Cause(
            "Decode: right for the longest sequence only.", _LENGTHS, "kv_lens[b] for max(kv_lens)."
        ),
        "tail weighted by 0": Cause(
            "Decode: NaN where NaN lies behind the end, else right.",
            _LENGTHS,
            "0 · NaN is NaN: mask the load of V, not only P.",
        ),
        "pages in order": Cause("Pages: right for one page of sequence 0.", _PAGES, "Is the page table read?"),
        "page repeated": Cause(
            "Pages: the last page is another.", _PAGES, "The index into the table in the last tile."
        ),
        "stale page": Cause(
            "Pages: the newest keys are old ones, or another sequence's.",
            _PAGES,
            "The table's last entry is out of date.",
        ),
        "page stride from sizes": Cause(
            "Pages: right where pages lie close together.", _PAGES, "The page stride is the tensor's own."
        ),
        "new keys not appended": Cause(
            "Decode with new keys: they do not count.",
            "cache[kv_lens[b] + n] = k_new[b, n] before reading",
            "The order.",
        ),
        "k_scale dropped": Cause("8-bit cache: weights wrong.", "K = k_scale · stored", "The scale of each KV head."),
        "v_scale dropped": Cause(
            "8-bit cache: off by a constant factor.", "V = v_scale · stored", "The scale in the end."
        ),
        "writes into q": Cause(
            "An input is changed by the call.", "q, k and v are read only", "In-place operations on a view."
        ),
    },
    "Gradients": {
        "delta missing": Cause(
            "dV right, dQ and dK wrong: the softmax's denominator was held constant.",
            _DS,
            "delta = rowsum(dO ∘ O) and its place in dS.",
        ),
        "delta of the wrong sign": Cause("dV right, dQ and dK wrong.", _DS, "The sign of delta."),
        "dS without probs": Cause("dV right, dQ and dK far too large.", _DS, "The factor P."),
        "probs not normalised in backward": Cause(
            "All gradients too large by the softmax's denominator of each row.",
            _PBACK,
            "P from the saved LSE, not from the maximum alone.",
        ),
        "lse cotangent ignored": Cause(
            "Right unless the LSE takes part in the loss.", "dS = P ∘ (dP - delta + dLSE)", "delta - dLSE."
        ),
        "dq not scaled": Cause("dQ too large by 1/scale, dK and dV right.", _DQ, "The factor scale."),
        "dk not scaled": Cause(
            "dK too large by 1/scale, dQ and dV right.", _DK, "The factor scale (a scaled Q has it)."
        ),
        "dq scaled twice": Cause("dQ too small by the scale.", _DQ, "Scale in dS and again in dQ."),
        "dk scaled twice": Cause("dK too small by the scale.", _DK, "A scaled Q, and the scale again."),
        "dq overwritten by each tile": Cause(
            "dQ wrong from two tiles of keys on: only the last one counts.",
            _DQ,
            "= for +=; an atomic add that is a store.",
        ),
        "last tile missing in dq": Cause(
            "dQ lacks the last tile of keys.", _DQ, "The loop's bound; an unfinished last stage."
        ),
        "dk, dv of one query head": Cause(
            "Grouped heads: dK and dV too small, dQ right.", _DK, "The sum over the group's query heads."
        ),
        "dk, dv of the last query tile": Cause(
            "dK and dV wrong from two tiles of queries on.", _DK, "= for +=; accumulators initialised in the loop."
        ),
        "mask missing in backward": Cause(
            "Forward right, gradients wrong with a mask.", _PBACK, "The mask in the recomputed S."
        ),
        "softcap slope missing": Cause(
            "With a softcap: dV right, dQ and dK too large.", "dS ∘ (1 - tanh²)", "The slope, of the capped score."
        ),
        "bias gradient scaled": Cause("dBias off by the scale.", "dBias = dS", "dS before the scale is multiplied in."),
        "sink gradient missing": Cause("dSink is 0.", "dSink = -Σ exp(sink - LSE) · delta", "Is it returned?"),
        "empty rows leak into gradients": Cause(
            "NaN in gradients if there are rows without keys.", _PBACK, "exp(S - (-inf)): guard LSE = -inf."
        ),
        "padding scored 0 in backward": Cause(
            "NaN in dQ for very negative scores, seq_kv off the tile.",
            _PBACK,
            "exp(0 - LSE) of padding overflows: mask it.",
        ),
        "dS in fp8": Cause("dQ and dK off by a few per cent.", "dS rounded to the input dtype", "The dtype of dS."),
    },
    "What comes and goes": {
        "changes from call to call": Cause(
            "Two calls on the same inputs differ.",
            "the same inputs give the same bits",
            "A race: a missing barrier, a buffer reused too early, atomics, memory never written.",
        ),
        "batch changes the tiles": Cause(
            "A row's bits depend on the rest of the batch.",
            "for a fixed plan a row's bits depend on the row alone",
            "Tile or split sizes chosen from the batch or the longest sequence.",
        ),
    },
}

CAUSES: dict[str, Cause] = {fault: cause for section in SECTIONS.values() for fault, cause in section.items()}
