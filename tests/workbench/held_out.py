"""Held-out kernels: what ``attnworks diagnose`` is measured on. Wrong ones with one fault each, some with a fault that
no list would have, and right ones.

They were written without sight of diagnose's rules or of its mutants, and must stay so: neither side is to be changed
to suit the other. ``causes`` are the judge's own words; whoever measures maps diagnose's words to them, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.held_out_kernels import backward, blocked, caches, eager, precision, right

CAUSES = {
    # forward
    "scale missing": "scores are not multiplied by the scale",
    "scale twice": "scores are multiplied by the scale twice",
    "scale argument ignored": "the scale the caller gives is not used",
    "scale from the wrong dimension": "1/sqrt of another dimension than Q's head dim",
    "causal hides the diagonal": "causal is off by one: the query's own key is hidden",
    "causal shows the next key": "causal is off by one: one key ahead is visible",
    "causal top-left": "causal counts from the first query and key where it must count from the last",
    "causal origin wrong": "causal counts from a length that is not the sequence's own",
    "causal ignored": "hidden keys ahead are visible, for all problems or for some",
    "causal loop ends early": "visible tiles at the diagonal are skipped",
    "window off by one": "a window shows one key too few or too many",
    "window left end ignored": "keys before the window are visible",
    "window right end ignored": "keys behind the window are visible",
    "window top-left": "a window counts from the first query and key",
    "mask inverted": "what a boolean mask shows is hidden and the other way round",
    "mask or bias broadcast wrong": "a mask or bias of one sequence or head is used for others",
    "bias scaled": "a bias is multiplied by the scale",
    "rows without keys": "a row without visible keys is not 0 (NaN, or the mean of V)",
    "LSE of rows without keys": "its LSE is not -inf",
    "accumulator not rescaled": "the accumulator keeps an old maximum when it rises",
    "sum not rescaled": "the running sum keeps an old maximum when it rises",
    "not normalised": "the output is not divided by the sum",
    "softmax over the wrong axis": "the softmax, or its sum, runs over queries",
    "maximum not subtracted": "exponentials overflow",
    "finite initial maximum": "the running maximum starts at a number that real scores lie below",
    "tail not masked": "padded or stale keys past the end take part",
    "tail dropped": "the keys past the last whole tile or split are left out",
    "last query tile dropped": "the rows past the last whole tile are not computed",
    "wrong GQA head map": "query heads read another KV head than their group's",
    "K and V of different heads": "in a group, K and V come from different KV heads",
    "K and V swapped": "K is used as V and V as K",
    "strides ignored": "memory is read as if contiguous",
    "writes into an input": "a tensor of the caller's is changed",
    "NaN swallowed": "NaN in a visible input does not reach the output",
    "LSE in base 2": "the LSE, or a part of it, is in base 2",
    "LSE without the maximum": "the LSE is the logarithm of the running sum alone",
    "LSE without the sink": "the sink is in the output but not in the LSE",
    "low-precision accumulation": "sums or accumulators are kept in a 16-bit format",
    "rounded too early": "scores or probabilities are rounded more coarsely than the input dtype asks for",
    "softcap missing": "the softcap is not applied",
    "softcap in the wrong place": "the softcap comes before the scale or after the mask",
    "ALiBi sign": "ALiBi favours keys that it should not: it is added, or distances keep their sign",
    "ALiBi origin": "ALiBi's distances count from the first query and key",
    "sink ignored": "the sink is not used",
    "sink scaled": "the sink's logit is multiplied by the scale",
    "sink left out of the maximum": "a large sink overflows",
    "splits merged without LSE": "partial results are merged by a mean or by sizes",
    "merge of empty splits": "merging partial results without keys gives NaN",
    "race": "results differ from run to run",
    # packed sequences and caches
    "sequences mixed": "packed queries see keys of other sequences",
    "key offsets wrong": "a packed sequence's keys are read from another's offset",
    "cache lengths ignored": "slots past the cache's length are read",
    "length off by one": "the newest key of the cache is not read",
    "wrong page": "a page of a sequence is read from a place that the table does not name for it",
    "new keys not read": "appended keys are not attended to",
    "cache scale dropped": "a scale of a quantised cache is not used",
    # backward
    "delta missing": "delta is left out of dS",
    "delta wrong": "delta is not each row's own",
    "dQ unscaled": "dQ lacks the scale",
    "dK unscaled": "dK lacks the scale",
    "dK, dV of one query head": "dK and dV lack query heads of the group",
    "dV not normalised": "dV comes from weights that are not divided by the sum",
    "mask missing in backward": "P is recomputed without the mask",
    "causal top-left in backward": "P is recomputed with the mask's wrong origin",
    "dQ misses tiles": "dQ is not summed over all tiles of keys",
    "softcap's derivative missing": "dS lacks 1 - tanh²",
    "LSE cotangent ignored": "gradients through the LSE are dropped",
    "dBias scaled": "the bias's gradient is multiplied by the scale",
}
"""Each cause's key and what it means."""


