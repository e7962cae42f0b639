"""Compiled programs are kept between starts, unless JAX is told otherwise."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax._src import compilation_cache, compiler

from moejax.runtime import program_cache

PROGRAM = """
import jax, jax.numpy as jnp
from moejax.config.schema import MeshConfig
from moejax.runtime.start import start
start(MeshConfig(platform="cpu"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(jax.config.jax_compilation_cache_dir)
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def start_anew(home: Path, first: str = "", **more: str) -> tuple[str, int, str]:
    """Returns the cache's directory, programs taken from it, and stderr."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\n{PROGRAM}"],
        env={**given, "HOME": str(home), **more},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    directory, hits = done.stdout.splitlines()
    return directory, int(hits), done.stderr


def test_a_second_start_takes_what_the_first_compiled(tmp_path):
    directory, hits, _ = start_anew(tmp_path)
    assert Path(directory).parent == tmp_path / ".cache" / "moejax"
    assert hits == 0
    assert start_anew(tmp_path)[1] > 0


def test_another_process_than_the_first_keeps_what_it_compiled(tmp_path):
    other = "from jax._src import distributed; distributed.global_state.process_id = 1"
    assert start_anew(tmp_path, first=other)[1] == 0
    assert start_anew(tmp_path, first=other)[1] > 0


def test_where_jax_was_told_to_keep_programs_they_stay(tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    assert start_anew(tmp_path, JAX_COMPILATION_CACHE_DIR=elsewhere)[0] == elsewhere
    assert not (tmp_path / ".cache").exists()
    assert start_anew(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[0] == "None"


# As a user whom a container's passwd file does not know.
NOBODY = """
import os, pwd
del os.environ["HOME"]
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
"""


@pytest.mark.parametrize(
    ("first", "reason"), [(NOBODY, "this user has no home directory"), ("", "[Errno ")]
)
def test_where_programs_cannot_be_kept_it_is_told(tmp_path, first, reason):
    (tmp_path / ".cache").write_text("a file where a directory would be")
    directory, _, said = start_anew(tmp_path, first=first)
    assert directory == "None"
    assert f"compiled programs are not kept: {reason}" in said


@pytest.mark.parametrize(
    ("directory", "process", "seconds", "kept"),
    [
        ("/cache", 0, 1.0, True),
        ("/cache", 3, 1.0, True),
        ("/cache", 0, 0.9, False),  # less than JAX is told to keep
        ("gs://bucket", 0, 1.0, True),
        ("gs://bucket", 1, 1.0, False),
    ],
)
def test_what_takes_long_is_kept_by_each_process_but_in_a_store_by_the_first(
    monkeypatch, directory, process, seconds, kept
):
    wrote = []
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", lambda *what: wrote.append(what)
    )
    config = SimpleNamespace(
        jax_compilation_cache_dir=directory, jax_persistent_cache_min_compile_time_secs=1.0
    )
    here = SimpleNamespace(config=config, process_index=lambda: process)
    monkeypatch.setattr(program_cache, "jax", here)
    program_cache._write("key", seconds, "name", "backend", "program")
    assert wrote == [("key", "name", "program", "backend", int(seconds))] * kept


def test_a_program_that_cannot_be_kept_is_a_warning(monkeypatch):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr(compilation_cache, "put_executable_and_time", full)
    with pytest.warns(UserWarning, match="Error writing persistent compilation cache entry: no sp"):
        program_cache._write("key", 1e9, "name", "backend", "program")


@pytest.mark.parametrize(("enabled", "told"), [(True, None), (True, "/told"), (False, None)])
def test_jax_keeps_what_takes_a_tenth_of_a_second_unless_it_was_told_otherwise(
    monkeypatch, tmp_path, enabled, told
):
    settings = {}
    config = SimpleNamespace(
        jax_enable_compilation_cache=enabled,
        jax_compilation_cache_dir=told,
        update=settings.__setitem__,
    )
    monkeypatch.setattr(program_cache, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(compiler, "_cache_write", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program_cache.keep_programs()
    assert (compiler._cache_write is program_cache._write) == enabled
    if not enabled or told:
        assert settings == {}
        return
    (folder,) = (tmp_path / "moejax").iterdir()
    assert settings == {
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": 8 * 2**30,
    }
