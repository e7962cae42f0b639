"""Refuses impossible model sizes, from the settings alone."""

import os
from pathlib import Path

from moejax.config.checks.text import require
from moejax.config.schema import Config

# A hundred times the largest models that are published; the weights alone are 400 TB.
MAX_PARAMETERS = 10**14
# Bytes of a float32 master, two moments of AdamW, and a gradient.
BYTES_PER_PARAMETER = 16
FROZEN_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter that is not trained


def parameters_of(cfg: Config) -> int:
    """Returns a model's number of parameters without norms and biases."""
    model, moe, D = cfg.model, cfg.moe, cfg.model.width
    heads = model.num_heads + model.num_kv_heads
    attention = 2 * D * heads * model.head_width
    dense = 3 * D * model.mlp_hidden
    experts = moe.num_experts + moe.num_shared_experts
    sparse = D * moe.num_experts + 3 * D * experts * moe.expert_hidden
    layers = 0
    if model.moe_every is not None:
        layers = (model.num_layers - model.first_dense_layers) // model.moe_every
    embedding = model.vocab_size * D * (1 if model.tie_embeddings else 2)
    return (
        embedding
        + model.num_layers * attention
        + (model.num_layers - layers) * dense
        + layers * sparse
    )


def state_bytes(cfg: Config) -> int:
    """Returns the bytes of a run's weights, moments and gradients; adapters are not counted."""
    frozen = cfg.lora.rank is not None
    each = FROZEN_BYTES[cfg.lora.base_dtype] if frozen else BYTES_PER_PARAMETER
    return each * parameters_of(cfg)


def check_size(cfg: Config) -> None:
    """Refuses a model that is too large to train anywhere, before it is traced."""
    parameters = parameters_of(cfg)
    require(
        parameters <= MAX_PARAMETERS,
        f"the model has {parameters:.1e} parameters. It may have {MAX_PARAMETERS:.0e}. Lower "
        "model.width, model.num_layers, model.vocab_size or the experts' sizes.",
    )


CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container


def machine_memory() -> int:
    """Returns the memory of this machine or container in bytes."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return size
