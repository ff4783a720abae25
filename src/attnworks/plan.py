"""Plan: how a Problem is tiled and scheduled on one backend; and how the best plan is picked.

Ranking: a plan the caller gives is used as it is; else one that was measured on this device for such a problem
(``tuned.py``); else the backend's candidate with the least modelled time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnworks.hardware import Hardware
from attnworks.problem import Problem


@dataclass(frozen=True)
class Plan:
    """One way to run a Problem.

    ``schedule`` names the loop structure; each backend lists its own ("tiled" and "split_kv" on the CPU; "eager",
    "standard", "kv_outer" and "q_outer" on the reference; those and "grouped" and "split_kv" in Triton; "q_outer",
    "split_kv" and "stream_k" in CUDA).
    ``tile_q``, ``tile_kv``: rows and keys of a tile.
    ``split_kv``: keys of one partial result of a split-KV schedule. ``isa``: instruction set of the CPU backend; "tma"
    in Triton: K and V come through tensor descriptors, by the copy engine that NVIDIA's cards have from 9.0.
    ``warps``, ``stages``: warps of a program and depth of its software pipeline on a GPU. 0 and "" mean that the
    schedule has no such choice. ``visit_all``: go through the tiles that the mask hides as well, which changes no
    result as long as what they hold is finite; for the case study that shows what leaving them out is worth.
    """

    backend: str
    schedule: str
    tile_q: int = 0
    tile_kv: int = 0
    split_kv: int = 0
    isa: str = ""
    warps: int = 0
    stages: int = 0
    visit_all: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_q", "tile_kv", "split_kv", "warps", "stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
                raise ValueError(f"Plan {name}: was {value!r}, must be an int in 0..2**31 - 1")
        for name in ("backend", "schedule", "isa"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"Plan {name}: was {getattr(self, name)!r}, must be a str")
        if not isinstance(self.visit_all, bool):
            raise TypeError(f"Plan visit_all: was {self.visit_all!r}, must be a bool")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def best_plan(problem: Problem, candidates: Sequence[Plan], hardware: Hardware) -> Plan:
    """The candidate with the least modelled time; the backend's own order decides between equals."""
    if len(candidates) == 1:  # also keeps the model's arithmetic out of a traced call, which only the reference runs
        return candidates[0]
    from attnworks.traffic import modelled_seconds  # where it is needed: every program imports this file

    return min(
        candidates, key=lambda plan: modelled_seconds(problem, plan.schedule, plan.tile_q, plan.tile_kv, hardware)
    )
