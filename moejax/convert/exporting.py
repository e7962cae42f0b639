"""`moejax hf export`: a run's checkpoint becomes a folder that other libraries load."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from moejax.config.load import from_dict
from moejax.config.schema import Config
from moejax.convert.output import bar, check_new_folder, check_space, console_of, written_beside
from moejax.data.sources import tokenizer_file
from moejax.errors import InputError, write_whole
from moejax.hf.families import FAMILIES, family_named, family_of
from moejax.hf.families.family import Family
from moejax.hf.files import CONFIG
from moejax.hf.model import describe_anywhere
from moejax.hf.origin import GENERATION, copy_small_files, origin_of, read_config
from moejax.hf.writer import (
    check_biases,
    files_of,
    plan_files,
    total_bytes,
    total_elements,
    write_weights,
)
from moejax.runtime.start import join
from moejax.train.saved import Saved, locate
from moejax.train.stored import StoredWeights

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    family: str | None = None,
) -> None:
    """Writes a folder of safetensors files; each process writes some of them. Touches no device.

    Args:
      run: a run directory, an imported folder, or one checkpoint.
      step: the checkpoint's step; None: the newest.
      dtype: of the weights.
      family: name of the family to write; None: that of the first weights, or one that fits.
    Raises:
      InputError: for a missing or damaged checkpoint, or a model that no family holds, before
        anything is written.
    """
    check_new_folder(out, "--out")
    with join() as processes:
        console = console_of(processes)
        saved = locate(str(_checkpoint_of(run, step)), "full", processes)
        cfg, origin = from_dict(saved.manifest.get("config", {})), origin_of(saved.path)
        refuse_adapters(saved, cfg)
        base = read_config(origin)
        chosen, config = choose_family(cfg, base, family)
        model, params, bias = describe_anywhere(cfg)
        files = plan_files(chosen, model, params, bias, dtype)
        weights = StoredWeights(saved.path)
        check_biases(chosen, model, params, bias, weights.read)
        check_space(out, total_bytes(files), processes)
        with written_beside(out, processes) as beside:
            text = f"writing {decimal(total_bytes(files))} from {saved.path}"
            with bar(console, text, total_elements(files_of(files, processes))) as advance:
                write_weights(files, beside, weights.read, processes, advance)
            if processes.first:
                _write_small_files(beside, config, origin, cfg, dtype)
        console.print(
            f"exported step {saved.step} of {run} as {chosen.name} to {out}: "
            f"{total_elements(files):,} parameters, {decimal(total_bytes(files))} in "
            f"{len(files)} {'files' if len(files) > 1 else 'file'}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        processes.gather("done")


def refuse_adapters(saved: Saved, cfg: Config) -> None:
    """Refuses a run that trained adapters: its checkpoint does not have the model's weights."""
    if cfg.lora.rank is not None:
        raise InputError(
            f"{saved.path} holds adapters, not weights: its run had `lora.rank` = {cfg.lora.rank}. "
            "Export writes whole models; adapters cannot be exported yet. Name a run that trained "
            "all weights."
        )


def _checkpoint_of(run: Path, step: int | None) -> Path:
    """Returns what `locate` searches: the run, or the step that is asked for."""
    if step is None:
        return run
    below = run / "checkpoints"
    return (below if below.is_dir() else run) / str(step)


def choose_family(
    cfg: Config, base: Mapping[str, Any], name: str | None
) -> tuple[Family, dict[str, Any]]:
    """Returns the family to write, and its `config.json`.

    Raises:
      InputError: if it cannot hold the model; without a name, says so for each family.
    """
    if name is not None:
        return _config_of(family_named(name), cfg, base)
    if base:
        return _config_of(family_of(base), cfg, base)
    reasons = []
    for family in FAMILIES:
        try:
            return family, family.write(cfg, base)
        except InputError as error:
            reasons.append(f"{family.name}: {error}")
    raise InputError(f"no family holds this model. {'; '.join(reasons)}.")


def _config_of(
    family: Family, cfg: Config, base: Mapping[str, Any]
) -> tuple[Family, dict[str, Any]]:
    try:
        return family, family.write(cfg, base)
    except InputError as error:
        raise InputError(
            f"{family.name} does not hold this model: {error}. Name another family with --family, "
            "or export a model without it."
        ) from None


def _write_small_files(
    beside: Path, config: Mapping[str, Any], origin: Path | None, cfg: Config, dtype: str
) -> None:
    """Writes the configs, and copies tokenizer and texts."""
    if origin is None:
        # Some families have a padding token by default, whose embedding would not be trained.
        config = {"pad_token_id": None, **config}
    text = json.dumps({**config, "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    write_whole(beside / CONFIG, text)
    if origin is not None:
        copy_small_files(origin, beside, config=False)
    elif (tokenizer := tokenizer_file(cfg.data)) is not None:
        shutil.copyfile(tokenizer, beside / "tokenizer.json")
    if not (beside / GENERATION).is_file():
        known = {name: config[name] for name in SPECIAL if config.get(name) is not None}
        generation = {"_from_model_config": True, **known}
        write_whole(beside / GENERATION, json.dumps(generation, indent=2) + "\n")
