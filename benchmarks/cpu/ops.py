"""Times moejax's own operations on a CPU beside the obvious alternatives.

All forms of an operation are compiled first; then each runs once a round, in turns. A form's ratio
is its time over the first form's in the same round. Experts of few rows run forward alone, as in
generation; everything else forward and backward. Writes ops.json and ops.md.

    python -m benchmarks.cpu.ops --out benchmarks/results
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import Clock, describe, spread
from moejax.kernels.attention.attention import attention, attention_mask
from moejax.kernels.experts import blocked_mlp
from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.expert_weights import ExpertWeights

Forms = dict[str, Callable[..., jax.Array]]
KEPT = "moejax (blocked)"


def attention_case(B: int, T: int, H: int, G: int, C: int) -> tuple[Forms, list[jax.Array]]:
    """Attention of B sequences of T positions in two documents, H heads over G of keys."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(B, T, n, C)), jnp.float32) for n in (H, G, G)]
    segment_BT = jnp.asarray(np.sort(rng.integers(0, 2, (B, T)), axis=1), jnp.int32)
    mask_BTS = attention_mask(segment_BT, None, T)

    def form(implementation: str) -> Callable[..., jax.Array]:
        return lambda q, k, v: attention(
            q, k, v, segment_BT, window=None, implementation=implementation
        )

    def mapped(q, k, v):
        def sequence(x):
            q, k, v, mask_TS = x
            return jax.nn.dot_product_attention(q, k, v, mask=mask_TS[None])

        return jax.lax.map(jax.checkpoint(sequence), (q, k, v, mask_BTS))

    forms = {
        KEPT: form("blocked"),
        "library, one sequence at a time, recomputed in backward": mapped,
        "library, whole batch": form("reference"),
    }
    return forms, qkv


def experts_case(M: int, G: int, D: int, F: int) -> tuple[Forms, list[jax.Array]]:
    """SwiGLU experts on M rows, routed evenly at random."""
    rng = np.random.default_rng(0)
    shapes = [(M, D), (G, D, 2, F), (G, F, D)]
    arrays = [jnp.asarray(rng.normal(size=shape) / 16, jnp.float32) for shape in shapes]
    sizes_G = jnp.asarray(np.bincount(rng.integers(0, G, M), minlength=G), jnp.int32)

    def form(implementation: str) -> Callable[..., jax.Array]:
        return lambda x, w_in, w_out: expert_mlp(
            x, w_in, w_out, sizes_G, implementation=implementation
        )

    def equal(x, w_in, w_out):
        h = jnp.einsum("gmd,gduf->gmuf", x.reshape(G, -1, D), w_in)
        a = jax.nn.silu(h[:, :, 0]) * h[:, :, 1]
        return jnp.einsum("gmf,gfd->gmd", a, w_out).reshape(M, D)

    forms = {
        KEPT: form("blocked"),
        "equal groups in one batched product (another result: the bound)": equal,
        "lax.ragged_dot": form("ragged_dot"),
    }
    return forms, arrays


def few_rows_case(M: int, G: int, D: int, F: int) -> tuple[Forms, list[jax.Array]]:
    """The same with few rows a group: which form `blocked_mlp.FEW_ROWS` should choose."""
    _, arrays = experts_case(M, G, D, F)
    sizes_G = jnp.asarray(np.bincount(np.random.default_rng(1).integers(0, G, M), minlength=G))
    sizes_G = sizes_G.astype(jnp.int32)

    def by_blocks(x, w_in, w_out):
        return blocked_mlp._compute_rows(x, ExpertWeights(w_in, w_out), sizes_G, None, None)[0]

    def read_once(x, w_in, w_out):
        return blocked_mlp._few_rows(x, ExpertWeights(w_in, w_out), sizes_G, None)

    if not blocked_mlp.takes_few_rows(arrays[0], arrays[2]):
        raise SystemExit("few_rows.cc cannot be compiled here")
    return {"few_rows.cc": read_once, "blocks of rows by XLA": by_blocks}, arrays


FEW = {
    f"experts without gradients, {M / 16:g} rows a group: M={M} G=16 D=512 F=1024": M
    for M in (2, 16, 64, 128, 256, 512, 1024, 2048)
}
CASES = {
    "attention B=8 T=256 H=8 G=8 C=32": lambda: attention_case(8, 256, 8, 8, 32),
    "attention B=2 T=1024 H=8 G=2 C=64": lambda: attention_case(2, 1024, 8, 2, 64),
    "attention B=1 T=4096 H=4 G=1 C=64": lambda: attention_case(1, 4096, 4, 1, 64),
    "experts M=4096 G=8 D=256 F=512": lambda: experts_case(4096, 8, 256, 512),
}


def both_ways(form: Callable[..., jax.Array]) -> Callable[..., object]:
    """Jits the result and all gradients, the result standing in for its gradient."""

    def run(*arrays):
        y, pull = jax.vjp(form, *arrays)
        return y, pull(y)

    return jax.jit(run)


def measure(
    forms: Forms, arrays: list[jax.Array], rounds: int, way: Callable = both_ways
) -> dict[str, list[float]]:
    """Returns each form's seconds by round."""
    runs = {name: way(form) for name, form in forms.items()}
    for run in runs.values():
        jax.block_until_ready(run(*arrays))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in sorted(runs, reverse=bool(turn % 2)):
            began = time.perf_counter()
            jax.block_until_ready(runs[name](*arrays))
            seconds[name].append(time.perf_counter() - began)
    return seconds


def to_markdown(result: dict) -> str:
    """A table for each operation."""
    rounds = len(next(iter(next(iter(result["seconds"].values())).values())))
    lines = [
        "# Operations",
        "",
        "Forward and backward, but for experts without gradients.",
        "",
        f"`python -m benchmarks.cpu.ops --rounds {rounds}`",
        "",
    ]
    for case, seconds in result["seconds"].items():
        lines += [f"## {case}", "", "| form | ratio: median | quartiles |", "|---|---:|---|"]
        first = next(iter(seconds.values()))
        for name, values in seconds.items():
            ratios = [a / b for a, b in zip(values, first, strict=True)]
            s = spread(ratios)
            row = f"| {name} | {s['median']:.2f} | {s['quartile_1']:.2f} - {s['quartile_3']:.2f} |"
            lines.append(row)
        lines.append("")
    others = result["others_cpu_share"]
    lines += [
        f"Other processes used {others:.0%} of the CPUs meanwhile."
        if others is not None
        else "Whether other processes ran meanwhile is unknown.",
        "",
        f"Machine: {json.dumps(result['machine'])}, JAX {result['jax']}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    clock, cpu_before = Clock(cpus), time.process_time()
    seconds = {case: measure(*make(), args.rounds) for case, make in CASES.items()}
    for case, M in FEW.items():
        seconds[case] = measure(*few_rows_case(M, 16, 512, 1024), args.rounds, way=jax.jit)
    result = {
        "seconds": seconds,
        "others_cpu_share": clock.others_share(time.process_time() - cpu_before),
        "machine": describe(cpus),
        "jax": jax.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ops.json").write_text(json.dumps(result, indent=1) + "\n")
    text = to_markdown(result)
    (args.out / "ops.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
