"""The second set, dense: the whole matrix, tiles of odd sizes, rows, splits, base 2. Each function's first line says
what is wrong with it. Written without sight of the first set, of diagnose's rules and of its mutants."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

INF = math.inf
LOG2E = math.log2(math.e)
State = tuple[Tensor, Tensor, Tensor]
Result = Tensor | tuple[Tensor, Tensor]
Scale = float | None


# ---- parts that are right --------------------------------------------------------------------------------------------


def safe(maximum: Tensor) -> Tensor:
    """What to subtract: 0 where there is no key yet."""
    return torch.where(maximum == -INF, 0.0, maximum)


def soft(s: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and logsumexp of each row; 0 and -inf for rows of nothing."""
    m = safe(torch.cat([s.detach(), s.new_full((*s.shape[:-1], 1), -INF)], -1).amax(-1, keepdim=True))
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    some = torch.where(total == 0, 1.0, total)
    return p / some, torch.where(total == 0, -INF, m + some.log()).squeeze(-1)


def fresh(q: Tensor, v: Tensor) -> State:
    rows = q.shape[:-1]
    return q.new_full(rows, -INF), q.new_zeros(rows), q.new_zeros(*rows, v.shape[-1])


def fold(state: State, s: Tensor, v: Tensor) -> State:
    """One tile into (maximum, sum, accumulator)."""
    m, total, acc = state
    new = torch.maximum(m, s.detach().amax(-1))
    old, p = torch.exp(m - safe(new)), torch.exp(s - safe(new)[..., None])
    return new, total * old + p.sum(-1), acc * old[..., None] + p @ v


def finish(state: State) -> tuple[Tensor, Tensor]:
    m, total, acc = state
    some = torch.where(total == 0, 1.0, total)
    return acc / some[..., None], torch.where(total == 0, -INF, safe(m) + some.log())


def tiles(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., rows, heads, dim) as (..., heads, rows, dim) in fp32, K and V for every query head."""
    group = q.shape[-2] // max(k.shape[-2], 1)
    q, k, v = (x.transpose(-3, -2).float() for x in (q, k, v))
    return q, k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)


def as_rows(out: Tensor, q: Tensor) -> Tensor:
    return out.transpose(-3, -2).to(q.dtype)


def scale_of(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def band(i: Tensor, j: Tensor, shift: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """Which keys j the queries i see."""
    left, right = window[0], 0 if causal else window[1]
    at = i[:, None] + shift
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    seen = seen & (j >= at - left) if left >= 0 else seen
    return seen & (j <= at + right) if right >= 0 else seen


def seen_by_all(q: Tensor, k: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """``band`` of (..., rows, dim), from the bottom right."""
    rows, keys = q.shape[-2], k.shape[-2]
    return band(torch.arange(rows), torch.arange(keys), keys - rows, causal, window)


def products(q: Tensor, k: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    s = torch.einsum("...qd,...kd->...qk", q, k) * scale
    return s if seen is None else s.masked_fill(~seen, -INF)


def added(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """SDPA's two masks as one tensor to add."""
    term = torch.zeros(q.shape[-2], k.shape[-2])
    if is_causal:
        term = term.masked_fill(~torch.ones(term.shape, dtype=torch.bool).tril(), -INF)
    if attn_mask is None:
        return term
    return term + (torch.where(attn_mask, 0.0, -INF) if attn_mask.dtype == torch.bool else attn_mask.float())


def grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, heads, rows, dim) in fp32, K and V for every query head."""
    group = query.shape[1] // max(key.shape[1], 1)
    return query.float(), *(x.float().repeat_interleave(group, 1) for x in (key, value))


def with_lse(out: Tensor, lse: Tensor, wanted: bool) -> Result:
    return (out, lse) if wanted else out


# ---- called like SDPA ------------------------------------------------------------------------------------------------


def scale_of_model_width(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                         is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The default scale is 1/sqrt of the model's width, heads times head dim."""
    q, k, v = grouped(query, key, value)
    scale = (query.shape[1] * query.shape[3]) ** -0.5 if scale is None else scale
    p, _ = soft(products(q, k, scale) + added(q, k, attn_mask, is_causal))
    return torch.einsum("bhqk,bhkd->bhqd", p, v).to(query.dtype)


