"""The kinds of blocks of a model, and the repeating patterns in which they are scanned."""

import math
from typing import NamedTuple

from moejax.config.schema import ModelConfig


class BlockKind(NamedTuple):
    """The kind of a block: blocks of one kind have parameters of the same shapes."""

    mlp: str  # "dense" or "moe"
    window: int | None = None  # positions that a query sees back; None: all


def block_kinds(cfg: ModelConfig) -> list[BlockKind]:
    """Returns the kind of each block, in order."""
    kinds = []
    for index in range(cfg.num_layers):
        place = index - cfg.first_dense_layers + 1
        experts = cfg.moe_every is not None and place > 0 and place % cfg.moe_every == 0
        every = cfg.full_attention_every
        full = every is not None and (index + 1) % every == 0
        window = None if full else cfg.sliding_window
        kinds.append(BlockKind("moe" if experts else "dense", window))
    return kinds


def layer_groups(
    cfg: ModelConfig, *, stacked: bool = True
) -> list[tuple[tuple[BlockKind, ...], int]]:
    """Returns the blocks as (pattern, repeats): each pattern is scanned `repeats` times.

    The dense blocks at the start, those before pipeline stages, and each of the stages' chunks are
    groups of their own. A pattern is as long as both kinds take to repeat: that of MLPs `moe_every`
    blocks, that of windows `full_attention_every`.

    Args:
      stacked: False makes each repeat a group of its own.
    """
    kinds, start = block_kinds(cfg), cfg.first_dense_layers
    every = cfg.full_attention_every or 1
    length = math.lcm(cfg.moe_every or 1, every)
    stop = start + cfg.layers_before_stages
    groups = _groups(kinds[:start], every)
    groups += _groups(kinds[start:stop], length) + _groups(kinds[stop:], length)
    pattern, repeats = groups.pop()
    groups += [(pattern, repeats // cfg.stage_chunks)] * cfg.stage_chunks
    if stacked:
        return groups
    return [(pattern, 1) for pattern, repeats in groups for _ in range(repeats)]


def _groups(kinds: list[BlockKind], length: int) -> list[tuple[tuple[BlockKind, ...], int]]:
    """Cuts blocks into repeats of `length` blocks, and a rest in the shortest pattern it has."""
    whole = len(kinds) // length * length
    groups = [(tuple(kinds[:length]), whole // length)] if whole else []
    if rest := kinds[whole:]:
        lengths = (n for n in range(1, len(rest) + 1) if rest[:n] * (len(rest) // n) == rest)
        shortest = next(lengths)
        groups.append((tuple(rest[:shortest]), len(rest) // shortest))
    return groups
