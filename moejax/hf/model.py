"""The model of a config, independent of its mesh and its training."""

from dataclasses import replace

from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.step.model import ModelDef, build_spec, describe_model
from moejax.step.state import Tree


def describe_anywhere(cfg: Config, *, adapters: bool = False) -> tuple[ModelDef, Tree, Tree]:
    """Returns a model, and shapes of all weights and selection biases; touches no device.

    Args:
      adapters: whether to add the config's adapters to the weights.
    """
    # A config of the same parameters that any device can hold.
    model = replace(cfg.model, dtype="float32", remat="none")
    alone = Config(model=model, moe=replace(cfg.moe, implementation="auto"))
    if adapters:
        alone = replace(alone, lora=cfg.lora)
    mesh = build_abstract_mesh(build_layout(alone.mesh))
    return describe_model(alone, build_spec(alone, mesh, "cpu", None))
