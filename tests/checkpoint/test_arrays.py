"""Parts of a checkpoint's weights, read without devices: the same bits, however they were saved."""

import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from moejax.checkpoint.arrays import (
    NewArray,
    PieceWriter,
    StoredWeights,
    _shared_bytes,
    check_written,
)
from moejax.checkpoint.writer import Checkpoints
from moejax.errors import RunError
from moejax.step.state import flat
from tests.cases import drawn_state, small_config, step_for

ONE, MIXED = (1, 1, 1, 1), (1, 2, 2, 2)
ALL = slice(None)


def weights_of(state):
    return {**flat(state.params), **flat(state.router_bias)}


def state_on(mesh, dtype="float32"):
    """A state whose selection biases are not zero."""
    state = drawn_state(step_for(small_config(mesh, router={"bias_update_rate": 0.01})))
    return state._replace(params=jax.tree.map(lambda x: x.astype(dtype), state.params))


def save_as_before(folder, state, **options):
    """As moejax saved first: compressed, each shard in one piece; or in pieces of some size."""
    leaves = {f"params.{path}": x for path, x in flat(state.params).items()}
    leaves |= {f"balance.{path}": x for path, x in flat(state.router_bias).items()}
    args = {key: ocp.SaveArgs(**options) for key in leaves}
    with ocp.CheckpointManager(folder) as manager:
        item = ocp.args.StandardSave(leaves, save_args=args)
        manager.save(3, args=ocp.args.Composite(weights=item))


def assert_read(step, arrays):
    stored = StoredWeights(step)
    for path, array in arrays.items():
        wanted = np.asarray(array)
        at_ends = (0, wanted.shape[0] - 1)
        indices = [(), *((at,) for at in at_ends), (ALL,) * (wanted.ndim - 1) + (1,)]
        if wanted.ndim > 2:
            indices += [(at, 0, ALL, 0)[: wanted.ndim] for at in at_ends]
        for index in indices:
            read = stored.read(path, index)
            assert read.dtype == wanted.dtype, path
            assert read.tobytes() == wanted[index].tobytes(), (path, index)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "dtype"), [(ONE, "float32"), (MIXED, "bfloat16")])
def test_parts_are_read_whatever_mesh_saved_them(tmp_path, mesh, dtype):
    state = state_on(mesh, dtype)
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(3, state, {})
    writer.close()
    assert_read(tmp_path / "3", weights_of(state))


@pytest.mark.parametrize(
    ("mesh", "options"), [(ONE, {"chunk_byte_size": 512}), (MIXED, {})], ids=["pieces", "shards"]
)
def test_older_checkpoints_are_read(tmp_path, mesh, options):
    state = state_on(mesh)
    save_as_before(tmp_path / "old", state, **options)
    assert_read(tmp_path / "old" / "3", weights_of(state))


def bytes_read():
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


@pytest.mark.parametrize("before", [False, True], ids=["now", "before"])
def test_no_piece_is_read_twice_for_tensors_that_share_it(tmp_path, before):
    """Experts are read one by one, gate and up apart, as their tensors are written."""
    state = state_on(ONE)
    if before:
        save_as_before(tmp_path, state)
    else:
        writer = Checkpoints(tmp_path, keep=1)
        writer.save(3, state, {})
        writer.close()
    (path,) = (path for path in weights_of(state) if path.endswith("moe.w_in"))
    array = weights_of(state)[path]
    stored = StoredWeights(tmp_path / "3")
    stored.read("norm.scale")
    first = bytes_read()
    layers, experts, _, gates, _ = array.shape
    for layer, expert, gate in itertools.product(range(layers), range(experts), range(gates)):
        stored.read(path, (layer, expert, ALL, gate))
    assert bytes_read() - first < 1.3 * array.nbytes + 4096


def test_a_piece_that_is_missing_is_named_from_the_index_alone(tmp_path):
    array = NewArray("params.groups.0.blocks.0.moe.w_in", (2, 3, 4, 5), "float32")
    shapes = {f"weights/{array.key}": array.shape, "weights/params.norm.scale": (7,)}
    parts = list(array.parts())
    assert len(parts) == 6
    with PieceWriter(tmp_path / "weights") as writer:
        writer.create(array)
        for part in parts[:-1]:
            size = tuple(stop - start for start, stop in part)
            writer.write(array, part, np.zeros(size, np.float32))
    said = r"weights/params\.groups.*w_in has 5 of 6 pieces, and shape \[2, 3, 4, 5\]"
    with pytest.raises(RunError, match=said):
        check_written(tmp_path, shapes)
    with PieceWriter(tmp_path / "weights") as writer:
        writer.write(array, parts[-1], np.zeros((1, 1, 4, 5), np.float32))
    with pytest.raises(RunError, match=r"weights/params\.norm\.scale is not there"):
        check_written(tmp_path, shapes)
    del shapes["weights/params.norm.scale"]
    check_written(tmp_path, shapes)
    with pytest.raises(RunError, match=r"shape \[2, 3, 4, 5\]"):
        check_written(tmp_path, {f"weights/{array.key}": (2, 3, 4, 6)})


@pytest.mark.parametrize(
    ("shape", "pieces", "whole", "rows"),
    [
        # A layer at a time: each has its own pieces, or two share them; a part is 8 x 6 numbers.
        ((4, 8, 6), (1, 8, 6), (False, True, True), 0),
        ((4, 8, 6), (2, 4, 3), (False, True, True), 2 * 8 * 6),
        ((4, 8, 6), (2, 4, 3), (False,), 2 * 8 * 6),  # what is not said is whole
        ((4, 7, 6), (2, 4, 3), (False,), 2 * 8 * 6),  # a piece is read to its end
        ((4, 8, 6), (1, 4, 3), (False, False, True), 1 * 4 * 6),
        ((4, 8, 6), (2, 4, 3), (True, True, True), 0),
    ],
)
def test_two_rows_of_pieces_are_kept_where_parts_share_them(tmp_path, shape, pieces, whole, rows):
    spec = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/",
        "metadata": {"shape": shape, "chunks": pieces, "dtype": "<f4"},
    }
    array = ts.open(spec, create=True).result()
    assert _shared_bytes(array, whole) == 2 * 4 * rows


@pytest.mark.parametrize(
    ("key", "shape", "dtype", "piece"),
    [
        # 160 MB, of which a piece has 67 at most: halved twice along its longest dimension.
        ("params.embedding.table", (40_000, 1000), "float32", (10_000, 1000)),
        ("params.embedding.table", (40_000, 1000), "bfloat16", (20_000, 1000)),
        ("params.embedding.table", (4096, 4096), "float32", (4096, 4096)),  # 64 MiB
        ("params.embedding.table", (4096, 4097), "float32", (4096, 2049)),
        # Layers, and experts of layers, lie alone.
        ("params.groups.0.blocks.0.moe.w_in", (2, 8, 4, 6), "float32", (1, 1, 4, 6)),
        ("params.groups.0.blocks.0.attention.w_q", (2, 4, 6, 3), "float32", (1, 4, 6, 3)),
        ("params.groups.0.blocks.0.norm.scale", (2, 4), "float32", (2, 4)),
    ],
)
def test_an_array_is_cut_where_it_is_read_and_pieces_are_not_too_large(key, shape, dtype, piece):
    assert NewArray(key, shape, dtype).piece == piece
