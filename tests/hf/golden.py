"""The golden models of `tests/golden/models`, as folders and as configs of runs."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from moejax.config.schema import Config, DataConfig, MeshConfig, RouterConfig, TrainConfig
from moejax.hf.config import config_of
from moejax.hf.load import LoadPlan, load, plan_load
from moejax.hf.reader import Folder
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from tests.cases import CERTAIN, step_for
from tests.hf.random_models import draw_all, write_folder

MODELS = Path(__file__).parents[1] / "golden" / "models"
ONE_DEVICE = MeshConfig()
FAMILIES = sorted(path.stem for path in MODELS.glob("*.json"))


# Families whose parts, together, most others have: the others run in `make test-all CASES=every`
# where a case takes long.
OFTEN = (
    "deepseek_v3",
    "gpt_oss",
    "hunyuan_v1_moe",
    "kimi_linear",
    "qwen3_next",
    "glm_moe_dsa",
)


@cache
def cases_of(family: str) -> dict[str, dict]:
    """The golden cases of a family by name."""
    found = json.loads((MODELS / f"{family}.json").read_text())
    return {case["name"]: case for case in found["cases"]}


def all_cases(only: str = "", always: tuple[str, ...] = tuple(FAMILIES)) -> list:
    """Parameters (family, case) of every golden model whose case begins with `only`.

    Args:
      always: families that are not left to `make test-all CASES=every`.
    """
    params = []
    for family in FAMILIES:
        for name in cases_of(family):
            if not name.startswith(only):
                continue
            marks = () if family in always else pytest.mark.exhaustive
            params.append(pytest.param(family, name, marks=marks, id=f"{family}: {name}"))
    return params


def golden_folder(place: Path, case: dict, files: int = 1) -> Path:
    """Writes the folder of a golden model."""
    return write_folder(place, case["config"], draw_all(case["tensors"]), files)


def ahead_folder(place: Path, family: str = "deepseek_v3") -> Path:
    """Writes a model of two layers, and a third that predicts ahead, as DeepSeek-V3's files do."""
    (case,) = (case for name, case in cases_of(family).items() if name.startswith("even"))
    shapes = dict(case["tensors"])
    for name, shape in case["tensors"].items():
        if name.startswith("model.layers.1."):
            shapes[name.replace("layers.1.", "layers.2.")] = shape
    D = case["config"]["hidden_size"]
    prefix = "model.layers.2."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{prefix}{norm}.weight"] = [D]
    shapes[f"{prefix}eh_proj.weight"] = [D, 2 * D]
    tensors = draw_all(shapes)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    config = {**case["config"], "num_nextn_predict_layers": 1}
    return write_folder(place, config, tensors, files=2)


def run_config(cfg: Config, mesh: MeshConfig, tokens: tuple[int, int]) -> Config:
    """The config of a run of a model, without router losses.

    Args:
      mesh: of a dense model, ranks of experts share its weights.
      tokens: sequences of a batch, and their length.
    """
    if cfg.model.has_experts:
        router: RouterConfig = replace(cfg.moe.router, balance_loss=0.0)
        certain = CERTAIN if mesh.expert > 1 else {}
        cfg = replace(cfg, moe=replace(cfg.moe, router=router, **certain))
    else:
        mesh = replace(mesh, fsdp=mesh.fsdp * mesh.expert, expert=1)
    return replace(
        cfg,
        mesh=mesh,
        data=DataConfig(sequence_length=tokens[1]),
        train=TrainConfig(batch_sequences=tokens[0]),
    )


def loaded(place: Path, case: dict, mesh: MeshConfig) -> tuple[TrainStep, TrainState]:
    """A train step of a golden model, and a state with its weights; the rest is zero."""
    tokens = case["tokens"]
    return load_model(golden_folder(place, case), mesh, (len(tokens), len(tokens[0])))


class Imported(NamedTuple):
    """A folder's weights on a mesh."""

    train_step: TrainStep
    plan: LoadPlan
    params: Any
    router_bias: Any


def import_weights(
    path: Path,
    mesh: MeshConfig = ONE_DEVICE,
    tokens: tuple[int, int] = (8, 8),
    *,
    predict_ahead: int = 0,
) -> Imported:
    """Fills a train step's weights from a folder."""
    with Folder(path) as folder:
        cfg = run_config(config_of(folder), mesh, tokens)
        train_step = step_for(replace(cfg, model=replace(cfg.model, predict_ahead=predict_ahead)))
        shapes = train_step.abstract.params, train_step.abstract.router_bias
        plan = plan_load(folder, train_step.model, *shapes)
        return Imported(train_step, plan, *(load(plan, folder, tree) for tree in shapes))


def load_model(
    path: Path, mesh: MeshConfig, tokens: tuple[int, int]
) -> tuple[TrainStep, TrainState]:
    """A train step of a folder's model, and a state with its weights; the rest is zero."""
    train_step, _, params, router_bias = import_weights(path, mesh, tokens)
    abstract = train_step.abstract
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)
    return train_step, state._replace(params=params, router_bias=router_bias)