def hides_what_is_true(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                       is_causal: bool = False, scale: Scale = None) -> Tensor:  # fmt: skip
    """Head by head, True in a boolean mask hides, as in nn.MultiheadAttention."""
    heads = []
    for head in range(query.shape[1]):
        q, k, v = (x[:, head].float() for x in (query, key, value))
        term = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])[:, head]
        if term is not None and term.dtype == torch.bool:
            term = ~term
        heads.append(soft(products(q, k, scale_of(q, scale)) + added(q, k, term, is_causal))[0] @ v)
    return torch.stack(heads, 1).to(query.dtype)


def mask_flattened_by_heads(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                            is_causal: bool = False, scale: Scale = None) -> Tensor:  # fmt: skip
    """Batch and heads are one dimension of Q, but in the mask it is heads and batch."""
    batch, heads, rows, _ = query.shape
    q, k, v = (x.float().flatten(0, 1) for x in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, rows, key.shape[2]).transpose(0, 1).flatten(0, 1)
    s = torch.bmm(q, k.transpose(1, 2)) * scale_of(q, scale) + added(q, k, attn_mask, is_causal)
    return torch.bmm(soft(s)[0], v).view(batch, heads, rows, value.shape[-1]).to(query.dtype)


def transposed_softmax(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                       is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """S is held transposed, and the softmax still runs over its last dimension."""
    q, k, v = grouped(query, key, value)
    s = torch.einsum("bhkd,bhqd->bhkq", k, q) * scale_of(q, scale)
    p, _ = soft(s + added(q, k, attn_mask, is_causal).transpose(-1, -2))
    return torch.einsum("bhkq,bhkd->bhqd", p, v).to(query.dtype)


def maximum_clamped(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                    is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The maximum is clamped at -100, to be finite for rows of -inf."""
    q, k, v = grouped(query, key, value)
    s = products(q, k, scale_of(q, scale)) + added(q, k, attn_mask, is_causal)
    m = torch.cat([s.detach(), s.new_full((*s.shape[:-1], 1), -INF)], -1).amax(-1, keepdim=True).clamp_min(-100.0)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    return (p @ v / torch.where(total == 0, 1.0, total)).to(query.dtype)


def bias_in_the_product(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                        is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The bias is what the product is accumulated onto, and the scale comes after."""
    q, k, v = grouped(query, key, value)
    s = (q @ k.transpose(-1, -2) + added(q, k, attn_mask, is_causal)) * scale_of(q, scale)
    return (soft(s)[0] @ v).to(query.dtype)


def bias_not_in_base_2(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                       is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Scores are taken to base 2, the bias that is added to them is not."""
    q, k, v = grouped(query, key, value)
    s = products(q, k, scale_of(q, scale) * LOG2E) + added(q, k, attn_mask, is_causal)
    return (soft(s * math.log(2))[0] @ v).to(query.dtype)


def nan_compared_away(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                      is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Hidden scores are found by s > -inf, which is also false for NaN."""
    q, k, v = grouped(query, key, value)
    s = products(q, k, scale_of(q, scale)) + added(q, k, attn_mask, is_causal)
    return (soft(torch.where(s > -INF, s, -INF))[0] @ v).to(query.dtype)


@torch.no_grad()
def v_as_if_dense(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                  is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """V's rows are read one behind the other from where it begins, whatever its strides."""
    size = value.untyped_storage().nbytes() // value.itemsize
    places = torch.arange(value.numel()) + value.storage_offset()
    memory = value.as_strided((size,), (1,), 0)
    dense = memory[places.clamp(max=max(size - 1, 0))].view(value.shape)
    q, k, v = grouped(query, key, dense)
    return (soft(products(q, k, scale_of(q, scale)) + added(q, k, attn_mask, is_causal))[0] @ v).to(query.dtype)


v_as_if_dense.declares = {"gradients": False}  # type: ignore[attr-defined]


@torch.no_grad()
def right_in_log_space(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                       is_causal: bool = False, scale: Scale = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Right: tiles of 80 keys, the output always normalised, sums as logarithms."""
    q, k, v = grouped(query, key, value)
    term = added(q, k, attn_mask, is_causal).expand(*q.shape[:-1], k.shape[-2])
    lse, _, out = fresh(q, v)
    for at in tiles(k.shape[-2], 80):
        p, found = soft(products(q, k[:, :, at], scale_of(q, scale)) + term[..., at])
        new = torch.logaddexp(lse, found)
        ours, theirs = torch.exp(lse - safe(new)), torch.exp(found - safe(new))
        out, lse = out * ours[..., None] + p @ v[:, :, at] * theirs[..., None], new
    return out.to(query.dtype)


right_in_log_space.declares = {"gradients": False}  # type: ignore[attr-defined]


# ---- called like flash-attn: scales, masks ---------------------------------------------------------------------------


def scale_folded_twice(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                       causal: bool = False) -> Tensor:  # fmt: skip
    """Two passes: Q is scaled for the maximum, and the exponent's factor has the scale too."""
    scale = scale_of(q, softmax_scale)
    x, y, z = by_heads(q, k, v)
    s = products(x * scale, y, scale, seen_by_all(x, y, causal))
    return as_rows(soft(s)[0] @ z, q)


def scale_compiled_in(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                      causal: bool = False) -> Tensor:  # fmt: skip
    """Base 2 with log2(e)/sqrt(head dim) as a constant; softmax_scale is not used."""
    x, y, z = by_heads(q, k, v)
    factor, seen, state = LOG2E / math.sqrt(q.shape[-1]), seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 56):
        m, total, acc = state
        s = products(x, y[:, :, at], factor, seen[:, at])
        new = torch.maximum(m, s.detach().amax(-1))
        old, p = torch.exp2(m - safe(new)), torch.exp2(s - safe(new)[..., None])
        state = new, total * old + p.sum(-1), acc * old[..., None] + p @ z[:, :, at]
    return as_rows(finish(state)[0], q)


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, own: int) -> Tensor:
    """Each row's softmax over its slice of the keys, which ends ``own`` past the row's place."""
    x, y, z = by_heads(q, k, v)
    rows, keys = x.shape[-2], y.shape[-2]
    found = [x.new_zeros(*x.shape[:-2], 0, z.shape[-1])]
    for i in range(rows):
        end = max(keys - rows + i + own, 0) if causal else keys
        found.append(soft(products(x[:, :, i : i + 1], y[:, :, :end], scale_of(q, scale)))[0] @ z[:, :, :end])
    return as_rows(torch.cat(found, -2), q)


def row_ends_before_itself(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                           causal: bool = False) -> Tensor:  # fmt: skip
    """Row by row: a causal row's keys are the slice that ends at, and without, its own."""
    return _row_by_row(q, k, v, softmax_scale, causal, own=0)


def right_row_by_row(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                     causal: bool = False) -> Tensor:  # fmt: skip
    """Right: row by row over a slice of the keys."""
    return _row_by_row(q, k, v, softmax_scale, causal, own=1)


def last_key_inclusive(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                       causal: bool = False) -> Tensor:  # fmt: skip
    """The number of visible keys is taken for the index of the last one."""
    x, y, z = by_heads(q, k, v)
    rows, keys, state = x.shape[-2], y.shape[-2], fresh(x, z)
    visible = torch.arange(rows) + 1 + keys - rows if causal else torch.full((rows,), keys)
    for at in tiles(keys, 24):
        seen = torch.arange(at.start, at.stop) <= visible[:, None]
        state = fold(state, products(x, y[:, :, at], scale_of(q, softmax_scale), seen), z[:, :, at])
    return as_rows(finish(state)[0], q)


def diagonal_tile_rounded_down(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                               causal: bool = False) -> Tensor:  # fmt: skip
    """The number of key tiles that a tile of 80 causal rows needs is rounded down."""
    x, y, z = by_heads(q, k, v)
    rows, keys = x.shape[-2], y.shape[-2]
    seen, found = seen_by_all(x, y, causal), [x.new_zeros(*x.shape[:-2], 0, z.shape[-1])]
    for mine in tiles(rows, 80):
        state = fresh(x[:, :, mine], z)
        needed = (mine.stop + keys - rows) // 56 if causal else -(-keys // 56)
        for at in list(tiles(keys, 56))[: max(needed, 0)]:
            s = products(x[:, :, mine], y[:, :, at], scale_of(q, softmax_scale), seen[mine, at])
            state = fold(state, s, z[:, :, at])
        found.append(finish(state)[0])
    return as_rows(torch.cat(found, -2), q)


def window_begins_at_its_tile(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    """The loop begins at the tile of the window's left end, and within tiles only the right end is masked."""
    x, y, z = by_heads(q, k, v)
    rows, keys = x.shape[-2], y.shape[-2]
    seen, found = seen_by_all(x, y, causal, (-1, window_size[1])), [x.new_zeros(*x.shape[:-2], 0, z.shape[-1])]
    for mine in tiles(rows, 24):
        state = fresh(x[:, :, mine], z)
        first = max(mine.start + keys - rows - window_size[0], 0) // 24 if window_size[0] >= 0 else 0
        for at in list(tiles(keys, 24))[first:]:
            s = products(x[:, :, mine], y[:, :, at], scale_of(q, softmax_scale), seen[mine, at])
            state = fold(state, s, z[:, :, at])
        found.append(finish(state)[0])
    return as_rows(torch.cat(found, -2), q)


def alibi_from_the_last_key(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                            causal: bool = False, alibi_slopes: Tensor | None = None) -> Tensor:  # fmt: skip
    """ALiBi counts from the last key, as suffices for causal rows, with all masks."""
    x, y, z = by_heads(q, k, v)
    s = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal))
    if alibi_slopes is not None:
        s = s + alibi_slopes.view(-1, q.shape[2], 1, 1) * (torch.arange(k.shape[1]) - k.shape[1] + 1)
    return as_rows(soft(s)[0] @ z, q)


# ---- called like flash-attn: sums, tails, precision ------------------------------------------------------------------


def second_half_not_rescaled(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                             causal: bool = False) -> Tensor:  # fmt: skip
    """The accumulator lies in two halves of the head dim, and only the first is rescaled."""
    x, y, z = by_heads(q, k, v)
    half, seen, state = z.shape[-1] // 2, seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 56):
        m, total, acc = state
        s = products(x, y[:, :, at], scale_of(q, softmax_scale), seen[:, at])
        new = torch.maximum(m, s.detach().amax(-1))
        old, p = torch.exp(m - safe(new)), torch.exp(s - safe(new)[..., None])
        halves = torch.cat([acc[..., :half] * old[..., None], acc[..., half:]], -1)
        state = new, total * old + p.sum(-1), halves + p @ z[:, :, at]
    return as_rows(finish(state)[0], q)


def lazy_rescale_forgets_the_sum(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                                 causal: bool = False) -> Tensor:  # fmt: skip
    """The maximum is only raised by more than 8, and then the accumulator is rescaled but not the sum."""
    x, y, z = by_heads(q, k, v)
    seen, (m, total, acc) = seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 24):
        s = products(x, y[:, :, at], scale_of(q, softmax_scale), seen[:, at])
        top = s.detach().amax(-1)
        new = torch.where(top > m + 8, top, m)
        p = torch.exp(s - safe(new)[..., None])
        acc = acc * torch.exp(m - safe(new))[..., None] + p @ z[:, :, at]
        total, m = total + p.sum(-1), new
    return as_rows(finish((m, total, acc))[0], q)


def one_split_is_not_divided(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                             causal: bool = False) -> Tensor:  # fmt: skip
    """Splits of 80 keys are divided by their sum when they are combined, which one split alone is not."""
    x, y, z = by_heads(q, k, v)
    s, state = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)), fresh(x, z)
    parts = [fold(state, s[..., at], z[:, :, at]) for at in tiles(y.shape[-2], 80)] or [state]
    if len(parts) == 1:
        return as_rows(parts[0][2], q)
    top = safe(torch.stack([m for m, _, _ in parts]).amax(0))
    total = sum(part * torch.exp(m - top) for m, part, _ in parts)
    acc = sum(part * torch.exp(m - top)[..., None] for m, _, part in parts)
    return as_rows(finish((top, total, acc))[0], q)  # type: ignore[arg-type]


