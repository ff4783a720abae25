"""Maps, arguments, counters and launches of the CUDA backend, with a driver made of Python: no GPU is needed."""

import ctypes
import re
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnworks import Bias, Causal, Sink, masks, scores
from attnworks.backends import cuda
from attnworks.backends.cuda import counters, driver, launch, maps, plans, split
from attnworks.memory import empty_cpu
from attnworks.problem import Operands, Problem, packed_strides, strides_of

UNITS, STREAM = 132, 7
bf16 = torch.bfloat16


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "bhsd", **fields: Any) -> Problem:
    b, h, hk, n, m = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    if layout == "bshd":
        h, hk, n, m = n, m, h, hk
    strides = (strides_of(x, layout) for x in (q, k, v))
    return Problem(
        "dense", b, h, hk, n, m, q.shape[3], v.shape[3], q.dtype, "cuda:0", 0.125, *strides, layout=layout, **fields
    )  # fmt: skip


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int, sequences: int) -> Problem:
    strides = (packed_strides(x) for x in (q, k, v))
    return Problem(
        "varlen", sequences, q.shape[1], k.shape[1], longest, longest, q.shape[2], v.shape[2], q.dtype, "cuda:0", 0.125,
        *strides, total_q=len(q), total_kv=len(k),
    )  # fmt: skip


class Library:
    """libcuda as far as it is used. A map is its address, then numbers that depend on all else."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        self.launched: list[SimpleNamespace] = []
        self.merged: list[split.MergeParams] = []
        self.early: list[bool] = []  # whether a merge's thread blocks may come before the kernel before has ended
        self.answers: list[int] = []  # to the launches that follow
        self.current: list[int] = []
        self.takes = 0.0  # seconds of a launch, in which other threads run
        self.address_in, self.any_address = "first", True

        def encode(place, dtype, rank, address, sizes, strides, box, steps, *modes) -> int:
            if not self.any_address and address in maps._PROBES:
                return 1
            self.encoded.append((address, tuple(sizes), tuple(strides), tuple(box)))
            words = [address, hash((dtype, rank, tuple(sizes), tuple(strides), tuple(box), modes)) % 2**64, *[0] * 14]
            if self.address_in == "first, shifted":
                words[0] >>= 4
            written = reversed(words) if self.address_in == "last" else words
            ctypes.memmove(place, (ctypes.c_uint64 * 16)(*written), 128)
            return 0

        def launch_kernel(config, function, arguments, extra) -> int:
            time.sleep(self.takes)
            if (ctypes.c_uint * 4).from_address(config)[3] == 32 * split.WARPS:
                address = ctypes.c_void_p.from_address(arguments).value
                read = driver.LaunchConfig.from_address(config)
                words = (ctypes.c_int * 3).from_address(read.attributes) if read.attribute_count == 1 else (0, 0, 0)
                self.early.append((words[0], words[2]) == (6, 1))  # programmatic stream serialisation, allowed
                self.merged.append(
                    split.MergeParams.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(split.MergeParams)))
                )
                return 0
            at = (ctypes.c_void_p * 4).from_address(arguments)
            params = launch.Params.from_buffer_copy(ctypes.string_at(at[3], ctypes.sizeof(launch.Params)))
            read = driver.LaunchConfig.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(driver.LaunchConfig)))
            words = [list((ctypes.c_uint64 * 16).from_address(place)) for place in at[:3]]
            self.launched.append(
                SimpleNamespace(config=read, function=function, params=params, maps=words, extra=extra)
            )
            return self.answers.pop(0) if self.answers else 0

        def context(out) -> int:
            out._obj.value = 99
            return 0

        self.cuTensorMapEncodeTiled = Function(encode)
        self.cuLaunchKernelEx = Function(launch_kernel)
        self.cuModuleLoadData = lambda *_: 0
        self.cuModuleGetFunction = lambda *_: 0
        self.cuFuncSetAttribute = lambda *_: 0
        self.cuCtxGetCurrent = context
        self.cuCtxSetCurrent = lambda handle: self.current.append(handle.value) or 0
        self.cuGetErrorName = self.cuGetErrorString = lambda *_: 0


class Function(SimpleNamespace):
    """A function that takes attributes, as ctypes' do."""

    def __init__(self, function: Any) -> None:
        super().__init__(function=function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class Counted:
    """Counters that name the stream."""

    def ready(self) -> None: ...

    def take(self, stream: int) -> int:
        return 1000 + stream


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    made = driver.Driver(found)
    monkeypatch.setattr(launch, "driver", lambda: made)
    monkeypatch.setattr(maps, "driver", lambda: made)
    monkeypatch.setattr(split, "driver", lambda: made)
    monkeypatch.setattr(launch, "cubin", lambda _: b"code")
    monkeypatch.setattr(split, "cubin", lambda _: b"code")
    monkeypatch.setattr(launch, "empty_cuda", empty_cpu)
    monkeypatch.setattr(split, "empty_cuda", empty_cpu)
    monkeypatch.setattr(launch, "counters", lambda _: Counted())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=UNITS))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    return found


