"""Token streams, from which sequences are cut. Format: docs/formats/tokens.md.

A stream without marks is `eos document eos document ... eos`. An end-of-document token opens the
next document too, so every token after the first is a target, predicted from its own document
alone. If the tokenizer has a token that begins a text, the stream is `bos document eos bos document
eos ...`, and bos is no target. Marks beside a file replace both rules: they give the targets and
the first tokens of documents.
"""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from moejax.data.containers import ArrayRecordSource, BinSource, FileSource
from moejax.data.marks import Stretch, marks_of, without_marks
from moejax.data.sidecar import read_sidecar
from moejax.data.tokenizer import digest
from moejax.errors import InputError


class FilePart(TypedDict):
    """A file of a stream, or a text in memory, with a digest of its content."""

    name: str
    digest: str
    tokens: int


@dataclass(frozen=True)
class MemorySource:
    """A stream held in memory."""

    tokens: np.ndarray
    vocab_size: int  # upper bound of ids
    eos_id: int  # the token between documents
    target_bytes: int | None  # of the text that the targets spell; None if unknown

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """Number of tokens that are predicted: every one after the first."""
        return len(self.tokens) - 1

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32."""
        return self.tokens[start : start + length].astype(np.int32)

    def stretch(self, start: int, length: int) -> Stretch:
        """The same tokens; all are targets, and eos begins a document."""
        return without_marks(self.read(start, length), self.eos_id)

    def parts(self) -> list[FilePart]:
        """Returns one part with the digest of the tokens."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).astype("<u4")).hexdigest()
        return [FilePart(name="built-in text", digest=digest, tokens=self.num_tokens)]


def from_documents(documents: Sequence[bytes]) -> MemorySource:
    """Joins documents as bytes: ids 0 to 255, and 256 between documents."""
    eos = np.array([256], np.uint16)
    parts = [eos]
    for text in documents:
        parts += [np.frombuffer(text, np.uint8).astype(np.uint16), eos]
    return MemorySource(np.concatenate(parts), 257, 256, sum(map(len, documents)))


