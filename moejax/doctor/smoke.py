"""`moejax doctor --smoke`: kernels, collectives, chunks, steps, a checkpoint, on the devices here.

Each check takes seconds, compiling included, and raises if it does not hold. One that fails does
not stop the others.
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from moejax.checkpoint.find import newest
from moejax.checkpoint.writer import Checkpoints, restore_state
from moejax.comm import wire
from moejax.comm.cpu import gloo
from moejax.config.schema import (
    CompressionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainConfig,
)
from moejax.doctor.machine import devices_here
from moejax.kernels.attention.attention import attention
from moejax.kernels.experts.expert_mlp import IN_E4M3, expert_mlp
from moejax.kernels.experts.expert_weights import ExpertWeights
from moejax.kernels.experts.quantize import dequantize, dequantize_sum, quantize
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.kernels.select import Choice, hardware_of, select_kernels
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import Hop, Route
from moejax.moe.dispatch import moe_ffn
from moejax.screen import waiting
from moejax.step.state import Batch, TrainState
from moejax.step.train_step import TrainStep, build_step

STEPS = 8
# Shares of the largest value: results that are rounded once more on the way, in bfloat16 to 8 bits.
ROUNDING = {"float32": 2.0**-10, "bfloat16": 2.0**-5}
FORMAT, BLOCK = "int8", 128
LETTERS = 200  # of an error that are shown


class SkippedError(Exception):
    """A check has nothing to check here; the message says why."""


class Check(NamedTuple):
    """A check: its name, a call that raises if it does not hold, and advice for that case."""

    name: str
    run: Callable[[], Any]
    advice: str


def smoke(console: Console, checks: Sequence[Check] | None = None) -> int:
    """Runs checks and prints a table of their outcomes.

    Args:
      checks: None for all, on the devices of this process.
    Returns:
      The exit code: 0 if every check holds, 1 if any fails.
    Raises:
      InputError: if there are no devices.
    """
    devices = devices_here()
    console.print(f"{len(devices)} x {devices[0].device_kind}", highlight=False)
    table, failed = Table("check", "outcome", "seconds", "why"), []
    for check in smoke_checks(devices) if checks is None else checks:
        began = time.perf_counter()
        with waiting(console, check.name):
            outcome, why = _outcome(check)
        table.add_row(check.name, outcome, f"{time.perf_counter() - began:.1f}", why)
        failed += [check] * (outcome == "failed")
    console.print(table)
    for check in failed:
        console.print(f"{check.name} failed. {check.advice}", highlight=False)
    return 1 if failed else 0


def _outcome(check: Check) -> tuple[str, str]:
    """Runs a check. Returns its outcome, and why it failed or was left out."""
    try:
        check.run()
    except SkippedError as error:
        return "skipped", str(error)
    except Exception as error:  # of any kind: the rest must run
        first = (str(error).strip().splitlines() or [""])[0]
        return "failed", f"{type(error).__name__}: {first[:LETTERS]}"
    return "ok", ""


def smoke_checks(devices: Sequence[Any]) -> list[Check]:
    """Returns all checks, for these devices."""
    run = SmokeRun(devices)
    return [*_kernel_checks(run), *_collective_checks(devices), *_run_checks(run)]


class SmokeRun:
    """A tiny run, with experts on all devices, that the checks share."""

    def __init__(self, devices: Sequence[Any]):
        self.cfg = smoke_config(len(devices), devices[0].platform)
        self.mesh = build_mesh(build_layout(self.cfg.mesh), list(devices))
        self.platform = devices[0].platform

    @cached_property
    def train_step(self) -> TrainStep:
        """The trainer's step."""
        return build_step(self.cfg, self.mesh, self.platform)

    @cached_property
    def trained(self) -> tuple[TrainState, list[float]]:
        """The state after `STEPS` steps on one batch, and their losses."""
        state, losses = self.train_step.init(), []
        batch = jax.device_put(_batch(self.cfg), self.train_step.batch_sharding)
        for _ in range(STEPS):
            state, metrics = self.train_step.step(state, batch)
            losses.append(float(metrics.loss))
        return state, losses


