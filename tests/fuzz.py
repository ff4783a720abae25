"""The properties of test_properties.py on problems drawn anew for as long as asked, each a chance to be wrong.

    python tests/fuzz.py --minutes 60
    python tests/fuzz.py --minutes 5 -k decode

Shapes, strides, lengths, page tables, masks, scores, plans. The first failure ends it with the smallest example that
hypothesis finds and the line that repeats it; exit code 1. From a source tree set PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("-k", default="", help="only the properties of this name, as pytest takes it")
    arguments = parser.parse_args()
    end, rounds = time.monotonic() + 60 * arguments.minutes, 0
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--timeout=0", "--hypothesis-profile=fuzz",
        "-p", "no:cacheprovider", f"-k={arguments.k}", str(TESTS / "test_properties.py"),
    ]
    # fmt: on
    while time.monotonic() < end:
        seed = random.randrange(2**32)
        ran = subprocess.run([*command, f"--hypothesis-seed={seed}"], cwd=TESTS.parent, capture_output=True, text=True)
        rounds += 1
        left = max(0.0, end - time.monotonic()) / 60
        print(f"round {rounds}, seed {seed}: exit code {ran.returncode}, {left:.1f} minutes left", flush=True)
        if ran.returncode:
            print(ran.stdout + ran.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
