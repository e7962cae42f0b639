import json
from unittest import mock

import pytest

from moejax.config.fields import change
from moejax.config.load import to_dict
from moejax.errors import STOPPED, DivergedError, InputError
from moejax.plan.search.file import Plan, save_plan
from moejax.train import loop
from moejax.train.__main__ import main
from moejax.train.loop import RunEnd
from tests.cases import small_config


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (RunEnd(None), 0),
        (RunEnd(None, stopped=True), STOPPED),
        (DivergedError("NaN"), 4),
        (InputError("bad"), 2),
    ],
)
def test_the_exit_code_says_how_a_run_ended_and_an_error_is_one_line(
    tmp_path, monkeypatch, capsys, end, code
):
    train = mock.Mock(side_effect=[end])  # which it returns, or raises
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(loop, "train", train)
    assert main(["--config", str(tmp_path / "config.json")]) == code
    said = f"moejax: error: {end}\n" if isinstance(end, Exception) else ""
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run_dir": "/proc/none/run"}, "`run_dir` = /proc/none/run cannot be written"),
        ({"run_dir": "runs/exp[lr=1e-3]"}, "`run_dir` = runs/exp[lr=1e-3] cannot hold"),
        ({"checkpoint": {"init_from": "nowhere"}}, "no finished checkpoint at nowhere"),
        ({"lora": {"rank": 4}}, "`lora.rank` is 4, and `checkpoint.init_from` is none"),
        ({"lora": {"rank": 4, "targets": ["w_q"]}}, "`lora.targets` has 'w_q', which fits no"),
        ({"lora": {"rank": 99}}, "`lora.rank` = 99 is more than attention.w_k has"),
        (
            {"mesh": {"expert": 2, "simulated_devices": 2}, "compression": {"preset": "strong"}},
            "`compression` has no effect",
        ),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(tmp_path, monkeypatch, capsys, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"plan": {"mode": "hand"}} | settings))
    assert main(["--config", "config.json", "--dry_run"]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_dry_run_without_known_nodes_says_that_codecs_are_not_counted(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    settings = {"mesh": {"expert": 2}, "compression": {"preset": "strong"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert main(["--config", "config.json", "--dry_run"]) == 0
    assert "codecs are not counted below" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_estimates_memory_on_the_platform_that_its_plan_is_for(
    tmp_path, monkeypatch, capsys
):
    """A plan for H200s fitted, and its own dry run counted a CPU's attention."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # Heads and sequences that cuDNN takes; plain attention writes all scores.
    shapes = {"dtype": "bfloat16", "head_width": 64, "num_layers": 1}
    shapes |= {"mlp_hidden": 384, "vocab_size": 264}
    cfg = change(small_config(model=shapes), {"data.sequence_length": 512, "plan.mode": "default"})
    (tmp_path / "config.json").write_text(json.dumps(to_dict(cfg)))

    def peak(*words, **facts):
        mesh = {"mesh.expert": 2, "mesh.tensor": 1, "mesh.replica": 1}
        plan = Plan("test", 2, 1, "balanced", mesh, {"seconds": 1.0}, **facts)
        save_plan(plan, tmp_path / "plan.json")
        run = ["--config", "config.json", "--config.plan=plan.json", "--dry_run", *words]
        assert main(run) == 0
        out = capsys.readouterr().out
        return next(line for line in out.splitlines() if "peak memory, a device" in line), out

    gpu, said = peak(platform="gpu", device_memory_bytes=2**20)
    assert "warning: peak memory (step) is about" in said
    assert gpu == peak("--config.mesh.platform=gpu")[0]
    plain, said = peak()
    assert gpu != plain
    assert "peak memory below is that of CPUs" in said


def test_a_config_and_all_settings_can_be_shown_and_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train", None)
    (tmp_path / "config.json").write_text('{"train": {"seed": 9}}')
    words = ["--config", str(tmp_path / "config.json"), "--print_config"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["train"]["seed"] == 9
    assert main(["--settings"]) == 0
    assert "train.seed  (" in capsys.readouterr().out
    assert main([]) == 2
    assert "--config FILE" in capsys.readouterr().err
