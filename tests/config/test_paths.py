import dataclasses

import pytest

from moejax.config.checks.paths import check_folder, check_output, check_places, check_plain
from moejax.config.schema import CheckpointConfig, Config
from moejax.errors import InputError


def test_what_can_be_written_passes_and_nothing_is_left(tmp_path):
    check_output(tmp_path / "new" / "deep" / "plan.json", "--out")
    check_folder(tmp_path / "run", "`run_dir`")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_with_the_systems_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out is .*, a folder"):
        check_output(tmp_path, "--out")
    for path in (tmp_path / "file" / "plan.json", "/proc/none/plan.json"):
        with pytest.raises(InputError, match=r"--out = .*plan.json cannot be written"):
            check_output(tmp_path / path, "--out")


def config(run_dir, copy_to=None):
    return dataclasses.replace(
        Config(), run_dir=run_dir, checkpoint=CheckpointConfig(copy_to=copy_to)
    )


@pytest.mark.parametrize("name", ["exp[lr=1e-3]", "a*b", "why?", "runs/[x]/a"])
def test_places_that_would_be_read_as_patterns_are_refused(tmp_path, monkeypatch, name):
    with pytest.raises(InputError, match=r"`run_dir` = .* cannot hold checkpoints"):
        check_places(config(name))
    with pytest.raises(InputError, match=r"`checkpoint.copy_to` cannot hold checkpoints"):
        check_places(config("run", f"s3://bucket/{name}"))
    with pytest.raises(InputError, match=r"--out cannot hold checkpoints"):
        check_plain(tmp_path / name, "--out")
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / name)  # a folder above counts too
    with pytest.raises(InputError, match=r"`run_dir` = run cannot hold checkpoints"):
        check_places(config("run"))


def test_other_names_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_places(config("runs/lr=1e-3, a b (2) {x} ü", "gs://bucket/run-1"))
