"""Prints how far each family's logits, loss and gradients are from transformers', as a table.

The figures are those that test_parity.py bounds, of the same cases: the largest of a family.

    .venv/bin/python -m tests.hf.figures [FAMILY ...]
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from moejax.config.schema import MeshConfig
from tests.hf.golden import ONE_DEVICE, all_cases, cases_of
from tests.hf.test_parity import MESH, error_of_logits, error_of_loss, model_of


def errors_of(family: str, name: str, mesh: MeshConfig) -> np.ndarray:
    """Errors of logits, loss and gradients of one case."""
    case = cases_of(family)[name]
    with tempfile.TemporaryDirectory() as place:
        model, token_BT = model_of(Path(place), family, case, mesh)
        logits = error_of_logits(model, case, token_BT)
        return np.array((logits, *error_of_loss(model, case, token_BT)))


def main() -> None:
    """Computes all cases, on one device and those that fit on a mesh of expert and tensor axes."""
    jax.config.update("jax_num_cpu_devices", 4)
    worst: dict[str, np.ndarray] = {}
    for parameters in all_cases():
        family, name = parameters.values
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        for mesh in (ONE_DEVICE, MESH) if "even" in name else (ONE_DEVICE,):
            found = errors_of(family, name, mesh)
            worst[family] = np.maximum(worst.get(family, found), found)
    for family, figures in sorted(worst.items()):
        print(f"| {family} | " + " | ".join(f"{x:.0e}" for x in figures) + " |")


if __name__ == "__main__":
    main()
