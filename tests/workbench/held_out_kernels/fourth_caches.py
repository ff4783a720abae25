"""The fourth set, packed sequences and caches, called as flash-attn's functions are, and what can be done wrong by
giving a right kernel other scores, called as attnworks.attention is."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnworks import Sink, Softcap, attention
from workbench.held_out_kernels.fourth import attend, shown


def packed_lse_in_base_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
):  # fmt: skip
    """The LSE of packed sequences is in base 2."""
    found = [
        attend(
            *(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])), {}, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap,
        )
        for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    ]  # fmt: skip
    unused = q.shape[0] - int(cu_seqlens_q[-1])
    out = torch.cat([*(out[0].transpose(0, 1) for out, _ in found), q.new_zeros(unused, q.shape[1], v.shape[-1])])
    lse = torch.cat([*(lse[0] for _, lse in found), torch.full((q.shape[1], unused), -math.inf)], 1) / math.log(2)
    return (out, lse) if return_softmax_lse else out


# ---- caches ----------------------------------------------------------------------------------------------------------

Pages = Callable[[Tensor, int, int, int], tuple[list[int], int]]


def _in_the_table(table: Tensor, sequence: int, size: int, length: int) -> tuple[list[int], int]:
    """The pages that hold a sequence's ``length`` keys, and how many keys these are."""
    return table[sequence, : -(-length // size)].tolist(), length


def cache(pages: Pages = _in_the_table, more: int = 0) -> Callable[..., Any]:
    """A kernel that finds its pages by ``pages``, and in caches without such reads ``more`` slots than there are."""

    def kernel(
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
    ):  # fmt: skip
        found = []
        for b, length in enumerate(cache_seqlens.tolist()):
            caches, size, shift = (k_cache, v_cache), k_cache.shape[1], None
            for new, whole in ((k, k_cache), (v, v_cache)):
                for r in range(0 if new is None else new.shape[1]):
                    page = b if block_table is None else int(block_table[b, (length + r) // size])
                    whole[page, length + r if block_table is None else (length + r) % size] = new[b, r]
            length += 0 if k is None else k.shape[1]
            if block_table is None:
                read = min(length + more, size) if length else 0
                keys, values = (x[b, :read] for x in caches)
                shift = length - q.shape[1]
            else:
                own, length = pages(block_table, b, size, length)
                keys, values = (x[own].flatten(0, 1)[:length] for x in caches)
            steps = {"shown": lambda m, n, c, w, shift=shift: shown(m, n, c, w, shift)}
            rows = [x.transpose(0, 1)[None] for x in (q[b], keys, values)]
            found.append(attend(*rows, steps, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap))
        out, lse = torch.cat([out for out, _ in found]).transpose(1, 2), torch.cat([lse for _, lse in found])
        return (out, lse) if return_softmax_lse else out

    kernel.__name__, kernel.__doc__ = pages.__name__, pages.__doc__
    return kernel


@cache
def last_of_three_pages_dropped(table: Tensor, sequence: int, size: int, length: int) -> tuple[list[int], int]:
    """Of more than two pages the last is left out if it is not full."""
    used = -(-length // size)
    if used > 2 and length % size:
        used, length = used - 1, (used - 1) * size
    return table[sequence, :used].tolist(), length


@cache
def page_after_a_full_one(table: Tensor, sequence: int, size: int, length: int) -> tuple[list[int], int]:
    """A sequence that fills its last page is read from its second page on, or from its last one twice."""
    used = -(-length // size)
    own = table[sequence, :used].tolist()
    if length and length % size == 0:
        behind = table[sequence, 1 : used + 1].tolist()
        own = behind if len(behind) == used else [*own[: used - 2], own[-1], own[-1]][-used:]
    return own, length


@cache
def table_rows_as_short_as_needed(table: Tensor, sequence: int, size: int, length: int) -> tuple[list[int], int]:
    """Sequence b's pages are taken to begin b times as many entries into the table as it has pages."""
    used = -(-length // size)
    return table.flatten()[sequence * used : (sequence + 1) * used].tolist(), length


def _named(kernel: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    kernel.__name__, kernel.__doc__ = name, doc
    return kernel


reads_one_slot_more = _named(cache(more=1), "reads_one_slot_more", "One slot more than the length is read.")
right_cache = _named(cache(), "right_cache", "Right: sequence by sequence, dense or paged, with appended keys.")


# ---- scores ----------------------------------------------------------------------------------------------------------


def _by_other_scores(change: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(q, k, v, mask=None, scores=(), scale=None, layout="bhsd", return_lse=False):
        def right(given: Any) -> tuple[Tensor, Tensor]:
            return attention(
                q, k, v, mask=mask, scores=given, scale=scale, layout=layout, return_lse=True, backend="reference"
            )

        out, lse = change(scores, right)
        return (out, lse) if return_lse else out

    kernel.__name__, kernel.__doc__ = change.__name__, change.__doc__
    return kernel


@_by_other_scores
def sink_counted_twice(scores, right):
    """The sink enters the denominator twice."""
    return right([Sink(s.logits + math.log(2)) if isinstance(s, Sink) else s for s in scores])


@_by_other_scores
def sink_in_the_lse_alone(scores, right):
    """The sink is in the LSE but not in the output."""
    return right([s for s in scores if not isinstance(s, Sink)])[0], right(scores)[1]


@_by_other_scores
def softcap_always_first(scores, right):
    """The softcap comes first among the scores, whatever the order that was asked for."""
    return right(sorted(scores, key=lambda s: not isinstance(s, Softcap)))
