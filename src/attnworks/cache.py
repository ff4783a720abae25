"""KV caches: checking lengths and page tables, appending new keys, rotary embedding. Shared by every backend.

All of it happens before a kernel runs, so that a kernel sees only q, a cache, its lengths and a table it can trust.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnworks.problem import (
    QUANTISED_DTYPES,
    Sizes,
    check_device,
    check_head_dims,
    check_heads,
    check_shape,
    check_tensors,
)


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864, section 3.2) applied to q and to k_new before the append.

    ``cos``, ``sin``: (positions, rotary_dim / 2), floating point; the first rotary_dim channels of each head turn.
    ``interleaved``: pairs are channels (2i, 2i+1); otherwise (i, i + rotary_dim/2), as in GPT-NeoX and Llama. The last
    query has the position of the last key, and query i sits seq_q - 1 - i before it.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def check_offsets(name: str, offsets: object, rows: Tensor, *, values: bool) -> tuple[Tensor, int | None]:
    """cu_seqlens of packed ``rows`` as an int64 copy (sequences + 1,), and the longest sequence. With ``values`` it is
    checked to start at 0, never to fall and to end at most at the number of rows; else the longest is not read off."""
    checked = _check_integers(name, offsets, rows).to(torch.int64, copy=True).contiguous()
    if checked.dim() != 1 or checked.numel() < 1:
        raise ValueError(f"{name}: was of shape {tuple(checked.shape)}, must be (sequences + 1,)")
    if not values:
        return checked, None
    first, last = int(checked[0]), int(checked[-1])
    shortest, longest = (int(bound) for bound in checked.diff().aminmax()) if checked.numel() > 1 else (0, 0)
    if first != 0:
        raise ValueError(f"{name}: began with {first}, must begin with 0")
    if shortest < 0:
        raise ValueError(f"{name}: was {_short(checked)}, must never fall")
    if last > rows.shape[0]:
        raise ValueError(f"{name}: ended with {last}, must end at most with the {rows.shape[0]} packed rows")
    return checked, longest


def check_max_seqlen(name: str, given: object, offsets: Tensor, longest: int | None) -> int:
    """The maximum to build for: the given one, checked to be no smaller than ``longest`` if that is known; else the
    true one."""
    if given is None:
        if longest is None:
            longest = int(offsets.diff().max()) if offsets.numel() > 1 else 0
        return longest
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name}: was {given!r}, must be None or an int")
    if longest is not None and given < longest:
        raise ValueError(f"{name}: was {given}, must be at least the longest sequence, {longest}")
    return given


def check_lengths_and_table(kv_lens: object, page_table: Tensor | None, batch: int, q: Tensor) -> None:
    """Shapes, dtypes and devices of kv_lens (batch,) and page_table (batch, pages_per_sequence)."""
    check_shape("kv_lens", _check_integers("kv_lens", kv_lens, q), "batch", batch=batch)
    if page_table is not None:
        _check_integers("page_table", page_table, q)
        check_shape("page_table", page_table, "batch pages_per_sequence", batch=batch)


def read_kv_lens(kv_lens: Tensor, capacity: int, new: int, *, values: bool) -> Tensor:
    """kv_lens as an int64 copy (batch,), with ``values`` checked: 0 <= kv_lens and kv_lens + new <= capacity."""
    lens = kv_lens.detach().to(torch.int64, copy=True).contiguous()
    if values and lens.numel():
        low, high = (int(bound) for bound in lens.aminmax())
        if low < 0 or high + new > capacity:
            raise ValueError(
                f"kv_lens: ranged from {low} to {high}, must lie in 0..{capacity - new} "
                f"(capacity {capacity}, {new} new)"
            )
    return lens


def read_page_table(page_table: Tensor, totals: Tensor, pages: int, page_size: int, *, values: bool) -> Tensor:
    """page_table as an int64 copy (batch, pages_per_sequence), with ``values`` checked: every used entry names a page
    that exists. Entries past ceil(length / page_size) are unused and may hold anything."""
    table = page_table.detach().to(torch.int64, copy=True).contiguous()
    if values and table.numel():
        low, high = (int(bound) for bound in table.aminmax())
        if low < 0 or high >= pages:  # perhaps only in entries that nobody uses
            _check_used_entries(table, totals, pages, page_size)
    return table


def _check_used_entries(table: Tensor, totals: Tensor, pages: int, page_size: int) -> None:
    used = torch.arange(table.shape[1], device=table.device)[None] * page_size < totals[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        sequence, entry = (int(index) for index in wrong.nonzero()[0])
        raise ValueError(
            f"page_table: entry [{sequence}, {entry}] was {int(table[sequence, entry])}, must lie in 0..{pages - 1}"
        )


def read_lengths(
    kv_lens: Tensor,
    page_table: Tensor | None,
    capacity: int,
    new: int,
    pages: int,
    page_size: int,
    positions: int | None,
    *,
    values: bool,
) -> tuple[Tensor, Tensor | None]:
    """``read_kv_lens`` and ``read_page_table``; with ``values`` also that no key's position, once ``new`` are appended,
    lies past the ``positions`` of a rotary embedding."""
    lens = read_kv_lens(kv_lens, capacity, new, values=values)
    totals = lens + new if new else lens
    if positions is not None and values and totals.numel() and int(totals.max()) > positions:
        raise ValueError(f"rotary cos: had {positions} positions, must have at least {int(totals.max())}")
    if page_table is None:
        return lens, None
    return lens, read_page_table(page_table, totals, pages, page_size, values=values)


def extent(k_cache: Tensor, page_table: Tensor | None) -> tuple[int, int, int]:
    """(capacity of a sequence, pages, page_size), the last two 0 without pages."""
    if page_table is None:
        return k_cache.shape[1], 0, 0
    return k_cache.shape[1] * page_table.shape[1], k_cache.shape[0], k_cache.shape[1]


def check_rotary(rotary: object, q: Tensor) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``rotary`` fits q (batch, seq_q, heads_q, head_dim)."""
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary: was {rotary!r}, must be None or Rotary(cos, sin)")
    for name, table in (("rotary cos", rotary.cos), ("rotary sin", rotary.sin)):
        if not isinstance(table, Tensor) or not table.is_floating_point():
            was = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{name}: was {was}, must be a floating-point tensor")
        check_device(name, table, q)
        check_shape(name, table, "positions half_rotary_dim")
    if rotary.cos.shape != rotary.sin.shape:
        raise ValueError(
            f"rotary sin: was of shape {tuple(rotary.sin.shape)}, must be {tuple(rotary.cos.shape)} like cos"
        )
    if 2 * rotary.cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary cos: had {rotary.cos.shape[1]} columns, must have at most head_dim/2 = {q.shape[-1] // 2}"
        )


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x (batch, rows, heads, dim) turned by the angles of positions (batch, rows); computed in fp32, x's dtype out."""
    half = rotary.cos.shape[1]
    rows = positions.clamp_min(0)
    cos = rotary.cos.float()[rows].unsqueeze(2)
    sin = rotary.sin.float()[rows].unsqueeze(2)
    turning = x[..., : 2 * half].float()
    if rotary.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    a, b = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack((a, b), -1).flatten(-2) if rotary.interleaved else torch.cat((a, b), -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def indexable(cache: Tensor) -> Tensor:
    """The tensor, or where it has 8 bits its bytes: torch 2.8 indexes no float8 on a CPU."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def take(cache: Tensor, index: Any) -> Tensor:
    """cache[index], also of what torch does not index."""
    # Only where it is needed: a change of dtype, be it to the same one, has no derivative.
    return indexable(cache)[index].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[index]


def append(cache: Tensor, new: Tensor, positions: Tensor, page_table: Tensor | None) -> None:
    """Write new (batch, rows, heads, dim) into the cache at positions (batch, rows), in place."""
    cache, new = indexable(cache), indexable(new)
    if page_table is None:
        owner = torch.arange(new.shape[0], device=cache.device)[:, None].expand_as(positions)
        cache[owner, positions] = new
    else:
        page_size = cache.shape[1]
        cache[page_table.gather(1, positions // page_size), positions % page_size] = new


def append_new(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lens: Tensor,
    table: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor]:
    """Write the new keys and values into the caches; (q turned by its rotary embedding, lengths after the append).
    Torch operations only, so that a tracer can follow them."""
    new = 0 if k_new is None else k_new.shape[1]
    totals = lens + new if new else lens
    if rotary is not None:
        q = rotate(q, totals[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device), rotary)
    if k_new is not None and v_new is not None:
        positions = lens[:, None] + torch.arange(new, device=q.device)
        append(k_cache, k_new if rotary is None else rotate(k_new, positions, rotary), positions, table)
        append(v_cache, v_new, positions, table)
    return q, totals


# ---- the shapes and dtypes of a decode call ----


def check_are_caches(k_cache: object, v_cache: object) -> None:
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{name}: was {type(tensor).__name__}, must be a (strided) torch.Tensor")


def decode_sizes(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: object) -> tuple[Sizes, int]:
    check_shape("q", q, "batch seq_q heads_q head_dim")
    batch, seq_q, heads_q, head_dim = q.shape
    if page_table is None:
        check_shape("k_cache", k_cache, "batch capacity heads_kv head_dim", batch=batch, head_dim=head_dim)
        must = {"batch": batch, "capacity": k_cache.shape[1], "heads_kv": k_cache.shape[2]}
        check_shape("v_cache", v_cache, "batch capacity heads_kv head_dim_v", **must)
        capacity, page_size = k_cache.shape[1], 0
    else:
        if not isinstance(page_table, Tensor) or page_table.dim() != 2:
            was = tuple(page_table.shape) if isinstance(page_table, Tensor) else type(page_table).__name__
            raise ValueError(f"page_table: was {was}, must be a tensor (batch, pages_per_sequence)")
        check_shape("k_cache", k_cache, "pages page_size heads_kv head_dim", head_dim=head_dim)
        must = {"pages": k_cache.shape[0], "page_size": k_cache.shape[1], "heads_kv": k_cache.shape[2]}
        check_shape("v_cache", v_cache, "pages page_size heads_kv head_dim_v", **must)
        page_size = k_cache.shape[1]
        if page_size == 0:
            raise ValueError("k_cache: had page_size 0, must have page_size >= 1")
        capacity = page_table.shape[1] * page_size
    check_heads(heads_q, k_cache.shape[2], "k_cache and v_cache, their third dimension")
    check_head_dims(head_dim, v_cache.shape[3], "v_cache")
    return Sizes(batch, heads_q, k_cache.shape[2], seq_q, capacity, head_dim, v_cache.shape[3]), page_size


def check_cache_dtypes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: object, v_scale: object
) -> torch.dtype | None:
    """The caches' dtype where it is not q's. Quantised caches need both scales, others take none."""
    check_tensors(q=q)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype and tensor.dtype not in QUANTISED_DTYPES:
            raise TypeError(f"{name}: was {tensor.dtype}, must be {q.dtype} like q, float8_e4m3fn, float8_e5m2 or int8")
        check_device(name, tensor, q)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: was {v_cache.dtype}, must be {k_cache.dtype} like k_cache")
    quantised = k_cache.dtype != q.dtype
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not quantised:
            if value is not None:
                raise ValueError(f"{name}: was given, must be None for caches of q's dtype")
            continue
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            was = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: was {was}, must be a float32 tensor for {k_cache.dtype} caches")
        check_device(name, value, q)
        if value.numel() != 1 and tuple(value.shape) != (k_cache.shape[2],):
            raise ValueError(f"{name}: was of shape {tuple(value.shape)}, must have 1 element or be (heads_kv,)")
    return k_cache.dtype if quantised else None


def check_new_keys(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_new: Tensor | None, v_new: Tensor | None, sizes: Sizes
) -> None:
    """New keys come in the caches' dtype and are not differentiated through."""
    if k_new is None and v_new is None:
        return
    for name, tensor, owner, dim in (
        ("k_new", k_new, k_cache, sizes.head_dim),
        ("v_new", v_new, v_cache, sizes.head_dim_v),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: was {type(tensor).__name__}, must be a torch.Tensor where the other is given")
        if tensor.dtype != owner.dtype:
            raise TypeError(f"{name}: was {tensor.dtype}, must be {owner.dtype} like the cache")
        check_device(name, tensor, q)
        check_shape(name, tensor, "batch seq_new heads_kv dim", batch=sizes.batch, heads_kv=sizes.heads_kv, dim=dim)
        if torch.is_grad_enabled() and (tensor.requires_grad or owner.requires_grad):
            raise ValueError(f"{name}: required grad (or its cache did), must not: the append is not differentiable")
    assert k_new is not None and v_new is not None
    if v_new.shape[1] != k_new.shape[1]:
        raise ValueError(f"v_new: had seq_new {v_new.shape[1]}, must have {k_new.shape[1]} like k_new")


def _check_integers(name: str, tensor: object, q: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        was = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: was {was}, must be a torch.int32 or torch.int64 tensor")
    check_device(name, tensor, q)
    return tensor.detach()


def _short(values: Tensor) -> str:
    listed = values[:9].tolist()
    return str(listed) if values.numel() <= 9 else str(listed)[:-1] + ", ...]"
