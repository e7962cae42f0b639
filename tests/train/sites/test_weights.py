"""Means over sites that are programs of their own, worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.codecs.codec import pack
from moejax.step.outer import Counted, Part
from tests.step.test_outer import NO_ERROR, drawn, outer_loop


def received(loop, shared, inner, weights, moved=0.0, number=0):
    """What each site has after a round: (outer weights and momentum, its own weights)."""
    part = Part(loop.every, jnp.int32(number))
    own = [jax.tree.map(lambda x, site=site: x[site], inner) for site in range(len(weights))]
    sent = [loop.encode(shared, one, NO_ERROR, part) for one in own]
    arrived = jnp.stack([pack(one.own)[0] for one in sent])
    found = []
    for site, one in enumerate(own):
        now = jax.tree.map(lambda x: x + moved, one)
        counted = Counted(np.float32(weights), site)
        pending = sent[site]._replace(arrived=arrived)
        found.append(loop.receive(pending, shared, now, NO_ERROR, part, counted)[:2])
    return found


@pytest.mark.parametrize(("weights", "spoiled"), [((3, -1, 1), None), ((3, 2, 1), 1)])
def test_parts_are_weighted_and_a_site_that_does_not_count_takes_outer_weights(weights, spoiled):
    shared, inner = drawn(3)
    wanted = np.float64(inner[0]["matrix"])
    if spoiled is not None:
        inner[0]["norm"][spoiled, 0] = np.nan
    loop = outer_loop(rate=0.7, momentum=0.9)
    found = received(loop, shared, inner, weights, moved=0.125)
    x = np.float64(shared.params["matrix"])
    gradient = (3 * (x - wanted[0]) + (x - wanted[2])) / 4
    speed = 0.9 * shared.momentum["matrix"] + gradient
    new = x - 0.7 * (gradient + 0.9 * speed)
    for site, (outer, (own, _)) in enumerate(found):
        np.testing.assert_allclose(outer.params["matrix"], new, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(outer.momentum["matrix"], speed, rtol=2e-5, atol=1e-6)
        for one, other in zip(*map(jax.tree.leaves, (outer, found[0][0])), strict=True):
            np.testing.assert_array_equal(one, other)  # the copies, to the bit
        progress = 0 if site == 1 else 0.125
        np.testing.assert_allclose(own["matrix"], new + progress, rtol=2e-5, atol=1e-6)


def test_equal_weights_are_the_mean_without_weights():
    shared, inner = drawn(2, grid=2**10)
    for outer, _ in received(outer_loop(), shared, inner, (1, 1)):
        steps = inner[0]["matrix"] - shared.params["matrix"]
        np.testing.assert_array_equal(
            outer.params["matrix"], shared.params["matrix"] + steps.mean(0)
        )


def test_who_has_seen_no_tokens_changes_nothing_and_keeps_its_progress():
    shared, inner = drawn(2)
    for outer, (own, _) in received(outer_loop(), shared, inner, (0, 0), moved=0.5):
        np.testing.assert_array_equal(outer.params["matrix"], shared.params["matrix"])
        np.testing.assert_allclose(own["matrix"], shared.params["matrix"] + 0.5, rtol=1e-6)
