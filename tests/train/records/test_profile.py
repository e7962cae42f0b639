import gzip

import jax
import jax.numpy as jnp

from moejax.config.schema import ProfileConfig
from moejax.train.records.profile import PROGRAM, Profile


@jax.jit
def step(x):
    with jax.named_scope("experts"):
        return jnp.sin(x) @ x


def run(folder, cfg, steps):
    """Runs steps. Returns those after which the profile was told to be there."""
    profile, x, ended = Profile(cfg, folder), jnp.ones((8, 8)), []
    for number in steps:
        profile.before(number)
        x = step(x)
        if profile.after(number, x, lambda: "the program"):
            ended.append(number)
    profile.close()
    return ended


def traces(folder):
    return list((folder / "profile").rglob("*.xplane.pb"))


def test_the_steps_that_are_asked_for_are_traced(tmp_path):
    assert run(tmp_path, ProfileConfig(start_step=3, num_steps=2), range(1, 8)) == [4]
    assert len(traces(tmp_path)) == 1
    assert gzip.decompress((tmp_path / "profile" / PROGRAM).read_bytes()) == b"the program"
    assert (tmp_path / "profile" / "memory.prof").stat().st_size > 0


def test_a_run_that_ends_inside_a_profile_keeps_what_it_has(tmp_path):
    assert run(tmp_path, ProfileConfig(start_step=3, num_steps=9), range(1, 5)) == []
    assert len(traces(tmp_path)) == 1


def test_a_second_process_writes_its_trace_beside_that_of_the_first(tmp_path):
    profile = Profile(ProfileConfig(start_step=1, num_steps=1), tmp_path, process=1)
    profile.before(1)
    assert profile.after(1, step(jnp.ones((8, 8))), lambda: "the program")
    assert len(traces(tmp_path)) == len(list((tmp_path / "profile/process_1").rglob("*.pb"))) == 1
    assert not (tmp_path / "profile" / PROGRAM).exists()


def test_without_a_start_and_after_it_nothing_is_traced(tmp_path):
    assert run(tmp_path, ProfileConfig(), range(1, 4)) == []
    assert run(tmp_path, ProfileConfig(start_step=3), range(4, 8)) == []
    assert not (tmp_path / "profile").exists()