def exponentials_in_base_2(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                           causal: bool = False) -> Tensor:  # fmt: skip
    """Base 2, and no maximum is subtracted."""
    x, y, z = by_heads(q, k, v)
    seen, (m, total, acc) = seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 80):
        p = torch.exp2(products(x, y[:, :, at], scale_of(q, softmax_scale) * LOG2E, seen[:, at]))
        total, acc = total + p.sum(-1), acc + p @ z[:, :, at]
    return as_rows(finish((m, total, acc))[0], q)


def loads_clamped(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                  causal: bool = False) -> Tensor:  # fmt: skip
    """The last tile of 112 keys is filled with copies of the last key, and they count."""
    x, y, z = by_heads(q, k, v)
    rows, keys, state = x.shape[-2], y.shape[-2], fresh(x, z)
    for first in range(0, keys, 112):
        at = torch.arange(first, first + 112)
        load = at.clamp(max=keys - 1)
        seen = band(torch.arange(rows), at, keys - rows, causal)
        state = fold(state, products(x, y[:, :, load], scale_of(q, softmax_scale), seen), z[:, :, load])
    return as_rows(finish(state)[0], q)


def unrolled_by_eight(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                      causal: bool = False) -> Tensor:  # fmt: skip
    """Keys are taken eight at a time, and what is left of them is not taken."""
    x, y, z = by_heads(q, k, v)
    whole = y.shape[-2] // 8 * 8
    seen = seen_by_all(x, y, causal)[:, :whole]
    return as_rows(soft(products(x, y[:, :, :whole], scale_of(q, softmax_scale), seen))[0] @ z[:, :, :whole], q)


