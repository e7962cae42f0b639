"""`config.json` both ways: published models, what is equal in two ways, what is refused by name."""

import copy
import json
from pathlib import Path

import pytest

from moejax.config.checks import check
from moejax.config.fields import change, fields
from moejax.config.pattern import block_kinds
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import FAMILIES, family_named, family_of
from moejax.hf.families.family import TRAINING, differences, flat_settings, from_settings
from moejax.hf.families.rope import _share
from moejax.hf.reader import Folder
from tests.hf.golden import all_cases, cases_of, golden_folder

# The `config.json` of published models; `test_counts.py` says what each was compared with.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
# What each is known for, where neither counts nor logits tell.
KNOWN = {
    "Mixtral-8x7B": {"moe.router.balance_loss": 0.04, "model.sliding_window": None},
    "OLMoE-1B-7B": {"moe.router.balance_loss": 0.01, "moe.router.renormalize": False},
    "Qwen1.5-MoE-A2.7B": {"model.sliding_window": None, "moe.shared_gate": True},
    "Qwen3-30B-A3B": {"moe.router.balance_loss": 0.008, "model.moe_every": 1},
    "DeepSeek-V2-Lite": {
        "model.rope.mscale": 0.707,
        "moe.router.num_groups": 1,
        "moe.router.balance_loss": pytest.approx(26 * 0.001),  # of layers with experts
    },
    "DeepSeek-V3": {
        "moe.router.weight_scale": 2.5,
        "moe.router.balance_loss": pytest.approx(58 * 0.0001),
        "moe.router.balance_over": "sequence",
    },
    "Kimi-K2": {"model.rope.beta_fast": 1.0, "moe.router.num_groups": 1},
    "gpt-oss-20b": {"model.rope.truncate": False, "model.full_attention_every": 2},
    "GLM-4.5": {"model.rope_width": 64, "moe.router.score": "sigmoid"},
    "MiniMax-M2": {"model.rope.theta": 5_000_000, "moe.router.score": "sigmoid"},
    "GLM-4.7-Flash": {
        "moe.router.weight_scale": 1.8,
        "model.first_dense_layers": 1,
        "moe.router.balance_loss": pytest.approx(46 * 0.0001),
    },
    "DeepSeek-V3.2": {
        "model.attention": "sparse",
        "model.indexer.heads": 64,
        "model.indexer.width": 128,
        "model.indexer.keys": 2048,
        "model.rope.factor": 40.0,
        "model.first_dense_layers": 3,
    },
    "GLM-5": {
        "model.indexer.heads": 32,
        "model.value_width": 256,
        "model.rope.theta": 1_000_000,
        "moe.router.weight_scale": 2.5,
        "moe.router.balance_loss": pytest.approx(75 * 0.0001),
    },
    "Solar-Open-100B": {"model.rope.factor": 2.0, "moe.router.renormalize": True},
    "dots.llm1": {"model.sliding_window": None, "model.qk_norm": "head"},
    "Hy3": {"moe.router.weight_scale": 2.826, "model.rope.theta": 11_158_840.0},
    "ERNIE-4.5-21B-A3B": {
        "moe.router.renormalize": True,
        "moe.router.balance_loss": pytest.approx(6 * 0.001),
        "model.first_dense_layers": 1,
    },
    "Hunyuan-A13B": {
        "model.qk_norm": "rotated",
        "model.rope.theta": pytest.approx(10_000 * 1000 ** (128 / 126)),
        "moe.num_shared_experts": 1,
    },
    "FlexOlmo-7x7B-1T": {"model.block_norm": "after", "model.qk_norm": "full"},
    "Granite-3.0-1B-A400M": {
        "model.embedding_scale": 12.0,
        "model.residual_scale": 0.22,
        "model.score_scale": 1 / 64,
        "model.logit_divisor": 6.0,
    },
    "Llama-3.1-8B": {
        "model.moe_every": None,
        "model.mlp_hidden": 14336,
        "model.rope.scaling": "llama3",
        "model.rope.low_frequency_factor": 1.0,
        "model.attention_bias": False,
    },
    "Mistral-7B-v0.1": {"model.moe_every": None, "model.sliding_window": 4096},
    "Qwen2.5-0.5B": {
        "model.moe_every": None,
        "model.head_width": 64,
        "model.attention_bias": True,
        "model.sliding_window": None,
    },
    "Qwen3-0.6B": {"model.moe_every": None, "model.head_width": 128, "model.qk_norm": "head"},
    "Qwen3.5-35B-A3B": {
        "model.rope_width": 64,
        "model.full_attention_every": 4,
        "model.linear.form": "gated_delta",
        "moe.router.renormalize": True,
        "moe.shared_gate": True,
        "moe.router.balance_loss": pytest.approx(8 * 0.001),
    },
    "Kimi-Linear-48B-A3B": {
        "model.positions": "none",
        "model.linear.form": "kimi_delta",
        "model.linear.key_heads": 32,
        "model.linear.value_width": 128,
        "model.layer_attention": (*("linear",) * 3, "full") * 6 + ("linear", "linear", "full"),
        "model.first_dense_layers": 1,
        "model.q_latent": None,
        "moe.router.score": "sigmoid",
        "moe.router.weight_scale": 2.446,
    },
    "Gemma-4-26B-A4B": {
        "model.sliding_window": 1024,
        "model.full_attention_every": 6,
        "model.full_attention.head_width": 512,
        "model.full_attention.num_kv_heads": 2,
        "model.full_attention.keys_are_values": True,
        "model.full_attention.theta": 1_000_000,
        "model.full_attention.turned_channels": 128,
        "model.embedding_scale": 2816**0.5,
        "model.logit_cap": 30.0,
        "moe.num_shared_experts": 3,
        "moe.shared_hidden": None,
    },
    "Nemotron-3-Super-120B-A12B": {
        "model.num_layers": 88,
        "moe.latent": 1024,
        "moe.router.weight_scale": 5.0,
        "moe.router.balance_loss": pytest.approx(40 * 0.0001),
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model.num_layers": 52,
        "model.positions": "none",
        "model.activation": "relu2",
        "model.linear.form": "mamba2",
        "model.linear.key_heads": 8,
        "model.linear.value_heads": 64,
        "model.linear.convolution_bias": True,
        "model.linear.least_step": 0.001,
        "moe.latent": None,
        "moe.num_shared_experts": 2,
        "moe.router.score": "sigmoid",
        "moe.router.weight_scale": 2.5,
        "moe.router.balance_loss": pytest.approx(23 * 0.0001),
    },
    "Trinity-Mini": {
        "model.positions": "window",
        "model.sliding_window": 2048,
        "model.full_attention_every": 4,
        "model.first_dense_layers": 2,
        "model.embedding_scale": 2048**0.5,
        "moe.router.weight_scale": 2.826,
        "moe.router.balance_loss": pytest.approx(30 * 0.0001),
    },
    "MiMo-V2-Flash": {
        "model.sliding_window": 129,
        "model.layer_attention": ("full", *(*("window",) * 4, "full") * 1)
        + (*("window",) * 5, "full") * 7,
        "model.num_kv_heads": 8,
        "model.full_attention.num_kv_heads": 4,
        "model.full_attention.sinks": False,
        "model.full_attention.theta": 5_000_000,
        "model.rope.theta": 10_000,
        "model.rope_width": 64,
        "model.value_width": 128,
        "model.value_scale": 0.707,
        "moe.router.weight_scale": 1.0,
        "model.norm_epsilon": 1e-5,
    },
    "Mistral-Small-4-119B": {
        "model.rope.query_growth": 0.1,
        "model.rope.trained_length": 8192,
        "model.rope.factor": 128.0,
        "model.rope.mscale_all_dim": 1.0,
        "model.q_latent": 1024,
        "model.rope_width": 64,
        "moe.router.renormalize": True,
    },
}


