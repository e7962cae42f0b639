"""Where a model generates: stages of a run become shards, and weights lie where memory has room."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import moejax
from moejax.config.checks import check
from moejax.config.checks.mesh import resolve_mesh
from moejax.config.fields import change
from moejax.config.schema import Config, MeshConfig
from moejax.plan.trace.reader import collectives
from moejax.runtime.processes import ALONE
from moejax.serve import placing
from moejax.serve.placing import ROOM, PlacedModel, place_weights, without_stages
from moejax.serve.programs import build_programs, no_tokens
from moejax.step.adapters import full_name
from tests.cases import CERTAIN, small_config, some_of, step_for
from tests.serve.test_live import CLOSE, live_run, logits_of


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


FORM = {"slots": 8, "positions": 64, "allowed": 64}
LAYOUTS = {  # fsdp, expert, whether devices hold all that calls gather
    "whole experts, copies over fsdp": (2, 2, True),
    "whole experts over both": (1, 4, True),
    "width over both": (1, 4, False),
    "as trained": (2, 2, False),
}


def trained():
    """A model that is trained with two fsdp shards of two devices with experts."""
    cfg = small_config((1, 2, 2, 1), model={"num_layers": 2}, moe=CERTAIN | {"num_experts": 8})
    return PlacedModel(cfg, step_for(cfg).mesh, "cpu")


def held_bytes(fsdp, expert, gathered):
    """Bytes of weights of a device: matrices by their shards, vectors whole."""
    total = 0
    for path, x in jax.tree_util.tree_flatten_with_path(step_for(trained().cfg).abstract.params)[0]:
        name = full_name(path)
        if name.endswith(("moe.w_in", "moe.w_out")):
            shards = expert if gathered else fsdp * expert
        else:
            matrix = math.prod(x.shape) > 2 * 32  # of two layers of width 32
            shards = fsdp * expert if matrix and not gathered else 1
        total += 4 * math.prod(x.shape) // shards
    return total


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory of a device so that a layout just fits, or is a byte too large."""

    def let_fit(layout, spare):
        cfg, mesh, platform, _ = trained()
        fsdp, expert, gathered = layout
        axes = dataclasses.replace(cfg.mesh, fsdp=fsdp, expert=expert)
        cfg = dataclasses.replace(cfg, mesh=axes)
        beside = build_programs(cfg, mesh, platform, gathered, **FORM).bytes_beside_weights()
        batch = 8 * 64 * 3 * 4 // 4  # tokens, targets and segments
        limit = math.ceil((held_bytes(*layout) + batch + beside + spare) / ROOM)
        monkeypatch.setattr(placing, "memory_limit", lambda processes: limit)

    return let_fit


@pytest.mark.parametrize("name", list(LAYOUTS)[:3])
def test_weights_lie_where_calls_gather_least_if_memory_has_room(name, memory):
    memory(LAYOUTS[name], spare=8)
    placed, _ = place_weights(trained(), ALONE, named=False, **FORM)
    mesh = placed.cfg.mesh
    assert (mesh.fsdp, mesh.expert, placed.gathered) == LAYOUTS[name]
    memory(LAYOUTS[name], spare=-8)
    placed, _ = place_weights(trained(), ALONE, named=False, **FORM)
    mesh, others = placed.cfg.mesh, list(LAYOUTS.values())
    assert (mesh.fsdp, mesh.expert, placed.gathered) == others[others.index(LAYOUTS[name]) + 1]


def test_a_mesh_that_a_user_names_stays(memory):
    memory(LAYOUTS["whole experts over both"], spare=8)
    placed, _ = place_weights(trained(), ALONE, named=True, **FORM)
    assert (placed.cfg.mesh.fsdp, placed.cfg.mesh.expert, placed.gathered) == (2, 2, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_call_gathers_no_weights_that_devices_hold(name):
    cfg, mesh, platform, _ = trained()
    fsdp, expert, gathered = LAYOUTS[name]
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, fsdp=fsdp, expert=expert))
    mesh = step_for(cfg).mesh.abstract_mesh
    programs = build_programs(cfg, mesh, platform, gathered, **FORM)
    cache = jax.eval_shape(programs.empty_cache)
    tokens = no_tokens(programs, programs.slots, 1)
    traced = programs.extend(True).trace(programs.train_step.abstract, tokens, cache)
    kinds = [one.kind for one in collectives(traced.jaxpr.jaxpr)]
    assert ("all_gather" in kinds) == (not gathered)
    assert "all_to_all" in kinds


@pytest.mark.parametrize("name", some_of(LAYOUTS, "whole experts, copies over fsdp"))
def test_logits_do_not_depend_on_where_weights_lie(name, monkeypatch, tmp_path):
    layouts, given = placing._layouts, []

    def the_one(placed, named):
        for one in layouts(placed, named):
            mesh = one.cfg.mesh
            if (mesh.fsdp, mesh.expert, one.gathered) == LAYOUTS[name]:
                given.append(name)
                yield one

    monkeypatch.setattr(placing, "_layouts", the_one)
    run = live_run(trained().cfg, tmp_path)
    token_BT = np.random.default_rng(1).integers(0, 64, (8, 16), np.int32)
    wanted_TV = logits_of(run.train_step.cfg, run.state, token_BT)
    engine = moejax.Engine(run)
    assert given == [name] * (name != "as trained")
    found_TV = engine.logits(token_BT[0])
    np.testing.assert_allclose(found_TV, wanted_TV, rtol=0, atol=CLOSE * np.abs(wanted_TV).max())
