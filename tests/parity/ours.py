"""Random models of moejax on any mesh, exported as a run's checkpoint is, and what they compute."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.checkpoint.writer import Checkpoints
from moejax.config.load import to_dict
from moejax.config.schema import Config, MeshConfig
from moejax.convert.exporting import export_run
from moejax.hf.families import family_named, family_of
from moejax.hf.families.family import from_settings
from moejax.hf.writer import plan_files
from moejax.step.state import Batch, TrainState, flat
from moejax.step.train_step import TrainStep
from tests.cases import place, step_for
from tests.hf.golden import run_config


@dataclass(frozen=True)
class Ours:
    """A train step, and a state with random weights."""

    family: str
    train_step: TrainStep
    state: TrainState


def config_for(case: dict, mesh: MeshConfig, tokens: tuple[int, int], **route) -> Config:
    """The settings of a run of a golden model's shapes, without router losses."""
    cfg = from_settings(family_of(case["config"]).read(case["config"]))
    return replace(run_config(cfg, mesh, tokens), **route)


def random_model(family: str, cfg: Config) -> Ours:
    """A model whose every weight is random; selection biases are if its files hold them."""
    train_step = step_for(cfg)
    abstract = train_step.abstract
    held = {file_tensor.path for file_tensor in tensors_of(family, train_step)}

    def leaf(path: str, shape) -> jax.Array:
        seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little")
        noise = np.random.default_rng(seed).uniform(-1, 1, shape.shape)
        if path.endswith("moe.bias"):
            values = 0.1 * noise if path in held else 0 * noise
        else:
            values = (1 if "norm" in path.rsplit(".", 1)[-1] else 0) + 0.3 * noise
        return jax.device_put(values.astype(shape.dtype), shape.sharding)

    def tree(shapes):
        leaves = [leaf(path, shape) for path, shape in flat(shapes).items()]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    params, bias = tree(abstract.params), tree(abstract.router_bias)
    return Ours(family, train_step, zeros._replace(params=params, router_bias=bias))


def tensors_of(family: str, train_step: TrainStep) -> list:
    """The tensors of the files of a model."""
    shapes = (train_step.abstract.params, train_step.abstract.router_bias)
    files = plan_files(family_named(family), train_step.model, *shapes, "float32")
    return [placed.tensor for file in files for placed in file.placed]


def export(ours: Ours, run: Path, out: Path) -> None:
    """Saves the weights as a run does, and exports the run."""
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    try:
        weights = ours.state._replace(optimizer=None, reduction=None)
        checkpoints.save(0, weights, {"config": to_dict(ours.train_step.cfg)})
    finally:
        checkpoints.close()
    export_run(run, out, dtype="float32", family=ours.family)


def logits(ours: Ours, token_BT: np.ndarray) -> np.ndarray:
    """The logits of all positions, [B, T, V]."""
    found = [logits_at(ours, token_BT, length) for length in range(1, token_BT.shape[1] + 1)]
    return np.stack(found, axis=1)


def logits_at(ours: Ours, token_BT: np.ndarray, length: int) -> np.ndarray:
    """The logits after so many tokens, [B, V]."""
    tokens = jax.device_put(token_BT, ours.train_step.batch_sharding)
    return np.asarray(ours.train_step.next_logits(ours.state, (tokens, length)))


def continued(ours: Ours, prompt: list[int], shape: tuple[int, int]) -> list[int]:
    """The greedy continuation, up to the length of a batch's sequences."""
    token_BT = np.zeros(shape, np.int32)
    token_BT[:, : len(prompt)] = prompt
    for length in range(len(prompt), shape[1]):
        token_BT[:, length] = logits_at(ours, token_BT, length)[0].argmax()
    return token_BT[0, len(prompt) :].tolist()


def loss_and_gradients(ours: Ours, token_BT: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of the next tokens, and its gradients by the names of tensors in files."""
    parts, gradients = parts_and_gradients(ours, token_BT)
    return float(parts.nll), gradients


def parts_and_gradients(ours: Ours, token_BT: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
    """The same with all that a step tells of its loss."""
    target_BT = np.concatenate([token_BT[:, 1:], np.full_like(token_BT[:, :1], -1)], axis=1)
    batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
    gradients, parts = ours.train_step.gradients(ours.state, place(ours.train_step, batch))
    arrays, found = flat(gradients), {}
    for tensor in tensors_of(ours.family, ours.train_step):
        if tensor.path in arrays:
            values = tensor.view.to_tensor(np.asarray(arrays[tensor.path])[tensor.index])
            put_tensor(found, tensor, values)
    return parts, found


def put_tensor(found: dict[str, np.ndarray], tensor: Any, values: np.ndarray) -> None:
    """Puts a tensor's values among those by name; several parameters may have rows of it."""
    if tensor.rows is None:
        found[tensor.name] = values
        return
    whole, at = found.setdefault(tensor.name, np.zeros(tensor.shape, values.dtype)), 0
    for start, stop in tensor.rows.pieces(0, len(values)):
        whole[start:stop] = values[at : at + stop - start]
        at += stop - start
