"""Times the gated delta rule in chunks beside a loop over positions and transformers' torch form.

Forms run in turns, forward alone and forward with gradients of all inputs; a form's ratio is its
time over ours in the same round. Needs torch and transformers: `make .venv-parity/.installed`.
Writes delta.json and delta.md.

    OMP_WAIT_POLICY=passive .venv-parity/bin/python -m benchmarks.cpu.delta --rounds 10
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import RESULTS, Clock, spread, stamp
from moejax.kernels.delta import gated_delta

# Positions, key heads, value heads. Heads have 128 channels, as in Qwen3-Next: a quarter of its
# heads, or all, whose states no longer fit a core's second cache.
CASES = {
    "4,096 positions": (4096, 4, 8),
    "512 positions": (512, 4, 8),
    "1,024 positions, all heads": (1024, 16, 32),
}
WIDTH = 128
OURS = "moejax, in chunks"


def operands(length: int, keys: int, values: int) -> list[np.ndarray]:
    """Queries and keys of unit length, values, decays and betas of one sequence."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, length, keys, WIDTH)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(rng.standard_normal((1, length, values)) - 2)
    beta = rng.random((1, length, values))
    v = rng.standard_normal((1, length, values, WIDTH))
    return [x.astype(np.float32) for x in (q * WIDTH**-0.5, k, v, g, beta)]


def by_position(q: Any, k: Any, v: Any, g: Any, beta: Any) -> jax.Array:
    """The rule as a loop over positions, in JAX."""
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))

    def position(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = now
        state = state * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhc,bhcv->bhv", k, state))
        state = state + k[..., None] * u[:, :, None]
        return state, jnp.einsum("bhc,bhcv->bhv", q, state)

    state = jnp.zeros((1, v.shape[2], WIDTH, WIDTH), jnp.float32)
    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    return jnp.moveaxis(jax.lax.scan(position, state, steps)[1], 0, 1)


def jax_form(form: Callable[..., jax.Array], arrays: list[np.ndarray], backward: bool) -> Callable:
    """Returns a function that runs a form once and waits."""
    placed = [jnp.asarray(x) for x in arrays]

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(form(*arrays) ** 2)

    run = jax.jit(jax.grad(loss, argnums=tuple(range(5))) if backward else form)
    return lambda: jax.block_until_ready(run(*placed))


def torch_form(arrays: list[np.ndarray], backward: bool) -> Callable:
    """Returns the same of transformers' form in torch, without kernels of other packages."""
    import torch  # type: ignore[import-not-found]
    from transformers.models.qwen3_next import modeling_qwen3_next

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    placed = [torch.tensor(x, requires_grad=backward) for x in arrays]
    placed[0].data *= WIDTH**0.5  # it divides queries itself

    def run() -> Any:
        y = rule(*placed)[0]
        return torch.autograd.grad((y**2).sum(), placed) if backward else y

    return run


def measure(case: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each form, round by round."""
    arrays = operands(*case)
    chunked = lambda *arrays: gated_delta(*arrays)[0]  # noqa: E731
    forms = {
        OURS: jax_form(chunked, arrays, backward),
        "a loop over positions": jax_form(by_position, arrays, backward),
        "transformers' chunks in torch": torch_form(arrays, backward),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form()
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def to_markdown(result: dict[str, Any]) -> str:
    """The page of a result."""
    lines = [
        "# The gated delta rule on a CPU",
        "",
        f"{result['machine']['cpu']}, {result['machine']['cpus_used']} CPUs, {result['date']}; "
        f"others used {result['others_cpu_share']:.0%} of them. `{result['command']}`",
        "",
        "| | form | median, ms | over ours, in turns |",
        "|---|---|---|---|",
    ]
    for case, seconds in result["seconds"].items():
        for name, own in seconds.items():
            ratios = np.array(own) / np.array(seconds[OURS])
            lines.append(
                f"| {case} | {name} | {1e3 * np.median(own):,.0f} | {np.median(ratios):.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description="Times the gated delta rule.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    clock, before = Clock(sorted(os.sched_getaffinity(0))), time.process_time()
    seconds = {
        f"{name}, {'forward and backward' if backward else 'forward'}": measure(
            case, backward, args.rounds
        )
        for name, case in CASES.items()
        for backward in (False, True)
    }
    result = {
        **stamp(),
        "seconds": seconds,
        "spread": {case: {n: spread(s) for n, s in own.items()} for case, own in seconds.items()},
        "others_cpu_share": clock.others_share(time.process_time() - before),
        "command": f"python -m benchmarks.cpu.delta --rounds {args.rounds}",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "delta.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "delta.md").write_text(to_markdown(result))
    print(to_markdown(result))


if __name__ == "__main__":
    main()
