"""The kinds of blocks of a model, and the repeating patterns in which they are scanned."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

from moejax.config.schema import FullAttentionConfig, ModelConfig

LONGEST = 64  # blocks of a pattern that is searched for in a table of layers


class BlockKind(NamedTuple):
    """The kind of a block: blocks of one kind have parameters of the same shapes."""

    mlp: str  # "dense", "moe" or "none"
    window: int | None = None  # positions that a query sees back; None: all
    mixer: str = "grouped"  # a name of `MIXERS` in `model.block`, or "none"


Group = tuple[tuple[BlockKind, ...], int]  # a pattern, and how often it repeats


def block_kinds(cfg: ModelConfig) -> list[BlockKind]:
    """Returns the kind of each block, in order."""
    return [_kind(cfg, *parts) for parts in zip(layer_attention(cfg), cfg.mlps, strict=True)]


def ahead_parts(cfg: ModelConfig) -> tuple[str, str]:
    """Returns attention and MLP of the block of `predict_ahead`, as in tables of layers."""
    sees, mlp = cfg.ahead_block or (layer_attention(cfg)[-1], cfg.mlps[-1])
    return "full" if sees == "window" and cfg.sliding_window is None else sees, mlp


def ahead_kind(cfg: ModelConfig) -> BlockKind:
    """Returns the kind of the block of `predict_ahead`."""
    return _kind(cfg, *ahead_parts(cfg))


def _kind(cfg: ModelConfig, sees: str, mlp: str) -> BlockKind:
    mixers = {
        "full": (None, cfg.attention),
        "window": (cfg.sliding_window, cfg.attention),
        "linear": (None, cfg.linear.form),
        "none": (None, "none"),
    }
    return BlockKind("moe" if mlp == "experts" else mlp, *mixers[sees])


def settings_of(cfg: ModelConfig, window: int | None) -> ModelConfig:
    """Returns the model's settings as attention of a block has them.

    Those of `model.full_attention` that other blocks have too replace them in blocks without a
    window; the rest stands there, and nothing in other blocks.

    Args:
      window: of the block.
    """
    own, none = cfg.full_attention, FullAttentionConfig()
    if cfg.positions == "window":
        cfg = replace(cfg, positions="none" if window is None else "rotary")
    if own == none:
        return cfg
    if window is not None:
        return replace(cfg, full_attention=none)
    return replace(
        cfg,
        head_width=own.head_width or cfg.head_width,
        num_kv_heads=own.num_kv_heads or cfg.num_kv_heads,
        rope=replace(cfg.rope, theta=own.theta or cfg.rope.theta),
        attention_sinks=cfg.attention_sinks and own.sinks,
        full_attention=FullAttentionConfig(
            keys_are_values=own.keys_are_values, turned_channels=own.turned_channels
        ),
    )


def layer_attention(cfg: ModelConfig) -> tuple[str, ...]:
    """Returns "window", "full", "linear" or "none" for each block."""
    if cfg.layer_attention:
        return cfg.layer_attention
    every, usual = cfg.full_attention_every, "linear" if cfg.is_linear else "window"
    return tuple(
        "full" if every is not None and (index + 1) % every == 0 else usual
        for index in range(cfg.num_layers)
    )


def shortest(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the shortest settings for the same blocks, by name: a table only if needed.

    Equal blocks have equal settings, so that models can be compared.
    """
    attention = shortest_attention(layer_attention(cfg), cfg.sliding_window)
    return shortest_mlps(cfg.mlps) | attention


def shortest_mlps(mlps: tuple[str, ...]) -> dict[str, Any]:
    """Returns the shortest settings of blocks that are "dense", "experts" or "none"."""
    layers, places = len(mlps), [index for index, mlp in enumerate(mlps) if mlp == "experts"]
    if "none" in mlps:
        every = 1 if places else None
        return {"first_dense_layers": 0, "moe_every": every, "layer_mlps": mlps}
    if not places:
        return {"first_dense_layers": 0, "moe_every": None, "layer_mlps": ()}
    first = places[0]
    # A single one is the last block, or ends a pattern that begins at the start and comes once.
    second = places[1] if len(places) > 1 else first + 1 if first == layers - 1 else 2 * first + 1
    every = second - first
    dense = first - every + 1
    if dense >= 0 and places == list(range(first, layers, every)):
        return {"first_dense_layers": dense, "moe_every": every, "layer_mlps": ()}
    return {"first_dense_layers": 0, "moe_every": 1, "layer_mlps": mlps}


