"""One host of `exchange.py`: builds one expert layer on several routes and times them in turns.

Started by launch/emulate on every host of the emulated cluster. Each round runs every variant
twice, in rotated order, all hosts in step, and times the second run, which finds its memory at hand
as in training; what this host put on its link meanwhile is read from the kernel. Takes the file of
a case and writes its own measurements beside it.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moejax.runtime.start import join

processes = join()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax._src import cache_key  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from benchmarks.emulated.choices import choices as choices_of  # noqa: E402
from benchmarks.waits import register, timed_experts  # noqa: E402
from moejax.comm import wire  # noqa: E402
from moejax.comm.codecs.codec import Codec, build_codec  # noqa: E402
from moejax.comm.cpu import gloo  # noqa: E402
from moejax.comm.tokens.swap import PIECES, send  # noqa: E402
from moejax.comm.weights.path import class_of, compressible, parts_shape, path_of  # noqa: E402
from moejax.config.load import from_dict  # noqa: E402
from moejax.layout.layout import Layout, build_layout  # noqa: E402
from moejax.layout.mesh import build_mesh  # noqa: E402
from moejax.moe.layer import MoE, RouterBias  # noqa: E402
from moejax.moe.sizes import needed, usual_sizes  # noqa: E402
from moejax.plan.trace.reader import Collective, collectives  # noqa: E402
from moejax.step.state import Batch  # noqa: E402
from moejax.step.train_step import TrainStep, build_step  # noqa: E402

# JAX's cache keeps a program by process as well. All hosts are on this machine: they share it.
cache_key._hash_accelerator_config = lambda hashed, devices: None
SENT = Path("/sys/class/net/net0/statistics/tx_bytes")
COLLECTIVES = {
    "all_to_all": partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    "all_gather": partial(wire.all_gather, dim=0),
    "reduce_scatter": partial(wire.reduce_scatter, dim=0),
    "all_reduce": wire.all_reduce,
    "ppermute": partial(wire.ppermute, pairs=[(0, 1)]),  # to the next stage
}


class Variant(NamedTuple):
    """Something to time, and what is known of it beforehand."""

    run: Callable[[], Any]
    facts: dict[str, float]
    # What comes before and after a run and is not timed.
    prepare: Callable[[], Any] = lambda: None
    forget: Callable[[], Any] = lambda: None


def build(case: dict, measure: str, settings: dict) -> Variant:
    """Compiles one variant: collective, all_to_all, forward, both (directions), step, or codecs.

    Args:
      settings: of the config; `seconds_a_row` puts waits in place of the experts, `steps` is how
        many a run has. Of a collective its kind, axes and dtype.
    """
    settings = dict(settings)
    if measure == "collective":
        return build_collective(case, **settings)
    with timed_experts(settings.pop("seconds_a_row", None)):
        return build_variant(case, measure, settings)


def build_variant(case: dict, measure: str, settings: dict) -> Variant:
    """As `build`; all settings are of the config, but for these.

    `choices`: see `choices.py`. `alone`: each host trains by itself, and sends nothing.
    """
    choices, steps = settings.pop("choices", None), settings.pop("steps", 1)
    alone = settings.pop("alone", False)
    devices = jax.local_devices() if alone else jax.devices()
    cfg = from_dict({**case["config"], **settings})
    train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), "cpu")
    if measure == "step":
        found = step_variant(train_step, choices, steps)
        found.facts["tokens"] *= jax.process_count() if alone else 1
        return found
    if measure == "codecs":
        return build_codecs(train_step)
    x_BTD = make_tokens(case["tokens"], cfg.model.width)
    layout = train_step.layout
    owned = P(layout.token_axes, layout.tensor)
    x = place(x_BTD, train_step.mesh, owned)
    if measure == "all_to_all":
        return build_all_to_all(train_step, x)
    params, specs, call = build_layer(train_step)

    def both(params: Any, x_BtD: jax.Array) -> Any:
        y_BtD, pull = jax.vjp(call, params, x_BtD)
        return y_BtD, pull(x_BtD)

    body, out_specs = (call, owned) if measure == "forward" else (both, (owned, (specs, owned)))
    program, facts = compiled(body, (specs, owned), out_specs, (params, x), train_step)
    passes = 2 if measure == "forward" else 4
    choice_BTK = np.argsort(-x_BTD[..., : cfg.moe.num_experts])[..., : cfg.moe.experts_per_token]
    facts["least"] = least_bytes(choice_BTK, train_step) * passes
    if train_step.spec.route.trim:
        facts["payload"] = trimmed_bytes(train_step, choice_BTK) * passes
        facts["counted"] += facts["payload"]
        if train_step.spec.route.merges:  # router weights go out with rows, gradients back
            share = cfg.moe.experts_per_token / cfg.model.width
            facts["metadata"] += facts["payload"] * share / 2
            facts["counted"] += facts["payload"] * share / 2
    return Variant(lambda: program(params, x), facts)


def make_tokens(shape: list[int], width: int) -> np.ndarray:
    """Tokens [B, T, D] whose first E channels, all different, are their router logits."""
    return np.random.default_rng(0).standard_normal((*shape, width), dtype=np.float32)


def place(values: np.ndarray, mesh: Any, spec: P) -> jax.Array:
    """A global array of which each host makes its own part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def build_layer(train_step: TrainStep) -> tuple[Any, Any, Callable]:
    """The expert layer's weights, their specs, and the per-device (weights, x) -> y."""
    cfg, layout = train_step.cfg, train_step.layout
    model = nnx.eval_shape(lambda: MoE(cfg.model, cfg.moe, train_step.spec, nnx.Rngs(0)))
    graph, state, balance = nnx.split(model, nnx.Param, RouterBias)
    specs, params = {}, {}
    for (name,), param in nnx.to_flat_state(state):
        dims = param.get_metadata("dims")
        specs[name] = layout.param_spec(dims, len(dims))
        values = np.random.default_rng(1).standard_normal(param.shape, dtype=np.float32) / 8
        # The router reads a token's logits from its first channels.
        values = np.eye(*param.shape, dtype=np.float32) if name == "w_router" else values
        params[name] = place(values, train_step.mesh, specs[name])
    bias = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.to_pure_dict(balance))

    def call(params: Any, x_BtD: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, params, bias)
        return layer(x_BtD, layer.weights())[0]

    return params, specs, call


