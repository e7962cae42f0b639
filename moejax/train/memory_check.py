"""Compares a run's memory with its devices', before anything is allocated."""

import socket

import jax

from moejax.errors import InputError
from moejax.runtime.memory import device_memory
from moejax.runtime.processes import Processes
from moejax.step.train_step import TrainStep
from moejax.train.summary import Summary, human_bytes


def check_memory(
    train_step: TrainStep, processes: Processes, *, gradients: bool = True, beside: int = 0
) -> int:
    """Refuses a run whose state and gradients alone are more than a device has.

    Args:
      gradients: whether there will be gradients: an evaluation has none.
      beside: bytes that a device holds beside the weights: keys and values, or copies of weights.
    Returns:
      The bytes that a device may use, the least over all devices.

    Raises:
      InputError: in all processes.
    """
    own, devices = socket.gethostname(), jax.local_devices()
    together = processes.gather(own).count(own)
    memory = min(device_memory(device, together * len(devices)) for device in devices)
    limit = min(processes.gather(memory))
    arguments = train_step.argument_bytes()
    needed, held = (
        sum(arguments.values()) + beside,
        "weights and what stands beside them" if beside else "weights",
    )
    if gradients:  # which have the shapes of weights
        needed, held = needed + arguments["weights"], "weights, optimizer state and gradients"
    if needed > limit:
        simulated = train_step.platform == "cpu"
        whose = "its share of this machine" if simulated else "what JAX may take of it"
        raise InputError(
            f"the model does not fit. A device would hold {human_bytes(needed)} of {held}, "
            f"and has {human_bytes(limit)}, {whose}. They must fit. "
            f"Shard more (mesh.fsdp, mesh.expert, mesh.tensor) over more "
            f"{'machines' if simulated else 'devices'}, or make the model smaller."
        )
    return limit


def memory_warnings(summary: Summary, limit: int) -> list[str]:
    """Returns a warning if the estimated peak may not fit."""
    name, fullest = max(summary.peaks.items(), key=lambda item: item[1])
    if fullest <= limit:
        return []
    return [
        f"warning: peak memory ({name}) is about {human_bytes(fullest)}, and a device "
        f"has {human_bytes(limit)}. If memory runs out, raise train.micro_batches, or choose "
        f"a stronger model.remat."
    ]