def read(config):
    return family_of(config).read(config)


ALTERED = ("dtype", "torch_dtype", "transformers_version", "rope_parameters", "rope_scaling")
# Of published files: how weights are stored, and what other keys say too.
NOT_WRITTEN = (
    "quantization_config",
    "qk_head_dim",
    "experts_per_token",
    "expert_hidden_dim",
    "shared_intermediate_size",
)
# Of files that transformers 5 wrote: what is written under another name, or follows from others.
FOLLOWING = ("num_local_experts", "partial_rotary_factor", "head_dim", "qk_head_dim")
FOLLOWING += ("per_layer_config",)


def assert_written(config, left_out):
    """Checks that an export of a file's model has the keys of the file."""
    table = family_of(config)
    written = table.write(from_settings(table.read(config)), config)
    for key, value in config.items():
        if key in (*ALTERED, *left_out) or value is None:
            continue
        if key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            value = 0  # is left out, unless `model.predict_ahead` asks for it
        if key == "use_bidirectional_attention":
            value = None  # it is of images, which an export has none of
        if key == "model_type":
            value = table.name  # Kimi-K2 has a name of its own
        assert written[key] == value, key
    return written


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_its_export_has_the_same_keys(name):
    config = PUBLISHED[name]
    settings, known = read(config), KNOWN.get(name, {})
    check(from_settings(settings))
    assert {key: settings[key] for key in known} == known
    if not settings.get("model.first_dense_layers") and settings["model.moe_every"] is not None:
        assert "model.mlp_hidden" not in settings
    written = assert_written(config, NOT_WRITTEN).get("rope_scaling") or {}
    assert written | (config.get("rope_scaling") or {}) == written


@pytest.mark.parametrize(("family", "name"), all_cases())
def test_export_writes_the_keys_that_were_read(family, name):
    assert_written(cases_of(family)[name]["config"], FOLLOWING)


@pytest.mark.parametrize(("share", "width"), [(1.0, None), (0.5, 64), (0.25, 32)])
def test_an_export_says_how_many_channels_rotate_also_where_all_do(share, width):
    """A file of GLM without the key would mean half of them."""
    cfg = from_settings(read({**PUBLISHED["GLM-4.5"], "partial_rotary_factor": share}))
    assert cfg.model.rope_width == width
    assert family_named("glm4_moe").write(cfg, {})["partial_rotary_factor"] == share


