"""A plan's config of a published model: what its file says, what is taken, what is refused."""

import json

import pytest

from moejax.config.checks import check
from moejax.errors import InputError
from moejax.plan.published import read_published
from tests.plan.others.plans import PUBLISHED


def written(folder, name, **changed):
    file = folder / "config.json"
    file.write_text(json.dumps(PUBLISHED[name] | changed))
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_becomes_a_config_that_may_be_planned(tmp_path, name):
    published = read_published(written(tmp_path, name), 64)
    check(published.cfg)
    assert published.cfg.model.dtype == "bfloat16"
    assert published.cfg.model.num_layers == PUBLISHED[name]["num_hidden_layers"]
    assert read_published(tmp_path, 64).cfg == published.cfg  # a folder, too


def test_what_nobody_said_is_taken_and_told(tmp_path):
    published = read_published(written(tmp_path, "Mixtral-8x7B"), 48)
    assert published.cfg.data.sequence_length == 4096
    assert published.cfg.train.batch_sequences == 48 * 22  # the least multiple above 4 Mi tokens
    told = published.describe()
    assert "family mixtral" in told
    for part in ("sequence_length=4096", "batch_sequences=1056", "dtype=bfloat16"):
        assert part in told


def test_a_router_over_one_expert_is_refused_as_in_training(tmp_path):
    one = {"num_local_experts": 1, "num_experts_per_tok": 1}
    published = read_published(written(tmp_path, "Mixtral-8x7B", **one), 64)
    with pytest.raises(InputError, match=r"no gradient.*model\.moe_every=none"):
        check(published.cfg)


def test_overrides_win_and_are_not_told_as_taken(tmp_path):
    words = ["--config.train.batch_sequences=96", "data.sequence_length=512"]
    published = read_published(written(tmp_path, "Mixtral-8x7B"), 48, words)
    assert (published.cfg.train.batch_sequences, published.cfg.data.sequence_length) == (96, 512)
    assert set(published.taken) == {"model.dtype"}


def test_a_model_made_for_short_sequences_is_planned_with_those(tmp_path):
    file = written(tmp_path, "Mixtral-8x7B", max_position_embeddings=2048)
    cfg = read_published(file, 64).cfg
    assert (cfg.data.sequence_length, cfg.train.batch_sequences) == (2048, 2048)


def refused(path, words=()):
    with pytest.raises(InputError) as error:
        read_published(path, 8, words)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_bad_files_are_refused_by_name(tmp_path):
    assert "has no config.json" in refused(tmp_path)
    assert "has no config.json" in refused(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    file.write_text("{")
    assert "is damaged" in refused(file)
    file = written(tmp_path, "Mixtral-8x7B", model_type="opt", architectures=["OPTForCausalLM"])
    assert "no family for `model_type` 'opt'" in refused(file)
    file = written(tmp_path, "Mixtral-8x7B", strange=3)
    assert "`strange` = 3" in refused(file)


def test_overrides_that_change_the_model_are_refused(tmp_path):
    file = written(tmp_path, "Mixtral-8x7B")
    text = refused(file, ["model.num_layers=3"])
    assert "--config.model.num_layers changes the model. It is 3" in text


def test_layers_without_bound_are_refused_before_they_are_listed(tmp_path):
    file = written(tmp_path, "Qwen3-30B-A3B", num_hidden_layers=2_000_000_000)
    assert "`num_hidden_layers` is 2000000000. It may be 10000." in refused(file)


def test_keys_that_are_missing_are_noticed_as_an_import_does(tmp_path):
    config = dict(PUBLISHED["DeepSeek-V3"])
    del config["routed_scaling_factor"], config["q_lora_rank"], config["num_key_value_heads"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    cfg = read_published(file, 64).cfg
    assert (cfg.moe.router.weight_scale, cfg.model.q_latent) == (2.5, 1536)
    file = written(tmp_path, "DeepSeek-V3", num_attention_heads=64)
    assert "`num_key_value_heads` is 128" in refused(file)
