import pytest

from moejax.errors import STOPPED, DivergedError, InputError
from moejax.train import loop
from moejax.train.__main__ import main
from moejax.train.loop import Ended


@pytest.mark.parametrize(("stopped", "code"), [(False, 0), (True, STOPPED)])
def test_a_stopped_run_can_be_told_from_a_finished_one(tmp_path, monkeypatch, stopped, code):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(loop, "train", lambda cfg, console: Ended(None, stopped))
    assert main(["--config", str(tmp_path / "config.json")]) == code


@pytest.mark.parametrize(("error", "code"), [(DivergedError("NaN"), 4), (InputError("bad"), 2)])
def test_a_run_that_ends_early_is_one_line(tmp_path, monkeypatch, capsys, error, code):
    def train(cfg, console):
        raise error

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(loop, "train", train)
    assert main(["--config", str(tmp_path / "config.json")]) == code
    assert capsys.readouterr().err == f"moejax: error: {error}\n"
