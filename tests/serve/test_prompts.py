"""Prompts and texts by the tokenizer of a run and of imported weights."""

import dataclasses
import json

import pytest
import tokenizers

from moejax.checkpoint.find import Saved
from moejax.data.prepare import command as prepare
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.tokenizer import FileTokenizer
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen
from moejax.serve.prompts import encode_prompts, open_vocabulary, read_prompts
from tests.cases import small_config
from tests.data.chats import write_model

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<|end|>": 4}


@pytest.fixture
def imported(tmp_path):
    """An imported checkpoint without weights, whose prompts begin with <s>."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="a"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>", "<|end|>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    (tmp_path / "hf").mkdir()
    library.save(str(tmp_path / "hf/tokenizer.json"))
    config = {"max_position_embeddings": 8, "eos_token_id": 1}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    (tmp_path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    cfg = small_config(model={"vocab_size": 4})
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source="tokens"))
    return Chosen(Saved(0, tmp_path / "checkpoints/0", {}), cfg, [])


def test_prompts_of_a_run_begin_as_its_documents_do(tmp_path):
    cfg = small_config(model={"vocab_size": 264})
    chosen = Chosen(Saved(5, tmp_path / "checkpoints/5", {}), cfg, [])
    vocabulary = open_vocabulary(chosen, None, None)
    assert vocabulary.encode("ab") == [256, 97, 98]
    assert (vocabulary.stops, vocabulary.allowed) == ({256}, 257)
    assert encode_prompts(["ab"], vocabulary, cfg, 13) == ([[256, 97, 98]], [])
    assert "trained on sequences of 16" in encode_prompts(["ab"], vocabulary, cfg, 14)[1][0]


def test_prompts_of_an_import_begin_as_its_tokenizer_says(imported):
    vocabulary = open_vocabulary(imported, None, None)
    assert vocabulary.encode("a b") == [0, 2, 3]
    assert vocabulary.stops == {1, 4}
    assert vocabulary.allowed == 4, "the model has fewer ids than its tokenizer"
    assert vocabulary.continuation([0, 2], [3, 2]) == " b a"


def test_messages_have_the_template_beside_the_weights_and_end_as_it_ends_answers(imported):
    folder = imported.saved.path.parent.parent / "hf"
    with pytest.raises(InputError, match="no chat template"):
        open_vocabulary(imported, None, None, chat=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<s> ' + m.content + ' <|end|> ' }}{% endfor %}"
    )
    vocabulary = open_vocabulary(imported, None, None, chat=True)
    assert vocabulary.encode("b b") == [0, 3, 3, 4], "<s> comes from the template alone"
    assert vocabulary.stops == {1, 4}
    (folder / "generation_config.json").unlink()
    assert open_vocabulary(imported, None, None).stops == {1}
    assert open_vocabulary(imported, None, None, chat=True).stops == {1, 4}
    other = folder / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    named = open_vocabulary(imported, None, None, chat=True, template=str(other))
    assert named.encode("b b") == [3, 3]


def trained(tmp_path, name, *flags):
    """A run without weights on what `moejax prepare` writes of a file."""
    words = [tmp_path / name, "--out", tmp_path / "t", "--eval-fraction", 0, *flags]
    assert prepare.main(list(map(str, words))) == 0
    cfg = small_config(model={"vocab_size": 400})
    files = (str(tmp_path / "t.train.bin"),)
    data = dataclasses.replace(cfg.data, source="tokens", train_files=files)
    cfg = dataclasses.replace(cfg, data=data)
    return Chosen(Saved(5, tmp_path / "run/checkpoints/5", {}), cfg, [])


@pytest.mark.parametrize("of_bytes", [True, False])
def test_messages_have_the_template_of_the_conversations_that_were_learned(tmp_path, of_bytes):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    end = "<|endoftext|>" if of_bytes else "<|end|>"
    own = "{% for m in messages %}{{ m.content + 'END' }}{% endfor %}".replace("END", end)
    (tmp_path / "own.jinja").write_text(own)
    model = write_model(tmp_path / "model", template="the model's")
    flags = () if of_bytes else ("--tokenizer", model)
    flags = ("--chat", "--chat-template", tmp_path / "own.jinja", *flags)
    chosen = trained(tmp_path, "rows.jsonl", *flags)
    encoder = ControlEncoder(None if of_bytes else model)
    found = open_vocabulary(chosen, None, None, chat=True)
    assert found.encode("all") == encoder.encode(f"all{end}").token_N.tolist()
    (stop,) = encoder.encode(end).token_N.tolist()
    assert stop in found.stops
    assert found.between == "\n"
    assert open_vocabulary(chosen, None, None).between == ""
    # What the command line names comes first: a template, or a tokenizer with its own.
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}")
    named = open_vocabulary(chosen, None, None, chat=True, template=str(tmp_path / "other.jinja"))
    assert named.encode("all") == encoder.encode("all").token_N.tolist()
    other = write_model(tmp_path / "other", "sentence_piece", "{{ messages[0].content + '<s>' }}")
    named = open_vocabulary(chosen, str(other), None, chat=True)
    assert named.encode("all") == ControlEncoder(other).encode("all<s>").token_N.tolist()
    assert named.tokenizer.eos_id == FileTokenizer(other).eos_id


def test_messages_have_the_template_beside_the_tokenizer_of_the_token_files(tmp_path):
    """Where no weights came from elsewhere, and the run did not train on conversations."""
    original = write_model(tmp_path / "model")
    (tmp_path / "a.txt").write_text("all")
    chosen = trained(tmp_path, "a.txt", "--tokenizer", original)
    with pytest.raises(InputError, match="no chat template"):
        open_vocabulary(chosen, None, None, chat=True)
    template = "{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    vocabulary = open_vocabulary(chosen, None, None, chat=True)
    assert (
        vocabulary.encode("all") == ControlEncoder(original).encode("all<|end|>").token_N.tolist()
    )


def test_a_text_longer_than_the_models_positions_is_refused(imported):
    vocabulary = open_vocabulary(imported, None, None)
    assert encode_prompts(["a b"], vocabulary, imported.cfg, 5)[1] == []
    said = r"prompt has 3 tokens, up to 6 continue it\. The model has 8 positions"
    with pytest.raises(InputError, match=said):
        encode_prompts(["a b"], vocabulary, imported.cfg, 6)


def test_prompts_without_tokens_or_with_unknown_ones_are_refused(imported):
    vocabulary = open_vocabulary(
        imported, str(imported.saved.path.parent.parent / "hf/tokenizer.json"), "4"
    )
    fewer = dataclasses.replace(imported.cfg.model, vocab_size=3)
    cfg = dataclasses.replace(imported.cfg, model=fewer)
    with pytest.raises(InputError, match=r"has id 3, model\.vocab_size is 3"):
        encode_prompts(["b"], vocabulary, cfg, 1)
    bare = dataclasses.replace(vocabulary, library=vocabulary.tokenizer._tokenizer)
    bare.library.post_processor = None
    assert encode_prompts([""], bare, imported.cfg, 1) == ([[0]], []), "<s> begins a text"
    nothing = imported.saved.path.parent.parent / "nothing.jinja"
    nothing.write_text("{# writes nothing #}")
    silent = open_vocabulary(imported, None, None, chat=True, template=str(nothing))
    with pytest.raises(InputError, match=r"prompt has no token\. Got 'a'"):
        encode_prompts(["a"], silent, imported.cfg, 1)


def test_lines_of_a_file_are_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n \ntwo\n")
    assert read_prompts(None, str(path)) == ["one", "two"]
    # What else str.splitlines takes for the end of a line stands in texts.
    inside = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x1dg\x1eh\x85i\rj"
    path.write_bytes(f"\ufeff{inside}\r\n\r\nlast".encode())
    assert read_prompts(None, str(path)) == [inside, "last"]
    path.write_text("\n\n")
    with pytest.raises(InputError, match="has 2 lines without text"):
        read_prompts(None, str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="prompts cannot be read"):
        read_prompts(None, str(path))