def smoke_config(devices: int, platform: str) -> Config:
    """A model of one layer, in the dtype that such devices train in."""
    dtype = "float32" if platform == "cpu" else "bfloat16"
    return Config(
        model=ModelConfig(
            vocab_size=256,
            width=math.lcm(128, devices),
            num_layers=1,
            num_heads=2,
            num_kv_heads=2,
            head_width=64,
            mlp_hidden=128,
            dtype=dtype,
        ),
        moe=MoEConfig(num_experts=4 * devices, experts_per_token=2, expert_hidden=128),
        mesh=MeshConfig(replica=1, fsdp=1, expert=devices, tensor=1),
        data=DataConfig(sequence_length=128),
        train=TrainConfig(batch_sequences=2 * devices, num_steps=STEPS),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    )


def _batch(cfg: Config) -> Batch:
    """Tokens that a model learns in a few steps: each follows from the one before."""
    shape = cfg.train.batch_sequences, cfg.data.sequence_length
    first = np.arange(shape[0])[:, None]
    token_BT = ((first + np.arange(shape[1])) % 16).astype(np.int32)
    return Batch(token_BT, (token_BT + 1) % 16, np.zeros(shape, np.int32))


def _kernel_checks(run: SmokeRun) -> Iterator[Check]:
    """Yields a check of each operation's chosen form against its reference, with codecs."""
    asked = dataclasses.replace(run.cfg, compression=CompressionConfig(preset="hybrid"))
    choices = select_kernels(asked, hardware_of(run.mesh, run.platform))
    known = {
        "attention": (_check_attention, "model.dtype=float32 takes our own in place of cuDNN's."),
        "experts": (_check_experts, "Set moe.implementation=blocked."),
        "quantize": (_check_quantize, "Set compression.preset=none."),
        "quantized_rows": (
            _check_rows,
            "Set compression.dispatch=none and compression.combine=none.",
        ),
    }
    for operation, choice in choices.items():
        check, advice = known[operation]
        name = f"{operation}: {choice.implementation}"
        yield Check(name, partial(check, choice, run.cfg), advice)


