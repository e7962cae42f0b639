"""What the device can do at most, measured: a copy, a matrix product, and what a launch costs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.case import Case, Reporter
from benchmarks.gpu.timing import jax_form, jit_product, torch_form

COPY, MATMUL, MATMUL_FP8, LAUNCH = "copy", "matmul bfloat16", "matmul e4m3", "launch"


def compare_copies(report: Reporter) -> None:
    """Reads and writes an array that no cache holds."""
    size = 2**20 if report.small else 2**31
    x = report.draw(0, size // 2)
    forms = {"XLA": partial(jax_form, jax.jit(lambda x: -x), x)}
    if report.torch:
        torch = report.torch
        y = torch.empty(size // 2, device="cuda", dtype=torch.bfloat16)
        forms["torch"] = partial(torch_form, torch, torch.empty_like(y).copy_, y)
    report.compare(COPY, forms, bytes=2.0 * size)


def compare_matmuls(report: Reporter) -> None:
    """One large product of normal numbers; zeros would draw less power and clock higher."""
    size = 256 if report.small else 8192
    x, y = report.draw(0, size, size), report.draw(1, size, size)
    forms = {"XLA": partial(jax_form, jit_product(jnp.matmul), x, y)}
    if report.torch:
        torch = report.torch
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        forms["torch"] = partial(torch_form, torch, torch.matmul, a, b)
    report.compare(MATMUL, forms, flops=2.0 * size**3)


def compare_fp8_matmuls(report: Reporter) -> None:
    """The same of bytes: e4m3 with one scale, summed in float32, kept in bfloat16."""
    size, e4m3 = 8192, jnp.float8_e4m3fn
    x, y = (report.draw(seed, size, size).astype(e4m3) for seed in range(2))

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.bfloat16)

    forms: dict[str, Any] = {"XLA": partial(jax_form, jit_product(product), x, y)}
    if report.torch:
        torch = report.torch
        normal = partial(torch.randn, size, size, device="cuda")
        a, b = (normal().to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        run = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        forms["torch"] = partial(torch_form, torch, run, a, b.t())
    report.compare(MATMUL_FP8, forms, flops=2.0 * size**3)


def compare_launches(report: Reporter) -> None:
    """Calls that have nothing to do."""
    x = jnp.zeros(8)
    forms = {"XLA": partial(jax_form, jax.jit(lambda x: x + 1), x)}
    if report.torch:
        y = report.torch.zeros(8, device="cuda")
        forms["torch"] = partial(torch_form, report.torch, partial(report.torch.add, y, 1))
    report.compare(LAUNCH, forms)


def limit_cases(*, small: bool) -> list[Case]:
    """What everything else is compared with."""
    found = [Case("copy", compare_copies), Case("matmul", compare_matmuls)]
    found += [] if small else [Case("matmul of bytes", compare_fp8_matmuls)]
    return [*found, Case("launch", compare_launches)]
