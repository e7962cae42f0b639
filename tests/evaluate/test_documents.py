import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.batches import eval_batches
from moejax.data.tokenizer import ByteTokenizer
from moejax.data.tokens import from_documents, open_files
from moejax.evaluate.documents import scores, sum_documents
from tests.data.token_files import write_marked, write_text

T, B = 5, 2


def nats_of(source):
    """Batches of nats that tell each target by its position in the stream."""
    for number, batch in enumerate(
        eval_batches(source, sequence_length=T, batch_sequences=B, limit=None)
    ):
        position_BT = number * T * B + 1 + np.arange(T * B).reshape(B, T)
        yield np.where(batch.target_BT >= 0, position_BT, 0).astype(np.float32)


def score_all(source, tokenizer=None, known=None):
    return scores(source, sum_documents(source, nats_of(source), T * B), tokenizer, known)


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=9))
def test_every_target_counts_for_the_document_that_predicts_it(texts):
    found = score_all(from_documents(texts), ByteTokenizer())
    ends = np.cumsum([len(text) + 1 for text in texts])
    assert [score.name for score in found] == [f"document {i}" for i in range(len(texts))]
    assert [score.tokens for score in found] == [len(text) + 1 for text in texts]
    for score, text, end in zip(found, texts, ends, strict=True):
        first = end - len(text)
        assert score.nats == sum(range(first, end + 1))
        wanted = len(text.decode("utf-8", errors="replace").encode())
        assert score.bytes == wanted
        assert (score.bits_per_byte is None) == (wanted == 0)


def test_documents_of_files_are_named_by_file_and_number(tmp_path):
    paths = [write_text(tmp_path, "ab", name="a"), write_text(tmp_path, "cde", name="b")]
    paths.append(write_marked(tmp_path, [(b"ask", b"say"), (b"q", b"a")], name="c"))
    source = open_files(list(map(str, paths)), "bin", model_vocab=264)
    found = score_all(source, ByteTokenizer())
    named = [(score.name, score.tokens, score.bytes) for score in found]
    a, b, c = paths
    assert named == [
        (f"{a}, document 0", 3, 2),
        (f"{a}, end", 1, 0),
        (f"{b}, document 0", 4, 3),
        (f"{c}, document 0", 3, 3),
        (f"{c}, document 1", 1, 1),
    ]
    assert sum(score.tokens for score in found) == source.num_targets
    assert sum(score.bytes for score in found) == source.target_bytes
    stretch = source.stretch(0, source.num_tokens)
    assert sum(score.nats for score in found) == np.flatnonzero(stretch.target_N)[1:].sum()


def test_names_and_bytes_that_are_known_are_kept():
    found = score_all(from_documents([b"one", b"two!"]), None, [("x.txt", 3), ("y.txt", 4)])
    assert [(score.name, score.bytes) for score in found] == [("x.txt", 3), ("y.txt", 4)]


def test_without_a_tokenizer_bytes_are_open():
    (found,) = score_all(from_documents([b"one"]))
    assert (found.bytes, found.bits_per_byte) == (None, None)
