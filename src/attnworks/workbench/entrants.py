"""Entrants: who may be timed. Right results before and after, also on inputs that nobody has seen; inputs untouched."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnworks.problem import Problem
from attnworks.workbench import quick_check, statistics
from attnworks.workbench.meters import Entry, Meter, Timed
from attnworks.workbench.providers import Bound, Inputs, Provider, random_inputs
from attnworks.workbench.quick_check import Check, NotVerifiedError

UNSEEN = 3  # sets of inputs that a competitor meets only after the timing
# A kernel that takes this many times as long on them keeps its results: nothing else is so slow on new inputs only.
REMEMBERS = 10.0


@dataclass(frozen=True)
class InputSet:
    """``values`` on the CPU, ``placed`` where the competitors run (the same tensors there if that is the CPU)."""

    values: Inputs
    placed: Inputs
    mark: tuple[int, ...]

    @classmethod
    def made(cls, values: Inputs, meter: Meter) -> InputSet:
        placed = meter.place(values)
        return cls(values, placed, _mark(placed))

    @property
    def untouched(self) -> bool:
        return _mark(self.placed) == self.mark


def _mark(inputs: Inputs) -> tuple[int, ...]:
    """A sum over the bits of each tensor."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tuple(int(x.view(as_integers[x.element_size()]).sum(dtype=torch.int64)) for x in inputs)


@dataclass
class Entrant:
    """A competitor that may be timed. ``bound``: its call for each set of inputs; ``extra_bytes``: that were resident
    only during a call, None where that cannot be measured."""

    provider: Provider
    bound: list[Bound]
    check: Check
    extra_bytes: int | None

    @property
    def entry(self) -> Entry:
        return Entry(self.provider.name, self.bound, self.provider.brings_threads)


def input_sets(problem: Problem, meter: Meter, seed: int, most: int, most_bytes: int) -> Iterator[InputSet]:
    """At least two."""
    generator = torch.Generator().manual_seed(seed)
    first = random_inputs(problem, generator)
    yield InputSet.made(first, meter)
    for _ in range(max(2, min(most, most_bytes // max(first.bytes, 1))) - 1):
        yield InputSet.made(random_inputs(problem, generator), meter)


def enter(
    problem: Problem, providers: Sequence[Provider], sets: Sequence[InputSet], meter: Meter
) -> tuple[list[Entrant], dict[str, str], dict[str, str]]:
    """The competitors that run the problem and pass the check, and the reasons of those that refuse and of those that
    fail."""
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    entrants: list[Entrant] = []
    for provider in providers:
        if reason := provider.refuses(problem):
            refused[provider.name] = reason
            continue
        try:
            bound = [provider.bind(problem, each.placed) for each in sets]
            out, extra = meter.first(bound[0])
        except NotImplementedError as error:
            refused[provider.name] = str(error) or "raised NotImplementedError"
            continue
        except NotVerifiedError as error:
            failed[provider.name] = str(error)
            continue
        except Exception as error:  # a kernel of anybody's may raise anything
            failed[provider.name] = f"{provider.name}: raised {type(error).__name__}: {error}"
            continue
        complaint, check = _judged(provider, problem, sets[0], out)
        if complaint:
            failed[provider.name] = complaint
        else:
            entrants.append(Entrant(provider, bound, check, extra))
        if not sets[0].untouched:
            raise NotVerifiedError(f"{provider.name}: wrote to q, k or v, which the others read")
    return entrants, refused, failed


def check_after(
    problem: Problem,
    entrants: Sequence[Entrant],
    sets: Sequence[InputSet],
    timed: Timed,
    meter: Meter,
    seed: int,
    flush: bool,
) -> None:
    """Raise ``NotVerifiedError`` for a last timed result that is wrong, for inputs that were written to, and for a
    kernel that is only right, or only fast, on inputs that it has seen before."""
    for one in entrants:
        chosen, out = timed.last[one.provider.name]
        _demand(one.provider, problem, sets[chosen], out)
    if not all(each.untouched for each in sets):
        raise NotVerifiedError(
            "after the timing, q, k or v of a set were not what they had been: somebody wrote to them"
        )
    generator = torch.Generator().manual_seed(seed + 1)
    unseen: dict[str, list[float]] = {one.provider.name: [] for one in entrants}
    for _ in range(UNSEEN):
        fresh = InputSet.made(random_inputs(problem, generator), meter)
        for one in random.Random(seed).sample(list(entrants), len(entrants)):
            seconds, out = meter.once(one.provider.bind(problem, fresh.placed), flush)
            unseen[one.provider.name].append(seconds)
            _demand(one.provider, problem, fresh, out)
    for one in entrants:
        if _keeps_results(unseen[one.provider.name], timed.seconds[one.provider.name], meter):
            _look_again(one, problem, meter, generator, flush)


def _keeps_results(unseen: Sequence[float], seen: Sequence[float], meter: Meter) -> bool:
    usual, new = statistics.median(seen), min(unseen)
    return new > REMEMBERS * usual and new - usual > meter.negligible_seconds


def _look_again(one: Entrant, problem: Problem, meter: Meter, generator: torch.Generator, flush: bool) -> None:
    """Raise ``NotVerifiedError`` if it still takes so much longer on new inputs when those it has seen take turns with
    them: others may have come to use the machine after the timing."""
    unseen, seen = [], []
    for turn in range(UNSEEN):
        fresh = InputSet.made(random_inputs(problem, generator), meter)
        seconds, out = meter.once(one.provider.bind(problem, fresh.placed), flush)
        _demand(one.provider, problem, fresh, out)  # of an address that had other inputs before it may know a result
        unseen.append(seconds)
        seen.append(meter.once(one.bound[turn % len(one.bound)], flush)[0])
    if _keeps_results(unseen, seen, meter):
        raise NotVerifiedError(
            f"after the timing, {one.provider.name}: took {min(unseen) / statistics.median(seen):.0f} times as long on "
            "inputs that it had not seen: it keeps its results"
        )


def _demand(provider: Provider, problem: Problem, inputs: InputSet, out: Tensor) -> None:
    complaint, _ = _judged(provider, problem, inputs, out, seed=1)
    if complaint:
        raise NotVerifiedError(f"after the timing, {complaint}")


def _judged(provider: Provider, problem: Problem, inputs: InputSet, out: Tensor, seed: int = 0) -> tuple[str, Check]:
    """What is wrong with a result, "" for nothing; and the check that says so."""
    check = quick_check.check(provider.answers(problem), *inputs.values, out.cpu(), seed=seed)
    if check.passed:
        return "", check
    return (
        f"{provider.name}: error of {check.worst:.3g} times its bound at (batch, head, row, channel) {check.where}, "
        "must be at most 1: not benchmarked"
    ), check