@dataclass(frozen=True)
class HeldOut:
    """One kernel. ``name``: its fault in a sentence; ``convention``: how it is called, a name of the workbench's
    conventions; ``cause``: a key of ``CAUSES``, None for a right kernel and for faults that must not be named;
    ``right``: whether it is right."""

    name: str
    function: Callable[..., Any]
    convention: str
    cause: str | None
    right: bool = False


def _held_out(function: Callable[..., Any], convention: str, cause: str | None, right: bool = False) -> HeldOut:
    return HeldOut((function.__doc__ or "").strip(), function, convention, cause, right)


SUBJECTS: list[HeldOut] = [
    # The whole matrix at once.
    _held_out(eager.no_scale, "sdpa", "scale missing"),
    _held_out(eager.own_scale, "sdpa", "scale argument ignored"),
    _held_out(eager.scaled_q_and_k, "sdpa", "scale twice"),
    _held_out(eager.scale_of_v, "sdpa", "scale from the wrong dimension"),
    _held_out(eager.scale_of_padded_dim, "sdpa", "scale from the wrong dimension"),
    _held_out(eager.hides_itself, "sdpa", "causal hides the diagonal"),
    _held_out(eager.sees_the_next, "sdpa", "causal shows the next key"),
    _held_out(eager.causal_not_in_groups, "sdpa", "causal ignored"),
    _held_out(eager.softmax_over_queries, "sdpa", "softmax over the wrong axis"),
    _held_out(eager.sum_over_queries, "sdpa", "softmax over the wrong axis"),
    _held_out(eager.no_maximum, "sdpa", "maximum not subtracted"),
    _held_out(eager.empty_rows_nan, "sdpa", "rows without keys"),
    _held_out(eager.empty_rows_mean, "sdpa", "rows without keys"),
    _held_out(eager.true_hides, "sdpa", "mask inverted"),
    _held_out(eager.bias_scaled, "sdpa", "bias scaled"),
    _held_out(eager.bias_of_first_batch, "sdpa", "mask or bias broadcast wrong"),
    _held_out(eager.bias_of_first_head, "sdpa", "mask or bias broadcast wrong"),
    _held_out(eager.rounded_scores, "sdpa", "rounded too early"),
    _held_out(eager.cleans_nan, "sdpa", "NaN swallowed"),
    _held_out(eager.groups_tiled, "sdpa", "wrong GQA head map"),
    _held_out(eager.v_of_another_head, "sdpa", "K and V of different heads"),
    _held_out(eager.swapped, "sdpa", "K and V swapped"),
    _held_out(eager.as_if_contiguous, "sdpa", "strides ignored"),
    _held_out(eager.scales_in_place, "sdpa", "writes into an input"),
    _held_out(eager.mask_in_place, "sdpa", "writes into an input"),
    # Tile by tile.
    _held_out(blocked.acc_not_rescaled, "flash", "accumulator not rescaled"),
    _held_out(blocked.acc_rescaled_before_last_only, "flash", "accumulator not rescaled"),
    _held_out(blocked.sum_not_rescaled, "flash", "sum not rescaled"),
    _held_out(blocked.not_normalised, "flash", "not normalised"),
    _held_out(blocked.starts_at_zero, "flash", "finite initial maximum"),
    _held_out(blocked.starts_at_minus_5000, "flash", "finite initial maximum"),
    _held_out(blocked.padding_scores_zero, "flash", "tail not masked"),
    _held_out(blocked.whole_tiles_only, "flash", "tail dropped"),
    _held_out(blocked.last_rows_not_written, "flash", "last query tile dropped"),
    _held_out(blocked.causal_top_left, "flash", "causal top-left"),
    _held_out(blocked.causal_ends_a_tile_early, "flash", "causal loop ends early"),
    _held_out(blocked.causal_unread, "flash", "causal ignored"),
    _held_out(blocked.causal_left_out_of_unequal, "flash", "causal ignored"),
    _held_out(blocked.window_short, "flash", "window off by one"),
    _held_out(blocked.window_long, "flash", "window off by one"),
    _held_out(blocked.window_without_left, "flash", "window left end ignored"),
    _held_out(blocked.window_without_right, "flash", "window right end ignored"),
    _held_out(blocked.window_top_left, "flash", "window top-left"),
    _held_out(blocked.softcap_unread, "flash", "softcap missing"),
    _held_out(blocked.softcap_first, "flash", "softcap in the wrong place"),
    _held_out(blocked.softcap_last, "flash", "softcap in the wrong place"),
    _held_out(blocked.alibi_plus, "flash", "ALiBi sign"),
    _held_out(blocked.alibi_signed, "flash", "ALiBi sign"),
    _held_out(blocked.alibi_top_left, "flash", "ALiBi origin"),
    _held_out(blocked.group_size_for_heads, "flash", "wrong GQA head map"),
    _held_out(blocked.lost_update, "flash", "race"),
    # LSE, precision, sinks.
    _held_out(precision.lse_base_2, "attnworks", "LSE in base 2"),
    _held_out(precision.lse_half_converted, "attnworks", "LSE in base 2"),
    _held_out(precision.lse_of_the_sum_only, "attnworks", "LSE without the maximum"),
    _held_out(precision.lse_of_empty_rows, "attnworks", "LSE of rows without keys"),
    _held_out(precision.acc_in_half, "attnworks", "low-precision accumulation"),
    _held_out(precision.sum_in_half, "attnworks", "low-precision accumulation"),
    _held_out(precision.products_in_half, "attnworks", "low-precision accumulation"),
    _held_out(precision.probs_in_e5m2, "attnworks", "rounded too early"),
    _held_out(precision.probs_in_bf16, "attnworks", "rounded too early"),
    _held_out(precision.sink_unread, "attnworks", "sink ignored"),
    _held_out(precision.sink_scaled, "attnworks", "sink scaled"),
    _held_out(precision.sink_after_the_maximum, "attnworks", "sink left out of the maximum"),
    _held_out(precision.sink_not_in_lse, "attnworks", "LSE without the sink"),
    # Packed sequences, caches, splits.
    _held_out(caches.sequences_mixed, "flash_varlen", "sequences mixed"),
    _held_out(caches.longest_for_all, "flash_varlen", "sequences mixed"),
    _held_out(caches.keys_by_query_offsets, "flash_varlen", "key offsets wrong"),
    _held_out(caches.varlen_top_left, "flash_varlen", "causal top-left"),
    _held_out(caches.shift_of_the_longest, "flash_varlen", "causal origin wrong"),
    _held_out(caches.whole_capacity, "flash_kvcache", "cache lengths ignored"),
    _held_out(caches.length_minus_one, "flash_kvcache", "length off by one"),
    _held_out(caches.table_of_first, "flash_kvcache", "wrong page"),
    _held_out(caches.stale_last_page, "flash_kvcache", "wrong page"),
    _held_out(caches.pages_in_order, "flash_kvcache", "wrong page"),
    _held_out(caches.tail_weighted_zero, "flash_kvcache", "tail not masked"),
    _held_out(caches.causal_before_append, "flash_kvcache", "causal origin wrong"),
    _held_out(caches.new_keys_unread, "flash_kvcache", "new keys not read"),
    _held_out(caches.cache_unscaled, "attnworks_decode", "cache scale dropped"),
    _held_out(caches.lengths_of_first, "attnworks_decode", "causal origin wrong"),
    _held_out(caches.splits_averaged, "flash", "splits merged without LSE"),
    _held_out(caches.splits_by_size, "flash", "splits merged without LSE"),
    _held_out(caches.rest_after_splits_dropped, "flash", "tail dropped"),
    _held_out(caches.first_split_empty_nan, "flash", "merge of empty splits"),
    _held_out(caches.merged_before_written, "flash", "race"),
    # Backward.
    _held_out(backward.constant_denominator, "sdpa", "delta missing"),
    _held_out(backward.delta_of_the_mean, "sdpa", "delta wrong"),
    _held_out(backward.dq_unscaled, "flash", "dQ unscaled"),
    _held_out(backward.dk_unscaled, "flash", "dK unscaled"),
    _held_out(backward.one_head_of_the_group, "flash", "dK, dV of one query head"),
    _held_out(backward.mask_missing_backward, "flash", "mask missing in backward"),
    _held_out(backward.backward_top_left, "flash", "causal top-left in backward"),
    _held_out(backward.dq_without_last_tile, "flash", "dQ misses tiles"),
    _held_out(backward.dq_of_last_tile, "flash", "dQ misses tiles"),
    _held_out(backward.lse_cotangent_dropped, "flash", "LSE cotangent ignored"),
    _held_out(backward.cap_not_differentiated, "flash", "softcap's derivative missing"),
    _held_out(backward.dv_not_normalised, "attnworks", "dV not normalised"),
    _held_out(backward.dbias_scaled, "attnworks", "dBias scaled"),
    # Nothing to be named.
    _held_out(right.scale_and_causal, "flash", None),
    _held_out(right.heads_and_sum, "flash", None),
    _held_out(right.some_keys_twice, "flash", None),
    _held_out(right.channels_rotated, "flash", None),
    _held_out(right.smoothed_scores, "flash", None),
    _held_out(right.eager, "sdpa", None, right=True),
    _held_out(right.blocked, "flash", None, right=True),
    _held_out(right.split, "flash", None, right=True),
    _held_out(right.packed, "flash_varlen", None, right=True),
    _held_out(right.cached, "flash_kvcache", None, right=True),
    _held_out(right.own_backward, "attnworks", None, right=True),
    _held_out(right.base_2, "attnworks", None, right=True),
]