def test_any_count_of_rotating_channels_has_a_fraction_that_is_cut_down_to_it():
    """As code of the families does: 0.1 * 30 is more than 3, and 29 / 100 * 100 less than 29."""
    for head in range(1, 257):
        for rotated in range(1, head + 1):
            share = _share(rotated, head)
            assert int(head * share) == rotated
            assert share <= 1


def test_a_number_of_first_dense_blocks_says_nothing_of_other_patterns():
    config = {**PUBLISHED["Qwen3-30B-A3B"], "first_k_dense_replace": 0}
    assert read(config) == read(PUBLISHED["Qwen3-30B-A3B"])
    for pattern in ({"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}):
        with pytest.raises(InputError, match="`first_k_dense_replace` = 0 is a key whose meaning"):
            read({**config, **pattern})


def test_names_are_found_and_unknown_ones_refused():
    assert [family_named(family.name) for family in FAMILIES] == list(FAMILIES)
    with pytest.raises(InputError, match="Known: mixtral, olmoe, qwen2_moe"):
        family_named("bert")


def test_the_architecture_tells_families_of_one_kind_apart():
    config = {**PUBLISHED["MiniMax-M2"], "model_type": "minimax"}
    assert family_of(config).name == "minimax_m2"
    with pytest.raises(InputError, match="no family"):
        family_of({**config, "architectures": ["MiniMaxForCausalLM"]})


def test_mimo_may_say_all_in_the_forms_of_authors_and_of_transformers():
    """As transformers saves the config of a released folder, with floats for whole numbers."""
    config = PUBLISHED["MiMo-V2-Flash"]
    full = [index == 0 or index % 6 == 5 for index in range(48)]
    theirs = {
        "layer_types": ["full_attention" if each else "sliding_attention" for each in full],
        "mlp_layer_types": ["dense", *["sparse"] * 47],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {**TWO_BASES["full_attention"], "rope_theta": 5_000_000.0},
            "sliding_attention": TWO_BASES["sliding_attention"],
        },
        "sliding_window": 129,
    }
    assert read({**config, **theirs}) == read(config)
    written = family_of(config).write(from_settings(read(config)), {})
    assert {key: written[key] for key in theirs} == theirs | {
        "rope_parameters": {
            blocks: {**own, "partial_rotary_factor": pytest.approx(1 / 3)}
            for blocks, own in theirs["rope_parameters"].items()
        }
    }
    assert written["hybrid_layer_pattern"] == config["hybrid_layer_pattern"]
    assert (written["sliding_window_size"], written["swa_num_key_value_heads"]) == (128, 8)


def test_training_settings_are_settings():
    assert set(TRAINING) <= set(fields())


TWO_ROPES = PUBLISHED["Gemma-4-26B-A4B"]["rope_parameters"]
TWO_BASES = {
    blocks: {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.334}
    for blocks in TWO_ROPES
}
GROWING = PUBLISHED["Mistral-Small-4-119B"]["rope_parameters"]
REFUSED = [
    ("DeepSeek-V3", {"rope_interleave": False}, "`rope_interleave` is False"),
    ("DeepSeek-V3", {"num_key_value_heads": 8}, "`num_key_value_heads` is 8. In latent attention"),
    ("DeepSeek-V3", {"n_shared_experts": 0}, "`n_shared_experts` is 0"),
    ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "`norm_topk_prob` is True"),
    ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "`topk_method` is 'noaux_tc'"),
    ("gpt-oss-20b", {"rope_scaling": None}, "`rope_scaling` is missing"),
    ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "`swiglu_alpha` is 1.0"),
    ("gpt-oss-20b", {"experts_per_token": 3}, "keys disagree: `num_experts_per_tok` is 4"),
    (
        "Qwen1.5-MoE-A2.7B",
        {"layer_types": ["full_attention", "sliding_attention"] * 12},
        "`use_sliding_window` is false or missing",
    ),
    ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "`layer_types` is"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "for each of 24 layers"),
    ("GLM-4.5", {"partial_rotary_factor": 1.5}, "must be above 0 and at most 1"),
    ("GLM-4.5", {"some_key": None}, "`some_key` = None is a key whose meaning"),
    ("MiniMax-M2", {"attn_type_list": [1, 0]}, "`attn_type_list` is [1, 0]"),
    ("MiniMax-M2", {"partial_rotary_factor": 0.25}, "keys disagree: `rotary_dim` is 64"),
    ("Mixtral-8x7B", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor`"),
    ("Mixtral-8x7B", {"num_experts_per_tok": None}, "mixtral's `num_experts_per_tok`"),
    ("Mixtral-8x7B", {"hidden_size": 4097}, "`hidden_size` is 4097, `num_attention_heads` is 32"),
    (
        "Mixtral-8x7B",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_theta": 1.0}},
        "must be one object",
    ),
    ("OLMoE-1B-7B", {"head_dim": 64}, "`head_dim` is 64. In this family"),
    ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "keys disagree: `first_k_dense_replace` is 2"),
    ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 47}, "no layer has experts"),
    ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse"]}, "dense or sparse for each of 47 layers"),
    ("DeepSeek-V3.2", {"indexer_rope_interleave": True}, "`indexer_rope_interleave` is True"),
    ("DeepSeek-V3.2", {"index_topk": None}, "deepseek_v32's `index_topk`"),
    ("DeepSeek-V3.2", {"q_lora_rank": None}, "deepseek_v32's `q_lora_rank`"),
    ("GLM-5", {"indexer_types": ["full", "shared"] * 39}, "each has an indexer of its own"),
    ("GLM-5", {"index_topk_pattern": "FS" * 39}, "`index_topk_pattern` is 'FS"),
    ("GLM-5", {"index_topk_freq": 4}, "`index_topk_freq` is 4"),
    ("GLM-5", {"layer_types": ["full_attention"] * 78}, "`layer_types` is"),
    ("GLM-5", {"indexer_rope_interleave": False}, "`indexer_rope_interleave` is False"),
    ("Solar-Open-100B", {"first_k_dense_replace": 1}, "`first_k_dense_replace` is 1"),
    ("Solar-Open-100B", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
    ("dots.llm1", {"n_shared_experts": None}, "`n_shared_experts`"),
    ("dots.llm1", {"use_sliding_window": True}, "`use_sliding_window` is True"),
    ("Hy3", {"route_norm": False}, "`route_norm` is False"),
    ("Hy3", {"expert_hidden_dim": 512}, "keys disagree: `moe_intermediate_size` is 1536"),
    ("ERNIE-4.5-21B-A3B", {"moe_norm_min": 0.1}, "`moe_norm_min` is 0.1"),
    ("ERNIE-4.5-21B-A3B", {"use_bias": True}, "`use_bias` is True"),
    ("ERNIE-4.5-21B-A3B", {"moe_layer_interval": 0}, "`moe_layer_interval` 0. They must be"),
    ("ERNIE-4.5-21B-A3B", {"moe_layer_start_index": 28}, "leaves none of 28 layers"),
    ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "one number for all 32 layers"),
    ("Hunyuan-A13B", {"num_shared_expert": 2}, "`num_shared_expert` is 2"),
    ("Hunyuan-A13B", {"moe_intermediate_size": 1024}, "keys disagree: `intermediate_size` is 3072"),
    ("Hunyuan-A13B", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "`alpha` of `rope_sc"),
    ("Hunyuan-A13B", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scale by 'dynamic'"),
    ("Granite-3.0-1B-A400M", {"attention_dropout": 0.1}, "make it 0.0 in config.json"),
    ("Granite-3.0-1B-A400M", {"embedding_multiplier": None}, "`embedding_multiplier`"),
    ("Mixtral-8x7B", {"embedding_multiplier": 12.0}, "`embedding_multiplier` = 12.0 is a key"),
    ("Llama-3.1-8B", {"hidden_size": 4097, "head_dim": 128}, "`hidden_size` is 4097. In this"),
    ("Llama-3.1-8B", {"mlp_bias": True}, "`mlp_bias` is True"),
    ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "dynamic"}}, "positions scale by 'dynamic'"),
    (
        "Mistral-7B-v0.1",
        {"attention_bias": True},
        "`attention_bias` is True, mistral computes False",
    ),
    ("Qwen2.5-0.5B", {"use_mrope": True}, "`use_mrope` is True"),
    ("Qwen3-0.6B", {"num_experts": 8}, "`num_experts` = 8 is a key whose meaning for qwen3"),
    ("Qwen3.5-35B-A3B", {"attn_output_gate": False}, "`attn_output_gate` is False"),
    ("Qwen3.5-35B-A3B", {"mlp_only_layers": [1]}, "`mlp_only_layers` is [1]"),
    ("Qwen3.5-35B-A3B", {"norm_topk_prob": False}, "`norm_topk_prob` is False"),
    ("Kimi-Linear-48B-A3B", {"mla_use_nope": False}, "`mla_use_nope` is False"),
    ("Kimi-Linear-48B-A3B", {"num_nextn_predict_layers": 1}, "`num_nextn_predict_layers` is 1"),
    ("Kimi-Linear-48B-A3B", {"linear_head_dim": 64}, "keys disagree: `linear_head_dim` is 64"),
    ("Kimi-Linear-48B-A3B", {"first_k_dense_replace": -1}, "`first_k_dense_replace` is -1"),
    ("Kimi-Linear-48B-A3B", {"first_k_dense_replace": 27}, "no layer has experts"),
    (
        "Kimi-Linear-48B-A3B",
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        "`linear_attn_config` is {'gate_lower_bound': -5.0}. moejax knows full_attn_layers, ",
    ),
    ("Kimi-Linear-48B-A3B", {"linear_attn_config": {"kda_layers": [1, "2"]}}, "once, counted from"),
    (
        "Kimi-Linear-48B-A3B",
        {"layer_types": ["linear_attention"] * 27},
        "each of 27 layers once, counted from 1, and agree",
    ),
    ("Gemma-4-26B-A4B", {"enable_moe_block": False}, "`enable_moe_block` is False"),
    ("Gemma-4-26B-A4B", {"hidden_size_per_layer_input": 256}, "`hidden_size_per_layer_input` is 2"),
    ("Gemma-4-26B-A4B", {"num_kv_shared_layers": 6}, "`num_kv_shared_layers` is 6"),
    ("Gemma-4-26B-A4B", {"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` is"),
    ("Gemma-4-26B-A4B", {"hidden_activation": "silu"}, "`hidden_activation` is 'silu'"),
    ("Gemma-4-26B-A4B", {"hidden_act": "silu"}, "`hidden_act` = 'silu' is a key whose meaning"),
    ("Gemma-4-26B-A4B", {"layer_types": ["full_attention"] * 30}, "has no sliding_attention"),
    ("Gemma-4-26B-A4B", {"global_head_dim": 0}, "`head_dim` is 0. It must be a positive integer"),
    ("Gemma-4-26B-A4B", {"per_layer_config": {"5": {"head_dim": 512}}}, "`per_layer_config` is"),
    (
        "Gemma-4-26B-A4B",
        {"per_layer_config": {str(index): {"head_dim": 512} for index in range(5, 30, 6)}},
        "`global_head_dim` or `num_global_key_value_heads` stands beside `per_layer_config`",
    ),
    (
        "Gemma-4-26B-A4B",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
        "an object for sliding_attention and one for full_attention",
    ),
    *(
        ("Gemma-4-26B-A4B", {"rope_parameters": {**TWO_ROPES, blocks: own}}, f"of {blocks} are")
        for blocks, own in (
            ("sliding_attention", {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}),
            ("sliding_attention", {"rope_type": "default", "partial_rotary_factor": 0.5}),
            ("full_attention", {**TWO_ROPES["full_attention"], "factor": 2.0}),
            ("full_attention", {**TWO_ROPES["full_attention"], "partial_rotary_factor": 0.001}),
            ("full_attention", {"rope_type": "yarn"}),
            ("full_attention", None),
        )
    ),
    *(
        ("Nemotron-3-Nano-30B-A3B", {key: value}, f"`{key}` is {value!r}")
        for key, value in (
            ("n_shared_experts", 2),
            ("mlp_hidden_act", "silu"),
            ("mamba_hidden_act", "gelu"),
            ("tie_word_embeddings", True),
            ("attention_bias", True),
            ("mamba_proj_bias", True),
            ("mlp_bias", True),
            ("use_bias", True),
            ("residual_in_fp32", True),
            ("sliding_window", 4096),
            ("hidden_dropout", 0.1),
        )
    ),
    ("Nemotron-3-Nano-30B-A3B", {"norm_eps": 1e-6}, "keys disagree: `layer_norm_epsilon` is 1e-05"),
    ("Nemotron-3-Nano-30B-A3B", {"num_hidden_layers": 51}, "keys disagree: `num_hidden_layers` is"),
    (
        "Nemotron-3-Nano-30B-A3B",
        {"layer_types": ["moe"]},
        "One must say linear_attention",
    ),
    ("Nemotron-3-Nano-30B-A3B", {"hybrid_override_pattern": "MX"}, "One must say linear_attention"),
    (
        "Nemotron-3-Nano-30B-A3B",
        {"hybrid_override_pattern": None},
        "no value of nemotron_h's `hybrid_override_pattern`",
    ),
    (
        "Nemotron-3-Nano-30B-A3B",
        {"layers_block_type": ["mamba"] * 52},
        "`layers_block_type` has 52 layers, `hybrid_override_pattern` is 'MEM",
    ),
    ("Nemotron-3-Nano-30B-A3B", {"mamba_d_conv": 4}, "`mamba_d_conv` = 4 is a key whose meaning"),
    ("Trinity-Mini", {"route_norm": False}, "`route_norm` is False"),
    ("Trinity-Mini", {"n_group": 2}, "`n_group` is 2"),
    ("Trinity-Mini", {"layer_types": ["full_attention"]}, "for each of 32 layers"),
    ("Trinity-Mini", {"num_shared_experts": 0}, "`num_shared_experts` is 0"),
    (
        "Trinity-Mini",
        {"global_attn_every_n_layers": 0, "layer_types": None},
        "every_n_layers` is 0",
    ),
    ("MiMo-V2-Flash", {"swa_num_key_value_heads": 4}, "reads twice `num_key_value_heads`, 8"),
    ("MiMo-V2-Flash", {"swa_head_dim": 128}, "keys disagree: `head_dim` is 192"),
    ("MiMo-V2-Flash", {"swa_v_head_dim": 64}, "keys disagree: `v_head_dim` is 128"),
    ("MiMo-V2-Flash", {"swa_num_attention_heads": 32}, "keys disagree: `num_attention_heads`"),
    ("MiMo-V2-Flash", {"add_full_attention_sink_bias": True}, "sink_bias` is True"),
    ("MiMo-V2-Flash", {"n_shared_experts": 1}, "`n_shared_experts` is 1"),
    ("MiMo-V2-Flash", {"hybrid_layer_pattern": [2] * 48}, "must say 0 for full_attention"),
    ("MiMo-V2-Flash", {"hybrid_layer_pattern": [1] * 48}, "with sliding_attention and full_att"),
    ("MiMo-V2-Flash", {"layer_types": ["full_attention"] * 48}, "agree with the second"),
    ("MiMo-V2-Flash", {"moe_layer_freq": [1] * 3}, "dense or sparse for each of 48 layers"),
    ("MiMo-V2-Flash", {"sliding_window_size": 0}, "`sliding_window_size` is 0"),
    ("MiMo-V2-Flash", {"partial_rotary_factor": 1.5}, "288 of a head's 192 channels would"),
    ("MiMo-V2-Flash", {"rope_parameters": {"rope_theta": 1.0}}, "an object for sliding_attention"),
    ("MiMo-V2-Flash", {"rope_parameters": TWO_BASES}, "keys disagree: `rope_theta` is 5000000"),
    ("Mistral-Small-4-119B", {"n_group": 2}, "`n_group` is 2"),
    ("Mistral-Small-4-119B", {"rope_interleave": False}, "`rope_interleave` is False"),
    ("Mistral-Small-4-119B", {"rope_parameters": None}, "`rope_scaling` is missing"),
    *(
        ("Mistral-Small-4-119B", {"rope_parameters": {**GROWING, **own}}, fragment)
        for own, fragment in (
            ({"llama_4_scaling_beta": None}, "`llama_4_scaling_beta` of `rope_scaling` is None"),
            ({"llama_4_scaling_beta": -0.1}, "`llama_4_scaling_beta` is -0.1. Queries grow"),
            ({"original_max_position_embeddings": None}, "is None, `llama_4_scaling_beta` is 0.1"),
            ({"partial_rotary_factor": 0.25}, "keys disagree: `partial_rotary_factor` is not"),
            ({"rope_type": "default"}, "positions scale by 'default' (`rope_parameters`)"),
            ({"mrope_section": [1]}, "has `mrope_section` = [1]"),
        )
    ),
    (
        "Mistral-Small-4-119B",
        {"rope_scaling": {"type": "yarn"}, "rope_parameters": None},
        "Name it `rope_parameters`",
    ),
    ("Qwen3-30B-A3B", {"rope_scaling": {"mrope_section": [1]}}, "has `mrope_section` = [1]"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "`decoder_sparse_step` is 0"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": list(range(48))}, "leaves none of 48 layers"),
    (
        "Mixtral-8x7B",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 2.5},
        "`original_max_position_embeddings` is 2.5. Scaling of kind yarn",
    ),
]
# What a family has no key for: settings of a run, and what its export says.
WITHOUT_KEY = [
    ("Qwen3-30B-A3B", {"model.moe_every": None}, "the model has no experts"),
    ("Qwen3-0.6B", {"model.moe_every": 1}, "`model.moe_every` = 1"),
    ("Llama-3.1-8B", {"model.sliding_window": 64}, "no key for `model.sliding_window` = 64"),
    ("DeepSeek-V3", {"moe.num_shared_experts": 0}, "`moe.num_shared_experts` is 0"),
    ("GLM-4.5", {"model.qk_norm": "full"}, "`model.qk_norm` is full"),
    ("Mixtral-8x7B", {"model.rope_width": 64}, "`model.rope_width` is 64, but here all channels"),
    ("DeepSeek-V3", {"model.attention": "grouped"}, "`model.attention` is grouped"),
    ("GLM-5", {"model.attention": "latent"}, "`model.attention` is latent"),
    (
        "ERNIE-4.5-21B-A3B",
        {"model.layer_mlps": ("experts", "dense") + ("experts",) * 26},
        "experts are not in each n-th block of a range",
    ),
    ("Mixtral-8x7B", {"model.residual_scale": 0.5}, "no key for `model.residual_scale` = 0.5"),
    ("OLMoE-1B-7B", {"model.block_norm": "after"}, "no key for `model.block_norm` = 'after'"),
    ("DeepSeek-V3", {"model.positions": "none"}, "no key for `model.positions` = 'none'"),
    ("Kimi-Linear-48B-A3B", {"model.linear.form": "gated_delta"}, "form` is gated_delta"),
    ("Kimi-Linear-48B-A3B", {"model.linear.value_width": 64}, "key for `model.linear.value_width`"),
    ("Gemma-4-26B-A4B", {"model.embedding_scale": 2.0}, "`model.embedding_scale` is 2.0. It is"),
    ("Gemma-4-26B-A4B", {"moe.own_norms": False}, "no key for `moe.own_norms` = False"),
    (
        "Gemma-4-26B-A4B",
        {"model.full_attention.keys_are_values": False},
        "no key for `model.full_attention.num_kv_heads` = 2",
    ),
    (
        "Gemma-4-26B-A4B",
        {"model.full_attention_every": None, "model.layer_attention": ("full", *("window",) * 29)},
        "no key for",
    ),
    ("Nemotron-3-Nano-30B-A3B", {"model.linear.form": "kimi_delta"}, "form` is kimi_delta"),
    ("Nemotron-3-Nano-30B-A3B", {"model.positions": "rotary"}, "no key for `model.positions`"),
    ("Nemotron-3-Nano-30B-A3B", {"model.tie_embeddings": True}, "key for `model.tie_embeddings`"),
    ("Nemotron-3-Nano-30B-A3B", {"model.layer_mlps": ()}, "does not have attention, an MLP or exp"),
    ("Trinity-Mini", {"model.embedding_scale": 2.0}, "`model.embedding_scale` is 2.0. It is"),
    ("Trinity-Mini", {"model.positions": "rotary"}, "no key for `model.positions` = 'rotary'"),
    ("MiMo-V2-Flash", {"model.num_kv_heads": 16}, "no key for `model.full_attention.num_kv_heads`"),
    ("MiMo-V2-Flash", {"model.full_attention.sinks": True}, "no key for `model.full_attention.s"),
    ("DeepSeek-V3", {"model.rope.query_growth": 0.1}, "no key for `model.rope.query_growth` = 0.1"),
    ("Mixtral-8x7B", {"model.value_width": 64}, "no key for `model.value_width` = 64"),
    ("Mixtral-8x7B", {"model.value_norm": True}, "no key for `model.value_norm` = True"),
    ("Mixtral-8x7B", {"model.activation": "geglu"}, "no key for `model.activation` = 'geglu'"),
    ("Mixtral-8x7B", {"moe.num_shared_experts": 1}, "no key for `moe.num_shared_experts` = 1"),
]


