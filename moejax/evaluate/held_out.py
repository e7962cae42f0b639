"""Opens the text to score: token files, texts, or the run's own held-out data."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moejax.data import corpus
from moejax.data.prepare.documents import read_documents
from moejax.data.prepare.writers import BinWriter
from moejax.data.sidecar import sidecar_of
from moejax.data.sources import Described, container_of, describe_tokens, is_tokenizer_of
from moejax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, digest
from moejax.data.tokens import JoinedSource, TokenSource, find_files, from_documents, open_files
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen, tokenizer_beside_weights

TOKEN_SUFFIXES = (".bin", ".array_record")


@dataclass(frozen=True)
class HeldOut:
    """A stream to score."""

    source: TokenSource
    files: list[str]  # what the user named
    # Of texts: the origin of each document, and its bytes of UTF-8.
    documents: list[tuple[str, int]] | None = None
    notes: list[str] = field(default_factory=list)

    def tokenizer(self) -> Tokenizer:
        """Opens the tokenizer that made the tokens.

        Raises:
          InputError: if it is not beside the token files.
        """
        if isinstance(self.source, JoinedSource):
            first = self.source.sources[0]
            return Described(first.path, first.sidecar).open_tokenizer()
        return ByteTokenizer()


@contextmanager
def open_held_out(
    files: Sequence[str],
    chosen: Chosen,
    *,
    text_field: str | None = None,
    tokenizer: str | None = None,
    eos: str | None = None,
) -> Iterator[HeldOut]:
    """Opens the files of the command line, else the run's own held-out data.

    Texts are written as token files into a temporary folder, which is removed in the end.

    Args:
      text_field: field of the text; of texts alone, as the next two are.
      tokenizer, eos: see `open_tokenizer`.
    Raises:
      InputError: if there is nothing to score, or it does not fit the model.
    """
    named = find_files(files, texts=True)
    tokens = [p for p in named if sidecar_of(p).is_file() or p.suffix in TOKEN_SUFFIXES]
    texts = [path for path in named if path not in tokens]
    for flag, value in (("text-field", text_field), ("tokenizer", tokenizer), ("eos", eos)):
        if value is not None and not texts:
            raise InputError(
                f"`--{flag}` has no effect. Got {value!r} without a text in --data. Token files "
                f"have their tokenizer beside them. Leave it out."
            )
    if not named:
        yield _of_run(chosen)
    elif not texts:
        yield _of_token_files(chosen, list(map(str, named)))
    elif tokens:
        raise InputError(
            f"token files and texts together. {texts[0]} is text, {tokens[0]} has tokens. They are "
            f"counted apart. Evaluate them with two commands."
        )
    else:
        opened = open_tokenizer(tokenizer, eos, chosen)
        with tempfile.TemporaryDirectory(prefix="moejax-eval-") as folder:
            yield _of_texts(texts, text_field or "text", opened, chosen, Path(folder))


def _of_run(chosen: Chosen) -> HeldOut:
    """Opens the held-out data of the run's settings."""
    cfg = chosen.cfg
    if cfg.data.source == "stdlib":
        source = from_documents(corpus.documents()[1])
        return HeldOut(source, ["held-out files of Python's standard library"])
    if not cfg.data.eval_files:
        raise InputError(
            "nothing to score. `data.eval_files` of the run is empty. An evaluation needs held-out "
            "text. Name it: --data FILE."
        )
    wanted = container_of(cfg.data)
    source = open_files(cfg.data.eval_files, wanted, model_vocab=cfg.model.vocab_size)
    return HeldOut(source, list(cfg.data.eval_files), notes=_note_of_begins(source, chosen))


def _of_token_files(chosen: Chosen, files: list[str]) -> HeldOut:
    """Opens token files, which must be of the model's tokenizer where that is known."""
    source = open_files(files, None, model_vocab=chosen.cfg.model.vocab_size)
    first, notes = source.sources[0], _note_of_begins(source, chosen)
    known = _known_tokenizer(chosen)
    if known is None:
        notes.append(f"the model's tokenizer is not known here: that of {first.path} is trusted")
    elif known[0] != first.sidecar.tokenizer_sha256:
        raise InputError(
            f"tokens of another tokenizer. {first.path} has tokenizer sha256 "
            f"{first.sidecar.tokenizer_sha256}, the model {known[0]} (None: bytes). Ids would mean "
            f"other text. Prepare the text with the model's tokenizer."
        )
    trained = {part["digest"] for part in chosen.saved.manifest.get("data", {}).get("train", [])}
    for part in source.parts():
        if part["digest"] in trained:
            notes.append(f"warning: {part['name']} is not held out: the run trained on it")
    return HeldOut(source, files, notes=notes)


