"""Published models have their published sizes: counted from the model, not from a formula."""

import dataclasses
from pathlib import Path

import pytest

from moejax.config.checks import check
from moejax.config.load import load_config
from moejax.config.schema import Config, DataConfig, ModelConfig, MoEConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.model.count import count
from moejax.step.train_step import build_step
from moejax.train.summary import summarize

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # it only traces
CONFIGS = Path(__file__).parents[2] / "configs"


def step_of(name):
    cfg = load_config(CONFIGS / f"{name}.py")
    check(cfg)
    return build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # Totals: the model cards' checkpoints. Active: 12.9 B, 3.3 B and 1.3 B as published.
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        pytest.param("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704, marks=pytest.mark.exhaustive),
        ("olmoe_1b_7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_published_models_have_their_published_sizes(name, total, active):
    counts = summarize(step_of(name)).counts
    assert (counts.total, counts.active) == (total, active)


def test_deepseek_v3s_feed_forward_blocks_have_their_published_sizes():
    sizes = step_of("deepseek_v3").parameter_sizes()
    dense = sum(n for path, (_, n) in sizes.items() if ".mlp.w" in path and "groups.0" in path)
    assert dense == 3 * (3 * 7168 * 18432)
    expert = sum(n for path, (_, n) in sizes.items() if ".moe.w" in path)
    shared = sum(n for path, (_, n) in sizes.items() if ".mlp.w" in path and "groups.1" in path)
    assert expert == 58 * (256 * 3 * 7168 * 2048 + 7168 * 256)
    assert shared == 58 * (3 * 7168 * 2048)


def test_deepseek_v3s_module_for_multi_token_prediction_is_a_layer_and_what_joins():
    """Published with latent attention; here its attention is that of the config's layers."""
    cfg = load_config(CONFIGS / "deepseek_v3.py", ["model.predict_ahead=1"])
    train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    sizes = train_step.parameter_sizes()

    def total(part):
        return sum(n for path, (_, n) in sizes.items() if part in path)

    layer = total("groups.1.") // 58
    assert total("predict_ahead.group.") == layer
    assert total("predict_ahead.w_join") == 102_760_448
    assert total("predict_ahead.") == layer + 102_760_448 + 21_504
    without = step_of("deepseek_v3")
    assert total("") == total("predict_ahead.") + sum(
        n for _, n in without.parameter_sizes().values()
    )
    counts, plain = (count(s.cfg, s.parameter_sizes()) for s in (train_step, without))
    # The head multiplies twice.
    module = count(cfg, {p: s for p, s in sizes.items() if "predict_ahead" in p}).matmul
    assert counts.matmul == plain.matmul + module


def test_every_config_traces():
    names = sorted(path.stem for path in CONFIGS.glob("*.py"))
    assert "tiny" in names
    train_step = step_of("tiny")
    assert summarize(train_step).counts.total > 1_000_000
    # FLOPs follow the window that attention may see.
    narrow = dataclasses.replace(train_step.cfg.model, sliding_window=8)
    cfg = dataclasses.replace(train_step.cfg, model=narrow)
    less = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    assert summarize(less).counts.flops_per_token < summarize(train_step).counts.flops_per_token


@pytest.mark.parametrize(
    ("length", "window"), [(4096, 512), (4096, None), (4096, 8192), (7, 3), (7, 1), (7, 7), (1, 1)]
)
def test_attention_costs_what_its_queries_see(length, window):
    """Two products forward and four back, of two FLOPs a channel, for each pair that is seen."""
    model = ModelConfig(num_layers=3, num_heads=4, head_width=8, sliding_window=window)
    cfg = Config(model=model, data=DataConfig(sequence_length=length))
    seen = sum(min(place + 1, window or length) for place in range(length))
    assert count(cfg, {}).flops_per_token == 3 * 4 * 8 * 12 * seen // length


@pytest.mark.parametrize(("tied", "products"), [(True, 1), (False, 0)])
def test_a_table_costs_flops_where_it_also_gives_the_logits(tied, products):
    """Looking rows up costs nothing; a tied table is multiplied as well."""
    cfg = Config(model=ModelConfig(tie_embeddings=tied))
    attention = count(cfg, {}).flops_per_token
    counts = count(cfg, {"embed.table": ("VD", 1000)})
    assert (counts.total, counts.active) == (1000, 1000)
    assert counts.matmul == 1000 * products
    assert counts.flops_per_token == attention + 6 * 1000 * products


def test_a_token_uses_the_biases_of_its_experts_and_the_whole_routers():
    """A bias multiplies nothing."""
    cfg = Config(moe=MoEConfig(num_experts=8, experts_per_token=2))
    attention = count(cfg, {}).flops_per_token
    sizes = {"b_in": ("EUF", 800), "b_out": ("ED", 400), "b_router": ("E", 8), "gate": ("D", 40)}
    counts = count(cfg, sizes)
    assert (counts.total, counts.active) == (1248, 300 + 8 + 40)
    assert (counts.matmul, counts.flops_per_token) == (0, attention)