@pytest.mark.parametrize(("name", "changes", "fragment"), REFUSED, ids=str)
def test_values_that_cannot_be_computed_are_refused_by_name(name, changes, fragment):
    with pytest.raises(InputError) as raised:
        read({**copy.deepcopy(PUBLISHED[name]), **changes})
    assert fragment in str(raised.value)


@pytest.mark.parametrize("value", [None, False])
def test_a_value_that_means_what_is_computed_is_taken(value):
    """Code of DeepSeek asks whether `norm_topk_prob` is true: null is not."""
    config = PUBLISHED["DeepSeek-V2-Lite"]
    assert read({**config, "norm_topk_prob": value}) == read(config)


@pytest.mark.parametrize(("name", "changes", "fragment"), WITHOUT_KEY, ids=str)
def test_settings_without_a_key_of_the_family_are_refused_at_export(name, changes, fragment):
    config = PUBLISHED[name]
    table = family_of(config)
    settings = flat_settings(from_settings(read(config))) | changes
    with pytest.raises(InputError) as raised:
        table.write(from_settings(settings), config)
    assert fragment in str(raised.value)


def test_all_channels_and_an_equal_width_of_values_are_written_as_none():
    grouped = from_settings(read(PUBLISHED["Mixtral-8x7B"]))
    named = change(grouped, {"model.rope_width": 128})
    assert differences(grouped, named) == []
    latent = from_settings(read({**PUBLISHED["DeepSeek-V3"], "v_head_dim": 192}))
    assert differences(latent, change(latent, {"model.value_width": None})) == []
    assert differences(latent, change(latent, {"model.value_width": 128})) == [
        ("model.value_width", None, 128)
    ]
    # In latent attention the width is that of a part of each head, so it is not left out.
    rotating = change(latent, {"model.rope_width": 192})
    assert differences(latent, rotating) == [("model.rope_width", 64, 192)]


