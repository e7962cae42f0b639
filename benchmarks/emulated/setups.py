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
# Shapes that no price was made with: widths that are no powers of two, one and three experts a
# token, numbers that three devices divide. "heavy" has few tokens and large weights to gather.
UNEVEN: dict[str, Any] = {
    "model.vocab_size": 528,
    "model.num_layers": 2,
    "model.width": 192,
    "model.num_heads": 6,
    "model.num_kv_heads": 6,
    "moe.expert_hidden": 320,
    "train.batch_sequences": 12,
    "data.sequence_length": 128,
}
ODD: dict[str, dict[str, Any]] = {
    "top-1": UNEVEN
    | {"moe.num_experts": 6, "moe.experts_per_token": 1, "moe.router.renormalize": False},
    "top-3": UNEVEN | {"moe.num_experts": 12, "moe.experts_per_token": 3},
    "heavy": UNEVEN
    | {
        "model.width": 384,
        "model.num_heads": 12,
        "model.num_kv_heads": 12,
        "moe.num_experts": 6,
        "moe.experts_per_token": 3,
        "moe.expert_hidden": 960,
        "data.sequence_length": 64,
    },
}
GROUPS = ("usual", "odd")
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

    @property
    def group(self) -> str:
        """Its group on the page: the usual models, or the odd ones."""
        return "odd" if self.model in ODD else "usual"

    @property
    def settings(self) -> dict[str, Any]:
        """The model's settings."""
        return EVERY | (MODELS | ODD)[self.model]


SETUPS = (
    *(Setup("balanced", 2, 4, rate) for rate in (50, 100, 200, 400)),
    *(Setup("exchange", 2, 4, rate) for rate in (100, 400)),
    *(Setup("attention", 2, 4, rate) for rate in (100, 400)),
    *(Setup(model, 4, 2, 100) for model in MODELS),
    *(Setup(model, 3, 2, 60) for model in ODD),
    Setup("top-1", 3, 1, 60),
    Setup("top-3", 2, 3, 60),
)


def config_of(setup: Setup) -> Config:
    """The model, with everything else free."""
    return change(Config(plan=PlanConfig(mode="auto")), setup.settings)


def config_of_row(setup: Setup, row: dict[str, Any]) -> Config:
    """A plan that was measured."""
    return change(config_of(setup), {"mesh.nodes": setup.hosts} | row["settings"])
