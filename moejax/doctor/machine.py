"""Installed versions, and the implementation that each operation takes on some hardware."""

import importlib.metadata
import platform
from dataclasses import replace
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from moejax.aot.target import TARGETS
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.kernels.select import Choice, Hardware, select_kernels
from moejax.version import __version__

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jax-cuda13-plugin",
    "jax-cuda12-plugin", "libtpu",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Returns the versions of Python, moejax and its installed dependencies."""
    found = {"Python": platform.python_version(), "moejax": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware_of_target(target: str | None) -> Hardware:
    """Returns what kernels are chosen for: the named accelerators, else those of this machine."""
    if target is not None:
        named = TARGETS[target]
        return Hardware(named.platform, f"{named.gpu['major']}.0" if named.gpu else None)
    device = devices_here()[0]
    return Hardware(device.platform, getattr(device, "compute_capability", None))


def devices_here() -> list[Any]:
    """The devices of this process.

    Raises:
      InputError: in place of JAX's error, which names no setting of ours.
    """
    try:
        return jax.local_devices()
    # JAX asserts that a platform it knows nothing of has devices.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or ["it knows no such platform here"])[0]
        raise InputError(
            f"no devices. JAX says: {reason}. Set JAX_PLATFORMS to what this host has (cpu, cuda "
            f"or tpu), and install the extra for it: docs/guide/cluster.md."
        ) from error


def show(cfg: Config, hardware: Hardware, console: Console) -> None:
    """Prints versions, the hardware and the choices.

    Raises:
      InputError: from `select_kernels`, after everything is printed.
    """
    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    console.print(text, highlight=False, soft_wrap=True)
    capability = f", compute capability {hardware.capability}" if hardware.capability else ""
    console.print(f"platform {hardware.platform}{capability}", highlight=False)
    try:
        console.print(_table(select_kernels(cfg, hardware)))
    except InputError:
        open_choice = replace(cfg, kernels="auto", moe=replace(cfg.moe, implementation="auto"))
        console.print(_table(select_kernels(open_choice, hardware)))
        raise


def _table(choices: dict[str, Choice]) -> Table:
    table = Table("operation", "takes", "because", "declined", title_justify="left")
    for operation, choice in choices.items():
        declined = "\n".join(f"{name}: {reason}" for name, reason in choice.declined)
        table.add_row(operation, choice.implementation, choice.reason, declined)
    return table
