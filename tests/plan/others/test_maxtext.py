"""MaxText: axes inside a slice and between slices, experts, recomputation."""

import pytest

from moejax.plan.others.maxtext import to_maxtext
from tests.plan.others.plans import plan


def test_axes_are_split_at_the_borders_of_nodes():
    cfg = plan("Qwen3-30B-A3B", mesh__replica=2, mesh__fsdp=2, mesh__expert=16)
    its = to_maxtext(cfg, "gpu")
    names = ("data", "fsdp", "expert", "tensor_sequence")
    assert [its.value(f"dcn_{name}_parallelism") for name in names] == [2, 2, 2, 1]
    assert [its.value(f"ici_{name}_parallelism") for name in names] == [1, 1, 8, 1]


@pytest.mark.parametrize(
    ("activations", "name"), [("sequence", "tensor_sequence"), ("replicated", "tensor")]
)
def test_the_tensor_axis_is_named_by_what_it_shards(activations, name):
    """And a share of a sequence a device is written as it is."""
    sizes = {"mesh__tensor": 4, "mesh__expert": 2, "mesh__fsdp": 8, "train__batch_sequences": 16}
    its = to_maxtext(plan("Qwen3-30B-A3B", mesh__activations=activations, **sizes), "gpu")
    assert its.value(f"ici_{name}_parallelism") == 4
    assert its.value("per_device_batch_size") == 0.25


def test_sparse_attention_has_its_indexer_beside_the_name_of_dense_models_of_its_shape():
    its = to_maxtext(plan("DeepSeek-V3.2", mesh__expert=64), "gpu")
    assert its.value("model_name") == "deepseek3-671b"
    names = ("use_indexer", "indexer_n_heads", "indexer_head_dim", "indexer_topk")
    assert [its.value(name) for name in names] == [True, 64, 128, 2048]


def test_dropless_and_capacity_take_different_paths():
    cfg = plan("Qwen3-30B-A3B", mesh__expert=8, mesh__fsdp=8)
    its = to_maxtext(cfg, "tpu")
    assert (its.value("sparse_matmul"), its.value("megablox")) == (True, True)
    assert its.value("capacity_factor") == -1.0
    assert to_maxtext(cfg, "gpu").value("megablox") is False
    capped = plan("Qwen3-30B-A3B", mesh__expert=8, mesh__fsdp=8, moe__capacity_factor=1.25)
    its = to_maxtext(capped, "gpu")
    assert (its.value("sparse_matmul"), its.value("capacity_factor")) == (False, 1.25)


def test_cpus_are_one_slice_and_that_is_said():
    cfg = plan("Qwen3-30B-A3B", mesh__expert=16, mesh__fsdp=4)
    its = to_maxtext(cfg, "cpu")
    assert (its.value("num_slices"), its.value("ici_expert_parallelism")) == (1, 16)
    assert any("borders of nodes" in gap.what for gap in its.gaps)


def test_the_command_is_written_with_equals_signs():
    command = to_maxtext(plan("Mixtral-8x7B", mesh__expert=8, mesh__fsdp=8), "gpu").command()
    start = "python3 -m maxtext.trainers.pre_train.train \\\n    model_name=mixtral"
    assert command.startswith(start)
    assert "sparse_matmul=true" in command
