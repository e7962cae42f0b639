"""Builds the JAX mesh of a layout. Only this module writes axis types."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from moejax.layout.layout import Layout


def build_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh over real devices, slowest axis first; the fastest axis is contiguous."""
    names, sizes = zip(*layout.sizes, strict=True)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def build_abstract_mesh(layout: Layout) -> AbstractMesh:
    """Returns a mesh of any size without devices, enough to trace the step."""
    names, sizes = zip(*layout.sizes, strict=True)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
