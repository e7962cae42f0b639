"""Exchanges between devices: the same results as JAX's collectives, and what goes wrong is told."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm import exchange
from moejax.comm.gloo import in_order

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
COLLECTIVES = {
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "all_gather": lambda x, axes: lax.all_gather(x, axes, axis=1, tiled=True),
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
    "all_reduce": lambda x, axes: lax.psum(x[:, :3], axes),
    "ppermute": lambda x, axes: along_a_chain(x, tuple(sorted(axes))),
}


def along_a_chain(x, axes):
    """JAX permutes in the order of the mesh alone. One device sends nothing, one receives zeros."""
    return lax.ppermute(x, axes, [(i, i + 1) for i in range(lax.axis_size(axes) - 1)])


@pytest.fixture
def everything_exchanged(monkeypatch):
    """Small arrays too."""
    monkeypatch.setattr("moejax.comm.gloo.LARGE", 0)


def run(body):
    spec = P(("a", "b", "c"))
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False))


def exchanged(body, mesh=MESH):
    return run(in_order(body, exchange.connected(mesh)))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
@pytest.mark.parametrize("axes", ["a", ("b",), "c", ("c", "a"), ("a", "b", "c")])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_give_what_those_of_jax_give(everything_exchanged, name, axes, dtype):
    """Whole numbers, which add up to the same in any order."""
    x = np.random.default_rng(0).integers(-9, 9, (64, 8, 3)).astype(dtype)
    wanted = run(lambda x: COLLECTIVES[name](x, axes))(x)
    ours = exchanged(lambda x: COLLECTIVES[name](x, axes))
    np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(wanted))
    text = ours.lower(x).compile().as_text()
    assert "moejax_exchange_start" in text
    assert not re.search(
        r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\(", text
    )


def test_devices_are_found_in_the_order_of_the_mesh(everything_exchanged):
    """A mesh may list devices in any order."""
    mesh = Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 2, 2), ("a", "b", "c"))
    x = np.arange(64.0).reshape(64, 1)

    def body(x):
        return lax.all_to_all(x, ("a", "c"), 0, 0, tiled=True)

    def on(mesh, body):
        spec = P(("a", "b", "c"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(mapped)(x))

    ours = on(mesh, in_order(body, exchange.connected(mesh)))
    np.testing.assert_array_equal(ours, on(mesh, body))


def test_messages_far_larger_than_a_sockets_buffer_arrive():
    """Both ways at once: neither side waits for the other to read first."""
    x = np.random.default_rng(0).standard_normal((8 * 8, 2**18), np.float32)
    ours = exchanged(lambda x: COLLECTIVES["all_to_all"](x, ("a", "b", "c")))
    wanted = x.reshape(8, 8, -1).swapaxes(0, 1).reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(ours(x)), wanted)


def test_a_missing_compiler_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exchange.shutil, "which", lambda name: None)
    assert exchange._load() is None
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("Collectives do not run beside compute: there is no C++ compiler")


def test_what_the_compiler_complains_of_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "exchange.cc"
    broken.write_text("#error no such thing\n")
    monkeypatch.setattr(exchange, "SOURCE", broken)
    assert exchange._load() is None
    assert "g++ failed" in (told := capsys.readouterr().err)
    assert "no such thing" in told
    assert not list((tmp_path / "cache" / "moejax").iterdir())
