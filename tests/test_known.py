"""Calls that are known again without a key, and those that must not be."""

import itertools
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from attnworks import Causal, Plan, Softcap, Window, attention, attention_decode, known, memory, prepared
from attnworks.backends import cpu

needs_native = pytest.mark.skipif(not cpu.isas(), reason="the native extension is not built")


@pytest.fixture(autouse=True)
def fresh():
    prepared.forget()
    yield
    prepared.forget()


@pytest.fixture
def counted(monkeypatch):
    """How many launchers ``known.find`` has found."""
    found, find = [], known.find

    def counting(*arguments):
        launch = find(*arguments)
        if launch is not None:
            found.append(launch)
        return launch

    monkeypatch.setattr(known, "find", counting)
    return found


def tensors(*shapes, dtype=torch.float32):
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def dense(dtype=torch.float32):
    return tensors((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), dtype=dtype)


def test_torch_has_the_guard_that_the_short_way_needs():
    """Where a new torch has it no more, every call goes the longer way: right, but slower. Then look for another."""
    assert known._Guard is not None


@pytest.mark.parametrize("mask", [None, Causal(), Window(2, 0)])
def test_other_tensors_of_the_same_kind_are_known_and_right(counted, mask):
    attention(*dense(), mask=mask, scale=0.5)
    q, k, v = dense()
    again = attention(q, k, v, mask=mask and type(mask)(**vars(mask)), scale=1.0 / 2.0)
    assert len(counted) == 1
    torch.testing.assert_close(again, attention(q, k, v, mask=mask, scale=0.5, backend="reference"))


def test_a_decode_is_known_and_reads_its_lengths_anew(counted):
    (q, k, v), other = tensors((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), tensors((2, 1, 4, 8))[0]
    attention_decode(q, k, v, kv_lens=torch.tensor([3, 9]))
    found = attention_decode(other, k, v, kv_lens=torch.tensor([7, 2]))
    if not cpu.isas():
        return  # the reference takes copies of the lengths
    assert len(counted) == 1
    expected = attention_decode(other, k, v, kv_lens=torch.tensor([7, 2]), backend="reference")
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="kv_lens"):
        attention_decode(other, k, v, kv_lens=torch.tensor([7, 10]))
    assert len(counted) == 2  # known, and the native call checks the lengths


def _view(x, *, step):
    """The same values with other strides."""
    return torch.stack([x] * step, -2).flatten(-3, -2)[..., ::step, :]


CHANGES = {
    "dtype": lambda q, k, v: ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}),
    "strides of q": lambda q, k, v: ((_view(q, step=2), k, v), {}),
    "strides of k": lambda q, k, v: ((q, _view(k, step=2), v), {}),
    "strides of v": lambda q, k, v: ((q, k, _view(v, step=3)), {}),
    "shape of v": lambda q, k, v: ((q, k, torch.cat((v, v), -1)), {}),
    "sign of q": lambda q, k, v: ((torch._neg_view(q), k, v), {}),
    "sign of v": lambda q, k, v: ((q, k, torch._neg_view(v)), {}),
    "grad of q": lambda q, k, v: ((q.clone().requires_grad_(), k, v), {}),
    "grad of v": lambda q, k, v: ((q, k, v.clone().requires_grad_()), {}),
    "one tensor twice": lambda q, k, v: ((q, k, k), {}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": 0.25}),
    "return_lse": lambda q, k, v: ((q, k, v), {"return_lse": True}),
    "batch_invariant": lambda q, k, v: ((q, k, v), {"batch_invariant": True}),
    "deterministic": lambda q, k, v: ((q, k, v), {"deterministic": True}),
    "backend": lambda q, k, v: ((q, k, v), {"backend": "reference"}),
    "plan": lambda q, k, v: ((q, k, v), {"plan": Plan("reference", "standard")}),
    "validate": lambda q, k, v: ((q, k, v), {"validate": True}),
    "mask": lambda q, k, v: ((q, k, v), {"mask": Causal()}),
    "alignment": lambda q, k, v: ((q, k, v), {"mask": Causal("top-left")}),
    "a tensor for a mask": lambda q, k, v: ((q, k, v), {"mask": torch.rand(5, 6) > 0.3}),
    "scores": lambda q, k, v: ((q, k, v), {"scores": (Softcap(2.0),)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_not_taken_for_the_same(counted, change):
    q, k, v = dense()
    attention(q, k, v)
    others, options = CHANGES[change](*dense())
    found = attention(*others, **options)
    assert not counted, change
    expected = attention(*others, **({**options, "plan": None, "backend": "reference"}))
    for one, same in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one.detach().float(), same.detach().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{"return_lse": 1}, {"scale": True}, {"deterministic": 1}, {"batch_invariant": 0}])
def test_what_equals_a_known_option_and_is_none_still_raises(options):
    q, k, v = dense()
    attention(q, k, v, scale=1.0, return_lse=True, deterministic=True)
    attention(q, k, v, scale=1.0, return_lse=True, deterministic=True)
    with pytest.raises(TypeError, match=next(iter(options))):
        attention(q, k, v, **({"scale": 1.0, "return_lse": True, "deterministic": True} | options))


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))