def shortest_attention(sees: tuple[str, ...], window: int | None) -> dict[str, Any]:
    """Returns the shortest settings of blocks with "window", "full", "linear" attention or none."""
    if window is None:
        sees = tuple("full" if seen == "window" else seen for seen in sees)
    elif "window" not in sees:
        window = None
    settings = {"sliding_window": window, "full_attention_every": None, "layer_attention": ()}
    if "none" in sees:
        return settings | {"layer_attention": sees}
    usual = "linear" if "linear" in sees else "window"
    places = [index for index, seen in enumerate(sees) if seen != usual]
    if not places or usual not in sees:
        return settings
    every = places[0] + 1
    regular = every > 1 and places == list(range(every - 1, len(sees), every))
    if regular and all(sees[index] == "full" for index in places):
        return settings | {"full_attention_every": every}
    return settings | {"layer_attention": sees}


def layer_groups(cfg: ModelConfig, *, stacked: bool = True) -> list[Group]:
    """Returns the blocks as (pattern, repeats): each pattern is scanned `repeats` times.

    The dense blocks at the start, the blocks before pipeline stages, and each of the stages' chunks
    are groups of their own. A pattern is as long as MLPs (`moe_every` blocks) and windows
    (`full_attention_every` blocks) take to repeat. In a table of layers, repeats are searched for.

    Args:
      stacked: False makes each repeat a group of its own.
    """
    kinds, start = block_kinds(cfg), cfg.first_dense_layers
    stop = start + cfg.layers_before_stages
    parts = [kinds[:start], kinds[start:stop], kinds[stop:]]
    if cfg.layer_mlps or cfg.layer_attention:
        groups = [group for part in parts for group in _repeats(tuple(part))]
    else:
        every = cfg.full_attention_every or 1
        length = math.lcm(cfg.moe_every or 1, every)
        first, *others = parts
        groups = _groups(first, every) + [g for part in others for g in _groups(part, length)]
    pattern, repeats = groups.pop()
    groups += [(pattern, repeats // cfg.stage_chunks)] * cfg.stage_chunks
    if stacked:
        return groups
    return [(pattern, 1) for pattern, repeats in groups for _ in range(repeats)]


def _groups(kinds: list[BlockKind], length: int) -> list[Group]:
    """Cuts blocks into repeats of `length` blocks, and a rest in the shortest pattern it has."""
    whole = len(kinds) // length * length
    groups = [(tuple(kinds[:length]), whole // length)] if whole else []
    if rest := kinds[whole:]:
        lengths = (n for n in range(1, len(rest) + 1) if rest[:n] * (len(rest) // n) == rest)
        shortest = next(lengths)
        groups.append((tuple(rest[:shortest]), len(rest) // shortest))
    return groups


@functools.lru_cache(maxsize=64)
def _repeats(kinds: tuple[BlockKind, ...]) -> tuple[Group, ...]:
    """Cuts blocks into repeating patterns with as few blocks in total as possible.

    Each block of a pattern is compiled once. Patterns have `LONGEST` blocks at most, and repeat as
    often as they can, or once less. Ties go to the fewest groups, then to the shortest first
    pattern, then to its fewest repeats. Checkpoints have these groups: another choice is a new
    format.
    """
    count = len(kinds)
    # From each block on: blocks of all patterns, groups, and the first pattern and its repeats.
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (count + 1)
    lengths = range(1, max(1, min(LONGEST, count // 2)) + 1)
    alike = dict.fromkeys(lengths, 0)  # blocks from here on that equal the one a pattern later
    for index in reversed(range(count)):
        found = []
        for length in lengths:
            if index + length > count:
                break
            after = index + length
            same = after < count and kinds[index] == kinds[after]
            alike[length] = alike[length] + 1 if same else 0
            most = alike[length] // length + 1
            # One repeat less may leave a block to the pattern after it.
            for repeats in {most, max(1, most - 1)}:
                blocks, groups, *_ = best[index + length * repeats]
                found.append((length + blocks, groups + 1, length, repeats))
        best[index] = min(found)
    cut, index = [], 0
    while index < count:
        _, _, length, repeats = best[index]
        cut.append((kinds[index : index + length], repeats))
        index += length * repeats
    return tuple(cut)