def test_a_factor_of_cos_and_sin_is_written_as_it_was_read():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = {**PUBLISHED["Mixtral-8x7B"], "rope_scaling": {**yarn, "attention_factor": 1.25}}
    written = family_of(config).write(from_settings(read(config)), config)
    assert written["rope_scaling"]["attention_factor"] == 1.25
    assert read(written) == read(config)


def test_a_stretch_of_one_is_none():
    scaling = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}
    assert "model.rope.scaling" not in read({**PUBLISHED["Mixtral-8x7B"], "rope_scaling": scaling})


def test_mscale_outside_of_latent_attention_is_a_factor_of_cos_and_sin():
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    settings = read({**PUBLISHED["Mixtral-8x7B"], "rope_scaling": scaling})
    assert "model.rope.mscale" not in settings
    assert settings["model.rope.attention_factor"] == pytest.approx(1.1386294 / 1.0693147)
    assert settings["model.rope.trained_length"] == 32768  # as transformers assumes
    # A factor that the file names comes first, as there.
    named = read(
        {**PUBLISHED["Mixtral-8x7B"], "rope_scaling": scaling | {"attention_factor": 1.25}}
    )
    assert named["model.rope.attention_factor"] == 1.25


def test_windows_by_turns_of_qwen2_need_their_switch():
    config = {**PUBLISHED["Qwen1.5-MoE-A2.7B"], "use_sliding_window": True, "max_window_layers": 24}
    settings = read(config)
    assert settings["model.full_attention_every"] == 2
    assert settings["model.sliding_window"] == 32768
    seen = read({**config, "max_window_layers": 3})
    assert seen["model.layer_attention"] == ("window", "full", "window", *("full",) * 21)
    assert read(family_of(config).write(from_settings(seen), config)) == seen


