"""Fills a model's parameters from a folder, on any mesh.

All names and shapes are compared before anything is read: each parameter is filled once, and each
tensor is used once or left out by a rule. Each process then reads its own shards, one
parameter at a time, so that a process holds its shards and little more.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from moejax.config.fields import short
from moejax.config.schema import ModelConfig
from moejax.errors import InputError
from moejax.hf.families import family_of
from moejax.hf.families.family import Family
from moejax.hf.families.tensors import AHEAD_COPIES
from moejax.hf.reader import Folder
from moejax.hf.rules import PREDICT_AHEAD, Index, Parameter, Tensor, tensors_of
from moejax.hf.views import Bounds, Box
from moejax.step.model import ModelDef
from moejax.step.state import Tree, flat

BIAS = "moe.bias"  # the selection bias of a router, below its block
BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
COPIES = tuple(rule.theirs for rule in AHEAD_COPIES)
ALIGNMENT = 64  # bytes, at which JAX takes a NumPy array on the CPU without a copy
THREADS = 4  # read and convert in parallel
SHOWN = 3  # names in a message


@dataclass(frozen=True)
class LoadPlan:
    """The tensors that fill each parameter.

    Attributes:
      tensors: tensors by path and repeat of stacked layers.
      zeros: paths that no tensor fills: selection biases, if the family's files have none.
      left_out: tensors that are not read, by reason.
    """

    parameters: Mapping[str, Parameter]
    tensors: Mapping[tuple[str, int | None], list[Tensor]]
    zeros: frozenset[str]
    left_out: Mapping[str, list[str]]


def parameters_of(model: ModelDef, params: Tree, router_bias: Tree) -> dict[str, Parameter]:
    """Returns a model's parameters and selection biases by path, given their shapes."""
    dims = dict(zip(flat(params), jax.tree.leaves(model.dims), strict=True))
    dims |= dict.fromkeys(flat(router_bias), "E")
    leaves = {**flat(params), **flat(router_bias)}
    return {path: Parameter(path, dims[path], tuple(x.shape)) for path, x in leaves.items()}


def without_rule(family: Family, parameters: Mapping[str, Parameter]) -> frozenset[str]:
    """Returns the selection biases of a family whose files have none."""
    if any(rule.ours == BIAS for rule in family.rules):
        return frozenset()
    return frozenset(path for path in parameters if path.endswith(f".{BIAS}"))


def plan_load(folder: Folder, model: ModelDef, params: Tree, router_bias: Tree) -> LoadPlan:
    """Returns the tensors that fill each parameter of a model.

    Raises:
      InputError: names tensors that are missing, too many, or of another shape.
    """
    family, cfg = family_of(folder.config), model.cfg
    parameters = parameters_of(model, params, router_bias)
    zeros = without_rule(family, parameters)
    held = {path: p for path, p in parameters.items() if path not in zeros}
    # A family's files may hold experts in several forms: take that of most tensors here.
    forms = [tensors_of((*family.rules, *form), held, cfg.model) for form in family.experts]
    tensors = max(forms, key=lambda form: sum(t.name in folder.weights for t in form))
    _check_tensors(folder, tensors)
    left_out = _left_out(folder, family, tensors, cfg.model)
    by_part = defaultdict(list)
    for tensor in tensors:
        by_part[tensor.path, tensor.repeat].append(tensor)
    return LoadPlan(parameters, by_part, zeros, left_out)


def _check_tensors(folder: Folder, tensors: Iterable[Tensor]) -> None:
    missing = [tensor for tensor in tensors if tensor.name not in folder.weights]
    if missing:
        if missing[0].path.startswith(PREDICT_AHEAD):
            raise InputError(
                f"`model.predict_ahead` is 1, and {folder.path} has no layer that predicts further "
                f"tokens: tensor {missing[0].name} is missing. Weights that came without it cannot "
                "get it. Set it to 0."
            )
        more = f" So are {len(missing) - 1:,} more." if len(missing) > 1 else ""
        raise InputError(
            f"tensor {missing[0].name} is missing in {folder.path}. Expected shape "
            f"{missing[0].shape}, found none.{more} A model of this config.json has it. Copy "
            "the whole folder."
        )
    for tensor in tensors:
        found, wanted = folder.weights[tensor.name].shape, tensor.shape
        if found != wanted:
            turned = " (transposed)" if found == wanted[::-1] else ""
            raise InputError(
                f"tensor {tensor.name} has another shape. Expected {wanted}, found "
                f"{found}{turned} in {folder.path}. It must fit config.json. Copy the folder again."
            )


