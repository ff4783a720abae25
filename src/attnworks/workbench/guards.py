"""Guards: a kernel's inputs lie between bands of known bytes, and a call may change neither the bands nor the inputs.

``Guarded`` makes any subject run on copies of its inputs in such an ``Arena``. What it sees there does not end the
call: it waits in ``seen`` for whoever reports it, beside the values. Gradients go through it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnworks.workbench.inputs import Inputs, numbers
from attnworks.workbench.packing import Packed, as_bytes, pack, unpack
from attnworks.workbench.subjects import Outcome, Subject, abilities_of

BAND = 4096  # bytes before and after each storage: the overrun of a few rows falls into it
ALIGNMENT = 64
_PATTERN = (torch.arange(BAND + ALIGNMENT) * 37 + 11).to(torch.uint8)


class Arena:
    """Copies of storages in one block of memory, each with a band of a pattern before and after it."""

    def __init__(self, memory: Sequence[Tensor], block: Tensor) -> None:
        self.memory, self.block = memory, block
        self.slots = slots(block, [part.numel() for part in memory])
        for slot, part in zip(self.slots, memory, strict=True):
            slot.copy_(part)
            for band in self._bands(slot):
                band.copy_(_PATTERN[: band.numel()])

    @classmethod
    def of(cls, tensor: Tensor) -> Arena:
        """A copy of one contiguous tensor between its bands."""
        memory = [as_bytes(tensor)]
        return cls(memory, torch.empty(cls.size([memory[0].numel()]), dtype=torch.uint8))

    @staticmethod
    def size(sizes: Sequence[int]) -> int:
        return sum(_padded(size) + 2 * BAND for size in sizes)

    def _bands(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        start, end = slot.storage_offset(), slot.storage_offset() + slot.numel()
        return self.block[start - BAND : start], self.block[end : start + _padded(slot.numel()) + BAND]

    def overruns(self) -> list[tuple[int, str]]:
        """(storage, what was done to the memory around it) of each band that was written to."""
        found = []
        for number, slot in enumerate(self.slots):
            for place, band in zip(("before", "after"), self._bands(slot), strict=True):
                changed = (band != _PATTERN[: band.numel()]).nonzero().flatten().tolist()
                if changed:
                    reach = BAND - changed[0] if place == "before" else changed[-1] + 1
                    found.append((number, f"wrote up to {reach} bytes {place} the memory of"))
        return found

    def changed(self) -> list[int]:
        """Storages whose bytes are no longer those of the originals."""
        return [n for n, slot in enumerate(self.slots) if not torch.equal(slot, self.memory[n])]


def slots(block: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The places of storages of these sizes in a block: the same in every process."""
    starts = itertools.accumulate((_padded(size) + 2 * BAND for size in sizes), initial=BAND)
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- running calls on copies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a call gave: detached, with whether gradients can be asked of it under the call's number."""

    out: Tensor
    lse: Tensor | None
    differentiable: tuple[bool, bool]


