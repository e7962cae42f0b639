"""The text that is scored: token files, texts, or a run's own data. No device is touched."""

import dataclasses
import json

import numpy as np
import pytest

from moejax.checkpoint.find import Saved
from moejax.config.schema import Config, DataConfig
from moejax.data import corpus
from moejax.data.batches import eval_batches
from moejax.data.sources import describe_sources, open_sources
from moejax.data.tokenizer import FileTokenizer
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen
from moejax.evaluate.documents import scores, sum_documents
from moejax.evaluate.held_out import Wanted, open_held_out
from tests.data.chats import write_model
from tests.data.test_marks import write_text


def chosen(tmp_path, data=None, manifest=None, vocab_size=264):
    model = dataclasses.replace(Config().model, vocab_size=vocab_size)
    cfg = dataclasses.replace(Config(), model=model, data=data or DataConfig())
    return Chosen(Saved(4, tmp_path / "run/checkpoints/4", manifest or {}), cfg, [])


def wanted(*files, text_field=None, tokenizer=None, eos=None):
    return Wanted(list(map(str, files)), text_field, tokenizer, eos)


def trained_on(*paths, **more):
    return DataConfig(source="tokens", train_files=tuple(map(str, paths)), **more)


def test_texts_are_scored_by_the_models_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "three"}\n')
    files = tmp_path / "a.txt", tmp_path / "b.jsonl"
    with open_held_out(wanted(*files), chosen(tmp_path)) as found:
        ids = [256, *"caf\u00e9".encode(), 256, *b"one", 256, *b"three", 256]
        assert found.source.read(0, found.source.num_tokens).tolist() == ids
        assert found.documents == [
            (str(files[0]), 5),
            (f"{files[1]}, line 1", 3),
            (f"{files[1]}, line 3", 5),
        ]
        folder = found.source.sources[0].path.parent
        assert folder.is_dir()
    assert not folder.exists()
    assert found.source.target_bytes == 13


