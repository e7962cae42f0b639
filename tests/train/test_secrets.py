"""A run writes no secret of its environment down, and shows none."""

import json

import pytest

from moejax.train.__main__ import main
from tests.integration.runs import describe, write_config

SECRETS = {
    "WANDB_API_KEY": "wandb-0123456789abcdef",
    "HF_TOKEN": "hf_0123456789abcdefgh",
    "AWS_SECRET_ACCESS_KEY": "aws/0123456789+abcdef",
    "MLFLOW_TRACKING_PASSWORD": "mlflow-0123456789",
    "GITHUB_TOKEN": "ghp_0123456789abcdef",
}
LOGIN = "user:login-0123456789@"
# As MLflow does, with the address of each call; and as one that shows its key.
MLFLOW = """
import os

class MlflowClient:
    def __getattr__(self, name):
        raise OSError(f"API request to {os.environ['MLFLOW_TRACKING_URI']}/api failed")
"""
WANDB = """
import os

def Settings(**_):
    return None

def init(**_):
    raise ValueError("bad key " + os.environ["WANDB_API_KEY"])
"""


@pytest.mark.slow
def test_what_a_run_leaves_and_says_holds_no_secret(tmp_path, monkeypatch, capfd):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{LOGIN}127.0.0.1:1")
    libraries = tmp_path / "libraries"
    (libraries / "mlflow").mkdir(parents=True)
    (libraries / "mlflow" / "__init__.py").write_text(MLFLOW)
    (libraries / "mlflow" / "entities.py").write_text("Metric = Param = None")
    (libraries / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(libraries))
    text = describe(2, sample=0, simulated_devices=8, fsdp=2) + "track: {wandb: a, mlflow: b}\n"
    write_config(tmp_path, text, tmp_path / "run")
    assert main(["--config", str(tmp_path / "config.yaml")]) == 0
    shown = "".join(capfd.readouterr())
    wanted = [*SECRETS.values(), "login-0123456789"]
    assert "http://***@127.0.0.1:1/api" in shown, "what is looked for was there"
    assert "bad key [WANDB_API_KEY]" in " ".join(shown.split())
    assert [secret for secret in wanted if secret in shown] == []
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl", "0.jsonl"} <= {path.name for path in files}
    found = [
        (path.name, secret)
        for path in files
        for secret in wanted
        if secret.encode() in path.read_bytes()
    ]
    assert found == []
    notes = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert any(
        "is told no more" in str(json.loads(line).get("text")) for line in notes.splitlines()
    )
