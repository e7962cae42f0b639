"""A case of the GPU benchmark, and the reporter that tries what may fail and writes down the rest.

Each line is a JSON object:

    {"case": 3}                                   the third case begins
    {"begin": key}                                this may be the last that is heard of it
    {"end": key}
    {"row": {...}}                                a result, or an error
    {"left_out": [...]}                           cases that there was no time for
"""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu.timing import Form, measure, run_once

ERROR_LINES, ERROR_LETTERS = 6, 800
LOST = 3  # exit code when the device no longer answers


class Case(NamedTuple):
    """What belongs together, and is measured in turns."""

    name: str
    run: Callable[["Reporter"], None]


def key_of(operation: str, implementation: str, case: str) -> str:
    """Names a row; without the case, what it tries."""
    return " | ".join(filter(None, (operation, implementation, case)))


class Reporter:
    """Tries what may fail, and writes down what happened.

    Attributes:
      gpu: whether there is one; else sizes are tiny and nothing is worth comparing.
      torch: PyTorch, if the section wants it and it runs on the GPU.
    """

    def __init__(self, section: str, skip: set[str], *, small: bool):
        self.section, self.skip, self.small = section, skip, small
        self.gpu = jax.devices()[0].platform == "gpu"
        self.torch: Any = None
        self.case = ""

    def say(self, **words: Any) -> None:
        """Writes a line."""
        print(json.dumps(words), flush=True)

    def row(self, operation: str, implementation: str, **found: Any) -> None:
        """Writes a result."""
        row = {"section": self.section, "operation": operation, "implementation": implementation}
        self.say(row=row | {"case": self.case} | found)

    def attempt(self, operation: str, implementation: str, run: Callable[[], Any]) -> Any:
        """Returns what `run` gives; None, and a row that says why, if it fails.

        What ended the process before, or hung, is not tried again: it has its row.
        """
        key = key_of(operation, implementation, self.case)
        if key in self.skip or key_of(operation, implementation, "") in self.skip:
            return None
        self.say(begin=key)
        try:
            result = run()
        except Exception as error:
            self.row(operation, implementation, error=first_lines(error))
            if not _answers():
                os._exit(LOST)
            return None
        self.say(end=key)
        return result

    def compare(self, operation: str, forms: dict[str, Callable[[], Form]], **work: float) -> None:
        """Times forms of an operation in turns; those that fail are left out.

        Args:
          forms: implementation -> what makes its form.
          work: `flops` and `bytes` of a call.
        """
        ready: dict[str, Form] = {}
        for name, make in forms.items():

            def prepare(make: Callable[[], Form] = make) -> Form:
                form = make()
                run_once(form)
                return form

            form = self.attempt(operation, name, prepare)
            if form is not None:
                ready[name] = form
        rounds, burst_s = (2, 0.0) if self.small else (7, 0.012)
        if not ready:
            return
        timed = self.attempt(
            operation, "timing", lambda: measure(ready, rounds=rounds, burst_s=burst_s)
        )
        for name, seconds in (timed or {}).items():
            self.row(operation, name, seconds=seconds, **work)

    def draw(self, seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        """Normal numbers on the device, which cost it as much power as real ones."""
        # A generator of the hardware's own: gigabytes in milliseconds.
        return _normal(jax.random.key(seed, impl="unsafe_rbg"), shape, dtype)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def first_lines(error: Exception) -> str:
    """What an error says at first; compilers say more than anyone reads."""
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return "\n".join(lines[:ERROR_LINES])[:ERROR_LETTERS]


def _answers() -> bool:
    """Whether the device still computes: after an illegal access it does not, in this process."""
    try:
        return float(jnp.ones(8).sum()) == 8
    except Exception:
        return False
