"""`moejax hf import`: a folder of weights becomes a checkpoint and a config to train with.

It writes:

    OUT/
      0/            checkpoint of step 0: weights alone, with a manifest
      config.json   settings for `moejax train --config`; checkpoint.init_from names OUT
      hf/           config.json, tokenizer and texts of the folder, which an export copies
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.filesize import decimal

from moejax.checkpoint.arrays import NewArray, PieceWriter, store_of
from moejax.checkpoint.disk_space import naming_full_disk, quiet_about_full_disks
from moejax.checkpoint.manifest import digest_of_pieces
from moejax.checkpoint.writer import save_written
from moejax.config.checks import check
from moejax.config.checks.gradients import has_fixed_weight
from moejax.config.checks.paths import check_plain
from moejax.config.fields import fields, get_value
from moejax.config.load import override, to_dict
from moejax.config.schema import Config
from moejax.convert.output import bar, check_new_folder, check_space, written_beside
from moejax.errors import write_whole
from moejax.hf.config import check_same_model, config_of
from moejax.hf.families import family_of
from moejax.hf.in_flight import map_in_flight
from moejax.hf.load import LoadPlan, plan_load, read_bounds
from moejax.hf.model import describe_anywhere
from moejax.hf.origin import ORIGIN, copy_small_files, small_files
from moejax.hf.reader import Folder
from moejax.hf.views import Bounds
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import screen
from moejax.step.state import flat

LONGEST = 2048  # positions of a sequence in the written config
LEARNING_RATE = 1e-5  # for weights that are trained already
HELD = 2  # a piece, and at most as many bytes of the tensors that it is read from
# Returns a part of an array: its bounds, and its dtype. Several threads call it.
ReadPiece = Callable[[Bounds, Any], np.ndarray]


def import_folder(
    path: Path, out: Path, *, dtype: str = "float32", overrides: Sequence[str] = ()
) -> None:
    """Writes a checkpoint of a folder's weights, on all devices of all processes.

    Args:
      dtype: dtype of the stored weights; runs restore them to float32.
      overrides: settings of the written config, as on the command line of a run.
    Raises:
      InputError: for anything wrong with the folder, before a device is touched.
    """
    check_new_folder(out)
    check_plain(out, f"--out {out}")
    with Folder(path) as folder:
        cfg = config_for(folder, out, overrides)
        check(cfg, trained=False)
        small_files(path)
        with join() as processes:
            console = screen(stderr=True, quiet=not processes.first)
            plan = processes.together(lambda: plan_load(folder, *describe_anywhere(cfg)))
            needed = elements_of(plan) * jnp.dtype(dtype).itemsize
            check_space(out, needed, processes)
            arrays = new_arrays(cfg, dtype)
            sources = {
                new: partial(read_bounds, plan, folder, path) for path, new in arrays.items()
            }
            facts = {"imported_from": str(path.absolute())}
            text = f"reading {decimal(folder.total_bytes)} from {path}"
            with written_beside(out, processes) as beside:
                with bar(console, text, elements_each(sources, processes)) as advance:
                    write_checkpoint(sources, cfg, facts, beside, processes, advance)
                if processes.first:
                    copy_small_files(path, beside / ORIGIN)
                    write_whole(beside / "config.json", config_text(cfg))
            _say_done(folder, plan, cfg, out, console)
            processes.gather("done")


def config_for(folder: Folder, out: Path, overrides: Sequence[str]) -> Config:
    """Returns the config of a run that begins with a folder's weights.

    Raises:
      InputError: if the folder's model cannot be computed here, or an override changes it.
    """
    length = folder.config.get("max_position_embeddings")
    length = LONGEST if type(length) is not int else max(1, min(LONGEST, length))
    training = (
        f"run_dir={free_run_dir(out.name)}",
        f"checkpoint.init_from={out.absolute()}",
        f"model.dtype={'bfloat16' if folder.narrow else 'float32'}",
        f"optimizer.learning_rate={LEARNING_RATE}",
        f"data.sequence_length={length}",
        "data.source=tokens",
        f"data.train_files=data/{out.name}.train.bin",
        f"data.eval_files=data/{out.name}.eval.bin",
    )
    cfg = override(config_of(folder), (*training, *overrides))
    advice = "An import keeps the model. Leave these out; the written config may be changed later."
    check_same_model(folder, cfg, advice)
    return cfg


def free_run_dir(name: str) -> str:
    """Returns a directory below runs/ that no run has taken."""
    ends = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    return next(path for end in ends if not Path(path := f"runs/{name}{end}").exists())


def elements_of(plan: LoadPlan) -> int:
    """Returns the number of parameters, without those in `plan.zeros`."""
    parameters = plan.parameters.values()
    return sum(math.prod(p.shape) for p in parameters if p.path not in plan.zeros)


def elements_each(arrays: Iterable[NewArray], processes: Processes) -> int:
    """Returns about how many elements each process writes of some arrays."""
    return sum(math.prod(array.shape) for array in arrays) // processes.count


def write_checkpoint(
    sources: Mapping[NewArray, ReadPiece],
    cfg: Config,
    facts: Mapping[str, str],
    beside: Path,
    processes: Processes,
    progress: Callable[[int], None],
) -> None:
    """Writes weights as step 0, each process some of their pieces.

    Args:
      sources: as for `write_pieces`.
      facts: entries of the manifest that say where the weights are from.
      beside: directory that gets the step `0`.
      progress: as for `write_pieces`.
    """
    quiet_about_full_disks()
    stores = beside / "stores"
    with naming_full_disk(beside, 0):
        written = processes.together(
            lambda: write_pieces(sources, stores / "weights", processes, progress)
        )
        counters = [NewArray(name, (), "int32") for name in ("step", "skipped")]
        zeros = dict.fromkeys(counters, lambda part, dtype: np.zeros((), dtype))
        write_pieces(zeros, stores / "counters", processes)
        manifest: dict[str, Any] = {
            "config": to_dict(cfg),
            **facts,
            "mesh": {},
            "reduction": None,
            "data_position": 0,
            "jax": jax.__version__,
            "numbers": digest_of_pieces(processes.gather(written)),
        }
        items = {"counters": counters, "weights": list(sources)}
        save_written(beside / "0", items, stores, manifest, processes)
    processes.gather("moved")
    if processes.first:
        shutil.rmtree(stores)


def new_arrays(cfg: Config, dtype: str) -> dict[str, NewArray]:
    """Returns the arrays of a checkpoint's weights, by the path of the parameter.

    Args:
      dtype: dtype of the parameters; selection biases are float32.
    """
    _, params, router_bias = describe_anywhere(cfg)
    groups = (("params", params, dtype), ("balance", router_bias, "float32"))
    return {
        path: NewArray(f"{group}.{path}", tuple(leaf.shape), own)
        for group, tree, own in groups
        for path, leaf in flat(tree).items()
    }


def write_pieces(
    sources: Mapping[NewArray, ReadPiece],
    item: Path,
    processes: Processes,
    progress: Callable[[int], None] = lambda elements: None,
) -> int:
    """Writes this process's share of the pieces of every array. Reads no others.

    Pieces go to the processes in turns, and no process holds a model.

    Args:
      sources: for each array, a function that returns its parts.
      item: directory of the stores of all processes.
      progress: called with the elements of each piece.
    Returns:
      the sum of the digests of these pieces.
    """

    def read(piece: tuple[NewArray, Bounds]) -> tuple[NewArray, Bounds, np.ndarray, int]:
        array, part = piece
        values = sources[array](part, array.dtype)
        return array, part, values, array.digest(part, values)

    def held_bytes(piece: tuple[NewArray, Bounds]) -> int:
        array, part = piece
        elements = math.prod(stop - start for start, stop in part)
        return HELD * elements * np.dtype(array.dtype).itemsize

    pieces = ((array, part) for array in sources for part in array.parts())
    own = itertools.islice(pieces, processes.index, None, processes.count)
    total = 0
    with PieceWriter(store_of(item, processes.index)) as writer:
        if processes.first:
            for array in sources:
                writer.create(array)
        for array, part, values, digest in map_in_flight(read, own, held_bytes):
            writer.write(array, part, values)
            total += digest
            progress(values.size)
    return total


def config_text(cfg: Config) -> str:
    """Returns JSON that `--config` reads: the whole model, and others that are not at defaults."""
    nested: dict[str, Any] = {}
    for name, field in fields().items():
        value = get_value(cfg, name)
        # The model does not follow later defaults.
        if value == field.default and not name.startswith(("model.", "moe.")):
            continue
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return json.dumps(nested, indent=2) + "\n"


def _say_done(folder: Folder, plan: LoadPlan, cfg: Config, out: Path, console: Console) -> None:
    """Prints the imported parameters, the tensors left out, and the next command."""
    lines = [
        f"imported {elements_of(plan):,} parameters to {out}; family "
        f"{family_of(folder.config).name}"
    ]
    for reason, names in plan.left_out.items():
        lines.append(f"left out {len(names):,} tensors, {reason}: {names[0]}, ...")
    if has_fixed_weight(cfg):
        lines.append(
            "note:          the weight of a token's only expert is always one, so no loss reaches "
            "the router: train with --config.moe.router.renormalize=false, which changes the "
            "model, or adapters (--config.lora.rank=16); evaluation and generation are as published"
        )
    tokenizer = out / ORIGIN / "tokenizer.json"
    if tokenizer.is_file():
        lines.append(
            f"prepare text:  moejax prepare FILE ... --tokenizer {tokenizer} --out data/{out.name}"
        )
    lines.append(f"train:         moejax train --config {out / 'config.json'}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
