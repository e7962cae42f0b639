"""Rules of pipeline stages."""

import pytest

from moejax.config.checks import check, resolve_mesh
from moejax.config.fields import change
from moejax.config.load import from_dict
from moejax.config.pattern import layer_groups
from tests.config.test_checks import error_of

STAGES = {"mesh.stage": 2, "train.micro_batches": 4}


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"mesh.stage": 8}, ["`mesh.stage` = 8 does not divide the last 4 equal layers", "1, 2"]),
        (
            {"model.moe_every": 2, "mesh.stage": 4},
            ["`mesh.stage` = 4 does not divide the last 2 equal layers of 2 blocks"],
        ),
        ({"train.micro_batches": 1}, ["`train.micro_batches` = 1", "`mesh.stage` = 2", "Choose 2"]),
        ({"data.sequence_length": 129}, ["`data.sequence_length` = 129", "mesh.stage = 2"]),
        (
            {"compression.preset": "hybrid", "compression.start_layer": 1},
            ["`compression.start_layer` is 1, and `mesh.stage` is 2"],
        ),
        (
            {"model.num_layers": 7, "mesh.stage": 4, "train.micro_batches": 8},
            ["Choose 1, 7, or set model.layers_before_stages=3"],
        ),
        (
            {"model.layers_before_stages": 1, "model.moe_every": 2},
            ["`model.layers_before_stages` = 1 does not fit 4 layers", "a multiple of 2"],
        ),
        ({"model.layers_before_stages": 4}, ["`model.layers_before_stages` = 4 does not fit"]),
        (
            {"model.stage_chunks": 3},
            ["`model.stage_chunks` = 3 does not divide the last 4", "1, 2"],
        ),
        (
            {"model.stage_chunks": 4},
            ["does not divide the last 1 equal layers of each of 4 chunks (`model.stage_chunks`)"],
        ),
        (
            {"model.stage_chunks": 2, "mesh.schedule": "combined_1f1b"},
            ["`model.stage_chunks` is 2 and `mesh.schedule` is combined_1f1b"],
        ),
        (
            {"mesh.stage_slices": 3},
            ["`data.sequence_length` = 256", "mesh.stage x mesh.stage_slices = 6"],
        ),
        (
            {"mesh.stage_slices": 2, "mesh.schedule": "combined_1f1b"},
            ["`mesh.schedule` is combined_1f1b, and `mesh.stage_slices` is 2"],
        ),
        (
            {"mesh.stage_slices": 2, "mesh.stage_keeps": "input"},
            ["`mesh.stage_keeps` is input, and `mesh.stage_slices` is 2"],
        ),
        (
            {"mesh.stage_slices": 2, "model.stage_chunks": 2},
            ["`model.stage_chunks` is 2, and `mesh.stage_slices` is 2"],
        ),
        (
            {"mesh.stage_slices": 2, "moe.router.balance_over": "sequence"},
            ["`moe.router.balance_over` is sequence, and `mesh.stage_slices` is 2"],
        ),
        (
            {"mesh.stage_slices": 2, "model.predict_ahead": 1},
            ["`model.predict_ahead` is 1, and `mesh.stage_slices` is 2"],
        ),
        ({"model.width": 130, "mesh.fsdp": 4}, ["`model.width` = 130", "2 x 4 x 1 = 8"]),
    ],
)
def test_what_stages_cannot_share_is_refused(values, fragments):
    message = error_of(check, from_dict({**STAGES, **values}))
    for fragment in fragments:
        assert fragment in message


def test_stages_alone_are_a_choice_by_hand():
    check(from_dict(STAGES))


def test_with_a_plan_stages_may_be_chosen_without_their_micro_batches():
    check(from_dict({"mesh.stage": 2, "plan.mode": "auto"}))


def test_layers_before_the_stages_are_a_group_of_their_own():
    cfg = from_dict({"model.num_layers": 7, "model.first_dense_layers": 1})
    assert [repeats for _, repeats in layer_groups(cfg.model)] == [1, 6]
    cfg = change(cfg, {"model.layers_before_stages": 2, "mesh.stage": 4, "train.micro_batches": 4})
    assert [repeats for _, repeats in layer_groups(cfg.model)] == [1, 2, 4]
    check(cfg)


def test_chunks_of_stages_are_groups_of_their_own():
    cfg = from_dict({"model.num_layers": 9, "model.layers_before_stages": 1})
    cfg = change(cfg, {"model.stage_chunks": 2, "mesh.stage": 4, "train.micro_batches": 4})
    assert [repeats for _, repeats in layer_groups(cfg.model)] == [1, 4, 4]
    check(cfg)


def test_stages_are_counted_among_the_devices():
    cfg = from_dict({**STAGES, "mesh.replica": None, "mesh.expert": 2})
    assert resolve_mesh(cfg, 8, "gpu").mesh.replica == 2
    message = error_of(resolve_mesh, cfg, 6, "gpu")
    assert "mesh stage=2 x fsdp=1 x expert=2 x tensor=1 needs a multiple of 4 devices" in message
