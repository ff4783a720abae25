"""Causes in where a kernel reads and writes: heads, sequences, caches; and what comes and goes."""

from __future__ import annotations

from attnworks.workbench.diagnose.causes.cause import GROUP, LENGTHS, PAGES, Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    "Heads, sequences, memory": {
        "KV head by remainder": Cause(
            "Grouped heads: wrong unless heads_kv is 1 or heads_q; first head right.",
            GROUP,
            "h % heads_kv for h // group; repeat for repeat_interleave.",
        ),
        "KV head 0 for all": Cause(
            "Only query heads of KV head 0 are right.", GROUP, "The head index or stride of K and V."
        ),
        "K and V heads differ": Cause(
            "Wrong unless there is one head: K's and V's heads do not belong together.",
            GROUP,
            "K's and V's head offsets: each its own stride, one index.",
        ),
        "heads of the output exchanged": Cause(
            "Some heads hold another head's output; LSE right.",
            "O[b, h] from Q[b, h]",
            "The head that the output is stored at; permutations after packing groups.",
        ),
        "rows of the output exchanged": Cause(
            "Rows hold other rows' outputs; LSE right.",
            "O[b, h, i] from Q[b, h, i]",
            "The row number at the store; the order of the blocks.",
        ),
        "Q of another place": Cause(
            "Each row is right for another query: of a neighbour, a head, a sequence, or the first tile.",
            "S[b, h, i] from Q[b, h, i]",
            "The row, head and batch offsets of Q's load.",
        ),
        "heads left out": Cause(
            "Some heads are 0 or hold what was there.",
            "every head is computed",
            "The grid's extent; heads divided by a number that is not theirs.",
        ),
        "layouts confused": Cause(
            "Wrong unless there is one head or one row: (heads, rows) is read as (rows, heads).",
            "address = base + Σ index · stride",
            "view or reshape where transpose belongs, of Q, K, V or the output.",
        ),
        "batch and heads mixed": Cause(
            "A batch: right for one sequence or one head.",
            "program = b · heads_q + h, taken apart as it was made",
            "// and % of the program's number, and by which count of heads.",
        ),
        "K reshaped instead of transposed": Cause(
            "Wrong everywhere.",
            "S = Q Kᵀ",
            "view(dim, rows) for a transposition; the tile's layout in shared memory.",
        ),
        "channels in another order": Cause(
            "Wrong everywhere: Q meets other channels of K, or the output's are exchanged.",
            "S = Σ over channels Q[c] K[c]",
            "Swizzles, interleaved halves (rotary), the layout of a packed operand.",
        ),
        "channels left out": Cause(
            "Wrong from a head dim on, or where it is no multiple of a chunk.",
            "S = scale · Σ over all channels of Q and K",
            "Loops over chunks of the head dim; how it is padded.",
        ),
        "channels of the next row": Cause(
            "Wrong where head_dim is no multiple of a chunk.",
            "S = scale · Σ over head_dim channels",
            "The mask of the load beyond head_dim: what lies there is the next row or head.",
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
        "sequences left out": Cause(
            "A batch: some sequences are 0 or hold what was there.",
            "every sequence is computed",
            "The grid's extent; early exits.",
        ),
        "rows end with the keys": Cause(
            "More queries than keys: rows past the number of keys are 0.",
            "every row is computed",
            "seq_q for seq_kv in the grid or the store.",
        ),
        "sequences exchanged": Cause(
            "A batch: each output is right, for another sequence.",
            "O[b] belongs to q[b]",
            "An order of work (longest first) that results are not put back from; the program's number at the store.",
        ),
        "stores reach the next sequence": Cause(
            "Packed sequences: the first rows of a sequence are 0 or another's, as many as the one before lacks to a "
            "whole tile; now and then right, by who stores last.",
            "rows cu_seqlens_q[b] ≤ i < cu_seqlens_q[b + 1] are stored, and no others",
            "The mask of the store; buffers of padded tiles that are copied whole.",
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
        "query offsets from keys": Cause(
            "Packed sequences: right where queries and keys are equally long.",
            "queries by cu_seqlens_q, keys by cu_seqlens_kv",
            "Which offsets Q is read by.",
        ),
        "output offsets from keys": Cause(
            "Packed sequences: right where queries and keys begin at the same rows, else outputs lie elsewhere.",
            "rows cu_seqlens_q[b] … cu_seqlens_q[b + 1] of the output are sequence b's",
            "Which of the two offsets the epilogue has.",
        ),
        "rows past the end unwritten": Cause(
            "Packed sequences: rows past cu_seqlens[-1] hold whatever lay in memory.",
            "rows past cu_seqlens[-1] are 0",
            "empty() for zeros() for the output.",
        ),
    },
    "Caches": {
        "cache lengths ignored": Cause(
            "Decode: keys behind the end count (NaN where they are NaN).", LENGTHS, "Is kv_lens read?"
        ),
        "one slot too many": Cause(
            "Decode: what lies behind each sequence's end takes part: NaN, or the key that was there before.",
            LENGTHS,
            "< for <=; kv_lens is a number of keys, not the index of the last.",
        ),
        "longest length for all": Cause(
            "Decode: right for the longest sequence only.", LENGTHS, "kv_lens[b] for max(kv_lens)."
        ),
        "tail weighted by 0": Cause(
            "Decode: NaN where NaN lies behind the end, else right.",
            LENGTHS,
            "0 · NaN is NaN: mask the load of V, not only P.",
        ),
        "pages in order": Cause("Pages: right for one page of sequence 0.", PAGES, "Is the page table read?"),
        "page repeated": Cause("Pages: the last page is another.", PAGES, "The index into the table in the last tile."),
        "stale page": Cause(
            "Pages: the newest keys are old ones, or another sequence's.",
            PAGES,
            "The table's last entry is out of date.",
        ),
        "pages of K and V differ": Cause(
            "Pages: K and V come from different pages.",
            PAGES,
            "One page number for both, looked up for the same tile.",
        ),
        "one page for a tile": Cause(
            "Right where a tile of keys lies in one page, or pages follow each other in memory.",
            PAGES,
            "The table is asked once for a tile; it must be asked for each page that the tile reaches into.",
        ),
        "pages of another size": Cause(
            "Pages: right for one page size.",
            PAGES,
            "A page size that is written as a number, or another level's.",
        ),
        "full last page left out": Cause(
            "Pages: wrong for a sequence that fills its last page.",
            PAGES,
            "seq_kv % page_size is 0 for a full page: the last page holds (seq_kv - 1) % page_size + 1 keys.",
        ),
        "page stride from sizes": Cause(
            "Pages: right where pages lie close together.", PAGES, "The page stride is the tensor's own."
        ),
        "new keys not appended": Cause(
            "Decode with new keys: they do not count.",
            "cache[kv_lens[b] + n] = k_new[b, n] before reading",
            "The order.",
        ),
        "new keys for new values": Cause(
            "Appended keys stand where appended values belong, or the other way round; what was in the cache is right.",
            "V[length + n] = v_new[n], K[length + n] = k_new[n]",
            "The append's second store, copied from its first.",
        ),
        "new keys in the wrong slot": Cause(
            "Decode with new keys: the newest old key is gone, or a slot that nobody wrote is read.",
            "cache[kv_lens[b] + n] = k_new[b, n] before reading",
            "Is the first new key put at kv_lens[b], in the page that the table names for that slot?",
        ),
        "new keys of another sequence": Cause(
            "Decode with new keys: right for one sequence.",
            "cache[b, kv_lens[b] + n] = k_new[b, n]",
            "The batch index of k_new and v_new.",
        ),
        "new keys in another order": Cause(
            "Decode with several new keys: their order is turned round.",
            "cache[b, kv_lens[b] + n] = k_new[b, n]",
            "The slot of each.",
        ),
        "k_scale dropped": Cause(
            "8-bit cache: weights wrong.",
            "K = k_scale · stored",
            "The scale of each KV head: there, once, K's own, by the KV head's number.",
        ),
        "v_scale dropped": Cause(
            "8-bit cache: off by a constant factor.", "V = v_scale · stored", "V's own scale, once, at the end."
        ),
        "scales of K and V exchanged": Cause(
            "8-bit cache: off, unless both scales are alike.",
            "K = k_scale · stored, V = v_scale · stored",
            "The order of the arguments; copy and paste.",
        ),
        "cache scale twice": Cause(
            "8-bit cache: a scale counts twice.",
            "K = k_scale · stored, V = v_scale · stored",
            "Folded into Q or the output, and applied at the load.",
        ),
        "cache scale divided by": Cause(
            "8-bit cache: far off.",
            "K = k_scale · stored, V = v_scale · stored",
            "A scale for reading, not for writing: multiply.",
        ),
        "cache scale of another head": Cause(
            "8-bit cache: right for one KV head.",
            "K = k_scale[KV head] · stored",
            "The index: the KV head's number, not the query head's.",
        ),
        "8-bit cache in another format": Cause(
            "fp8 cache: far off by powers of 2, int8 right.",
            "bytes are read as the cache's dtype",
            "e4m3fn or e4m3fnuz (AMD's, half as large), e4m3 or e5m2: what a compiled kernel takes bytes for.",
        ),
        "8-bit cache without its sign": Cause(
            "int8 cache: far off wherever a stored number is negative; fp8 right.",
            "stored numbers are -127 … 127",
            "char has no sign on some platforms: signed char, or int8 loads that extend the sign.",
        ),
        "writes into q": Cause(
            "An input is changed by the call.", "q, k and v are read only", "In-place operations on a view."
        ),
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