@torch.no_grad()
def output_is_the_accumulator(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                              causal: bool = False) -> Tensor:  # fmt: skip
    """The normalised output goes back to memory in the input dtype after every eight keys."""
    x, y, z = by_heads(q, k, v)
    seen, (lse, _, out) = seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 8):
        p, found = soft(products(x, y[:, :, at], scale_of(q, softmax_scale), seen[:, at]))
        new = torch.logaddexp(lse, found)
        ours, theirs = torch.exp(lse - safe(new)), torch.exp(found - safe(new))
        out = (out * ours[..., None] + p @ z[:, :, at] * theirs[..., None]).to(q.dtype).float()
        lse = new
    return as_rows(out, q)


output_is_the_accumulator.declares = {"gradients": False}  # type: ignore[attr-defined]


def scaled_q_rounded(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                     causal: bool = False) -> Tensor:  # fmt: skip
    """Q times scale times log2(e) is rounded to the input dtype before the product."""
    x, y, z = by_heads(q * (scale_of(q, softmax_scale) * LOG2E), k, v)
    return as_rows(soft(products(x, y, math.log(2), seen_by_all(x, y, causal)))[0] @ z, q)


def tree_of_means(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                  causal: bool = False) -> Tensor:  # fmt: skip
    """Splits of 24 keys are reduced in a tree, two outputs to their mean."""
    x, y, z = by_heads(q, k, v)
    s = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal))
    parts = [soft(s[..., at])[0] @ z[:, :, at] for at in tiles(y.shape[-2], 24)] or [fresh(x, z)[2]]
    while len(parts) > 1:
        pairs = [(parts[n] + parts[n + 1]) / 2 for n in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return as_rows(parts[0], q)


def tile_not_yet_there(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                       causal: bool = False) -> Tensor:  # fmt: skip
    """Two buffers take turns, and now and then V's still holds the tile before the last."""
    x, y, z = by_heads(q, k, v)
    chance, seen, state = random.SystemRandom(), seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 24):
        early = at.start >= 48 and chance.random() < 0.3
        values = z[:, :, at.start - 48 : at.stop - 48] if early else z[:, :, at]
        state = fold(state, products(x, y[:, :, at], scale_of(q, softmax_scale), seen[:, at]), values)
    return as_rows(finish(state)[0], q)


