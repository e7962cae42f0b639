import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from moejax.data.prepare.control_tokens import BYTES_EOS, ByteEncoder, FileEncoder
from moejax.data.tokenizer import FileTokenizer
from tests.data.chats import CONTROLS, TOKENIZERS, write_model

texts = st.lists(st.sampled_from(["a", " ", "\n", "\u00e9", "\u2603", "all ", BYTES_EOS])).map(
    "".join
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in TOKENIZERS}


@given(texts)
def test_bytes_know_their_characters(text):
    found = ByteEncoder().encode(text)
    parts = text.split(BYTES_EOS)
    wanted = [id for part in parts for id in [*part.encode(), 256]][:-1]
    assert found.token_N.tolist() == wanted
    assert found.control_N.tolist() == [id == 256 for id in wanted]
    for id, first, stop in zip(found.token_N, found.first_N, found.stop_N, strict=True):
        assert text[first:stop] == BYTES_EOS if id == 256 else id in text[first:stop].encode()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_control_tokens_are_found_and_know_their_characters(paths, name):
    text = "<s>all \u2603\n<|im_end|> b"
    found = FileEncoder(paths[name]).encode(text)
    spans = zip(found.first_N[found.control_N], found.stop_N[found.control_N], strict=True)
    assert [text[first:stop] for first, stop in spans] == ["<s>", "<|im_end|>"]
    covered = np.zeros(len(text), bool)
    for first, stop in zip(found.first_N, found.stop_N, strict=True):
        covered[first:stop] = True
    assert covered.all(), "spaces too: nothing is trimmed"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_control_tokens_are_those_that_the_file_calls_special(paths, name):
    assert FileEncoder(paths[name]).controls == frozenset(CONTROLS)


def test_in_plain_text_they_stay_text(paths):
    ids = FileTokenizer(paths["byte_level"]).encode("<s>")
    assert len(ids) == 3
    assert len(FileEncoder(paths["byte_level"]).encode("<s>").token_N) == 1
