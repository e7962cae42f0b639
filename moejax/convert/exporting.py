"""`moejax hf export`: a run's checkpoint becomes a folder that other libraries load."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.filesize import decimal

from moejax.checkpoint.arrays import StoredWeights
from moejax.checkpoint.find import Saved, locate
from moejax.checkpoint.source import FolderSource, Source, frozen_source
from moejax.config.load import from_dict
from moejax.config.schema import Config
from moejax.convert.adapters import merged_weights, write_adapters
from moejax.convert.around import Surroundings, open_around
from moejax.convert.output import bar, check_new_folder, check_space, written_beside
from moejax.convert.texts import special_ids, texts_of, without_code, write_generation, write_texts
from moejax.errors import InputError, write_whole
from moejax.hf.families import FAMILIES, family_named, family_of
from moejax.hf.families.family import Family
from moejax.hf.files import CONFIG, is_folder_of_weights
from moejax.hf.model import describe_anywhere
from moejax.hf.origin import origin_of, read_config
from moejax.hf.writer import (
    check_biases,
    files_of,
    plan_files,
    total_bytes,
    total_elements,
    write_weights,
)
from moejax.runtime.processes import Processes
from moejax.runtime.start import join
from moejax.screen import counted, screen


@dataclass(frozen=True)
class _Export:
    """A checkpoint to export, with the other contents of the folder.

    Attributes:
      frozen: the weights that adapters were trained on; None if the checkpoint has all weights.
      config: the `config.json` that is written.
      origin: directory of the small files that came with the first weights.
      around: the model of images that the text model goes into; None: it is written by itself.
    """

    saved: Saved
    cfg: Config
    frozen: Source | None
    family: Family
    config: Mapping[str, Any]
    origin: Path | None
    around: Surroundings | None = None


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    family: str | None = None,
    adapter: bool = False,
    base: str | None = None,
    around: Path | None = None,
) -> None:
    """Writes a folder of safetensors files: a model, or adapters alone. Touches no device.

    Each process writes some of the files. Adapters are added to the weights that they were trained
    on, unless they are written alone.

    Args:
      run: a run directory, an imported folder, or one checkpoint.
      step: the checkpoint's step; None: the newest.
      dtype: dtype of the weights; adapters alone are float32.
      family: name of the family to write; None: the first weights' family, or one that fits.
      adapter: whether to write adapters alone, as peft reads them.
      base: directory of the weights that adapters were trained on; None: the run's own record.
      around: folder of the model of images that the text model came from and goes back into; None:
        the text model is written by itself.
    Raises:
      InputError: for a missing or damaged checkpoint, or a model that no family holds, before
        anything is written.
    """
    check_new_folder(out)
    with join() as processes:
        saved = locate(str(_checkpoint(run, step)), "full", processes)
        cfg, origin = _config_of(saved), origin_of(saved.path)
        if adapter:
            _check_adapter(saved, cfg, around)
        frozen = frozen_source(saved, cfg, base, processes)
        chosen, config = choose_family(cfg, read_config(origin), family)
        ahead = bool(cfg.model.predict_ahead)
        outer = None if around is None else open_around(around, chosen, config, ahead)
        export = _Export(saved, cfg, frozen, chosen, config, origin, outer)
        console = screen(stderr=True, quiet=not processes.first)
        if adapter:
            summary = _export_adapters(export, out, processes)
        else:
            summary = _export_model(export, dtype, out, processes, console)
        summary = f"exported step {saved.step} of {run} as {chosen.name} to {out}: {summary}"
        console.print(summary, highlight=False, soft_wrap=True)
        processes.gather("done")


def _checkpoint(run: Path, step: int | None) -> Path:
    """Returns the path of a run's checkpoint of a step, or of the run for its newest."""
    if step is None:
        return run
    below = run / "checkpoints"
    return (below if below.is_dir() else run) / str(step)


def _check_adapter(saved: Saved, cfg: Config, around: Path | None) -> None:
    """Refuses to write adapters alone where there are none, or with a model around them."""
    if around is not None:
        raise InputError("`--around` has no effect on adapters alone. Leave out one of the two.")
    if cfg.lora.rank is None:
        raise InputError(
            f"no adapters in {saved.path}. Its run trained all weights, and --adapter writes "
            "adapters alone. Leave it out."
        )


