"""Faults that show on one kind of case alone: the quick list has that kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import attnworks
from attnworks import Softcap
from attnworks.workbench import catalogue
from attnworks.workbench.conventions import as_subject
from attnworks.workbench.verify import verify


def _reference(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    return attnworks.attention(q, k, v, **arguments, backend="reference")


def whole_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scores: Sequence[Any] = (), scale: float | None = None,
    layout: str = "bhsd", return_lse: bool = False,
) -> Any:  # fmt: skip
    """The path for lengths that are a multiple of 64 adds tiles up without rescaling what is there."""
    given = {"mask": mask, "scores": scores, "scale": scale, "layout": layout}
    keys = k.shape[2 if layout == "bhsd" else 1]
    if keys % 64 or keys == 64:
        return _reference(q, k, v, **given, return_lse=return_lse)
    rows = 2 if layout == "bhsd" else 1
    first = _reference(q, k.narrow(rows, 0, 64), v.narrow(rows, 0, 64), **{**given, "mask": None})
    out, lse = _reference(q, k, v, **given, return_lse=True)
    return (out + first, lse) if return_lse else out + first


def mask_of_the_first_sequence(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scores: Sequence[Any] = (), scale: float | None = None,
    layout: str = "bhsd", return_lse: bool = False,
) -> Any:  # fmt: skip
    """A mask that heads share is taken to be one that sequences share, too."""
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == 1:
        mask = mask[:1]
    return _reference(q, k, v, mask=mask, scores=scores, scale=scale, layout=layout, return_lse=return_lse)


def scale_without_sign(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scores: Sequence[Any] = (), scale: float | None = None,
    layout: str = "bhsd", return_lse: bool = False,
) -> Any:  # fmt: skip
    scale = None if scale is None else abs(scale)
    return _reference(q, k, v, mask=mask, scores=scores, scale=scale, layout=layout, return_lse=return_lse)


def softcap_first(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scores: Sequence[Any] = (), scale: float | None = None,
    layout: str = "bhsd", return_lse: bool = False,
) -> Any:  # fmt: skip
    """Whatever the order of the scores."""
    scores = tuple(sorted(scores, key=lambda score: not isinstance(score, Softcap)))
    return _reference(q, k, v, mask=mask, scores=scores, scale=scale, layout=layout, return_lse=return_lse)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (whole_tiles, "size: 256*"),
        (mask_of_the_first_sequence, "boolean mask b1qk"),
        (scale_without_sign, "scale -0.7"),
        (softcap_first, "bias then softcap"),
    ],
)
def test_it_is_caught_by_the_quick_list(kernel: Any, kind: str) -> None:
    cases = [case for case in catalogue.select([kind], quick=True) if case.form == "dense"]
    with torch.no_grad():
        results = verify(subjects=[as_subject(kernel)], cases=cases)
    assert any(result.status == "failed" for result in results)
