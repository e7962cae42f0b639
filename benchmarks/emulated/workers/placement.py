"""One host of `placement.py`: batches of the engine of `moejax generate`, with several tables.

Started by launch/emulate on every host of the emulated cluster. Every table has a state of its own;
all run in turns. Takes the file of a case and writes its own measurements beside it.
"""

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.emulated.placement import PLAN, Told, expected, learned, load_of, sequences

# It joins the processes.
from benchmarks.emulated.workers.exchange import SENT, compiled_once, place, processes
from benchmarks.emulated.workers.prefill import CLOSE, local
from moejax.comm import wire
from moejax.comm.cpu import gloo
from moejax.config.load import from_dict
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.serve.experts.places import Places
from moejax.serve.programs import LONG, NewTokens, Programs, build_programs, no_tokens
from moejax.step.state import TrainState

MEASURED = ("seconds", "sent", "moved", "rounds", "difference")


def build(case: dict) -> Programs:
    """Describes a call for full rows of new tokens."""
    cfg = from_dict(case["config"])
    mesh = build_mesh(build_layout(cfg.mesh), jax.devices())
    form = {"slots": case["tokens"][0], "positions": LONG, "allowed": cfg.model.vocab_size}
    return build_programs(cfg, mesh, "cpu", True, **form, expert_slots=1)


def put(values: np.ndarray, held: Any) -> jax.Array:
    """An array as a state holds it."""
    values = values.astype(held.dtype)
    return jax.make_array_from_callback(held.shape, held.sharding, lambda index: values[index])


def routed_state(programs: Programs) -> TrainState:
    """Weights with which layer l's router reads its logits from channels l * E on.

    No layer writes into the channels that routers read.
    """
    cfg = programs.homes.cfg
    E, channels, number = (
        cfg.moe.num_experts,
        cfg.model.num_layers * cfg.moe.num_experts,
        iter(range(99)),
    )

    def drawn(path: Any, held: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        random = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("w_router"):
            values = np.zeros(held.shape)
            first = next(number) * E
            values[0, first + np.arange(E), np.arange(E)] = 1
        elif sum(size > 1 for size in held.shape) > 1:
            values = random.standard_normal(held.shape, dtype=np.float32) / 32
            if name.endswith(("w_out", "w_o")):
                values[..., :channels] = 0
        else:
            values = np.full(held.shape, 0.0 if "bias" in name else 1.0)
        return put(values, held)

    return jax.tree_util.tree_map_with_path(drawn, programs.homes.abstract)


def embeddings(told: Told, experts: int, held: Any) -> jax.Array:
    """The table of a batch in which every token has a row: logits of its choices, and noise."""
    N, L, K = told.expert_NLK.shape
    values = np.random.default_rng(0).standard_normal(held.shape, dtype=np.float32)
    values[:, : L * experts] = 0
    for layer in range(L):
        rank_NK = 4 - 0.5 * np.arange(K) / K
        values[np.arange(N)[:, None], layer * experts + told.expert_NLK[:, layer]] = rank_NK
    return put(values, held)


def with_embeddings(state: TrainState, table: jax.Array) -> TrainState:
    """A state with another table of embeddings."""
    embedding = state.params["embedding"] | {"table": table}
    return state._replace(params=state.params | {"embedding": embedding})


def timed(case: dict, programs: Programs) -> dict[str, dict[str, list]]:
    """Runs every batch with every table, in turns; returns what was measured of each."""
    cfg, mesh = programs.homes.cfg, programs.homes.mesh
    E, everywhere = cfg.moe.num_experts, jax.make_mesh((jax.device_count(),), ("all",))
    meet = jax.jit(gloo.shard_map(lambda x: wire.all_reduce(x, ("all",)), everywhere, P(), P()))
    tokens = no_tokens(programs, programs.slots, case["tokens"][1])
    ids_RT = np.arange(tokens.token_RT.size, dtype=np.int32).reshape(tokens.token_RT.shape)
    count_R = np.full_like(tokens.count_R, case["tokens"][1])
    tokens = tokens._replace(token_RT=ids_RT, count_R=count_R)
    placed = NewTokens(*(place(x, mesh, programs._rows) for x in tokens))
    names = list(case["variants"])
    places = {name: Places(programs, processes) for name in names}
    states = {name: one.at_home(routed_state(programs)) for name, one in places.items()}
    cache = programs.empty_cache()
    program = compiled_once(programs.extend(True).lower(states[names[0]], placed, cache))
    found: dict[str, dict[str, list]] = {name: {kind: [] for kind in MEASURED} for name in names}
    held, first = programs.homes.abstract.params["embedding"]["table"], learned(case["name"])
    told_S = sequences(case["name"], case["hosts"])
    numbers = [(told, n) for told in told_S for n in range(first, len(told))]
    for turn, (told, number) in enumerate(numbers[: case["rounds"]]):
        table, logits = embeddings(told[number], E, held), None
        load_LE = load_of(told[number].expert_NLK, E)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wanted_LE = expected(name, number, told, E)
            jax.block_until_ready(meet(1.0))
            began = time.perf_counter()
            moved = 0.0
            if wanted_LE is not None:
                states[name] = places[name].place(states[name], wanted_LE, PLAN)
                jax.block_until_ready(meet(1.0))
                moved = time.perf_counter() - began
            state = with_embeddings(states[name], table)
            jax.block_until_ready(meet(1.0))
            before, began = int(SENT.read_text()), time.perf_counter()
            out, cache, loads = jax.block_until_ready(program(state, placed, cache))
            seconds = time.perf_counter() - began
            jax.block_until_ready(meet(1.0))  # what left here has arrived there
            sent = int(SENT.read_text()) - before
            counted = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), loads)
            assert (counted.load_LE == load_LE).all(), "tokens choose something else"
            logits = local(out) if logits is None else logits
            difference = float(np.abs(local(out) - logits).max() / np.abs(logits).max())
            assert difference <= CLOSE, (name, difference)
            rounds = int(counted.rounds_L.sum())
            for kind, x in zip(MEASURED, (seconds, sent, moved, rounds, difference), strict=True):
                found[name][kind].append(x)
    return found


def main() -> None:
    """Runs the case."""
    path = Path(sys.argv[1])
    case = json.loads(path.read_text())
    found = timed(case, build(case))
    path.with_suffix(f".h{jax.process_index()}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
