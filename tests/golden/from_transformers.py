"""Writes from_transformers.json: numbers of Hugging Face's code that tests compare ours with.

Needs `pip install torch==2.13.0 transformers==5.23.0`, in an environment of its own.
Command:  python tests/golden/from_transformers.py
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

TOKENS, EXPERTS = 6, 8
ROPES = {
    # The Llama 3.1 model card's.
    "llama3": {
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "head_dim": 128,
    },
    # DeepSeek-V3's, without its mscale, with it, and with others.
    "yarn": {
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "head_dim": 64,
    },
}
ROPES["yarn_v3"] = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0}
ROPES["yarn_mscale"] = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 0.707}
ROPES["yarn_factor"] = ROPES["yarn"] | {"attention_factor": 1.25}
# gpt-oss's.
ROPES["yarn_gpt_oss"] = ROPES["yarn"] | {"rope_theta": 150_000.0, "factor": 32.0, "truncate": False}
# Kimi-K2's, in which no pair is blended.
ROPES["yarn_kimi_k2"] = ROPES["yarn_v3"] | {"rope_theta": 50_000.0, "factor": 32.0}
ROPES["yarn_kimi_k2"] |= {"beta_fast": 1.0}


def balance_case(name: str, k: int, logit_LNE: list) -> dict:
    """The balance loss of some layers' logits."""
    loss = load_balancing_loss_func(tuple(map(torch.tensor, logit_LNE)), EXPERTS, top_k=k)
    return {"name": name, "k": k, "logits": logit_LNE, "loss": loss.item()}


def rope_case(kind: str) -> dict:
    """The frequencies of a way to stretch rotary positions, and its scale of cos and sin."""
    rope_type = kind.partition("_")[0]
    parameters = {"rope_type": rope_type, **ROPES[kind]}
    channels = parameters.pop("head_dim")
    longest = int(parameters["factor"] * parameters["original_max_position_embeddings"])
    config = LlamaConfig(
        head_dim=channels, max_position_embeddings=longest, rope_parameters=parameters
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
    return {**ROPES[kind], "frequencies": frequencies.tolist(), "scale": float(scale)}


def main() -> None:
    """Writes the file beside this one."""
    torch.manual_seed(0)
    # Numbers of few digits, so that the file is short and says exactly what was given.
    drawn_LNE = torch.randn(2, TOKENS, EXPERTS).tolist()
    first, second = ([[round(x, 3) for x in token] for token in layer] for layer in drawn_LNE)
    assert all(len(set(token)) == EXPERTS for token in first + second), "ties"
    found = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "balance": [
            balance_case("one layer, top 1", 1, [first]),
            balance_case("one layer, top 2", 2, [first]),
            balance_case("two equal layers, top 3", 3, [first, first]),
            balance_case("two layers, top 2", 2, [first, second]),
        ],
        "rope": {kind: rope_case(kind) for kind in ROPES},
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
