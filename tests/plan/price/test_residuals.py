"""KARMA's rule, by its numbers: what a byte saves, and what moving it costs."""

import pytest

from moejax.plan.price.host import crossover, saved_by_attention, saved_by_product


def test_keeping_pays_above_twice_the_flops_of_the_time_that_a_byte_takes():
    """450 TFLOP/s and 50 GB/s each way: 18,000 FLOPs a byte; 36,000 at 25 GB/s."""
    assert crossover(450e12, 50e9, 50e9) == pytest.approx(18_000)
    assert crossover(450e12, 25e9, 25e9) == pytest.approx(36_000)
    assert crossover(450e12, 50e9, 25e9) == pytest.approx(27_000)


def test_a_byte_saves_the_flops_of_its_value_over_its_width():
    """A [7, 32] x [32, 5] product: 2 x 7 x 32 x 5 FLOPs, 7 x 5 values of two bytes."""
    assert saved_by_product(32) == (2 * 7 * 32 * 5) / (2 * 7 * 5)
    # One head of 64 channels, 1000 positions that each see half of them on average: scores, and
    # sums of values.
    flops = 2 * (2 * 1000 * 64 * 500)
    assert saved_by_attention(1000) == flops / (2 * 1000 * 64)


def test_products_never_pay_and_long_attention_does():
    least = crossover(450e12, 50e9, 50e9)
    assert saved_by_product(7168) < least  # DeepSeek-V3
    assert saved_by_attention(16_384) < least < saved_by_attention(32_768)
