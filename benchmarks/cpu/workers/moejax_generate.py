"""The moejax side of `generate.py`: the engine of `moejax generate`, on one device."""

import os
import platform
import threading
import time
from typing import Any

import jax
import jaxlib
import numpy as np
from protocol import Answers, serve_generation

import moejax
from moejax.config.checks import resolve_mesh
from moejax.evaluate.checkpoint import FORWARD, choose, on_all_devices, read_weights
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import ALONE
from moejax.runtime.start import platform_of, start
from moejax.serve.batch import Batch, Request
from moejax.serve.programs import Programs, build_programs

READ_BYTES = 2**30  # more than any cache
PRODUCT = 2048  # rows and columns


class MoejaxSide:
    """A checkpoint's weights, and a batch for each number of slots."""

    def __init__(self, request: dict[str, Any]):
        self.request = request
        chosen = choose(request["run"], None, request["overrides"], ALONE, FORWARD)
        devices = start(chosen.cfg.mesh)
        self.platform = platform_of(devices)
        self.cfg = resolve_mesh(
            on_all_devices(chosen.cfg, len(devices)), len(devices), self.platform, processes=1
        )
        self.mesh = build_mesh(build_layout(self.cfg.mesh), devices)
        programs = self._programs(1, 1)
        self.state = programs.take(read_weights(chosen, programs.stored))
        self.batches: dict[tuple[int, int], Batch] = {}
        self.facts = _facts(programs) | {"bound": self._bound()}

    def run(self, requests: list[dict[str, Any]], variant: str, answers: Answers) -> None:
        """Continues prompts: "together" in at most so many slots, or "alone", one at a time."""
        if variant == "alone":
            for number, request in enumerate(requests):
                self._together([(number, request)], 1, answers)
        else:
            slots = min(len(requests), self.request["slots"])
            self._together(list(enumerate(requests)), slots, answers)

    def _together(self, requests: Any, slots: int, answers: Answers) -> None:
        batch = self._batch(slots, max(len(r["ids"]) + r["tokens"] for _, r in requests))
        numbers = {batch.submit(Request(r["ids"], r["tokens"])): n for n, r in requests}
        while batch.running or batch.waiting:
            for event in batch.step():
                answers.add(numbers[event.key], [token.id for token in event.tokens])

    def _batch(self, slots: int, positions: int) -> Batch:
        positions = 2 ** (positions - 1).bit_length()
        if (slots, positions) not in self.batches:
            batch = Batch(self._programs(slots, positions), self.state)
            self.batches[slots, positions] = batch
        return self.batches[slots, positions]

    def _programs(self, slots: int, positions: int) -> Programs:
        allowed = self.cfg.model.vocab_size
        form = {"slots": slots, "positions": positions, "allowed": allowed}
        return build_programs(self.cfg, self.mesh, self.platform, **form)

    def _bound(self) -> dict[str, float]:
        """Returns what bounds a step: bytes of weights, and how fast this machine reads."""
        experts = [x.nbytes for x in jax.tree.leaves(self.state.params) if x.ndim >= 4]
        experts = [n for n in experts if n >= max(experts) / 2]
        count = self.cfg.moe.num_experts
        whole = sum(x.nbytes for x in jax.tree.leaves(self.state.params))
        table = self.cfg.model.vocab_size * self.cfg.model.width * 4  # of which rows are read
        return {
            "bytes_of_all": whole - sum(experts) - table,
            "bytes_of_an_expert": sum(experts) / count,
            "read_bytes_per_second": _reading_rate(self.request["threads"]),
            "flops_per_second": _product_rate(),
        }


def _reading_rate(threads: int) -> float:
    """Bytes a second that threads read together from memory, the best of five."""
    arrays = [np.ones(READ_BYTES // 4 // threads, np.float32) for _ in range(threads)]
    best = float("inf")
    for _ in range(5):
        readers = [threading.Thread(target=np.dot, args=(array, array)) for array in arrays]
        begin = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = min(best, time.perf_counter() - begin)
    return sum(array.nbytes for array in arrays) / best


def _product_rate() -> float:
    """FLOP/s of a float32 matrix product, the best of five."""
    x = jax.numpy.ones((PRODUCT, PRODUCT), jax.numpy.float32)
    multiply = jax.jit(jax.numpy.dot)
    multiply(x, x).block_until_ready()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * PRODUCT**3 / best


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
            "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        },
    }


if __name__ == "__main__":
    serve_generation(MoejaxSide)
