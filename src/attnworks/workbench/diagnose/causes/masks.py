"""Causes in masks, and in the LSE."""

from __future__ import annotations

from attnworks.workbench.diagnose.causes.cause import CAUSAL, EMPTY, LSE, MASK, WINDOW, Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    "Masks": {
        "causal hides itself": Cause(
            "Causal: every row misses its own key; the first row is 0 or NaN.", CAUSAL, "< for ≤ in the mask."
        ),
        "causal shows the next": Cause(
            "Causal: every row but the last sees one key of the future.", CAUSAL, "An offset of one in the mask."
        ),
        "causal further by a number": Cause(
            "Causal: each row sees some keys too many or too few, always as many.",
            CAUSAL,
            "What is added to the shift: appended keys, padding, a tile.",
        ),
        "causal ignored": Cause(
            "Causal: as without a mask; right only in the last row.",
            CAUSAL,
            "Is the flag passed on, and the mask applied in the diagonal tiles?",
        ),
        "causal upside down": Cause(
            "Causal: rows see the future and not the past.", CAUSAL, "≥ for ≤; queries and keys exchanged in the mask."
        ),
        "diagonal tile skipped": Cause(
            "Causal: each row misses its latest keys, those in the tile that holds the diagonal.",
            CAUSAL,
            "The KV loop's end: ceil((last row + shift + 1) / tile_kv) tiles, not floor of the first row's.",
        ),
        "causal before the append": Cause(
            "Causal with appended keys: each query misses as many of the latest keys as were appended.",
            CAUSAL,
            "seq_kv in the shift is the cache's length after the append.",
        ),
        "causal from other lengths": Cause(
            "Packed sequences or a cache, causal: right for one sequence alone, or where all are alike; the diagonal "
            "is another sequence's, the longest one's, or the whole pack's.",
            CAUSAL,
            "seq_q and seq_kv in the shift are the sequence's own: not max_seqlen, not totals, not capacity.",
        ),
        "causal by tile": Cause(
            "Causal: rows see keys of the future up to the end of their tile; the last row of each tile is right.",
            CAUSAL,
            "Whole tiles are skipped, but the diagonal tile has no mask of its own.",
        ),
        "aligned top-left": Cause(
            "Causal or window: right only where seq_q = seq_kv.",
            CAUSAL,
            "The offset seq_kv - seq_q is missing. (PyTorch's is_causal is top-left by definition.)",
        ),
        "aligned bottom-right": Cause(
            "Causal from the top left (PyTorch's is_causal): right only where seq_q = seq_kv.",
            "top-left: query i sees key j where j ≤ i",
            "The offset seq_kv - seq_q, which this alignment does not have.",
        ),
        "causal shift of the wrong sign": Cause(
            "Causal or window: right only where seq_q = seq_kv.",
            CAUSAL,
            "seq_kv - seq_q, not seq_q - seq_kv.",
        ),
        "packed rows in the mask": Cause(
            "Causal or window: right unless heads are grouped.",
            CAUSAL,
            "Rows of a group packed into a tile: the query is row // group, or row % seq_q, and so in the shift.",
        ),
        "numbered within their tile": Cause(
            "Masks and ALiBi: right in the first tile.",
            "i and j count from the sequence's first query and key",
            "tile · tile_kv + lane, for keys and rows, wherever a number is compared.",
        ),
        "moved tile numbered as unmoved": Cause(
            "Masks and ALiBi: the last rows see keys of the future; right where rows fill whole tiles.",
            "i and j count from the sequence's first query and key",
            "A last tile that is moved back so that it ends with the rows: its number is where it was moved to.",
        ),
        "masked in one tile only": Cause(
            "Masks: right on one tile of keys; on more, hidden keys of the other tiles take part.",
            MASK,
            "Which tiles go through the loop that masks, and whether only the last one does.",
        ),
        "keys shown against the mask": Cause(
            "Causal, windows, masks: one key takes part wherever it is hidden: the first, a row's own, the last.",
            MASK,
            "Exceptions: a first key that stays, a diagonal that is there so that no row is empty.",
        ),
        "window one short": Cause("A window misses its outermost key.", WINDOW, "< for ≤ at the window's end."),
        "window one long": Cause("A window shows one key too many.", WINDOW, "Off by one at the window's end."),
        "window one long on the right": Cause(
            "A window shows one key too many ahead.", WINDOW, "Is the right end inclusive of right, and no more?"
        ),
        "window sides exchanged": Cause(
            "Right where the window is as long on both sides.",
            WINDOW,
            "The order of left and right in the call.",
        ),
        "window without left end": Cause(
            "A window shows all of the past.", WINDOW, "The left bound, also in the loop's first tile."
        ),
        "window without right end": Cause(
            "A window shows all of the future.", WINDOW, "The right bound where it is not causal."
        ),
        "window ignored": Cause(
            "A window: as without.",
            WINDOW,
            "Is it passed on, for every path?",
        ),
        "window of another size": Cause(
            "A window is far too short or too long.",
            WINDOW,
            "Sizes beside self: no halves, no totals.",
        ),
        "window size 0 taken for none": Cause(
            "A window with a size of 0, which is the row's own key, is open on that side.",
            WINDOW,
            "`if left:` or `left > 0` for `left is not None`, `left >= 0`.",
        ),
        "window size held to a length": Cause(
            "A window longer than the sequence is cut short: right unless there are more queries than keys, or more "
            "keys than queries.",
            WINDOW,
            "min(right, seq_kv), min(left, seq_q): the row's place i' may lie before the first key.",
        ),
        "open window end taken for a number": Cause(
            "A window with one open end ends there at the key before or behind the row's own.",
            WINDOW,
            "-1 (or None, or 0) is tested for both ends together, and one that is open goes into the comparison.",
        ),
        "window by tile": Cause(
            "A window shows older keys, down to the start of their tile.",
            WINDOW,
            "The first tile of the loop needs a mask for the window's left end.",
        ),
        "one window for all queries": Cause(
            "A window: right for one row, or for one of each tile.",
            WINDOW,
            "The left end is each row's own, not the block's.",
        ),
        "one of causal and window dropped": Cause(
            "Causal and a window together: one of them is not there.",
            "a key must be shown by both",
            "Branches: if causal … elif window …",
        ),
        "masks joined by or": Cause(
            "Two masks in a call: keys that one of them hides take part.",
            MASK,
            "Masks are joined by and: a key is seen where all of them show it.",
        ),
        "window's last tile skipped": Cause(
            "A window: rows miss their latest keys, those in the last tile that their block needs.",
            WINDOW,
            "The loop's end: the tile of the last row's last key, rounded up.",
        ),
        "window's first tile skipped": Cause(
            "A window: the oldest keys of a block of rows are missing where the block's first one is inside a tile.",
            WINDOW,
            "The loop's first tile: the oldest key of the block's first row, divided by the tile and rounded down.",
        ),
        "mask or bias at another address": Cause(
            "A mask or bias as a tensor: right on the first tile of keys, or with as many queries as keys.",
            "mask[b, h, i, j] at i · its own row stride + j",
            "Does its pointer go on with K's from tile to tile, by a row stride that is the tensor's own?",
        ),
        "mask or bias transposed": Cause(
            "A mask or bias as a tensor: right where it is symmetric.",
            "mask[b, h, i, j], i the query",
            "The order of its last two strides.",
        ),
        "mask of head 0": Cause(
            "A mask with heads or sequences: those of another one.",
            "mask[b, h, i, j]",
            "The mask's strides of batch and heads (0, lost or exchanged).",
        ),
        "visible tiles of a mask skipped": Cause(
            "Masks: some rows miss keys that they see, whole tiles of them.",
            "a tile may be skipped if no row of it sees any of its keys",
            "What is asked before a tile is skipped: all of its rows, keys and heads, or the first alone.",
        ),
        "boolean mask inverted": Cause(
            "A boolean mask: exactly the hidden keys are seen.",
            "True is visible (PyTorch's SDPA), where others have True for hidden",
            "The meaning of True.",
        ),
        "boolean mask ignored": Cause(
            "A boolean mask: as without it.", MASK, "Is the mask's pointer read? Added as numbers (0 or 1) instead?"
        ),
        "boolean mask added as numbers": Cause(
            "A boolean mask hides nothing; shown keys gain a factor of e.",
            MASK,
            "S + mask wants 0 and -inf, not 0 and 1.",
        ),
        "masked after softmax": Cause(
            "Masked rows are too small by a factor of their own; LSE counts hidden keys.",
            MASK,
            "P is set to 0 after the sum was taken: mask S, before the maximum and the sum.",
        ),
        "hidden scores are 0": Cause(
            "With any mask: hidden keys count as if they scored 0.",
            MASK,
            "S multiplied by the mask, or other=0 in a masked load of scores.",
        ),
        "hidden scores are -10000": Cause(
            "Right but for rows without keys (a mean of V, not 0) and very negative scores.",
            MASK,
            "A finite stand-in for -inf: with very negative scores hidden keys come back.",
        ),
        "empty rows give the mean": Cause(
            "Rows without keys give the mean of V instead of 0, and a finite LSE.",
            EMPTY,
            "A finite stand-in (-1e9, finfo.min) cancels in S - m: test whether the row saw a key.",
        ),
        "empty rows hold other rows": Cause(
            "Rows without keys hold what was computed before.",
            EMPTY,
            "Accumulators that the first tile of keys clears: without one nobody does.",
        ),
        "empty rows give NaN": Cause(
            "NaN exactly in rows without keys.", EMPTY, "0/0 in the last division: guard l = 0."
        ),
        "hidden tiles give NaN": Cause(
            "NaN in rows whose first tile is hidden altogether, even if later keys are seen.",
            EMPTY,
            "exp(-inf - (-inf)): use 0 for the maximum while it is -inf.",
        ),
        "finite lse of empty rows": Cause(
            "Rows without keys: the output is right, the LSE is finite; merging goes wrong.",
            EMPTY,
            "The stand-in for -inf escapes through the LSE.",
        ),
    },
    "LSE": {
        "lse in base 2": Cause(
            "LSE too large by a factor of 1.44 = 1/ln 2.", LSE, "m and log2 l must both be times ln 2."
        ),
        "lse not written": Cause("LSE is 0 (or what lay in memory).", LSE, "The store, its mask and its strides."),
        "lse of another row": Cause(
            "Output right; the LSE holds the right numbers in other places.",
            "LSE (batch, heads, rows); packed (heads, rows)",
            "The strides of the store, and a reshape where a transposition belongs.",
        ),
        "lse of one tile": Cause(
            "Output right; from two tiles or splits of keys on the LSE is too small.",
            LSE,
            "Is it stored by the last partial result, and from the sum of all?",
        ),
        "lse of another maximum": Cause(
            "Output right; the LSE is off by what the maximum rises between tiles, too large or too small.",
            LSE,
            "m and l must belong together: where l follows the maximum late (or not), m is the one that l follows.",
        ),
        "lse of shifted scores": Cause(
            "Output right; the LSE of each row is off by a number of its own: something was added to all its scores.",
            "LSE = log Σ exp S, of S itself",
            "What the softmax does not feel: K less its mean or first row, ALiBi without the query's number.",
        ),
        "lse without its logarithm": Cause(
            "Output right; the LSE is the sum, or the maximum plus the sum.",
            LSE,
            "log l.",
        ),
        "lse of the wrong sign": Cause(
            "Output right; the LSE has the wrong sign.",
            LSE,
            "-m - log l, as some save it for backward.",
        ),
        "lse scaled": Cause(
            "Output right; the LSE is off by the scale.",
            LSE,
            "m and log l are in the units of the scaled scores: no scale any more.",
        ),
        "lse is the maximum": Cause(
            "Output right, LSE too small by log of the sum.",
            LSE,
            "Is log l added when it is stored?",
        ),
        "lse in low precision": Cause(
            "Output right, errors of 16 bits in the LSE; large ones in gradients.",
            "LSE in fp32",
            "The dtype of the LSE's buffer.",
        ),
        "lse without the maximum": Cause("LSE is log l alone.", LSE, "The maximum is missing in m + log l."),
    },
}