@pytest.mark.parametrize(
    ("layers", "step", "listed", "experts"),
    [
        (4, 1, [], [0, 1, 2, 3]),
        (5, 2, [], [1, 3]),
        (4, 1, [0, 1], [2, 3]),
        (8, 2, [1, 5], [3, 7]),
        (8, 1, [1, 4, 5], [0, 2, 3, 6, 7]),
        (8, 3, [], [2, 5]),
    ],
)
def test_any_blocks_may_be_dense(layers, step, listed, experts):
    changes = {"decoder_sparse_step": step, "mlp_only_layers": listed}
    config = {**PUBLISHED["Qwen3-30B-A3B"], "num_hidden_layers": layers, **changes}
    cfg = from_settings(read(config))
    check(cfg)
    kinds = [kind.mlp for kind in block_kinds(cfg.model)]
    assert kinds == ["moe" if index in experts else "dense" for index in range(layers)]
    written = family_of(config).write(cfg, {})
    assert differences(from_settings(read(written)), cfg) == []


def test_heads_of_blocks_without_a_window_are_said_in_two_ways():
    """As files are released, and as transformers writes them; defaults of its class beside."""
    config = PUBLISHED["Gemma-4-26B-A4B"]
    keys = ("global_head_dim", "num_global_key_value_heads")
    plain = {key: x for key, x in config.items() if key not in keys}
    own = {"head_dim": 512, "num_key_value_heads": 2}
    layers = {str(index): own for index in range(5, 30, 6)}
    assert read({**plain, "per_layer_config": layers}) == read(config)
    assert read({**plain, "num_global_key_value_heads": 2}) == read(config)
    assert read({key: x for key, x in config.items() if key != "layer_types"}) == read(config)
    assert read({key: x for key, x in config.items() if key != "rope_parameters"}) == read(config)
    windows = [*config["layer_types"][:-1], "sliding_attention"]
    assert read({**config, "layer_types": windows}) == read(config)
    apart = read({**config, "attention_k_eq_v": False})
    assert apart["model.full_attention.num_kv_heads"] is None