def pair_unpacked_the_other_way(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                                causal: bool = False) -> Tensor:  # fmt: skip
    """K and V are packed into one tensor and unpacked in the other order."""
    v, k = torch.stack((k, v), 2).unbind(2)
    x, y, z = by_heads(q, k, v)
    return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))[0] @ z, q)


pair_unpacked_the_other_way.declares = {"unequal_dims": False}  # type: ignore[attr-defined]


def smooths_keys_in_place(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                          causal: bool = False) -> Tensor:  # fmt: skip
    """The keys' mean, which no softmax sees, is taken off in the caller's tensor."""
    with torch.no_grad():
        for head in range(k.shape[2]):
            k[:, :, head] -= k[:, :, head].mean(1, keepdim=True)
    x, y, z = by_heads(q, k, v)
    return as_rows(soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))[0] @ z, q)


# ---- called like flash-attn: LSE and sinks ---------------------------------------------------------------------------


def lse_of_nothing_is_plus_infinity(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                                    causal: bool = False, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """Rows without keys have an LSE of +inf, so that a backward may subtract it."""
    x, y, z = by_heads(q, k, v)
    p, lse = soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))
    return with_lse(as_rows(p @ z, q), torch.where(lse == -INF, INF, lse), return_softmax_lse)


def lse_with_maximum_in_base_2(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                               causal: bool = False, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """The LSE adds the natural logarithm of the sum to a maximum in base 2."""
    x, y, z = by_heads(q, k, v)
    p, lse = soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))
    top = products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)).detach()
    top = torch.cat([top, top.new_full((*top.shape[:-1], 1), -INF)], -1).amax(-1)
    return with_lse(as_rows(p @ z, q), torch.where(lse == -INF, lse, lse + (LOG2E - 1) * safe(top)), return_softmax_lse)


