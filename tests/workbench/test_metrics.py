"""Each metric bites, and none cries wolf."""

import math

import pytest
import torch

from attnworks.workbench.cases import Case
from attnworks.workbench.catalogue import BY_NAME
from attnworks.workbench.hand import answer
from attnworks.workbench.metrics import Measure, Standard, measure, standards
from attnworks.workbench.yardstick import flash_model

NAMES = ("out", "lse", "dq", "dk", "dv")


def standards_of(case: Case) -> tuple[dict[str, Standard], dict[str, list[torch.Tensor]]]:
    inputs = case.build()
    model = flash_model(inputs, case.gradients)
    return standards(case, answer(inputs, case.gradients), model), model


def failed(result: Measure) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_zeros_constants_and_shuffled_rows_are_rejected(name: str, dtype: str) -> None:
    found, model = standards_of(BY_NAME[f"stress: normal, {dtype}"])
    (right,) = model[name]
    order = torch.arange(right.shape[1]).roll(1)
    wrong = {
        "zeros": torch.zeros_like(right),
        "constant": torch.full_like(right, float(right.double().mean())),
        "shuffled rows": right[:, order],
        "shuffled heads": right.flip(0),
        "negated": -right,
        "scaled": right * 1.05,
    }
    assert failed(measure(found[name], [right])) == set()
    for kind, tensor in wrong.items():
        assert {"elementwise", "aggregate"} & failed(measure(found[name], [tensor])), kind


def test_one_wrong_element_is_found_and_named() -> None:
    found, model = standards_of(BY_NAME["stress: normal, fp32"])
    wrong = model["out"][0].clone()
    wrong[1, 37, 5] += 1e-3
    result = measure(found["out"], [wrong])
    assert {"elementwise", "plain: max abs 1e-5"} <= failed(result)
    assert result.worst == "sequence 0, head 1, row 37, channel 5"
    assert result.max_abs == pytest.approx(1e-3, rel=0.01)


def test_a_small_bias_over_one_tile_is_found_by_the_aggregate_test() -> None:
    """4 u on every element of a tile of rows is far inside the elementwise bound of 8 · u · P|V|, and still wrong."""
    found, model = standards_of(BY_NAME["stress: few queries on 16k keys, bf16"])
    u = torch.finfo(torch.bfloat16).eps / 2
    wrong = (model["out"][0].float() * (1 + 8 * u)).bfloat16()
    assert failed(measure(found["out"], [wrong])) == {"aggregate"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted(value: float) -> None:
    found, model = standards_of(BY_NAME["stress: normal, fp32"])
    wrong = model["out"][0].clone()
    wrong[0, 3, 2] = value
    result = measure(found["out"], [wrong])
    assert failed(result) == {"non-finite"}
    assert (result.nan, result.inf) == ((1, 0) if math.isnan(value) else (0, 1))
    assert (result.nan_expected, result.inf_expected) == (0, 0)


def test_a_swallowed_nan_is_found() -> None:
    found, model = standards_of(BY_NAME["stress: nan query, fp32"])
    result = measure(found["out"], [model["out"][0].nan_to_num(0)])
    assert "non-finite" in failed(result)
    assert result.nan == 0 and result.nan_expected == 2 * 64


def test_a_row_without_keys_needs_minus_infinity() -> None:
    found, model = standards_of(BY_NAME["rows without keys, fp32"])
    assert failed(measure(found["lse"], model["lse"])) == set()
    assert "non-finite" in failed(measure(found["lse"], [model["lse"][0].clamp_min(-1e4)]))


def test_overflow_of_the_dtype_is_not_an_error() -> None:
    found, model = standards_of(BY_NAME["stress: normal, fp16"])
    standard = found["out"]
    standard.want[0][0, 0, 0] = 7e4
    right = model["out"][0].clone()
    right[0, 0, 0] = math.inf
    assert "non-finite" not in failed(measure(standard, [right]))
    right[0, 0, 0] = -math.inf
    assert "non-finite" in failed(measure(standard, [right]))


def test_wrong_shape_and_dtype_are_findings() -> None:
    found, model = standards_of(BY_NAME["stress: normal, bf16"])
    assert failed(measure(found["out"], [model["out"][0][:, :-1]])) == {"shape and dtype"}
    assert failed(measure(found["out"], [model["out"][0].float()])) == {"shape and dtype"}


def test_numbers_of_a_measure() -> None:
    found, model = standards_of(BY_NAME["stress: normal, fp32"])
    result = measure(found["out"], [model["out"][0] * 1.5])
    assert result.frobenius == pytest.approx(0.5, rel=1e-5)
    assert result.cosine == pytest.approx(1.0, abs=1e-9)
    assert result.max_rel == pytest.approx(0.5, rel=0.02)
    assert result.yardstick < 1e-6
    assert measure(found["out"], [-model["out"][0]]).cosine == pytest.approx(-1.0, abs=1e-9)


def test_budgets_are_part_of_the_result() -> None:
    found, model = standards_of(BY_NAME["stress: normal, fp32"])
    data = measure(found["out"], model["out"]).to_json()
    assert [check["name"] for check in data["checks"]] == [
        "non-finite",
        "elementwise",
        "aggregate",
        "plain: max abs 1e-5",
    ]
    assert all({"error", "budget", "share", "where"} <= set(check) for check in data["checks"])
