"""What the records of a run hear of its saves and copies, and what its start says once."""

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from moejax.config.load import from_dict
from moejax.config.schema import CheckpointConfig
from moejax.runtime.processes import ALONE, Processes
from moejax.train.loop import note_once, open_checkpoints, open_records
from tests.cases import small_config


@pytest.fixture
def cfg(tmp_path):
    kept = CheckpointConfig(keep=7, copy_to="memory://there")
    return dataclasses.replace(small_config(), run_dir=str(tmp_path), checkpoint=kept)


def test_failed_saves_and_copies_are_recorded_and_what_is_not_copied_is_shown(cfg, tmp_path):
    recorded, shown = [], io.StringIO()
    records = SimpleNamespace(event=lambda name, step, **more: recorded.append((name, step, more)))
    opened = open_checkpoints(cfg, ALONE, records, Console(file=shown, width=200))
    assert opened.directory == tmp_path / "checkpoints"
    assert opened.keep == 7
    opened._failed(4, "no space")
    opened._copied([2, 4], None)
    assert shown.getvalue() == ""
    opened._copied([6], "no link")
    opened.close()
    assert recorded == [
        ("save_failed", 4, {"text": "no space"}),
        ("copied", 2, {}),
        ("copied", 4, {}),
        ("copied", 6, {}),
        ("copy_failed", 0, {"text": "no link"}),
    ]
    said = "warning: checkpoints are not copied to memory://there: no link\n"
    assert shown.getvalue() == said


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_process_writes_config_and_notes(cfg, tmp_path, index):
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    records = open_records(cfg, ["first", "second"], console, Processes(index, 2))
    note_once(console, records, ["first"], "first")
    note_once(console, records, ["first"], "third")
    records.close()
    assert shown.getvalue().splitlines() == ["first", "second", "third"]
    written = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    if index:
        assert "config.json" not in written
        return
    assert from_dict(json.loads((tmp_path / "config.json").read_text())) == cfg
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    notes = [(line["event"], line["step"], line["text"]) for line in lines]
    assert notes == [("note", 0, text) for text in ("first", "second", "third")]