def lse_with_maximum_unscaled(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None,
                              causal: bool = False, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """The scale is in the exponent only, and the maximum goes into the LSE without it."""
    scale = scale_of(q, softmax_scale)
    x, y, z = by_heads(q, k, v)
    seen, state = seen_by_all(x, y, causal), fresh(x, z)
    for at in tiles(y.shape[-2], 56):
        m, total, acc = state
        s = products(x, y[:, :, at], 1.0, seen[:, at])
        new = torch.maximum(m, s.detach().amax(-1))
        old, p = torch.exp(scale * (m - safe(new))), torch.exp(scale * (s - safe(new)[..., None]))
        state = new, total * old + p.sum(-1), acc * old[..., None] + p @ z[:, :, at]
    out, lse = finish(state)
    return with_lse(as_rows(out, q), lse, return_softmax_lse)


def sink_as_a_product(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None, causal: bool = False,
                      s_aux: Tensor | None = None, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """The sink is one more column of the product, which the scale comes after."""
    x, y, z = by_heads(q, k, v)
    s = products(x, y, 1.0, seen_by_all(x, y, causal))
    if s_aux is not None:
        s = torch.cat([s, s_aux.float().view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p, lse = soft(s * scale_of(q, softmax_scale))
    return with_lse(as_rows(p[..., : k.shape[1]] @ z, q), lse, return_softmax_lse)


def sink_divides_afterwards(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Scale = None, causal: bool = False,
                            s_aux: Tensor | None = None, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """The output is gated by sigmoid(LSE - sink), and the LSE is returned as it was before."""
    x, y, z = by_heads(q, k, v)
    p, lse = soft(products(x, y, scale_of(q, softmax_scale), seen_by_all(x, y, causal)))
    out = p @ z
    if s_aux is not None:
        out = out * torch.sigmoid(lse - s_aux.float()[:, None])[..., None]
    return with_lse(as_rows(out, q), lse, return_softmax_lse)
