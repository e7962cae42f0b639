"""Published models have their published sizes: counted from the model, not from a formula."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest

from moejax.config.checks import check
from moejax.config.load import load_config
from moejax.config.schema import Config, DataConfig, ModelConfig, MoEConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.model.count import count
from moejax.step.train_step import build_step
from moejax.train.records.summary import summarize

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
        pytest.param("mixtral_8x7b", 46_702_792_704, 12_879_925_248, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704, marks=pytest.mark.exhaustive),
        ("olmoe_1b_7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_published_models_have_their_published_sizes(name, total, active):
    counts = summarize(step_of(name)).counts
    assert (counts.total, counts.active) == (total, active)


def test_deepseek_v3_has_its_published_size():
    """671,026,404,352 parameters in its files without the layer that predicts ahead, and biases."""
    train_step = step_of("deepseek_v3")
    sizes = train_step.parameter_sizes()
    counts = count(train_step.cfg, sizes)
    assert (counts.total, counts.active) == (671_026_404_352, 37_552_282_624)
    # Of the active ones all multiply but the table that is looked up and the norms' scales.
    scales = 2 * 61 * 7168 + 61 * (1536 + 512) + 7168
    assert counts.matmul == 37_552_282_624 - 129_280 * 7168 - scales
    biases = jax.tree.leaves(train_step.abstract.router_bias)
    assert sum(math.prod(bias.shape) for bias in biases) == 14_848
    attention = sum(n for path, (_, n) in sizes.items() if ".attention." in path)
    assert attention == 61 * 187_107_328


V2 = {"vocab_size": 102_400, "first_dense_layers": 1, "tie_embeddings": False}
V2 |= {"attention": "latent", "kv_latent": 512, "head_width": 192, "rope_width": 64}
V2 |= {"value_width": 128}


@pytest.mark.parametrize(
    ("model", "moe", "total"),
    [
        pytest.param(
            {"width": 5120, "num_layers": 60, "num_heads": 128, "mlp_hidden": 12_288}
            | {"q_latent": 1536},
            {"num_experts": 160, "expert_hidden": 1536, "num_shared_experts": 2},
            235_741_434_880,
            id="DeepSeek-V2",
        ),
        pytest.param(
            {"width": 2048, "num_layers": 27, "num_heads": 16, "mlp_hidden": 10_944},
            {"num_experts": 64, "expert_hidden": 1408, "num_shared_experts": 2},
            15_706_484_224,
            id="DeepSeek-V2-Lite",
        ),
    ],
)
def test_latent_attention_has_the_published_sizes(model, moe, total):
    """Of the model cards' checkpoints."""
    cfg = Config(model=ModelConfig(**V2, **model), moe=MoEConfig(experts_per_token=6, **moe))
    check(cfg)
    train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    assert count(cfg, train_step.parameter_sizes()).total == total


def test_deepseek_v3s_module_for_multi_token_prediction_is_a_layer_and_what_joins():
    """Published with latent attention; here its attention is that of the config's layers."""
    alone = ["mesh.stage=1", "model.layers_before_stages=0"]
    cfg = load_config(CONFIGS / "deepseek_v3.py", ["model.predict_ahead=1", *alone])
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


@pytest.mark.slow
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
    # Products with keys and with values cost their own widths.
    narrow = dataclasses.replace(cfg, model=dataclasses.replace(model, value_width=2))
    assert count(narrow, {}).flops_per_token == 3 * 4 * (8 + 2) * 6 * seen // length


def test_blocks_without_the_window_cost_more():
    model = ModelConfig(num_layers=5, num_heads=4, head_width=8, sliding_window=3)
    model = dataclasses.replace(model, full_attention_every=2)
    cfg = Config(model=model, data=DataConfig(sequence_length=64))
    seen = 2 * sum(range(1, 65)) + 3 * sum(min(place, 3) for place in range(1, 65))
    assert count(cfg, {}).flops_per_token == 4 * 8 * 12 * seen // 64


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
