"""The CUDA kernels' own text for sharing the last tiles of rows, run on the CPU: a C++ compiler takes it as it is."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from attnworks.backends import cuda
from attnworks.backends.cuda import plans, split
from attnworks.backends.cuda.launch import Params
from attnworks.memory import empty_cpu
from attnworks.plan import Plan
from attnworks.problem import Problem

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
TEXT = Path(cuda.__file__).parent
TILE_Q, TILE_KV = 128, 64
AROUND = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#define DEV static inline
#define __global__
#define __launch_bounds__(x)
using std::max; using std::min; using i64 = int64_t; using u32 = uint32_t;
struct float2 { float x, y; };
struct int4 { int x, y, z, w; };
struct Index { unsigned x; };
static Index gridDim, blockIdx, threadIdx;
// The lanes of a warp take turns: each says its value, and reads another's when it is its turn again.
static ucontext_t lanes[32], all_done;
static float said[2][32];
static char stacks[32][1 << 16];
static unsigned lane_now, times_said[32];
static void pass_on() {
  const unsigned lane = lane_now;
  lane_now = (lane + 1) % 32, threadIdx.x += lane_now - lane;
  swapcontext(&lanes[lane], &lanes[lane_now]);
}
static float __shfl_sync(u32, float x, int from) {
  float (&now)[32] = said[times_said[lane_now]++ % 2];
  now[lane_now] = x;
  pass_on();
  return now[from];
}
static float __shfl_xor_sync(u32 all, float x, int d) { return __shfl_sync(all, x, lane_now ^ d); }
static const float INFINITE = INFINITY, LOG2E = 1.44269504f, LN2 = 0.69314718f;
static void await_kernel_before() {}
static float exp2_fast(float x) { return exp2f(x); }
static float log2_fast(float x) { return log2f(x); }
static u32 pack(float x, float y) {  // bf16, rounded down: the test's values have no more bits
  u32 a, b; memcpy(&a, &x, 4); memcpy(&b, &y, 4); return a >> 16 | (b >> 16 << 16);
}
"""
ENDS = """
extern "C" int walk(const Params* p, int units, int block, int (*found)[6]) {
  gridDim.x = units;
  Cursor cursor; Work w; int count = 0;
  for (int n = block; find(*p, n, 0, cursor, w); n += units, count++) {
    int row[6] = {w.batch, w.head, w.row, w.part, w.span.first, w.span.last};
    memcpy(found[count], row, sizeof row);
  }
  return count;
}
extern "C" void order(int tiles, int heads, int section, int (*found)[2]) {
  for (int n = 0; n < tiles * heads; n++) place(n, tiles, heads, section, found[n][1], found[n][0]);
}
static const MergeParams* given;
static void one_lane() {
  merge(*given);
  if (lane_now < 31) lane_now++, threadIdx.x++, setcontext(&lanes[lane_now]);
}
extern "C" void put_together(const MergeParams* p, int blocks) {
  given = p;
  for (blockIdx.x = 0; blockIdx.x < (unsigned)blocks; blockIdx.x++)
    for (int warp = 0; warp < WARPS; warp++) {
      for (int lane = 0; lane < 32; lane++) {
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks[lane], lanes[lane].uc_stack.ss_size = sizeof stacks[lane];
        lanes[lane].uc_link = &all_done, times_said[lane] = 0;
        makecontext(&lanes[lane], one_lane, 0);
      }
      lane_now = 0, threadIdx.x = 32 * warp;
      swapcontext(&all_done, &lanes[0]);
    }
}
"""


def compiled(folder: Path, **chosen: int) -> ctypes.CDLL:
    macros = {"TILE_Q": TILE_Q, "TILE_KV": TILE_KV, "EXTENDED": 1, "PARTIAL": 1, "STREAM_K": 1}
    macros |= dict.fromkeys(("SPLIT", "MAPPED", "VARLEN", "LEFT", "RIGHT", "LONGEST_FIRST", "SHORTEST_LAST"), 0)
    parts = "".join((TEXT / name).read_text() for name in ("stream_k.cuh", "schedule.cuh", "merge.cuh"))
    text = "".join(f"#define {name} {value}\n" for name, value in (macros | chosen).items()) + AROUND + parts + ENDS
    (folder / "all.cpp").write_text(text)
    built = folder / "all.so"
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", built, folder / "all.cpp"], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("schedule"))


@pytest.mark.parametrize("order", ["LONGEST_FIRST", "SHORTEST_LAST"])
def test_tiles_that_take_long_come_first_in_each_section_of_heads(order: str, tmp_path: Path) -> None:
    tiles, heads, section = 5, 7, 3
    found = ((ctypes.c_int * 2) * (tiles * heads))()
    compiled(tmp_path, **{order: 1}).order(tiles, heads, section, found)
    rows = range(tiles) if order == "SHORTEST_LAST" else range(tiles - 1, -1, -1)
    sections = range(0, heads, section)
    expected = [(h, t) for s in sections for t in rows for h in range(s, min(s + section, heads))]
    assert [tuple(pair) for pair in found] == expected


