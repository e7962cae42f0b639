"""How much memory a device may take."""

from typing import Any

from moejax.checks.size import machine_memory


def device_memory(device: Any, sharing: int) -> int:
    """Bytes that a device of this process may take.

    Args:
      sharing: simulated devices on this machine, over all processes: they share its memory.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return machine_memory() // max(1, sharing)
