"""What a profiler counted, as columns of a table."""

from __future__ import annotations

from attnworks.workbench.cli.output import UNKNOWN, in_bytes, in_percent
from attnworks.workbench.records import Record

GPU_COUNTED = ("DRAM bytes", "predicted", "L2 bytes", "Mcycles", "tensor cores", "bank conflicts")
CPU_COUNTED = ("Mcycles", "instr./cycle", "LLC misses")


def in_counts(record: Record, gpu: bool) -> tuple[str, ...]:
    """The cells of those columns, of a GPU or a CPU."""
    profile = record.profile or {}
    cycles, instructions = profile.get("cycles"), profile.get("instructions")
    millions = UNKNOWN if cycles is None else f"{cycles / 1e6:.3f}"
    if not gpu:
        each = UNKNOWN if not cycles or instructions is None else f"{instructions / cycles:.2f}"
        return millions, each, in_bytes(profile.get("llc_bytes"))
    conflicts, turns = profile.get("bank_conflicts"), profile.get("shared_turns")
    share = conflicts / turns if conflicts is not None and turns else None
    measured, predicted = record.measured_bytes, profile.get("predicted_bytes")
    error = f" ({predicted / measured - 1:+.0%})" if predicted and measured else ""
    return (
        in_bytes(measured),
        in_bytes(predicted) + error,
        in_bytes(profile.get("l2_bytes")),
        millions,
        in_percent(profile.get("tensor_share")),
        UNKNOWN if conflicts is None else f"{conflicts:.3g}" if share is None else f"{conflicts:.3g} ({share:.0%})",
    )
