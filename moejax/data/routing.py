"""Texts whose experts were recorded, as one stream. Format: docs/formats/routing.md.

Files are read whole: they are as large as what a model wrote.

Letters: T tokens of all texts, N texts (of a stretch: its tokens), L layers with experts, K experts
chosen per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moejax.config.fields import one_line, short
from moejax.config.schema import Config
from moejax.data.marks import Stretch
from moejax.data.tokenizer import digest
from moejax.data.tokens import FilePart, TokenSource, find_files
from moejax.errors import InputError

FORMAT = 1  # of the files
FREE = -1  # in place of an expert: the router chooses


class ModelExperts(NamedTuple):
    """What recorded experts must fit."""

    num_experts: int
    experts_per_token: int
    layers: tuple[int, ...]  # numbers of the layers with experts, from 0


def experts_of(cfg: Config) -> ModelExperts:
    """Returns what recorded experts must fit, of a config's model."""
    layers = tuple(layer for layer, mlp in enumerate(cfg.model.mlps) if mlp == "experts")
    return ModelExperts(cfg.moe.num_experts, cfg.moe.experts_per_token, layers)


@dataclass(frozen=True)
class RecordedTexts:
    """A stream of texts one behind the other, with the experts of each token.

    The tokens behind a prompt are targets. It has what `data.batches` needs of a stream.
    """

    id_T: np.ndarray
    target_T: np.ndarray
    begin_T: np.ndarray
    expert_TLK: np.ndarray
    vocab_size: int  # the model's
    files: tuple[FilePart, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.id_T)

    def stretch(self, start: int, length: int) -> Stretch:
        """Returns tokens start .. start + length - 1 with marks and experts."""
        here = slice(start, start + length)
        return Stretch(
            self.id_T[here].astype(np.int32),
            self.target_T[here],
            self.begin_T[here],
            self.expert_TLK[here].astype(np.int32),
        )

    def parts(self) -> list[FilePart]:
        """Returns the files, with digests of their content."""
        return list(self.files)


Stream = TokenSource | RecordedTexts  # a stream to train on


def open_recorded(
    patterns: Sequence[str], *, model_vocab: int, experts: ModelExperts
) -> RecordedTexts:
    """Reads files of recorded routing that paths or globs name, in sorted order, as one stream.

    Args:
      model_vocab: ids must be below it.

    Raises:
      InputError: if a pattern matches nothing, or a file is damaged or of another model.
    """
    paths = find_files(patterns, made_by="moejax generate --routing")
    read = [_read(path, model_vocab, experts) for path in paths]
    texts = RecordedTexts(
        *(np.concatenate([getattr(one, name) for one in read]) for name in read[0]._fields),
        vocab_size=model_vocab,
        files=tuple(
            FilePart(name=str(path), digest=digest(path), tokens=len(one.id_T))
            for path, one in zip(paths, read, strict=True)
        ),
    )
    if not texts.target_T.any():
        raise InputError(
            f"nothing to learn. {', '.join(map(str, paths))}: no text has a token behind its "
            f"prompt. Name other files."
        )
    return texts


class _File(NamedTuple):
    id_T: np.ndarray
    target_T: np.ndarray
    begin_T: np.ndarray
    expert_TLK: np.ndarray


def _read(path: Path, model_vocab: int, experts: ModelExperts) -> _File:
    """Reads and checks a file."""
    names = ("format", "num_experts", "layer_L", "tokens_N", "prompt_tokens_N", "id_T")
    try:
        with open(path, "rb") as opened, np.lib.npyio.NpzFile(opened, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in (*names, "expert_TLK")}
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files.
        raise _damaged(path, one_line(str(error))[:160]) from error
    if any(array.dtype.kind != "i" for array in arrays.values()):
        raise _damaged(path, "an array does not hold signed integers")
    version, E, layer_L, tokens_N, prompt_N, id_T = (arrays[name] for name in names)
    expert_TLK = arrays["expert_TLK"]
    if version.ndim or E.ndim or {x.ndim for x in (layer_L, tokens_N, prompt_N, id_T)} != {1}:
        raise _damaged(path, "an array has a wrong number of dimensions")
    if version != FORMAT:
        raise InputError(
            f"recorded routing has another format. {path} has format {version}, this moejax reads "
            f"{FORMAT}. Record the routing again."
        )
    T, texts_fit = len(id_T), tokens_N.shape == prompt_N.shape
    if texts_fit:
        own_N = (tokens_N >= 1) & (tokens_N <= T) & (prompt_N >= 0) & (prompt_N <= tokens_N)
        texts_fit = own_N.all() and np.sum(tokens_N, dtype=np.int64) == T
    if not texts_fit:
        raise _damaged(path, "tokens_N, prompt_tokens_N and id_T do not fit together")
    if expert_TLK.ndim != 3 or expert_TLK.shape[:2] != (T, len(layer_L)):
        raise _damaged(path, f"expert_TLK has shape {expert_TLK.shape}")
    found = ModelExperts(int(E), expert_TLK.shape[2], tuple(layer_L.tolist()))
    _check_model(path, found, experts)
    _check_values(path, id_T, expert_TLK, model_vocab, found.num_experts)
    place_T = np.arange(T) - np.repeat(np.cumsum(tokens_N) - tokens_N, tokens_N)
    target_T = place_T >= np.repeat(np.maximum(prompt_N, 1), tokens_N)
    return _File(id_T, target_T, place_T == 0, expert_TLK)


def _check_model(path: Path, found: ModelExperts, wanted: ModelExperts) -> None:
    names = "experts of a layer", "experts of a token", "layers with experts"
    for name, has, needs in zip(names, found, wanted, strict=True):
        if has != needs:
            has, needs = (short(list(x)) if isinstance(x, tuple) else x for x in (has, needs))
            raise InputError(
                f"recorded routing is of another model. {path} has {name}: {has}, the model "
                f"{needs}. Record the routing with weights of this model."
            )


def _check_values(
    path: Path, id_T: np.ndarray, expert_TLK: np.ndarray, model_vocab: int, num_experts: int
) -> None:
    wrong = np.flatnonzero((id_T < 0) | (id_T >= model_vocab))
    if len(wrong):
        raise InputError(
            f"token id outside the vocabulary. {path}, token {wrong[0]}: id {id_T[wrong[0]]}. "
            f"`model.vocab_size` is {model_vocab}. Name texts of this model's tokenizer."
        )
    sorted_TLK = np.sort(expert_TLK, axis=2)
    chosen = (sorted_TLK[..., 0] >= 0) & (sorted_TLK[..., -1] < num_experts)
    chosen &= np.all(sorted_TLK[..., 1:] != sorted_TLK[..., :-1], axis=2)
    wrong = np.argwhere(~(chosen | np.all(expert_TLK == FREE, axis=2)))
    if len(wrong):
        token, layer = wrong[0]
        raise InputError(
            f"recorded routing is wrong. {path}, token {token}, layer {layer} of those with "
            f"experts: {short(expert_TLK[token, layer].tolist())}. Experts of a token differ and "
            f"are below {num_experts}, or all are {FREE}. Record the routing again."
        )


def _damaged(path: Path, why: str) -> InputError:
    return InputError(
        f"recorded routing is damaged. {path}: {why}. It must be a file of moejax generate "
        f"--routing. Copy it again, or record the routing again."
    )
