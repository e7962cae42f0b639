"""Gradients do not depend on the values kept for backward, nor on the order of reductions."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.step import train_step
from tests.cases import place, random_batch, small_config, step_for

MODEL = {"num_layers": 3, "first_dense_layers": 1, "qk_norm": "full"}


def gradients(remat, *, scan_layers=True):
    cfg = small_config(
        (1, 1, 2, 1), model=MODEL | {"remat": remat, "scan_layers": scan_layers}, train={"seed": 3}
    )
    step = step_for(cfg)
    found, _ = step.gradients(step.init(), place(step, random_batch(cfg)))
    return jax.tree.map(np.asarray, found)


def assert_near(found, wanted):
    def check(have, want):
        # A sum in another order, over at most 128 tokens.
        bound = 128 * np.finfo(np.float32).eps * np.abs(want).max()
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)

    jax.tree.map(check, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat",
    ["full"]
    + [
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("token_collectives", "attention", "experts")
    ],
)
def test_what_is_kept_changes_no_gradient(remat):
    assert_near(gradients(remat), gradients("none"))


@pytest.mark.slow
def test_unrolled_layers_behind_barriers_have_the_same_gradients(monkeypatch):
    """On CPU there are no barriers; the order that they ask for is computed all the same."""
    wanted = gradients("none")
    plain = train_step.build_spec

    def with_barriers(*args, **options):
        return dataclasses.replace(plain(*args, **options), barriers=True)

    monkeypatch.setattr(train_step, "build_spec", with_barriers)
    assert_near(gradients("experts", scan_layers=False), wanted)
