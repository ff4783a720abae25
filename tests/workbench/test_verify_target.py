"""attnworks verify TARGET: a kernel of anybody's, what was inferred of it, and tables that 80 columns hold."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch.nn.functional import scaled_dot_product_attention

import kernel_helpers as kernels
from attnworks.workbench.cli import main

FILE = kernels.__file__
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["verify", *arguments])


def test_a_kernel_that_refuses_everything_has_not_passed(tmp_path: Path) -> None:
    kernel = tmp_path / "refuses.py"
    kernel.write_text("def attention(query, key, value, is_causal=False):\n    raise NotImplementedError('no')\n")
    target = (f"{kernel}:attention", "--in-process", "--case", "size: 97")
    page = tmp_path / "page.html"
    result = run(*target, "--report", str(page))
    assert result.exit_code == 1
    assert "nothing was checked" in result.output and "all passed" not in result.output
    assert "<title>Nothing checked" in page.read_text()
    as_json = run(*target, "--json")
    assert as_json.exit_code == 1 and json.loads(as_json.stdout)["passed"] is False


def test_a_right_kernel_passes_and_tells_what_was_inferred() -> None:
    result = run(f"{FILE}:flash_attn_func", "--in-process", "--case", "size: 97", "--case", "bias 1", "--case", "hand")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "A crash of the kernel will end this run" in result.stderr and "Without --in-process" in result.stderr
    assert "kernel flash_attn_func runs in this process" in words
    assert "convention flash: q, k, v (batch, rows, heads, dim), causal bottom-right" in words
    assert "can do grouped heads, head_dim_v of its own, LSE, gradients" in words
    assert "checks: the convention has no bias" in words and "all passed" in words


def test_a_wrong_kernel_fails_isolated_and_in_json() -> None:
    result = run(f"{FILE}:half_the_scale", "--case", "size: 97", "--case", "hand: full", "--timeout", "100", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["kernel"]["isolated"] and found["kernel"]["timeout"] == 100
    assert found["kernel"]["convention"] == "sdpa" and found["kernel"]["refused"] == {"LSE": "it returns none"}
    assert {r["case"] for r in found["results"] if r["status"] == "failed"} == {"size: 97", "size: 97, causal, bf16"}


@pytest.mark.parametrize("target", [(f"{FILE}:flash_attn_func", "--in-process"), ("--backend", "reference")])
@pytest.mark.parametrize("wide", [False, True])
def test_tables_fit_80_columns(target: tuple[str, ...], wide: bool) -> None:
    cases = ("stress: outlier channels, fp32", "heads: 8/2", "varlen with empty, causal, bf16", "softcap 20*")
    arguments = [*target, *(part for case in cases for part in ("--case", case)), *(["--wide"] if wide else [])]
    result = run(*arguments)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and max(map(len, lines)) <= 80
    if wide:
        assert "yardstick" in CliRunner(env={"COLUMNS": "160"}).invoke(main, ["verify", *arguments]).output
        return
    header = next(line for line in lines if line.startswith("dtype "))
    assert header.split() == ["dtype", "tensor", "error", "budget", "share", "relative", "yardstick", "eager"]
    assert any(line.startswith("tightest: ") for line in lines)
    assert next(line for line in lines if line.startswith("kernel  ") and "passed" in line).split()[-1] == "property"
    assert not any(0 < len(line.strip()) <= 4 for line in lines)  # no column is a word letter by letter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--in-process",), "TARGET, which is missing"),
        (("x:y", "--backend", "cpu"), "cannot be given beside a TARGET"),
        (("no_such_module_anywhere:f", "--in-process"), "no module 'no_such_module_anywhere'"),
        (("builtins:print", "--in-process"), "fit no convention"),
        (("x:y", "--convention", "nonsense"), "'nonsense' is not one of 'sdpa'"),
    ],
)
def test_errors_are_one_readable_message(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0 and "Traceback" not in result.output
    assert message in " ".join(result.output.split())


def test_the_framework_out_of_the_box() -> None:
    cases = ("size: 97", "heads: 8/2", "boolean mask bhqk", "nan query, fp32")
    arguments = [part for case in cases for part in ("--case", case)]
    result = run("torch.nn.functional:scaled_dot_product_attention", "--in-process", *arguments)
    assert result.exit_code == 0, result.output
    assert scaled_dot_product_attention.__name__ in result.output


def test_the_example() -> None:
    result = run(f"{EXAMPLES / 'own_kernel.py'}:my_attention", "--in-process", "--quick", "--case", "size: *")
    assert result.exit_code == 0, result.output
    assert "grouped heads: raised RuntimeError" in " ".join(result.output.split())
