"""The text that is scored: token files, texts, or a run's own data. No device is touched."""

import dataclasses

import numpy as np
import pytest
import tokenizers

from moejax.checkpoint.find import Saved
from moejax.config.schema import Config, DataConfig
from moejax.data import corpus, sidecar
from moejax.data.batches import eval_batches
from moejax.data.prepare import command as prepare
from moejax.data.sources import describe_sources, open_sources
from moejax.data.tokenizer import FileTokenizer
from moejax.errors import InputError
from moejax.evaluate import held_out
from moejax.evaluate.checkpoint import Chosen
from moejax.evaluate.documents import scores, sum_documents
from tests.data.chats import write_model
from tests.data.token_files import change, write_text


def chosen(tmp_path, data=None, manifest=None, vocab_size=264):
    model = dataclasses.replace(Config().model, vocab_size=vocab_size)
    cfg = dataclasses.replace(Config(), model=model, data=data or DataConfig())
    return Chosen(Saved(4, tmp_path / "run/checkpoints/4", manifest or {}), cfg, [])


def open_held_out(files, model, **flags):
    return held_out.open_held_out(list(map(str, files)), model, **flags)


def refused(said, files, model, **flags):
    with pytest.raises(InputError, match=said), open_held_out(files, model, **flags):
        pass


def prepared(tmp_path, tokenizer):
    """Token files of a text, as `moejax prepare` writes them."""
    (tmp_path / "a.txt").write_text("all")
    words = [tmp_path / "a.txt", "--out", tmp_path / "t", "--tokenizer", tokenizer]
    assert prepare.main([*map(str, words), "--eval-fraction", "0"]) == 0
    return tmp_path / "t.train.bin"


def trained_on(*paths, **more):
    return DataConfig(source="tokens", train_files=tuple(map(str, paths)), **more)


def test_texts_are_scored_by_the_models_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "three"}\n')
    files = tmp_path / "a.txt", tmp_path / "b.jsonl"
    with open_held_out(files, chosen(tmp_path)) as found:
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
    path = write_model(tmp_path / "model")
    run = chosen(tmp_path, trained_on(prepared(tmp_path, path)), vocab_size=300)
    ids = tokenizers.Tokenizer.from_file(str(path)).encode("all").ids
    for flags in ({}, {"tokenizer": str(path)}):
        with open_held_out([tmp_path / "a.txt"], run, **flags) as found:
            assert found.source.read(1, len(ids)).tolist() == ids
    # Moved away: the one that came with imported weights.
    (tmp_path / "t.train.bin").unlink()
    refused(r"no tokenizer.*--tokenizer FILE", [tmp_path / "a.txt"], run)
    (tmp_path / "run").mkdir()
    path.parent.rename(tmp_path / "run/hf")
    with open_held_out([tmp_path / "a.txt"], run) as found:
        assert found.source.read(1, len(ids)).tolist() == ids


def imported(tmp_path, **settings):
    """An import of step 0 with a tokenizer, without weights."""
    path = write_model(tmp_path / "out/hf")
    (tmp_path / "a.txt").write_text("all")
    cfg = chosen(tmp_path, trained_on(tmp_path / "t.train.bin", **settings), vocab_size=300).cfg
    return Chosen(Saved(0, tmp_path / "out/0", {}), cfg, []), FileTokenizer(path), path


def test_texts_of_imported_weights_begin_with_the_token_of_their_tokenizer(tmp_path):
    model, tokenizer, path = imported(tmp_path)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos not in (None, eos)
    ids = [bos, *tokenizer.encode("all"), eos]
    for flags in ({}, {"tokenizer": str(path)}):
        with open_held_out([tmp_path / "a.txt"], model, **flags) as found:
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
    model, tokenizer, path = imported(tmp_path, eval_files=(str(tmp_path / "t.train.bin"),))
    tokens = prepared(tmp_path, path)
    for files in ((), (tokens,)):
        with open_held_out(files, model) as found:
            assert found.notes == []
    # As it was written in format 1.
    ids = [tokenizer.eos_id, *tokenizer.encode("all"), tokenizer.eos_id]
    np.array(ids, "<u2").tofile(tokens)
    newer = dict.fromkeys((*sidecar.MARKED_FIELDS, *sidecar.BEGUN_FIELDS), ...)
    change(tokens, format_version=1, num_tokens=len(ids), **newer)
    for files in ((), (tokens,)):
        with open_held_out(files, model) as found:
            (note,) = found.notes
            assert "t.train.bin begin with eos" in note
            assert f"token {tokenizer.bos_id}" in note
    trained = model._replace(saved=Saved(3, tmp_path / "out/checkpoints/3", {}))
    with open_held_out([], trained) as found:
        assert found.notes == [], "the run was trained on such files"
    path.with_name("tokenizer_config.json").unlink()
    with open_held_out([tokens], model) as found:
        assert found.notes == [], "its texts begin with eos too"


def test_token_files_must_be_of_the_models_tokenizer(tmp_path):
    train, other = (write_text(tmp_path, "more", name=name) for name in ("train", "other"))
    with open_held_out([other], chosen(tmp_path, trained_on(train))) as found:
        assert found.notes == []
        assert found.tokenizer().decode(found.source.read(0, 6).tolist()) == "more"
    change(other, tokenizer="t.json", tokenizer_sha256="0" * 64)
    for data in (trained_on(train), None):
        refused(r"tokens of another tokenizer. .*other\.bin", [other], chosen(tmp_path, data))
    gone = chosen(tmp_path, trained_on("nowhere.bin"))
    with open_held_out([other], gone) as found:
        assert "is not known here" in found.notes[0]


def test_training_files_are_told(tmp_path):
    train = write_text(tmp_path, "text", name="train")
    data = trained_on(train)
    content = describe_sources(open_sources(data, model_vocab=264))
    run = chosen(tmp_path, data, {"data": content})
    with open_held_out([train], run) as found:
        assert "train.bin is not held out" in found.notes[0]


def test_without_files_the_runs_own_are_scored(tmp_path):
    train, other = (write_text(tmp_path, text, name=text) for text in ("text", "more"))
    data = trained_on(train, eval_files=(str(other),))
    with open_held_out([], chosen(tmp_path, data)) as found:
        assert found.files == [str(other)]
        assert found.source.read(1, 4).tolist() == list(b"more")
    with open_held_out([], chosen(tmp_path)) as found:
        assert found.source.target_bytes == sum(map(len, corpus.documents()[1]))
        assert found.tokenizer().vocab_size == 257
    refused(r"nothing to score.*--data FILE", [], chosen(tmp_path, trained_on(train)))


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
    write_text(tmp_path, "text", name="t")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "lost.bin").touch()
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    refused(said, [tmp_path / name for name in files], chosen(tmp_path), **options)
