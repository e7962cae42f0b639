import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.prepare.control_tokens import BYTES_EOS, ControlEncoder, bytes_tokenizer
from moejax.data.tokenizer import ByteTokenizer, FileTokenizer
from tests.data.chats import CONTROLS, TOKENIZERS, write_model

texts = st.lists(st.sampled_from(["a", " ", "\n", "\u00e9", "\u2603", "all ", BYTES_EOS])).map(
    "".join
)


BYTES = ControlEncoder(None)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in TOKENIZERS}


@given(texts)
def test_bytes_know_their_characters(text):
    found = BYTES.encode(text)
    parts = text.split(BYTES_EOS)
    wanted = [id for part in parts for id in [*part.encode(), 256]][:-1]
    assert found.token_N.tolist() == wanted
    assert found.control_N.tolist() == [id == 256 for id in wanted]
    for id, first, stop in zip(found.token_N, found.first_N, found.stop_N, strict=True):
        assert text[first:stop] == BYTES_EOS if id == 256 else id in text[first:stop].encode()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_control_tokens_are_found_and_know_their_characters(paths, name):
    text = "<s>all \u2603\n<|im_end|> b"
    encoder = ControlEncoder(paths[name])
    assert encoder.controls == frozenset(CONTROLS)
    found = encoder.encode(text)
    spans = zip(found.first_N[found.control_N], found.stop_N[found.control_N], strict=True)
    assert [text[first:stop] for first, stop in spans] == ["<s>", "<|im_end|>"]
    covered = np.zeros(len(text), bool)
    for first, stop in zip(found.first_N, found.stop_N, strict=True):
        covered[first:stop] = True
    assert covered.all(), "spaces too: nothing is trimmed"


def test_in_plain_text_they_stay_text(paths):
    ids = FileTokenizer(paths["byte_level"]).encode("<s>")
    assert len(ids) == 3
    assert len(ControlEncoder(paths["byte_level"]).encode("<s>").token_N) == 1


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_the_tokenizer_of_bytes_gives_bytes(text):
    library = tokenizers.Tokenizer.from_str(json.dumps(bytes_tokenizer()))
    ids = library.encode(text, add_special_tokens=False).ids
    assert ids == ByteTokenizer().encode(text)
    assert library.decode(ids) == text
    assert library.token_to_id(BYTES_EOS) == ByteTokenizer.eos_id
