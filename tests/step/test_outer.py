"""The outer loop of step.outer, beside sites that run apart and an outer step in float64.

The oracle knows nothing of the outer loop's code: every site is a plain run on its own sequences,
and NumPy averages the sites' weights between steps.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config.schema import CompressionConfig, OuterConfig
from moejax.step.outer import Part
from tests.cases import CERTAIN, place, random_batch, small_config, spread, step_for

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

# With both betas 0 and an epsilon that no gradient changes, AdamW's step is the gradient over
# epsilon: SGD, whose rate is a power of two.
SGD = {
    "beta1": 0.0,
    "beta2": 0.0,
    "epsilon": 2.0**40,
    "learning_rate": 2.0**37,
    "weight_decay": 0.0,
    "clip_norm": None,
    "schedule": "constant",
}
BIAS = {"bias_update_rate": 0.01}


def outer_config(mesh=(2, 1, 1, 1), *, every=3, codec="none", order="layers", **settings):
    changes = {"optimizer": {"schedule": "constant"}, "router": BIAS, "moe": CERTAIN}
    names = ("rate", "momentum")
    outer = {name: settings.pop(name) for name in names if name in settings}
    cfg = small_config(mesh, **{**changes, **settings})
    return dataclasses.replace(
        cfg,
        outer=OuterConfig(every=every, codec=codec, order=order, **outer),
        compression=CompressionConfig(block=16),
    )


def batches(cfg, count):
    return [random_batch(cfg, seed) for seed in range(count)]


def host(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def run(cfg, steps, state=None, data=None):
    """Returns the state after some steps, and all losses."""
    train_step, losses = step_for(cfg), []
    state = train_step.init() if state is None else state
    for batch in data or batches(cfg, steps):
        state, metrics = train_step.step(state, place(train_step, batch))
        losses.append(float(metrics.loss))
    return state, losses


class Oracle:
    """Sites as plain runs of one device, averaged in float64."""

    def __init__(self, cfg):
        self.outer, self.sites = cfg.outer, cfg.mesh.replica
        train = dataclasses.replace(
            cfg.train, batch_sequences=cfg.train.batch_sequences // self.sites
        )
        mesh = dataclasses.replace(cfg.mesh, replica=1, fsdp=1, expert=1, tensor=1)
        self.plain = step_for(dataclasses.replace(cfg, mesh=mesh, train=train, outer=OuterConfig()))
        self.inner = [self.plain.init() for _ in range(self.sites)]
        self.weights = [host((s.params, s.router_bias)) for s in self.inner][0]
        self.momentum = jax.tree.map(np.zeros_like, self.weights)
        self.losses = []

    def step(self, batch, number):
        before = [host((s.params, s.router_bias)) for s in self.inner]
        rows, losses = len(batch.token_BT) // self.sites, []
        for site in range(self.sites):
            own = jax.tree.map(lambda x: x[site * rows : (site + 1) * rows], batch)  # noqa: B023
            self.inner[site], metrics = self.plain.step(self.inner[site], place(self.plain, own))
            losses.append(float(metrics.loss))
        self.losses.append(np.mean(losses))
        at_once = self.outer.order == "all"
        if at_once and (number + 1) % self.outer.every:
            return
        after = [host((s.params, s.router_bias)) for s in self.inner]
        self.average(after if at_once else before, after, number)

    def average(self, sent, after, number):
        leaves, tree = jax.tree.flatten(self.weights)
        speeds = jax.tree.leaves(self.momentum)
        is_bias = jax.tree.leaves(
            (jax.tree.map(lambda _: False, self.weights[0]), jax.tree.map(lambda _: True, self.weights[1]))
        )
        sent, after = [list(map(jax.tree.leaves, x)) for x in (sent, after)]
        for leaf, outer in enumerate(leaves):
            places = self.places(outer.size, number)
            mean = np.mean([x[leaf].reshape(-1)[places] for x in sent], 0)
            old = outer.reshape(-1)[places]
            rate, mu = (1, 0) if is_bias[leaf] else (self.outer.rate, self.outer.momentum)
            gradient = old - mean
            speed = mu * speeds[leaf].reshape(-1)[places] + gradient
            speeds[leaf].reshape(-1)[places] = speed
            new = old - rate * (gradient + mu * speed)
            outer.reshape(-1)[places] = new
            for site in range(self.sites):
                moved = after[site][leaf].reshape(-1)
                moved[places] = new + moved[places] - sent[site][leaf].reshape(-1)[places]
        for site, state in enumerate(self.inner):
            params, bias = jax.tree.map(
                lambda x, like: jax.device_put(x.astype(np.float32), like.sharding),
                jax.tree.unflatten(tree, after[site]),
                (state.params, state.router_bias),
            )
            self.inner[site] = state._replace(params=params, router_bias=bias)

    def places(self, size, number):
        """Positions of an array that a step averages: a run of equal length, the last shorter."""
        if self.outer.order == "all":
            return np.arange(size)
        length = -(-size // self.outer.every)
        first = number % self.outer.every * length
        return np.arange(min(first, size), min(first + length, size))


def assert_near(got, wanted, bound):
    for path, want in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        have = got
        for key in path:
            have = have[getattr(key, "key", getattr(key, "idx", None))]
        worst = np.max(np.abs(np.asarray(have, np.float64) - want), initial=0)
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: off by {worst:.2e}"


@pytest.mark.parametrize("order", ["layers", "all"])
@pytest.mark.parametrize("every", [1, 3])
def test_sites_are_plain_runs_averaged_by_nesterov(order, every):
    cfg = outer_config(every=every, order=order, model={"num_layers": 2}, optimizer=SGD)
    oracle, data = Oracle(cfg), batches(cfg, 7)
    for number, batch in enumerate(data):
        oracle.step(batch, number)
    state, losses = run(cfg, 7, data=data)
    np.testing.assert_allclose(losses, oracle.losses, rtol=1e-5)
    assert_near((state.params, state.router_bias), oracle.weights, 2e-5)
    for site in range(2):
        inner = jax.tree.map(lambda x: x[site], (state.sites.params, state.sites.router_bias))  # noqa: B023
        assert_near(inner, host((oracle.inner[site].params, oracle.inner[site].router_bias)), 2e-5)
