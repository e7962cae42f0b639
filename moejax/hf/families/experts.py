"""Parts of `config.json` about experts and their router."""

from dataclasses import dataclass
from typing import Any

from moejax.config.fields import short
from moejax.errors import InputError
from moejax.hf.families.blocks import blocks_of, mlp_types
from moejax.hf.families.parts import Config, Same, Settings, value_of, whole_number

CHOICES = Same("num_experts_per_tok", "moe.experts_per_token", also=("experts_per_token",))
SHARED_EXPERTS = Same("n_shared_experts", "moe.num_shared_experts", positive=True)
SHARED_SIZE = "shared_expert_intermediate_size"


@dataclass(frozen=True)
class DenseHidden:
    """Hidden width of dense blocks, which has no effect in a model without them."""

    keys: tuple[str, ...] = ("intermediate_size",)

    def read(self, config: Config) -> dict[str, Any]:
        return {"model.mlp_hidden": value_of(config, self.keys)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        if has_dense_blocks(settings):
            return {"intermediate_size": settings["model.mlp_hidden"]}
        return {"intermediate_size": base.get("intermediate_size", settings["moe.expert_hidden"])}


def shared_width(settings: Settings) -> int:
    """Returns the hidden width of the shared experts together; 0 without them."""
    count, own = settings["moe.num_shared_experts"], settings.get("moe.shared_hidden")
    return own if count and own is not None else count * settings["moe.expert_hidden"]


def shortest_shared(width: int, expert: int) -> dict[str, Any]:
    """Returns the settings of shared experts: several of an expert's width, if it divides.

    Args:
      width: hidden width of all shared experts together; 0 without them.
      expert: hidden width of an expert.
    """
    if width % expert:
        return {"moe.num_shared_experts": 1, "moe.shared_hidden": width}
    return {"moe.num_shared_experts": width // expert, "moe.shared_hidden": None}


def has_dense_blocks(settings: Settings) -> bool:
    """Returns whether some block has no experts, or that of `predict_ahead` would have none."""
    if "dense" in settings.get("model.ahead_block", ()):
        return True
    if settings.get("model.layer_mlps"):
        return "dense" in settings["model.layer_mlps"]
    return settings.get("model.first_dense_layers", 0) > 0 or settings.get("model.moe_every") != 1


def has_experts(settings: Settings) -> bool:
    """Returns whether some block has experts."""
    if settings.get("model.layer_mlps"):
        return "experts" in settings["model.layer_mlps"]
    return settings.get("model.moe_every", 1) is not None


@dataclass(frozen=True)
class SharedExpert:
    """One shared expert of any width; here several experts, if it divides.

    Attributes:
      gate: whether a gate is behind it.
    """

    keys: tuple[str, ...] = (SHARED_SIZE,)
    gate: bool = True

    def read(self, config: Config) -> dict[str, Any]:
        shared = whole_number(config, self.keys[0])
        found = shortest_shared(shared, whole_number(config, "moe_intermediate_size"))
        return {**found, "moe.shared_gate": self.gate}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        width = shared_width(settings)
        if not has_experts(settings):
            return {}
        if not width:
            raise InputError("`moe.num_shared_experts` is 0. It has at least one")
        return {self.keys[0]: width}


@dataclass(frozen=True)
class Groups:
    """Groups of experts; a token chooses some of them.

    Attributes:
      count: key of their number.
      switch: whether the key `topk_method` turns groups on (DeepSeek-V2).
    """

    switch: bool = False
    count: str = "n_group"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.count, "topk_group", *(("topk_method",) if self.switch else ()))

    def read(self, config: Config) -> dict[str, Any]:
        if self.switch:
            method = value_of(config, ("topk_method",), "greedy")
            if method == "greedy":
                return {"moe.router.num_groups": 1}
            if method != "group_limited_greedy":
                raise InputError(
                    f"`topk_method` is {short(method)}. moejax computes greedy and "
                    "group_limited_greedy. Choose another model."
                )
        return {
            "moe.router.num_groups": value_of(config, (self.count,)),
            "moe.router.groups_per_token": value_of(config, ("topk_group",)),
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        groups = settings["moe.router.num_groups"]
        keys = {self.count: groups, "topk_group": settings["moe.router.groups_per_token"]}
        if self.switch:
            keys["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
        return keys


@dataclass(frozen=True)
class Balance:
    """The coefficient of the load-balance loss, whose mean is defined differently there.

    Attributes:
      times: factor on their coefficient: docs/architecture.md has the table.
      default: their coefficient where the key is missing.
      of: key of the choices of a token.
    """

    times: str  # "choices" (transformers' loss) or "one" (megablocks')
    default: float = 0.001
    of: str = "num_experts_per_tok"
    keys: tuple[str, ...] = ("router_aux_loss_coef",)

    def read(self, config: Config) -> dict[str, Any]:
        given = value_of(config, self.keys, self.default)
        choices = whole_number(config, self.of)
        return {"moe.router.balance_loss": given * (choices if self.times == "choices" else 1)}

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        times = settings["moe.experts_per_token"] if self.times == "choices" else 1
        # Rounded, so that a product and a quotient give the number that was read.
        return {self.keys[0]: float(f"{settings['moe.router.balance_loss'] / times:.12g}")}


@dataclass(frozen=True)
class SequenceBalance:
    """The loss that balances experts in each sequence and layer; here a mean over layers.

    Attributes:
      default: coefficient where the file names none.
      dense: key of the number of dense blocks at the start.
    """

    default: float
    dense: str = "first_k_dense_replace"
    keys: tuple[str, ...] = ("aux_loss_alpha", "seq_aux")

    def read(self, config: Config) -> dict[str, Any]:
        alpha = value_of(config, ("aux_loss_alpha",), self.default)
        layers = whole_number(config, "num_hidden_layers")
        dense = value_of(config, (self.dense,), mlp_types(config).count("dense"))
        by_sequence = value_of(config, ("seq_aux",), True)
        return {
            "moe.router.balance_loss": alpha * max(0, layers - dense),
            "moe.router.balance_over": "sequence" if by_sequence else "batch",
        }

    def write(self, settings: Settings, base: Config) -> dict[str, Any]:
        layers = blocks_of(settings).expert_layers
        alpha = float(f"{settings['moe.router.balance_loss'] / layers:.12g}")
        return {
            "aux_loss_alpha": alpha,
            "seq_aux": settings["moe.router.balance_over"] == "sequence",
        }
