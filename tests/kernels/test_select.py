"""Which implementation each platform gets, and that a reason comes with it."""

import pytest

from moejax.kernels.select import select_attention, select_experts


@pytest.mark.parametrize(
    ("platform", "wanted"), [("cpu", "blocked"), ("gpu", "blocked"), ("tpu", "ragged_dot")]
)
def test_experts_by_platform(platform, wanted):
    choice = select_experts(platform, "auto")
    assert choice.implementation == wanted
    assert choice.reason


def test_a_named_implementation_is_taken():
    assert select_experts("cpu", "ragged_dot").implementation == "ragged_dot"


@pytest.mark.parametrize(
    ("platform", "dtype", "wanted"),
    [("gpu", "bfloat16", "cudnn"), ("gpu", "float32", "blocked"), ("cpu", "bfloat16", "blocked")],
)
def test_attention_by_platform_and_dtype(platform, dtype, wanted):
    assert select_attention(platform, dtype).implementation == wanted
