"""attnworks inside real programs: threads, forks, default devices, no native extension. Nothing may crash or hang."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from attnworks import Causal, UnsupportedError, Window, attention, attention_decode, attention_varlen, prepared
from attnworks.backends import cpu
from helpers import assert_close, or_skip, randn


def work(backend: str, seq: int = 300) -> list[torch.Tensor]:
    """A prefill, a packed prefill and a split decode, large enough that the native kernels use several threads."""
    generator = torch.Generator().manual_seed(seq)
    q = torch.randn(1, 4, seq, 32, generator=generator)
    packed = q[0].transpose(0, 1)
    cu = torch.tensor([0, seq // 3, seq])
    cache = torch.randn(2, 3 * seq, 2, 32, generator=generator)
    return [
        *attention(q, q, q, mask=Causal(), return_lse=True, backend=backend),
        attention_varlen(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend),
        attention_decode(packed[None, :2], cache[:1], cache[1:], kv_lens=torch.tensor([3 * seq]), backend=backend),
    ]


def training_step(seq: int = 500) -> tuple[torch.Tensor, ...]:
    """The native gradients of one head, whose tiles of keys take turns, by kernels alone."""
    generator = torch.Generator().manual_seed(seq)
    q, k, v, d_out = (torch.randn(1, 1, seq, 32, generator=generator) for _ in range(4))
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    return torch.autograd.grad(attention(*leaves, mask=Window(200, 40), backend="cpu"), leaves, d_out)


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def available(backend: str) -> None:
    if backend == "cpu" and not cpu.isas():
        pytest.skip("the cpu backend's verdict: native extension not built")


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(threads):
    available("cpu")
    before, expected, gradients = torch.get_num_threads(), work("cpu", 700), training_step()
    try:
        torch.set_num_threads(threads)
        assert same(work("cpu", 700), expected)
        assert same(training_step(), gradients)
    finally:
        torch.set_num_threads(before)


def test_several_threads_at_once(backend):
    """Eight Python threads, each with shapes of its own, sharing the prepared calls and the scratch memory."""
    available(backend)
    sizes = [40 + 37 * n for n in range(8)]
    expected = [work(backend, size) for size in sizes]
    wrong: list[int] = []

    def run(n: int) -> None:
        if not all(same(work(backend, sizes[n]), expected[n]) for _ in range(6)):
            wrong.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert wrong == []


def test_another_thread_runs_while_a_kernel_does():
    """The native call lets go of the interpreter: a counter in another thread moves while it runs."""
    available("cpu")
    q = randn(1, 8, 3000, 64)
    attention(q[:, :, :1], q[:, :, :1], q[:, :, :1], backend="cpu")
    stop, ticks = threading.Event(), []

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    attention(q, q, q, backend="cpu")
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert sum(start < t < end for t in ticks) >= 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_and_exits():
    """The child of a process that ran with two threads has none of them: a kernel must not wait for them.

    The child calls only the kernels and compares bytes, for torch's own parallel loops hang there.
    """
    available("cpu")
    torch.use_deterministic_algorithms(False)  # else torch fills fresh memory, by such a loop
    q, cache, lens = randn(1, 4, 700, 32), randn(1, 3000, 2, 32), torch.tensor([3000])

    def outputs() -> list[bytes]:
        dense = attention(q, q, q, mask=Causal(), backend="cpu")
        decoded = attention_decode(q.transpose(1, 2)[:, :2], cache, cache, kv_lens=lens, backend="cpu")
        return [x.numpy().tobytes() for x in (dense, decoded, *training_step())]

    expected = outputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of just what is tested here
        child = os.fork()
    if child == 0:
        os._exit(0 if outputs() == expected else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hung")
    assert outputs() == expected, "the parent goes on"


def test_torchs_default_device_does_not_lead_a_call_astray(backend):
    available(backend)
    q = randn(1, 2, 40, 8)
    cache, packed, cu, lens = randn(1, 40, 2, 8), randn(40, 2, 8), torch.tensor([0, 11, 30]), torch.tensor([17])
    one = q[:, :, :1]
    long = randn(1, 2, 5000, 8)

    def run() -> list[torch.Tensor]:
        return [
            *attention(q, q, q, mask=Causal(), return_lse=True, backend=backend),
            attention(one, long, long, backend=backend),
            attention_varlen(packed, packed, packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, backend=backend),
            attention_decode(q.transpose(1, 2)[:, :1], cache, cache, kv_lens=lens, backend=backend),
        ]

    expected = run()
    with torch.device("meta"):
        assert same(run(), expected)
        prepared.forget()
        assert same(run(), expected)


def test_torchs_default_dtype_changes_nothing(backend):
    available(backend)
    expected = work(backend)
    torch.set_default_dtype(torch.float64)
    try:
        generator = torch.Generator().manual_seed(300)
        q = torch.randn(1, 4, 300, 32, generator=generator, dtype=torch.float32)
        out, lse = attention(q, q, q, mask=Causal(), return_lse=True, backend=backend)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_inference_mode_and_parameters(backend):
    available(backend)
    q = torch.nn.Parameter(randn(1, 2, 6, 8))
    with torch.no_grad():
        expected = attention(q, q, q, backend=backend)
    with torch.inference_mode():
        assert torch.equal(attention(q, q, q, backend=backend), expected)
        cache = randn(1, 4, 2, 8)
        new = randn(1, 1, 2, 8)
        attention_decode(new, cache, cache.clone(), kv_lens=torch.tensor([2]), k_new=new, v_new=new, backend=backend)
        assert torch.equal(cache[0, 2], new[0, 0])


def test_without_the_native_extension_the_reference_answers_and_explain_says_why():
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "attnworks._native":
            raise ImportError("blocked for the test")
sys.meta_path.insert(0, Block())
import torch
import attnworks as aw
q = torch.randn(1, 2, 8, 4)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.testing.assert_close(aw.attention(q, q, q), expected)
print(aw.explain(q, q, q))
try:
    aw.attention(q, q, q, backend="cpu")
except aw.UnsupportedError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("backend: reference\n")
    assert "cpu: the native extension is not built (blocked for the test)" in ran.stdout
    assert "backend='cpu' does not support this call" in ran.stdout


def test_a_process_ends_in_silence():
    """The native calls that are kept until then, one of them by a graph that is still alive, are no leak to report."""
    available("cpu")
    script = """
