"""attnworks.testing: passes what is right, fails what is wrong and says how, as an assertion and as a pytest plugin."""

import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn.functional import scaled_dot_product_attention

import kernel_helpers as kernels
from attnworks.testing import assert_attention_matches
from attnworks.workbench import catalogue
from attnworks.workbench.mutants import Mutant

pytest_plugins = ["pytester"]

FEW = ("hand: full", "size: 97", "heads: 8/2")


def test_a_right_kernel_passes() -> None:
    assert_attention_matches(scaled_dot_product_attention, FEW)
    assert_attention_matches(kernels.flash_attn_func, "causal bottom-right: 40 on 100")


def test_a_wrong_kernel_fails_like_a_colleague_would_say_it() -> None:
    with pytest.raises(AssertionError) as error:
        assert_attention_matches(kernels.half_the_scale, FEW)
    text = str(error.value)
    assert text.startswith("half_the_scale is wrong on 3 of the 4 cases it was given, called by the convention sdpa.")
    assert "Case 'size: 97' (tile edges): dense, float32, 2 heads, batch 1, 97 queries on 97 keys, head dim 64" in text
    assert "  out: elementwise error 0." in text and "at sequence 0, head " in text and " is allowed" in text
    assert "where a kernel of this precision has" in text and "  dq: " in text
    assert "Right: hand: full" in text  # which is given its scale


@pytest.mark.parametrize(
    "fault", ["accumulator not rescaled", "causal shows the next", "NaN swallowed", "delta missing"]
)
def test_mutants_fail(fault: str) -> None:
    mutant = Mutant(fault)
    cases = ("hand: *", "stress: rising maximum, fp32", "stress: nan query, fp32")
    with pytest.raises(AssertionError, match=f"mutant: {fault} is wrong on"):
        assert_attention_matches(mutant, cases)
    if fault == "delta missing":
        assert_attention_matches(mutant, cases, gradients=False)


def test_a_single_case_that_it_does_not_do_is_skipped() -> None:
    with pytest.raises(unittest.SkipTest, match="no form decode"):
        assert_attention_matches(scaled_dot_product_attention, catalogue.BY_NAME["decode, fp32"])
    with pytest.raises(AssertionError, match=r"nothing was checked: .*no form decode"):
        assert_attention_matches(scaled_dot_product_attention, ["decode, grouped, fp32"])


def test_a_target_runs_isolated() -> None:
    case = replace(catalogue.BY_NAME["size: 97"], scale=kernels.scale_of("segfault"))
    with pytest.raises(AssertionError, match="crashed with SIGSEGV"):
        assert_attention_matches(f"{kernels.__file__}:faulty", case)


def test_the_plugin_makes_a_test_of_every_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys
        sys.path.insert(0, {str(Path(kernels.__file__).parent)!r})
        import pytest
        from kernel_helpers import half_the_scale
        from torch.nn.functional import scaled_dot_product_attention
        from attnworks.testing import assert_attention_matches

        @pytest.mark.attention_cases("size: 97*", "decode, int8*", seed=3)
        def test_right(attention_case):
            assert attention_case.seed == 3
            assert_attention_matches(scaled_dot_product_attention, attention_case)

        @pytest.mark.attention_cases("size: 97", "hand: full")
        def test_wrong(attention_case):
            assert_attention_matches(half_the_scale, attention_case)
        """
    )
    result = pytester.runpytest_inprocess("-p", "attnworks_pytest", "-p", "no:cacheprovider", "-v")
    result.assert_outcomes(passed=3, failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*test_right?size: 97? PASSED*",
            "*test_wrong?size: 97? FAILED*",
            "E*half_the_scale is wrong on 1 of the 1 cases*",
            "E*out: elementwise error*where*is allowed*",
        ]
    )


def test_the_plugin_alone_loads_no_torch() -> None:
    code = "import sys, attnworks_pytest; print('torch' in sys.modules, 'attnworks' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_the_example() -> None:
    import own_kernel  # type: ignore[import-not-found]  # as examples/test_own_kernel.py does: pytest's pythonpath has it

    assert_attention_matches(own_kernel.my_attention, ("hand: *", "stress: rising*, fp32", "size: 513*"))
