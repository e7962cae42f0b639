"""Opens the data of a run's settings: training stream, held-out stream, tokenizer."""

from pathlib import Path
from typing import NamedTuple

from moejax.config.schema import DataConfig
from moejax.data import corpus
from moejax.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_beside
from moejax.data.tokens import (
    FilePart,
    FileSource,
    TokenSource,
    check_apart,
    from_documents,
    open_files,
)
from moejax.errors import InputError

Content = dict[str, list[FilePart]]  # "train" and "held_out" -> their files


class Sources(NamedTuple):
    """The streams of a run."""

    train: TokenSource
    held_out: TokenSource | None
    tokenizer: Tokenizer
    # With `data.train_weights`: a stream for each entry of `data.train_files`, and its weight.
    mixture: tuple[tuple[TokenSource, float], ...] = ()


def open_sources(data: DataConfig, *, model_vocab: int) -> Sources:
    """Opens and checks every file that the settings name.

    Raises:
      InputError: for files that are missing, damaged, or unfit for the model.
    """
    if data.source == "stdlib":
        train, held_out = corpus.documents()
        return Sources(from_documents(train), from_documents(held_out), ByteTokenizer())
    wanted = "bin" if data.source == "tokens" else "array_record"
    train = open_files(data.train_files, wanted, model_vocab=model_vocab)
    held_out = None
    if data.eval_files:
        held_out = open_files(data.eval_files, wanted, model_vocab=model_vocab)
        check_apart(train, held_out)
    first = train.sources[0]
    tokenizer = tokenizer_beside(
        first.path,
        first.sidecar.tokenizer,
        eos_id=first.eos_id,
        sha256=first.sidecar.tokenizer_sha256,
    )
    mixture = tuple(
        (open_files([entry], wanted, model_vocab=model_vocab), weight)
        for entry, weight in zip(data.train_files, data.train_weights, strict=False)
    )
    return Sources(train, held_out, tokenizer, mixture)


def tokenizer_file(data: DataConfig) -> Path | None:
    """Returns the tokenizer.json beside a run's token files; None where there is none any more."""
    if (first := _first_file(data)) is None:
        return None
    path = first.path.parent / Path(first.sidecar.tokenizer).name
    return path if path.is_file() else None


def end_of_document(data: DataConfig) -> int | None:
    """Returns the token that ends a run's documents; None where its files are no more."""
    if data.source == "stdlib":
        return ByteTokenizer.eos_id
    return None if (first := _first_file(data)) is None else first.eos_id


def _first_file(data: DataConfig) -> FileSource | None:
    """Returns the first of a run's token files; None without any, or where they have moved."""
    if data.source == "stdlib":
        return None
    wanted = "bin" if data.source == "tokens" else "array_record"
    try:
        return open_files(data.train_files, wanted, model_vocab=2**31).sources[0]
    except InputError:
        return None


def describe_sources(sources: Sources) -> Content:
    """Returns the files of the streams, which a resumed run compares."""
    held_out = [] if sources.held_out is None else sources.held_out.parts()
    return {"train": sources.train.parts(), "held_out": held_out}
