"""Files of golden models with a key left out or null, and what transformers makes of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "config_defaults.json"
NOT_MODEL = ("architectures", "model_type", "transformers_version")  # say whose file it is


# Optional keys of `rope_scaling` that golden models leave at their defaults.
YARN = {"beta_fast": 24.0, "beta_slow": 2.0}
GROUPED_YARN = {**YARN, "attention_factor": 1.25, "truncate": False}


def of_positions(change: str) -> bool:
    """Whether a change is to a key of rotary positions."""
    return "rope_" in change.replace("qk_rope_head_dim", "") or "rotary" in change


def released(config: dict[str, Any]) -> dict[str, Any]:
    """A config that transformers 5 wrote, with the keys of positions that released files have."""
    if "rope_parameters" not in config:  # nothing rotates
        return config
    if (layers := config.get("per_layer_config")) is not None:  # Gemma 4
        ((head, heads),) = {
            (own["head_dim"], own.get("num_key_value_heads")) for own in layers.values()
        }
        named = {"global_head_dim": head, "num_global_key_value_heads": heads}
        return {key: x for key, x in config.items() if key != "per_layer_config"} | named
    if {"full_attention", "llama_4_scaling_beta"} & set(config["rope_parameters"]):
        return config
    rope = dict(config["rope_parameters"])
    own = {key: value for key, value in config.items() if key != "rope_parameters"}
    own["rope_theta"], family = rope.pop("rope_theta"), config["model_type"]
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None and family != "minimax_m2":  # whose files have `rotary_dim`
        own["partial_rotary_factor"] = partial
    if rope["rope_type"] == "yarn":
        rope |= YARN if "mscale" in rope else GROUPED_YARN
    plain = rope["rope_type"] == "default" and family != "gpt_oss"
    return {**own, "rope_scaling": None if plain else rope}


def without(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files with one key less, or null, by the name of the change."""
    return dict(_without(config))


def _without(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in config.items():
        if key in NOT_MODEL:
            continue
        yield f"without {key}", {k: v for k, v in config.items() if k != key}
        yield f"null {key}", {**config, key: None}
        if isinstance(value, dict):
            for name, inner in _without(value):
                word, _, below = name.partition(" ")
                yield f"{word} {key}.{below}", {**config, key: inner}
