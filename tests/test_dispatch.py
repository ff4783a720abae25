import json
import warnings

import pytest
import torch

from attnworks import Plan, Softcap, UnsupportedError, attention, attention_decode, dispatch, explain
from attnworks.backends import cpu, reference
from attnworks.hardware import detect
from helpers import problem_of, randn

needs_native = pytest.mark.skipif(not cpu.isas(), reason="the cpu backend's verdict: native extension not built")


def qkv(dtype=torch.float32, seq=8):
    return (randn(1, 2, seq, 8, dtype=dtype),) * 3


def test_the_last_backend_can_do_all_of_the_contract():
    assert dispatch.BACKENDS[-1] is reference
    assert dispatch.NAMES == ("cpu", "cuda", "triton", "reference")


def test_every_backend_has_the_six_names_and_agrees_with_itself():
    problem = problem_of(*qkv())
    for backend in dispatch.BACKENDS:
        if not backend.verdict(problem, detect("cpu")).supported:
            continue
        plans = backend.candidates(problem, detect("cpu"))
        assert plans
        for plan in plans:
            assert plan.backend == backend.NAME
            backend.check_plan(problem, plan)
            assert all(size >= 0 for size in backend.resources(problem, plan).values())
            assert callable(backend.prepare(problem, plan))


def doubled(s, b, h, q, k):
    return 2 * s


@needs_native
def test_auto_takes_the_first_that_supports_the_problem():
    assert explain(*qkv()).backend == "cpu"
    assert explain(*qkv(torch.float64)).backend == "reference"
    assert explain(*qkv(), scores=(Softcap(5.0),)).backend == "cpu"
    assert explain(*qkv(), scores=(doubled,)).backend == "reference"


def test_explain_gives_every_reason_why_not_the_others():
    told = explain(*qkv(torch.float64), scores=(doubled,))
    verdicts = {verdict.backend: verdict for verdict in told.verdicts}
    assert verdicts["reference"].supported
    reasons = " ".join(verdicts["cpu"].reasons)
    assert "float64" in reasons
    assert "score function doubled" in reasons
    assert all(reason in str(told) for reason in verdicts["cpu"].reasons)
    assert json.loads(json.dumps(told.to_json()))["backend"] == "reference"


def test_explain_and_attention_choose_alike():
    """explain() says what attention() does: the named plan, run by hand, gives attention's bits."""
    q, k, v = qkv(seq=70)
    told = explain(q, k, v)
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend=told.backend, plan=told.plan))


def test_a_named_backend_is_refused_rather_than_replaced():
    with pytest.raises(UnsupportedError, match=r"backend='cpu' does not support this call\n  cpu: .*float64") as caught:
        attention(*qkv(torch.float64), backend="cpu")
    assert [verdict.backend for verdict in caught.value.verdicts] == ["cpu"]


def test_a_plan_names_its_backend():
    q, k, v = qkv()
    assert explain(q, k, v, plan=Plan("reference", "eager")).backend == "reference"
    with pytest.raises(ValueError, match=r"plan: named backend 'reference', must name 'cpu'"):
        attention(q, k, v, backend="cpu", plan=Plan("reference", "eager"))
    with pytest.raises(ValueError, match=r"plan: named backend 'tpu', must name one of"):
        attention(q, k, v, plan=Plan("tpu", "eager"))
    with pytest.raises(TypeError, match=r"plan: was 'eager', must be None or a Plan"):
        attention(q, k, v, plan="eager")


@pytest.mark.parametrize("name", dispatch.NAMES)
def test_a_plan_that_does_not_fit_is_named(name):
    if not dispatch.BACKENDS[dispatch.NAMES.index(name)].verdict(problem_of(*qkv()), detect("cpu")).supported:
        pytest.skip("refused by its verdict")
    with pytest.raises(ValueError, match=r"plan schedule: was 'spiral', must be "):
        attention(*qkv(), plan=Plan(name, "spiral"))


@needs_native
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "tiled", "tile_q": 0, "tile_kv": 64}, r"plan tile_q, tile_kv: were 0, 64, must be >= 1"),
        ({"schedule": "split_kv"}, r"plan split_kv: was 0, must be >= 1"),
        ({"schedule": "tiled", "tile_q": 8, "tile_kv": 64, "isa": "mmx"}, r"plan isa: was 'mmx', must be one of"),
    ],
)
def test_a_cpu_plan_that_cannot_run_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        attention(*qkv(), plan=Plan("cpu", **fields))


@pytest.mark.parametrize("wrong", ["gpu", None, 3, ["cpu"], torch.zeros(1)])
def test_an_unknown_backend_is_named(wrong):
    with pytest.raises(
        ValueError, match=r"backend: was .*, must be 'auto' or one of \('cpu', 'cuda', 'triton', 'reference'\)"
    ):
        attention(*qkv(), backend=wrong)


def test_falling_back_to_the_quadratic_reference_is_said_above_a_few_megabytes():
    small, large = randn(1, 1, 64, 8).double(), randn(1, 1, 1100, 8).double()
    cache, lens = large.transpose(1, 2), torch.tensor([1100])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(small, small, small)
        attention(large, large, large, backend="reference")
        explain(large, large, large)
    message = r"reference backend, which writes out all scores \(cpu: .*float64"
    for call in (
        lambda: attention(large, large, large[..., :7]),
        lambda: attention_decode(cache, cache, cache[..., :7], kv_lens=lens),
    ):
        with pytest.warns(RuntimeWarning, match=message) as caught:
            call()
        assert caught[0].filename == __file__, "the warning points at the caller's line"


@needs_native
def test_a_native_extension_of_another_abi_is_refused(monkeypatch):
    native = cpu._native
    monkeypatch.setattr("importlib.import_module", lambda name: type("Old", (), {"ABI": native.ABI - 1}))
    loaded, why = cpu._load()
    assert loaded is None
    assert why == f"the native extension has ABI {cpu.ABI - 1}, must have {cpu.ABI}: rebuild it"
    monkeypatch.setattr(cpu, "_native", loaded)
    monkeypatch.setattr(cpu, "_why_not", why)
    assert cpu.isas() == ()
    with pytest.raises(UnsupportedError, match="has ABI"):
        attention(*qkv(seq=9), backend="cpu")
    assert explain(*qkv(seq=9)).backend == "reference"
