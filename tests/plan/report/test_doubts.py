"""Warnings about a prediction."""

from dataclasses import replace
from types import SimpleNamespace

from moejax.plan.price.cost import SimulatedStep, Totals
from moejax.plan.report.tables import small_products
from moejax.plan.trace.schedule import Op
from tests.plan.clusters import cluster


def step(*ops, inside=None):
    timeline = SimpleNamespace(seconds=1.0)
    return SimulatedStep(timeline, Totals(), ops, tuple(0.0 for _ in ops), inside or {})


def product(flops):
    return Op("product", "router", flops=flops, bytes=1, dtype="float32")


def plan_of(simulated):
    return SimpleNamespace(parts=((1.0, simulated),), seconds=1.0)


def test_a_table_of_one_large_product_is_doubted():
    """Someone gave one size of 1e12 FLOPs, and a router took 51 seconds."""
    device = replace(cluster().device, products={"float32": ((1e12, 15e12),)})
    loop = step(product(1e6), inside={0: (step(product(1e6)), 8)})
    text = small_products(plan_of(loop), device)
    assert text is not None
    assert "53% of the step" in text  # eight trips of 1e12 / 15e12 seconds
    assert "float32 begin at 1e+12 FLOPs" in text
    assert small_products(plan_of(step(product(1e6))), device) is None  # 7 % of the step
    assert small_products(plan_of(loop), cluster().device) is None