def _draw(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _assert_close(have: Any, want: Any, share: float) -> None:
    """Raises unless each array is within a share of the largest wanted value."""
    pairs = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    for number, (x, y) in enumerate(pairs):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error, allowed = np.max(np.abs(x - y)), share * np.max(np.abs(y))
        if not error <= allowed:
            raise ArithmeticError(f"array {number} is off by {error:.3g}, allowed {allowed:.3g}")


def _both_ways(function: Callable, arrays: Sequence[jax.Array]) -> Any:
    """Returns the result, and gradients of all arrays for a random output gradient."""

    def run(*arrays: jax.Array) -> Any:
        y, pull = jax.vjp(function, *arrays)
        return y, pull(_draw(99, *y.shape, dtype=str(y.dtype)))

    return jax.jit(run)(*arrays)


def _check_experts(choice: Choice, cfg: Config) -> None:
    """Checks an empty group, rows past the last group, and the router weights' gradient."""
    rows, D, F, dtype = 256, cfg.model.width, cfg.moe.expert_hidden, cfg.model.dtype
    arrays = [_draw(0, rows, D), _draw(1, 4, D, 2, F) / D**0.5, _draw(2, 4, F, D) / F**0.5]
    one_M1 = jnp.ones((rows, 1), jnp.float32)
    sizes = jnp.asarray([70, 0, 129, 50], jnp.int32)

    def run(form: str, x: jax.Array, w_in: jax.Array, w_out: jax.Array, one: jax.Array) -> Any:
        return expert_mlp(x, w_in, w_out, sizes, implementation=form, one_M1=one)

    plain = "reference_e4m3" if choice.implementation in IN_E4M3 else "reference"
    own = partial(run, choice.implementation)
    have = _both_ways(own, [*(a.astype(dtype) for a in arrays), one_M1])
    exact = [a.astype(dtype).astype(jnp.float32) for a in arrays]
    _assert_close(have, _both_ways(partial(run, plain), [*exact, one_M1]), ROUNDING[dtype])


def _check_attention(choice: Choice, cfg: Config) -> None:
    model, dtype = cfg.model, cfg.model.dtype
    shape = 2, cfg.data.sequence_length, model.num_heads, model.head_width
    arrays = [_draw(seed, *shape, dtype=dtype) for seed in range(3)]
    segment_BT = jnp.zeros(shape[:2], jnp.int32)
    options = {"segment_BS": segment_BT, "window": None}
    have = _both_ways(partial(attention, implementation=choice.implementation, **options), arrays)
    exact = [a.astype(jnp.float32) for a in arrays]
    want = _both_ways(partial(attention, implementation="reference", **options), exact)
    _assert_close(have, want, ROUNDING[dtype])


def _check_quantize(choice: Choice, cfg: Config) -> None:
    """Checks the sum of four peers' quantised arrays."""
    x = _draw(0, 4, 64, 4 * BLOCK)

    def run(x: jax.Array, implementation: str) -> jax.Array:
        q = quantize(x, FORMAT, block=BLOCK, implementation=implementation)
        return dequantize_sum(q, FORMAT, x.shape[-1], implementation=implementation)

    _assert_quantized_alike(run, x, choice)


def _assert_quantized_alike(run: Callable, x: jax.Array, choice: Choice) -> None:
    """Compares `run(x, implementation)` of the chosen implementation with the reference."""
    jitted = jax.jit(run, static_argnums=1)
    # A division that is off in its last place may round to the number beside it, a step of 1/127.
    _assert_close(jitted(x, choice.implementation), jitted(x, "reference"), 2.0**-7)


def _check_rows(choice: Choice, cfg: Config) -> None:
    if choice.implementation == "separate":
        raise SkippedError(choice.reason)
    N, K, D = 64, 2, 8 * BLOCK
    x, order = _draw(0, N, D, dtype=cfg.model.dtype), np.random.default_rng(0).permutation(N * K)
    place_NK = jnp.asarray(np.argsort(order).reshape(N, K), jnp.int32)
    source_M, weight_NK = jnp.asarray(order // K, jnp.int32), jnp.abs(_draw(1, N, K))

    def run(x: jax.Array, implementation: str) -> Any:
        q = permute_quantize(x, source_M, FORMAT, block=BLOCK, implementation=implementation)
        rows = dequantize(q, FORMAT, D)
        y_ND = dequantize_combine(q, weight_NK, place_NK, FORMAT, D, implementation=implementation)
        return rows, y_ND

    _assert_quantized_alike(run, x, choice)


def _collective_checks(devices: Sequence[Any]) -> Iterator[Check]:
    """Yields a check of each collective over all devices, against NumPy."""
    n, axes = len(devices), ("device",)
    mesh = Mesh(np.asarray(devices), axes)
    x_PND = np.arange(n * n * 8, dtype=np.float32).reshape(n, n, 8)  # device p holds x[p]
    ring = [(p, (p + 1) % n) for p in range(n)]
    kinds: dict[str, tuple[Callable, np.ndarray]] = {
        "all_gather": (
            partial(wire.all_gather, axes=axes, dim=0),
            np.tile(x_PND.reshape(1, n * n, 8), (n, 1, 1)),
        ),
        "reduce_scatter": (
            partial(wire.reduce_scatter, axes=axes, dim=0),
            x_PND.sum(axis=0)[:, None],
        ),
        "all_reduce": (
            partial(wire.all_reduce, axes=axes),
            np.tile(x_PND.sum(axis=0)[None], (n, 1, 1)),
        ),
        "all_to_all": (partial(wire.all_to_all, axes=axes), x_PND.swapaxes(0, 1)),
        "ppermute": (partial(wire.ppermute, axes=axes, pairs=ring), np.roll(x_PND, 1, axis=0)),
    }

    def check(run: Callable, wanted: np.ndarray) -> None:
        if n == 1:
            raise SkippedError("there is one device")
        mapped = gloo.shard_map(lambda x_1ND: run(x_1ND[0])[None], mesh, P("device"), P("device"))
        np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(x_PND)), wanted)

    advice = "Links between devices are at fault, or their library: run again with NCCL_DEBUG=INFO."
    for kind, (run, wanted) in kinds.items():
        yield Check(f"{kind} over {n} devices", partial(check, run, wanted), advice)


