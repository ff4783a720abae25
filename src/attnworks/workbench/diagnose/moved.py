"""What stands in the rows that are wrong: nothing, one number everywhere, or what belongs to another row, head or
sequence. It is read from the rows themselves, whatever fault put it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from attnworks.workbench.diagnose.probes import Answer, Bench, Observation, Truth
from attnworks.workbench.diagnose.readings import Reading

MOST_ROWS = 400  # wrong ones that are looked up
LEAST_ROWS = 3
USUAL = 0.9  # of the wrong rows, for a rule to hold
_TENSORS = ("out", "dq", "dk", "dv")
_NOWHERE = {
    "out": ("tail rows unwritten", "sequences left out", "heads left out", "stores reach the next sequence"),
    "dq": ("tail rows unwritten in dq", "sequences left out in backward", "heads left out in backward"),
    "dk": ("last tile missing in dk, dv", "sequences left out in backward", "heads left out in backward"),
    "dv": ("last tile missing in dk, dv", "sequences left out in backward", "heads left out in backward"),
}


def in_rows(benches: Sequence[Bench], seen: Sequence[Observation]) -> list[Reading]:
    """What stands in wrong rows, of the first probe that tells for each tensor."""
    found: dict[str, Reading] = {}
    for bench, s in zip(benches, seen, strict=True):
        if bench.probe.case.generator != "normal":  # whose rows may be alike
            continue
        for name in _TENSORS:
            answer = s.answers.get(name)
            out_wrong = name != "out" and s.answers["out"].failed if answer else True
            if name in found or answer is None or not answer.failed or (name != "out" and out_wrong):
                continue
            if reading := _of_tensor(name, bench.truths[name], answer):
                found[name] = Reading(f"{name} {reading.said} ({bench.probe.name})", reading.faults)
        if "lse" not in found and (reading := _unwritten_lse(bench, s)):
            found["lse"] = Reading(f"the LSE {reading.said} ({bench.probe.name})", reading.faults)
        if "lse" not in found and "lse" in s.answers and _lse_of_others(bench, s):
            said = f"the LSE holds the right numbers of other rows ({bench.probe.name})"
            found["lse"] = Reading(said, ("lse of another row",))
    return list(found.values())


def _lse_of_others(bench: Bench, seen: Observation) -> bool:
    """Whether the output is right and wrong numbers of the LSE are those of other rows."""
    truth, answer = bench.truths["lse"], seen.answers["lse"]
    if seen.answers["out"].failed or not answer.failed or not answer.parts:
        return False
    got, want = (torch.cat([x.detach().double().flatten() for x in parts]) for parts in
                 (answer.parts, truth.standard.want))  # fmt: skip
    if got.shape != want.shape:
        return False
    wrong = ((got - want).abs() > truth.budget) & got.isfinite()
    looked_up, known = got[wrong][:MOST_ROWS], want[want.isfinite()]
    if len(looked_up) < 2 * LEAST_ROWS or float(known.std()) < 1e-2 or len(set(looked_up.tolist())) < 2 * LEAST_ROWS:
        return False
    least = (looked_up[:, None] - known).abs().min(1).values
    return float((least < 1e-5 * looked_up.abs().clamp_min(1e-3)).double().mean()) >= USUAL


def _unwritten_lse(bench: Bench, seen: Observation) -> Reading | None:
    """The LSE where it is one number in some of the rows that have a key, the output being right."""
    answer = seen.answers.get("lse")
    if answer is None or not answer.failed or seen.answers["out"].failed or not answer.parts:
        return None
    want = bench.truths["lse"].standard.want
    if [x.shape for x in answer.parts] != [x.shape for x in want]:
        return None
    got, right = (torch.cat([x.detach().double().flatten() for x in parts]) for parts in (answer.parts, want))
    budget = bench.truths["lse"].budget
    wrong = ((got - right).abs() > budget) | (got.isfinite() != right.isfinite())
    held = got[wrong]
    if len(held) < LEAST_ROWS or bool(wrong.all()) or not bool(right[wrong].isfinite().all()):
        return None
    if not bool(((held == held[0]) | (held.isnan() & held[0].isnan())).all()):
        return None
    return Reading(
        f"is {float(held[0]):.4g} in {_which(_places([x.shape for x in want]), wrong)}", ("lse not written",)
    )


def _of_tensor(name: str, truth: Truth, answer: Answer) -> Reading | None:
    shapes = [x.shape for x in truth.standard.want]
    if [x.shape for x in answer.parts] != shapes or any(len(shape) != 3 or shape[-1] < 8 for shape in shapes):
        return None
    got = torch.cat([x.detach().double().flatten(0, 1) for x in answer.parts])
    want = torch.cat([x.double().flatten(0, 1) for x in truth.standard.want])
    budget = torch.cat([x.double().flatten(0, 1) for x in truth.standard.elementwise])
    error = (got - want).abs()
    wrong = ((error > budget) | (error.isnan() & ~want.isnan())).any(-1)
    if int(wrong.sum()) < LEAST_ROWS:
        return None
    places = _places(shapes)
    one = got[wrong][:, :1]
    if bool(((got[wrong] == one[0]) | (got[wrong].isnan() & one[0].isnan())).all()):
        value = float(one[0])
        what = "is 0" if value == 0 else "is NaN" if value != value else f"is {value:.4g} everywhere"
        return Reading(f"{what} in {_which(places, wrong)}", _ordered(name, places, wrong))
    return _of_others(name, got, want, wrong, places)


def _places(shapes: Sequence[torch.Size]) -> Tensor:
    """(rows of all sequences, 3): sequence, head, row."""
    found = [
        torch.cartesian_prod(torch.tensor([n]), torch.arange(shape[0]), torch.arange(shape[1])).view(-1, 3)
        for n, shape in enumerate(shapes)
    ]
    return torch.cat(found)


def _by_axis(places: Tensor, wrong: Tensor) -> int:
    """The axis (0: sequence, 1: head, 2: row) that alone says which rows are wrong, -1 for none."""
    for axis in range(3):
        values = places[:, axis]
        mean = torch.zeros(int(values.max()) + 1).index_add(0, values, wrong.float())
        count = torch.zeros_like(mean).index_add(0, values, torch.ones(len(values)))
        share = mean[count > 0] / count[count > 0]
        if bool(((share == 0) | (share == 1)).all()) and bool((share == 0).any()):
            return axis
    return -1


def _which(places: Tensor, wrong: Tensor) -> str:
    axis = _by_axis(places, wrong)
    values = sorted(set(places[wrong, axis].tolist())) if axis >= 0 else []
    listed = ", ".join(map(str, values[:6])) + (" …" if len(values) > 6 else "")
    if axis < 0:
        return "all rows" if bool(wrong.all()) else f"{int(wrong.sum())} of {len(wrong)} rows"
    return f"{('sequences', 'heads', 'rows')[axis]} {listed}"


def _ordered(name: str, places: Tensor, wrong: Tensor) -> tuple[str, ...]:
    rows, sequences, heads, *rest = _NOWHERE[name]
    axis = _by_axis(places, wrong)
    if axis < 0 and rest and bool((places[wrong, 2] < 128).all()) and bool((places[wrong, 0] > 0).all()):
        return tuple(rest)
    return ((sequences,), (heads,), (rows,), ())[axis]


def _of_others(name: str, got: Tensor, want: Tensor, wrong: Tensor, places: Tensor) -> Reading | None:
    """Whether wrong rows hold the right values of other rows, and of which."""
    finite = wrong & got.isfinite().all(-1)
    index = finite.nonzero().flatten()
    index = index[torch.linspace(0, len(index) - 1, min(len(index), MOST_ROWS)).long()]
    if len(index) < LEAST_ROWS or len(index) < USUAL * min(int(wrong.sum()), MOST_ROWS):
        return None
    clear = want.nan_to_num(0, 0, 0).norm(dim=-1)
    apart = torch.cdist(got[index], want.nan_to_num(0, 0, 0)) / clear.clamp_min(1e-9)
    least, source = torch.where(clear > 1e-6, apart, torch.inf).min(1)
    own = apart[torch.arange(len(index)), index]
    if float(((least < 2e-2) & (own > 0.1)).double().mean()) < USUAL:
        return None
    moves = (places[source] - places[index])[least < 2e-2]
    axes = [axis for axis in range(3) if float((moves[:, axis] != 0).double().mean()) > 1 - USUAL]
    if not axes:
        return None
    words = " and ".join(("sequence", "head", "row")[axis] for axis in axes)
    step, count = Counter(map(tuple, moves[:, axes].tolist())).most_common(1)[0]
    by = f", {', '.join(f'{n:+d}' for n in step)} away" if count > USUAL * len(moves) else ""
    return Reading(f"holds what belongs to another {words}{by}", _named(name, axes))


def _named(name: str, axes: list[int]) -> tuple[str, ...]:
    if name != "out":
        return ("gradients in another place",)
    if len(axes) > 1:
        return ("batch and heads mixed", "sequences exchanged")
    return (("sequences exchanged", "heads of the output exchanged", "rows of the output exchanged")[axes[0]],)
