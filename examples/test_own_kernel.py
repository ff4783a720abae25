"""The one test that a kernel's own repository needs, and the same as a test for each case."""

import pytest
from own_kernel import my_attention

from attnworks.testing import assert_attention_matches


def test_my_attention():
    assert_attention_matches(my_attention)


@pytest.mark.attention_cases("stress: *", "size: *")
def test_my_attention_by_case(attention_case):
    assert_attention_matches(my_attention, attention_case)
