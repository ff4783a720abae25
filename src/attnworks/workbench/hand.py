"""Hand-computed cases: N = 4, d = 2, integers, with the answers written out.

With ``scale = ln 2`` the softmax weights are powers of two, 2^(q·k), so every answer is a fraction and can be checked
with pencil and paper: out = sum(2^s v) / total, LSE = ln(total), and dq, dk are ln 2 times a fraction. For the first
query of "full": q·k = 1, 0, 1, -1; weights 2, 1, 2, 1/2; total 11/2; out = (2·(1, 2) + (3, -1) + 2·(-2, 4)) / (11/2)
+ (1/2)(0, -3) / (11/2) = (2/11, 19/11).

The integers are in ``generators.py``. Rows are separated by ";", heads by "|".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from attnworks.masks import Causal, Window
from attnworks.workbench.cases import Case, MaskRule, ScoreRule, SinkRule
from attnworks.workbench.inputs import Inputs
from attnworks.workbench.oracle import Expected, expect

LN2 = math.log(2)


@dataclass(frozen=True)
class Hand:
    """One case and its answers. ``total``: the softmax denominators, whose logarithm is the LSE; ``dq``, ``dk``: in
    units of ln 2; ``dsink``: of one sink logit 0 (weight 1)."""

    case: Case
    out: str
    total: str
    dq: str
    dk: str
    dv: str
    dsink: str = ""

    def values(self) -> dict[str, list[Tensor]]:
        found = {
            "out": [_table(self.out)],
            "lse": [torch.log(_table(self.total)).squeeze(-1)],
            "dq": [LN2 * _table(self.dq)],
            "dk": [LN2 * _table(self.dk)],
            "dv": [_table(self.dv)],
        }
        return found | ({"dsink": [_table(self.dsink).flatten()]} if self.dsink else {})


def _table(text: str) -> Tensor:
    """(heads, rows, columns) fp64 from fractions."""
    return torch.tensor(
        [[[float(Fraction(x)) for x in row.split(",")] for row in head.split(";")] for head in text.split("|")],
        dtype=torch.float64,
    )


def _case(
    name: str,
    seq_q: int = 4,
    seq_kv: int = 4,
    heads_q: int = 1,
    mask: tuple[MaskRule, ...] = (),
    scores: tuple[ScoreRule, ...] = (),
) -> Case:
    # fmt: off
    return Case(f"hand: {name}", "numbers worked out by hand", heads_q=heads_q, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv,
                head_dim=2, head_dim_v=2, scale=LN2, mask=mask, scores=scores, generator="hand", gradients=True)
    # fmt: on


HAND = (
    Hand(
        _case("full"),
        out="2/11, 19/11; 2/3, -2/3; 3/5, 4/5; -24/35, 103/35",
        total="11/2; 9; 10; 105/16",
        dq="-58/121, 94/121; 58/27, -14/9; -53/25, 9/5; -128/735, 32/35",
        dk="648244/444675, -15464/33075; 277899/148225, 16693/33075; "
        "-1720463/444675, 10463/33075; 238522/444675, -11692/33075",
        dv="1586/1155, 8/63; 617/1155, 31/315; 2059/1155, 164/315; 358/1155, 16/63",
    ),
    Hand(
        _case("causal", mask=(Causal(),)),
        out="1, 2; 2, 1/2; 3/4, 7/4; -24/35, 103/35",
        total="2; 4; 8; 105/16",
        dq="0, 0; 3/4, 0; -5/4, 5/4; -128/735, 32/35",
        dk="1088/735, 29/2940; 1737/980, 117/490; -9307/2940, -859/2940; -64/735, 32/735",
        dv="443/210, 32/105; 169/420, 137/420; 617/420, 151/420; 2/105, 1/105",
    ),
    Hand(
        _case("two queries on four keys, causal", seq_q=2, mask=(Causal(),)),
        out="1/5, 11/5; 2/3, -2/3",
        total="5; 9",
        dq="-14/25, 22/25; 58/27, -14/9",
        dk="8/25, 16/27; 14/25, -2/27; -22/25, 14/27; 0, -28/27",
        dv="2/5, 2/9; 1/5, 2/9; 2/5, 1/9; 0, 4/9",
    ),
    Hand(
        _case("four queries on two keys, causal", seq_kv=2, mask=(Causal(),)),
        out="0, 0; 0, 0; 1, 2; 7/5, 7/5",
        total="0; 0; 4; 5/2",
        dq="0, 0; 0, 0; 0, 0; -4/25, 0",
        dk="-8/25, 4/25; 8/25, -4/25",
        dv="13/5, -1/5; 2/5, 1/5",
    ),
    Hand(
        _case("window of two", mask=(Window(1, 0),)),
        out="1, 2; 2, 1/2; 1/2, 3/2; -128/65, 253/65",
        total="2; 4; 4; 65/16",
        dq="0, 0; 3/4, 0; -5/2, 5/2; 384/4225, -384/4225",
        dk="0, 3/4; 5/2, 7/4; -20357/8450, -21509/8450; -384/4225, 192/4225",
        dv="1, 1/2; 1/2, 0; 321/130, 63/130; 2/65, 1/65",
    ),
    Hand(
        _case("two query heads on one, causal", heads_q=2, mask=(Causal(),)),
        out="1, 2; 2, 1/2; 3/4, 7/4; -24/35, 103/35 | 1, 2; 5/3, 1; 5/4, 1; 8/11, -2/11",
        total="2; 4; 8; 105/16 | 1/2; 3/2; 2; 22",
        dq="0, 0; 3/4, 0; -5/4, 5/4; -128/735, 32/35 | 0, 0; 8/9, 0; 1, -3/4; 14/121, -2/121",
        dk="2367451/1067220, -726433/1067220; 2451173/1067220, 1042733/533610; "
        "-370288/88935, -280339/355740; -31264/88935, -43168/88935",
        dv="4943/2310, 1213/420; 1413/1540, 209/140; 7207/4620, 64/105; 442/1155, 1/105",
    ),
    Hand(
        _case("sink", scores=(SinkRule(0.0),)),
        out="2/13, 19/13; 3/5, -3/5; 6/11, 8/11; -72/121, 309/121",
        total="13/2; 10; 11; 121/16",
        dq="-66/169, 114/169; 97/50, -37/25; -234/121, 196/121; 16/1331, 1152/1331",
        dk="305304/224939, -15797/33275; 377682/224939, 14638/33275; "
        "-711504/224939, 8213/66550; 111244/224939, -11494/33275",
        dv="1888/1573, 61/605; 736/1573, 51/605; 2434/1573, 541/1210; 433/1573, 137/605",
        dsink="-1433483/11246950",
    ),
)

BY_NAME = {hand.case.name: hand for hand in HAND}


def answer(inputs: Inputs, gradients: bool) -> Expected:
    """What is expected of a case: by hand where it was worked out by hand, else by the oracle."""
    found = expect(inputs, gradients)
    hand = BY_NAME.get(inputs.case.name)
    if hand is not None:
        written = hand.values()
        found.values = {name: written[name] for name in found.values}
    return found
