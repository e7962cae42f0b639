"""LoRA: the parameters that have an adapter, the shapes of its factors and their first values.

A run with adapters trains them alone. `TrainState.params` then holds an `Adapter` for each target
and None for other parameters, and `TrainState.frozen` holds all weights.
"""

import math
import zlib
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm.weights.adapters import Adapter, adapter_dims
from moejax.config.schema import LoraConfig
from moejax.errors import InputError
from moejax.layout.layout import RANK, is_product
from moejax.step.state import Tree

# All matrices of a block but the router.
TARGETS = ("attention.w_*", "moe.w_in", "moe.w_out", "mlp.w_in", "mlp.w_out")
TARGETS += ("moe.w_down", "moe.w_up")
SHOWN = 8  # names in a message
Path = tuple[Any, ...]  # of JAX


def adapters_of(cfg: LoraConfig, dims: Tree, params: Tree) -> Tree:
    """Returns the letters of the factors of each target; None for other parameters.

    Args:
      dims, params: letters of the dimensions of all parameters, and their shapes.
    Raises:
      InputError: if a pattern fits no matrix, or the rank is larger than a target.
    """
    _check_targets(cfg, dims)
    patterns = TARGETS if cfg.targets is None else cfg.targets

    def of(path: Path, letters: str, param: Any) -> Adapter | None:
        factors = adapter_dims(letters)
        if factors is None or not any(_fits(path, pattern) for pattern in patterns):
            return None
        _check_rank(cfg, path, factors, letters, param)
        return factors

    return jax.tree_util.tree_map_with_path(of, dims, params)


def adapter_shapes(cfg: LoraConfig, adapters: Tree, dims: Tree, params: Tree) -> Tree:
    """Returns the shapes of the factors of `adapters_of`: float32, stacked as the weight."""

    def of(letters: str, param: Any, factors: Adapter | None) -> Adapter | None:
        if factors is None:
            return None
        stack = param.shape[: param.ndim - len(letters)]
        sizes = _sizes(letters, param) | {RANK: cfg.rank}
        shapes = [(*stack, *(sizes[letter] for letter in factor)) for factor in factors]
        return Adapter(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    return jax.tree.map(of, dims, params, adapters)


def init_adapters(seed: int, dims: Tree, shapes: Tree) -> Tree:
    """Returns the first adapters: `b` is zero, and `a` is uniform with variance 1 / (3 inputs).

    Each depends on the seed and its parameter's name alone. Source: the initialisation of peft.

    Args:
      dims, shapes: letters and shapes of the factors.
    """

    def of(path: Path, letters: Adapter, shape: Adapter) -> Adapter:
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(full_name(path).encode()))
        bound = _side(letters.a, _sizes(letters.a, shape.a)) ** -0.5
        a = jax.random.uniform(key, shape.a.shape, minval=-bound, maxval=bound)
        return Adapter(a, jnp.zeros(shape.b.shape))

    return jax.tree_util.tree_map_with_path(
        of, dims, shapes, is_leaf=lambda x: isinstance(x, Adapter)
    )


def matrices_in(dtype: str, dims: Tree, params: Tree) -> Tree:
    """Returns the shapes of weights whose matrices are held in a dtype; the router's is not."""

    def of(letters: str, param: Any) -> jax.ShapeDtypeStruct:
        matrix = is_product(letters) and letters != "DE"
        sharding = getattr(param, "sharding", None)
        held = dtype if matrix else param.dtype
        return jax.ShapeDtypeStruct(param.shape, held, sharding=sharding)

    return jax.tree.map(of, dims, params)


def full_name(path: Path) -> str:
    """Returns a parameter's name, such as groups.0.blocks.0.attention.w_q."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def short_name(path: Path) -> str:
    """Returns a parameter's name without its place among the blocks, such as attention.w_q."""
    parts = full_name(path).split(".")
    place = parts.index("blocks") + 2 if "blocks" in parts else 0
    return ".".join(parts[place:])


def _fits(path: Path, pattern: str) -> bool:
    return fnmatchcase(short_name(path), pattern) or fnmatchcase(full_name(path), pattern)


def _check_targets(cfg: LoraConfig, dims: Tree) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(dims)[0]
    matrices = [path for path, letters in leaves if adapter_dims(letters) is not None]
    for pattern in () if cfg.targets is None else cfg.targets:
        if any(_fits(path, pattern) for path in matrices):
            continue
        names = sorted({short_name(path) for path in matrices})
        listed = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise InputError(
            f"`lora.targets` has {pattern!r}, which fits no matrix of the model. Its matrices are "
            f"{listed}. Name some of them; * stands for any text."
        )
    if cfg.targets == ():
        raise InputError(
            "`lora.targets` is empty, and `lora.rank` is set. Adapters need matrices. Name some, "
            "or leave lora.targets at none."
        )


def _check_rank(cfg: LoraConfig, path: Path, factors: Adapter, letters: str, param: Any) -> None:
    sizes = _sizes(letters, param)
    sides = [_side(factor, sizes) for factor in factors]
    assert cfg.rank is not None
    if cfg.rank > min(sides):
        raise InputError(
            f"`lora.rank` = {cfg.rank} is more than {short_name(path)} has: its matrix is "
            f"{sides[0]} x {sides[1]}. An adapter's rank is at most that of its matrix. Choose at "
            f"most {min(sides)}, or leave it out of lora.targets."
        )


def _sizes(letters: str, param: Any) -> dict[str, int]:
    """Returns the size of each dimension of a parameter, without stacked layers."""
    return dict(zip(letters, param.shape[param.ndim - len(letters) :], strict=True))


def _side(factor: str, sizes: dict[str, int]) -> int:
    """Returns the size of one side of the matrix that a factor belongs to, of one expert."""
    return math.prod(sizes[letter] for letter in factor.removeprefix("E") if letter != RANK)
