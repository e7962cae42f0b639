import numpy as np
import pytest

from moejax.data import sidecar, tokens
from moejax.data.prepare import writers
from moejax.data.prepare.documents import Document
from moejax.errors import InputError


class Fake:
    """A tokenizer that gives the same ids for every piece."""

    cuts, bos_id = True, None

    def __init__(self, vocab_size, ids):
        self.vocab_size, self.eos_id, self.ids = vocab_size, vocab_size - 1, ids

    def encode(self, text):
        return self.ids

    def encode_pieces(self, pieces):
        for _ in pieces:
            yield np.array(self.ids)

    def decode(self, ids):
        return ""


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_the_dtype_fits_the_vocabulary(tmp_path, size, dtype):
    tokenizer = Fake(size, [size - 2])
    writer = writers.BinWriter(tmp_path / "a.bin", tokenizer, "bytes")
    writer.add(Document("x", ""), tokenizer)
    writer.finish()
    assert sidecar.read_sidecar(tmp_path / "a.bin").dtype == dtype
    source = tokens.open_files([str(tmp_path / "a.bin")], "bin", model_vocab=size)
    assert source.read(0, 3).tolist() == [size - 1, size - 2, size - 1]


@pytest.mark.parametrize("kind", [writers.BinWriter, writers.ArrayRecordWriter])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_eos_in_a_document_is_refused_wherever_it_stands(tmp_path, kind, at):
    tokenizer = Fake(9, [8 if at == i else 3 for i in range(3)])
    writer = kind(tmp_path / "a", tokenizer, "bytes")
    with pytest.raises(InputError, match=r"eos stands in a document. here.txt holds token 8"):
        writer.add(Document("x", "here.txt"), tokenizer)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