def test_layers_of_nemotron_h_are_a_pattern_or_a_list():
    config = PUBLISHED["Nemotron-3-Nano-30B-A3B"]
    names = {"M": "mamba", "E": "moe", "*": "attention"}  # as older transformers call them
    kinds = [names[sign] for sign in config["hybrid_override_pattern"]]
    listed = {key: x for key, x in config.items() if key not in ("hybrid_override_pattern",)}
    assert read({**listed, "layers_block_type": kinds}) == read(config)
    del listed["num_hidden_layers"]
    assert read({**listed, "layer_types": kinds}) == read(config)


def test_a_nemotron_h_without_experts_has_no_settings_of_experts():
    config = PUBLISHED["Nemotron-3-Nano-30B-A3B"]
    keys = {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}
    settings = read({**config, **keys})
    assert settings["model.moe_every"] is None
    assert settings["model.mlp_hidden"] == 1856
    assert not [name for name in settings if name.startswith("moe.")]
    cfg = from_settings(settings)
    check(cfg)
    written = family_of(config).write(cfg, config)
    assert written["hybrid_override_pattern"] == "M-M*-"
    assert differences(from_settings(read(written)), cfg) == []


@pytest.mark.parametrize("turned", [2, 4, 6, 58, 62])
def test_any_count_of_pairs_that_turn_is_written_as_a_share(turned):
    """Of 62 channels: 6 / 62 times 62 is less than 6."""
    config = PUBLISHED["Gemma-4-26B-A4B"]
    cfg = from_settings({**read(config), "model.full_attention.head_width": 62})
    cfg = change(cfg, {"model.full_attention.turned_channels": turned})
    written = family_of(config).write(cfg, config)
    assert differences(from_settings(read(written)), cfg) == []