def _note_of_begins(source: JoinedSource, chosen: Chosen) -> list[str]:
    """Returns a warning if documents begin otherwise than texts of the imported weights."""
    beside = tokenizer_beside_weights(chosen)
    old = [one.path for one in source.sources if one.first_is_target]
    if beside is None or chosen.saved.step > 0 or not old:
        return []
    bos_id = FileTokenizer(beside).bos_id
    if bos_id is None:
        return []
    return [
        f"warning: documents of {old[0]} begin with eos, and texts of this model with token "
        f"{bos_id}: an earlier moejax prepared them. Prepare the text again"
    ]


def _of_texts(
    texts: list[Path], text_field: str, tokenizer: Tokenizer, chosen: Chosen, folder: Path
) -> HeldOut:
    """Writes texts as a token file, and opens it."""
    writer = BinWriter(folder / "texts.bin", tokenizer, "bytes")
    documents: list[tuple[str, int]] = []
    try:
        for document in read_documents(texts, text_field):
            before = writer.num_bytes
            writer.add(document, tokenizer)
            documents.append((document.source, writer.num_bytes - before))
        if not documents:
            raise InputError(
                f"nothing to score. {len(texts)} files have no text. An evaluation needs some. "
                f"Name other files: --data FILE."
            )
    except BaseException:
        writer.abandon()
        raise
    writer.finish()
    source = open_files([str(writer.path)], "bin", model_vocab=chosen.cfg.model.vocab_size)
    return HeldOut(source, list(map(str, texts)), documents)


def describe_training(chosen: Chosen) -> Described | None:
    """Returns the description of the token files of a checkpoint's run, if it is here."""
    return describe_tokens(chosen.cfg.data, chosen.saved.path.parents[:2])


def tokenizer_that_came(chosen: Chosen) -> Path | None:
    """Returns the tokenizer.json that came with the weights, unless training used another."""
    beside, step = tokenizer_beside_weights(chosen), chosen.saved.step
    if beside is None:
        return None
    described = describe_training(chosen)
    return beside if is_tokenizer_of(beside, step, chosen.cfg.data, described) else None


def _known_tokenizer(chosen: Chosen) -> tuple[str | None] | None:
    """Returns the digest of the model's tokenizer, (None,) for bytes; None if it is not known."""
    if (came := tokenizer_that_came(chosen)) is not None:
        return (digest(came),)
    if chosen.cfg.data.source == "stdlib":
        return (None,)
    described = describe_training(chosen)
    return None if described is None else (described.sidecar.tokenizer_sha256,)


def open_tokenizer(named: str | None, eos: str | None, chosen: Chosen) -> Tokenizer:
    """Returns the tokenizer of the command line, of the run's data, or of imported weights.

    Args:
      named: a tokenizer.json; None for the model's own.
      eos: token that ends a document in it; None for a usual one.
    Raises:
      InputError: if there is none, or `eos` is given without `named`.
    """
    if named is not None:
        return FileTokenizer(Path(named), eos)
    if eos is not None:
        raise InputError(
            f"`--eos` has no effect. Got {eos!r} without --tokenizer. The run's tokenizer has its "
            f"own. Leave it out, or name a --tokenizer."
        )
    beside = tokenizer_beside_weights(chosen)
    if beside is not None and chosen.saved.step == 0:
        return FileTokenizer(beside)
    if chosen.cfg.data.source == "stdlib":
        return ByteTokenizer()
    if (described := describe_training(chosen)) is not None:
        return described.open_tokenizer()
    if beside is not None:
        return FileTokenizer(beside)
    raise InputError(
        f"no tokenizer. {chosen.saved.path} has no tokenizer.json beside it, and the training "
        f"files that name one are not here. A text must become the ids that the model knows. Name "
        f"it: --tokenizer FILE."
    )