class Runner:
    """Runs calls of a subject and keeps the graphs of the last few for their backward: a ``Guarded``'s far side."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._graphs: dict[int, tuple[Outcome, list[Tensor]]] = {}

    def forward(self, number: int, inputs: Inputs, return_lse: bool, options: dict[str, Any]) -> Answer:
        out, lse = self.subject(inputs, return_lse=return_lse, **options)
        wanted = leaves(inputs)
        if wanted:
            self._graphs[number] = (out, lse), wanted
            for old in list(self._graphs)[:-2]:
                del self._graphs[old]
        grads = out.requires_grad, lse is not None and lse.requires_grad
        return Answer(out.detach(), None if lse is None else lse.detach(), grads)

    def backward(self, number: int, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        results, wanted = self._graphs[number]
        given = [(r, c) for r, c in zip(results, cotangents, strict=True) if r is not None and c is not None]
        found = torch.autograd.grad(numbers(*zip(*given, strict=True)), wanted, allow_unused=True)
        return tuple(None if grad is None else grad.detach() for grad in found)


def leaves(inputs: Inputs) -> list[Tensor]:
    """The tensors of a case that require grad."""
    operands = [getattr(s, "tensor", getattr(s, "logits", None)) for s in inputs.scores]
    tensors = [inputs.q, inputs.k, inputs.v, *(x for x in operands if isinstance(x, Tensor))]
    return [x for x in tensors if x.requires_grad]


class Guarded:
    """A subject whose calls run on guarded copies of their inputs, in this process. ``seen``: what its calls did to
    memory since it was last emptied, in words."""

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self.subject = subject
        self.abilities = abilities_of(subject)
        self.seen: list[str] = []
        self._runner = Runner(subject)
        self._numbers = itertools.count()

    def reasons(self, inputs: Inputs, differentiable: bool = False) -> tuple[str, ...]:
        return self.abilities.reasons(inputs, differentiable) or self.subject.reasons(inputs, differentiable)

    def plan(self, inputs: Inputs) -> Any:
        """The plan that batch invariance is checked under, if the subject has plans."""
        return getattr(self.subject, "plan", lambda inputs: None)(inputs)

    def __call__(self, inputs: Inputs, *, return_lse: bool = True, **options: Any) -> Outcome:
        number = next(self._numbers)
        bare = replace(inputs, values=[])  # a kernel gets what a caller passes, not the problem behind it
        packed = pack(bare)
        arena = Arena(packed.memory, self._allocate(Arena.size(packed.sizes)))
        try:
            answer = self._forward(number, packed, arena, return_lse, options)
        finally:
            self._look(inputs, arena, "")
        wanted = leaves(inputs)
        if not wanted or not answer.differentiable[0]:
            return answer.out, answer.lse
        out, lse = _Bridge.apply(self, number, inputs, arena, answer, *wanted)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(
        self, number: int, inputs: Inputs, arena: Arena, cotangents: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients by the leaves of a call from those by its out and lse."""
        try:
            return self._backward(number, cotangents)
        finally:
            self._look(inputs, arena, "in backward ")

    # ---- what a subclass does elsewhere ------------------------------------------------------------------------------

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _forward(self, number: int, packed: Packed, arena: Arena, return_lse: bool, options: dict[str, Any]) -> Answer:
        return self._runner.forward(number, unpack(packed.payload, arena.slots), return_lse, options)

    def _backward(self, number: int, cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return self._runner.backward(number, cotangents)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def _look(self, inputs: Inputs, arena: Arena, when: str) -> None:
        """Note what a call did to the memory around its inputs and to the inputs, and let the inputs show it."""
        owners = _owners(inputs, arena.memory)
        self.seen += [f"{when}{what} {_and(owners[slot])}" for slot, what in arena.overruns()]
        for slot in arena.changed():
            before, after, tensors = arena.memory[slot], arena.slots[slot], owners[slot]
            own = torch.zeros_like(before)
            for tensor in tensors.values():
                _bytes_of(tensor, own).fill_(1)
            changed = before != after
            beside = int((changed & (own == 0)).sum())
            if beside:
                self.seen.append(f"{when}wrote {beside} bytes between the rows of, or beside, {_and(tensors)}")
            # New keys are appended to the caches, as asked.
            if bool((changed & (own == 1)).any()) and not (inputs.k_new is not None and tensors.keys() & {"k", "v"}):
                self.seen.append(f"{when}changed its input {_and(tensors)}")
            before.copy_(after)


def _owners(inputs: Inputs, memory: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """By name, the inputs that lie in each storage."""
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors().items()}
    return [{name: x for name, x in tensors.items() if as_bytes(x).data_ptr() == part.data_ptr()} for part in memory]


def _and(tensors: dict[str, Tensor]) -> str:
    return " and ".join(tensors) or "an input"


def _bytes_of(tensor: Tensor, storage: Tensor) -> Tensor:
    """The elements of ``tensor`` in a storage of the same size as its own, as bytes."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    return storage.as_strided(shape, strides, tensor.storage_offset() * size)


class _Bridge(torch.autograd.Function):
    """Joins a call that ran on copies to the graph of the originals."""

    @staticmethod
    def forward(
        ctx: Any, guarded: Guarded, number: int, inputs: Inputs, arena: Arena, answer: Answer, *_: Tensor
    ) -> Any:
        ctx.guarded, ctx.number, ctx.inputs, ctx.arena = guarded, number, inputs, arena
        ctx.set_materialize_grads(False)
        if answer.lse is not None and not answer.differentiable[1]:
            ctx.mark_non_differentiable(answer.lse)
        return answer.out, answer.lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        found = ctx.guarded.backward(ctx.number, ctx.inputs, ctx.arena, cotangents)
        return (None, None, None, None, None, *found)
