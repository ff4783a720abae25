"""torch.compile: one graph, no recompilation for a new length, the eager call's results and errors.

Most of it with the backends "eager" and "aot_eager", which trace but generate no code; one test runs the code.
"""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attnworks
from attnworks import Bias, Causal, Rotary, Sink, Softcap, Window, attention, attention_decode, attention_varlen
from helpers import randn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", dynamic=None):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic), counter


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def qkv(seq_q, seq_kv=None, batch=2):
    return tuple(randn(batch, h, n, 8) for h, n in ((6, seq_q), (3, seq_kv or seq_q), (3, seq_kv or seq_q)))


def gradients(function, inputs):
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    weighted = [(x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in results]
    sum(weighted).backward()
    return [*results, *(x.grad for x in leaves)]


def dense(q, k, v, bias, sink):
    scores = (Softcap(5.0), Bias(bias), Sink(sink))
    return attention(q, k, v, mask=Causal() & Window(5, None), scores=scores, return_lse=True)


def dense_inputs(seq):
    return (*qkv(seq), randn(1, 6, 1, seq), randn(6))


def packed(q, k, v, cu):
    return attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, mask=Window(3, 0))


def packed_inputs(total, *cu):
    return (randn(total, 6, 8), randn(total, 3, 8), randn(total, 3, 8), torch.tensor(cu))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (dense, [dense_inputs(n) for n in (5, 9, 12, 20)]),
        (packed, [packed_inputs(*n) for n in ((9, 0, 4, 9), (12, 0, 5, 12), (14, 0, 3, 10), (30, 0, 0, 29))]),
    ],
)
def test_forward_and_backward_without_recompiling_for_a_new_length(function, calls, dynamic):
    """From the second length on torch makes sizes variable by itself; with ``dynamic`` from the first."""
    run, counter = compiled(function, dynamic=dynamic)
    for n, inputs in enumerate(calls):
        same(gradients(run, inputs), gradients(function, inputs))
        assert counter.frame_count == (1 if dynamic or n == 0 else 2)


def test_decode_appends_in_place_and_takes_new_lengths_and_capacities():
    """Forty steps of a growing cache, rotary embedding and pages: two graphs at most, bits of the eager calls."""
    cos, sin = randn(64, 4), randn(64, 4)

    def step(q, caches, lens, table, new):
        k, v = caches
        out = attention_decode(
            q, k, v, kv_lens=lens, page_table=table, k_new=new, v_new=new, rotary=Rotary(cos, sin), mask=Causal()
        )
        return out * 2

    run, counter = compiled(step)
    table = torch.randperm(10).view(2, 5)
    mine, theirs = (tuple(torch.zeros(10, 4, 3, 8) for _ in "kv") for _ in range(2))
    for n in range(12):
        q, new, lens = randn(2, 1, 6, 8), randn(2, 1, 3, 8), torch.tensor([n, n + 3])
        same(run(q, mine, lens, table, new), step(q, theirs, lens, table, new))
    same(mine, theirs)
    assert mine[0].any()
    assert counter.frame_count == 1
    for pages in (6, 7, 8):
        table = torch.arange(2 * pages).view(2, pages)
        mine, theirs = (tuple(torch.zeros(2 * pages, 4, 3, 8) for _ in "kv") for _ in range(2))
        q, new, lens = randn(2, 1, 6, 8), randn(2, 1, 3, 8), torch.tensor([pages, 3])
        same(run(q, mine, lens, table, new), step(q, theirs, lens, table, new))
    assert counter.frame_count == 2


def test_values_are_still_checked_and_nothing_is_written_before():
    def step(q, k, lens, new):
        return attention_decode(q, k, k.clone(), kv_lens=lens, k_new=new, v_new=new)

    run, _ = compiled(step, backend="eager")
    q, k, new = randn(2, 1, 6, 8), torch.zeros(2, 5, 3, 8), randn(2, 1, 3, 8)
    run(q, k, torch.tensor([1, 4]), new)
    k.zero_()
    with pytest.raises(ValueError, match=r"kv_lens: ranged from 1 to 5, must lie in 0..4"):
        run(q, k, torch.tensor([1, 5]), new)
    assert not k.any()
    run, _ = compiled(packed, backend="eager")
    inputs = packed_inputs(9, 0, 4, 9)
    run(*inputs)
    with pytest.raises(ValueError, match="cu_seqlens_q: ended with 10"):
        run(*inputs[:3], torch.tensor([0, 4, 10]))


def test_what_a_call_says_besides_its_tensors_reaches_it():
    q, k, v = qkv(6, 9)
    sees = torch.ones(6, 9, dtype=torch.bool).tril(1)
    mask = Causal() & sees

    def predicate(b, h, i, j):
        return j % 2 == 0

    for options in (
        {"scale": 0.3},
        {"mask": mask},
        {"mask": Causal("top-left")},
        {"mask": predicate},
        {"layout": "bhsd", "batch_invariant": True},
        {"plan": attnworks.Plan("reference", "kv_outer", 4, 4)},
        {"backend": "reference", "deterministic": True, "validate": True},
    ):
        run, _ = compiled(lambda *x, options=options: attention(*x, **options), backend="eager")
        same(run(q, k, v), attention(q, k, v, **options))

    run, counter = compiled(lambda *x, left: attention(*x, mask=Window(left, 0)), dynamic=True)
    for left in (1, 2):
        same(run(q, k, v, left=left), attention(q, k, v, mask=Window(left, 0)))
    assert counter.frame_count == 2, "a window is built into the kernel, so another one is another graph"


