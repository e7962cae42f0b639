"""Times several forms of an operation in turns, in bursts of calls that queue on the device.

A call takes the host some microseconds to launch, and an answer takes it tens of microseconds to
notice. So a burst is launched whole, the device works it off without waiting for the host, and its
time is divided by its calls. What a launch costs stands in the results (`launch`): a form that
takes no longer than that is bound by the host.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
BURST_BYTES = 16 * 2**30  # results of a burst that may exist at a time


class Form(NamedTuple):
    """One way to compute something.

    Attributes:
      start: queues one call and returns its result.
      wait: returns when the result is there, and with it all that was queued before.
    """

    start: Callable[[], Any]
    wait: Callable[[Any], Any]


def jit_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jits products that XLA hands to cuBLAS: to try its own generated ones takes it minutes."""
    on_gpu = jax.default_backend() == "gpu"
    return jax.jit(function, compiler_options=CUBLAS if on_gpu else None)


def jax_form(function: Callable[..., Any], *arrays: Any) -> Form:
    """A jitted function of arrays."""
    return Form(partial(function, *arrays), jax.block_until_ready)


def torch_form(torch: Any, function: Callable[..., Any], *tensors: Any) -> Form:
    """A function of tensors on the current GPU."""
    return Form(partial(function, *tensors), lambda _: torch.cuda.synchronize())


def measure(forms: dict[str, Form], *, rounds: int, burst_s: float) -> dict[str, list[float]]:
    """Returns seconds a call of each form, round by round; each form ran before (`run_once`).

    Args:
      burst_s: how long a burst should take, about.
    """
    calls = {name: _calls(form, burst_s) for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds):
        for name in sorted(forms, reverse=bool(turn % 2)):
            seconds[name].append(_burst(forms[name], calls[name]) / calls[name])
    return seconds


def run_once(form: Form) -> Any:
    """Compiles and runs a form; returns its result."""
    result = form.start()
    form.wait(result)
    return result


def _calls(form: Form, burst_s: float) -> int:
    """Calls that make a burst."""
    result = run_once(form)
    size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(result))
    del result
    seconds = _burst(form, 3) / 3
    most = max(2, BURST_BYTES // max(size, 1))
    return min(most, max(2, math.ceil(burst_s / seconds)))


def _burst(form: Form, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        result = form.start()
    form.wait(result)
    return time.perf_counter() - began
