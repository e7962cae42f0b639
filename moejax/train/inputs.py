"""Brings a run's tokens onto the devices. Files are checked before a device is touched."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from moejax.config.schema import Config
from moejax.data import batches as data_batches
from moejax.data.routing import experts_of
from moejax.data.skipped import SkippedData, data_position
from moejax.data.sources import Content, describe_sources, open_sources
from moejax.data.tokenizer import Tokenizer
from moejax.data.tokens import TokenSource
from moejax.step.state import Batch
from moejax.step.train_step import TrainStep


@dataclass
class Inputs:
    """The run's training sequences, held-out text and tokenizer."""

    cfg: Config
    train: data_batches.Batches
    held_out: TokenSource | None
    tokenizer: Tokenizer | None  # None where the data do not name one
    vocab_size: int  # the tokenizer's; the model's may be larger
    content: Content = field(default_factory=dict)  # identifies the data
    skipped: Sequence[SkippedData] = ()  # batches left out, see `train.records.skipped_data`

    def batches(
        self, train_step: TrainStep, first: int, last: int
    ) -> AbstractContextManager[Iterator[Batch]]:
        """Yields the batches after steps first .. last - 1 on the mesh, prepared ahead in a thread.

        Batches that the run left out are not among them.
        """

        def of_step(step: int) -> Batch:
            position = data_position(step, self.skipped)
            return on_devices(train_step, lambda a, b: self.train.rows(position, a, b))

        return closing(data_batches.prefetch(of_step, first, last))

    def check_enough(self) -> None:
        """Raises InputError if the data ends before the run does, left out batches counted."""
        steps = self.cfg.train.num_steps
        self.train.check_steps(steps, data_position(steps, self.skipped) - steps)


def on_devices(train_step: TrainStep, rows: Callable[[int, int], Any]) -> Batch:
    """Returns global arrays; this process reads only its devices' rows.

    Args:
      rows: (first, last) -> those rows of the global batch.
    """
    shape = train_step.batch_shape  # and further dimensions

    def bounds(index: Any) -> tuple[int, int]:
        return index[0].indices(shape[0])[:2]

    sharding = train_step.batch_sharding
    held = set(map(bounds, sharding.addressable_devices_indices_map(shape).values()))
    read = {block: rows(*block) for block in sorted(held)}

    def array(name: str) -> jax.Array | None:
        found = {block: getattr(own, name) for block, own in read.items()}
        like = next(iter(found.values()))
        if like is None:
            return None
        return jax.make_array_from_callback(
            (*shape, *like.shape[2:]), sharding, lambda index: found[bounds(index)]
        )

    return Batch(*map(array, Batch._fields))


def held_out_batches(
    train_step: TrainStep, source: TokenSource, limit: int | None = None
) -> Iterator[tuple[Batch, int]]:
    """Yields batches of held-out text on the mesh, with their numbers of targets."""
    B, T = train_step.batch_shape
    batches = data_batches.eval_batches(
        source,
        sequence_length=T,
        batch_sequences=B,
        limit=limit,
        isolate_documents=train_step.cfg.data.isolate_documents,
    )
    for whole in batches:

        def rows(first: int, last: int, whole: Any = whole) -> Any:
            return jax.tree.map(lambda x: x[first:last], whole)

        yield on_devices(train_step, rows), int(np.sum(whole.target_BT >= 0))


def open_inputs(cfg: Config) -> Inputs:
    """Opens the data a config names, or raises InputError about it. Touches no device."""
    data, length = cfg.data, cfg.data.sequence_length
    sources = open_sources(data, model_vocab=cfg.model.vocab_size, experts=experts_of(cfg))
    train, held_out, tokenizer, mixture = sources
    ordered = data_batches.Batches(
        train,
        mixture=mixture,
        sequence_length=length,
        batch_sequences=cfg.train.batch_sequences,
        seed=cfg.train.seed,
        shuffle=data.shuffle,
        repeat=data.repeat,
        isolate_documents=data.isolate_documents,
        share=(cfg.outer.site, cfg.outer.sites),
    )
    ordered.check_steps(cfg.train.num_steps)
    return Inputs(cfg, ordered, held_out, tokenizer, train.vocab_size, describe_sources(sources))
