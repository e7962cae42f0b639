"""A trainer's loss and gradients beside the one-device oracle's, along a path that is asserted."""

import contextlib
import dataclasses
import functools
import zlib
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np

from moejax.comm.tokens import rounds
from tests.cases import (
    assert_close,
    one_device_state,
    place,
    random_batch,
    skew,
    small_config,
    spread,
    step_for,
)
from tests.oracle import oracle_loss

# Sums run over the tokens of the batch, the widest reduction of a gradient.
TERMS = 8 * 16

MESH_OF_ONE = small_config().mesh
NO_ROUTE = {"route": "split", "route_chunks": 1, "route_chunks_backward": None}


@contextlib.contextmanager
def only(path):
    """Inside, layers are traced so that their numbers are right along one path alone.

    Args:
      path: "certain": no program has rounds; "usual": it has, and none is run; "rounds": some are
        run in every layer; None: any.
    """

    def cond(overflows, add_rounds, usually, *operands):
        assert path != "certain", "this program may have rounds"
        if path == "usual":
            add_rounds = spoil(add_rounds)
        if path == "rounds":
            usually = spoil(usually)
        return jax.lax.cond(overflows, add_rounds, usually, *operands)

    patched = SimpleNamespace(cond=cond, fori_loop=jax.lax.fori_loop)
    with mock.patch.object(rounds, "lax", patched):
        yield


def spoil(function):
    return lambda *operands: jax.tree.map(lambda x: x * np.nan, function(*operands))


DRAWN = ("predict_ahead", "out_norm", "experts_norm", "_scale")  # parts of names of scales


def not_constant(path, x):
    """Draws a parameter that begins as zeros, as biases do, and scales with names of `DRAWN`.

    Else what it does in the forward pass, and which of two it is, would not be seen. Other scales
    stay at one: some cases need the routing that the first weights have.
    """
    name = jax.tree_util.keystr(path)
    if np.any(x) and not ("scale" in name and any(part in name for part in DRAWN)):
        return x
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return x + rng.normal(0, 0.3, x.shape).astype(x.dtype)


@functools.cache
def oracle_case(cfg, bias):
    """State, batch, and the oracle's loss in parts and gradients; computed once a config."""
    state = one_device_state(cfg)
    params = jax.tree_util.tree_map_with_path(not_constant, state.params)
    state = state._replace(params=params)
    state = state._replace(router_bias=skew(state.router_bias, dict(bias)))
    batch = random_batch(cfg)
    loss = functools.partial(oracle_loss, router_bias=state.router_bias, batch=batch, cfg=cfg)
    (_, parts), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state, batch, parts, jax.tree.map(np.asarray, gradients)


def check_against_oracle(cfg, bias=(), *, path, terms=TERMS):
    """Compares loss, loads and gradients; of `path` see `only`, of `terms` `assert_close`."""
    # Neither mesh nor route changes what is right, so all of them share one oracle run.
    moe = dataclasses.replace(cfg.moe, capacity_factor=None, slots=0)
    plain = dataclasses.replace(cfg, mesh=MESH_OF_ONE, moe=moe, **NO_ROUTE)
    state, batch, told, wanted = oracle_case(plain, bias)
    train_step = step_for(cfg)
    with only(path):
        gradients, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    for have, want in zip((parts.nll, parts.ahead), (told.nll, told.ahead), strict=True):
        assert (have is None) == (want is None)
        if have is not None:
            np.testing.assert_allclose(have, want, rtol=terms * np.finfo(np.float32).eps)
    load_LE = np.zeros((0, 1)) if told.load is None else told.load
    np.testing.assert_array_equal(parts.load_LE, load_LE)
    assert int(parts.uneven_L3[:, 0].sum()) == 0
    assert_close(gradients, wanted, terms=terms)
    return parts
