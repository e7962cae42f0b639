"""`moejax upcycle`: the dense MLPs of a checkpoint become experts, with the same loss at step 0.

An expert's hidden width F is that of the dense MLP over G, the granularity. Expert e holds shard
e % G of the MLP: hidden units e % G * F and the F - 1 after it. Experts G * j to G * j + G - 1 form
the virtual group j. They hold all shards and begin with one column of the router, so a token scores
them alike and chooses whole groups (K is a multiple of G). The K weights sum to `weight_scale`, so
the shards of a group of weight w at each expert give w times the dense output, and w_out is
multiplied by G / weight_scale. With G = 1 any choice gives the dense output.

This holds for softmax and for sigmoid scores, as both are renormalised, up to rounding: where two
groups tie to the last bit, a choice might take parts of both.

It writes OUT/0 and OUT/config.json, as an import does (`convert.importing`), piece by piece.

Source: Komatsuzaki et al. 2022 (copies); He et al. 2024, arXiv 2410.07524 (shards, virtual groups).
Megatron-LM's `upcycling_utils.py` spreads the factor over all three matrices of a gated MLP, and
silu then gives another output; here w_out alone has it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from rich.console import Console

from moejax.checkpoint.arrays import NewArray, StoredWeights
from moejax.checkpoint.find import Saved, locate
from moejax.config.checks import check
from moejax.config.checks.paths import check_plain
from moejax.config.checks.text import require
from moejax.config.fields import change, fields, short
from moejax.config.load import from_dict, parse_overrides
from moejax.config.pattern import ahead_parts
from moejax.config.schema import Config, ModelConfig
from moejax.convert.importing import (
    config_text,
    elements_each,
    free_run_dir,
    new_arrays,
    write_checkpoint,
)
from moejax.convert.output import bar, check_new_folder, check_space, written_beside
from moejax.errors import InputError, write_whole
from moejax.hf.families.family import differences
from moejax.hf.rules import BLOCK, ReadPart, stacks_of
from moejax.hf.views import Bounds
from moejax.runtime.start import join
from moejax.screen import screen

# Matrices of an expert, and the dimension of one expert's that the shards cut.
MATRICES = {"moe.w_in": 2, "moe.w_out": 0}


def upcycle(
    dense: Path,
    out: Path,
    *,
    dtype: str = "float32",
    noise: float = 0.0,
    seed: int = 0,
    overrides: Sequence[str] = (),
) -> None:
    """Writes a checkpoint with experts from a dense one, and a config to train it. No device.

    Several processes share the work.

    Args:
      dense: a run directory, or one checkpoint.
      dtype: dtype of the stored weights.
      noise: deviation of the noise on experts' matrices, as a share of the dense matrix's.
      seed: of routers and noise.
      overrides: settings of the new model and its run, as on the command line of a run.
    Raises:
      InputError: for a checkpoint that is no dense model's, or a model that would not give its
        loss, before anything is written.
    """
    check_new_folder(out)
    check_plain(out, f"--out {out}")
    require(0 <= noise < math.inf, f"--noise is {noise}. It is a share, 0 or above. Leave it out.")
    require(0 <= seed < 2**32, f"--seed is {seed}. It must be 0 to 2^32 - 1. Choose another.")
    with join() as processes:
        saved = locate(str(dense), "full", processes)
        cfg, source = config_for(saved, out, overrides), _config_of(saved)
        arrays = new_arrays(cfg, dtype)
        sizes = {new: math.prod(new.shape) for new in arrays.values()}
        needed = sum(size * np.dtype(new.dtype).itemsize for new, size in sizes.items())
        check_space(out, needed, processes)
        weights = Upcycled(StoredWeights(saved.path).read, source.model, cfg, noise, seed)
        sources = {new: partial(weights.piece, path) for path, new in arrays.items()}
        facts = {"upcycled_from": str(saved.path.absolute())}
        console = screen(stderr=True, quiet=not processes.first)
        with written_beside(out, processes) as beside:
            text = f"making experts of {saved.path}"
            with bar(console, text, elements_each(sources, processes)) as advance:
                write_checkpoint(sources, cfg, facts, beside, processes, advance)
            if processes.first:
                write_whole(beside / "config.json", config_text(cfg))
        parameters = sum(s for new, s in sizes.items() if new.key.startswith("params."))
        _say_done(parameters, source.model, cfg, out, console)
        processes.gather("done")


def _config_of(saved: Saved) -> Config:
    return from_dict(saved.manifest.get("config", {}))


def config_for(saved: Saved, out: Path, overrides: Sequence[str]) -> Config:
    """Returns the config of a run that begins with a dense model's weights as experts.

    Every layer has experts of the dense MLP's width, unless the overrides say otherwise.

    Raises:
      InputError: if the checkpoint is no dense model's; or names the setting with which the loss
        at step 0 would be another.
    """
    source, given = _config_of(saved), parse_overrides(overrides)
    require(
        not source.model.has_experts,
        f"{saved.path} has experts already. Only dense models (model.moe_every none) are upcycled. "
        "Train it as it is.",
    )
    require(
        source.lora.rank is None,
        f"{saved.path} holds adapters, no weights: it is of a run with `lora.rank` = "
        f"{source.lora.rank}. Name a checkpoint of all weights.",
    )
    hidden = source.model.mlp_hidden
    own = {
        "run_dir": free_run_dir(out.name),
        "checkpoint.init_from": str(out.absolute()),
        "model.moe_every": 1,
        "moe.expert_hidden": hidden,
    }
    cfg = change(source, own | given)
    if not cfg.model.has_dense_blocks and "model.mlp_hidden" not in given:
        cfg = change(cfg, {"model.mlp_hidden": fields()["model.mlp_hidden"].default})
    check(cfg)
    _check_same_rest(source, cfg)
    _check_exact(hidden, cfg)
    return cfg


def _check_same_rest(source: Config, cfg: Config) -> None:
    """Refuses changes of anything but experts, and of which layers have them."""
    free = {"model.moe_every", "model.first_dense_layers", "model.layer_mlps"}
    if ahead_parts(source.model)[0] == ahead_parts(cfg.model)[0]:  # of both its attention
        free |= {"model.ahead_block"}
    if not cfg.model.has_dense_blocks:
        free |= {"model.mlp_hidden"}
    changes = [
        f"{name}: {short(before)} -> {short(after)}"
        for name, before, after in differences(source, cfg)
        if name not in free and not name.startswith("moe.")
    ]
    # Not among what files of weights decide.
    ahead = source.model.predict_ahead, cfg.model.predict_ahead
    if ahead[0] != ahead[1]:
        changes.append(f"model.predict_ahead: {ahead[0]} -> {ahead[1]}")
    if changes:
        raise InputError(
            f"model differs from the dense one. {', '.join(changes)}. All but the experts is "
            "copied. Leave these out."
        )


def _check_exact(hidden: int, cfg: Config) -> None:
    """Refuses experts that would not give the output of a dense MLP of this hidden width."""
    moe, router = cfg.moe, cfg.moe.router
    E, K, F = moe.num_experts, moe.experts_per_token, moe.expert_hidden
    require(
        cfg.model.has_experts,
        "`model.moe_every` is none, so no layer gets experts. Leave it out.",
    )
    require(
        hidden % F == 0,
        f"`moe.expert_hidden` = {F} does not divide the dense MLP's hidden width {hidden}. Each "
        "expert holds a shard of it, or all. Choose a divisor.",
    )
    G = hidden // F
    counts = {
        "moe.num_experts": E,
        "moe.experts_per_token": K,
        "moe.num_experts / moe.router.num_groups": E // router.num_groups,
    }
    for name, count in counts.items():
        require(
            count % G == 0,
            f"`{name}` = {count} is not a multiple of {G}. `moe.expert_hidden` = {F} cuts the "
            f"dense MLP ({hidden}) into {G} shards, and a token needs all of them equally often. "
            "Choose a multiple, or wider experts.",
        )
    require(
        router.renormalize,
        "`moe.router.renormalize` is false. The weights of a token's experts then do not sum to "
        "one, and the loss would not be the dense model's. Leave it true.",
    )
    require(
        moe.num_shared_experts == 0,
        f"`moe.num_shared_experts` = {moe.num_shared_experts} adds to the dense model's output. "
        "Set it to 0.",
    )
    require(
        moe.capacity_factor is None,
        f"`moe.capacity_factor` = {moe.capacity_factor} may drop a token's experts, and the loss "
        "would not be the dense model's. Leave it out; the written config may be changed later.",
    )


class Upcycled:
    """The weights of a model with experts, made of a dense one's. Several threads may read."""

    def __init__(self, read: ReadPart, dense: ModelConfig, cfg: Config, noise: float, seed: int):
        """Takes the dense weights and their model, and the config of the new model.

        Args:
          noise, seed: as for `upcycle`.
        """
        self._read, self._dense, self._cfg = read, dense, cfg
        self._noise, self._seed = noise, seed
        self._granularity = dense.mlp_hidden // cfg.moe.expert_hidden
        self._factor = self._granularity / cfg.moe.router.weight_scale
        self._layers = stacks_of(cfg.model)
        self._places = {
            layer: (stack, repeat)
            for stack, layers in stacks_of(dense).items()
            for repeat, layer in enumerate(layers)
        }
        self._deviation = lru_cache(maxsize=2)(self._measure)
        self._measuring = Lock()

    def piece(self, path: str, part: Bounds, dtype: Any) -> np.ndarray:
        """Returns a part of one parameter or selection bias, [stacked layers, ...] in a block."""
        match = BLOCK.fullmatch(path)
        if match is None:
            return self._read(path, _slices(part)).astype(dtype)
        out = np.empty([stop - start for start, stop in part], dtype)
        for index, repeat in enumerate(range(*part[0])):
            layer = self._layers[match["stack"]][repeat]
            out[index] = self._of_layer(match["own"], layer, part[1:])
        return out

    def _of_layer(self, own: str, layer: int, part: Bounds) -> np.ndarray:
        """Returns a part of one layer's parameter, whose path below its block is `own`."""
        if not own.startswith("moe."):
            return self._of_dense(own, layer, part)
        if own in MATRICES:
            return np.stack([self._expert(own, layer, e, part[1:]) for e in range(*part[0])])
        if own == "moe.w_router":
            return self._router(layer)[_slices(part)]
        return np.zeros([stop - start for start, stop in part])  # biases

    def _of_dense(self, own: str, layer: int, part: Bounds) -> np.ndarray:
        stack, repeat = self._places[layer]
        return self._read(stack + own, (repeat, *_slices(part)))

    def _router(self, layer: int) -> np.ndarray:
        """Returns a layer's router, [D, E]: the experts of a virtual group have equal columns."""
        model, G = self._cfg.model, self._granularity
        shape = (model.width, self._cfg.moe.num_experts // G)
        drawn = np.random.default_rng([self._seed, layer]).standard_normal(shape, np.float32)
        return np.repeat(drawn * model.init_deviation, G, axis=1)

    def _expert(self, own: str, layer: int, expert: int, part: Bounds) -> np.ndarray:
        """Returns a part of an expert's matrix, of [D, U, F] or [F, D]."""
        cut = MATRICES[own]
        first = expert % self._granularity * self._cfg.moe.expert_hidden
        ranges = list(part)
        ranges[cut] = (first + part[cut][0], first + part[cut][1])
        dense = own.replace("moe.", "mlp.")
        values = self._of_dense(dense, layer, tuple(ranges)).astype(np.float32)
        if self._noise:
            with self._measuring:  # one thread measures, the others wait for its result
                deviation = self._noise * self._deviation(dense, layer)
            # Drawn by piece: the same for any number of processes. Zero would end a key unseen.
            starts = [start for start, _ in part]
            key = [self._seed, layer, *starts, expert, 1 + list(MATRICES).index(own)]
            drawn = np.random.default_rng(key).standard_normal(values.shape, np.float32)
            values += deviation * drawn
        return values * self._factor if own == "moe.w_out" else values

    def _measure(self, dense: str, layer: int) -> float:
        """Returns the standard deviation of a layer's dense matrix."""
        D, F = self._dense.width, self._dense.mlp_hidden
        shape = (D, 2, F) if dense == "mlp.w_in" else (F, D)
        total = squares = 0.0
        for part in NewArray(dense, shape, "float32").parts():
            values = self._of_dense(dense, layer, part).astype(np.float64)
            total, squares = total + values.sum(), squares + np.square(values).sum()
        count = math.prod(shape)
        return math.sqrt(max(0.0, squares / count - (total / count) ** 2))


def _slices(part: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in part)


def _say_done(
    parameters: int, dense: ModelConfig, cfg: Config, out: Path, console: Console
) -> None:
    """Prints what became of the MLPs, and the next command."""
    G, E = dense.mlp_hidden // cfg.moe.expert_hidden, cfg.moe.num_experts
    what = "the MLP" if G == 1 else f"{G} shards of the MLP"
    lines = (
        f"wrote {parameters:,} parameters to {out}; {cfg.model.expert_layers} of "
        f"{cfg.model.num_layers} layers have {E} experts: {E // G} copies of {what}",
        f"train:         moejax train --config {out / 'config.json'}",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
