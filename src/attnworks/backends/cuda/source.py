"""The kernels' text: what is chosen at compile time as macros, the wgmma wrappers, and the parts in order.

Text is generated here only for the wrappers, since an instruction's list of registers depends on the tile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

import torch

PARTS = (
    "ptx.cuh",
    "stream_k.cuh",
    "schedule.cuh",
    "scores.cuh",
    "mask.cuh",
    "softmax.cuh",
    "epilogue.cuh",
    "forward.cuh",
)
MERGE_PARTS = ("ptx.cuh", "stream_k.cuh", "merge.cuh")
# K and V of the heads that are worked on together under a causal mask: so much stays in the 50 MB of L2.
L2_SECTION_BYTES = 32 * 2**20
WORK_BYTES, BARRIER_BYTES = 32, 8
SHARED_LIMIT = 232448  # bytes of one thread block, compute capability 9.0
BIAS_ELEMENTS = (None, torch.float32, torch.bfloat16, torch.float16)  # by the number that scores.cuh has for it


@dataclass(frozen=True)
class Variant:
    """What a forward kernel is compiled for.

    ``head_dim`` is rounded up to 16, ``head_dim_v`` to 32: columns beyond the tensors' own arrive as 0; ``partial_v``:
    there are such in V. ``modifier``: see scores.cuh. ``mapped``: the mask is a tile map. ``alibi``: 2 where no key
    that is seen lies ahead of its row, else 1. ``bias``: 0 for none, else its element, of ``BIAS_ELEMENTS``;
    ``bias_keys``: its step from one key to the next, 2 for any but 0 and 1; ``bias_rows``: rows differ; ``bias_pairs``:
    two neighbours are read at once. ``split``: results are those of parts of the keys, in fp32. ``stream_k``: those of
    the last tiles of rows are, which all thread blocks share.
    """

    bf16: bool
    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int
    left: bool = False
    right: bool = False
    varlen: bool = False
    partial_v: bool = False
    modifier: int = 0
    sink: bool = False
    mapped: bool = False
    alibi: int = 0
    bias: int = 0
    bias_keys: int = 0
    bias_rows: bool = False
    bias_pairs: bool = False
    split: bool = False
    stream_k: bool = False

    @property
    def groups(self) -> int:
        return self.tile_q // 64

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def longest_first(self) -> bool:
        """Whether the last tiles of rows have the most keys."""
        return (self.right and not self.left) or self.mapped

    @property
    def shortest_last(self) -> bool:
        """Whether tiles of rows are drawn such that a head's last one, which may leave one or two of three groups idle,
        comes last: of full attention. Times as fast, with what idle groups leave to the others (H200, bf16,
        2026-12-01): D=64 at 2k, 4k, 8k, 16k 1.08 1.04 1.02 1.01; D=96, whose tiles fill the card evenly at 4k, 0.98."""
        masked = self.left or self.right or self.mapped or self.varlen
        return self.groups == 3 and self.head_dim <= 64 and not (masked or self.partial)

    @property
    def partial(self) -> bool:
        """Whether there are results of parts of the keys."""
        return self.split or self.stream_k

    @property
    def dynamic(self) -> bool:
        """Whether tiles differ so much in length that thread blocks draw them as they get free."""
        return self.varlen or self.longest_first or self.shortest_last

    @property
    def extended(self) -> bool:
        """Whether the kernel has parameters that a plain one has not."""
        return self.mapped or self.alibi > 0 or self.bias > 0 or self.partial

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's and of the producer's threads. Together they must not pass what the launch allots, else the
        kernel waits for registers for ever."""
        if self.groups == 3:
            return 160, 32
        return 232, 40

    @property
    def late_store(self) -> bool:
        """Whether results wait in their registers until the tensor cores work on the next tile of rows: of full
        attention alone. Three groups' threads, those of wider heads and those of most masks and modifiers have no
        registers left to remember where the results belong; under a causal mask it gained nothing. Of full attention
        with D=128 it gains 1 % at all lengths (H200, 2026-11-30)."""
        masked = self.left or self.right or self.mapped or self.varlen or self.split
        return self.groups == 2 and self.head_dim_v <= 128 and not (masked or self.modifier or self.alibi or self.bias)

    @property
    def keeps_maximum(self) -> bool:
        """Whether tiles that all rows see whole take the maximum of the tiles before (softmax_kept). Times as fast with
        it (H200, bf16, 2026-12-01): D=128 at 1k, 2k, 4k, 16k 1.01 1.03 1.04 1.06, causal at 2k, 4k, 8k, 16k 1.03 1.05
        1.06 1.02 to 1.06, a window 1.02; D=64 at 512, 1k, 2k, 4k, 8k, 16k 1.02 1.05 1.07 1.02 1.08 1.05, causal at 1k,
        2k, 4k, 8k, 16k, 32k 1.01 1.04 1.00 1.01 1.02 1.03, a window 1.03; D=96 at 1k, 2k, 8k 1.02 1.07 1.11, causal
        0.99 1.00 1.10; 192/128 at 4k, 8k 1.03 1.00, causal 1.01 1.02. Of wider heads, whose products hide the search,
        it gained nothing."""
        return self.head_dim_v <= 128

    @property
    def accumulators(self) -> int:
        """Registers of a thread that S, P and O take."""
        return self.head_dim_v // 2 + self.tile_kv // 2 + self.tile_kv // 4

    @property
    def most_accumulators(self) -> int:
        """So many of them have compiled without spills."""
        return 128 if self.groups == 3 else 196

    @property
    def shared_bytes(self) -> int:
        """What the kernel lays out in shared memory (``layout`` in forward.cuh)."""
        return self._tile_bytes + (self._out_bytes if self.bulk_store else 0)

    @property
    def bulk_store(self) -> bool:
        """Whether results go through shared memory, from where the copy engine takes whole rows: where there is room,
        and no row after the last that must stay as it is. (Packed sequences with this for their whole warps and the
        other for the rest lost 7 % without a mask: H200, 2026-11-30.)"""
        fits = self._tile_bytes + self._out_bytes <= SHARED_LIMIT
        return fits and not (self.varlen or self.split)

    @property
    def _tile_bytes(self) -> int:
        q_columns, v_columns = _lines(self.head_dim), _lines(self.head_dim_v)
        tiles = 2 * (self.tile_q * q_columns + self.stages * self.tile_kv * (q_columns + v_columns))
        return tiles + 2 * WORK_BYTES + BARRIER_BYTES * (2 * self.groups + 4 * self.stages + 4)

    @property
    def _out_bytes(self) -> int:
        return 2 * self.tile_q * _lines(self.head_dim_v)

    def macros(self) -> dict[str, int]:
        own = {field.name.upper(): int(getattr(self, field.name)) for field in fields(self)}
        consumer, producer = self.registers
        return own | {
            "GROUPS": self.groups, "PINGPONG": int(self.groups == 2), "LATE_STORE": int(self.late_store),
            "BULK_STORE": int(self.bulk_store),
            "DYNAMIC": int(self.dynamic),
            "KEEP_MAXIMUM": int(self.keeps_maximum),
            "LONGEST_FIRST": int(self.longest_first), "SHORTEST_LAST": int(self.shortest_last),
            "EXTENDED": int(self.extended), "PARTIAL": int(self.partial),
            "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
            "KV_ROW_BYTES": 2 * (self.head_dim + self.head_dim_v), "L2_SECTION_BYTES": L2_SECTION_BYTES,
        }  # fmt: skip