def forward(p: Problem) -> launch.Forward:
    made = launch.prepare(p, plans.plan_for(p))
    assert isinstance(made, launch.Forward)
    return made


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(bf16)


# ---- maps ------------------------------------------------------------------------------------------------------------


def coordinates(name: str, **known: Any) -> list[int]:
    """Where a copy begins, from the kernel's own text: the last arguments of one of its tma_load calls."""
    source = (Path(cuda.__file__).parent / "forward.cuh").read_text()
    known["WRAP"] = eval(re.search(r"int WRAP = (.*?);", source).group(1))
    known["present"] = min(known["TILE_KV"], known["w"].keys - known["key"])
    assert "const int present = min(TILE_KV, w.keys - key);" in source
    call = {"packed": r"if \(VARLEN\)\s*tma_load\((.*?)\);", "dense": r"else\s*tma_load\((.*?)\);"}[name]
    return [eval(part, known) for part in re.search(call, source).group(1).split(",")[3:]]


def touched(described: maps.Description, base: int, begin: list[int]) -> list[range | None]:
    """The bytes that each row of a box comes from; None for what lies outside, for which the base is read."""
    rows: list[range | None] = []
    for row in range(described.rows):
        at = [begin[0], begin[1] + row, *begin[2:]]
        if any(not 0 <= x < size for x, size in zip(at, described.sizes, strict=True)):
            rows.append(None)
            continue
        address = sum(x * stride for x, stride in zip(at[1:], described.strides, strict=True))
        first = (base + 2 * at[0] + address) % 2**64
        rows.append(range(first, first + 2 * min(maps.CHUNK, described.sizes[0] - at[0])))
    return rows


