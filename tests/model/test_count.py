"""What parameters and FLOPs a model has; tests/hf/test_counts.py counts published models."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest

from moejax.config.checks.size import parameters_of
from moejax.config.load import load_config
from moejax.config.schema import (
    Config,
    DataConfig,
    FullAttentionConfig,
    LinearConfig,
    ModelConfig,
    MoEConfig,
)
from moejax.layout.layout import build_layout, is_product
from moejax.layout.mesh import build_abstract_mesh
from moejax.model.count import count
from moejax.step.train_step import build_step

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # it only traces
CONFIGS = Path(__file__).parents[2] / "configs"


def step_for_shapes(cfg):
    return build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")


def test_deepseek_v3_has_its_published_size():
    """671,026,404,352 parameters in its files without the layer that predicts ahead, and biases."""
    train_step = step_for_shapes(load_config(CONFIGS / "deepseek_v3.py"))
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


def test_the_module_for_multi_token_prediction_is_a_layer_and_what_joins():
    """The output projection multiplies twice."""
    alone = ["mesh.stage=1", "model.layers_before_stages=0"]
    cfg = load_config(CONFIGS / "deepseek_v3.py", ["model.predict_ahead=1", *alone])
    sizes = step_for_shapes(cfg).parameter_sizes()

    def total(part):
        return sum(n for path, (_, n) in sizes.items() if part in path)

    layer = total("groups.1.") // 58
    assert total("predict_ahead.group.") == layer
    assert total("predict_ahead.") == layer + 2 * 7168**2 + 3 * 7168
    module = {path: size for path, size in sizes.items() if "predict_ahead" in path}
    without = step_for_shapes(load_config(CONFIGS / "deepseek_v3.py"))
    plain = count(without.cfg, without.parameter_sizes()).matmul
    assert count(cfg, sizes).matmul == plain + count(cfg, module).matmul


@pytest.mark.parametrize(
    ("length", "window"), [(4096, 512), (4096, None), (4096, 8192), (7, 1), (7, 7)]
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


@pytest.mark.parametrize(("form", "keys"), [("gated_delta", 2), ("kimi_delta", 4)])
def test_linear_attention_costs_three_products_of_its_states_and_a_convolution(form, keys):
    linear = LinearConfig(form, keys, 4, key_width=6, value_width=5, convolution=3)
    full = ModelConfig(num_layers=4, num_heads=4, head_width=8)
    hybrid = dataclasses.replace(full, linear=linear, full_attention_every=4)
    own, wanted = (count(Config(model=model), {}).flops_per_token for model in (hybrid, full))
    of_position = 2 * 3 * 4 * 6 * 5 + 2 * 3 * (2 * keys * 6 + 4 * 5)
    assert abs(own - wanted / 4 - 3 * 3 * of_position) <= 1  # quotients are rounded


def test_mamba_costs_two_products_of_its_states_and_parts_that_are_missing_nothing():
    linear = LinearConfig("mamba2", 2, 4, key_width=6, value_width=5, convolution=3)
    sees, mlps = ("linear", "none", "linear", "none"), ("none", "dense") * 2
    model = ModelConfig(num_layers=4, linear=linear, layer_attention=sees, layer_mlps=mlps)
    cfg = Config(model=dataclasses.replace(model, moe_every=None, activation="relu2"))
    of_position = 2 * 2 * 4 * 6 * 5 + 2 * 3 * (2 * 2 * 6 + 4 * 5)
    assert abs(count(cfg, {}).flops_per_token - 3 * 2 * of_position) <= 1
    sizes, D = step_for_shapes(cfg).parameter_sizes(), model.width
    attention = sum(n for path, (_, n) in sizes.items() if ".attention.w_" in path)
    assert attention == 2 * D * (2 * 2 * 6 + 3 * 4 * 5 + 4)
    assert parameters_of(cfg) == sum(n for dims, n in sizes.values() if is_product(dims))


def test_experts_at_a_latent_count_by_its_width():
    cfg = Config(moe=MoEConfig(latent=24, num_shared_experts=1))
    cfg = dataclasses.replace(cfg, model=ModelConfig(num_layers=1, activation="relu2"))
    sizes, moe, D = step_for_shapes(cfg).parameter_sizes(), cfg.moe, cfg.model.width
    found = sum(n for path, (_, n) in sizes.items() if ".moe.w_" in path)
    E, F = moe.num_experts, moe.expert_hidden
    assert found == D * E + 2 * D * 24 + E * 2 * 24 * F
    assert parameters_of(cfg) == sum(n for dims, n in sizes.values() if is_product(dims))


def test_heads_of_blocks_without_a_window_count_by_their_own_width():
    """Gemma 4: three blocks of 8 channels see 3 positions, one of 20 sees all."""
    own = FullAttentionConfig(head_width=20, num_kv_heads=2, keys_are_values=True)
    model = ModelConfig(num_layers=4, num_heads=4, num_kv_heads=4, head_width=8, sliding_window=3)
    model = dataclasses.replace(model, full_attention_every=4, full_attention=own)
    cfg = Config(model=model, data=DataConfig(sequence_length=64))
    near, far = sum(min(place, 3) for place in range(1, 65)), sum(range(1, 65))
    assert count(cfg, {}).flops_per_token == 4 * 12 * (3 * 8 * near + 20 * far) // 64
    sizes = step_for_shapes(cfg).parameter_sizes()
    attention = sum(n for path, (_, n) in sizes.items() if ".attention." in path)
    D = model.width
    # Queries, keys, values and outputs; of the last block no values.
    assert attention == 3 * D * 8 * (4 + 4 + 4 + 4) + D * 20 * (4 + 2 + 4)


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


def test_values_of_another_width_than_keys_and_sinks_of_some_blocks_are_counted():
    """MiMo-V2: a block with a window and one without, which has fewer keys and no sinks."""
    own = FullAttentionConfig(num_kv_heads=1, sinks=False)
    model = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, head_width=8, value_width=6)
    model = dataclasses.replace(model, sliding_window=3, full_attention_every=2, full_attention=own)
    model = dataclasses.replace(model, attention_sinks=True)
    cfg = Config(model=model, data=DataConfig(sequence_length=64))
    near, far = sum(min(place, 3) for place in range(1, 65)), sum(range(1, 65))
    assert count(cfg, {}).flops_per_token == 4 * (8 + 6) * 6 * (near + far) // 64
    sizes = step_for_shapes(cfg).parameter_sizes()
    attention = sum(n for path, (_, n) in sizes.items() if ".attention." in path)
    D, E, F = model.width, cfg.moe.num_experts, cfg.moe.expert_hidden
    matrices = D * (4 * 8 + 2 * (8 + 6) + 4 * 6) + D * (4 * 8 + 8 + 6 + 4 * 6)
    assert attention == matrices + 4
    assert parameters_of(cfg) == matrices + 2 * D * E * (1 + 3 * F) + D * model.vocab_size