import torch
import attnworks as aw
q = torch.randn(1, 2, 8, 16, requires_grad=True)
out = aw.attention(q, q, q, mask=aw.Causal(), backend="cpu")
out.sum().backward()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_calls_leak_no_memory():
    """Resident memory after thousands of calls, results dropped: the native side owns no buffer per call."""
    available("cpu")

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(5):
        work("cpu")
    before = resident()
    for _ in range(100):
        work("cpu")
    grown = resident() - before
    assert grown < 8 * 2**20, f"{grown} bytes in 100 rounds"


def test_distinct_calls_keep_little_memory_each():
    """A program that meets ever new lengths (a growing cache) pays a bounded price for each prepared call."""
    attention(*[randn(1, 1, 1, 4)] * 3)
    gc.collect()
    tracemalloc.start()
    try:
        for n in range(1, 257):
            x = randn(1, 1, n, 4)
            attention(x[:, :, :1], x, x)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / 256 < 8192, f"{kept / 256:.0f} bytes for each prepared call"


def test_fake_tensors_give_fake_results():
    """They have no memory: a kernel given their address would crash the interpreter."""
    q, cache, packed = randn(1, 2, 9, 8), randn(1, 9, 2, 8), randn(9, 2, 8)
    attention(q, q, q)  # the prepared call for real tensors is not theirs
    with FakeTensorMode() as mode:
        fake_q, fake_cache, fake_packed = (mode.from_tensor(x) for x in (q, cache, packed))
        out, lse = attention(fake_q, fake_q, fake_q, mask=Causal(), return_lse=True)
        assert (type(out), out.shape, lse.shape) == (FakeTensor, q.shape, (1, 2, 9))
        assert type(attention(fake_q, fake_q, fake_q)) is FakeTensor
        with pytest.raises(UnsupportedError, match="a tracer or a tensor subclass must see torch operations"):
            attention(fake_q, fake_q, fake_q, backend="cpu")
        for call in (
            lambda: attention_decode(fake_cache, fake_cache, fake_cache, kv_lens=torch.tensor([4]), backend="cpu"),
            lambda: attention_varlen(
                fake_packed,
                fake_packed,
                fake_packed,
                cu_seqlens_q=torch.tensor([0, 9]),
                cu_seqlens_kv=torch.tensor([0, 9]),
                max_seqlen_q=9,
                max_seqlen_kv=9,
                backend="cpu",
            ),
        ):
            with pytest.raises((UnsupportedError, DataDependentOutputException)):
                call()


def test_a_traced_call_is_not_baked_into_the_graph():
    q, other = randn(1, 2, 9, 8), randn(1, 2, 9, 8)
    graph = make_fx(lambda x: attention(x, x, x, mask=Causal()))(q)
    assert_close(graph(other), attention(other, other, other, mask=Causal()))


def test_plain_subclasses_and_wrappers_are_right(backend):
    available(backend)

    class Plain(torch.Tensor):
        pass

    q = randn(1, 2, 9, 8)
    plain = q.as_subclass(Plain)
    assert_close(torch.Tensor(attention(plain, plain, plain, backend=backend)), attention(q, q, q, backend=backend))
    wrapped = TwoTensor(q, q.clone())
    out = or_skip(attention, wrapped, wrapped, wrapped, backend=backend)
    assert_close(out.a, attention(q, q, q))
