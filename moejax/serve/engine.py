"""A checkpoint's model in memory, for programs: logits of given tokens, and texts that go on."""

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from moejax.errors import InputError
from moejax.evaluate.checkpoint import FORWARD, choose, read_weights
from moejax.runtime.processes import ALONE
from moejax.serve.batch import Batch, Request, Token, generate
from moejax.serve.placing import check_overrides, place
from moejax.serve.programs import Programs, build_programs
from moejax.serve.prompts import encode_prompts, open_vocabulary
from moejax.serve.sampling import Sampling
from moejax.serve.texts import Decode, GrowingText, checked_stops
from moejax.step.state import TrainState
from moejax.train.records.summary import check_memory
from moejax.train.start import check_simulated_devices


class Engine:
    """A model with its weights on the devices of this process.

        engine = moejax.Engine("imported/olmoe")
        logits = engine.logits([[1, 733, 16289]])

    B sequences, T tokens of each, V vocabulary.

    A further length of prompts, rounded up to a multiple of 64, compiles further programs.

    Attributes:
      path: the checkpoint's directory.
      step: optimizer steps that were done.
      vocab_size: V.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        step: int | None = None,
        overrides: Iterable[str] = (),
    ):
        """Reads the weights of a checkpoint.

        Args:
          run: a run directory, an imported folder, or one checkpoint.
          step: its checkpoint of this step; None: the newest.
          overrides: settings of the mesh and of computing, as `mesh.tensor=2` or
            `model.dtype=float32`.
        Raises:
          InputError: if there is no whole checkpoint, or a setting does not fit it.
        """
        check_overrides(overrides := tuple(overrides))
        chosen = choose(os.fspath(run), step, overrides, ALONE, FORWARD)
        check_simulated_devices(chosen.cfg)
        for note in chosen.notes:
            warnings.warn(note.removeprefix("warning: "), stacklevel=2)
        placed = place(chosen)
        self._chosen, self._placed = chosen, placed
        self.path, self.step = Path(chosen.saved.path), chosen.saved.step
        self.vocab_size = placed.cfg.model.vocab_size
        self._programs_of: dict[tuple[Any, ...], Programs] = {}
        programs = self._programs(1, 1, self.vocab_size)
        beside = programs.bytes_beside_weights()
        check_memory(programs.train_step, ALONE, gradients=False, beside=beside)
        self._state: TrainState = programs.take(read_weights(chosen, programs.stored))

    def logits(self, token_ids: ArrayLike) -> np.ndarray:
        """Returns the logits of the token after each position, float32.

            engine.logits([[1, 733, 16289]])[0, -1].argmax()

        No token is put in front, and experts drop none.

        Args:
          token_ids: one sequence [T], or several of one length [B, T].
        Returns:
          logits [T, V] or [B, T, V].
        Raises:
          InputError: if they are no ids of the vocabulary.
        """
        token_BT = self._checked(token_ids)
        count, length = token_BT.shape[0], token_BT.shape[1]
        programs = self._programs(length, count, self.vocab_size)
        (B, T), parts = programs.train_step.batch_shape, []
        for first in range(0, count, B):
            rows_BT = token_BT[first : first + B]
            # Behind a sequence nothing is seen, and other rows take part in nothing.
            padded_BT = np.zeros((B, T), np.int32)
            padded_BT[: len(rows_BT), :length] = rows_BT
            logit_BTV = np.asarray(programs.logits(self._state, programs.place_batch(padded_BT)))
            parts.append(logit_BTV[: len(rows_BT), :length])
        found_BTV = np.concatenate(parts)
        return found_BTV[0] if np.ndim(token_ids) == 1 else found_BTV

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        chat: bool = False,
    ) -> list[str]:
        """Returns the texts that continue prompts, as `moejax generate` writes them.

            engine.generate(["The capital of France", "Once"], tokens=40)

        Args:
          prompts: one text or several.
          tokens: the most that continue each.
          temperature: 0 takes the likeliest token.
          top_k: draws from this number of the likeliest tokens; None: from all.
          top_p: then from the likeliest of this mass.
          min_p: then from those at least this many times as likely as the likeliest.
          seed: seed of the draws.
          stop: text or texts; a continuation ends before the first that it would hold.
          chat: whether prompts are messages of a user, which the chat template writes.
        Raises:
          InputError: if an option is out of range, or the model has no place for so much text.
          RunError: if logits are not finite.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        sampling.check()
        stops = checked_stops(stop)
        if tokens < 1:
            raise InputError(f"`tokens` is out of range. Got {tokens}. It is at least 1. Raise it.")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            return []
        vocabulary = open_vocabulary(self._chosen, None, None, chat=chat)
        encoded, notes = encode_prompts(texts, vocabulary, self._placed.cfg, tokens)
        for note in notes:
            warnings.warn(note.removeprefix("warning: "), stacklevel=2)
        longest = max(map(len, encoded)) + tokens
        programs = self._programs(longest, len(texts), vocabulary.allowed)
        requests = [
            Request(ids, tokens, sampling, vocabulary.stops, number)
            for number, ids in enumerate(encoded)
        ]
        return _grow(Batch(programs, self._state), requests, vocabulary.tokenizer.decode, stops)

    def _programs(self, positions: int, texts: int, allowed: int) -> Programs:
        """Returns the compiled functions for some texts; the same again for their like."""
        slots = min(texts, self._placed.cfg.train.batch_sequences)
        programs = build_programs(*self._placed, slots=slots, positions=positions, allowed=allowed)
        key = (programs.slots, programs.positions, allowed)
        return self._programs_of.setdefault(key, programs)

    def _checked(self, token_ids: ArrayLike) -> np.ndarray:
        """Returns ids as [B, T]."""
        rule = "Ids are one list of whole numbers, or several lists of one length."
        try:
            ids = np.asarray(token_ids)
        except ValueError as error:  # lists of several lengths
            raise InputError(
                f"ids have several lengths. {rule} Fill the shorter lists up."
            ) from error
        if ids.ndim not in (1, 2) or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"no token ids. Got {ids.dtype} of shape {ids.shape}. {rule}")
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise InputError(
                f"unknown token. Got id {wrong.flat[0]}. Ids are at least 0 and below "
                f"{self.vocab_size}, the model's vocabulary. Take the model's tokenizer."
            )
        return np.atleast_2d(ids).astype(np.int32)

    def __repr__(self) -> str:
        return f"<model of step {self.step} in {self.path}>"


def _grow(
    batch: Batch, requests: list[Request], decode: Decode, stops: tuple[str, ...]
) -> list[str]:
    """Returns what continues prompts, up to stop strings."""
    texts = [GrowingText(decode, request.ids, stops) for request in requests]
    pieces: list[list[str]] = [[] for _ in texts]

    def ends(number: int, token: Token) -> bool:
        pieces[number].append(texts[number].add(token.id))
        return texts[number].stopped

    for _ in generate(batch, requests, ends):
        pass
    return ["".join([*own, text.end()]) for own, text in zip(pieces, texts, strict=True)]
