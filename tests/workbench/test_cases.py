"""Cases are deterministic, say what they mean, and the oracle agrees with what was worked out elsewhere."""

import math
from fractions import Fraction

import pytest
import torch

import attnworks
from attnworks.masks import Causal, Window
from attnworks.workbench import catalogue, generators
from attnworks.workbench.cases import Case
from attnworks.workbench.hand import HAND, LN2
from attnworks.workbench.oracle import expect, visible
from attnworks.workbench.shapes import SHAPES

SMALL = [case for case in catalogue.select(quick=True) if case.batch * case.heads_q < 1000 and case.seq_kv < 1000]


def test_names_are_unique() -> None:
    assert len(catalogue.BY_NAME) == len(catalogue.CASES)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_building_is_deterministic(case: Case) -> None:
    generators_before = torch.random.get_rng_state()
    first, again = case.build(), case.build()
    for name in ("q", "k", "v", "kv_lens", "page_table", "cu_seqlens_q", "cu_seqlens_kv"):
        a, b = getattr(first, name), getattr(again, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name
    assert torch.equal(generators_before, torch.random.get_rng_state())


def test_the_seed_changes_the_inputs() -> None:
    case = catalogue.BY_NAME["size: 17"]
    assert not torch.equal(case.build().q, case.with_seed(1).build().q)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_stored_tensors_hold_the_values(case: Case) -> None:
    inputs = case.build()
    for n, part in enumerate(inputs.values):
        assert torch.equal(inputs.gather(inputs.q)[n].double().nan_to_num(7), part.q.double().nan_to_num(7))
        if case.cache_dtype is None and not case.new_keys:
            assert torch.equal(
                inputs.gather(inputs.k, keys=True)[n].double().nan_to_num(7), part.k.double().nan_to_num(7)
            )
            assert torch.equal(
                inputs.gather(inputs.v, keys=True)[n].double().nan_to_num(7), part.v.double().nan_to_num(7)
            )


@pytest.mark.parametrize("case", [case for case in SMALL if case.form == "dense"], ids=lambda case: case.name)
def test_the_problem_is_the_one_that_the_call_becomes(case: Case) -> None:
    inputs = case.build()
    kwargs = inputs.kwargs()
    explained = attnworks.explain(**kwargs, return_lse=True).problem
    mine = inputs.problem()
    # A predicate is compared by identity, a boolean mask by its operand's shape and strides: both are the same object
    # here.
    assert mine == explained


def test_memory_forms_are_what_they_say() -> None:
    gapped = catalogue.BY_NAME["strides: gapped, bhsd"].build()
    assert gapped.q.stride(-1) == 1 and not gapped.q.is_contiguous()
    assert bool(gapped.q.as_strided((gapped.q.untyped_storage().nbytes() // 4,), (1,), 0).isnan().any())
    assert catalogue.BY_NAME["strides: strided channels, bhsd"].build().q.stride(-1) != 1
    assert catalogue.BY_NAME["strides: shared heads, bshd"].build().k.stride(2) == 0
    halves = catalogue.BY_NAME["decode, strided, pages of 16, fp32"].build()
    assert halves.k.stride(0) == 2 * halves.k[0].numel()
    assert halves.k.untyped_storage().data_ptr() == halves.v.untyped_storage().data_ptr()
    latent = catalogue.BY_NAME["decode, MLA 576/512, fp32"].build()
    assert latent.v.data_ptr() == latent.k.data_ptr()


@pytest.mark.parametrize(
    ("mask", "seq_q", "seq_kv", "rows"),
    [
        (Causal(), 2, 4, ["1110", "1111"]),
        (Causal("top-left"), 2, 4, ["1000", "1100"]),
        (Causal(), 4, 2, ["00", "00", "10", "11"]),
        (Causal("top-left"), 4, 2, ["10", "11", "11", "11"]),
        (Window(1, 0), 4, 4, ["1000", "1100", "0110", "0011"]),
        (Window(0, 1), 3, 5, ["00110", "00011", "00001"]),
        (Window(None, 1), 3, 3, ["110", "111", "111"]),
        (Window(1, None), 3, 3, ["111", "111", "011"]),
        (Window(0, 0, "top-left"), 2, 3, ["100", "010"]),
    ],
)  # fmt: skip
def test_visibility_by_hand(mask: Causal | Window, seq_q: int, seq_kv: int, rows: list[str]) -> None:
    case = Case("visible", "", heads_q=1, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, mask=(mask,))
    shown = visible(case.build(), 0)[0].int().tolist()
    assert ["".join(map(str, row)) for row in shown] == rows


@pytest.mark.parametrize("hand", HAND, ids=lambda hand: hand.case.name)
def test_the_oracle_agrees_with_the_hand(hand: object) -> None:
    inputs = hand.case.build()  # type: ignore[attr-defined]
    found, written = expect(inputs, gradients=True), hand.values()  # type: ignore[attr-defined]
    assert set(found.values) == set(written)
    for name, (value,) in written.items():
        torch.testing.assert_close(found.values[name][0], value, rtol=1e-13, atol=1e-13)


def test_hand_numbers_in_exact_fractions() -> None:
    """The written forward of "full" and "causal", once more with fractions and nothing else."""
    for hand, sees in ((HAND[0], lambda i, j: True), (HAND[1], lambda i, j: j <= i)):
        outs, totals = [], []
        for i, q in enumerate(generators.HAND_Q[0]):
            weights = [
                Fraction(2) ** (q[0] * k[0] + q[1] * k[1]) if sees(i, j) else Fraction(0)
                for j, k in enumerate(generators.HAND_K)
            ]
            total = sum(weights)
            outs.append(
                [sum(w * v[c] for w, v in zip(weights, generators.HAND_V, strict=True)) / total for c in (0, 1)]
            )
            totals.append(total)
        assert hand.out == "; ".join(f"{a}, {b}" for a, b in outs)
        assert hand.total == "; ".join(map(str, totals))
        assert hand.case.scale == LN2


def test_gradients_of_the_oracle_against_finite_differences() -> None:
    """Independent of autograd and of every formula: (f(x + h) - f(x - h)) / 2h in fp64."""
    case = Case("differences", "", heads_q=2, heads_kv=1, seq_q=3, seq_kv=5, head_dim=4, head_dim_v=3,
                dtype=torch.float64, mask=(Causal(),), lse_cotangent=True)  # fmt: skip
    inputs = case.build()
    found = expect(inputs, gradients=True).values
    part = inputs.values[0]
    assert part.d_lse is not None

    def loss() -> float:
        values = expect(inputs).values
        return float((values["out"][0] * part.d_out).sum() + (values["lse"][0] * part.d_lse).sum())

    for name in "qkv":
        tensor = getattr(part, name).clone()
        setattr(part, name, tensor)
        for index in ((0, 0, 0), (0, 2, 1), (tensor.shape[0] - 1, 1, 2)):
            kept, h = float(tensor[index]), 1e-6
            tensor[index] = kept + h
            up = loss()
            tensor[index] = kept - h
            down = loss()
            tensor[index] = kept
            assert float(found[f"d{name}"][0][index]) == pytest.approx((up - down) / (2 * h), abs=1e-8)


def test_patterns_select() -> None:
    assert all(case.form == "varlen" for case in catalogue.select(["varlen"]))
    assert [case.name for case in catalogue.select(["size: 1?"])] == ["size: 15", "size: 16", "size: 17"]
    assert all(case.seed == 3 for case in catalogue.select(quick=True, seed=3))
    with pytest.raises(ValueError, match="'nonsense' matched none"):
        catalogue.select(["nonsense"])


def test_quick_cases_hold_what_they_must() -> None:
    quick = catalogue.select(quick=True)
    assert any(case.seq_kv > 16_000 and case.seq_q <= 4 for case in quick)
    assert any(case.mask == (Causal(),) and case.seq_q > case.seq_kv for case in quick)
    assert any(case.heads_q > case.heads_kv for case in quick)
    assert {case.form for case in quick} == {"dense", "varlen", "decode"}
    assert {case.generator for case in quick} >= set(generators.GENERATORS) - {"tiny"}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_consistent(shape: object) -> None:
    problem = shape.problem(torch.bfloat16)  # type: ignore[attr-defined]
    assert problem.heads_q % problem.heads_kv == 0 and shape.source  # type: ignore[attr-defined]
    assert problem.flops() > 0
    scaled = shape.case(torch.float32, longest=100, most_heads=8)  # type: ignore[attr-defined]
    assert max(scaled.seq_q, scaled.seq_kv) <= 100
    assert scaled.heads_q // scaled.heads_kv == problem.group
    assert scaled.softmax_scale == pytest.approx(problem.scale)
    assert math.isfinite(scaled.softmax_scale)
