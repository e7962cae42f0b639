"""Rules between `lora` and other settings; tests/step/test_adapters.py has those of the model."""

import pytest

from moejax.config.checks import check
from moejax.config.compression import GRADIENTS, NO_COMPRESSION, build_compression
from moejax.config.load import from_dict, load_config
from moejax.config.schema import CompressionConfig, Config, LoraConfig
from moejax.errors import InputError

CASES = {
    ("lora.alpha=8",): ["`lora.alpha` = 8.0 has no effect", "`lora.rank` is none"],
    ("lora.targets=moe.w_in",): ["`lora.targets`", "has no effect", "`lora.rank` is none"],
    ("lora.base_dtype=bfloat16",): ["`lora.base_dtype`", "has no effect"],
    ("lora.rank=0",): ["`lora.rank` must be at least 1", "Got 0"],
    ("lora.rank=4", "lora.alpha=0"): ["`lora.alpha` must be above 0"],
    ("lora.rank=4", "lora.base_dtype=int8"): ["`lora.base_dtype` must be one of float32, bfloat16"],
    ("lora.rank=4", "optimizer.name=muon"): ["`optimizer.name` is muon", "`lora.rank` is 4"],
    ("lora.rank=4", "mesh.nodes=2", "compression.dense_gradient=int8"): [
        "`compression.dense_gradient` = 'int8' has no effect",
        "gradients of adapters are not compressed",
    ],
    ("lora.rank=4", "compression=hybrid", "compression.start_layer=1"): [
        "`compression.start_layer` = 1 has no effect"
    ],
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_what_contradicts_adapters_is_refused_in_one_line(words, tmp_path):
    (tmp_path / "config.yaml").write_text("run_dir: run\n")
    with pytest.raises(InputError) as raised:
        check(load_config(tmp_path / "config.yaml", words))
    assert "\n" not in str(raised.value)
    for fragment in CASES[words]:
        assert fragment in str(raised.value)


def test_a_run_with_adapters_is_accepted():
    check(from_dict({"lora.rank": 8, "lora.alpha": 16.0, "lora.targets": ["attention.*"]}))
    assert Config().lora.rank is None


def test_the_scale_is_alpha_over_rank_and_two_by_default():
    assert LoraConfig(rank=8, alpha=4.0).scale == 0.5
    assert LoraConfig(rank=8).scale == 2.0


def test_a_preset_keeps_its_codecs_of_tokens_alone():
    policy = build_compression(CompressionConfig(preset="strong")).without(GRADIENTS)
    now = policy.at(0)
    assert (now.dense_gradient, now.expert_gradient) == (None, None)
    assert now.dispatch == build_compression(CompressionConfig(preset="strong")).at(0).dispatch
    gradients = CompressionConfig(dense_gradient="none,int4+feedback@5")
    assert build_compression(gradients).without(GRADIENTS) == NO_COMPRESSION