def test_texts_take_the_tokenizer_of_the_training_files(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from moejax.data.prepare import command as prepare

    path = write_model(tmp_path / "model")
    (tmp_path / "a.txt").write_text("all")
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--tokenizer", str(path)]
    assert prepare.main([*command, "--eval-fraction", "0"]) == 0
    run = chosen(tmp_path, trained_on(tmp_path / "t.train.bin"), vocab_size=300)
    ids = tokenizers.Tokenizer.from_file(str(path)).encode("all").ids
    for files in (wanted(tmp_path / "a.txt"), wanted(tmp_path / "a.txt", tokenizer=str(path))):
        with open_held_out(files, run) as found:
            assert found.source.read(1, len(ids)).tolist() == ids
    # Moved away: the one that came with imported weights.
    (tmp_path / "t.train.bin").unlink()
    with (
        pytest.raises(InputError, match=r"no tokenizer.*--tokenizer FILE"),
        open_held_out(wanted(tmp_path / "a.txt"), run),
    ):
        pass
    (tmp_path / "run").mkdir()
    path.parent.rename(tmp_path / "run/hf")
    with open_held_out(wanted(tmp_path / "a.txt"), run) as found:
        assert found.source.read(1, len(ids)).tolist() == ids


def imported(tmp_path, **settings):
    """An import of step 0 with a tokenizer, without weights."""
    path = write_model(tmp_path / "out/hf")
    (tmp_path / "a.txt").write_text("all")
    cfg = chosen(tmp_path, trained_on(tmp_path / "t.train.bin", **settings), vocab_size=300).cfg
    return Chosen(Saved(0, tmp_path / "out/0", {}), cfg, []), FileTokenizer(path), path


def test_texts_of_imported_weights_begin_with_the_token_of_their_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    model, tokenizer, path = imported(tmp_path)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos not in (None, eos)
    ids = [bos, *tokenizer.encode("all"), eos]
    for named in (wanted(tmp_path / "a.txt"), wanted(tmp_path / "a.txt", tokenizer=str(path))):
        with open_held_out(named, model) as found:
            assert found.source.read(0, found.source.num_tokens).tolist() == ids
            assert found.source.num_targets == len(ids) - 1
            # As an evaluation cuts it: nothing is scored that lm-eval does not score, but eos.
            (batch,) = eval_batches(found.source, sequence_length=8, batch_sequences=1, limit=None)
            assert batch.token_BT[0, : len(ids) - 1].tolist() == ids[:-1]
            assert batch.target_BT[0, : len(ids)].tolist() == [*ids[1:], -1]
            (score,) = scores(
                found.source,
                sum_documents(found.source, [np.ones((1, 8))], 8),
                tokenizer,
                found.documents,
            )
            assert (score.tokens, score.bytes, score.nats) == (len(ids) - 1, 3, len(ids) - 1)


def test_a_token_file_from_before_there_was_a_begin_token_is_told(tmp_path):
    pytest.importorskip("tokenizers")
    from moejax.data.prepare import command as prepare

    model, tokenizer, path = imported(tmp_path, eval_files=(str(tmp_path / "t.train.bin"),))
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--tokenizer", str(path)]
    assert prepare.main([*command, "--eval-fraction", "0"]) == 0
    for files in ((), (tmp_path / "t.train.bin",)):
        with open_held_out(wanted(*files), model) as found:
            assert found.notes == []
    # As it was written in format 1.
    sidecar = tmp_path / "t.train.bin.json"
    facts = json.loads(sidecar.read_text())
    for name in ("bos_id", "chat", "marks_sha256", "num_targets", "target_bytes"):
        del facts[name]
    ids = [tokenizer.eos_id, *tokenizer.encode("all"), tokenizer.eos_id]
    assert facts["dtype"] == "uint16"
    np.array(ids, "<u2").tofile(tmp_path / "t.train.bin")
    sidecar.write_text(json.dumps(facts | {"format_version": 1, "num_tokens": len(ids)}))
    for files in ((), (tmp_path / "t.train.bin",)):
        with open_held_out(wanted(*files), model) as found:
            (note,) = found.notes
            assert "t.train.bin begin with eos" in note
            assert f"token {tokenizer.bos_id}" in note
    trained = model._replace(saved=Saved(3, tmp_path / "out/checkpoints/3", {}))
    with open_held_out(wanted(), trained) as found:
        assert found.notes == [], "the run was trained on such files"


def test_weights_whose_texts_begin_with_eos_have_token_files_that_do(tmp_path):
    pytest.importorskip("tokenizers")
    from moejax.data.prepare import command as prepare

    model, _, path = imported(tmp_path)
    path.with_name("tokenizer_config.json").unlink()
    assert FileTokenizer(path).bos_id is None
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--tokenizer", str(path)]
    assert prepare.main([*command, "--eval-fraction", "0"]) == 0
    with open_held_out(wanted(tmp_path / "t.train.bin"), model) as found:
        assert found.notes == []


def test_token_files_must_be_of_the_models_tokenizer(tmp_path):
    train, other = write_text(tmp_path, "text", "train"), write_text(tmp_path, "more", "other")
    with open_held_out(wanted(other), chosen(tmp_path, trained_on(train))) as found:
        assert found.notes == []
        assert found.tokenizer().decode(found.source.read(0, 6).tolist()) == "more"
    sidecar = other.with_name("other.bin.json")
    facts = json.loads(sidecar.read_text()) | {"tokenizer": "t.json", "tokenizer_sha256": "0" * 64}
    sidecar.write_text(json.dumps(facts))
    for data in (trained_on(train), None):
        with (
            pytest.raises(InputError, match=r"tokens of another tokenizer. .*other\.bin"),
            open_held_out(wanted(other), chosen(tmp_path, data)),
        ):
            pass
    gone = chosen(tmp_path, trained_on("nowhere.bin"))
    with open_held_out(wanted(other), gone) as found:
        assert "is not known here" in found.notes[0]


def test_training_files_are_told(tmp_path):
    train = write_text(tmp_path, "text", "train")
    data = trained_on(train)
    content = describe_sources(open_sources(data, model_vocab=264))
    run = chosen(tmp_path, data, {"data": content})
    with open_held_out(wanted(train), run) as found:
        assert "train.bin is not held out" in found.notes[0]


def test_without_files_the_runs_own_are_scored(tmp_path):
    train, held_out = write_text(tmp_path, "text", "train"), write_text(tmp_path, "more", "eval")
    data = trained_on(train, eval_files=(str(held_out),))
    with open_held_out(wanted(), chosen(tmp_path, data)) as found:
        assert found.files == [str(held_out)]
        assert found.source.read(1, 4).tolist() == list(b"more")
    with open_held_out(wanted(), chosen(tmp_path)) as found:
        assert found.source.target_bytes == sum(map(len, corpus.documents()[1]))
        assert found.tokenizer().vocab_size == 257
    with (
        pytest.raises(InputError, match=r"nothing to score.*--data FILE"),
        open_held_out(wanted(), chosen(tmp_path, trained_on(train))),
    ):
        pass


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        (["a.txt", "t.bin"], {}, "token files and texts together"),
        (["t.bin"], {"text_field": "x"}, "`--text-field` has no effect"),
        (["t.bin"], {"tokenizer": "x"}, "`--tokenizer` has no effect"),
        (["a.txt"], {"eos": "x"}, "`--eos` has no effect"),
        (["empty.jsonl"], {}, "nothing to score. 1 files have no text"),
        (["nowhere*"], {}, "no file.*matches none.*must name texts, or files of moejax prepare"),
        (["lost.bin"], {}, "no sidecar"),
        (["chat.jsonl"], {}, "moejax prepare --chat"),
    ],
)
def test_what_cannot_be_scored_is_refused(tmp_path, files, options, said):
    write_text(tmp_path, "text", "t")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "lost.bin").touch()
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    named = wanted(*(tmp_path / name for name in files), **options)
    with pytest.raises(InputError, match=said), open_held_out(named, chosen(tmp_path)):
        pass
