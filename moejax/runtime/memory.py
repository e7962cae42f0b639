"""The share of a device's memory that a program may use."""

import os
from typing import Any

from moejax.config.checks.machine import machine_memory

# Share of a GPU's memory that JAX reserves for arrays and temporaries; its default is 0.75.
# The rest is for memory outside of JAX: CUDA's context and modules, buffers of NCCL and NVSHMEM,
# workspaces of cuDNN and cuBLAS; 6 GiB of 80. Described clusters count on the same share.
SHARE = 0.92
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # to set both is an error
# GiB of the host's memory that XLA pins at most for a GPU, as it needs them: 64 by default.
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def take_share() -> None:
    """Sets JAX's share of GPU memory, and of the host's all, unless the user's environment does.

    Must run before JAX starts its devices; without effect where there is no GPU.
    """
    if not any(os.environ.get(name) for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(SHARE)
    if not os.environ.get(POOL):
        os.environ[POOL] = str(max(1, machine_memory() // 2**30))


def device_memory(device: Any, sharing: int) -> int:
    """Returns the bytes that a device of this process may use.

    Args:
      sharing: simulated devices on this machine, over all processes: they share its memory.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return machine_memory() // max(1, sharing)
