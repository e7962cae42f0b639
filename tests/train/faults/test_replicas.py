"""A device whose copy of the state differs is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.checkpoint.writer import arrays_of
from moejax.config.checks import resolve_mesh
from moejax.errors import ReplicasError
from moejax.runtime.processes import ALONE
from moejax.train.faults.replicas import check_replicas, copied, differing_copies
from tests.cases import drawn_state, small_config, step_for

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("r", "t"))


def placed(*axes, dtype=jnp.float32):
    x = jnp.arange(48).reshape(2, 4, 6).astype(dtype)
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*axes)))


def corrupt(x, device, byte=0, bit=0):
    """An array whose copy on one device has a flipped bit."""
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("axes", [(), (None, None, "t"), (None, "r"), ("t", None)])
def test_copies_that_agree_are_no_news(axes, dtype):
    assert copied(placed(*axes, dtype=dtype))
    assert differing_copies({"x": placed(*axes, dtype=dtype)}, ALONE) is None


def test_what_no_other_device_holds_is_not_compared():
    x = placed(None, "r", "t")
    assert not copied(x)
    assert differing_copies({"x": corrupt(x, 3)}, ALONE) is None


@given(st.integers(0, 7), st.integers(0, 95), st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_a_flipped_bit_names_its_device(device, byte, bit):
    arrays = {"a": placed(), "b": corrupt(placed(None, None, "t"), device, byte, bit)}
    found = differing_copies(arrays, ALONE)
    assert found == f"device {device} (process 0): other numbers than the copies in b"


def test_of_two_copies_that_differ_both_are_named():
    mesh = Mesh(np.array(jax.devices()[:2]), ("r",))
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec()))
    found = differing_copies({"x": corrupt(x, 1)}, ALONE)
    assert found.startswith("device 0 (process 0), device 1 (process 0): other numbers")


def test_a_state_of_a_run_agrees_until_a_bit_flips():
    cfg = small_config((2, 1, 2, 2))
    step = step_for(resolve_mesh(cfg, 8, "cpu"))
    arrays = arrays_of(drawn_state(step))
    check_replicas(arrays, 3, ALONE)
    key = next(key for key, x in arrays.items() if copied(x) and x.ndim > 1)
    with pytest.raises(ReplicasError, match=r"After step 3: .*device 5 \(process 0\)"):
        check_replicas({**arrays, key: corrupt(arrays[key], 5)}, 3, ALONE)
