import jax
import jax.numpy as jnp
import pytest

from moejax.comm.weights.adapters import Adapter
from moejax.comm.weights.shard import attach, detach, without

WEIGHTS = {"norm": jnp.ones(2), "w": jnp.ones((2, 3))}
OF_W = {
    "residuals": jnp.full(4, 2.0),
    "totals": (jnp.full(5, 3.0),),
    "gathered": jnp.full(6, 4.0),
    "adapters": Adapter(jnp.full((2, 1), 5.0), jnp.full((1, 3), 6.0)),
}
FIELDS = dict(zip(OF_W, ("residual", "total", "gathered", "adapter"), strict=True))


def beside(name):
    """A tree like the weights, whose second has something beside it."""
    return {name: {"norm": None, "w": OF_W[name]}}


def test_a_weight_with_nothing_beside_it_stays_an_array():
    attached = attach(WEIGHTS, **beside("adapters"))
    assert attached["norm"] is WEIGHTS["norm"]
    assert attached["w"].weight is WEIGHTS["w"]
    assert attached["w"].adapter is OF_W["adapters"]


@pytest.mark.parametrize("order", [list(OF_W), list(reversed(OF_W))])
def test_fields_attached_one_by_one_are_all_detached(order):
    """Whatever their order, in which leaves do not lie."""
    shards = WEIGHTS
    for name in order:
        shards = attach(shards, last=name != "totals", **beside(name))
    assert not shards["w"].last
    fields = detach(shards)
    assert fields.weight == WEIGHTS
    for name, field in FIELDS.items():
        assert getattr(fields, field) == beside(name)[name]
    sizes = [x.size for x in jax.tree.leaves(shards["w"])]
    assert sizes == [6, 4, 5, 6, 2, 3]


def test_a_field_that_is_dropped_leaves_the_others():
    shards = attach(WEIGHTS, **beside("residuals"), **beside("gathered"))
    left = without(shards, "residual")
    assert left["norm"] is WEIGHTS["norm"]
    assert left["w"].residual is None
    assert left["w"].gathered is OF_W["gathered"]
    assert shards["w"].residual is OF_W["residuals"]
