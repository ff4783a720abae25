"""The cross-check: the framework's own fused attention on the same problem, computed by other people's code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnworks.workbench.inputs import Inputs
from attnworks.workbench.metrics import ELEMENTWISE_FACTOR
from attnworks.workbench.oracle import Expected, by_query_head, visible


@dataclass
class Fused:
    """Its outputs, (heads, rows, dim) for each sequence, and how far another correct kernel may be from them."""

    out: list[Tensor]
    budgets: list[Tensor]

    def compare(self, got: dict[str, list[Tensor]]) -> str:
        """ "" if an output agrees, else where it does not. Rows on which the framework has no answer are left out."""
        for sequence, (ours, theirs, budget) in enumerate(zip(got["out"], self.out, self.budgets, strict=True)):
            both = ours.isfinite() & theirs.isfinite() & budget.isfinite()
            if not ours.numel() or not bool(both.any()):
                continue
            share = torch.where(both, (ours.double() - theirs.double()).abs() / budget, 0)
            worst = int(share.argmax())
            if float(share.flatten()[worst]) > 1:
                place = [int(n) for n in torch.unravel_index(torch.tensor(worst), share.shape)]
                times = f"{float(share.max()):.3g} times as far as allowed"
                return f"{times} from torch's SDPA at sequence {sequence}, {place}"
        return ""


def run(inputs: Inputs, expected: Expected) -> Fused | str:
    """SDPA's outputs, or why they are no help: it cannot express the problem, or is itself outside the oracle's
    budget."""
    case = inputs.case
    if case.scores or case.dtype == torch.float64 or case.cache_dtype is not None:
        return "SDPA has no such scores or dtypes"
    if case.heads_q == 0 or case.heads_q > 1000:
        return "no heads, or too many to repeat"
    outs, budgets = [], []
    for sequence, part in enumerate(inputs.values):
        if not part.k.shape[1] or not part.q.shape[1]:
            outs.append(torch.zeros_like(part.d_out))
        else:
            group = case.heads_q // case.heads_kv
            k, v = (by_query_head(x, group)[None] for x in (part.k, part.v))
            mask = visible(inputs, sequence)[None] if case.mask else None
            outs.append(scaled_dot_product_attention(part.q[None], k, v, attn_mask=mask, scale=case.softmax_scale)[0])
        # The sum of both kernels' budgets.
        budgets.append(2 * ELEMENTWISE_FACTOR * expected.contraction["out"][sequence])
    for out, budget, want in zip(outs, budgets, expected.values["out"], strict=True):
        error = torch.where(out.isfinite() & want.isfinite(), (out.double() - want).abs(), 0)
        if bool((error > budget / 2).any()):
            return "SDPA is outside its own budget here"
    return Fused(outs, budgets)