def _left_out(
    folder: Folder, family: Family, tensors: Iterable[Tensor], model: ModelConfig
) -> dict[str, list[str]]:
    """Returns the tensors that a rule leaves out, by reason; refuses any others."""
    used = {tensor.name for tensor in tensors}
    reasons, extra = defaultdict(list), []
    for name in folder.weights:
        if name in used:
            continue
        reason = _reason_to_leave(name, folder, family, model)
        (extra if reason is None else reasons[reason]).append(name)
    if extra:
        listed = ", ".join(
            f"{short(name)} of shape {folder.weights[name].shape}" for name in extra[:SHOWN]
        )
        more = f" and {len(extra) - SHOWN:,} more" if len(extra) > SHOWN else ""
        raise InputError(
            f"tensors that no parameter takes: {listed}{more} in {folder.path}. A {family.name} "
            "model of this config.json has none of that name. Is config.json of this model?"
        )
    return dict(reasons)


def _reason_to_leave(name: str, folder: Folder, family: Family, model: ModelConfig) -> str | None:
    if BUFFERS.fullmatch(name):
        return "frequencies of rotary positions, which are computed"
    if name == "lm_head.weight" and model.tie_embeddings:
        return "a copy of the embedding, which is tied"
    further = "of layers that predict further tokens (model.predict_ahead)"
    if family.ahead_tensors and re.fullmatch(family.ahead_tensors, name):
        return further
    if family.around is not None and re.fullmatch(family.around.others, name):
        return "of images, videos or sounds; the text model alone is read"
    layer = LAYER.fullmatch(name)
    if layer is None:
        return None
    number, first, ahead = int(layer[1]), model.num_layers, model.predict_ahead
    if first <= number < first + ahead and layer[2] in COPIES:
        return "copies of the embedding and the head"
    if first + ahead <= number < first + family.layers_ahead(folder.config):
        return further
    return None


def load(plan: LoadPlan, folder: Folder, abstract: Tree) -> Tree:
    """Returns arrays in the place of a tree's shapes: parameters, or selection biases.

    Each process reads its own shards.

    Args:
      abstract: shapes, dtypes and shardings.
    """
    arrays = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for path, leaf in flat(abstract).items():
            arrays[path] = _load_array(plan, folder, path, leaf, pool)
    return jax.tree.unflatten(jax.tree.structure(abstract), list(arrays.values()))


def _load_array(
    plan: LoadPlan,
    folder: Folder,
    path: str,
    leaf: Any,
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """Returns one parameter; shards that several devices hold are read once."""
    devices = defaultdict(list)
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        devices[bounds].append(device)
    shards = []
    for bounds, holders in devices.items():
        host = read_bounds(plan, folder, path, bounds, leaf.dtype, pool.map)
        shards += [jax.device_put(host, device) for device in holders]
        del host
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def read_part(plan: LoadPlan, folder: Folder, path: str, index: Index) -> np.ndarray:
    """Returns a part of one parameter in float32, as NumPy's array[index] would.

    Args:
      index: positions and whole dimensions (`slice(None)`); dimensions without an entry are whole.
    """
    shape = plan.parameters[path].shape
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds = tuple(
        (0, size) if isinstance(at, slice) else (at, at + 1)
        for at, size in zip(whole, shape, strict=True)
    )
    part = read_bounds(plan, folder, path, bounds, np.float32)
    return part[tuple(at if isinstance(at, slice) else 0 for at in whole)]


def read_bounds(
    plan: LoadPlan,
    folder: Folder,
    path: str,
    bounds: Bounds,
    dtype: Any,
    run: Callable[..., Iterator[None]] = map,
) -> np.ndarray:
    """Returns a part of one parameter.

    Args:
      bounds: start and stop along each dimension.
      run: `map`, or the `map` of a thread pool.
    """
    shape = tuple(stop - start for start, stop in bounds)
    out = _aligned(shape, np.dtype(dtype))
    if path in plan.zeros:
        out[...] = 0
        return out
    dims = plan.parameters[path].dims
    box: Box = dict(zip(dims, bounds[len(bounds) - len(dims) :], strict=True))

    def fill(job: tuple[np.ndarray, Tensor]) -> None:
        place, tensor = job
        tensor.fill(place, box, lambda ranges: folder.read(tensor.name, ranges))

    def jobs() -> Iterator[tuple[np.ndarray, Tensor]]:
        stacked = len(bounds) > len(dims)
        for index in range(shape[0]) if stacked else (None,):
            repeat = None if index is None else bounds[0][0] + index
            place = out if index is None else out[index]
            for tensor in plan.tensors[path, repeat]:
                yield place, tensor

    for _ in run(fill, jobs()):
        pass
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an empty array that JAX takes on the CPU as it is."""
    count = math.prod(shape) * dtype.itemsize
    buffer = np.empty(count + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + count].view(dtype).reshape(shape)