def test_who_watches_still_sees_the_call(counted):
    q, k, v = dense()
    plain = attention(q, k, v)
    with Watching() as mode:
        attention(q, k, v)
    assert mode.seen > 1, "a dispatch mode sees torch's operations"
    looped = torch.func.vmap(lambda x: attention(x, k, v))(torch.stack((q, q)))
    torch.testing.assert_close(looped, torch.stack((plain, plain)))
    torch.func.grad(lambda x: attention(x, k, v).sum())(q)
    with forward_ad.dual_level():
        dual = attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(dual).tangent is not None
    assert not counted
    with torch.inference_mode():  # tensors from outside look different in there
        attention(q, k, v), attention(q, k, v)
    attention(q, k, v.clone().requires_grad_()).sum().backward()


def test_calls_that_somebody_watches_are_not_remembered():
    q, k, v = dense()
    attention(q.clone().requires_grad_(), k, v)
    with Watching():
        attention(q, k, v)
    attention(q, q, q)
    attention(q, k, v, validate=True)
    attention(q, k, v, scores=(Softcap(2.0),))
    attention(torch._neg_view(q), k, v)
    attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)  # of which a copy is taken
    assert not known.CALLS


def test_a_call_without_grad_is_not_taken_for_one_with_it():
    q, k, v = dense()
    q.requires_grad_()
    with torch.no_grad():
        attention(q, k, v), attention(q, k, v)
    assert attention(q, k, v).requires_grad


def test_a_mask_that_is_a_tensor_is_read_each_time():
    q, k, v = dense()
    mask = torch.rand(5, 6) > 0.3
    first, second = (attention(q, k, v, mask=mask) for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(first, attention(q, k, v))


def test_a_known_call_keeps_no_tensor_alive():
    q, k, v = dense()
    attention(q, k, v)
    assert known.CALLS
    gone = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    assert all(x() is None for x in gone)


def test_known_calls_have_a_limit(monkeypatch):
    monkeypatch.setattr(known, "LIMIT", 3)
    for keys in range(1, 9):
        attention(*tensors((1, 1, 2, 8), (1, 1, keys, 8), (1, 1, keys, 8)))
        assert len(known.CALLS) <= 3


def test_without_torchs_guard_nothing_is_known_and_all_is_right(counted, monkeypatch):
    monkeypatch.setattr(known, "_Guard", None)
    q, k, v = dense()
    first, second = attention(q, k, v), attention(q, k, v)
    assert torch.equal(first, second) and not counted and not known.CALLS


def test_another_torchs_guard_is_left_alone(monkeypatch):
    def refusing(*_, **__):
        raise TypeError("takes other arguments")

    monkeypatch.setattr(known, "_Guard", refusing)
    attention(*dense())
    assert not known.CALLS


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("private", [True, False])
def test_memory_has_the_shape_strides_and_dtype_asked_for(private, filled, monkeypatch):
    if not private:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    empty = memory._empty_on("cpu")
    torch.use_deterministic_algorithms(filled)
    try:
        made = empty((2, 3), (1, 2), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.bfloat16, "cpu")
    assert not filled or made.isnan().all(), "torch fills fresh memory then"


@needs_native
def test_results_are_new_memory_each_time():
    q, k, v = dense()
    results = [attention(q, k, v, return_lse=True) for _ in range(3)]
    places = [x.data_ptr() for x in itertools.chain(*results)]
    assert len(set(places)) == len(places)
    assert all(out.is_contiguous() and lse.is_contiguous() for out, lse in results)
