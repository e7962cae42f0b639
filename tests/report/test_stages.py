"""A profile's time is summed by the stages of the code."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from moejax.config.schema import ProfileConfig
from moejax.report.stages import KEPT, Event, own_times, stage_of, stage_times
from moejax.train.records.profile import PROGRAM, Profile


@jax.jit
def step(x):
    with jax.named_scope("experts"):
        for _ in range(3):
            x = jnp.sin(x @ x)
    with jax.named_scope("loss"):
        return x / jnp.max(x)


@pytest.fixture
def profiled(tmp_path):
    """A run of three profiled steps."""
    profile, x = Profile(ProfileConfig(start_step=2, num_steps=3), tmp_path), jnp.eye(256)
    text = step.lower(x).compile().as_text()
    x = step(x).block_until_ready()
    for number in range(2, 5):
        profile.before(number)
        x = step(x).block_until_ready()
        profile.after(number, x, lambda: text)
    return tmp_path


def test_time_is_summed_by_stage_and_kept(profiled):
    found = stage_times(profiled)
    assert (found["devices"], found["steps"]) == (1, 3)
    assert next(iter(found["rows"])) == "experts"  # three products take longer than a maximum
    assert set(found["rows"]) >= {"experts", "loss"}
    assert all(row["sends"] == row["backward"] == 0 for row in found["rows"].values())
    assert json.loads((profiled / "profile" / KEPT).read_text())["rows"] == found["rows"]
    assert stage_times(profiled) == found


def test_a_trace_without_its_program_is_named_and_not_summed(profiled):
    (profiled / "profile" / PROGRAM).unlink()
    assert stage_times(profiled) == {"directory": str(profiled / "profile")}
    (profiled / "profile" / PROGRAM).write_bytes(gzip.compress(b"HloModule jit_other\n"))
    assert stage_times(profiled)["rows"] == {}


def test_a_run_without_a_profile_has_no_times(tmp_path):
    assert stage_times(tmp_path) is None


@pytest.mark.parametrize(
    ("label", "stage", "backward"),
    [
        ("jit(train_step)/shard_map/jvp()/while/body/jvp(experts)/dot_general", "experts", False),
        ("jit(train_step)/transpose(jvp(attention))/weights/all_gather", "weights", True),
        ("jit(train_step)/jvp(dispatch)/all_to_all", "dispatch", False),
        ("jit(train_step)/transpose(jvp())/combine_backward/all_to_all", "combine", True),
        ("jit(train_step)/rematted_computation/mlp/add", "mlp", True),
        ("jit(train_step)/jit(experts_forward_4x8)/add", "other", False),
        ("", "other", False),
    ],
)
def test_the_innermost_scope_of_an_operation_is_its_stage(label, stage, backward):
    assert stage_of(label) == (stage, backward)


def test_a_loop_does_not_count_what_runs_inside_it():
    events = [
        Event("inner", 2, 3),
        Event("loop", 0, 10),
        Event("inner", 6, 1),
        Event("next", 10, 4),
    ]
    assert sorted(own_times(events)) == [("inner", 1), ("inner", 3), ("loop", 6), ("next", 4)]