@pytest.mark.parametrize(("dim", "heads", "gap"), [(128, 3, 0), (128, 1, 0), (192, 2, 8), (40, 2, 24)])
def test_copies_of_packed_sequences_touch_their_own_rows_and_no_byte_outside_the_tensor(
    library: Library, dim: int, heads: int, gap: int
) -> None:
    """The engine reads the base too, in place of what lies outside: a base before the tensor ended in illegal accesses
    wherever the allocator had mapped nothing there."""
    ends = [0, 1, 70, 70, 270, 300]
    whole = randn(300, heads, dim + gap)
    k = whole[..., :dim]
    p = packed(randn(300, heads, dim), k, k, 200, 5)
    plan = plans.plan_for(p)
    all_described = maps.describe(p, plan, out=False)
    maps.Maps(p, all_described).point_to(16, k.data_ptr(), k.data_ptr(), 0)
    described, base = all_described[1], library.encoded[1][0]
    assert library.encoded[1][1:] == (described.sizes, described.strides, (64, plan.tile_kv, 1, 1, 1))
    storage = range(whole.data_ptr(), whole.data_ptr() + 2 * whole.numel())
    assert base in storage
    for start, end in pairwise(ends):
        for key in range(0, max(1, end - start), plan.tile_kv):
            for head in range(heads):
                w = SimpleNamespace(keys=end - start, start_kv=start)
                begin = coordinates(
                    "packed", TILE_KV=plan.tile_kv, w=w, key=key, head=head, c=dim // 64 - (dim % 64 == 0)
                )
                rows = touched(described, base, begin)
                for row, found in enumerate(rows):
                    if key + row < end - start:
                        assert found and found[0] == k[start + key + row, head, begin[0]].data_ptr()
                        assert found[0] in storage and found[-1] in storage
                    else:
                        assert found is None


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_copies_of_dense_tensors_touch_no_byte_outside_of_them(library: Library, layout: str) -> None:
    shape = (2, 3, 150, 80) if layout == "bhsd" else (2, 150, 3, 80)
    q, k, v = (randn(*shape) for _ in range(3))
    p = dense(q, k, v, layout)
    plan = plans.plan_for(p)
    all_described = maps.describe(p, plan, out=False)
    maps.Maps(p, all_described).point_to(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0)
    described, base = all_described[1], library.encoded[1][0]
    storage = range(k.data_ptr(), k.data_ptr() + 2 * k.numel())
    for key in range(0, 150, plan.tile_kv):
        w = SimpleNamespace(keys=150, batch=1)
        for row, found in enumerate(
            touched(described, base, coordinates("dense", TILE_KV=plan.tile_kv, w=w, key=key, head=2, c=1))
        ):
            assert (found is None) == (key + row >= 150)
            if found is not None:
                place = (1, 2, key + row, 64) if layout == "bhsd" else (1, key + row, 2, 64)
                assert found[0] == k[place].data_ptr() and found[-1] in storage and len(found) == 2 * 16


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_are_stored_where_they_belong_and_no_row_after_the_last(library: Library, layout: str) -> None:
    q = randn(2, 3, 150, 80) if layout == "bhsd" else randn(2, 150, 3, 80)
    p = dense(q, q, q, layout)
    described = maps.describe(p, plans.plan_for(p), out=True)[3]
    out = torch.empty(p.result_shapes()[0], dtype=bf16)
    for row in range(0, 160, 16):
        for at, found in enumerate(touched(described, out.data_ptr(), [64, row, 2, 1])):
            assert (found is None) == (row + at >= 150)
            if found is not None:
                place = (1, 2, row + at, 64) if layout == "bhsd" else (1, row + at, 2, 64)
                assert found[0] == out[place].data_ptr() and len(found) == 2 * 16


@pytest.mark.parametrize(
    ("address_in", "any_address"), [("first", True), ("last", True), ("first, shifted", True), ("first", False)]
)
def test_maps_point_to_each_call_s_tensors(library: Library, address_in: str, any_address: bool) -> None:
    """By writing the address where maps prove to begin with it, else by making them anew where it changed."""
    library.address_in, library.any_address = address_in, any_address
    p = dense(*(randn(1, 2, 8, 64) for _ in range(3)))
    made = maps.Maps(p, maps.describe(p, plans.plan_for(p), out=True))
    made.point_to(16, 32, 48, 64)
    once = len(library.encoded)
    for addresses in ((160, 32, 480, 64), (160, 32, 480, 64), (16, 32, 48, 64)):
        made.point_to(*addresses)
        words = [list((ctypes.c_uint64 * 16).from_address(place)) for place in made.places]
        shift = 4 if "shifted" in address_in else 0
        assert tuple(x[15 if address_in == "last" else 0] << shift for x in words) == addresses
    assert len(library.encoded) - once == (0 if address_in == "first" and any_address else 8)
    assert all(place % 64 == 0 for place in made.places)


def test_a_map_that_the_driver_refuses_is_described(library: Library) -> None:
    p = dense(*(randn(1, 2, 8, 64) for _ in range(3)))
    library.cuTensorMapEncodeTiled.function = lambda *_: 1
    with pytest.raises(driver.DriverError, match=r"to mapping q: Description\(sizes=\(64, 8, 2, 1\)"):
        maps.Maps(p, maps.describe(p, plans.plan_for(p), out=False)).point_to(16, 32, 48, 0)


# ---- launches --------------------------------------------------------------------------------------------------------


