"""Where a model generates: stages of a run become shards, which need no more sequences."""

import dataclasses

import pytest

from moejax.config.checks import check
from moejax.config.checks.mesh import resolve_mesh
from moejax.config.fields import change
from moejax.config.schema import Config, MeshConfig
from moejax.serve.placing import without_stages
from tests.cases import small_config


def test_a_batch_that_is_just_enough_for_stages_is_enough_for_shards():
    """Eight sequences: of two devices a stage one in each of four micro-batches."""
    axes = {"stage": 2, "fsdp": 2, "stage_keeps": "input"}
    cfg = small_config(model={"num_layers": 2}, train={"batch_sequences": 8, "micro_batches": 4})
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **axes))
    alone = without_stages(cfg)
    assert alone.mesh == dataclasses.replace(MeshConfig(), replica=1, fsdp=4, expert=1, tensor=1)
    assert alone.train.micro_batches == 2
    assert resolve_mesh(alone, 4, "cpu", processes=1).mesh.fsdp == 4
    assert without_stages(alone) == alone


@pytest.mark.parametrize(
    ("axes", "context", "length", "shared"),
    [
        ({"fsdp": 2}, 2, 32, (4, 4)),
        ({"fsdp": 2}, 2, 16, (4, 2)),
        ({"fsdp": 2, "expert": 2}, 4, 32, (8, 2)),
        ({"fsdp": 2, "expert": 2}, 2, 16, (2, 4)),  # over the experts' axis, which stays
        ({"fsdp": 2, "stage": 3}, 2, 16, (1, 0)),  # positions that twelve stripes do not divide
    ],
)
def test_stages_that_become_shards_share_sequences_as_shards_do(axes, context, length, shared):
    cfg = small_config(model={"num_layers": 6}, train={"batch_sequences": 24, "micro_batches": 6})
    axes = {"stage": 2, "context": context, "context_stripe": 4} | axes
    cfg = dataclasses.replace(
        cfg,
        mesh=dataclasses.replace(cfg.mesh, **axes),
        data=dataclasses.replace(cfg.data, sequence_length=length),
    )
    alone = without_stages(cfg)
    devices = cfg.mesh.stage * 2 * alone.mesh.expert
    mesh = resolve_mesh(alone, devices, "cpu", processes=1).mesh
    assert (mesh.context, mesh.context_stripe if shared[1] else 0) == shared


@pytest.mark.parametrize(
    "keeps", [{"mesh.stage_keeps": "input"}, {"mesh.stage_slices": 2, "model.num_layers": 4}]
)
def test_what_is_set_for_stages_alone_is_usual_again(keeps):
    cfg = change(Config(), {"mesh.stage": 2, "mesh.expert": 2, "train.micro_batches": 4, **keeps})
    check(cfg)
    alone = without_stages(cfg)
    check(alone)
    assert (alone.mesh.stage, alone.mesh.fsdp, alone.mesh.expert) == (1, 2, 2)
