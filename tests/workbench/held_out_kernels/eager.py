"""Wrong kernels with the whole matrix of scores at once, called as SDPA is: (batch, heads, rows, dim), causal from the
top left."""

import math

import torch
from torch import Tensor

INF = math.inf


def _hide(scores: Tensor, attn_mask, is_causal: bool) -> Tensor:
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.masked_fill(_ahead(scores), -INF) if is_causal else scores


def _ahead(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def _softmax(scores: Tensor) -> Tensor:
    """Rows of -inf give 0."""
    empty = (scores == -INF).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)


def _grouped(x: Tensor, heads_q: int) -> Tensor:
    return x.repeat_interleave(heads_q // max(x.shape[1], 1), 1)


def no_scale(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The scores are not scaled."""
    k, v = (_grouped(x.float(), query.shape[1]) for x in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", query.float(), k)
    return (_softmax(_hide(scores, attn_mask, is_causal)) @ v).to(query.dtype)


def own_scale(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The scale the caller gives is ignored: it is always 1/sqrt(head_dim)."""
    scores = query.float() @ key.float().transpose(-2, -1) / math.sqrt(query.size(-1))
    return (_softmax(_hide(scores, attn_mask, is_causal)) @ value.float()).to(query.dtype)


def scaled_q_and_k(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Q and K are both multiplied by the whole scale."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k = query.float() * scale, key.float() * scale
    return (_softmax(_hide(q @ k.mT, attn_mask, is_causal)) @ value.float()).to(query.dtype)


def scale_of_v(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The default scale is taken from V's head dim instead of Q's."""
    if scale is None:
        scale = 1 / math.sqrt(value.shape[3])
    scores = scale * torch.einsum("...id,...jd->...ij", query.float(), key.float())
    return torch.einsum("...ij,...jd->...id", _softmax(_hide(scores, attn_mask, is_causal)), value.float()).to(
        query.dtype
    )


def scale_of_padded_dim(query, key, value, is_causal=False, scale=None):
    """The default scale is taken from the head dim padded to a multiple of 64."""
    pad = -query.shape[-1] % 64
    q, k = (torch.nn.functional.pad(x.float(), (0, pad)) for x in (query, key))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (_softmax(_hide(scale * q @ k.mT, None, is_causal)) @ value.float()).to(query.dtype)


def hides_itself(query, key, value, is_causal=False, scale=None):
    """Causal is strict: a query does not see its own key."""
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
        scores = torch.where(visible, scores, -INF)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def sees_the_next(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Causal lets each query see one key ahead."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _hide((query.float() @ key.float().mT) * scale, attn_mask, False)
    if is_causal:
        rows, keys = (torch.arange(n) for n in scores.shape[-2:])
        scores = scores.masked_fill(keys[None, :] > rows[:, None] + 1, -INF)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def causal_not_in_groups(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The path for grouped heads ignores the causal flag."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = query.float() * scale, key.float(), value.float()
    if not enable_gqa:
        return (_softmax(_hide(q @ k.mT, attn_mask, is_causal)) @ v).to(query.dtype)
    batch, heads_q, rows, dim = q.shape
    q = q.view(batch, k.shape[1], -1, rows, dim)
    scores = (q @ k[:, :, None].mT).reshape(batch, heads_q, rows, -1)
    probs = _softmax(_hide(scores, attn_mask, False)).view(batch, k.shape[1], -1, rows, k.shape[2])
    return (probs @ v[:, :, None]).reshape(batch, heads_q, rows, -1).to(query.dtype)


def softmax_over_queries(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The softmax runs over the queries instead of the keys."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    probs = _softmax(scores.mT).mT
    return (probs @ value.float()).to(query.dtype)


def sum_over_queries(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Weights are right, but divided by their sum over the queries."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    if not scores.numel():
        return query.new_zeros(*query.shape[:3], value.shape[3])
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -INF, 0, top))
    total = weights.sum(-2, keepdim=True)
    return ((weights / torch.where(total == 0, 1, total)) @ value.float()).to(query.dtype)


def no_maximum(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Exponentials are taken without subtracting the maximum."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = _hide(scale * (query.float() @ key.float().mT), attn_mask, is_causal).exp()
    total = weights.sum(dim=-1, keepdim=True)
    return (weights @ value.float() / total.masked_fill(total == 0, 1)).to(query.dtype)


def empty_rows_nan(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """A row without visible keys is NaN."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype)


def empty_rows_mean(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """A hidden key scores the smallest finite number, so that a row without visible keys is the mean of V."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().mT * scale
    lowest = torch.finfo(scores.dtype).min
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, lowest)
    elif attn_mask is not None:
        scores = scores + attn_mask.clamp_min(lowest)
    if is_causal:
        scores = scores.masked_fill(_ahead(scores), lowest)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def true_hides(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """A boolean mask is read the other way round: True hides."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.logical_not()
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def bias_scaled(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The bias is added before the scale, and so is scaled too."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * _hide(query.float() @ key.float().mT, attn_mask, is_causal)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def bias_of_first_batch(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Every sequence of the batch reads the first one's mask or bias."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.dim() == 4:
        attn_mask = attn_mask[0]
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def bias_of_first_head(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Every head reads the first head's mask or bias."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.dim() >= 3:
        attn_mask = attn_mask.narrow(-3, 0, 1)
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def rounded_scores(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Scores are rounded to the input dtype before the softmax."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.float() @ key.float().mT * scale).to(query.dtype)
    probs = _softmax(_hide(scores.float(), attn_mask, is_causal))
    return (probs.to(query.dtype).float() @ value.float()).to(query.dtype)


def cleans_nan(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """NaN in the result is turned into 0, whatever it came from."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _hide(query.float() @ key.float().mT * scale, attn_mask, is_causal)
    return torch.nan_to_num(_softmax(scores) @ value.float()).to(query.dtype)


def groups_tiled(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Query head h reads KV head h modulo heads_kv."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.float().repeat(1, query.shape[1] // max(x.shape[1], 1), 1, 1) for x in (key, value))
    return (_softmax(_hide(query.float() @ k.mT * scale, attn_mask, is_causal)) @ v).to(query.dtype)


def v_of_another_head(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """In grouped heads V comes from another KV head than K."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads_q, heads_kv = query.shape[1], max(key.shape[1], 1)
    k = key.float()[:, torch.arange(heads_q) // (heads_q // heads_kv or 1)]
    v = value.float()[:, torch.arange(heads_q) % heads_kv]
    return (_softmax(_hide(query.float() @ k.mT * scale, attn_mask, is_causal)) @ v).to(query.dtype)


def swapped(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """K and V are swapped."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key.shape != value.shape:
        raise NotImplementedError("head_dim_v must be head_dim")
    scores = query.float() @ value.float().mT * scale
    return (_softmax(_hide(scores, attn_mask, is_causal)) @ key.float()).to(query.dtype)


def as_if_contiguous(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """K's strides are ignored: it is read as if contiguous."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if key.numel() and min(key.stride()) > 0:
        packed = [key.shape[1:].numel(), key.shape[2:].numel(), key.shape[3], 1]
        key = torch.as_strided(key, key.shape, packed)
    scores = query.float() @ key.float().mT * scale
    return (_softmax(_hide(scores, attn_mask, is_causal)) @ value.float()).to(query.dtype)


def scales_in_place(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Q is scaled in place, in the caller's tensor."""
    query.data.mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = _hide(query.float() @ key.float().mT, attn_mask, is_causal)
    return (_softmax(scores) @ value.float()).to(query.dtype)


def mask_in_place(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """Scores are written into the bias that the caller passed."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().mT * scale
    if attn_mask is not None and attn_mask.is_floating_point() and attn_mask.shape == scores.shape:
        result = scores + attn_mask
        attn_mask.data.copy_(result)
        scores, attn_mask = result, None
    return (_softmax(_hide(scores, attn_mask, is_causal)) @ value.float()).to(query.dtype)