def test_a_launch_is_given_this_call_s_addresses(library: Library) -> None:
    sink = torch.tensor([0.5, 1.0], dtype=torch.float64)
    for _ in range(2):  # the second finds maps and arguments of the first
        q, k, v = randn(1, 2, 300, 64), randn(1, 1, 200, 64), randn(1, 1, 200, 32)
        p = dense(q, k, v, return_lse=True, mask=masks.split(Causal())[0], scores=scores.split((Sink(sink),))[0])
        run = forward(p)
        for _ in range(2):
            q, k, v = q.clone(), k.clone(), v.clone()
            out, lse = run(Operands(q, k, v, scores=(sink,)))
            seen = library.launched[-1]
            assert [words[0] for words in seen.maps] == [x.data_ptr() for x in (q, k, v)]
            assert (seen.params.out, seen.params.lse) == (out.data_ptr(), lse.data_ptr())
            assert seen.params.counter == 1000 + STREAM and seen.config.stream == STREAM
            assert seen.params.sink
            assert run._arguments[4] == run._maps.places[3], "the results' map comes after the parameters"
            assert ctypes.c_uint64.from_address(run._maps.places[3]).value == out.data_ptr()
    assert (out.shape, out.dtype, out.is_contiguous()) == ((1, 2, 300, 32), bf16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((1, 2, 300), torch.float32, True)
    config, built = seen.config, plans.variant(p, plans.plan_for(p))
    assert (config.grid_x, config.grid_y, config.grid_z) == (2 * -(-300 // built.tile_q), 1, 1)
    assert (config.block_x, config.block_y, config.block_z) == (built.threads, 1, 1)
    assert (config.shared_bytes, config.attributes, config.attribute_count) == (built.shared_bytes, None, 0)
    assert seen.extra is None


def test_a_bias_that_begins_between_pairs_is_read_by_a_kernel_of_its_own(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(launch, "cubin", lambda text: texts.append(text) or b"code")
    q, k, v = (randn(1, 2, 300, 64) for _ in range(3))
    wide = randn(300, 302)
    run = forward(dense(q, k, v, scores=scores.split((Bias(wide[:, :300]),))[0]))
    for first, pairs in ((0, [1]), (2, [1]), (1, [1, 0]), (1, [1, 0])):
        bias = wide[:, first : first + 300]
        run(Operands(q, k, v, scores=(bias,)))
        assert [int(re.search(r"BIAS_PAIRS (\d)", text).group(1)) for text in texts] == pairs
        assert library.launched[-1].params.bias == bias.data_ptr()


def test_lse_that_was_not_asked_for_is_null(library: Library) -> None:
    q, k, v = (randn(1, 2, 300, 64) for _ in range(3))
    out, lse = forward(dense(q, k, v))(Operands(q, k, v))
    assert lse is None and library.launched[-1].params.lse is None and library.launched[-1].params.out == out.data_ptr()


def test_packed_sequences_hand_over_where_they_begin_on_every_multiprocessor(library: Library) -> None:
    q = randn(300, 2, 64)
    ends = torch.tensor([0, 100, 300])
    forward(packed(q, q, q, 200, 2))(Operands(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends))
    seen = library.launched[-1]
    assert (seen.params.ends_q, seen.params.ends_kv) == (ends.data_ptr(), ends.data_ptr())
    assert seen.config.grid_x == UNITS and seen.params.counter == 1000 + STREAM


def test_a_thread_without_a_context_gets_the_one_of_the_launcher(library: Library) -> None:
    q, k, v = (randn(1, 2, 300, 64) for _ in range(3))
    run = forward(dense(q, k, v))
    library.answers = [driver.INVALID_CONTEXT, 0]
    run(Operands(q, k, v))
    assert library.current == [99] and len(library.launched) == 2


def test_a_refused_launch_says_what_was_launched(library: Library) -> None:
    q, k, v = (randn(1, 2, 300, 64) for _ in range(3))
    run = forward(dense(q, k, v))
    library.answers = [719]
    with pytest.raises(driver.DriverError, match=r"launching 6 thread blocks for Plan\(.*compiled as Variant\("):
        run(Operands(q, k, v))


def test_threads_that_share_a_launcher_each_launch_their_own_tensors(library: Library) -> None:
    inputs = [tuple(randn(1, 1, 8, 64) for _ in range(3)) for _ in range(4)]
    run = forward(dense(*inputs[0]))
    outs: dict[int, tuple[int, ...]] = {}

    def call(number: int) -> None:
        for _ in range(3):
            out, _ = run(Operands(*inputs[number]))
            outs[out.data_ptr()] = tuple(x.data_ptr() for x in inputs[number])
            kept.append(out)

    kept: list[torch.Tensor] = []
    library.takes = 0.005
    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    seen = {x.params.out: tuple(words[0] for words in x.maps) for x in library.launched}
    assert seen == outs


def test_parts_of_the_keys_are_merged(library: Library) -> None:
    sink = torch.tensor([0.5, 1.0])
    q, k, v = randn(1, 2, 300, 64), randn(1, 1, 5000, 64), randn(1, 1, 5000, 32)
    p = dense(q, k, v, return_lse=True, mask=masks.split(Causal())[0], scores=scores.split((Sink(sink),))[0])
    plan = plans.plan_for(p, UNITS)
    assert plan.schedule == "split_kv" and plan.split_kv % plan.tile_kv == 0
    plans.check(p, plan)
    out, lse = launch.prepare(p, plan)(Operands(q, k, v, scores=(sink,)))
    (seen,), (merged,) = library.launched, library.merged
    count = -(-5000 // plan.split_kv)
    assert (seen.params.splits, merged.splits, seen.params.split_tiles) == (count, count, plan.split_kv // plan.tile_kv)
    assert seen.config.grid_x == -(-300 // plan.tile_q) * 2 * count <= UNITS
    assert (seen.params.parts, seen.params.parts_lse) == (merged.parts, merged.parts_lse)
    assert (merged.first, merged.end) == (seen.params.first, 600) == (0, 600)
    assert (merged.out, merged.lse, merged.sink) == (out.data_ptr(), lse.data_ptr(), sink.data_ptr())
    assert (seen.params.out_split, seen.params.lse_split) == (out.numel(), lse.numel())
    assert not plans.variant(p, plan).sink, "it enters once, where the parts are merged"
    assert library.early == [True] and not seen.config.attribute_count


@pytest.mark.parametrize(
    "change",
    [{"batch_invariant": True}, {"form": "varlen"}, {"mask": masks.split(torch.ones(1, 1, dtype=torch.bool))[0]}],
)
def test_what_must_not_be_split_is_not(change: dict[str, Any]) -> None:
    q, k = randn(1, 2, 300, 64), randn(1, 2, 5000, 64)
    assert plans.plan_for(dense(q, k, k), UNITS).split_kv
    assert not plans.plan_for(replace(dense(q, k, k), **change), UNITS).split_kv
    assert not plans.plan_for(dense(randn(4, 32, 300, 64), k, k), UNITS).split_kv, "enough tiles of rows"


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_nothing_to_do_is_no_launch(library: Library, sizes: tuple[int, int]) -> None:
    q, k = randn(1, 2, sizes[0], 64), randn(1, 2, sizes[1], 64)
    p = replace(dense(q, k, k, return_lse=True))
    out, lse = launch.prepare(p, plans.plan_for(p))(Operands(q, k, k))
    assert out.shape == q.shape and not out.any() and bool((lse == -torch.inf).all()) and not library.launched


def test_a_driver_without_the_functions_is_named() -> None:
    with pytest.raises(driver.DriverError, match=r"older than CUDA 12: .*cuLaunchKernelEx"):
        driver.Driver(SimpleNamespace())


# ---- counters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is being captured, as its last element; counters lie in CPU memory."""
    now = [False]
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return now


def test_each_stream_and_each_captured_launch_has_a_counter_of_its_own(capturing: list[bool]) -> None:
    made = counters.Counters(torch.device("cpu"))
    made.ready()
    first, second = made.take(1), made.take(2)
    assert (made.take(1), made.take(2)) == (first, second)
    capturing.append(True)
    captured = [made.take(1) for _ in range(5000)]  # more than were made ready
    taken = {first, second, *captured}
    assert len(taken) == 5002
    words = {chunk.data_ptr() + 8 * i for chunk in made._chunks for i in range(len(chunk))}
    assert taken <= words and all(not chunk.any() for chunk in made._chunks)


def test_counters_are_made_ready_before_a_capture_not_in_it(capturing: list[bool]) -> None:
    made = counters.Counters(torch.device("cpu"))
    capturing.append(True)
    made.ready()
    assert not made._chunks
    capturing.append(False)
    made.ready(), made.ready()
    assert len(made._chunks) == 1


# ---- sections --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "keys", "expected"),
    [
        (1, 64, 64, 16, plans.SECTION_HEADS),
        (1, 16, 16, 8192, 8),  # 4 MiB a head
        (1, 10, 10, 8192, 5),  # 8 would leave 2
        (1, 7, 7, 32768, 2),  # 16 MiB a head: 2 and a last one of 1 are as good as it gets
        (1, 12, 3, 65536, 4),  # more than a section has room for, still one KV head
        (2, 64, 1, 1024, 64),  # a KV head with more query heads than a section is meant to have
        (1, 2, 2, 16, 2),
    ],
)
def test_a_section_has_heads_that_fit_and_leaves_none_lonely(
    batch: int, heads: int, heads_kv: int, keys: int, expected: int
) -> None:
    q, k = torch.empty(batch, heads, 1, 128, dtype=bf16), torch.empty(batch, heads_kv, keys, 128, dtype=bf16)
    assert plans.section(dense(q, k, k), 32 * 2**20) == expected


def test_the_last_wave_is_shared_where_much_of_the_card_would_wait_for_it() -> None:
    def plan(heads: int, rows: int, keys: int, dim: int = 128, **changes: Any) -> Any:
        q, k = randn(1, heads, rows, dim), randn(1, heads, keys, dim)
        p = replace(dense(q, k, k), **changes)
        found = plans.plan_for(p, UNITS)
        plans.check(p, found)
        return found

    assert UNITS == 132
    shared = plan(17, 1024, 4096)
    assert (shared.schedule, shared.tile_q, shared.tile_kv) == ("stream_k", 128, 128)
    for other in (plan(17, 1024, 512), plan(33, 512, 4096), plan(33, 510, 4096), plan(17, 1024, 4096, 64)):
        assert other.schedule == "q_outer", (
            "too little to save, no tile left over, none of whole rows, tiles of 192 rows"
        )
    assert plan(16, 1024, 4096).schedule == "q_outer", "not one whole wave"
    for changes in ({"mask": masks.split(Causal())[0]}, {"batch_invariant": True}, {"scale": -1.0}):
        assert plan(17, 1024, 4096, **changes).schedule == "q_outer"
    p = dense(randn(1, 4, 300, 128), randn(1, 4, 300, 128), randn(1, 4, 300, 128))
    with pytest.raises(ValueError, match="must be 'q_outer' where there is a mask"):
        plans.check(replace(p, batch_invariant=True), shared)


def test_parts_of_the_last_wave_are_merged(library: Library) -> None:
    q, k = randn(1, 17, 1024, 128), randn(1, 17, 4096, 128)
    p = dense(q, k, k, return_lse=True)
    run = launch.prepare(p, plans.plan_for(p, UNITS))
    out, lse = run(Operands(q, k, k))
    (seen,), (merged,) = library.launched, library.merged
    assert seen.config.grid_x == UNITS
    assert (seen.params.out, seen.params.lse) == (merged.out, merged.lse) == (out.data_ptr(), lse.data_ptr())
    assert (seen.params.parts, seen.params.parts_lse) == (merged.parts, merged.parts_lse)
    assert bytes(seen.params.stretches) == bytes(merged.stretches)
    assert (seen.params.stretches.whole, seen.params.stretches.steps) == (132, 4 * 32)
    assert (merged.first, merged.end, merged.splits) == (132 * 128, 17 * 1024, 0)
    q, k = randn(1, 33, 512, 128), randn(1, 33, 4096, 128)
    library.merged.clear()
    launch.prepare(dense(q, k, k), plans.plan_for(p, UNITS))(Operands(q, k, k))
    assert not library.merged, "no tile is left over"
