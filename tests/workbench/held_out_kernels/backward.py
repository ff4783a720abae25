"""Wrong kernels whose forward is right: each has a backward of its own with one fault. Called as SDPA, flash_attn_func
or attnworks.attention are."""

import torch
from torch import Tensor
from torch.autograd import Function

import attnworks as aw

INF = float("inf")


def _forward(q, k, v, scale, hidden=None, cap=0.0):
    """(batch, heads_q, rows, dim) in fp32, KV heads repeated: probabilities, out and LSE (rows of no key 0, -inf)."""
    s = scale * (q.float() @ _repeated(k, q).mT)
    if cap:
        s = cap * torch.tanh(s / cap)
    if hidden is not None:
        s = s.masked_fill(hidden, -INF)
    return *_probs(s), s


def _probs(s: Tensor):
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -INF)
    p = torch.exp(s - top.masked_fill(top == -INF, 0))
    total = p.sum(-1, keepdim=True)
    some = total.masked_fill(total == 0, 1)
    return p / some, (top + some.log()).masked_fill(total == 0, -INF)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1)


def _per_kv_head(x: Tensor, like: Tensor) -> Tensor:
    """Sum of each group of query heads."""
    batch, heads = like.shape[:2]
    return x.reshape(batch, heads, x.shape[1] // max(heads, 1), *x.shape[2:]).sum(2).to(like.dtype)


def _ahead(q: Tensor, k: Tensor, causal: bool, top_left: bool = False):
    shift = 0 if top_left else k.shape[2] - q.shape[2]
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - shift
    return ahead > 0 if causal else None


class _NoDelta(Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, hidden):
        p, _, _ = _forward(q, k, v, scale, hidden)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return (p @ _repeated(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        grad = grad.float()
        dv = p.mT @ grad
        ds = p * (grad @ _repeated(v, q).mT)
        dq = ctx.scale * ds @ _repeated(k, q)
        dk = ctx.scale * ds.mT @ q.float()
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), None, None


def constant_denominator(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    """Delta is left out of dS, as if the denominator were constant."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _NoDelta.apply(query, key, value, scale, _ahead(query, key, is_causal, top_left=True))


class _Tiled(Function):
    """Backward in tiles of keys, from the LSE; ``fault`` names what it does wrong."""

    @staticmethod
    def forward(ctx, q, k, v, scale, hidden, tile, fault):
        p, lse, _ = _forward(q, k, v, scale, hidden)
        out = (p @ _repeated(v, q)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = scale, hidden, tile, fault
        return out, lse[..., 0]

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        scale, hidden, tile, fault = ctx.rest
        grad = grad.float()
        qf, kf, vf = q.float(), _repeated(k, q), _repeated(v, q)
        delta = (grad * out.float()).sum(-1, keepdim=True)
        if fault != "lse":
            delta = delta - grad_lse[..., None].masked_fill(lse == -INF, 0)
        dq, dk, dv = torch.zeros_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
        safe = lse.masked_fill(lse == -INF, INF)
        last = k.shape[2] // tile * tile if fault == "dq tail" else k.shape[2]
        for j in range(0, k.shape[2], tile):
            at = slice(j, j + tile)
            s = scale * qf @ kf[:, :, at].mT
            if hidden is not None and fault != "mask":
                s = s.masked_fill(hidden[:, at], -INF)
            p = torch.exp(s - safe)
            dv[:, :, at] = p.mT @ grad
            ds = p * (grad @ vf[:, :, at].mT - delta)
            if j < last:
                dq += ds @ kf[:, :, at]
            if fault == "dq overwritten":
                dq = ds @ kf[:, :, at]
            dk[:, :, at] = ds.mT @ qf
        dq, dk = dq if fault == "dq" else dq * scale, dk if fault == "dk" else dk * scale
        if fault == "group":
            first = slice(None, None, q.shape[1] // max(k.shape[1], 1))
            return dq.to(q.dtype), dk[:, first].to(k.dtype), dv[:, first].to(v.dtype), None, None, None, None
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), None, None, None, None


def _flash(q, k, v, scale, causal, wanted, tile, fault):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _Tiled.apply(q, k, v, scale, _ahead(q, k, causal), tile, fault)
    return (out.transpose(1, 2), lse, None) if wanted else out.transpose(1, 2)


def dq_unscaled(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """dQ is not multiplied by the scale."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 64, "dq")


def dk_unscaled(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """dK is not multiplied by the scale."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 48, "dk")


def one_head_of_the_group(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """dK and dV come from the first query head of each group alone."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 128, "group")


def mask_missing_backward(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Backward ignores the causal mask."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 100, "mask")


def dq_without_last_tile(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """dQ lacks the keys past the last whole tile of 16."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 16, "dq tail")


def dq_of_last_tile(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """dQ is overwritten by each tile of 32 keys instead of added up."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 32, "dq overwritten")


def lse_cotangent_dropped(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Gradients that arrive through the LSE are ignored."""
    return _flash(q, k, v, softmax_scale, causal, return_attn_probs, 64, "lse")


class _Capped(Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, cap, hidden):
        p, _, _ = _forward(q, k, v, scale, hidden, cap)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return (p @ _repeated(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        dp = torch.einsum("bhid,bhjd->bhij", grad.float(), _repeated(v, q))
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))  # times 1 - tanh² is what is missing
        dq = torch.einsum("bhij,bhjd->bhid", ds, _repeated(k, q)) * ctx.scale
        dk = torch.einsum("bhij,bhid->bhjd", ds, q.float()) * ctx.scale
        dv = torch.einsum("bhij,bhid->bhjd", p, grad.float())
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), None, None, None


def cap_not_differentiated(q, k, v, softmax_scale=None, causal=False, softcap=0.0):
    """dS lacks the softcap's derivative."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Capped.apply(q, k, v, scale, softcap, _ahead(q, k, causal)).transpose(1, 2)


class _DeltaOfGrad(Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, hidden):
        p, _, _ = _forward(q, k, v, scale, hidden)
        out = p @ _repeated(v, q)
        ctx.save_for_backward(q, k, v, p, out)
        ctx.scale = scale
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p, out = ctx.saved_tensors
        grad = grad.float()
        delta = torch.linalg.vecdot(grad, out).mean(-1)[..., None, None]  # one for all rows of a head
        ds = p * (grad @ _repeated(v, q).mT - delta) * ctx.scale
        dk, dv = ds.mT @ q.float(), p.mT @ grad
        return (ds @ _repeated(k, q)).to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), None, None


def delta_of_the_mean(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    """Delta is the mean over a head's rows instead of each row's own."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _DeltaOfGrad.apply(query, key, value, scale, _ahead(query, key, is_causal, top_left=True))


class _Weights(Function):
    """dV from the weights before they are normalised."""

    @staticmethod
    def forward(ctx, q, k, v, scale, hidden):
        p, lse, s = _forward(q, k, v, scale, hidden)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else lse
        ctx.save_for_backward(q, k, v, p, torch.exp(s - top.masked_fill(top == -INF, 0)))
        ctx.scale = scale
        return (p @ _repeated(v, q)).to(q.dtype), lse[..., 0]

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, k, v, p, weights = ctx.saved_tensors
        grad = grad.float()
        dp = grad @ _repeated(v, q).mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) + grad_lse[..., None]) * ctx.scale
        dq, dk = ds @ _repeated(k, q), ds.mT @ q.float()
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(weights.mT @ grad, v), None, None


def dv_not_normalised(q, k, v, *, mask=None, scale=None, layout="bhsd", return_lse=False):
    """dV is made from exp(S - max), without the division by the sum."""
    if mask is not None and not isinstance(mask, aw.Causal):
        raise NotImplementedError("only causal")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    hidden = _ahead(q, k, mask is not None, top_left=mask is not None and mask.align == "top-left")
    out, lse = _Weights.apply(q, k, v, scale, hidden)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return (out, lse) if return_lse else out


class _TopLeftBackward(Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        p, _, _ = _forward(q, k, v, scale, _ahead(q, k, causal))
        ctx.save_for_backward(q, k, v)
        ctx.rest = scale, causal
        return (p @ _repeated(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        scale, causal = ctx.rest
        p, _, _ = _forward(q, k, v, scale, _ahead(q, k, causal, top_left=True))
        grad = grad.float()
        dp = grad @ _repeated(v, q).mT
        ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
        dk, dv = ds.mT @ q.float(), p.mT @ grad
        return (ds @ _repeated(k, q)).to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), None, None


def backward_top_left(q, k, v, softmax_scale=None, causal=False):
    """Backward recomputes P with causal from the top left, forward has it from the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _TopLeftBackward.apply(q, k, v, scale, causal).transpose(1, 2)


class _Biased(Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, scale):
        s = scale * q.float() @ _repeated(k, q).mT
        p, _ = _probs(s if bias is None else s + bias)
        ctx.save_for_backward(q, k, v, p, bias)
        ctx.scale = scale
        return (p @ _repeated(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p, bias = ctx.saved_tensors
        grad = grad.float()
        dp = grad @ _repeated(v, q).mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dk, dv = ctx.scale * ds.mT @ q.float(), p.mT @ grad
        dbias = None if bias is None else ctx.scale * ds.sum_to_size(bias.shape)
        return (ctx.scale * ds @ _repeated(k, q)).to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v), dbias, None


def dbias_scaled(q, k, v, *, mask=None, scores=(), scale=None):
    """The bias's gradient is multiplied by the scale, which the bias itself is not."""
    if mask is not None or any(not isinstance(score, aw.Bias) for score in scores) or len(scores) > 1:
        raise NotImplementedError("only a bias")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Biased.apply(q, k, v, scores[0].tensor if scores else None, scale)
