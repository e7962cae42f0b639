"""Token files of bytes, written as `moejax prepare` does."""

import json

import numpy as np

from moejax.data import tokens
from moejax.data.marks import BEGIN, CONTEXT, TARGET, MarkedDocument
from moejax.data.prepare.documents import Document
from moejax.data.prepare.flags import SUFFIXES
from moejax.data.prepare.writers import ArrayRecordWriter, BinWriter
from moejax.data.sidecar import sidecar_of
from moejax.data.tokenizer import ByteTokenizer

FORMATS = {"bin": BinWriter, "array_record": ArrayRecordWriter}
EOS = ByteTokenizer.eos_id


class BegunTokenizer(ByteTokenizer):
    """Bytes whose documents begin with a token of their own."""

    vocab_size, bos_id = 258, 257


def write_text(folder, *texts, name="a", format="bin", tokenizer=None):
    """Writes texts as documents. Returns the path."""
    tokenizer = tokenizer or ByteTokenizer()
    path = folder / f"{name}{SUFFIXES[format]}"
    writer = FORMATS[format](path, tokenizer, "bytes")
    for text in texts:
        writer.add(Document(text, name), tokenizer)
    writer.finish()
    return path


def marked(prompt, answer):
    """A conversation of a prompt and its answer, bytes or ids."""
    ids = [*prompt, *answer]
    marks = [BEGIN, *[CONTEXT] * (len(prompt) - 1), *[TARGET] * len(answer)]
    sizes = len(ids), len(answer)
    return MarkedDocument("here", "", np.array(ids), np.array(marks, np.uint8), *sizes)


def write_marked(folder, pairs, *, name="a", format="bin"):
    """Writes conversations, pairs of prompt and answer. Returns the path."""
    path = folder / f"{name}{SUFFIXES[format]}"
    writer = FORMATS[format](path, ByteTokenizer(), "bytes", marked=True)
    for pair in pairs:
        writer.add_marked(marked(*pair))
    writer.finish()
    return path


def read(*paths, format=None, model_vocab=264):
    """Opens token files as one stream."""
    return tokens.open_files(list(map(str, paths)), format, model_vocab=model_vocab)


def change(path, **fields):
    """Edits the sidecar of a token file; an ellipsis takes a field out."""
    file = sidecar_of(path)
    facts = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: x for name, x in facts.items() if x is not ...}))
