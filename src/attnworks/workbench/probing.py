"""Probing: what a kernel can do that its parameters do not tell, found by trying it on small ordinary inputs.

A kernel that raises when tried with a dtype, with grouped heads, with head_dim_v other than head_dim or with nothing to
work out (no sequences, heads or queries), or whose output requires no grad, is taken not to do that: it is listed with
what happened. A crash, a hang or a wrong shape is no refusal, and what raises on everything is broken: both are left
for the results to show. So is what raises without keys, where rows have a result: 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from attnworks.workbench.cases import Case
from attnworks.workbench.conventions import Kernel, as_subject, load_subject
from attnworks.workbench.guards import Guarded
from attnworks.workbench.isolation import TIMEOUT, Isolated
from attnworks.workbench.subjects import EMPTY, FORMS, Declined, Finding, Raised, abilities_of

_ROWS = 64
_BASES = {
    "dense": Case("probe: dense", "an ordinary call", seq_q=_ROWS, seq_kv=_ROWS),
    "varlen": Case("probe: varlen", "an ordinary call", form="varlen", lengths=((_ROWS, _ROWS), (32, 32))),
    "decode": Case(
        "probe: decode", "an ordinary call", form="decode", seq_q=1, seq_kv=_ROWS, lengths=((1, _ROWS), (1, 32))
    ),
}


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to be verified. ``about``: convention, layout and parameters as inferred, empty for one that
    brought its own ``Subject``; ``refused``: what it did not do when tried, with what happened."""

    subject: Guarded
    about: dict[str, Any]
    refused: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        abilities = asdict(self.subject.abilities)
        abilities["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in abilities["dtypes"] or ()]
        isolated = isinstance(self.subject, Isolated)
        timeout = self.subject.timeout if isinstance(self.subject, Isolated) else None
        kernel = {"name": self.subject.name, "isolated": isolated, "timeout": timeout, **self.about}
        return kernel | {"abilities": abilities, "refused": self.refused}

    def close(self) -> None:
        if isinstance(self.subject, Isolated):
            self.subject.close()


def prepare(target: str, convention: str | None = None, *, isolated: bool = True, timeout: float = TIMEOUT) -> Prepared:
    """Load a kernel as ``load_subject`` does, between guard bands and, if ``isolated``, in a process of its own, and
    try what it can do. Raises ``ValueError`` where it cannot be loaded."""
    if isolated:
        there = Isolated(target, convention, timeout)
        return _probed(there, there.about)
    here = load_subject(target, convention)
    return _probed(Guarded(here), here.about() if isinstance(here, Kernel) else {})


def prepare_function(function: Any, convention: str | None = None) -> Prepared:
    """``prepare`` for a function at hand, in this process."""
    here = as_subject(function, convention)
    return _probed(Guarded(here), here.about() if isinstance(here, Kernel) else {})


def _probed(subject: Guarded, about: dict[str, Any]) -> Prepared:
    # A kernel with a Subject of its own says itself what it can do.
    return Prepared(subject, about, probe(subject) if about else {})


def probe(subject: Guarded) -> dict[str, str]:
    """Narrow ``subject.abilities`` to what it did when tried. Returns what it did not do, with what happened."""
    refused: dict[str, str] = {}
    dim = (subject.abilities.head_dims or (64,))[0]
    bases = (replace(_BASES[form], head_dim=dim, head_dim_v=dim) for form in FORMS)
    base = next((base for base in bases if not subject.reasons(base.outline())), None)
    if base is None:
        return refused
    declared = abilities_of(subject)
    dtypes = declared.dtypes or (torch.float32, torch.bfloat16, torch.float16)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in dtypes}
    tried = {dtype: _try(subject, replace(base, dtype=dtype), names[dtype], refused) for dtype in dtypes}
    ran = [dtype for dtype, how in tried.items() if how == "ran"]
    if not ran:
        refused.clear()
        subject.seen.clear()
        return refused
    base = replace(base, dtype=ran[0])
    gqa, unequal = declared.gqa, declared.unequal_dims
    if gqa:
        gqa = _try(subject, replace(base, heads_q=4), "grouped heads", refused) != "refused"
    if unequal:
        narrow = replace(base, head_dim_v=base.head_dim // 2)
        unequal = _try(subject, narrow, "head_dim_v of its own", refused) != "refused"
    why_not, lse, lse_grad = _outputs(subject, base)
    gradients = declared.gradients and not why_not
    taken = [kind for kind in EMPTY if not _refuses_none_of(subject, base, kind, gradients, refused)]
    if declared.gradients and why_not:
        refused["gradients"] = why_not
    if declared.lse and not lse:
        refused["LSE"] = "it returns none"
    subject.abilities = replace(
        declared,
        dtypes=tuple(dtype for dtype, how in tried.items() if how != "refused"),
        empty=declared.empty if declared.empty is not None or len(taken) == len(EMPTY) else tuple(taken),
        gqa=gqa,
        unequal_dims=unequal,
        lse=declared.lse and lse,
        lse_gradients=declared.lse_gradients and lse_grad,
        gradients=gradients,
    )
    subject.seen.clear()  # the same will be seen in the run
    return refused


def _try(subject: Guarded, case: Case, what: str, refused: dict[str, str]) -> Literal["ran", "refused", "failed"]:
    if subject.reasons(case.outline()):
        return "failed"  # declared, so there is nothing to try
    try:
        subject(case.build())
    except (Raised, Declined) as error:
        refused[what] = str(error)
    except Finding:
        return "failed"
    except Exception as error:  # whatever a kernel in this process raises
        refused[what] = f"raised {type(error).__name__}: {error}"
    return "refused" if what in refused else "ran"


def _refuses_none_of(subject: Guarded, base: Case, kind: str, gradients: bool, refused: dict[str, str]) -> bool:
    """Whether it raises, forward or backward, where a problem of the base's form has none of something."""
    case = replace(base, name=f"probe: no {kind}", gradients=gradients)
    if kind == "batch" and base.form != "dense":  # no sequences at all are nothing that is packed or cached
        return False
    if kind == "batch":
        case = replace(case, batch=0)
    elif kind == "heads":
        case = replace(case, heads_q=0, heads_kv=0)
    else:
        case = replace(case, seq_q=0, lengths=tuple((0, seq_kv) for _, seq_kv in base.lengths))
    if _try(subject, case, f"no {kind}", refused) == "ran" and gradients:
        inputs = case.build()
        leaves = inputs.differentiable()
        try:
            inputs.backward(leaves, subject(inputs)[0])
        except (Raised, Declined) as error:
            refused[f"no {kind}"] = f"backward: {error}"
        except Finding:
            return False
        except Exception as error:  # whatever a kernel in this process raises
            first = (str(error).splitlines() or ["no message"])[0]
            refused[f"no {kind}"] = f"backward raised {type(error).__name__}: {first}"
    return f"no {kind}" in refused


def _outputs(subject: Guarded, base: Case) -> tuple[str, bool, bool]:
    """Why no gradients can be asked for ("" if they can), whether an LSE comes back, and whether it requires grad."""
    inputs = base.build()
    inputs.differentiable()
    try:
        out, lse = subject(inputs)
    except Exception as error:  # what it declines is no fault; anything else the run will show
        lse = subject(base.build())[1]
        return str(error) if isinstance(error, Declined) else "", lse is not None, True
    why_not = "" if out.requires_grad else "its output does not require grad when its inputs do"
    return why_not, lse is not None, lse is not None and lse.requires_grad
