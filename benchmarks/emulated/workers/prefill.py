"""One host of `prefill.py` and `decode.py`: calls of the engine of `moejax generate`.

Started by launch/emulate on every host of the emulated cluster. Builds every variant, checks that
those with the same experts give the same logits, and times them in turns as `exchange.py` does.
"""

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

# It joins the processes.
from benchmarks.emulated.workers.exchange import (
    Variant,
    compiled_once,
    count,
    measure,
    place,
    processes,
)
from moejax.config.load import from_dict
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.serve.programs import (
    LONG,
    NewTokens,
    Programs,
    build_programs,
    no_tokens,
)
from moejax.step.state import TrainState

GATHERED = {"gathered": True, "sharded": False}  # whether devices hold all that calls gather
CLOSE = 1e-5  # most that logits of variants differ, over the largest


def build(case: dict, kind: str, settings: dict, states: dict[tuple, TrainState]) -> Variant:
    """Compiles a call for full rows of new tokens.

    Args:
      kind: of GATHERED.
      states: weights by the experts' hidden width and their layout, which variants share.
    """
    cfg = from_dict({**case["config"], **settings})
    (rows, length), gathered = case["tokens"], GATHERED[kind]
    mesh = build_mesh(build_layout(cfg.mesh), jax.devices())
    form = {"slots": rows, "positions": LONG, "allowed": cfg.model.vocab_size}
    programs, unordered = (
        build_programs(cfg, m, "cpu", gathered, **form) for m in (mesh, mesh.abstract_mesh)
    )
    held = cfg.moe.expert_hidden, str(cfg.mesh), gathered
    if held not in states:
        states[held] = random_state(programs)
    state, tokens = states[held], new_tokens(programs, length)
    every = len(tokens.slot_R) == programs.slots * programs.devices
    placed = NewTokens(*(place(x, mesh, programs._rows) for x in tokens))
    caches = [programs.empty_cache()]
    program = compiled_once(programs.extend(every).lower(state, placed, caches[0]))
    shapes = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), t)
        for t in (tokens, caches[0])
    ]
    traced = unordered.extend(every).trace(unordered.train_step.abstract, *shapes)
    step = programs.single if length == 1 else programs.train_step
    facts = count(traced, program, step)

    def run() -> jax.Array:
        logits, caches[0] = program(state, placed, caches[0])
        return logits

    return Variant(run, facts)


def new_tokens(programs: Programs, length: int) -> NewTokens:
    """The first tokens of a prompt in every row, without padding."""
    rows = programs.rows(programs.slots, length)
    tokens = no_tokens(programs, rows, length)
    shape, vocabulary = tokens.token_RT.shape, programs.train_step.cfg.model.vocab_size
    ids_RT = np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)
    return tokens._replace(token_RT=ids_RT, count_R=np.full_like(tokens.count_R, length))


def random_state(programs: Programs) -> TrainState:
    """Weights that do not depend on their layout; gains are one, biases zero."""
    abstract = programs.train_step.abstract

    def drawn(path: Any, held: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        matrix = sum(size > 1 for size in held.shape) > 1

        if matrix:
            random = np.random.default_rng(zlib.crc32(name.encode()))
            values = random.standard_normal(held.shape, dtype=np.float32) / 32
        else:
            values = np.full(held.shape, 0.0 if "bias" in name else 1.0)
        values = values.astype(held.dtype)
        return jax.make_array_from_callback(held.shape, held.sharding, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(drawn, abstract)


def local(logits: jax.Array) -> np.ndarray:
    """This host's rows."""
    return np.concatenate([np.asarray(shard.data) for shard in logits.addressable_shards])


def check(variants: dict[str, Variant], settings: dict[str, dict]) -> None:
    """Adds to the facts how far logits are from the first variant's with the same experts."""
    first: dict[int, np.ndarray] = {}
    for name, variant in variants.items():
        logits = local(variant.run())
        known = first.setdefault(settings[name].get("moe.expert_hidden", 0), logits)
        difference = float(np.abs(logits - known).max() / np.abs(known).max())
        assert difference <= CLOSE, (name, difference)  # false too if it is not a number
        variant.facts["difference"] = difference


def main() -> None:
    """Runs the case."""
    path = Path(sys.argv[1])
    case = json.loads(path.read_text())
    variants, states = {}, {}
    for name, (kind, settings) in case["variants"].items():
        began = time.perf_counter()
        variants[name] = build(case, kind, settings, states)
        if processes.first:
            print(f"{name}: built in {time.perf_counter() - began:.0f} s", flush=True)
    processes.gather("built")  # gloo gives up on a peer that is half a minute late
    check(variants, {name: settings for name, (_, settings) in case["variants"].items()})
    found = measure(variants, case["rounds"], case["seldom"])
    result = {name: found[name] | variants[name].facts for name in variants}
    path.with_suffix(f".h{jax.process_index()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
