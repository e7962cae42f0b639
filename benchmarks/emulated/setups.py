"""The models and clusters on which plans are measured."""

from dataclasses import dataclass
from typing import Any

from benchmarks.machine import ROOT
from moejax.config.checks.size import attention_parameters
from moejax.config.fields import change
from moejax.config.load import load_config
from moejax.config.schema import Config, PlanConfig

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
# Set-ups as large models have them on large clusters, by two ratios: what an exchange would send to
# what gathering weights sends, and seconds of computing to those of gathering.
SCALED: dict[str, Any] = {
    "moe.capacity_factor": None,
    "model.width": 256,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "moe.num_experts": 16,
    "moe.experts_per_token": 4,
    "moe.expert_hidden": 256,
    "data.sequence_length": 128,
}
LIKE: dict[str, dict[str, Any]] = {
    "like Qwen3-30B, 16k": SCALED | {"train.batch_sequences": 136},
    "like Qwen3-30B, 4k": SCALED | {"train.batch_sequences": 64},
    "like OLMoE, 4k": SCALED | {"train.batch_sequences": 48},
    "like DeepSeek-V3, 4k": SCALED
    | {"moe.num_experts": 32, "moe.experts_per_token": 2, "train.batch_sequences": 48},
    "like OLMoE, 16k, slow cloud": SCALED
    | {"model.width": 128, "moe.expert_hidden": 128, "train.batch_sequences": 104},
}
# Of each: the shipped config, tokens a device in a micro-batch, and bytes a second of a node.
FAST, CLOUD = 8 * 50e9, 12.5e9
REAL: dict[str, tuple[str, int, float]] = {
    "like Qwen3-30B, 16k": ("qwen3_30b_a3b", 16_384, FAST),
    "like Qwen3-30B, 4k": ("qwen3_30b_a3b", 4096, FAST),
    "like OLMoE, 4k": ("olmoe_1b_7b", 4096, FAST),
    "like DeepSeek-V3, 4k": ("deepseek_v3", 4096, FAST),
    "like OLMoE, 16k, slow cloud": ("olmoe_1b_7b", 16_384, CLOUD),
}
H100_FLOPS = (
    769e12  # of its fastest bfloat16 product, as in moejax/plan/cluster/known/dgx_h100.json
)
GROUPS = ("odd", "like")
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
        """Its group on the page: odd models, or those like large ones."""
        return "odd" if self.model in ODD else "like"

    @property
    def settings(self) -> dict[str, Any]:
        """The model's settings."""
        return EVERY | (ODD | LIKE)[self.model]


SETUPS = (
    *(Setup(model, 3, 2, 60) for model in ODD),
    Setup("top-1", 3, 1, 60),
    Setup("top-3", 2, 3, 60),
    Setup("like Qwen3-30B, 16k", 2, 4, 480),
    Setup("like OLMoE, 4k", 2, 4, 600),
    Setup("like Qwen3-30B, 4k", 4, 2, 275),
    Setup("like DeepSeek-V3, 4k", 4, 2, 550),
    Setup("like OLMoE, 16k, slow cloud", 2, 4, 16),
)


def ratios(
    cfg: Config, tokens: float, devices: int, flops: float, node_rate: float, width: int
) -> tuple[float, float]:
    """Returns exchanged bytes over those of weights, and computing over gathering, of a layer.

    Gathering sends a layer's weights twice in the computing dtype and its gradients once in
    float32; an exchange sends K rows of each token four times.

    Args:
      tokens: of a device in a micro-batch.
      devices: of a node.
      flops: a second, of a device.
      node_rate: bytes a second over a node's links.
      width: bytes of a number in the computing dtype.
    """
    model, moe = cfg.model, cfg.moe
    dense = attention_parameters(model) + 3 * model.width * moe.shared_width
    expert = 3 * model.width * moe.expert_hidden
    gathered = (2 * width + 4) * (dense + moe.num_experts * expert)
    exchanged = 4 * width * devices * tokens * moe.experts_per_token * model.width
    computing = 6 * tokens * (dense + moe.experts_per_token * expert) / flops
    return exchanged / gathered, computing / (gathered / node_rate)


def config_of(setup: Setup) -> Config:
    """The model, with everything else free."""
    return change(Config(plan=PlanConfig(mode="auto")), setup.settings)


def config_of_row(setup: Setup, row: dict[str, Any]) -> Config:
    """A plan that was measured."""
    return change(config_of(setup), {"mesh.nodes": setup.hosts} | row["settings"])


def ratios_of(setup: Setup, flops: float) -> tuple[float, float]:
    """The ratios of a set-up whose devices compute so many FLOPs a second."""
    cfg, count = config_of(setup), setup.hosts * setup.devices
    tokens = cfg.train.batch_sequences * cfg.data.sequence_length / count
    return ratios(cfg, tokens, setup.devices, flops, setup.rate * 1e6 / 8, 4)


def real_ratios(name: str) -> tuple[float, float]:
    """The ratios of what a model of `LIKE` stands for."""
    config, tokens, rate = REAL[name]
    cfg = load_config(str(ROOT / "configs" / f"{config}.py"), [])
    return ratios(cfg, tokens, 8, H100_FLOPS, rate, 2)
