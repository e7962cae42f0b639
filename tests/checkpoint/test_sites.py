"""Checkpoints of a run with an outer loop: on its sites, on others, and of the weights alone."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console

from moejax.checkpoint.compatible import check_resumable
from moejax.checkpoint.find import newest
from moejax.checkpoint.restore import resume
from moejax.checkpoint.verify import restore_weights, wrong_numbers
from moejax.checkpoint.writer import Checkpoints, arrays_of
from moejax.config.load import to_dict
from moejax.config.schema import OuterConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from tests.cases import CERTAIN, drawn_state, place, random_batch, small_config, step_for

OUTER = OuterConfig(every=3)


def step_of(mesh=(2, 2, 1, 1), outer=OUTER):
    cfg = small_config(mesh, moe=CERTAIN, router={"bias_update_rate": 0.01})
    return step_for(dataclasses.replace(cfg, outer=outer))


def save(directory, train_step, state):
    with_facts = Checkpoints(directory, keep=3)
    with_facts.save(int(state.step), state, {"config": to_dict(train_step.cfg)})
    with_facts.close()


def resumed(directory, train_step):
    """The state that a run goes on with, and what it said."""
    saved, _ = newest(directory, "full")
    said = io.StringIO()
    found = resume(train_step, saved, None, ALONE, Console(file=said, width=1000), None)
    return found.state, said.getvalue()


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of two sites of two devices, of any numbers."""
    directory = tmp_path_factory.mktemp("sites") / "checkpoints"
    train_step = step_of()
    state = drawn_state(train_step)
    save(directory, train_step, state)
    return directory, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("mesh", [(2, 2, 1, 1), (2, 1, 2, 2)])
def test_as_many_sites_go_on_from_the_same_bits(written, mesh):
    directory, state = written
    found, said = resumed(directory, step_of(mesh))
    assert "had 2" not in said
    same(found, state)


@pytest.mark.parametrize("sites", [1, 4])
def test_another_number_of_sites_begins_at_the_outer_weights(written, sites):
    directory, state = written
    found, said = resumed(directory, step_of((sites, 2, 1, 1)))
    assert f"had 2, this one has {sites}" in said
    same(
        (found.params, found.router_bias, found.momentum),
        (state.params, state.router_bias, state.momentum),
    )
    for site in range(sites):
        own = jax.tree.map(lambda x, at=site: x[at], found.sites)
        same((own.params, own.router_bias), (state.params, state.router_bias))
        assert not any(np.any(x) for x in jax.tree.leaves(own.error))
        for mine, both in zip(
            *map(jax.tree.leaves, (own.optimizer, state.sites.optimizer)), strict=True
        ):
            counts = np.issubdtype(both.dtype, np.integer)
            wanted = both.max(0) if counts else np.mean(np.float64(both), 0)
            np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-7)


def test_another_codec_has_left_out_nothing_yet(written):
    directory, state = written
    found, _ = resumed(directory, step_of(outer=dataclasses.replace(OUTER, codec="int8")))
    assert jax.tree.leaves(found.sites.error) == []
    same(found.sites.params, state.sites.params)


def test_feedback_that_begins_with_a_resume_has_left_out_nothing_yet(tmp_path):
    plain = step_of(outer=dataclasses.replace(OUTER, codec="none"))
    save(tmp_path, plain, drawn_state(plain))
    found, _ = resumed(tmp_path, step_of())
    errors = jax.tree.leaves(found.sites.error)
    assert errors
    assert not any(np.any(x) for x in errors)


def test_a_run_does_not_begin_or_end_an_outer_loop_on_the_way():
    plain, outer = step_of(outer=OuterConfig()).cfg, step_of().cfg
    for one, other in ((plain, outer), (outer, plain)):
        with pytest.raises(InputError, match="from its first step to its last, or none"):
            check_resumable(to_dict(one), other, step=1)
    every = dataclasses.replace(outer, outer=dataclasses.replace(OUTER, every=5, rate=0.5))
    assert check_resumable(to_dict(outer), every, step=1) == [
        "outer.every: 3 -> 5",
        "outer.rate: 0.7 -> 0.5",
    ]


def test_weights_alone_are_the_outer_ones(written):
    directory, state = written
    saved, _ = newest(directory, "full")
    plain = step_of((1, 1, 2, 1), OuterConfig()).of_weights()
    weights = restore_weights(saved, plain.abstract, ALONE)
    same((weights["params"], weights["balance"]), (state.params, state.router_bias))


def test_two_sites_that_changed_places_are_named(written):
    directory, state = written
    train_step, (saved, _) = step_of(), newest(directory, "full")
    turned = state._replace(sites=jax.tree.map(lambda x: x[::-1].copy(), state.sites))
    placed = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), turned, train_step.abstract)
    found = wrong_numbers(saved.manifest, arrays_of(placed), ALONE)
    assert "expert 0 of layer 0 of site 0 and expert 0 of layer 0 of site 1 (sites: params" in found


def test_a_sites_own_arrays_lie_at_that_site_alone():
    """So copies in hosts' memory keep each, and a comparison of copies leaves sites apart."""
    train_step = step_of((2, 2, 1, 1))
    devices = [list(x) for x in train_step.mesh.devices.reshape(2, 2)]
    for key, x in arrays_of(train_step.abstract).items():
        if not key.startswith("sites"):
            continue
        held = x.sharding.devices_indices_map(x.shape)
        for site in range(2):
            own = {device for device, index in held.items() if (index[0].start or 0) == site}
            assert own == set(devices[site]), key


@pytest.mark.slow
@pytest.mark.parametrize("order", ["layers", "all"])
def test_a_run_that_resumes_within_a_period_comes_to_the_same_bits(tmp_path, order):
    train_step = step_of(outer=dataclasses.replace(OUTER, order=order))
    state = train_step.init()
    for number in range(5):
        if number == 2:
            save(tmp_path, train_step, state)
        state, _ = train_step.step(state, place(train_step, random_batch(train_step.cfg, number)))
    again, _ = resumed(tmp_path, train_step)
    for number in range(2, 5):
        again, _ = train_step.step(again, place(train_step, random_batch(train_step.cfg, number)))
    same(again, jax.tree.map(np.asarray, state))
