"""The counts of published models are what the installed transformers builds."""

import importlib
import json

import pytest

pytestmark = pytest.mark.parity

# Sizes that a config class of transformers takes without being told, and of which published model
# they are. The others are those of a model that was never published, or of several.
DEFAULTS = {
    "Mixtral-8x7B": (),
    "OLMoE-1B-7B": ("intermediate_size",),  # 2048 there; the files say 1024
    "Qwen1.5-MoE-A2.7B": (),
    "DeepSeek-V3": (),
    "gpt-oss-120b": (),
    "GLM-4.5-Air": ("head_dim",),  # no default there
    "MiniMax-M2": (),
    "GLM-4.7-Flash": ("first_k_dense_replace",),  # no key of the class
    "DeepSeek-V3.2": (),
    "GLM-5": (),
    "Solar-Open-100B": ("first_k_dense_replace", "intermediate_size"),  # no keys of the class
    "Hy3": ("first_k_dense_replace",),  # no key of the class
    "ERNIE-4.5-21B-A3B": (),
    "FlexOlmo-7x7B-1T": (),
    "Qwen3.5-35B-A3B": (),
    "MiMo-V2-Flash": ("n_shared_experts",),  # no key of the class
    "Mistral-Small-4-119B": (),
    "Kimi-Linear-48B-A3B": ("first_k_dense_replace", "head_dim"),  # no keys of the class
}
SIZES = (
    "first_k_dense_replace",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "shared_expert_intermediate_size",
    "topk_group",
    "v_head_dim",
    "vocab_size",
)


@pytest.fixture(scope="module")
def script():
    """The script that wrote the counts."""
    return importlib.import_module("tests.golden.count_published")


def test_the_golden_counts_are_what_transformers_builds(script):
    golden = json.loads(script.COUNTS.read_text())
    assert script.count_all() == golden["counts"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_published_sizes_are_the_defaults_of_their_config_class(script, name):
    published = json.loads(script.PUBLISHED.read_text())[name]
    default = type(script.config_of(published))()
    compared = [key for key in SIZES if key in published and key not in DEFAULTS[name]]
    assert len(compared) >= 8
    assert {key: published[key] for key in compared} == {
        key: getattr(default, key) for key in compared
    }
