"""Sites that gossip, a control of the outer loop: neighbours of a ring approach each other.

After each step a site and each of its two neighbours move towards each other, by the part of their
difference of rank 1 that one step of a power iteration finds in each matrix: of a difference M both
send their share of p = M q, then of s = M^T p / |p|, and M is taken for p s^T / |p|. The next step
begins at q = s / |s|. What is no matrix is sent whole. (Vogels, Karimireddy, Jaggi: PowerGossip,
2020.)

Letters: R sites, B matrices of a parameter, m rows, n columns.
"""

import dataclasses
import math
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.comm.weights.path import compressible
from moejax.config.schema import Config, MeshConfig, OuterConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, build_step
from moejax.train.evaluation import score
from moejax.train.inputs import open_inputs

WEIGHT = 1 / 3  # of each of two neighbours, beside the site's own
NEVER = 2**20  # steps of a period: no part of an outer loop is used


def matrices(x: jax.Array, dims: str) -> tuple[int, int, int]:
    """Returns B, m and n of a parameter [..., *dims]; experts and layers are matrices of their own.

    Of one whose dims are "EDF" each expert has a matrix [D, F], of "DHC" there is one [D, H C].
    """
    core = len(dims.removeprefix("E"))
    *apart, m = x.shape[: x.ndim - core + 1]
    return math.prod(apart), m, math.prod(x.shape[x.ndim - core + 1 :])


def approach(
    x: jax.Array, q: jax.Array | None, shape: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a parameter after all sites of the ring gossiped once, each edge at the same time.

    Args:
      x: of all sites, [R, ...].
      q: where the power iteration of each edge begins, [R, B, n]; None: x is sent whole.
      shape: B, m, n.
    Returns:
      x, and where the next iteration begins.
    """
    own = x if q is None else x.reshape(x.shape[0], *shape)
    apart = own - jnp.roll(own, -1, axis=0)  # of the edge from each site to the next one
    if q is not None:
        p = _unit(jnp.einsum("rbmn,rbn->rbm", apart, q))
        s = jnp.einsum("rbmn,rbm->rbn", apart, p)
        apart, q = p[..., :, None] * s[..., None, :], _unit(s)
    moved = own - WEIGHT * apart + WEIGHT * jnp.roll(apart, 1, axis=0)
    return moved.reshape(x.shape), q


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


class Ring:
    """The weights of all sites, mixed after each step."""

    def __init__(self, step: TrainStep, state: TrainState, sites: int):
        """Begins every edge's power iteration at random vectors."""
        rng = np.random.default_rng(0)
        leaves, self.tree = jax.tree.flatten((state.params, state.router_bias))
        dims = jax.tree.leaves(step.dims)
        dims += [""] * (len(leaves) - len(dims))
        self.shapes = [
            matrices(x, d) if d and compressible(d) else (0, 0, 0)
            for x, d in zip(leaves, dims, strict=True)
        ]
        self.starts = [
            _unit(jnp.asarray(rng.standard_normal((sites, B, n)), jnp.float32)) if B else None
            for B, _, n in self.shapes
        ]
        self._mix = jax.jit(self._all)

    def _all(self, xs: list[jax.Array], qs: list[Any]) -> tuple[list[jax.Array], list[Any]]:
        found = list(map(approach, xs, qs, self.shapes))
        return [x for x, _ in found], [q for _, q in found]

    def mix(self, weights: list[Any]) -> list[Any]:
        """Returns the weights of each site after a step's gossip."""
        xs = [jnp.stack(x) for x in zip(*map(jax.tree.leaves, weights), strict=True)]
        xs, self.starts = self._mix(xs, self.starts)
        return [jax.tree.unflatten(self.tree, [x[at] for x in xs]) for at in range(len(weights))]

    def sent(self, weights: Any) -> int:
        """Returns the bytes that a site sends in each step, to both neighbours."""
        sizes = zip(jax.tree.leaves(weights), self.shapes, strict=True)
        return 2 * 4 * sum(B * (m + n) if B else x.size for x, (B, m, n) in sizes)


def trained(cfg: Config, seed: int) -> dict[str, Any]:
    """Trains a ring of sites, on one device by turns.

    Args:
      cfg: as of data parallel training; `mesh.replica` sites share its batch.
    Returns:
      as `benchmarks.learning.sites.trained`, and bytes sent by a site in a step.
    """
    sites, steps, began = cfg.mesh.replica, cfg.train.num_steps, time.perf_counter()
    jax.config.update("jax_platforms", "cpu")
    own = dataclasses.replace(
        cfg,
        run_dir=tempfile.gettempdir(),
        mesh=MeshConfig(simulated_devices=1),
        train=dataclasses.replace(
            cfg.train, seed=seed, batch_sequences=cfg.train.batch_sequences // sites
        ),
    )
    places = [
        dataclasses.replace(own, outer=OuterConfig(NEVER, hub="none:1", site=s, sites=sites))
        for s in range(sites)
    ]
    step = build_step(own, build_mesh(build_layout(own.mesh), jax.devices()[:1]), "cpu")
    inputs = [open_inputs(place) for place in places]
    states = [step.init() for _ in places]
    ring, curve = Ring(step, states[0], sites), {}
    held_out = inputs[0].held_out
    assert held_out is not None, "the source holds text out"

    def loss(limit: int | None) -> float:
        weights = [(state.params, state.router_bias) for state in states]
        params, bias = jax.tree.map(lambda *x: sum(x) / sites, *weights)
        mean = states[0]._replace(params=params, router_bias=bias)
        bits = score(step, mean, held_out, limit=limit).bits_per_byte(held_out)
        assert bits is not None, "the size of the text is known"
        return bits * math.log(2)

    with ExitStack() as stack:
        texts = [stack.enter_context(one.batches(step, 0, steps)) for one in inputs]
        for done, batches in enumerate(zip(*texts, strict=True), 1):
            states = [
                step.step(state, batch)[0] for state, batch in zip(states, batches, strict=True)
            ]
            mixed = ring.mix([(state.params, state.router_bias) for state in states])
            states = [
                state._replace(params=params, router_bias=bias)
                for state, (params, bias) in zip(states, mixed, strict=True)
            ]
            if done % cfg.train.eval_every == 0 and done < steps:
                curve[done] = loss(cfg.train.eval_batches)
    weights = (states[0].params, states[0].router_bias)
    return {
        "final": loss(None),
        "curve": curve,
        "experts": {},
        "sent": ring.sent(weights),
        "seconds": time.perf_counter() - began,
    }
