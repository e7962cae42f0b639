"""Texts that grow by tokens are the text of all tokens, up to a stop string."""

import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moejax.data.tokenizer import ByteTokenizer, FileTokenizer
from moejax.errors import InputError
from moejax.serve.prompts import Vocabulary
from moejax.serve.texts import GrowingText, TokenTexts, checked_stops

BYTES = ByteTokenizer()
WORDS = ["\u2581", "\u2581tok", "en", "\u2581a", "b", "\u20ac", "</s>", "."]


@functools.cache
def with_spaces(folder):
    """A tokenizer as SentencePiece's: pieces with a mark for a space, and bytes."""
    table = [(word, -1.0) for word in WORDS] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    library = Tokenizer(models.Unigram(table, unk_id=WORDS.index("."), byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    library.add_special_tokens(["</s>"])
    path = Path(folder) / "tokenizer.json"
    library.save(str(path))
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    return with_spaces(tmp_path_factory.mktemp("spaced"))


def continuation(tokenizer, prompt, ids):
    return Vocabulary(tokenizer, None, frozenset(), 300, None).continuation(prompt, ids)


def grown(tokenizer, prompt, ids, stops=()):
    """The pieces of a text, and the text object; tokens behind a stop are given to it too."""
    text = GrowingText(tokenizer.decode, prompt, stops)
    return [*(text.add(id) for id in ids), text.end()], text


ANY_BYTES = st.lists(st.one_of(st.integers(0, 257), st.sampled_from([0xE2, 0x82, 0xAC, 32])))


@settings(max_examples=300)
@given(ANY_BYTES, ANY_BYTES)
def test_pieces_of_any_bytes_are_the_continuation(prompt, ids):
    pieces, text = grown(BYTES, prompt, ids)
    assert "".join(pieces) == continuation(BYTES, prompt, ids)
    assert text.kept == len(ids)


LETTERS = st.text(st.sampled_from("a \u20ac\U0001f600\u00e9z"), max_size=12)


@settings(max_examples=200)
@given(LETTERS, LETTERS)
def test_pieces_of_a_tokenizer_with_spaces_are_the_continuation(spaced, before, behind):
    prompt, ids = spaced.encode(before), spaced.encode(behind)
    assert "".join(grown(spaced, prompt, ids)[0]) == continuation(spaced, prompt, ids)


PIECES = st.lists(st.integers(0, len(WORDS) - 1), max_size=12)


@settings(max_examples=200)
@given(PIECES, PIECES)
def test_leading_spaces_and_tokens_without_text_are_those_of_the_continuation(spaced, prompt, ids):
    assert "".join(grown(spaced, prompt, ids)[0]) == continuation(spaced, prompt, ids)


def test_an_unfinished_character_waits_for_its_last_byte():
    pieces, text = grown(BYTES, list(b"x"), list("a\u20acb".encode()))
    assert pieces == ["a", "", "", "\u20ac", "b", ""]
    assert text.starts == [0, 1, 1, 1, 2]
    assert grown(BYTES, [], [0xE2, 0x82])[0] == ["", "", "\ufffd"]


@pytest.mark.parametrize(
    ("said", "stops", "wanted", "kept"),
    [
        ("one two three", ["two"], "one ", 4),
        ("one two three", ["three", "two"], "one ", 4),
        ("who two", ["o t", "two"], "wh", 2),  # both are found, one in the other
        ("ababac", ["abac"], "ab", 2),  # what looked like a beginning was none
        ("abab", ["abac"], "abab", 4),
        ("a\u20acb", ["\u20ac"], "a", 1),
        ("a\u20acb", ["\u20acb"], "a", 1),
        ("a\u20ac", ["b"], "a\u20ac", 4),
        ("stop", ["stop"], "", 0),
    ],
)
def test_a_text_ends_before_the_first_stop_string(said, stops, wanted, kept):
    pieces, text = grown(BYTES, [], list(said.encode()), stops)
    assert "".join(pieces) == wanted
    assert text.kept == kept
    assert text.stopped == (wanted != said)


def test_a_stop_string_may_begin_and_end_inside_a_token(spaced):
    """ " tok" "en" "." with the stop "ke": of the first token some text is shown, so it is kept."""
    ids = [WORDS.index("\u2581tok"), WORDS.index("en"), WORDS.index(".")]
    pieces, text = grown(spaced, spaced.encode("b"), ids, ["ke"])
    assert pieces == [" to", "", "", ""]
    assert (text.kept, text.stopped) == (1, True)
    # Only one byte of the stop's character is in the last token that is kept.
    euro = list("\u20ac".encode())
    assert grown(BYTES, [], [ord("a"), *euro, ord("c")], ["\u20acc"])[0] == [
        "a",
        "",
        "",
        "",
        "",
        "",
    ]


@settings(max_examples=300)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_shown_text_holds_a_stop_string(said, stops):
    text = GrowingText(BYTES.decode, [], stops)
    shown = ""
    for byte in said.encode():
        shown += text.add(byte)
        assert not any(stop in shown for stop in stops)
        assert said.startswith(shown)
    shown += text.end()
    whole = [end for end in range(len(said) + 1) if any(said[:end].endswith(s) for s in stops)]
    if whole:  # ends before a stop that is the first to be whole
        first = said[: whole[0]]
        assert shown == first[: min(first.index(s) for s in stops if s in first)]
    else:
        assert shown == said


def test_a_token_costs_the_same_in_a_long_text():
    """The tokens that are decoded are counted: of valid text, and of bytes that are none."""
    for byte in (ord("a"), 0x80, 0xE2):
        decoded = []

        def decode(ids, decoded=decoded):
            decoded.append(len(ids))
            return BYTES.decode(ids)

        text = GrowingText(decode, list(b"prompt"), ["never"])
        for _ in range(2000):
            text.add(byte)
        assert max(decoded[20:]) <= 20
        assert len(decoded) < 4100


def test_single_tokens_have_a_text_or_a_name(spaced):
    names = TokenTexts(BYTES)
    assert [names(id) for id in (97, 0xE2, 256)] == ["a", "bytes:\\xe2", "<256>"]
    names = TokenTexts(spaced)
    wanted = [" ", " tok", "en", " a", "b", "\u20ac", "</s>", "."]
    assert [names(id) for id in range(len(WORDS))] == wanted
    assert names(len(WORDS) + 0xE2) == "<0xE2>"
    assert names(10_000) == "<10000>"


@pytest.mark.parametrize("stop", ["", "\ud800"])
def test_a_stop_string_is_text(stop):
    with pytest.raises(InputError, match="stop string is no text"):
        checked_stops(["fine", stop])
