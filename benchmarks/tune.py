"""Tuned plans for the GPU at hand: times verified candidates and writes <device>.json.

    python benchmarks/tune.py                              into your configuration folder, where every call finds it
    python benchmarks/tune.py --into src/attnworks/plans   the file that is shipped; about 4 minutes on an H200
    python benchmarks/tune.py --seconds 60 --json

The most usual problems come first; those that the time does not suffice for keep the rows they have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from attnworks import tuned
from attnworks.hardware import detect
from attnworks.workbench import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="folder of the file [default: plans in your configuration folder]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose key has this, as in: --only decode")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no problem after so many [default: 200]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch sees")
    hardware = detect(chosen.device)

    def report(what: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    problems = [p for p in tune.usual_problems() if chosen.only in tuned.key_of(p, hardware, "triton")]
    found = tune.tune(problems, chosen.device, seconds=chosen.seconds, jobs=chosen.jobs, progress=report)
    path = (chosen.into or tuned.users_folder()) / tuned.file_name(hardware)
    tuned.write(path, hardware.name, tune.rows_of(found))
    if chosen.json:
        print(json.dumps([outcome.to_json() for outcome in found], indent=1))
    for one in found if not chosen.json else ():
        best = one.best if one.row else "the table stands"
        print(f"{one.key}: {one.seconds * 1e3:.3f} ms, {one.ratio}; of {one.tried} candidates {best}")
        print("".join(f"  wrong, left out: {plan}\n" for plan in one.not_right), end="")
    kept = sum(outcome.row is not None for outcome in found)
    print(f"{path}: {kept} rows of {len(found)} problems, {len(problems) - len(found)} not reached", file=sys.stderr)


if __name__ == "__main__":
    main()
