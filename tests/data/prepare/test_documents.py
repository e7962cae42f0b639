import hashlib

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from moejax.data.prepare import documents, rows
from moejax.data.prepare.documents import Document, TextFile, rank_of, read_documents
from moejax.errors import InputError

# Whole characters of 1 to 4 bytes, line ends, a byte order mark; and what is not UTF-8: a byte that
# begins nothing, one that follows nothing, characters without their end, half a surrogate pair.
GOOD = [b"a", b" ", b"\r\n", b"\r", *(x.encode() for x in "\ufeff\u00e9\u20ac\U0001f600")]
BAD = [b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"]


def _whole(raw, source):
    """The text of a file that is decoded at once, or what is said of it.

    A byte-order mark is passed over, and bytes are counted behind it.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"text is not UTF-8. {source}, byte {error.start}: 0x{raw[error.start]:02x}. All text "
            f"must be UTF-8. Convert it with iconv, or leave it out (moejax prepare --skip-bad)."
        )


def _joined(document):
    """The text of a document that is read in pieces, or what is said of it."""
    try:
        return "".join(document.pieces())
    except InputError as error:
        return str(error)


@given(st.lists(st.sampled_from(GOOD + BAD), max_size=12), st.integers(1, 9))
def test_a_text_file_in_pieces_is_what_it_is_as_a_whole(tmp_path_factory, parts, piece):
    raw = b"".join(parts)
    file = tmp_path_factory.getbasetemp() / "any.txt"
    file.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", piece)
        found = [_joined(document) for document in read_documents([file], "text")]
        assert found == [text for text in [_whole(raw, file)] if text]  # no text, no document


@pytest.mark.parametrize(("piece", "fraction"), [(1, 0.3), (3, 0.1), (8, 0.9), (64, 0.5)])
def test_both_parts_of_a_file_are_the_file(tmp_path, monkeypatch, piece, fraction):
    """The first is never longer, or held-out text would be learned."""
    monkeypatch.setattr(documents, "PIECE", piece)
    raw = "".join(f"line {number} caf\u00e9\n" for number in range(12)).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    learned, held_out = read_documents([tmp_path / "a.txt"], "text", fraction=fraction)
    assert (learned.held_out, held_out.held_out) == (False, True)
    assert (rank_of(learned), rank_of(held_out)) == (1, 0)
    first, second = (_joined(part).encode() for part in (learned, held_out))
    assert first + second == raw
    assert first.endswith(b"\n")
    # Cut at the first end of a line behind the share that is learned.
    wanted = int(len(raw) * (1 - fraction))
    assert wanted <= len(first) < wanted + 14
    assert learned.digest() == hashlib.sha256(first).hexdigest()


def test_the_hash_that_holds_out_is_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 3)
    text = "caf\u00e9 \U0001f600\r\n" * 3
    (tmp_path / "a.txt").write_bytes(text.encode())
    wanted = hashlib.sha256(text.encode()).digest()
    share = int.from_bytes(wanted[:8], "big") / 2**64
    for document in (TextFile(tmp_path / "a.txt"), Document(text, "a")):
        assert document.digest() == wanted.hex()
        assert "".join(document.pieces()) == text
        assert rank_of(document) == share


def test_rows_of_parquet_are_counted_over_all_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROWS", 3)
    file = tmp_path / "a.parquet"
    texts = ["a", "", "c", "d", None, "f"]
    parquet.write_table(pyarrow.table({"text": texts}), file)
    found = read_documents([file], "text")
    assert [next(found).source for _ in range(3)] == [f"{file}, row {row}" for row in (0, 2, 3)]
    with pytest.raises(InputError, match=r"a\.parquet, row 4: field 'text' is null"):
        next(found)


def test_parquet_that_is_damaged_behind_its_first_rows_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROWS", 2)
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"text {number} " * 50 for number in range(4)]})
    parquet.write_table(table, file, row_group_size=2, use_dictionary=False)
    start = parquet.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + 60] = b"\xff" * 60
    file.write_bytes(content)
    found = read_documents([file], "text")
    assert [next(found).source for _ in range(2)] == [f"{file}, row {row}" for row in (0, 1)]
    with pytest.raises(InputError, match=r"Parquet file is damaged.*a\.parquet, after row 2"):
        next(found)