def _config_of(saved: Saved) -> Config:
    """Returns the config of a checkpoint; refuses that of a benchmark with forced routing."""
    cfg = from_dict(saved.manifest.get("config", {}))
    if (forced := cfg.moe.router.forced) != "none":
        raise InputError(
            f"{saved.path} is of a benchmark, with `moe.router.forced` = {forced}. Its router "
            "never chose experts, and no exported file would say so. Export a run that trained "
            "without it."
        )
    return cfg


def _export_model(
    export: _Export, dtype: str, out: Path, processes: Processes, console: Console
) -> str:
    """Writes all weights. Returns a line about them."""
    saved, cfg, frozen, around = export.saved, export.cfg, export.frozen, export.around
    model, params, router_bias = describe_anywhere(cfg)
    files = plan_files(export.family, model, params, router_bias, dtype)
    files = files if around is None else around.renamed(files)
    size = total_bytes(files) + (0 if around is None else around.copied_bytes)
    check_space(out, size, processes)
    with ExitStack() as stack:
        if frozen is None:
            read = StoredWeights(saved.path).read
        else:
            if isinstance(frozen, FolderSource):
                stack.enter_context(frozen.folder)
            read = merged_weights(saved, cfg, frozen)
        check_biases(export.family, model, params, router_bias, read)
        beside = stack.enter_context(written_beside(out, processes))
        text = f"writing {decimal(size)} from {saved.path}"
        with bar(console, text, total_elements(files_of(files, processes))) as advance:
            write_weights(files, beside, read, processes, advance)
        if processes.first:
            texts = texts_of(saved, cfg.data, export.origin)
            changed = special_ids(texts, export.config)
            config = {**without_code(export.config), **changed, "torch_dtype": dtype}
            whole = config if around is None else around.config_with(config, changed)
            write_whole(beside / CONFIG, json.dumps(whole, indent=2, sort_keys=True) + "\n")
            if around is not None:
                around.copy(beside, files)
            write_texts(beside, texts)
            write_generation(beside, config, bool(changed))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    added = "" if frozen is None else f"; adapters added to {frozen.path}"
    if around is not None:
        added += f"; {counted(len(around.copied), 'tensor')} copied from {around.folder}"
    return f"{count:,} parameters, {decimal(size)} in {counted(len(files), 'file')}{added}"


def _export_adapters(export: _Export, out: Path, processes: Processes) -> str:
    """Writes adapters alone, by the first process. Returns a line about them."""
    frozen, base = export.frozen, None
    # peft loads folders only: for a checkpoint, the folder that it was imported from.
    if isinstance(frozen, FolderSource):
        base = str(frozen.path.absolute())
    elif frozen is not None:
        folder = frozen.manifest.get("imported_from")
        base = folder if folder is not None and is_folder_of_weights(Path(folder)) else None
    with written_beside(out, processes) as beside:
        written, left_out = processes.from_first(
            lambda: write_adapters(export.saved, export.cfg, export.family, base, beside)
        )
        texts = texts_of(export.saved, export.cfg.data, export.origin)
        if processes.first and texts.chat is not None:
            write_texts(beside, texts)
    summary = f"adapters of {counted(written, 'tensor')}"
    if left_out:
        summary += f"; left out those of multi-token prediction ({counted(left_out, 'tensor')})"
    if base is None:
        where = "the base" if frozen is None else frozen.path
        summary += (
            f". It names no base: peft reads folders only, and {where} came from none that "
            f"is here. Export that (moejax hf export), and write the folder into "
            f"adapter_config.json as base_model_name_or_path"
        )
    return summary


def choose_family(
    cfg: Config, base: Mapping[str, Any], name: str | None
) -> tuple[Family, dict[str, Any]]:
    """Returns the family to write, and its `config.json`.

    Raises:
      InputError: if it cannot hold the model; without a name, says so for each family.
    """
    if name is not None or base:
        family = family_of(base) if name is None else family_named(name)
        try:
            return family, family.write(cfg, base)
        except InputError as error:
            raise InputError(
                f"{family.name} does not hold this model: {str(error).rstrip('.')}. Name another "
                "family with --family, or export a model without it."
            ) from None
    reasons = []
    for family in FAMILIES:
        try:
            return family, family.write(cfg, base)
        except InputError as error:
            reasons.append(f"{family.name}: {str(error).rstrip('.')}")
    raise InputError(f"no family holds this model. {'; '.join(reasons)}.")