def faded(s, b, h, i, j):
    return torch.where(i - j > 2, s - 0.3 * (i - j), s) + 0.1 * h


def test_a_function_as_score_is_part_of_the_graph_with_its_gradient():
    def call(q, k, v, bias):
        return attention(q, k, v, mask=Causal(), scores=(faded, Bias(bias), Softcap(5)))

    run, counter = compiled(call, dynamic=True)
    for seq in (5, 9):
        inputs = (*qkv(seq), randn(1, 6, 1, seq))
        same(gradients(run, inputs), gradients(call, inputs))
    assert counter.frame_count == 1


def test_a_tensor_that_a_score_function_captured_is_read_where_no_gradient_could_be_lost():
    table = randn(6)

    def by_head(s, b, h, i, j):
        return s + table[h]

    def call(q, k, v):
        return attention(q, k, v, scores=(by_head, faded))

    run, _ = compiled(call, backend="eager")
    inputs = qkv(5)
    same(run(*inputs), call(*inputs))
    table.mul_(-3)
    same(run(*inputs), call(*inputs))
    run, _ = compiled(call)
    with pytest.raises(Exception, match="scores: held a function that captured a tensor"):
        gradients(run, inputs)


def test_autocast_and_grad_mode_are_those_of_the_trace():
    q, k, v = qkv(6)
    run, _ = compiled(lambda q, k, v: attention(q, k.bfloat16(), v.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(q, k, v).dtype == torch.bfloat16
    leaf = q.clone().requires_grad_()
    run, _ = compiled(attention)
    with torch.no_grad():
        assert not run(leaf, k, v).requires_grad
    assert run(leaf, k, v).requires_grad


def test_errors_say_what_they_say_eagerly():
    q, k, v = qkv(6)
    for call, message in (
        (lambda q, k, v: attention(q, k[..., :5], v), "k: was of shape"),
        (lambda q, k, v: attention(q, k, v, scores=(lambda s, b, h, i, j: 1,)), "scores: held a function that could"),
        (lambda q, k, v: attention(q, k, v, backend="gpu"), "backend: was 'gpu'"),
        (lambda q, k, v: attention(q, k, v, return_lse=1), "return_lse: was 1, must be a bool"),
        (lambda *qkv: attention(*(x.double() for x in qkv), backend="cpu"), "dtype torch.float64|not built"),
    ):
        run, _ = compiled(call, backend="eager")
        with pytest.raises(Exception, match=message):
            run(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_export_puts_the_op_into_the_program(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, mask=Causal())

    length = {2: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(Module(), qkv(6), dynamic_shapes=(length,) * 3, strict=strict)
    assert "attnworks.forward.default" in {str(node.target) for node in program.graph.nodes}
    inputs = qkv(9)
    same(program.module()(*inputs), attention(*inputs, mask=Causal()))


@pytest.mark.parametrize("strict", [False, True])
def test_export_puts_decode_into_the_program_too(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, lens):
            return attention_decode(q, k, v, kv_lens=lens)

    inputs = randn(2, 1, 6, 8), randn(2, 9, 3, 8), randn(2, 9, 3, 8), torch.tensor([4, 9])
    want = attention_decode(*inputs[:3], kv_lens=inputs[3])
    program = torch.export.export(Module(), inputs, strict=strict)
    assert any("attnworks" in str(node.target) for node in program.graph.nodes)
    same(program.module()(*inputs), want)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="generated code needs a C++ compiler")
def test_generated_code_trains_a_block_and_decodes():
    """Inductor: strides that it reads off the fakes, a gradient, and a cache written in place."""
    torch.use_deterministic_algorithms(False)
    project = torch.nn.Linear(48, 3 * 48, bias=False)

    def block(x):
        q, k, v = project(x).unflatten(-1, (3, 6, 8)).unbind(2)
        return attention(q, k, v, mask=Causal(), layout="bshd").flatten(2).relu()

    def step(q, k, v, lens, new):
        return attention_decode(q, k, v, kv_lens=lens, k_new=new, v_new=new).exp()

    run = torch.compile(block, fullgraph=True, dynamic=True)
    for seq in (7, 11):
        x = randn(2, seq, 48)
        same(gradients(run, (x,)), gradients(block, (x,)))
    run = torch.compile(step, fullgraph=True)
    mine, theirs = (tuple(torch.zeros(2, 9, 3, 8) for _ in "kv") for _ in range(2))
    for n in range(3):
        q, new, lens = randn(2, 1, 6, 8), randn(2, 1, 3, 8), torch.tensor([n, n + 5])
        same(run(q, *mine, lens, new), step(q, *theirs, lens, new))
    same(mine, theirs)
