"""A run's numbers do not depend on variables of JAX that were set for another program."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from moejax.runtime.jax_settings import CHECKS, NUMBERS, fix_settings

# Each a value that gives other numbers, or ends a run.
HOSTILE = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_RANDOM_SEED_OFFSET": "7",
    "JAX_ACCURATE_ERF_INV": "1",
    "JAX_HIGH_DYNAMIC_RANGE_GUMBEL": "1",
    "JAX_SOFTMAX_CUSTOM_JVP": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DISABLE_JIT": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": "disallow_explicit",
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": "disallow_explicit",
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": "disallow_explicit",
}
PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np
from moejax.config.schema import MeshConfig
from moejax.runtime.start import start
start(MeshConfig(platform="cpu", simulated_devices=2))
x = jax.random.normal(jax.random.key(3), (2, 64)) * jnp.ones(64, jnp.bfloat16)
print(json.dumps([str(x.dtype), np.asarray(x).tolist(), float(jax.nn.sigmoid(x).sum())]))
"""


@pytest.fixture(scope="module")
def started():
    """What a process of the default environment computes, and one of a hostile environment."""
    kept = {k: v for k, v in os.environ.items() if k not in HOSTILE}
    return [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=kept | more,
            capture_output=True,
            text=True,
            timeout=100,
        )
        for more in ({}, HOSTILE)
    ]


def test_numbers_are_those_of_the_default_environment(started):
    default, hostile = started
    assert (default.returncode, hostile.returncode) == (0, 0), hostile.stderr
    assert hostile.stdout == default.stdout
    dtype, x, _ = json.loads(default.stdout)
    assert dtype == "float32"
    wanted = jax.random.normal(jax.random.key(3), (2, 64))
    np.testing.assert_array_equal(np.array(x, np.float32), np.asarray(wanted))


def test_what_has_no_effect_is_told_in_one_line(started):
    default, hostile = started
    assert "settings of JAX" not in default.stderr
    (told,) = [line for line in hostile.stderr.splitlines() if "settings of JAX" in line]
    there = {name for name in HOSTILE if hasattr(jax.config, name.lower())}
    assert set(told.partition("no effect: ")[2].split(", ")) == there
    # JAX itself does not look for this one in the environment.
    known = HOSTILE.keys() | {"JAX_USE_HLO_LOGISTIC_LOWERING"}
    assert {name.upper() for name in {**NUMBERS, **CHECKS}} == known


def test_here_nothing_is_changed(capsys):
    """Nor by JAX's own defaults: older runs have had those."""
    fix_settings()
    assert not capsys.readouterr().err
