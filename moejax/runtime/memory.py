"""How much memory a device may take."""

import os
from typing import Any

from moejax.config.checks.size import machine_memory

# Of a GPU's memory that JAX takes for arrays and temporaries; by itself it takes three quarters.
# The rest holds what is not JAX's: CUDA's context and modules, buffers of NCCL and NVSHMEM, what
# cuDNN and cuBLAS keep; 6 GiB of 80. Clusters that are described count on the same share.
SHARE = 0.92
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # to set both is an error


def take_share() -> None:
    """Lets JAX take that share, unless the user's environment says how much.

    Must run before JAX starts its devices; without effect where there is no GPU.
    """
    if not any(os.environ.get(name) for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(SHARE)


def device_memory(device: Any, sharing: int) -> int:
    """Bytes that a device of this process may take.

    Args:
      sharing: simulated devices on this machine, over all processes: they share its memory.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return machine_memory() // max(1, sharing)
