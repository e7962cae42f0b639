"""The source of a run's first weights: another run's checkpoint, or a safetensors folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax

from moejax.checkpoint.compatible import check_same_base, check_same_weights
from moejax.checkpoint.find import Saved, locate
from moejax.checkpoint.manifest import weights_digest
from moejax.checkpoint.verify import restore_weights
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.hf.config import check_same_model
from moejax.hf.files import is_folder_of_weights
from moejax.hf.load import LoadPlan, load, plan_load
from moejax.hf.model import describe_anywhere
from moejax.hf.origin import ORIGIN, copy_small_files, origin_of, small_files
from moejax.hf.reader import Folder, digest_of_samples
from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import TrainState, Tree


@dataclass(frozen=True)
class FolderSource:
    """A folder of safetensors files, whose names and shapes fit the model."""

    folder: Folder
    plan: LoadPlan

    @property
    def path(self) -> Path:
        """The folder's path."""
        return self.folder.path


Source = Saved | FolderSource


def find_source(cfg: Config, verify: str, processes: Processes = ALONE) -> Source | None:
    """Returns the source that `checkpoint.init_from` names, if any. Touches no device.

    Raises:
      InputError: if it is missing or damaged, or is of another model.
    """
    if cfg.checkpoint.init_from is None:
        return None
    path = Path(cfg.checkpoint.init_from)
    if processes.from_first(lambda: is_folder_of_weights(path)):
        return processes.together(lambda: _open(path, cfg))
    saved = locate(cfg.checkpoint.init_from, verify, processes)
    check_same_weights(saved.manifest.get("config", {}), cfg)
    return saved


def _open(path: Path, cfg: Config) -> FolderSource:
    folder = Folder(path)
    check_same_model(folder, cfg)
    small_files(path)
    return FolderSource(folder, plan_load(folder, *describe_anywhere(cfg)))


def take_weights(
    source: Source, state: TrainState, abstract: TrainState, processes: Processes = ALONE
) -> TrainState:
    """Returns the state with the source's weights in the place of its own (`read_weights`)."""
    # Frees them before the source's weights are loaded.
    jax.tree.map(lambda x: x.delete(), (state.params, state.router_bias))
    params, router_bias = read_weights(source, abstract, processes)
    return state._replace(params=params, router_bias=router_bias)


def read_weights(
    source: Source, abstract: TrainState, processes: Processes = ALONE
) -> tuple[Tree, Tree]:
    """Returns all weights of the source, and its selection biases.

    Args:
      abstract: state of the run that takes them; it decides shardings and dtypes. Reads `frozen`
        for LoRA runs, otherwise `params`.
    Raises:
      InputError: if a checkpoint's numbers differ from the saved ones.
    """
    params = abstract.params if abstract.frozen is None else abstract.frozen
    if isinstance(source, Saved):
        weights = restore_weights(source, abstract._replace(params=params), processes)
        return weights["params"], weights["balance"]
    with source.folder:
        return (
            load(source.plan, source.folder, params),
            load(source.plan, source.folder, abstract.router_bias),
        )


def base_of(cfg: Config, source: Source | None) -> dict[str, str] | None:
    """Returns the path and digest of the frozen weights; None if all weights are trained."""
    if cfg.lora.rank is None:
        return None
    assert source is not None, "choose_checkpoint refuses adapters without weights"
    if isinstance(source, Saved):
        return {"path": str(source.path), "weights": weights_digest(source.manifest)}
    return {"path": str(source.path), "weights": digest_of_samples(source.folder)}


def frozen_source(
    saved: Saved, cfg: Config, named: str | None, processes: Processes = ALONE
) -> Source | None:
    """Returns the frozen weights of a checkpoint with adapters; None if it has all weights.

    Args:
      cfg: config of the checkpoint.
      named: directory of the weights; None for the one that the adapters' run used.
    Raises:
      InputError: if they are missing, damaged or not the ones that the adapters were trained on;
        or if `named` has no effect.
    """
    if cfg.lora.rank is None:
        if named is None:
            return None
        raise InputError(
            f"`checkpoint.init_from` has no effect. It is set to {named}, and {saved.path} has all "
            f"weights. It names the weights that adapters were trained on. Leave it out."
        )
    source = saved.manifest["base"]["path"] if named is None else named
    if not processes.from_first(lambda: Path(source).is_dir()):
        raise InputError(
            f"frozen weights are not here. {saved.path} has adapters, of {source}, which is no "
            f"directory. Adapters need the weights they were trained on. Name them: "
            f"--config.checkpoint.init_from=DIR."
        )
    named_cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, init_from=source))
    base = find_source(named_cfg, cfg.checkpoint.verify, processes)
    if (identity := base_of(cfg, base)) is not None:
        check_same_base(saved.manifest, identity)
    return base


def keep_origin(source: Source | None, run_dir: Path) -> None:
    """Copies the small files that came with the weights, for a later export."""
    if source is None:
        return
    folder = source.path if isinstance(source, FolderSource) else origin_of(source.path)
    if folder is not None:
        copy_small_files(folder, run_dir / ORIGIN)
