"""Megatron-LM: parallel sizes, sharding of weights, dispatchers, recomputation, shapes."""

from dataclasses import replace

import pytest

from moejax.config.fields import change
from moejax.plan.others.megatron import to_megatron
from moejax.plan.others.megatron_model import layer_pattern
from moejax.plan.search.space import resolve
from tests.plan.others.plans import LIMITS, model, plan

TENSOR = {"mesh__tensor": 4, "mesh__expert": 8, "mesh__fsdp": 2}


def options(cfg, node_devices=8):
    return {option.name: option.value for option in to_megatron(cfg, node_devices).options}


@pytest.mark.parametrize(
    ("weights", "expert", "tensor"), [("hidden", 8, 4), ("folded", 32, 1), ("whole", 8, 1)]
)
def test_experts_have_parallel_sizes_of_their_own(weights, expert, tensor):
    its = options(plan("Qwen3-30B-A3B", mesh__expert_weights=weights, **TENSOR))
    sizes = its["expert-model-parallel-size"], its["expert-tensor-parallel-size"]
    assert sizes == (expert, tensor)


def test_weights_that_are_sharded_and_gathered_at_each_use_are_fsdp():
    its = options(plan("Qwen3-30B-A3B", mesh__replica=2, mesh__fsdp=4, mesh__expert=8))
    assert its["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert its["num-distributed-optimizer-instances"] == 2
    assert {"use-megatron-fsdp", "use-distributed-optimizer"} <= set(its)


def test_weights_gathered_once_a_step_are_the_distributed_optimizer():
    values = {"mesh__replica": 8, "mesh__expert": 8, "mesh__gather_dense": "step"}
    translation = to_megatron(plan("Qwen3-30B-A3B", model__remat="full", **values), 8)
    names = {option.name for option in translation.options}
    assert "use-distributed-optimizer" in names
    assert "use-megatron-fsdp" not in names
    assert translation.gaps == ()


def test_copies_alone_shard_no_state():
    its = options(plan("Qwen3-30B-A3B", mesh__replica=64))
    assert "overlap-grad-reduce" in its
    assert "use-distributed-optimizer" not in its


@pytest.mark.parametrize(("node", "backend"), [(8, "deepep"), (72, "hybridep")])
def test_routes_in_two_levels_take_the_flex_dispatcher(node, backend):
    cfg = plan("Qwen3-30B-A3B", mesh__expert=16, mesh__fsdp=4, route="two_level_merge")
    its = options(cfg, node)
    assert its["moe-token-dispatcher-type"] == "flex"
    assert its["moe-flex-dispatcher-backend"] == backend
    assert its["moe-router-dtype"] == "fp32"


def test_chunks_become_an_overlap_that_full_recomputation_forbids():
    values = {"mesh__expert": 8, "mesh__fsdp": 8, "route_chunks": 4, "train__micro_batches": 2}
    name = "overlap-moe-expert-parallel-comm"
    assert name in options(plan("Qwen3-30B-A3B", model__remat="dots", **values))
    assert name not in options(plan("Qwen3-30B-A3B", model__remat="full", **values))
    alone = values | {"train__micro_batches": 1}  # nothing to overlap with
    assert name not in options(plan("Qwen3-30B-A3B", model__remat="dots", **alone))


def test_sequence_parallel_needs_tensor_ranks():
    assert "sequence-parallel" in options(plan("Qwen3-30B-A3B", **TENSOR))
    assert "sequence-parallel" not in options(plan("Qwen3-30B-A3B", mesh__fsdp=64))
    cfg = plan("Qwen3-30B-A3B", mesh__activations="replicated", **TENSOR)
    assert any("whole activations" in gap.what for gap in to_megatron(cfg, 8).gaps)


def test_recomputation_is_selective_where_products_are_kept():
    its = options(plan("Qwen3-30B-A3B", mesh__fsdp=64, model__remat="dots"))
    assert its["recompute-modules"] == ("core_attn", "layernorm", "moe_act")
    its = options(plan("Qwen3-30B-A3B", mesh__fsdp=64, model__remat="full"))
    assert (its["recompute-method"], its["recompute-num-layers"]) == ("uniform", 1)


def test_latent_attention_counts_rotated_channels_apart():
    its = options(plan("DeepSeek-V3", mesh__expert=64))
    assert (its["qk-head-dim"], its["qk-pos-emb-head-dim"], its["v-head-dim"]) == (128, 64, 128)
    assert (its["kv-lora-rank"], its["q-lora-rank"]) == (512, 1536)
    assert its["moe-shared-expert-intermediate-size"] == 2048
    assert its["moe-router-num-groups"] == 8


def test_sparse_attention_has_its_indexer():
    its = options(plan("DeepSeek-V3.2", mesh__expert=64))
    assert its["experimental-attention-variant"] == "dsa"
    assert (its["dsa-indexer-n-heads"], its["dsa-indexer-head-dim"]) == (64, 128)
    assert (its["dsa-indexer-topk"], its["dsa-indexer-loss-coeff"]) == (2048, 0.0)
    assert "dsa-indexer-use-sparse-loss" not in its


@pytest.mark.parametrize(
    ("first", "every", "layers"), [(3, 1, 61), (0, 2, 8), (1, 3, 9), (0, 4, 3), (2, 2, 6)]
)
def test_the_pattern_of_layers_says_which_have_experts(first, every, layers):
    values = {"first_dense_layers": first, "moe_every": every, "num_layers": layers}
    cfg = model("Mixtral-8x7B", **{f"model__{name}": value for name, value in values.items()})
    pattern = layer_pattern(cfg.model)
    assert pattern is not None
    expected = [int(at >= first and (at - first + 1) % every == 0) for at in range(layers)]
    assert eval(pattern, {"__builtins__": {}}) == expected


def test_the_pattern_of_a_table_says_each_layer():
    mlps = ("dense", "dense", "experts", "dense", "experts", "experts")
    cfg = change(model("Mixtral-8x7B"), {"model.num_layers": 6, "model.layer_mlps": mlps})
    assert layer_pattern(cfg.model) == "([0]*2+[1]*1+[0]*1+[1]*2)"
    assert layer_pattern(model("Mixtral-8x7B").model) is None  # all have experts


def test_a_node_of_more_gpus_than_a_host_leaves_hosts_open():
    cfg = resolve(model("Qwen3-30B-A3B", mesh__nodes=1, mesh__expert=64), replace(LIMITS, nodes=1))
    assert cfg is not None
    command = to_megatron(cfg, 64).command()
    assert command.startswith("torchrun --nnodes=$HOSTS --nproc-per-node=$GPUS_OF_A_HOST ")


def test_patterns_are_quoted_for_a_shell():
    command = to_megatron(plan("DeepSeek-V3", mesh__expert=64), 8).command()
    assert "--moe-layer-freq '([0]*3+[1]*58)'" in command
    assert command.startswith("torchrun --nnodes=8 --nproc-per-node=8 pretrain_gpt.py \\\n")
