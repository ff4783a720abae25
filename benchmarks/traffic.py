"""Bytes that the traffic model predicts beside those that ncu counts: standard attention, the Triton plans forward and
backward, and backend "cuda".

    python benchmarks/traffic.py --markdown            # on a machine with an NVIDIA GPU and ncu on the PATH
    python benchmarks/traffic.py --subjects cuda --lengths 4096 --json found.json

One process runs every case under ncu. With the first kernel that is measured some MiB are written that are not its own
(4 to 13 seen on an H200): it is one without use. Each case runs first unmeasured, which compiles; then the caches are
emptied by reading a large buffer, which leaves nothing in them that must be written; then the call is measured, and
with it another reading of the buffer. What that one writes is what the call left in the L2, and is counted to it: all
that a call stores reaches the memory sooner or later. Metrics that take more than one pass would find the caches warm,
and are marked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import attnworks as aw
from attnworks.hardware import Hardware, detect
from attnworks.masks import Causal
from attnworks.plan import Plan
from attnworks.problem import Problem
from attnworks.workbench import levels, profile, schedules
from attnworks.workbench.device_time import FEWEST_FLUSH_BYTES
from attnworks.workbench.levels import Measured
from attnworks.workbench.loops import Schedule
from attnworks.workbench.providers import describe

SUBJECTS = ("standard", "triton forward", "triton backward", "cuda")
LENGTHS = (2048, 4096, 8192, 16384)
TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
MASKS = {"none": False, "causal": True}
EMPTIES = "reduce_kernel"  # torch's sum


def problem_of(case: dict[str, Any]) -> Problem:
    n, heads, dim = case["n"], case.get("heads", HEADS), case.get("head_dim", HEAD_DIM)
    made = describe(
        form="dense", batch=max(TOKENS // n, 1), heads_q=heads, heads_kv=heads, seq_q=n, seq_kv=n, head_dim=dim,
        head_dim_v=dim, dtype=torch.bfloat16, mask=Causal() if case["causal"] else None,
    )  # fmt: skip
    return replace(made, device="cuda")


def plan_of(case: dict[str, Any], on: Hardware) -> Plan:
    if case["subject"] == "standard":
        from attnworks.backends.triton import plans

        return plans.generation(problem_of(case), "standard")
    return schedules.plan_on(problem_of(case), case["subject"].split()[0], on)


def schedule_of(case: dict[str, Any], on: Hardware) -> Schedule:
    if case["subject"].endswith("backward"):
        return schedules.backward_of(problem_of(case), "triton")
    return schedules.of_plan(problem_of(case), plan_of(case, on), on.units)


# ---- under ncu -------------------------------------------------------------------------------------------------------


def prepared(case: dict[str, Any]) -> Any:
    """The call of a case, ready to run."""
    p, backward = problem_of(case), case["subject"].endswith("backward")
    shape = (p.batch, p.heads_q, p.seq_q, p.head_dim)
    q, k, v, d_out = (torch.randn(shape, dtype=p.dtype, device="cuda") for _ in range(4))
    plan = plan_of(case, detect("cuda"))
    asked = {"mask": Causal() if case["causal"] else None, "backend": plan.backend, "plan": plan}
    if not backward:
        return lambda: aw.attention(q, k, v, **asked)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = aw.attention(*inputs, **asked)
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def child(order: Path) -> None:
    """Run the cases of a file, and write into it those that ran, in order, and why others did not."""
    cases = json.loads(order.read_text())
    buffer = torch.zeros(
        FEWEST_FLUSH_BYTES // 4, device="cuda"
    )  # whose sum is one kernel: of integers it is a cast too
    measured(buffer.sum)  # the first kernel
    for case in cases:
        try:
            call = prepared(case)
            for _ in range(2):
                call()
            torch.cuda.synchronize()
        except Exception as error:  # told beside the case; the others still run
            case["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        buffer.sum()
        torch.cuda.synchronize()
        measured(call, buffer.sum)
        del call
        torch.cuda.empty_cache()
    order.write_text(json.dumps(cases))


def measured(*calls: Callable[[], Any]) -> None:
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(cases: list[dict[str, Any]], metrics: tuple[str, ...]) -> list[dict[str, Any]]:
    """The cases with the kernels that ncu saw of each, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "cases.json"
        order.write_text(json.dumps(cases))
        kernels = profile.profile([sys.executable, __file__, "--child", str(order)], metrics, timeout=3600)
        done = json.loads(order.read_text())
    _, *calls = profile.calls(kernels, EMPTIES)
    found = iter(calls)
    for case in done:
        if "error" not in case:
            case["kernels"] = next(found, None)
            if case["kernels"] is None:
                case["error"] = "ncu saw fewer calls than there were"
    return done


