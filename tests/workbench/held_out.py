"""Held-out kernels: what ``attnworks diagnose`` is measured on. Wrong ones with one fault each, some with a fault that
no list would have, and right ones.

They were written without sight of diagnose's rules or of its mutants, and must stay so: neither side is to be changed
to suit the other. ``causes`` are the judge's own words; whoever measures maps diagnose's words to them, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.held_out_kernels import (
    backward,
    blocked,
    caches,
    eager,
    fourth,
    fourth_backward,
    fourth_caches,
    precision,
    right,
    second,
    second_backward,
    second_packed,
    third,
    third_backward,
    third_caches,
    third_dense,
    third_packed,
)
from workbench.held_out_kernels.causes import CAUSES

__all__ = ["CAUSES", "FOURTH", "SECOND", "SUBJECTS", "THIRD", "HeldOut"]


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

SECOND: list[HeldOut] = [
    # The whole matrix at once.
    _held_out(second.scale_of_model_width, "sdpa", "scale from the wrong dimension"),
    _held_out(second.hides_what_is_true, "sdpa", "mask inverted"),
    _held_out(second.mask_flattened_by_heads, "sdpa", "mask or bias broadcast wrong"),
    _held_out(second.transposed_softmax, "sdpa", "softmax over the wrong axis"),
    _held_out(second.maximum_clamped, "sdpa", "finite initial maximum"),
    _held_out(second.bias_in_the_product, "sdpa", "bias scaled"),
    _held_out(second.nan_compared_away, "sdpa", "NaN swallowed"),
    _held_out(second.v_as_if_dense, "sdpa", "strides ignored"),
    # Tiles, rows and splits.
    _held_out(second.scale_folded_twice, "flash", "scale twice"),
    _held_out(second.scale_compiled_in, "flash", "scale argument ignored"),
    _held_out(second.row_ends_before_itself, "flash", "causal hides the diagonal"),
    _held_out(second.last_key_inclusive, "flash", "causal shows the next key"),
    _held_out(second.diagonal_tile_rounded_down, "flash", "causal loop ends early"),
    _held_out(second.window_begins_at_its_tile, "flash", "window left end ignored"),
    _held_out(second.alibi_from_the_last_key, "flash", "ALiBi sign"),
    _held_out(second.second_half_not_rescaled, "flash", "accumulator not rescaled"),
    _held_out(second.lazy_rescale_forgets_the_sum, "flash", "sum not rescaled"),
    _held_out(second.one_split_is_not_divided, "flash", "not normalised"),
    _held_out(second.exponentials_in_base_2, "flash", "maximum not subtracted"),
    _held_out(second.loads_clamped, "flash", "tail not masked"),
    _held_out(second.unrolled_by_eight, "flash", "tail dropped"),
    _held_out(second.output_is_the_accumulator, "flash", "low-precision accumulation"),
    _held_out(second.scaled_q_rounded, "flash", "rounded too early"),
    _held_out(second.tree_of_means, "flash", "splits merged without LSE"),
    _held_out(second.tile_not_yet_there, "flash", "race"),
    _held_out(second.pair_unpacked_the_other_way, "flash", "K and V swapped"),
    _held_out(second.smooths_keys_in_place, "flash", "writes into an input"),
    _held_out(second.lse_of_nothing_is_plus_infinity, "flash", "LSE of rows without keys"),
    _held_out(second.lse_with_maximum_in_base_2, "flash", "LSE in base 2"),
    _held_out(second.sink_as_a_product, "flash", "sink scaled"),
    _held_out(second.sink_divides_afterwards, "flash", "LSE without the sink"),
    # Packed sequences and caches.
    _held_out(second_packed.diagonal_of_the_whole_pack, "flash_varlen", "causal origin wrong"),
    _held_out(second_packed.boundary_to_the_sequence_before, "flash_varlen", "sequences mixed"),
    _held_out(second_packed.window_open_at_its_right, "flash_varlen", "window off by one"),
    _held_out(second_packed.window_around_the_row_number, "flash_varlen", "window top-left"),
    _held_out(second_packed.whole_tiles_of_rows, "flash_varlen", "last query tile dropped"),
    _held_out(second_packed.v_heads_in_turn, "flash_varlen", "K and V of different heads"),
    _held_out(second_packed.offsets_as_if_padded, "flash_varlen", "key offsets wrong"),
    _held_out(second_packed.causal_from_the_first_slot, "flash_kvcache", "causal top-left"),
    _held_out(second_packed.several_queries_like_one, "flash_kvcache", "causal ignored"),
    _held_out(second_packed.groups_laid_out_inside_out, "flash_kvcache", "wrong GQA head map"),
    _held_out(second_packed.two_empty_splits_meet, "flash_kvcache", "merge of empty splits"),
    _held_out(second_packed.length_rounded_up_to_eight, "flash_kvcache", "cache lengths ignored"),
    _held_out(second_packed.newest_of_the_appended_unread, "flash_kvcache", "length off by one"),
    _held_out(second_packed.table_rows_without_their_spare, "flash_kvcache", "wrong page"),
    _held_out(second_packed.values_stay_quantised, "attnworks_decode", "cache scale dropped"),
    # Backward.
    _held_out(second_backward.no_delta, "flash", "delta missing"),
    _held_out(second_backward.delta_of_the_first_tile, "flash", "delta wrong"),
    _held_out(second_backward.last_head_of_the_group_stays, "flash", "dK, dV of one query head"),
    _held_out(second_backward.dv_of_exponentials, "flash", "dV not normalised"),
    _held_out(second_backward.backward_sees_everything, "flash", "mask missing in backward"),
    _held_out(second_backward.backward_diagonal_from_the_top, "flash", "causal top-left in backward"),
    _held_out(second_backward.dq_of_the_first_half, "flash", "dQ misses tiles"),
    _held_out(second_backward.cap_is_constant, "flash", "softcap's derivative missing"),
    _held_out(second_backward.dk_of_unscaled_products, "flash_varlen", "dK unscaled"),
    # Nothing to be named.
    _held_out(second.bias_not_in_base_2, "sdpa", None),
    _held_out(second.lse_with_maximum_unscaled, "flash", None),
    _held_out(second_backward.ln_2_left_in_the_gradients, "flash", None),
    _held_out(second.right_in_log_space, "sdpa", None, right=True),
    _held_out(second.right_row_by_row, "flash", None, right=True),
    _held_out(second_packed.right_tree_of_splits, "flash_kvcache", None, right=True),
    _held_out(second_backward.right_packed_in_base_2, "flash_varlen", None, right=True),
]
"""A second set, in other styles, for what was changed in sight of the first."""

THIRD: list[HeldOut] = [
    # Tile by tile.
    _held_out(third.correction_upside_down, "flash", "rescaled upside down"),
    _held_out(third.corrects_after_the_product, "flash", "rescaled after adding"),
    _held_out(third.product_begins_at_zero, "flash", "accumulator overwritten"),
    _held_out(third.votes_to_skip_the_correction, "flash", "accumulator not rescaled"),
    _held_out(third.two_warpgroups_one_sum, "flash", "sum not rescaled"),
    _held_out(third.state_begins_in_the_loop, "flash", "only the last tile"),
    _held_out(third.bounds_are_causal, "flash", "tail not masked"),
    _held_out(third.grid_of_whole_blocks, "flash", "last query tile dropped"),
    _held_out(third.diagonal_block_like_any_other, "flash", "diagonal tile not masked"),
    _held_out(third.stages_of_a_square, "flash", "causal top-left"),
    _held_out(third.window_of_so_many_tokens, "flash", "window off by one"),
    # Scores, probabilities, statistics.
    _held_out(third_dense.base_two_in_name_only, "sdpa", "exp2 without log2 e"),
    _held_out(third_dense.zeroes_probabilities, "sdpa", "mask after the softmax"),
    _held_out(third_dense.scores_times_mask, "sdpa", "hidden scores are 0"),
    _held_out(third_dense.large_negative_number, "sdpa", "finite stand-in hides"),
    _held_out(third_dense.truth_values_added, "sdpa", "mask added as numbers"),
    _held_out(third_dense.dense_or_broadcast, "sdpa", "mask or bias broadcast wrong"),
    _held_out(third_dense.nineteen_bits, "sdpa", "products in tf32"),
    _held_out(third_dense.first_bound_is_one, "sdpa", "first key dropped"),
    _held_out(third_dense.tanh_of_exponentials, "flash", "softcap by exponentials"),
    _held_out(third_dense.mask_of_the_transpose, "flash", "causal the wrong way round"),
    _held_out(third_dense.slopes_by_heads_and_batch, "flash", "ALiBi of another head"),
    _held_out(third_dense.sink_in_the_maximum_alone, "flash", "sink ignored"),
    _held_out(third_dense.offset_without_the_batch, "flash", "K and V of sequence 0"),
    _held_out(third_dense.lse_for_training_only, "flash", "LSE not written"),
    _held_out(third_dense.probabilities_in_e4m3, "flash", "rounded too early"),
    # Backward.
    _held_out(third_backward.derivative_without_probabilities, "flash", "dS without P"),
    _held_out(third_backward.inner_loop_overwrites, "flash", "dK, dV of the last rows"),
    _held_out(third_backward.store_for_an_atomic_add, "flash", "dQ misses tiles"),
    _held_out(third_backward.delta_of_some_channels, "flash", "delta wrong"),
    _held_out(third_backward.padding_with_a_probability, "flash", "padding in backward"),
    _held_out(third_backward.window_forward_only, "flash", "mask missing in backward"),
    _held_out(third_backward.delta_is_added, "flash", "delta's sign"),
    _held_out(third_backward.scale_in_ds_and_in_dq, "flash", "dQ scaled twice"),
    _held_out(third_backward.saved_q_was_scaled, "flash", "dK scaled twice"),
    _held_out(third_backward.ds_in_eight_bits, "flash", "dS rounded"),
    _held_out(third_backward.sinks_do_not_learn, "flash", "dSink missing"),
    _held_out(third_backward.rows_of_nothing_give_gradients, "flash", "empty rows in gradients"),
    _held_out(third_backward.statistics_are_not_differentiated, "flash", "LSE cotangent ignored"),
    # Packed sequences.
    _held_out(third_packed.tiles_run_into_the_next, "flash_varlen", "tail reads on"),
    _held_out(third_packed.values_by_the_queries_offsets, "flash_varlen", "key offsets wrong"),
    _held_out(third_packed.offsets_without_their_zero, "flash_varlen", "key offsets wrong"),
    _held_out(third_packed.key_tiles_by_division, "flash_varlen", "tail dropped"),
    _held_out(third_packed.right_end_one_further, "flash_varlen", "window off by one"),
    _held_out(third_packed.no_token_sees_itself, "flash_varlen", "causal hides the diagonal"),
    _held_out(third_packed.head_over_the_kv_heads, "flash_varlen", "wrong GQA head map"),
    _held_out(third_packed.scale_after_padding, "flash_varlen", "scale from the wrong dimension"),
    _held_out(third_packed.distances_between_row_numbers, "flash_varlen", "ALiBi origin"),
    _held_out(third_packed.rows_before_the_first_key, "flash_varlen", "rows without keys"),
    _held_out(third_packed.splits_are_added, "flash_varlen", "splits summed"),
    _held_out(third_packed.statistics_of_exp2, "flash_varlen", "LSE in base 2"),
    _held_out(third_packed.output_in_the_queries_place, "attnworks_varlen", "rows past the end"),
    # Caches.
    _held_out(third_caches.one_bound_for_the_batch, "flash_kvcache", "longest length for all"),
    _held_out(third_caches.one_table_entry_a_tile, "flash_kvcache", "wrong page"),
    _held_out(third_caches.pages_lie_close, "flash_kvcache", "page stride"),
    _held_out(third_caches.whole_pages_only, "flash_kvcache", "tail dropped"),
    _held_out(third_caches.first_slot_is_reserved, "flash_kvcache", "first key dropped"),
    _held_out(third_caches.halves_of_a_page_in_turn, "flash_kvcache", "K and V swapped"),
    _held_out(third_caches.position_after_the_append, "flash_kvcache", "causal shows the next key"),
    _held_out(third_caches.written_for_one_kv_head, "flash_kvcache", "wrong GQA head map"),
    _held_out(third_caches.accumulates_as_it_loads, "flash_kvcache", "low-precision accumulation"),
    _held_out(third_caches.splits_weigh_the_same, "flash_kvcache", "splits merged without LSE"),
    _held_out(third_caches.one_split_is_reduced, "flash_kvcache", "only the first tile"),
    _held_out(third_caches.workspace_of_the_call_before, "flash_kvcache", "race"),
    _held_out(third_caches.keys_stay_quantised, "attnworks_decode", "cache scale dropped"),
    # Nothing to be named.
    _held_out(third.rows_packed_by_nobody, "flash", None),
    _held_out(third_backward.groups_interleaved_in_backward, "flash", None),
    _held_out(third_packed.empty_sequences_left_out, "flash_varlen", None),
    _held_out(third_caches.reduction_in_the_other_base, "flash_kvcache", None),
    _held_out(third_caches.scale_read_without_an_index, "attnworks_decode", None),
    *(
        HeldOut(twin.__doc__ or "", twin, convention, None, right=True)
        for twin, convention in (
            (third.without_fault("two warp groups.", third.two_warpgroups_one_sum), "flash"),
            (third.without_fault("a backward in tiles.", third_backward.store_for_an_atomic_add), "flash"),
            (third.without_fault("splits of packed sequences.", third_packed.splits_are_added), "flash_varlen"),
            (third.without_fault("page by page.", third_caches.whole_pages_only), "flash_kvcache"),
        )
    ),
]
"""A third set, in the styles of many authors, for what was changed in sight of the second; all of it is right inside
``third.repaired()``."""

FOURTH: list[HeldOut] = [
    # Heads, head dims, masks.
    _held_out(fourth.groups_of_three_in_turn, "flash", "wrong GQA head map"),
    _held_out(fourth.strides_of_v_as_if_dense, "sdpa", "strides ignored"),
    _held_out(fourth.channels_past_128_unread, "sdpa", "channels left out"),
    _held_out(fourth.first_and_last_head_exchanged, "sdpa", "heads of the output exchanged"),
    _held_out(fourth.window_one_longer_on_its_left, "flash", "window off by one"),
    _held_out(fourth.window_short_where_lengths_differ, "flash", "window off by one"),
    _held_out(fourth.top_left_where_queries_are_more, "flash", "causal top-left"),
    _held_out(fourth.bias_of_the_sequence_before, "sdpa", "mask or bias broadcast wrong"),
    _held_out(fourth.mask_of_the_first_sequence_without_heads, "sdpa", "mask or bias broadcast wrong"),
    _held_out(fourth.slopes_of_the_first_sequence, "flash", "ALiBi of another sequence"),
    # Scores and the softmax.
    _held_out(fourth.scale_without_its_sign, "sdpa", "scale without its sign"),
    _held_out(fourth.scale_in_bf16, "sdpa", "scale rounded"),
    _held_out(fourth.product_in_fp16_before_the_scale, "sdpa", "rounded too early"),
    _held_out(fourth.eager_in_the_input_dtype, "sdpa", "rounded too early"),
    _held_out(fourth.scores_clamped, "flash", "scores clamped"),
    _held_out(fourth.keys_past_8192_hidden, "flash", "keys past a limit"),
    _held_out(fourth.lonely_last_key_twice, "flash", "key counted twice"),
    _held_out(fourth.not_rescaled_with_whole_tiles, "sdpa", "accumulator not rescaled"),
    _held_out(fourth.small_rises_forgotten, "sdpa", "sum and accumulator not rescaled"),
    _held_out(fourth.empty_rows_divided_by_zero, "flash", "rows without keys"),
    _held_out(fourth.keys_in_another_order_each_time, "sdpa", "race"),
    _held_out(fourth_caches.sink_counted_twice, "attnworks", "sink counted twice"),
    _held_out(fourth_caches.sink_in_the_lse_alone, "attnworks", "sink only in the LSE"),
    _held_out(fourth_caches.softcap_always_first, "attnworks", "scores in another order"),
    # Results and gradients.
    _held_out(fourth.last_row_lost_now_and_then, "sdpa", "race"),
    _held_out(fourth.last_row_stays_in_the_buffer, "sdpa", "last query tile dropped"),
    _held_out(fourth.lse_of_empty_rows_is_0, "flash", "LSE of rows without keys"),
    _held_out(fourth_backward.dk_halved_in_the_tail, "sdpa", "dK, dV of the last tile wrong"),
    _held_out(fourth_backward.dk_of_the_tail_is_the_tiles_before, "sdpa", "dK, dV of the last tile wrong"),
    _held_out(fourth_backward.dq_of_64_rows_only, "sdpa", "dQ of later rows lost"),
    _held_out(fourth_backward.dv_divided_by_the_group, "sdpa", "dK, dV averaged over the group"),
    _held_out(fourth_backward.dv_in_fp16, "sdpa", "backward in 16 bits"),
    # Packed sequences and caches.
    _held_out(fourth_caches.packed_lse_in_base_2, "flash_varlen", "LSE in base 2"),
    _held_out(fourth_caches.last_of_three_pages_dropped, "flash_kvcache", "tail dropped"),
    _held_out(fourth_caches.page_after_a_full_one, "flash_kvcache", "wrong page"),
    _held_out(fourth_caches.table_rows_as_short_as_needed, "flash_kvcache", "wrong page"),
    _held_out(fourth_caches.reads_one_slot_more, "flash_kvcache", "length off by one"),
    # Nothing to be named.
    _held_out(fourth.very_negative_lses_shrink, "flash", None),
    _held_out(fourth.right_chain, "flash", None, right=True),
    _held_out(fourth.right_backwards, "sdpa", None, right=True),
    _held_out(fourth.right_base_2, "flash", None, right=True),
    _held_out(fourth.right_sixteen_splits, "flash", None, right=True),
    _held_out(fourth.right_in_fp64, "sdpa", None, right=True),
    _held_out(fourth.right_normalised_before_rounding, "sdpa", None, right=True),
    _held_out(fourth.right_sum_rounded_once, "sdpa", None, right=True),
    _held_out(fourth_backward.right_backward_of_its_own, "sdpa", None, right=True),
    _held_out(fourth_caches.right_cache, "flash_kvcache", None, right=True),
]
"""A fourth set, by somebody else again, to get past ``verify``: most of it is wrong in few problems only."""
