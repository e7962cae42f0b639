"""The moejax side of `generate.py`: the programs of `moejax generate`, on one device."""

import os
import platform
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np
from protocol import serve_generation

import moejax
from moejax.config.checks import resolve_mesh
from moejax.evaluate.checkpoint import FORWARD, choose, on_all_devices, read_weights
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import ALONE
from moejax.runtime.start import platform_of, start
from moejax.serve.batch import Batch, Request, generate
from moejax.serve.programs import Programs, build_programs


class MoejaxSide:
    """A checkpoint's weights, and an programs for each number of prompts."""

    def __init__(self, request: dict[str, Any]):
        chosen = choose(request["run"], None, request["overrides"], ALONE, FORWARD)
        devices = start(chosen.cfg.mesh)
        self.platform = platform_of(devices)
        self.cfg = resolve_mesh(
            on_all_devices(chosen.cfg, len(devices)), len(devices), self.platform, processes=1
        )
        self.mesh = build_mesh(build_layout(self.cfg.mesh), devices)
        self.longest = max(map(len, request["prompts"]))
        self.tokens = request["tokens"]
        self.engines = {rows: self._programs(rows) for rows in request["rows"]}
        programs = next(iter(self.engines.values()))
        state = programs.take(read_weights(chosen, programs.stored))
        self.batches = {rows: Batch(programs, state) for rows, programs in self.engines.items()}
        self.facts = _facts(self.engines[request["rows"][0]])

    def generate(
        self, prompts: list[list[int]], tokens: int, first: Callable[[], None]
    ) -> list[list[int]]:
        """Continues prompts."""
        found: list[list[int]] = [[] for _ in prompts]
        batch = self.batches[len(prompts)]
        for number, token in generate(batch, [Request(ids, tokens) for ids in prompts]):
            if not any(found):
                first()
            found[number].append(token.id)
        return found

    def set_experts(self, name: str) -> None:
        """Not offered: the implementation is a setting, moe.implementation."""
        raise ValueError(f"experts {name}: set moe.implementation={name} instead.")

    def _programs(self, rows: int) -> Programs:
        return build_programs(
            self.cfg,
            self.mesh,
            self.platform,
            slots=rows,
            positions=self.longest + self.tokens,
            allowed=self.cfg.model.vocab_size,
        )


def _facts(programs: Programs) -> dict[str, Any]:
    spec = programs.train_step.spec
    return {
        "versions": {
            "moejax": moejax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "experts": spec.experts,
            "dtype": programs.train_step.cfg.model.dtype,
            "cache_positions": programs.positions,
            "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        },
    }


if __name__ == "__main__":
    serve_generation(MoejaxSide)