def build_collective(case: dict, kind: str, axes: list[str], dtype: str) -> Variant:
    """One collective of arrays of about 4 MiB a device."""
    cfg = from_dict(case["config"])
    train_step = build_step(cfg, build_mesh(build_layout(cfg.mesh), jax.devices()), "cpu")
    everywhere, devices = P(train_step.layout.mesh_axes), jax.device_count()
    columns = 2**22 // devices // jnp.dtype(dtype).itemsize
    values = np.ones((devices * devices, columns), jnp.dtype(dtype))
    x = place(values, train_step.mesh, everywhere)
    operation = COLLECTIVES[kind]

    def body(x: jax.Array) -> jax.Array:
        return operation(x, tuple(axes))

    program, facts = compiled(body, (everywhere,), everywhere, (x,), train_step)
    return Variant(lambda: program(x), facts)


def build_all_to_all(train_step: TrainStep, x: jax.Array) -> Variant:
    """The first exchange of the route alone, with buckets of the layer's size."""
    cfg, layout, route = train_step.cfg, train_step.layout, train_step.spec.route
    tokens = x.size // cfg.model.width // layout.size(layout.mesh_axes)
    tokens *= layout.size(layout.tensor) if route.replicated else 1
    (hop, *_), (rows, *_) = route.exchanges, usual_sizes(route, layout, cfg.moe, tokens=tokens).rows
    shape = (layout.size(layout.mesh_axes), hop.peers(layout) * rows, cfg.model.width)
    buckets = place(np.ones(shape, np.float32), train_step.mesh, P(layout.mesh_axes))
    spec = P(layout.mesh_axes)
    program, facts = compiled(lambda x: send(x, hop, layout), (spec,), spec, (buckets,), train_step)
    return Variant(lambda: program(buckets), facts)


def step_variant(train_step: TrainStep, choices: str | None = None, steps: int = 1) -> Variant:
    """The whole train step, on random tokens; with named choices of experts, two steps by turns.

    Args:
      steps: of a run.
    """
    shape = train_step.abstract_batch().token_BT.shape
    token_BT = np.random.default_rng(0).integers(
        0, train_step.cfg.model.vocab_size, shape, np.int32
    )
    arrays = (token_BT, np.roll(token_BT, -1, axis=1), np.zeros_like(token_BT))
    spec = train_step.layout.token_spec()
    batch = Batch(*(place(x, train_step.mesh, spec) for x in arrays))
    batches = [batch]
    if choices is not None:
        experts = (place(x, train_step.mesh, spec) for x in choices_of(choices))
        batches = [batch._replace(expert_BTLK=x) for x in experts]
    unordered = build_step(train_step.cfg, train_step.mesh.abstract_mesh, "cpu")
    traced = unordered.step.trace(unordered.abstract, unordered.abstract_batch())
    program = compiled_once(train_step.step.lower(train_step.abstract, batches[0]))
    facts = count(traced, program, train_step)
    facts["tokens"] = float(np.prod(shape)) * steps
    kept = []  # the state: those of all variants at a time would fill the memory
    turn = [0]

    def prepare() -> None:
        turn[0] = 0
        kept.append(jax.block_until_ready(train_step.init()))

    def run() -> Any:
        metrics: Any = None
        for _ in range(steps):
            kept[0], metrics = program(kept[0], batches[turn[0] % len(batches)])
            turn[0] += 1
        if choices is not None:
            facts["rounds"] = float(np.asarray(metrics.uneven_L3)[:, 2].sum())
        return metrics

    return Variant(run, facts, prepare, kept.clear)


