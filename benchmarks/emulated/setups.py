"""The models and clusters on which plans are measured."""

from dataclasses import dataclass
from typing import Any

from moejax.config.fields import change
from moejax.config.schema import Config, PlanConfig

MODELS: dict[str, dict[str, Any]] = {
    "balanced": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 8,
        "model.num_kv_heads": 8,
        "moe.num_experts": 8,
        "moe.expert_hidden": 512,
        "train.batch_sequences": 16,
        "data.sequence_length": 128,
    },
    "attention": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 16,
        "model.num_kv_heads": 16,
        "moe.num_experts": 8,
        "moe.expert_hidden": 64,
        "train.batch_sequences": 8,
        "data.sequence_length": 512,
    },
    "exchange": {
        "model.width": 256,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "moe.num_experts": 16,
        "moe.experts_per_token": 4,
        "moe.expert_hidden": 1024,
        "train.batch_sequences": 16,
        "data.sequence_length": 64,
    },
}
EVERY = {"model.vocab_size": 512, "model.head_width": 32, "moe.capacity_factor": 1.25}


@dataclass(frozen=True)
class Setup:
    """A cluster and a model."""

    model: str
    hosts: int
    devices: int  # of each host
    rate: int  # Mbit/s

    def __str__(self) -> str:
        return f"{self.model}, {self.cluster}"

    @property
    def cluster(self) -> str:
        """Its name; set-ups on one cluster share what was probed."""
        return f"{self.hosts} x {self.devices}, {self.rate} Mbit/s"


SETUPS = (
    *(Setup("balanced", 2, 4, rate) for rate in (50, 100, 200, 400)),
    *(Setup("exchange", 2, 4, rate) for rate in (100, 400)),
    *(Setup("attention", 2, 4, rate) for rate in (100, 400)),
    *(Setup(model, 4, 2, 100) for model in MODELS),
)


def config_of(setup: Setup) -> Config:
    """The model, with everything else free."""
    return change(Config(plan=PlanConfig(mode="auto")), EVERY | MODELS[setup.model])


def config_of_row(setup: Setup, row: dict[str, Any]) -> Config:
    """A plan that was measured."""
    return change(config_of(setup), {"mesh.nodes": setup.hosts} | row["settings"])
