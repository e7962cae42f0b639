"""Compiles MaxText's own train step for described devices, and writes the scheduled program's text.

Runs in an environment of its own (requirements.txt beside it says which), without moejax;
`benchmarks.executed_maxtext` starts it. Reads a request from standard input, as JSON: `platform`,
`topology`, `target_config` (of GPUs, XLA's text form), `settings` (MaxText's, "name=value") and
`out`, a folder. Writes step.txt and step.json there.

There is no GPU, so two questions of libraries about the one in this machine are answered for the
described one: cuDNN's version, and the device that tokamax chooses its kernels by.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # asks Google Cloud where it runs
os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText's switch for what needs Google Cloud's packages

import jax
import numpy as np
from flax.core.spmd import logical_axis_rules
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding


def describe(request):
    """Returns the devices of the request."""
    if request["platform"] == "tpu":
        return list(get_topology_desc(platform="tpu", topology_name=request["topology"]).devices)
    answer_for_gpu()
    devices = get_topology_desc(
        platform="cuda", topology=request["topology"], target_config=request["target_config"]
    ).devices
    return list(devices)


def answer_for_gpu():
    """Lets JAX lower cuDNN's attention where none is installed."""
    import jax._src.cudnn.fused_attention_stablehlo as fused_attention

    fused_attention.check_cudnn_version = lambda: 91000
    fused_attention.check_compute_capability = lambda capability: True


def answer_for_tokamax(device):
    """Lets tokamax choose kernels for the described device."""
    import jax.extend.backend

    jax.extend.backend.get_default_device = lambda: device


def read_config(settings, devices):
    """Returns MaxText's config of a run on so many devices."""
    base = str(Path(pyconfig.__file__).parent / "base.yml")
    fixed = ["internal_compile=true", f"internal_compile_num_devices={len(devices)}"]
    return pyconfig.initialize(["", base, *fixed, *settings])


def build_mesh(config, devices, platform):
    """Returns the mesh: of GPUs node after node, of TPUs as MaxText lays it on the slice."""
    if platform == "tpu":
        order = maxtext_utils.create_device_mesh(config, devices)
    else:
        order = np.array(devices).reshape(config.ici_parallelism)
    return Mesh(order, config.mesh_axes, axis_types=(AxisType.Auto,) * len(config.mesh_axes))


def lower(config, mesh):
    """Traces and lowers the step as MaxText's own train_compile does."""
    arguments, named, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    inputs = sharding.build_zero1_input_state_mesh_shardings(config, state, params)
    data = sharding.get_input_data_sharding(config, mesh)
    function, in_shardings, out_shardings, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, inputs, model, config, params
        )
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            function,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static,
            donate_argnums=donated,
        )
        return jitted.lower(*arguments, **named)


def main():
    """Compiles the step of the request."""
    request = json.loads(sys.stdin.read())
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as train_compile does
    devices = describe(request)
    config = read_config(request["settings"], devices)
    mesh = build_mesh(config, devices, request["platform"])
    answer_for_tokamax(devices[0])
    lowered = lower(config, mesh)
    start, worked = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - worked}
    memory = compiled.memory_analysis()
    found |= {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "mesh": {name: int(size) for name, size in mesh.shape.items() if size > 1},
        "devices": [device.id for device in mesh.devices.flat],
        "jax": jax.__version__,
    }
    out = Path(request["out"])
    (out / "step.txt").write_text(compiled.as_text())
    (out / "step.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