def build_codecs(train_step: TrainStep) -> Variant:
    """What the codecs of a step's gradients cost: as the step runs them, with nothing sent."""
    layout, programs = train_step.layout, []
    everywhere, devices = P(layout.mesh_axes), layout.size(layout.mesh_axes)
    params = jax.tree.leaves(train_step.abstract.params)
    for dims, param in zip(jax.tree.leaves(train_step.dims), params, strict=True):
        spec = getattr(train_step.spec.codecs, class_of(dims))
        if spec is None or not path_of(dims, layout).slow or not compressible(dims):
            continue
        shards, copies, n = parts_shape(param.size, dims, layout)
        body = partial(run_codec, codec=build_codec(spec), copies=copies)
        mapped = gloo.shard_map(body, train_step.mesh, everywhere, everywhere)
        x = place(np.ones((devices * shards * copies, n), np.float32), train_step.mesh, everywhere)
        programs.append((jax.jit(mapped).lower(x).compile(), x))
    return Variant(lambda: [program(x) for program, x in programs], {"counted": 0, "temporary": 0})


def run_codec(x_Pn: jax.Array, *, codec: Codec, copies: int) -> jax.Array:
    """Encodes parts, decodes as many, encodes their sum, decodes one of it from each copy."""
    step, n = jnp.int32(0), x_Pn.shape[1]
    state = jnp.zeros((len(x_Pn), codec.state_size(n)))
    payload, kept = codec.encode(x_Pn, state, step)
    total_1n = jnp.sum(codec.decode(payload, n), axis=0, keepdims=True)
    payload, kept_too = codec.encode(total_1n, kept[:1], step)
    sent = jax.tree.map(partial(jnp.repeat, repeats=copies, axis=0), payload)
    return jnp.stack([jnp.sum(x) for x in (codec.decode(sent, n), kept, kept_too)])


def compiled_once(lowered: Any) -> Any:
    """Compiled by process 0; the others, on the same machine, then find it in its cache."""
    program = lowered.compile() if processes.first else None
    processes.gather("compiled")
    return program or lowered.compile()


def compiled(
    body: Callable, in_specs: tuple, out_specs: Any, arguments: tuple, train_step: TrainStep
) -> tuple[Callable, dict]:
    """Compiles per-device code; counts what it sends over a host's link."""
    mapped = gloo.shard_map(body, train_step.mesh, in_specs, out_specs)
    program = compiled_once(jax.jit(mapped).lower(*arguments))
    unordered = gloo.shard_map(body, train_step.mesh.abstract_mesh, in_specs, out_specs)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return program, count(jax.jit(unordered).trace(*shapes), program, train_step)


def count(traced: Any, program: Any, train_step: TrainStep) -> dict:
    """What the traced program, as it is before `comm.cpu.gloo`, sends over a host's link."""
    calls = collectives(traced.jaxpr.jaxpr)
    if train_step.spec.route.trim:  # how many of the rows travel is for the routing to say
        calls = [c for c in calls if c.kind != "all_to_all" or c.dtype.startswith("uint")]
    layout = train_step.layout
    sent = [(c, link_bytes(c, layout)) for c in calls]
    # Stages lie across hosts: of a send along the chain, one end has nothing to send.
    stages = range(layout.size(layout.stage))
    return {
        "counted": max(sum(n for c, n in sent if s in (c.senders or stages)) for s in stages),
        "exchanged": sum(n for c, n in sent if c.kind == "all_to_all"),
        "metadata": sum(n for c, n in sent if c.kind == "all_to_all" and c.dtype[:4] == "uint"),
        "temporary": program.memory_analysis().temp_size_in_bytes,
    }


