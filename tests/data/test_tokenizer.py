import json
import re
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.tokenizer import ByteTokenizer, FileTokenizer
from moejax.errors import InputError


def _train(*special, size=300):
    """A small byte-level BPE tokenizer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["a document and another document"] * 20, trainer)
    return made


def _save(path, *special):
    _train(*special).save(str(path))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("tokenizer") / "t.json", "<|endoftext|>", "<|other|>")


@given(st.text())
def test_bytes_give_any_text_back(text):
    ids = ByteTokenizer().encode(text)
    assert ids == list(text.encode())
    assert ByteTokenizer().decode([256, *ids, 256]) == text
    assert ByteTokenizer().decode([0x61, 0xC3, 256]) == "a\ufffd", "broken characters are replaced"


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_a_tokenizer_file_gives_any_text_back(path, text):
    tokenizer = FileTokenizer(path)
    ids = tokenizer.encode(text)
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert tokenizer.decode([tokenizer.eos_id, *ids, tokenizer.eos_id]) == text


def test_eos_is_chosen_by_name_or_id_or_found_by_a_usual_name(path, tmp_path):
    size = FileTokenizer(path).vocab_size
    for eos, wanted in ((None, 0), ("<|other|>", 1), ("5", 5), (str(size - 1), size - 1)):
        assert FileTokenizer(path, eos=eos).eos_id == wanted
    for eos in ("<|no such token|>", str(size)):
        with pytest.raises(InputError, match=rf"no {re.escape(eos)}\..*--eos ID below {size}"):
            FileTokenizer(path, eos=eos)
    with pytest.raises(InputError, match=r"--eos NAME.*--eos ID"):
        FileTokenizer(_save(tmp_path / "t.json", "<begin>", "<finish>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<finish>"}')
    assert FileTokenizer(tmp_path / "t.json").eos_id == 1, "which the settings name"
    for name in ("</s>", "<eos>"):  # before one that the settings name
        assert FileTokenizer(_save(tmp_path / "u.json", "<finish>", name)).eos_id == 1


def test_without_the_package_the_extra_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install .?moejax\[hf\]"):
        FileTokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=r"t\.json"):
        FileTokenizer(tmp_path / "t.json")
    with pytest.raises(InputError, match=r"other\.json does not exist"):
        FileTokenizer(tmp_path / "other.json")


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path):
    made = _train("<eos>")
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    text = "document " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_a_vocabulary_with_holes_counts_its_highest_id(tmp_path):
    model = tokenizers.models.WordLevel({"<eos>": 0, "word": 900}, unk_token="<eos>")
    made = tokenizers.Tokenizer(model)
    made.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert tokenizer.encode("word") == [900]
    assert tokenizer.vocab_size == 901
    # Nothing in the file says that this one is no text.
    assert tokenizer.decode([0, 900, 0]) == "word"


def _begun(path, single, *names):
    """A tokenizer that puts these tokens in front of a text by itself."""
    made = _train("</s>", "<s>", "<go>")
    ids = [(name, made.token_to_id(name)) for name in names]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=ids
    )
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("files", "single", "bos"),
    [
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, None, 1),
        ({"tokenizer_config.json": {"bos_token": {"content": "<s>"}}}, None, 1),
        ({"special_tokens_map.json": {"bos_token": "<go>"}}, None, 2),
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, "<go> $A", 1),
        ({}, "<s> $A </s>", 1),
        ({}, "$A </s>", None),
        ({}, "<go> <s> $A", None),
        ({"tokenizer_config.json": {"bos_token": None}}, None, None),
        ({"tokenizer_config.json": {"bos_token": "</s>"}}, None, None),
    ],
)
def test_the_token_that_begins_a_text_is_the_one_that_lm_eval_takes(tmp_path, files, single, bos):
    if single is None:
        path = _save(tmp_path / "tokenizer.json", "</s>", "<s>", "<go>")
    else:
        names = [part for part in single.split() if part != "$A"]
        path = _begun(tmp_path / "tokenizer.json", single, *names)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = FileTokenizer(path)
    assert (found.eos_id, found.bos_id) == (0, bos)
    ids = found.encode("a document")
    assert bos not in ids
    assert found.decode([bos or 0, *ids, 0]) == "a document"
