"""Tokenizer, chat template and ids of tokens in an export, without weights."""

import json

import pytest
import tokenizers

from moejax.checkpoint.find import Saved
from moejax.config.schema import DataConfig
from moejax.convert.texts import special_ids, texts_of, without_code, write_generation, write_texts
from moejax.data.prepare import command as prepare
from moejax.data.prepare.chat_template import load_template
from moejax.data.tokenizer import FileTokenizer, load_library
from moejax.errors import InputError
from tests.data.chats import CHATML, CLOSED, INST, ONE, write_model

BASE = {"bos_token_id": 7, "eos_token_id": 8}  # of a family that the weights came from


def prepared(tmp_path, model, *flags):
    """Token files, of text or with --chat of conversations. Returns the settings of their run."""
    rows = [{"messages": ONE}] if "--chat" in flags else [{"text": "all"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [tmp_path / "rows.jsonl", *flags, "--out", tmp_path / "t", "--eval-fraction", 0]
    words += [] if model is None else ["--tokenizer", model]
    assert prepare.main(list(map(str, words))) == 0
    return DataConfig("tokens", (str(tmp_path / "t.train.bin"),))


def exported(tmp_path, data, origin=None, step=5, config=None):
    """The small files that an export writes: their folder, and the ids in its config.json."""
    folder = tmp_path / "out"
    folder.mkdir()
    texts = texts_of(Saved(step, tmp_path / "run/checkpoints" / str(step), {}), data, origin)
    config = dict(BASE if origin else {}) if config is None else config
    changed = special_ids(texts, config)
    write_texts(folder, texts)
    write_generation(folder, config | changed, bool(changed))
    return folder, config | changed


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_a_model_of_bytes_has_a_tokenizer_that_begins_texts_as_its_documents_begin(tmp_path):
    folder, ids = exported(tmp_path, DataConfig())
    assert ids == {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    assert load_library(folder / "tokenizer.json").encode("ab").ids == [256, 97, 98]
    settings = read(folder, "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"]) == ("<|endoftext|>",) * 2
    generation = read(folder, "generation_config.json")
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (256, 256)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_model_that_began_here_begins_and_ends_texts_as_its_documents(tmp_path, kind, begins):
    model = write_model(tmp_path / "model", kind)
    if not begins:
        model.with_name("tokenizer_config.json").unlink()
    said = FileTokenizer(model)
    folder, ids = exported(tmp_path, prepared(tmp_path, model))
    assert (said.bos_id is not None) == begins
    begin, name = (said.bos_id, "<s>") if begins else (said.eos_id, "</s>")
    assert ids == {"bos_token_id": begin, "eos_token_id": said.eos_id, "pad_token_id": None}
    library = load_library(folder / "tokenizer.json")
    assert library.encode("a mesh").ids == [begin, *said.encode("a mesh")]
    assert read(folder, "tokenizer_config.json")["bos_token"] == name
    assert not (folder / "chat_template.jinja").exists()


def came(tmp_path, template=None):
    """The small files of weights, with code and ids as published ones have them."""
    model = write_model(tmp_path / "hf", template=template)
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [8, 9], "top_p": 0.9}')
    settings = read(tmp_path / "hf", "tokenizer_config.json")
    (tmp_path / "hf/tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}})
    )
    (tmp_path / "hf/special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    return model


def test_a_tokenizer_that_came_is_copied_without_the_names_of_its_code(tmp_path):
    model = came(tmp_path)
    folder, ids = exported(tmp_path, DataConfig("tokens", ("nowhere.bin",)), tmp_path / "hf", 0)
    assert ids == BASE
    assert (folder / "tokenizer.json").read_bytes() == model.read_bytes()
    settings = read(folder, "tokenizer_config.json")
    assert "auto_map" not in settings
    assert settings["bos_token"] == "<s>"
    assert read(folder, "generation_config.json") == {"eos_token_id": [8, 9], "top_p": 0.9}
    config = {"auto_map": {"AutoConfig": "configuration.Config"}, "vocab_size": 3}
    assert without_code(config) == {"vocab_size": 3}


def test_a_chat_template_and_its_end_go_with_a_tokenizer_that_came(tmp_path):
    model = came(tmp_path, template="the base's")
    (tmp_path / "own.jinja").write_text(CHATML)
    data = prepared(tmp_path, model, "--chat", "--chat-template", str(tmp_path / "own.jinja"))
    end, eos = (load_library(model).token_to_id(name) for name in ("<|im_end|>", "</s>"))
    folder, ids = exported(tmp_path, data, tmp_path / "hf")
    assert (folder / "tokenizer.json").read_bytes() == model.read_bytes()
    assert (folder / "chat_template.jinja").read_text() == CHATML
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read(folder, name)
        assert settings["eos_token"] == "<|im_end|>"
        assert "chat_template" not in settings
    assert ids == {"bos_token_id": 7, "eos_token_id": [end, 8, 9, eos]}
    generation = read(folder, "generation_config.json")
    assert generation == {"bos_token_id": 7, "eos_token_id": [end, 8, 9, eos], "top_p": 0.9}


@pytest.mark.parametrize("template", [CHATML, INST, CLOSED])
def test_a_chat_model_that_began_here_writes_prompts_as_it_was_taught(tmp_path, template):
    model = write_model(tmp_path / "model", template=template)
    folder, ids = exported(tmp_path, prepared(tmp_path, model, "--chat"))
    name = {CHATML: "<|im_end|>", INST: "</s>", CLOSED: "<|end|>"}[template]
    found = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    assert found[0] == load_library(model).token_to_id(name)
    # Read back as transformers reads a folder: the template's own tokens mean the same.
    wanted = load_template(model, None).render(ONE, None, "")
    assert load_template(folder / "tokenizer.json", None).render(ONE, None, "") == wanted
    settings = read(folder, "tokenizer_config.json")
    assert settings["eos_token"] == ("<|im_end|>" if template == CHATML else "</s>")


def test_names_of_tokens_that_a_template_writes_mean_what_they_meant_when_it_was_prepared(tmp_path):
    """Without settings beside the tokenizer `bos_token` wrote nothing, so an export names none."""
    model = write_model(tmp_path / "model")
    (tmp_path / "own.jinja").write_text("{{ bos_token }}" + CHATML)
    model.with_name("tokenizer_config.json").unlink()
    flags = ("--chat", "--chat-template", str(tmp_path / "own.jinja"))
    folder, _ = exported(tmp_path, prepared(tmp_path, model, *flags))
    settings = read(folder, "tokenizer_config.json")
    assert "bos_token" not in settings
    assert settings["eos_token"] == "<|im_end|>"
    wanted = load_template(model, tmp_path / "own.jinja").render(ONE, None, "")
    assert load_template(folder / "tokenizer.json", None).render(ONE, None, "") == wanted


def test_a_tokenizer_that_was_damaged_since_is_told(tmp_path):
    data = prepared(tmp_path, write_model(tmp_path / "model"))
    (tmp_path / "t.tokenizer.json").write_text('{"a": ')
    with pytest.raises(InputError, match=r"tokenizer is damaged\..*t\.tokenizer\.json"):
        exported(tmp_path, data)


def test_a_template_whose_answers_end_in_no_control_token_leaves_eos_as_it_is(tmp_path):
    model = write_model(tmp_path / "model")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    flags = ("--chat", "--chat-template", str(tmp_path / "own.jinja"))
    folder, ids = exported(tmp_path, prepared(tmp_path, model, *flags))
    assert read(folder, "tokenizer_config.json")["eos_token"] == "</s>"
    assert ids["eos_token_id"] == FileTokenizer(model).eos_id


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_tokens_around_documents_need_not_be_added_ones(tmp_path, kind):
    words = ["<unk>", "</s>", "<s>", "all"]
    if kind == "WordLevel":
        vocabulary = {word: number for number, word in enumerate(words)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    else:
        scores = [(word, -float(number)) for number, word in enumerate(words)]
        made = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=0))
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    folder, ids = exported(tmp_path, prepared(tmp_path, tmp_path / "model/tokenizer.json"))
    assert ids == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": None}
    settings = read(folder, "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert load_library(folder / "tokenizer.json").encode("all").ids == [2, 3]


def test_another_tokenizer_than_the_weights_came_with_replaces_it(tmp_path):
    came(tmp_path)
    model = write_model(tmp_path / "model", "sentence_piece")
    folder, ids = exported(tmp_path, prepared(tmp_path, model), tmp_path / "hf")
    said = FileTokenizer(model)
    assert (ids["bos_token_id"], ids["eos_token_id"]) == (said.bos_id, said.eos_id)
    assert load_library(folder / "tokenizer.json").encode("a").ids == [
        said.bos_id,
        *said.encode("a"),
    ]
    assert read(folder, "generation_config.json")["eos_token_id"] == said.eos_id
    assert not (folder / "special_tokens_map.json").exists()