def _lines(columns: int) -> int:
    """Rounded up to the 64 columns of a swizzled line."""
    return 64 * -(-columns // 64)


def text(variant: Variant) -> str:
    """The source of one kernel, ``forward``."""
    dtype = "bf16" if variant.bf16 else "f16"
    lines = [f"#define {name} {value}" for name, value in variant.macros().items()]
    lines.append(_wgmma("wgmma_qk", variant.tile_kv, dtype, a_in_registers=False, b_transposed=False))
    lines.append(_wgmma("wgmma_pv", variant.head_dim_v, dtype, a_in_registers=True, b_transposed=True))
    return "\n".join([*lines, *(f'#line 1 "{part}"\n{_part(part)}' for part in PARTS)])


def merge_text(*, bf16: bool) -> str:
    """The source of the kernel ``merge``, which puts the parts of a split result together."""
    return f"#define BF16 {int(bf16)}\n" + "\n".join(f'#line 1 "{part}"\n{_part(part)}' for part in MERGE_PARTS)


@cache
def _part(name: str) -> str:
    return (resources.files("attnworks.backends.cuda") / name).read_text()


def _wgmma(name: str, n: int, dtype: str, *, a_in_registers: bool, b_transposed: bool) -> str:
    """A wrapper of wgmma.mma_async m64n``n``k16: d (+)= A B. ``b`` and an ``a`` in shared memory are descriptors; with
    ``accumulate`` 0 what d held is forgotten. ``b_transposed``: its rows, not its columns, are what is summed over."""
    size = n // 2
    registers = ",".join(f"%{i}" for i in range(size))
    if a_in_registers:
        a, count = "{" + ",".join(f"%{size + i}" for i in range(4)) + "}", 4
        arguments = ", ".join(f"unsigned a{i}" for i in range(4))
        operands = ", ".join(f'"r"(a{i})' for i in range(4))
        transposed = f"{int(b_transposed)}"
    else:
        a, count, arguments, operands = f"%{size}", 1, "unsigned long long a", '"l"(a)'
        transposed = f"0, {int(b_transposed)}"
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(size))
    b, flag = size + count, size + count + 1
    return (
        f"__device__ __forceinline__ void {name}(\n"
        f"    float (&d)[{size}], {arguments}, unsigned long long b, int accumulate) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{flag}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
        f'{{{registers}}}, {a}, %{b}, p, 1, 1, {transposed};}}"\n'
        f'    : {outputs}\n    : {operands}, "l"(b), "r"(accumulate));\n}}'
    )
