"""The loops that `moejax plan probe` times, compiled for an H200: all computed, nothing copied."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.aot.target import TARGETS, describe_devices
from moejax.plan.probe.timer import build_probe_mesh, loop, unrolled

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]
COUNT, ROWS = 2**22, 2**13


def test_each_operation_of_a_trip_computes_its_whole_result_and_copies_nothing():
    devices = np.array(describe_devices(TARGETS["h200"], 1)[:1])
    mesh = build_probe_mesh(devices.reshape(1, 1))
    order = np.random.default_rng(0).permutation(ROWS)
    operations = {
        "add": (lambda x: x * 1.0001 + 0.1, lambda: jnp.zeros(COUNT)),
        "gather": (
            lambda both: jnp.take(both[0], both[1], axis=0, mode="clip"),
            lambda: (jnp.zeros((ROWS, COUNT // ROWS)), jnp.asarray(order, jnp.int32)),
        ),
    }
    for name, (operate, start) in operations.items():
        program = loop(operate, start, mesh).lower(1).compile()
        text = program.as_text()
        body = re.search(r"body=%?([\w.-]+)", text).group(1)
        lines = re.search(rf"%{re.escape(body)} \(.*?\n(.*?)\n}}", text, re.S).group(1).splitlines()
        whole = [line for line in lines if re.match(rf" *%loop_{name}_fusion[.\d]* = f32\[", line)]
        assert len(whole) == unrolled(mesh) == 8, name
        # The corner that an operation waits for is written into its operand in place.
        arrays = 4 * COUNT
        assert program.memory_analysis().temp_size_in_bytes < 2 * arrays + 2**20, name
