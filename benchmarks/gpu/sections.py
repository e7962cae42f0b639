"""The sections of `gpu.py`, most wanted first, and what they ran on."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax

from benchmarks.gpu.attention import attention_cases, attention_checks
from benchmarks.gpu.case import Case
from benchmarks.gpu.chunks import chunk_cases
from benchmarks.gpu.correct import check_cases
from benchmarks.gpu.host import host_cases
from benchmarks.gpu.layers import layer_cases, step_cases
from benchmarks.gpu.limits import limit_cases
from benchmarks.gpu.products import swept_cases, target_cases
from benchmarks.gpu.rows import row_cases

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy", "torch", "tokamax")


class Section(NamedTuple):
    """Cases that run in one process."""

    cases: Callable[..., list[Case]]
    torch: bool = False  # whether torch is compared with


def _checks(*, small: bool) -> list[Case]:
    return [*check_cases(small=small), *attention_checks(small=small)]


def _products(*, small: bool) -> list[Case]:
    return [*limit_cases(small=small), *target_cases(small=small)]


def _training(*, small: bool) -> list[Case]:
    """The step first: it wants the memory whole."""
    return [*step_cases(small=small), *layer_cases(small=small)]


def _all(*, small: bool) -> list[Case]:
    found = (section.cases(small=small) for name, section in SECTIONS.items() if name != "all")
    return [case for cases in found for case in cases]


SECTIONS = {
    "check": Section(_checks),
    "products": Section(_products, torch=True),
    "rows": Section(row_cases, torch=True),
    "training": Section(_training),
    "attention": Section(attention_cases),
    "chunks": Section(chunk_cases),
    "host": Section(host_cases),
    "sweep": Section(swept_cases, torch=True),
    "all": Section(_all),
}


def versions() -> dict[str, Any]:
    """What this process runs on."""
    device = jax.devices()[0]
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    kind, capability = device.device_kind, getattr(device, "compute_capability", None)
    return found | {"platform": device.platform, "device": kind, "capability": capability}
