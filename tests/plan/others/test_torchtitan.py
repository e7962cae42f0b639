"""torchtitan: degrees, recomputation, registered configs."""

import pytest

from moejax.plan.others.torchtitan import to_torchtitan
from tests.plan.others.plans import plan

TENSOR = {"mesh__tensor": 4, "mesh__expert": 4, "mesh__fsdp": 4}


@pytest.mark.parametrize(("weights", "degree"), [("hidden", 16), ("folded", 16), ("whole", 4)])
def test_experts_lie_on_expert_and_tensor_ranks_together(weights, degree):
    its = to_torchtitan(plan("Qwen3-30B-A3B", mesh__expert_weights=weights, **TENSOR))
    assert its.value("parallelism.expert_parallel_degree") == degree
    lost = any("expert tensor parallelism" in gap.what for gap in its.gaps)
    assert lost == (weights == "hidden")


def test_sparse_attention_is_a_gap():
    for name, sparse in (("DeepSeek-V3", False), ("DeepSeek-V3.2", True)):
        gaps = to_torchtitan(plan(name, mesh__expert=64)).gaps
        assert any(gap.what == "sparse attention" for gap in gaps) == sparse


def test_gathered_weights_are_kept_where_nothing_is_recomputed():
    for remat, policy in (("none", "never"), ("collectives", "never"), ("full", "always")):
        its = to_torchtitan(plan("Qwen3-30B-A3B", mesh__fsdp=64, model__remat=remat))
        assert its.value("parallelism.fsdp_reshard_after_forward") == policy


def test_an_exchange_forbids_cuda_graphs():
    name = "--training.disable_cuda_graphs"
    assert name in to_torchtitan(plan("Qwen3-30B-A3B", mesh__expert=64)).command()
    assert name not in to_torchtitan(plan("Qwen3-30B-A3B", mesh__fsdp=64)).command()


def test_the_command_ends_in_the_subcommand_of_recomputation():
    command = to_torchtitan(plan("gpt-oss-20b", mesh__fsdp=64, model__remat="full")).command()
    assert command.endswith("activation_checkpoint:full")
    assert "-m torchtitan.train \\\n    --module gpt_oss \\\n    --config gpt_oss_20b" in command


@pytest.mark.parametrize(("stage", "rows"), [(1, 4), (4, 64)])
def test_the_local_batch_is_that_of_a_micro_batch_but_for_stages(stage, rows):
    """Of 1,024 sequences: it accumulates gradients by itself, and a pipeline cuts what it gets."""
    settings = {"mesh__fsdp": 64 // stage, "mesh__stage": stage, "train__micro_batches": 4}
    its = to_torchtitan(plan("Qwen3-30B-A3B", **settings))
    assert its.value("training.local_batch_size") == rows
