"""How much two wrong answers to the same probe are alike."""

from __future__ import annotations

import torch
from torch import Tensor

from attnworks.workbench.diagnose.probes import Answer, Truth

CHANCE = 0.25  # what errors that have nothing to do with each other agree in
ROUNDED = 0.02  # of an error, what rounding may change in it
SMALL = 0.03  # relative errors below this are roundings: their size is compared, not their values
TELLING = 4  # so many equal wrong numbers are no accident; 0 and what is not finite are nothing that tells


class Rows:
    """One tensor of one probe as every variant answers it; right until told otherwise. Only wrong answers are kept."""

    def __init__(self, truth: Truth, free: Tensor) -> None:
        """``free``: of each variant, whether it leaves what the memory held where it gives 0 or NaN."""
        count = len(free)
        self.free = free
        self.budget = truth.budget[truth.sample].float()
        self.failed = torch.zeros(count, dtype=torch.bool)
        self.relative = torch.zeros(count)
        self.want = truth.want[truth.sample].float()
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, place: int, answer: Answer) -> None:
        self.failed[place], self.relative[place] = answer.failed, answer.relative
        if answer.failed:
            self.kept[place] = answer.got.float(), answer.wrong

    def _wrong_ones(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """What variants answer, and on which elements that is wrong: (variants, sample) each."""
        got, wrong = zip(*(self.kept[place] for place in index.tolist()), strict=True)
        return torch.stack(got), torch.stack(wrong)

    def apart(self, index: Tensor, answer: Answer) -> Tensor:
        """Whether variants that are wrong as the subject is differ from it by more than both their roundings, which
        may be larger on wrong values than on right ones."""
        got, theirs = answer.got.float(), self._wrong_ones(index)[0]
        error = torch.maximum((theirs - self.want).abs(), (got - self.want).abs())
        differ = (theirs - got).abs() > 2 * self.budget + ROUNDED * error
        strange = (theirs.isfinite() != got.isfinite()) | (theirs.isnan() != got.isnan())
        small = (self.relative[index] < SMALL) & (answer.relative < SMALL)
        return (differ | strange).any(1) & ~small

    def share(self, index: Tensor, answer: Answer) -> Tensor:
        """Of the elements that a subject gets wrong, the share that variants get wrong by the same numbers but for
        rounding, wherever else they are wrong."""
        got, (theirs, wrong) = answer.got.float(), self._wrong_ones(index)
        error = torch.maximum((theirs - self.want).abs(), (got - self.want).abs())
        equal = (theirs - got).abs() <= 2 * self.budget + ROUNDED * error
        telling = equal & wrong & answer.wrong & (got != 0)
        same = telling | (answer.wrong & wrong & ((theirs == got) | (theirs.isnan() & got.isnan())))
        share = same.sum(1) / answer.wrong.sum().clamp_min(1)
        return torch.where(telling.sum(1) >= TELLING, share, 0.0)

    def likeness(self, index: Tensor, answer: Answer) -> Tensor:
        """In [0, 1], for variants that are wrong where the subject is."""
        got, (theirs, wrong) = answer.got.float(), self._wrong_ones(index)
        either = wrong | answer.wrong
        count = either.sum(1)
        jaccard = torch.where(count > 0, (wrong & answer.wrong).sum(1) / count.clamp_min(1), 1.0)
        errors = torch.maximum((theirs - self.want).abs(), (got - self.want).abs())
        agree = 1 - ((theirs - got).abs() / errors.clamp_min(1e-30)).clamp(0, 1)
        same = (theirs == got) | (theirs.isnan() & got.isnan())
        if _one_number(answer):  # memory that held another number
            blank = wrong & answer.wrong & ((theirs == 0) | theirs.isnan())
            same |= blank & self.free[index, None]
        agree = torch.where(same, 1.0, torch.where(agree.isnan(), 0.0, agree))
        # Where the error is too large in all, but in no one element, every element tells as much as its error.
        weight = torch.where(count[:, None] > 0, either.float(), errors.nan_to_num(0, 0, 0))
        values = (agree * weight).sum(1) / weight.sum(1).clamp_min(1e-30)
        relative = self.relative[index]
        ratio = torch.log2(relative.clamp_min(1e-12) / max(answer.relative, 1e-12)).abs()
        size = (1 - ratio / 3).clamp(0, 1)
        small = (relative < SMALL) & (answer.relative < SMALL)
        values = torch.where(small, torch.maximum(values, size), values)
        jaccard = torch.where(small, torch.maximum(jaccard, size), jaccard)
        values = ((values - CHANCE) / (1 - CHANCE)).clamp_min(0)
        return (1 + jaccard + 2 * values) / 4


def _one_number(answer: Answer) -> bool:
    """Whether a subject gives one and the same number wherever it is wrong, as memory that was filled does."""
    held = answer.got[answer.wrong]
    return bool(len(held) > 1 and ((held == held[0]) | (held.isnan() & held[0].isnan())).all())