def test_a_pattern_that_is_said_in_two_ways_is_one_model():
    """A pattern that comes once was refused at export: what was written read as other settings."""
    settings = read(
        {**PUBLISHED["Qwen3-30B-A3B"], "num_hidden_layers": 3, "mlp_only_layers": [0, 1]}
    )
    own = {"model.first_dense_layers": 0, "model.moe_every": 3}
    cfg = from_settings({**settings, **own})
    assert differences(from_settings(settings), cfg) == []
    assert family_named("qwen3_moe").write(cfg, {})["mlp_only_layers"] == [0, 1]


def test_a_shared_expert_of_any_width_is_read_and_written():
    config = {**PUBLISHED["Qwen1.5-MoE-A2.7B"], "shared_expert_intermediate_size": 5633}
    cfg = from_settings(read(config))
    assert (cfg.moe.num_shared_experts, cfg.moe.shared_width) == (1, 5633)
    assert family_of(config).write(cfg, config)["shared_expert_intermediate_size"] == 5633


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_layers_without_bound_are_refused_before_they_are_listed(tmp_path, family):
    (case, *_) = cases_of(family).values()
    folder = golden_folder(tmp_path / "folder", case)
    (folder / "config.json").write_text(json.dumps(case["config"] | {"num_hidden_layers": 10**10}))
    with Folder(folder) as opened, pytest.raises(InputError, match="It may be 10000"):
        config_of(opened)