def _run_checks(run: SmokeRun) -> Iterator[Check]:
    yield Check("expert layer in 4 chunks", partial(_check_chunks, run), "Set route_chunks=1.")
    yield Check(
        f"{STEPS} training steps",
        partial(_check_steps, run),
        "If kernels above hold, set kernels=auto and moe.implementation=blocked, and try again.",
    )
    yield Check(
        "save and restore",
        partial(_check_checkpoint, run),
        "Do not train to this file system: set run_dir to another.",
    )


def _check_chunks(run: SmokeRun) -> None:
    """Compares one chunk with four, with the gradients of tokens and weights."""
    cfg, spec, n = run.cfg, run.train_step.spec, run.mesh.size
    tokens, D, E, F = 64, cfg.model.width, cfg.moe.num_experts, cfg.moe.expert_hidden
    x, w_in = _draw(0, n * tokens, D, dtype=spec.dtype), _draw(1, E, D, 2, F) / D**0.5
    w_out = _draw(2, E, F, D) / F**0.5
    params = ExpertWeights(w_in.astype(spec.dtype), w_out.astype(spec.dtype))
    weight_NK, expert_NK = jax.lax.top_k(jax.nn.softmax(_draw(3, n * tokens, E)), 2)
    axes = spec.layout.expert_owner_axes
    # A capacity that drops nothing: the program then has no rounds, which take as long to compile.
    moe = dataclasses.replace(cfg.moe, capacity_factor=float(E))

    def layer(chunks: int) -> Any:
        hops = (Hop("all_to_all", axes),)
        route = Route("split", hops, chunks=chunks, chunks_backward=chunks)
        chunked = dataclasses.replace(spec, route=route)

        def both_ways(x: jax.Array, weight_NK: jax.Array, expert_NK: jax.Array, params: Any) -> Any:
            def forward(x: jax.Array, weight_NK: jax.Array, params: Any) -> jax.Array:
                return moe_ffn(x, weight_NK, expert_NK, params, moe, chunked)[0]

            y, pull = jax.vjp(forward, x, weight_NK, params)
            return y, pull(jnp.cos(y.astype(jnp.float32) + x.astype(jnp.float32)).astype(y.dtype))

        mapped = gloo.shard_map(both_ways, run.mesh, P(axes), P(axes))
        return jax.jit(mapped)(x, weight_NK, expert_NK, params)

    _assert_close(layer(4), layer(1), ROUNDING[spec.dtype])


def _check_steps(run: SmokeRun) -> None:
    _, losses = run.trained
    if not (np.all(np.isfinite(losses)) and losses[-1] < 0.9 * losses[0]):
        raise ArithmeticError(f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f}")


def _check_checkpoint(run: SmokeRun) -> None:
    """Checks that every array of the restored state is the same to the bit."""
    state, _ = run.trained
    with tempfile.TemporaryDirectory(prefix="moejax-smoke-") as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        try:
            checkpoints.save(STEPS, state, {})
            checkpoints.wait()
            saved, notes = newest(Path(folder), "full")
            if saved is None:
                raise OSError(f"nothing was found: {'; '.join(notes)}")
            restored = restore_state(saved, run.train_step.abstract)
        finally:
            checkpoints.close()
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
