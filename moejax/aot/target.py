"""Described clusters that XLA can compile for without their hardware.

A node is eight accelerators: one machine of GPUs, or eight TPUs of one slice. Nodes share a
network; nodes of one slice also share the links between its chips.
"""

import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from moejax.errors import InputError
from moejax.runtime.jax_settings import fix_settings
from moejax.runtime.memory import SHARE

NODE = 8  # devices

# The fields of XLA's `GpuTargetConfigProto` that its compiler needs; those of `{}` differ by kind.
GPU = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {gigahertz}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
# Source: XLA, xla/backends/gpu/target_config/specs/, h200.txtpb and b200.txtpb.
H200 = {
    "name": "NVIDIA H200", "major": 9, "cores": 132, "gigahertz": 1.98,
    "memory": 151_397_597_184, "bandwidth": 4_800_000_000_000, "cache": 52_428_800,
}  # fmt: skip
B200 = {
    "name": "NVIDIA B200", "major": 10, "cores": 148, "gigahertz": 1.965,
    "memory": 191_514_411_008, "bandwidth": 7_672_320_000_000, "cache": 132_644_864,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A kind of accelerator.

    Attributes:
      platform: "gpu" or "tpu".
      gpu: what `GPU` is filled with.
      topology: libtpu's name of one slice.
      memory_bytes: memory of one device that a program may use.
      extra: the extra of moejax that installs the compiler.
      slice_nodes: nodes of one slice, whose chips are joined by their own links.
    """

    platform: str
    memory_bytes: int
    extra: str
    gpu: dict[str, Any] = field(default_factory=dict)
    topology: str = ""
    slice_nodes: int = 1


TARGETS = {
    "h200": Target("gpu", int(SHARE * H200["memory"]), "aot", H200),
    "b200": Target("gpu", int(SHARE * B200["memory"]), "aot", B200),
    # Memory: Google Cloud's pages of TPU v5p and v6e.
    "v5p": Target("tpu", 95 * 2**30, "tpu", topology="v5p:2x2x2"),
    "v6e": Target("tpu", 32 * 2**30, "tpu", topology="v6e:2x4"),
    "v5p_16": Target("tpu", 95 * 2**30, "tpu", topology="v5p:2x2x4", slice_nodes=2),
    "v6e_16": Target("tpu", 32 * 2**30, "tpu", topology="v6e:4x4", slice_nodes=2),
}


def describe_devices(target: Target, nodes: int) -> list[Any]:
    """Returns the devices of a cluster, node after node. Programs compile for them, but cannot run.

    Raises:
      InputError: if the compiler of the platform is not installed.
    """
    # Before JAX loads its plugins: the CUDA plugin fails without its libraries.
    jax.config.update("jax_platforms", "cpu")
    fix_settings()
    # Compilers warn at length about missing accelerators.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        devices = list(_topology(target, nodes).devices)
    except (NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"no compiler for {target.platform}. JAX says: {reason}. It comes with a package of "
            f"its own. Install moejax[{target.extra}]."
        ) from error
    if target.platform == "gpu":
        _check_cuda_tools()
    return devices


def _topology(target: Target, nodes: int) -> topologies.TopologyDescription:
    if target.platform == "gpu":
        # Partitions, in which NVLink reaches, x hosts of each x devices of a host.
        shape = f"{nodes}x1x{NODE}"
        return topologies.get_topology_desc(
            platform="cuda", topology=shape, target_config=GPU.format(**target.gpu)
        )
    # libtpu would ask Google Cloud's metadata server where it runs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    number = nodes // target.slice_nodes
    if number * target.slice_nodes != nodes:
        raise InputError(
            f"{nodes} nodes are no whole slices of {target.topology}. A slice has "
            f"{target.slice_nodes}. Set --nodes to a multiple."
        )
    slices = {"num_slices": number} if number > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **slices)


def _check_cuda_tools() -> None:
    """Checks for CUDA's tools where XLA looks: without libdevice it ends the process."""
    packages = importlib.util.find_spec("jax_plugins")
    homes = [Path("/usr/local/cuda"), Path("/opt/cuda")]
    for folder in packages.submodule_search_locations or [] if packages else []:
        homes += sorted((Path(folder).parent / "nvidia").glob("*"))
    missing = []
    if not shutil.which("ptxas") and not any((home / "bin/ptxas").exists() for home in homes):
        missing.append("ptxas")
    if not any((home / "nvvm/libdevice/libdevice.10.bc").exists() for home in homes):
        missing.append("libdevice")
    if missing:
        raise InputError(
            f"no {' and no '.join(missing)} found. XLA's compiler for GPUs needs CUDA's tools. "
            f"Install moejax[aot]."
        )