def measured_of(kernels: list[profile.Kernel]) -> Measured:
    """What the reading of the buffer wrote counts to the call, what it read does not."""
    own = [kernel for kernel in kernels if EMPTIES not in kernel.name]
    return Measured(
        profile.total(own, profile.DRAM_READ),
        profile.total(kernels, profile.DRAM_WRITTEN),
        profile.total(own, profile.L2),
    )


# ---- the table -------------------------------------------------------------------------------------------------------


def row_of(case: dict[str, Any], on: Hardware) -> dict[str, Any]:
    shown = {name: case[name] for name in ("subject", "n", "causal", "heads", "head_dim") if name in case}
    if "error" in case:
        return shown | {"error": case["error"]}
    found = levels.levels(problem_of(case), schedule_of(case, on), on)
    compared = levels.compared(found, measured_of(case["kernels"]))
    names = ("level", "predicted", "measured", "error")
    return shown | {
        "plan": plan_of(case, on).to_json(),
        "levels": [dict(zip(names, level, strict=True)) for level in compared],
        "kernels": [kernel.to_json() for kernel in case["kernels"]],
        "warm": [kernel.name for kernel in case["kernels"] if kernel.passes not in (1, None)],
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """MiB predicted and measured, and the error, by level."""
    made = [["", "N", "mask", *(f"{level}: predicted, measured, error" for level in ("read", "written", "both", "L2"))]]
    for row in rows:
        cells = [row["subject"], str(row["n"]), "causal" if row["causal"] else "none"]
        if "error" in row:
            made.append([*cells, row["error"], "", "", ""])
            continue
        for level in row["levels"]:
            sizes = ["-" if level[x] is None else f"{level[x] / 2**20:,.0f}" for x in ("predicted", "measured")]
            error = "-" if level["error"] is None else f"{100 * level['error']:+.1f} %"
            cells.append(f"{sizes[0]}, {sizes[1]}, {error}")
        made.append(cells)
    return made


def printed(cells: list[list[str]], markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])
    widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="Between commas.")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="N, between commas.")
    parser.add_argument("--masks", default=",".join(MASKS), help="Between commas.")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--json", type=Path, help="Write the rows with every kernel's counters here.")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    subjects = asked.subjects.split(",")
    if unknown := set(subjects) - set(SUBJECTS):
        parser.error(f"--subjects: had {sorted(unknown)}, must be of {', '.join(SUBJECTS)}")
    masks = asked.masks.split(",")
    if unknown := set(masks) - set(MASKS):
        parser.error(f"--masks: had {sorted(unknown)}, must be of {', '.join(MASKS)}")
    on = detect("cuda")
    each = product(subjects, map(int, asked.lengths.split(",")), (MASKS[mask] for mask in masks))
    sizes = {"heads": asked.heads, "head_dim": asked.head_dim}
    cases = counted([{"subject": s, "n": n, "causal": causal} | sizes for s, n, causal in each], profile.BYTES)
    rows = [row_of(case, on) for case in cases]
    print(
        f"{on.name}: {TOKENS} tokens, {asked.heads} heads, head_dim {asked.head_dim}, bf16. MiB of the device's memory "
        "and its L2\n"
    )
    print(printed(table(rows), asked.markdown))
    if any(row.get("warm") for row in rows):
        print(
            "\nMore than one pass, so with warm caches:", sorted({name for row in rows for name in row.get("warm", ())})
        )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
