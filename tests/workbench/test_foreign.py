"""Anybody's kernels in a benchmark: called as their parameters say, in the layout they like, verified before."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnworks import Causal, Window
from attnworks.problem import Problem
from attnworks.workbench import ceilings, foreign
from attnworks.workbench.cli import main
from attnworks.workbench.foreign import Foreign, verify_first
from attnworks.workbench.guards import Guarded
from attnworks.workbench.probing import prepare, probe
from attnworks.workbench.providers import by_name, describe, random_inputs
from attnworks.workbench.quick_check import NotVerifiedError, check
from attnworks.workbench.verify import verify

KERNELS = '''
import torch
import torch.nn.functional as F


def flash(q, k, v, causal=False, softmax_scale=None):
    """(batch, rows, heads, dim), bottom-right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, **gqa).transpose(1, 2), None


def torch_like(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    gqa = {"enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, **gqa)


def plain(a, b, c):
    return flash(a, b, c)[0]


def cached(q, k_cache, v_cache, cache_seqlens, causal=False, window_size=(-1, -1), softmax_scale=None):
    return flash(q, k_cache, v_cache, causal, softmax_scale)[0]


def scaleless(q, k, v, causal=False, softmax_scale=None):
    return flash(q, k, v, causal, 1.0)[0]


def raises(q, k, v, causal=False, softmax_scale=None):
    raise RuntimeError("no such tile")


def lazily(q, k, v, causal=False, softmax_scale=None):
    return "later"


declared_fp16 = lambda q, k, v, causal=False, softmax_scale=None: flash(q, k, v, causal)
declared_fp16.declares = {"dtypes": ("fp16",)}
'''
SIZES: dict[str, Any] = {"form": "dense", "batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 24, "seq_kv": 40}
PROBLEM = describe(**SIZES, head_dim=16, head_dim_v=16, dtype=torch.float32, mask=Causal())


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    return str(file)


def decode(mask: Any = None) -> Problem:
    sizes = SIZES | {"form": "decode", "seq_q": 1, "head_dim": 16, "head_dim_v": 16, "dtype": torch.float32}
    return describe(**sizes, mask=mask)


@pytest.mark.parametrize(
    ("name", "problem", "form"),
    [
        ("flash", PROBLEM, "flash(q, k, v, causal=True)"),
        ("flash", replace(PROBLEM, mask=()), "flash(q, k, v)"),
        ("flash", replace(PROBLEM, scale=0.5), "flash(q, k, v, softmax_scale=0.5, causal=True)"),
        ("torch_like", PROBLEM, "torch_like(q, k, v, enable_gqa=True, attn_mask=bool)"),
        ("cached", decode(), "cached(q, k, v, cache_seqlens=int32)"),
    ],
)
def test_a_kernel_is_called_as_its_parameters_say(path: str, name: str, problem: Problem, form: str) -> None:
    provider = by_name(f"{path}:{name}")
    assert provider.refuses(problem) == ""
    assert sorted(provider.form(problem)) == sorted(form), provider.form(problem)
    inputs = random_inputs(problem, torch.Generator().manual_seed(0))
    bound = provider.bind(problem, inputs)
    assert check(problem, *inputs, bound.out(bound.run())).passed


def test_a_kernel_gets_the_layout_it_likes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Foreign(f"{path}:flash")
    seen: list[torch.Tensor] = []
    original = provider.kernel.function
    object.__setattr__(
        provider.kernel, "function", lambda q, k, v, **o: seen.extend((q, k, v)) or original(q, k, v, **o)
    )
    provider.bind(PROBLEM, random_inputs(PROBLEM, torch.Generator().manual_seed(0))).run()
    assert [tuple(x.shape) for x in seen] == [(2, 24, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16)]
    assert all(x.is_contiguous() for x in seen)


def test_what_a_kernel_cannot_do_is_a_reason(path: str) -> None:
    assert "window" in by_name(f"{path}:flash").refuses(replace(PROBLEM, mask=describe_mask(Window(3, 0))))
    assert "form dense" in by_name(f"{path}:cached").refuses(PROBLEM)
    assert "float32" in by_name(f"{path}:declared_fp16").refuses(PROBLEM)
    with pytest.raises(ValueError, match="has no 'missing'"):
        by_name(f"{path}:missing")


def describe_mask(mask: Any) -> Any:
    return describe(**SIZES, head_dim=16, head_dim_v=16, dtype=torch.float32, mask=mask).mask


def test_what_is_no_tensor_is_refused(path: str) -> None:
    bound = by_name(f"{path}:lazily").bind(PROBLEM, random_inputs(PROBLEM, torch.Generator().manual_seed(0)))
    with pytest.raises(NotVerifiedError, match="must return a tensor"):
        bound.out(bound.run())


def test_a_convention_can_be_named_and_goes_with_a_pickle(path: str) -> None:
    with pytest.raises(ValueError, match="fit no convention"):
        Foreign(f"{path}:plain")
    named = pickle.loads(pickle.dumps(Foreign(f"{path}:plain", "flash")))
    assert named.kernel.convention.name == "flash"
    assert named.refuses(replace(PROBLEM, mask=())) == ""


@pytest.fixture
def a_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verify --quick, in this process."""
    monkeypatch.setattr(foreign, "verify", partial(verify, cases=("hand",)))
    monkeypatch.setattr(foreign, "prepare", partial(prepare, isolated=False))


@pytest.mark.usefixtures("a_few_cases")
def test_a_kernel_is_verified_before_it_is_timed(path: str) -> None:
    assert verify_first(Foreign(f"{path}:flash"), "cpu") == ""
    complaint = verify_first(Foreign(f"{path}:scaleless"), "cpu")
    assert "verify --quick: hand" in complaint and "not benchmarked" in complaint and " more: " in complaint


def test_a_kernel_that_runs_elsewhere_is_verified_there(path: str) -> None:
    for name, passes in (("flash", True), ("scaleless", False)):
        provider = Foreign(f"{path}:{name}")
        subject = Guarded(foreign._There(provider.kernel, "cpu"))
        probe(subject)
        assert (foreign._complaint(provider, verify(subjects=(subject,), cases=("hand",), quick=True)) == "") == passes


@pytest.mark.usefixtures("a_few_cases")
def test_bench_times_it_beside_the_others_and_prints_its_form(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_LARGEST_FLUSH_BYTES", 1 << 20)
    tiny = ("--seq", "24", "--heads", "2", "--runs", "5", "--budget", "0", "--threads", "1", "--causal")

    def run(*arguments: str) -> Any:
        command = ["bench", *arguments, *tiny, "--providers", "sdpa"]
        return CliRunner().invoke(main, command, env={"COLUMNS": "300"})

    result = run(f"{path}:flash")
    assert result.exit_code == 0, result.output
    assert f"{path}:flash: flash(q, k, v, causal=True)" in result.stdout
    wrong = run(f"{path}:scaleless", f"{path}:raises", "--no-verify")
    assert wrong.exit_code == 1
    assert "not benchmarked" in wrong.stdout and "raised RuntimeError: no such tile" in wrong.stdout
    gated = run(f"{path}:scaleless")
    assert gated.exit_code == 1 and "verify --quick" in gated.stdout and "torch SDPA" in gated.stdout
