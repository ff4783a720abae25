"""One problem by the CUDA kernels with a piece of their text replaced. ``python gpu_mutant.py PROBLEM [FILE OLD NEW]``
prints "right" or what is wrong. A process of its own, as a fault may leave the device unusable."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from attnworks import Causal, attention, explain
from attnworks.backends.cuda import compile as compiler
from attnworks.backends.cuda import source
from attnworks.workbench.verify import fresh_memory_poisoned
from gpu_helpers import LIMIT, exact, randn


def main(name: str, *fault: str) -> str:
    if fault:
        file, old, new = fault
        unchanged = source._part

        def part(wanted: str) -> str:
            text = unchanged(wanted)
            if wanted != file:
                return text
            assert text.count(old) == 1, f"{file}: {old!r} stands there {text.count(old)} times"
            return text.replace(old, new)

        source._part = part  # type: ignore[assignment]
    causal, shared, sizes = PROBLEMS[name]
    rising = name == "rising"
    batch, heads, rows, keys, dim = sizes
    mask = Causal() if causal else None
    with fresh_memory_poisoned():
        for call in range(3):  # the later ones find what the earlier ones left
            q, k, v = (randn(batch, heads, n, dim) for n in (rows, keys, keys))
            if rising:  # towards the keys that are walked to last: maxima of some rows by 10 to 20 powers of 2, of
                k[:, :, : keys // 3] *= 9  # others by hundreds, and of those beside them by few
                q *= 0.2
                quiet = attention(q, k, v, mask=mask, backend="cuda")
                q[:, :, 3::32] *= 40
                q[:, :, 19::32] *= 2.25
            plan = explain(q, k, v, mask=mask, backend="cuda").plan
            if shared:
                plan = replace(plan, schedule="stream_k")
            out, lse = attention(q, k, v, mask=mask, return_lse=True, plan=plan)
            wanted = exact(q, k, v, causal)
            if rising and not torch.equal(out[:, :, 4::16], quiet[:, :, 4::16]):
                return f"call {call}: a row's bits depend on its neighbour"
            error = (out.double() - wanted).abs().max().item()
            if not error <= LIMIT[out.dtype]:
                return f"call {call}: off by {error}"
            rows_of_lse = slice(None) if rising else slice(-1, None)  # causal: the last row sees all
            scores = q[:, :, rows_of_lse].double() @ k.double().transpose(-1, -2) / dim**0.5
            off = (lse[:, :, rows_of_lse].double() - scores.logsumexp(-1)).abs().max().item()
            if not off <= 1e-3:
                return f"call {call}: LSE off by {off}"
    return "right"


# Whether causal, whether the last wave is shared, (batch, heads, rows, keys, dim)
PROBLEMS = {
    "full": (False, False, (2, 90, 200, 200, 128)),
    "causal": (True, False, (2, 40, 700, 700, 128)),
    "rising": (False, False, (1, 2, 200, 2000, 64)),
    "shared": (False, True, (1, 17, 1024, 1700, 128)),  # stretches that end in the middle of a tile of rows
}

if __name__ == "__main__":
    assert compiler.library_path()
    print(main(*sys.argv[1:]))