def problem(batch: int, heads: int, rows: int, keys: int) -> Problem:
    strides = (heads * rows * 64, rows * 64, 64)
    return Problem(
        "dense", batch, heads, heads, rows, keys, 64, 64, torch.bfloat16, "cuda:0", 0.125, strides, strides, strides,
        return_lse=True,
    )  # fmt: skip


PLAN = Plan("cuda", "stream_k", TILE_Q, TILE_KV, warps=12, stages=2)


def work(kernels: ctypes.CDLL, p: Problem, units: int) -> list[list[tuple[int, ...]]]:
    """What each thread block does: (batch, head, row, part, first and last KV tile)."""
    tiles = math.ceil(p.seq_q / TILE_Q)
    params = Params(batch=p.batch, heads=p.heads_q, rows=p.seq_q, keys=p.seq_kv, tiles=tiles, section=1)
    params.stretches = split.stretches(p, PLAN, units)
    found = ((ctypes.c_int * 6) * (tiles * p.batch * p.heads_q + 3))()
    return [
        [tuple(found[i]) for i in range(kernels.walk(ctypes.byref(params), units, block, found))]
        for block in range(units)
    ]


SIZES = (
    *(((2, 3, 300, 1000), 4), ((1, 7, 128, 640), 6), ((3, 5, 257, 4096), 13), ((1, 8, 128, 64), 4)),
    *(((1, n, m, keys), 132) for n, m, keys in ((200, 100, 999), (132 + 68, 128, 2000), (133, 128, 4000))),
    ((2, 131, 200, 8192), 132),
)


@pytest.mark.parametrize(
    ("sizes", "units"),
    SIZES,
)
def test_every_key_of_every_tile_is_seen_once(kernels: ctypes.CDLL, sizes: tuple[int, ...], units: int) -> None:
    p = problem(*sizes)
    kv_tiles, cut = math.ceil(p.seq_kv / TILE_KV), split.stretches(p, PLAN, units)
    pieces: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    blocks = work(kernels, p, units)
    for block in blocks:
        for batch, head, row, *piece in block:
            pieces.setdefault((batch, head, row), []).append(tuple(piece))
    assert len(pieces) == plans.tiles_of(p, PLAN)
    for number, place in enumerate(sorted(pieces)):
        found = sorted(pieces[place], key=lambda piece: piece[1])
        edges = [first for _, first, _ in found] + [found[-1][2]]
        assert edges[0] == 0 and edges[-1] == kv_tiles and edges[1:] == [last for *_, last in found]
        if number < cut.whole:
            assert found == [(-1, 0, kv_tiles)]
        else:
            assert [part for part, *_ in found] == list(range(cut.parts_of(number - cut.whole)))
    loads = [sum(last - first for *_, first, last in block) for block in blocks]
    if cut.workers == units:
        assert max(loads) - min(loads) <= 1, "as much for each"


def test_the_parts_are_put_together(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the LSE and O of each part worked out in float64, by the kernel that merges and the fields it is given."""
    p, units = problem(2, 3, 300, 1000), 4
    monkeypatch.setattr(split, "cubin", lambda _: b"")
    monkeypatch.setattr(split, "empty_cuda", empty_cpu)
    monkeypatch.setattr(split, "driver", lambda: type("Driver", (), {"function": lambda *_: 0}))
    partial = split.Partial(p, PLAN, units)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 64, dtype=torch.float64) for n in (300, 1000, 1000))
    scores = q @ k.transpose(-1, -2) * p.scale
    out, lse = torch.full((2, 3, 300, 64), torch.nan, dtype=torch.bfloat16), torch.full((2, 3, 300), torch.nan)
    held = tuple(x.fill_(torch.nan) for x in partial.empty())
    shared = torch.zeros(2, 3, 300, dtype=torch.bool)
    first = partial.fields["first"]
    for batch, head, row, part, begin, end in (piece for block in work(kernels, p, units) for piece in block):
        if part >= 0:
            keys, rows = slice(begin * TILE_KV, min(end * TILE_KV, 1000)), slice(row, min(row + TILE_Q, 300))
            at = (batch * 3 + head) * 300 - first
            seen = scores[batch, head, rows, keys]
            held[0][part, at + rows.start : at + rows.stop] = (seen.softmax(-1) @ v[batch, head, keys]).float()
            held[1][part, at + rows.start : at + rows.stop] = seen.logsumexp(-1).float()
            shared[batch, head, rows] = True
    params = partial._params
    params.parts, params.parts_lse, params.out, params.lse = (x.data_ptr() for x in (*held, out, lse))
    kernels.put_together(ctypes.byref(params), partial._config.grid_x)
    assert 0 < shared.sum() < shared.numel()
    assert out.isnan().all(-1)[~shared].all() and lse.isnan()[~shared].all(), "the others are not its own"
    right = scores.softmax(-1) @ v
    torch.testing.assert_close(out[shared].double(), right[shared], atol=0, rtol=2**-7)
    torch.testing.assert_close(lse[shared].double(), scores.logsumexp(-1)[shared], atol=1e-5, rtol=1e-5)
