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
    "idle": (
        False,
        False,
        (1, 140, 456, 2100, 64),
    ),  # of a head's last 192 rows there are 72: one group has none of them
    "shared": (False, True, (1, 17, 1024, 1700, 128)),  # stretches that end in the middle of a tile of rows
}

# The problem that shows it, the file, what stands there once, and what is put in its place.
FAULTS = {
    "second half of the columns from the first": (
        "full",
        "epilogue.cuh",
        "stage + c * STAGE_CHUNK, 64 * c",
        "stage, 64 * c",
    ),
    "results of another head": ("full", "epilogue.cuh", "64 * c, to.row, to.head,", "64 * c, to.row, to.head ^ 1,"),
    "results laid down without the swizzle": (
        "full",
        "epilogue.cuh",
        "(lane / 16 ^ lane % 8) << 4",
        "(lane / 16) << 4",
    ),
    "owed results to where the last ones went": ("full", "forward.cuh", "owed = true, owed_to = to;", "owed = true;"),
    "O not begun anew behind owed results": ("full", "forward.cuh", "i > 0 || !anew", "1"),
    "a tile of rows never drawn": ("causal", "forward.cuh", "1u) + gridDim.x)", "1u) + gridDim.x + 1)"),
    "the counter left where it is": ("causal", "forward.cuh", "p.counter[0] = 0, p.counter[1] = 0", "p.counter[1] = 0"),
    "the first head of a section for all": ("causal", "schedule.cuh", "section + (r - x * inside)", "section"),
    "long tiles of another section": ("causal", "schedule.cuh", "s = n / per,", "s = 0,"),
    "a maximum kept though it is too low": (
        "rising",
        "softmax.cuh",
        "if (__any_sync(~0u, over[0] || over[1])) {",
        "if (0) {",
    ),
    "rows with too low a maximum not raised": (
        "rising",
        "softmax.cuh",
        "OVER ? signbit(rows.sum[r]) :",
        "OVER ? false :",
    ),
    "sums left with a minus": ("rising", "softmax.cuh", "if (OVER) rows.sum[r] = fabsf(rows.sum[r]);", ""),
    "maxima raised by a neighbour": ("rising", "softmax.cuh", ", over[r]) >> (threadIdx.x & 28) & 15", ", over[r])"),
    "scores again of another tile": ("rising", "forward.cuh", "s.k + k_ring.stage * K_BYTES, warp", "s.k, warp"),
    "scores again of another warp's rows": ("rising", "forward.cuh", "Q_CHUNK, 16 * warp + lane", "Q_CHUNK, lane"),
    "scores again without the swizzle": ("rising", "forward.cuh", "((chunk ^ (line % 8)) << 4)", "(chunk << 4)"),
    "scores again on top of what was there": (
        "rising",
        "forward.cuh",
        "for (int i = 0; i < TILE_KV / 2; i++) S[i] = 0;",
        "",
    ),
    "a group with few rows taken for idle": (
        "idle",
        "forward.cuh",
        "64 * group >= w.rows",
        "64 * group + 63 >= w.rows",
    ),
    "a KV tile between two stretches": (
        "shared",
        "schedule.cuh",
        "begin = edge, shared++",
        "begin = edge + 1, shared++",
    ),
    "a stretch goes on into the next": ("shared", "schedule.cuh", "end = min(end, edge);", "end = edge;"),
    "keys of a part counted from its first": ("shared", "forward.cuh", "(before + tile) * TILE_KV", "tile * TILE_KV"),
    "one part merged": (
        "shared",
        "merge.cuh",
        "stretch_of(s, (tile + 1) * s.kv_tiles - 1)",
        "stretch_of(s, tile * s.kv_tiles)",
    ),
    "parts merged without their weights": (
        "shared",
        "merge.cuh",
        "exp2_fast((weight[t] - shift) * LOG2E)",
        "weight[t] > -INFINITE ? 1.f : 0.f",
    ),
    "parts merged before they are there": ("shared", "merge.cuh", "  await_kernel_before();", ""),
    "O of a part not cleared for the next": (
        "shared",
        "forward.cuh",
        "begin_rows();\n          clear();",
        "begin_rows();",
    ),
}

if __name__ == "__main__":
    assert compiler.library_path()
    print(main(*sys.argv[1:]))
