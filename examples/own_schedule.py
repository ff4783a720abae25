"""Schedules of one's own, for ``attnworks flow`` and ``attnworks traffic``: what is loaded in which loop, as data.

attnworks flow --schedule q_outer --schedule examples/own_schedule.py:PAIRED --out paired.html
attnworks traffic --schedule examples/own_schedule.py:PAIRED --schedule examples/own_schedule.py:KV_FIRST
"""

from attnworks.workbench.loops import Pass, Schedule

# FlashAttention-2 with two tiles of queries to a program, so that each tile of K and V serves both.
PAIRED = Schedule(
    "two tiles of queries to a program",
    (
        Pass(
            "forward",
            outer="q",  # a program for each tile of queries,
            inner="kv",  # which walks over the tiles of keys that the mask shows it
            keeps=("q",),  # loaded once, on chip until the walk is over
            streams=("k", "v"),  # loaded in every step
            leaves=("out", "lse"),  # stored at the end
            products=(1, 1),  # Q Kᵀ, head_dim wide, and P V, head_dim_v wide
        ),
    ),
    tile_q=256,
    tile_kv=128,
)

# A backward without atomic additions: dQ by tiles of queries, dK and dV by tiles of keys, S computed in both.
KV_FIRST = Schedule(
    "backward in two kernels",
    (
        Pass("delta", outer="q", keeps=("out", "d_out"), leaves=("delta",)),
        Pass(
            "dK and dV", outer="kv", inner="q", keeps=("k", "v"), streams=("q", "d_out", "lse", "delta"),
            leaves=("d_k", "d_v"), shared=True, products=(2, 2), registers=("d_k", "d_v"),
            says=("dK{j} = dV{j} = 0.", "P{i},{j} anew; dV{j} += Pᵀ dO{i}; dK{j} += scale · dSᵀ Q{i}.", "Write both."),
        ),
        Pass(
            "dQ", outer="q", inner="kv", keeps=("q", "d_out", "lse", "delta"), streams=("k", "v"), leaves=("d_q",),
            products=(2, 1), registers=("d_q",),
        ),
    ),
    tile_q=64,
    tile_kv=128,
    backward=True,
)  # fmt: skip
