"""Keys of `config.json` that are missing, null, or state what a family computes anyway."""

import json

import numpy as np
import pytest

from moejax.config.pattern import settings_of
from moejax.config.schema import FullAttentionConfig
from moejax.errors import InputError
from moejax.hf.families import family_named, family_of
from moejax.hf.families.family import (
    ANYWHERE,
    STORAGE,
    flat_settings,
    from_settings,
    stated,
)
from moejax.model.rope import frequencies, scale_of_scores
from tests.hf.config_keys import GOLDEN, of_positions, released, without
from tests.hf.golden import cases_of
from tests.hf.test_families import PUBLISHED, read

DEFAULTS = json.loads(GOLDEN.read_text())["cases"]


def outcome(config):
    """The settings that a file says, and layers that predict ahead; the message of a refusal."""
    try:
        family = family_of(config)
        return from_settings(family.read(config)), family.layers_ahead(config)
    except InputError as error:
        return str(error)


def rope_of(cfg):
    """Frequencies, the factor of cos and sin, and that of scores, as the golden file has them."""
    model = cfg.model
    differ = model.full_attention != FullAttentionConfig()
    kinds, pairs, factor = (1, None) if differ else (None,), [], 1.0
    for own in (settings_of(model, window) for window in kinds):
        found_R, factor = frequencies(own.rotated_channels, own.rope)
        turned = own.full_attention.turned_channels or 2 * len(found_R)
        pairs += [x if 2 * index < turned else 0.0 for index, x in enumerate(found_R.tolist())]
    return [*pairs, factor, scale_of_scores(model)]


@pytest.mark.parametrize("name", DEFAULTS)
def test_missing_keys_and_nulls_mean_what_transformers_takes_them_for(name):
    case = DEFAULTS[name]
    family, golden = name.split(": ", 1)
    config = released(cases_of(family)[golden]["config"])
    table = family_named(family)
    free = {*table.unused, *ANYWHERE, *STORAGE}
    free |= {"head_dim", "qk_head_dim"} if "kv_lora_rank" in config else set()  # follow
    compared = 0
    for change, file in without(config).items():
        theirs, key = case["changes"][change], change.split()[-1].split(".")[-1]
        ours = outcome(file)
        if isinstance(ours, str):
            named = (key, "num_experts", "rope_scaling", "rope_parameters", "model.")
            assert any(f"`{k}" in ours for k in named), ours
            continue
        if key in free:
            continue
        assert not isinstance(theirs, str), f"{change}: transformers makes no model: {theirs}"
        whole = {**case["whole"], **theirs}
        gone, rope = whole.pop("absent", ()), whole.pop("rope", None)
        if of_positions(change):  # a null may be gone from what transformers made of the file
            np.testing.assert_allclose(rope_of(ours[0]), rope, rtol=2e-6, err_msg=change)
        else:
            assert ours == outcome({k: v for k, v in whole.items() if k not in gone}), change
        compared += 1
    assert compared >= 10


def test_missing_keys_of_the_reported_file_are_those_of_deepseek_v3():
    gone = ("n_group", "topk_group", "routed_scaling_factor")
    config = {key: x for key, x in PUBLISHED["DeepSeek-V3"].items() if key not in gone}
    assert read(config) == read(PUBLISHED["DeepSeek-V3"])


def test_keys_that_state_what_the_family_computes_pass():
    stating = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    config = PUBLISHED["Qwen3-30B-A3B"]
    assert read({**config, **stating}) == read(config)
    stating |= {"n_group": 1, "scoring_func": "softmax", "n_routed_experts": 128}
    assert read({**config, **stating}) == read(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_takes_its_own_constants_and_lists_the_others_together(name):
    config = PUBLISHED[name]
    known = {key for part in family_of(config).all_parts for key in part.keys}
    says = stated(flat_settings(from_settings(read(config))))
    assert outcome({**says, **config}) == outcome(config)
    wrong = {"qkv_bias": 3, "mlp_bias": 1, "n_group": 77, "some": 1, "other": [2]}
    wrong = {key: value for key, value in wrong.items() if key not in known}
    message = outcome({**config, **wrong})
    assert all(f"`{key}`" in message for key in wrong)
