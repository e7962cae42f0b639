"""Opens the data of a run's settings: training stream, held-out stream, tokenizer."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moejax.config.schema import Config, DataConfig
from moejax.data import corpus
from moejax.data.routing import ModelExperts, Stream, experts_of, open_recorded
from moejax.data.sidecar import Sidecar, read_sidecar, sidecar_of
from moejax.data.tokenizer import BYTES, ByteTokenizer, FileTokenizer, Tokenizer, digest
from moejax.data.tokens import (
    FilePart,
    JoinedSource,
    TokenSource,
    check_apart,
    find_files,
    from_documents,
    open_files,
)
from moejax.errors import InputError, writing

Content = dict[str, list[FilePart]]  # "train" and "held_out" -> their files
KEPT = Path("tokenizer") / "tokens"  # beside it a run keeps its sidecar and tokenizer


class Sources(NamedTuple):
    """The streams of a run."""

    train: Stream
    held_out: TokenSource | None
    tokenizer: Tokenizer | None  # None where no file names one
    # With `data.train_weights`: a stream for each entry of `data.train_files`, and its weight.
    mixture: tuple[tuple[Stream, float], ...] = ()


def container_of(data: DataConfig) -> str | None:
    """Returns the format of the token files that settings name; None: each may have its own."""
    return {"tokens": "bin", "array_record": "array_record"}.get(data.source)


def open_sources(
    data: DataConfig, *, model_vocab: int, experts: ModelExperts | None = None
) -> Sources:
    """Opens and checks every file that the settings name.

    Args:
      model_vocab: ids must be below it.
      experts: of the model, for recorded routing.

    Raises:
      InputError: for files that are missing, damaged, or unfit for the model.
    """
    if data.source == "stdlib":
        train, held_out = corpus.documents()
        return Sources(from_documents(train), from_documents(held_out), ByteTokenizer())
    open_tokens = partial(open_files, wanted=container_of(data), model_vocab=model_vocab)
    open_stream: Callable[[Sequence[str]], Stream] = open_tokens
    if data.source == "routing":
        assert experts is not None
        open_stream = partial(open_recorded, model_vocab=model_vocab, experts=experts)
    train, held_out = open_stream(data.train_files), None
    if data.eval_files:
        held_out = open_tokens(data.eval_files)
        if isinstance(train, JoinedSource):
            check_apart(train, held_out)
    described, tokenizer = train if isinstance(train, JoinedSource) else held_out, None
    if described is not None:
        first = described.sources[0]
        tokenizer = Described(first.path, first.sidecar).open_tokenizer()
    mixture = tuple(
        (open_stream([entry]), weight)
        for entry, weight in zip(data.train_files, data.train_weights, strict=False)
    )
    return Sources(train, held_out, tokenizer, mixture)


class Described(NamedTuple):
    """The description of a token file: its sidecar and its tokenizer.

    Attributes:
      path: sidecar and tokenizer are beside this path; the token file itself may be missing.
    """

    path: Path
    sidecar: Sidecar

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json beside it; None for bytes, or if it is not there any more."""
        path = self.path.with_name(self.sidecar.tokenizer)
        return path if self.sidecar.tokenizer != BYTES and path.is_file() else None

    def open_tokenizer(self) -> Tokenizer:
        """Opens its tokenizer.

        Raises:
          InputError: if it is missing, or differs from the one that made the tokens.
        """
        if self.sidecar.tokenizer == BYTES:
            return ByteTokenizer()
        file, wanted = self.tokenizer_file, self.sidecar.tokenizer_sha256
        if file is not None and wanted is not None and (found := digest(file)) != wanted:
            raise InputError(
                f"tokenizer was changed. {file} has sha256 {found[:16]}, the sidecar of "
                f"{self.path} says {wanted[:16]}. It must be the one that made the tokens. Copy it "
                f"again, or prepare the text again."
            )
        return FileTokenizer(self.path.with_name(self.sidecar.tokenizer), ends=self.sidecar.ends)


def describe_tokens(data: DataConfig, folders: Iterable[Path] = ()) -> Described | None:
    """Returns the description of a run's token files; None if there is none any more.

    Of several training files it describes the first one of conversations, else the first. Beside
    recorded routing it describes held-out files in their place.

    Args:
      folders: possible run directories, which keep a copy (`keep_tokenizer`).
    """
    if data.source == "stdlib":
        return None
    for folder in folders:
        if sidecar_of(folder / KEPT).is_file():
            return Described(folder / KEPT, read_sidecar(folder / KEPT))
    try:
        files = find_files(data.eval_files if data.source == "routing" else data.train_files)
        found = [Described(path, read_sidecar(path)) for path in files]
    except InputError:
        return None
    return next((one for one in found if one.sidecar.chat is not None), found[0] if found else None)


def is_tokenizer_of(
    tokenizer: Path, step: int, data: DataConfig, described: Described | None
) -> bool:
    """Returns whether the tokenizer that came with weights is the one of a checkpoint's texts.

    Args:
      step: step of the checkpoint; at step 0 nothing was trained here yet.
      described: description of the run's token files, if known.
    """
    if step == 0:
        return True
    if described is None:
        return data.source != "stdlib"
    return described.sidecar.tokenizer_sha256 == digest(tokenizer)


def keep_tokenizer(data: DataConfig, run_dir: Path) -> None:
    """Copies a sidecar and a tokenizer into a run directory: token files may move later."""
    kept = run_dir / KEPT
    sidecar_of(kept).unlink(missing_ok=True)
    if (described := describe_tokens(data)) is None:
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    if (tokenizer := described.tokenizer_file) is not None:
        with writing(kept.parent / tokenizer.name):
            shutil.copyfile(tokenizer, kept.parent / tokenizer.name)
    with writing(sidecar_of(kept)):
        described.sidecar.write(kept)


def describe_sources(sources: Sources) -> Content:
    """Returns the files of the streams, which a resumed run compares."""
    held_out = [] if sources.held_out is None else sources.held_out.parts()
    return {"train": sources.train.parts(), "held_out": held_out}


SAMPLES = 256  # sequences whose documents are looked at


def share_inside(cfg: Config) -> float:
    """Returns the share of the pairs of positions that lie inside a document, for prices.

    That of `plan.documents`, or of sequences of the token files, evenly spread; 1 for other data,
    and where documents are not kept apart.

    Raises:
      InputError: for files that are missing or unfit.
    """
    data, length = cfg.data, cfg.data.sequence_length
    if cfg.plan.documents is not None:
        return cfg.plan.documents
    if data.source == "stdlib" or not data.isolate_documents:
        return 1.0
    experts = experts_of(cfg)
    train = open_sources(data, model_vocab=cfg.model.vocab_size, experts=experts).train
    last = max(0, train.num_tokens - length)
    starts = sorted({round(at) for at in np.linspace(0, last, SAMPLES)})
    pairs = 0
    for start in starts:
        begins = np.flatnonzero(train.stretch(start, min(length, train.num_tokens)).begin_N)
        sizes = np.diff(np.unique([0, *begins, length]))
        pairs += int(np.sum(sizes * (sizes + 1)))
    return pairs / len(starts) / (length * (length + 1))