def link_bytes(call: Collective, layout: Layout) -> float:
    """Bytes that one host's devices put on its link for a collective.

    Rings, but for an all-to-all, and for a transfer to the next stage, on another host.
    """
    n, nodes = layout.size(call.axes), layout.size(layout.between_nodes(call.axes))
    if nodes == 1:
        return 0
    devices = jax.local_device_count()
    if call.kind == "all_to_all":
        return call.calls * call.bytes * (1 - 1 / nodes) * devices
    rings = devices / (n / nodes)
    if call.kind == "ppermute":  # a chain leaves a host at one of its devices
        return call.calls * call.bytes * rings
    turns = {"all_reduce": 2, "all_max": 2}.get(call.kind, 1)
    return call.calls * call.bytes * turns * (n - 1) / n * rings


def by_device(choice_BTK: np.ndarray, layout: Layout) -> np.ndarray:
    """The choices [devices, N, K] of each device's own tokens, in mesh order."""
    B, T, K = choice_BTK.shape
    b, t = layout.size(layout.token_axes), layout.size(layout.tensor)
    cut = choice_BTK.reshape(b, B // b, t, T // t, K)
    return np.swapaxes(cut, 1, 2).reshape(b * t, -1, K)


def least_bytes(choice_BTK: np.ndarray, train_step: TrainStep) -> float:
    """Rows that must leave a host if each token goes once to each other host that needs it."""
    layout, moe = train_step.layout, train_step.cfg.moe
    hosts = layout.size(layout.slow)
    host_HNK = by_device(choice_BTK, layout).reshape(hosts, -1, moe.experts_per_token)
    host_HNK = host_HNK // (moe.num_experts // hosts)
    needs_HNH = (host_HNK[..., None] == np.arange(hosts)).any(axis=2)
    leaving = [needs_HNH[h].sum() - needs_HNH[h, :, h].sum() for h in range(hosts)]
    return float(max(leaving)) * 4 * train_step.cfg.model.width


def trimmed_bytes(train_step: TrainStep, choice_BTK: np.ndarray) -> float:
    """What one pass of rows, or of results, of a trimmed route puts on a host's link."""
    layout, route, moe = train_step.layout, train_step.spec.route, train_step.cfg.moe
    choice_ANK = by_device(choice_BTK, layout)
    spec = P(layout.mesh_axes)
    mapped = gloo.shard_map(
        lambda c_ANK: needed(c_ANK[0], route, layout, num_experts=moe.num_experts),
        train_step.mesh,
        spec,
        P(),
    )
    need = np.asarray(jax.jit(mapped)(place(choice_ANK.astype(np.int32), train_step.mesh, spec)))
    sizes = usual_sizes(route, layout, moe, tokens=choice_ANK.shape[1])
    total = 0.0
    for hop, rows, filled in zip(route.exchanges, sizes.rows, need, strict=False):
        step = math.ceil(rows / PIECES)
        sent = math.ceil(filled / step) * step * hop.peers(layout) * 4 * train_step.cfg.model.width
        total += link_bytes(Collective("all_to_all", hop.axes, "float32", sent, 1), layout)
    return total


def measure(
    variants: dict[str, Variant], rounds: int, seldom: list[str]
) -> dict[str, dict[str, list]]:
    """Runs the variants in rounds; returns seconds and bytes sent of each run, on this host.

    Args:
      seldom: those that run in every third round.
    """
    every = jax.make_mesh((jax.device_count(),), ("all",))
    meet = jax.jit(gloo.shard_map(lambda x: wire.all_reduce(x, ("all",)), every, P(), P()))
    names = list(variants)
    found: dict[str, dict[str, list]] = {name: {"seconds": [], "sent": []} for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in seldom and number % 3:
                continue
            variants[name].prepare()
            jax.block_until_ready(variants[name].run())
            jax.block_until_ready(meet(1.0))
            before, began = int(SENT.read_text()), time.perf_counter()
            jax.block_until_ready(variants[name].run())
            seconds = time.perf_counter() - began
            jax.block_until_ready(meet(1.0))  # what left here has arrived there
            variants[name].forget()
            found[name]["seconds"].append(seconds)
            found[name]["sent"].append(int(SENT.read_text()) - before)
    return found


def main() -> None:
    """Runs the case."""
    path = Path(sys.argv[1])
    case = json.loads(path.read_text())
    variants = {}
    if any("seconds_a_row" in settings for _, settings in case["variants"].values()):
        register()
    for name, (kind, settings) in case["variants"].items():
        began = time.perf_counter()
        variants[name] = build(case, kind, settings)
        if jax.process_index() == 0:
            print(f"{name}: built in {time.perf_counter() - began:.0f} s", flush=True)
    processes.gather("built")  # gloo gives up on a peer that is half a minute late
    found = measure(variants, case["rounds"], case["seldom"])
    result = {name: found[name] | variants[name].facts for name in variants}
    path.with_suffix(f".h{jax.process_index()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