class JoinedSource:
    """Several sources of one vocabulary, read as one stream.

    It has the attributes of `MemorySource`, but `tokens`.
    """

    def __init__(self, sources: Sequence[FileSource]):
        self.sources = tuple(sources)
        self.vocab_size, self.eos_id = sources[0].vocab_size, sources[0].eos_id
        self.ends = np.cumsum([source.num_tokens for source in sources])
        self.num_tokens = int(self.ends[-1])
        # Where two files meet, an eos that opens the second one is predicted too.
        met = sum(source.first_is_target for source in sources[1:])
        self.num_targets = sum(source.num_targets for source in sources) + met
        sizes = [source.target_bytes for source in sources]
        self.target_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens start .. start + length - 1, int32, across files if necessary."""
        return self.stretch(start, length).token_N

    def stretch(self, start: int, length: int) -> Stretch:
        """Returns the same tokens, with the targets and the first tokens of documents marked."""
        parts = [source.stretch(first, take) for source, first, take in self._across(start, length)]
        arrays = zip(*(part[:3] for part in (Stretch.empty(), *parts)), strict=True)
        return Stretch(*map(np.concatenate, arrays))

    def _across(self, start: int, length: int) -> Iterator[tuple[FileSource, int, int]]:
        """Yields each file that holds some of these tokens: where they start, how many."""
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.num_tokens}")
        stop, index = start + length, int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and index < len(self.sources):
            source, end = self.sources[index], int(self.ends[index])
            take = min(stop, end) - start
            yield source, start - (end - source.num_tokens), take
            start, index = start + take, index + 1

    def parts(self) -> list[FilePart]:
        """Returns the files, with digests from their sidecars."""
        return [
            FilePart(name=str(s.path), digest=s.sidecar.content_digest(), tokens=s.num_tokens)
            for s in self.sources
        ]


TokenSource = MemorySource | JoinedSource  # a stream with random access


def open_files(patterns: Sequence[str], wanted: str | None, *, model_vocab: int) -> JoinedSource:
    """Opens the token files that paths or globs name, in sorted order, as one stream.

    Args:
      wanted: the required format: "bin" or "array_record"; None for both.
      model_vocab: ids must be below it.

    Raises:
      InputError: if a pattern matches nothing, or files are damaged or inconsistent.
    """
    sources: list[FileSource] = []
    for path in find_files(patterns):
        sidecar = read_sidecar(path)
        if wanted not in (None, sidecar.format):
            raise InputError(
                f"token file of another format. {path} is {sidecar.format}. data.source="
                f"{'tokens' if wanted == 'bin' else wanted} reads {wanted}. Set the other source."
            )
        kind = BinSource if sidecar.format == "bin" else ArrayRecordSource
        sources.append(kind(path, sidecar))
        sources[-1].check_ends()
    _check_same(sources)
    first = sources[0]
    if first.vocab_size > model_vocab:
        raise InputError(
            f"tokenizer is larger than the model. {first.path} has vocabulary {first.vocab_size}, "
            f"model.vocab_size is {model_vocab}. Every id needs a row. For a model that begins "
            "here raise model.vocab_size. The rows of loaded weights are fixed: prepare the text "
            "with the tokenizer that came with them, without the tokens whose ids begin at "
            f"{model_vocab} (`added_tokens` in tokenizer.json)."
        )
    return JoinedSource(sources)


def find_files(
    patterns: Sequence[str], *, texts: bool = False, made_by: str = "moejax prepare"
) -> list[Path]:
    """Returns the files of paths and globs, without sidecars, tokenizers and marks.

    Args:
      texts: whether texts may be named too, for the message.
      made_by: command that makes such files, for the message.
    Raises:
      InputError: if a pattern matches nothing, or two match the same file.
    """
    paths: list[Path] = []
    for pattern in patterns:
        # An existing path is not a pattern, even with characters such as `*`.
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        beside = (".json", ".marks")
        files = [Path(name) for name in names if Path(name).is_file() and not name.endswith(beside)]
        if not files:
            if texts:
                raise InputError(
                    f"no file. {pattern!r} matches none, seen from {Path.cwd()}. A path or glob "
                    f"must name texts, or files of moejax prepare. Check the path."
                )
            raise InputError(
                f"no token file. {pattern!r} matches none, seen from {Path.cwd()}. A path or "
                f"glob must name files of {made_by}. Check the path, or prepare the text."
            )
        paths += files
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InputError(
            f"token file is named twice. {twice} matches more than once in {list(patterns)}. Each "
            f"is read once an epoch. Take it out of one pattern."
        )
    return paths


def check_apart(train: JoinedSource, held_out: JoinedSource) -> None:
    """Refuses held-out files that are also training files, or of another tokenizer.

    Raises:
      InputError: names the file.
    """
    _check_same([train.sources[0], held_out.sources[0]])
    trained = {source.path.resolve() for source in train.sources}
    for source in held_out.sources:
        if source.path.resolve() in trained:
            raise InputError(
                f"held-out text is trained on. {source.path} is in data.train_files and in "
                f"data.eval_files. No file may be in both. Write patterns that do not meet, such "
                f"as '*.train.bin' and '*.eval.bin'."
            )


def _check_same(sources: Sequence[FileSource]) -> None:
    """Refuses files of different tokenizers."""
    first = sources[0]
    for source in sources:
        expected, actual = ((s.vocab_size, s.eos_id) for s in (first, source))
        # The tokenizer's file name may differ, its content may not.
        digests = [s.sidecar.tokenizer_sha256 for s in (first, source)]
        if expected != actual or digests[0] != digests[1]:
            raise InputError(
                f"token files disagree. {first.path} has vocabulary {expected[0]}, eos "
                f"{expected[1]} and tokenizer sha256 {digests[0]}, {source.path} has {actual[0]}, "
                f"{actual[1]} and {digests[1]}. All files of a run need one tokenizer. Prepare "
                f"them alike."
            )


def verify(source: FileSource) -> None:
    """Compares a token file, and its marks, with the digests in its sidecar; reads them whole.

    Raises:
      InputError: if they differ.
    """
    wanted = {source.path: source.sidecar.sha256}
    if source.sidecar.marks_sha256 is not None:
        wanted[marks_of(source.path)] = source.sidecar.marks_sha256
    for path, expected in wanted.items():
        if (actual := digest(path)) != expected:
            raise InputError(
                f"token file is damaged. {path} has sha256 {actual[:16]}, its sidecar says "
                f"{expected[:16]}. They must agree. Copy it again."
            )
