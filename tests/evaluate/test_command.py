"""`moejax eval` on the devices of the tests: one checkpoint, a few files."""

import dataclasses
import hashlib
import io
import json
import math
import shutil

import numpy as np
import pytest
from rich.console import Console

from moejax.config.schema import DataConfig
from moejax.evaluate import command
from moejax.evaluate.command import main
from tests.cases import CERTAIN, small_config, step_for
from tests.data.token_files import write_marked, write_text
from tests.evaluate.runs import event_of, save

TEXTS = ["first document " * 9, "second one, longer " * 12, "caf\u00e9 " * 5]


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked, as for all whole steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run's directory with one checkpoint, held-out files, and what the run says of them."""
    folder = tmp_path_factory.mktemp("run")
    held_out = str(write_text(folder, TEXTS[0], name="eval"))
    chat = str(write_marked(folder, [(b"question", b"answer"), (b"q", b"a" * 40)], name="chat"))
    train = str(write_text(folder, "trained", name="train"))
    cfg = small_config((2, 1, 2, 2), model={"vocab_size": 264, "mlp_hidden": 384}, moe=CERTAIN)
    data = DataConfig("tokens", (train,), (held_out, chat), sequence_length=16)
    cfg = dataclasses.replace(cfg, data=data)
    train_step = step_for(cfg)
    state = train_step.init()
    save(folder / "run", train_step, state)
    return folder, event_of(cfg, state, folder / "run")


def digests(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def scored(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_scored_to_the_bits_of_its_own_evaluation(place, capsys):
    folder, event = place
    before = digests(folder)
    found = scored(capsys, "--run", folder / "run")
    assert found["nats_per_token"] == event["nats_per_token"]
    assert found["bits_per_byte"] == event["bits_per_byte"]
    assert found["tokens"] == len(TEXTS[0]) + 1 + 46
    assert digests(folder) == before, "nothing was written"


def test_documents_add_up_to_the_whole_on_any_mesh(place, capsys):
    folder, event = place
    words = ["--run", folder / "run", "--by-document"]
    own = scored(capsys, *words)
    other = scored(capsys, *words, "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    sharing = [
        f"--config.mesh.{word}"
        for word in ("fsdp=2", "expert=2", "tensor=2", "context=4", "context_stripe=2")
    ]
    shared = scored(capsys, *words, *sharing)
    bound = own["tokens"] * float(np.finfo(np.float32).eps)
    for found in (own, other, shared):
        assert [document["tokens"] for document in found["documents"]] == [136, 6, 40]
        assert [document["bytes"] for document in found["documents"]] == [135, 6, 40]
        nats = [document["nats"] for document in found["documents"]]
        assert math.fsum(nats) == found["nats"]
        assert found["nats_per_token"] == pytest.approx(event["nats_per_token"], rel=bound)
        wanted = [document["nats"] for document in own["documents"]]
        assert nats == pytest.approx(wanted, rel=bound)


def test_bytes_of_documents_are_open_where_the_tokenizer_is_not_here(place, capsys):
    folder, _ = place
    (folder / "gone").mkdir()
    for name in ("eval.bin", "eval.bin.json"):
        shutil.copy(folder / name, folder / "gone" / name)
    sidecar = folder / "gone/eval.bin.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"tokenizer": "t.json"}))
    words = ["--run", folder / "run", "--data", folder / "gone/eval.bin", "--by-document", "--json"]
    assert main([*map(str, words)]) == 0
    shown = capsys.readouterr()
    assert "bytes of documents are not known: no tokenizer" in shown.err
    (document,) = json.loads(shown.out)["documents"]
    assert (document["tokens"], document["bytes"]) == (len(TEXTS[0]) + 1, None)
    # Texts have bytes that need no tokenizer.
    (folder / "a.txt").write_text(TEXTS[0])
    (document,) = scored(
        capsys, "--run", folder / "run", "--data", folder / "a.txt", "--by-document"
    )["documents"]
    assert document["bytes"] == len(TEXTS[0])


def test_texts_are_scored_as_their_token_files(place, capsys):
    folder, _ = place
    (folder / "a.txt").write_text(TEXTS[0])
    words = ["--run", folder / "run", "--data"]
    text, tokens = (scored(capsys, *words, folder / name) for name in ("a.txt", "eval.bin"))
    assert text.pop("data") != tokens.pop("data")
    assert text == tokens


def test_a_table_is_shown_by_default(place, capsys):
    folder, _ = place
    assert main(["--run", str(folder / "run"), "--data", str(folder / "chat.bin")]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    assert "46" in out


@pytest.mark.parametrize(("seconds", "told"), [(-1, [1, 2, 3]), (3600, [])])
def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(monkeypatch, seconds, told):
    monkeypatch.setattr(command, "SECONDS_BETWEEN_LINES", seconds)
    for is_terminal in (False, True):
        console = Console(force_terminal=is_terminal, file=io.StringIO())
        with command._progress(console, 3) as advance:
            for _ in range(3):
                advance()
        lines = [f"{number} of 3 batches" for number in told]
        found = [line for line in console.file.getvalue().splitlines() if " batches" in line]
        assert found == ([] if is_terminal else lines)


def test_a_damaged_or_missing_checkpoint_is_one_line(place, capsys, tmp_path):
    copy = shutil.copytree(place[0] / "run", tmp_path / "run")
    largest = max(copy.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    for run, said in ((copy, "no whole checkpoint"), ("/nowhere", "no finished checkpoint")):
        assert main(["--run", str(run)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"moejax: error: {said}")
        assert err.count("\n") == 1
