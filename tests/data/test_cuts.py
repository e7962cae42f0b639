import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import corpus
from moejax.data.cuts import PATTERNS, joined, may_cut
from moejax.data.tokenizer import FileTokenizer

splitters, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers

ENGLISH = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")[:20_000]
CODE = b"".join(corpus.documents()[0]).decode()[:20_000]
MESSY = ENGLISH.replace("\n", "\r\n").replace(". ", ".   \t ").replace(", ", ",\n\n  ")


def _by(pattern, *, use_regex=False, **changes):
    said = {"behavior": "isolated", "invert": False, **changes}
    split = splitters.Split(tokenizers.Regex(pattern), **said)
    level = splitters.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return splitters.Sequence([split, level])


LEVEL = splitters.ByteLevel(add_prefix_space=False)
KINDS = {
    "gpt2": (LEVEL, None),
    "prefixed": (splitters.ByteLevel(add_prefix_space=True), None),
    "cl100k": (_by(PATTERNS[0]), None),
    "qwen": (_by(PATTERNS[1]), normalizers.NFC()),
    "twice": (_by(PATTERNS[1], use_regex=True), None),
    "o200k": (_by(PATTERNS[2]), None),
}


def _made(splitter, normalizer):
    """A byte-level BPE tokenizer that has learned words and runs of white space."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<eos>"],
        initial_alphabet=splitters.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([ENGLISH, CODE, MESSY], trainer)
    made.add_tokens(["<tool>", "\u00e9t\u00e9"])
    return made


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cuts") / "t.json"
    _made(*KINDS[request.param]).save(str(path))
    return FileTokenizer(path)


def _split(text, sizes):
    """A text in pieces of the sizes, over and over."""
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces


def _ids(tokenizer, pieces):
    return np.concatenate([np.array([], int), *tokenizer.encode_pieces(iter(pieces))]).tolist()


@pytest.mark.parametrize("text", [ENGLISH, CODE, MESSY, " " * 5000 + "a" + "\r\n " * 3000 + "b c"])
def test_long_texts_have_the_ids_of_the_whole(tokenizer, text):
    assert tokenizer.cuts
    wanted = tokenizer.encode(text)
    for sizes in ([97], [1, 2, 3], [4096], [10**6]):
        assert _ids(tokenizer, _split(text, sizes)) == wanted


PARTS = [*" \t\n\r\v\x0b\x1c\x85\xa0\u2003\u3000\u180e\u200b", "  ", "\r\n", "\n \n"]
PARTS += [*"ab1/.'\u00e9\u0308\U0001f600\u01c5\u02b0\u0660", "the", "The", "'ll", "'S", "12345"]
PARTS += [
    "...",
    "//",
    "<eos>",
    "<tool>",
    "e\u0301",
    "\u00e9t\u00e9",
    "\u6f22\u5b57",
    "\u0915\u094d",
]


@given(st.lists(st.sampled_from(PARTS), max_size=30), st.lists(st.integers(1, 9), min_size=1))
@settings(max_examples=100)
def test_any_text_has_the_ids_of_the_whole(tokenizer, parts, sizes):
    text = "".join(parts)
    pieces = _split(text, sizes)
    assert "".join(joined(iter(pieces))) == text
    assert _ids(tokenizer, pieces) == tokenizer.encode(text)
    # Matches too, so that it does not hang on what the tokenizer has learned.
    split = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str
    found = [match for part in joined(iter(pieces)) for match, _ in split(part)]
    assert found == [match for match, _ in split(text)]


def test_a_text_is_cut_once_a_piece_before_a_space_behind_a_word():
    pieces = ["one two thr", "ee  four   ", "five", "  ", "six\n seven.", " eight"]
    wanted = ["one two", " three  four", "   five  six\n seven. eight"]
    assert list(joined(iter(pieces))) == wanted


def test_a_text_without_a_place_to_cut_stays_whole():
    assert list(joined(iter(["\u6f22\u5b57" * 9] * 5 + ["\n  "]))) == ["\u6f22\u5b57" * 45 + "\n  "]
    assert list(joined(iter([]))) == []


@pytest.mark.parametrize(
    ("splitter", "normalizer", "added"),
    [
        (splitters.Metaspace(), None, None),
        (splitters.ByteLevel(use_regex=False), None, None),
        (None, None, None),
        (_by(r"\p{L}+ \p{L}+|\s+"), None, None),
        (_by(PATTERNS[0], behavior="removed"), None, None),
        (_by(PATTERNS[0], invert=True), None, None),
        (splitters.Sequence([splitters.Digits(), LEVEL]), None, None),
        (LEVEL, normalizers.Lowercase(), None),
        (LEVEL, None, tokenizers.AddedToken("two words")),
        (LEVEL, None, tokenizers.AddedToken("<x>", lstrip=True)),
        (LEVEL, None, tokenizers.AddedToken("<x>", rstrip=True)),
        (LEVEL, None, tokenizers.AddedToken("<x>", single_word=True)),
    ],
)
def test_what_is_not_known_to_allow_it_is_encoded_whole(tmp_path, splitter, normalizer, added):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "<unk>": 1}, "<unk>"))
    if splitter is not None:
        made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    if added is not None:
        made.add_tokens([added])
    made.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert not tokenizer.cuts
    text = ["two wo", "rds  <x", "> and", " more"]
    found = list(tokenizer.encode_pieces(iter(text)))
    assert [ids.tolist() for ids in found] == [tokenizer.encode("".join(text))]


def test_merges_that_are_left_out_at_random_are_not_cut():
    said = json.loads(_made(LEVEL, None).to_str())
    assert may_cut(said)
    assert not may_cut({**said, "model": {**said["model"], "dropout": 0.1}})


def test_known_patterns_are_those_of_released_tokenizers():
    """Letter by letter: those of Llama 3, Qwen 3 and gpt-oss, from their tokenizer.json."""
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        (r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    )
    o200k = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert ("{1,3}".join(parts), "".join(parts), o200k) == PATTERNS
