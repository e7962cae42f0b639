"""Folders of weights: parts of tensors in every dtype, and what is refused."""

import json
import math
import os

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moejax.errors import InputError
from moejax.hf import reader
from moejax.hf.reader import Folder
from tests.hf.random_models import draw, write_file, write_folder

CONFIG = {"model_type": "mixtral"}


@st.composite
def parts(draw, dims=3, largest=9):
    """A shape, and a range along each dimension."""
    shape = draw(st.lists(st.integers(1, largest), min_size=1, max_size=dims))
    starts = [draw(st.integers(0, size)) for size in shape]
    ranges = [
        (start, draw(st.integers(start, size))) for start, size in zip(starts, shape, strict=True)
    ]
    return tuple(shape), tuple(ranges)


def slices(ranges):
    return tuple(slice(*r) for r in ranges)


def whole(shape):
    return tuple((0, size) for size in shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@hypothesis.given(case=parts(), piece=st.sampled_from([1, 16, 1 << 14]))
def test_a_part_is_that_part_of_the_whole(tmp_path_factory, dtype, case, piece):
    shape, ranges = case
    values = draw("x", shape).astype(dtype)
    folder = write_folder(tmp_path_factory.mktemp("folder"), CONFIG, {"x": values, "y": values})
    before = reader.PIECE_BYTES, reader.BLOCK_BYTES
    reader.PIECE_BYTES, reader.BLOCK_BYTES = piece, 4 * piece
    try:
        with Folder(folder) as opened:
            got = opened.read("y", ranges)
    finally:
        reader.PIECE_BYTES, reader.BLOCK_BYTES = before
    assert got.dtype == values.dtype
    np.testing.assert_array_equal(got, values[slices(ranges)])


def test_only_the_bytes_of_a_part_are_read(tmp_path, monkeypatch):
    values = draw("x", (64, 4, 8192))
    folder = write_folder(tmp_path, CONFIG, {"x": values})
    read, real = [], os.preadv

    def count(file, buffers, offset):
        read.append(real(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", count)
    with Folder(folder) as opened:
        for ranges in [((3, 5), (0, 4), (0, 8192)), ((3, 5), (1, 2), (0, 8192))]:
            read.clear()
            np.testing.assert_array_equal(opened.read("x", ranges), values[slices(ranges)])
            assert sum(read) == values[slices(ranges)].nbytes


def test_files_of_the_library_are_read(tmp_path):
    values = {"a": draw("a", (3, 4)), "b": draw("b", (5,)).astype(ml_dtypes.bfloat16)}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    with Folder(tmp_path) as opened:
        assert opened.narrow is False
        for name, wanted in values.items():
            np.testing.assert_array_equal(opened.read(name, whole(wanted.shape)), wanted)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [3, 4]}


@hypothesis.given(rows=st.integers(1, 10), columns=st.integers(1, 10), data=st.data())
def test_8_bit_floats_are_multiplied_by_the_scale_of_their_block(
    tmp_path_factory, rows, columns, data
):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (rows, columns)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = rng.random((-(-rows // 3), -(-columns // 4))).astype(np.float32)
    tensors = {"w.weight": codes, "w.weight_scale_inv": scales}
    folder = tmp_path_factory.mktemp("folder")
    write_folder(folder, {**CONFIG, "quantization_config": FP8}, tensors)
    wanted = codes.astype(np.float32)
    wanted *= np.repeat(np.repeat(scales, 3, axis=0), 4, axis=1)[:rows, :columns]
    r, c = (
        data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted))
        for n in (rows, columns)
    )
    with Folder(folder) as opened:
        assert opened.weights["w.weight"].shape == (rows, columns)
        assert list(opened.weights) == ["w.weight"]
        got = opened.read("w.weight", (tuple(r), tuple(c)))
    np.testing.assert_array_equal(got, wanted[slice(*r), slice(*c)])


def mxfp4(blocks, scales):
    """Dequantises one number at a time, as the format's text says it."""
    E, R, G, _ = blocks.shape
    out = np.zeros((E, G * 32, R), np.float32)
    for e, r, c in np.ndindex(E, R, G * 32):
        byte = int(blocks[e, r, c // 32, c % 32 // 2])
        code = byte >> 4 if c % 2 else byte & 15
        sign, exponent, mantissa = -1 if code & 8 else 1, (code & 6) >> 1, code & 1
        size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        out[e, c, r] = sign * size * 2.0 ** (int(scales[e, r, c // 32]) - 127)
    return out


def test_4_bit_floats_are_scaled_and_turned_as_models_hold_them(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 2, 16)).astype(np.uint8)
    scales = rng.integers(120, 134, (2, 3, 2)).astype(np.uint8)
    config = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
    write_folder(tmp_path, config, {"e.w_blocks": blocks, "e.w_scales": scales})
    wanted = mxfp4(blocks, scales)
    with Folder(tmp_path) as opened:
        assert opened.weights["e.w"].shape == (2, 64, 3)
        for ranges in [
            ((0, 2), (0, 64), (0, 3)),
            ((1, 2), (30, 41), (1, 3)),
            ((0, 1), (7, 7), (0, 1)),
        ]:
            np.testing.assert_array_equal(opened.read("e.w", ranges), wanted[slices(ranges)])


def refuse(folder, *fragments):
    with pytest.raises(InputError) as raised:
        Folder(folder)
    text = str(raised.value)
    assert "\n" not in text
    for fragment in fragments:
        assert fragment in text, text


TENSORS = {"a": draw("a", (2, 3)), "b": draw("b", (4,))}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, TENSORS)


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, TENSORS, files=2)


INDEX = "model.safetensors.index.json"


def edit_index(sharded, change):
    index = json.loads((sharded / INDEX).read_text())
    change(index["weight_map"])
    (sharded / INDEX).write_text(json.dumps(index))


def test_a_missing_folder_is_refused(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere is no directory")


def test_a_folder_without_config_is_refused(tmp_path):
    refuse(tmp_path, "config.json does not exist")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "config.json is damaged"),
        ("[]", "no JSON object"),
        ('{"a": 1, "a": 2}', "'a'` is there twice"),
        ("[" * 100_000, "config.json is damaged"),
        ("x" * 2_000_000, "has 2,000,000 bytes"),
    ],
)
def test_a_damaged_config_is_refused(folder, text, fragment):
    (folder / "config.json").write_text(text)
    refuse(folder, fragment)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pkl"])
def test_pickled_weights_are_refused(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refuse(folder, "weights are pickled", name)


def test_a_folder_without_weights_is_refused_with_what_it_has(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    refuse(folder, "no weights", "part.safetensors")


def test_two_ways_to_find_tensors_are_refused(sharded):
    write_file(sharded / "model.safetensors", TENSORS)
    refuse(sharded, "has both")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", ""]
)
def test_an_index_that_leads_outside_is_refused(sharded, name):
    edit_index(sharded, lambda where: where.update(a=name))
    refuse(sharded, "names the file", repr(name))


def test_a_link_that_leads_outside_is_refused(sharded, tmp_path):
    file = sharded / "model-00001-of-00002.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    refuse(sharded, "is outside", "elsewhere.safetensors")


def test_links_of_a_hugging_face_cache_are_followed(sharded, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    sharded.rename(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(snapshot.glob("*.safetensors")):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    with Folder(snapshot) as opened:
        np.testing.assert_array_equal(opened.read("b", ((0, 4),)), TENSORS["b"])


def test_a_missing_file_is_refused(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refuse(sharded, "file model-00002-of-00002.safetensors is missing")


def test_a_tensor_that_the_index_promises_is_missed(sharded):
    edit_index(sharded, lambda where: where.update(c=where["a"]))
    refuse(sharded, "tensor 'c' is missing", "model-00001-of-00002.safetensors")


def test_a_tensor_in_another_file_is_refused(sharded):
    edit_index(sharded, lambda where: where.update(a=where["b"], b=where["a"]))
    refuse(sharded, "tensor 'a' is in model-00001", "says 'model-00002")


def test_a_tensor_in_two_files_is_refused(sharded):
    write_file(sharded / "model-00002-of-00002.safetensors", TENSORS)
    refuse(sharded, "tensor 'a' is in two files")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_an_index_without_files_is_refused(sharded, index):
    (sharded / INDEX).write_text(index)
    refuse(sharded, "`weight_map`")


def longer(header):
    header["b"]["shape"] = [5]
    return header


def overlapping(header):
    header["b"]["data_offsets"] = [16, 32]
    return header


def overflowing(header):
    header["b"]["shape"] = [2**62, 2**62]
    return header


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"cut": 4}, ["tensor 'b' of shape (4,) ends at byte", "Copy it again"]),
        ({"header": longer}, ["no whole safetensors file"]),
        ({"header": overlapping}, ["no whole safetensors file"]),
        ({"header": overflowing}, ["no whole safetensors file"]),
        ({"header": lambda _: b"{"}, ["no whole safetensors file"]),
        ({"header": lambda _: b"[" * 100_000}, ["no whole safetensors file"]),
        ({"header": lambda _: b"pickle"}, ["no whole safetensors file"]),
    ],
)
def test_a_damaged_file_is_refused(folder, changes, fragments):
    write_file(folder / "model.safetensors", TENSORS, **changes)
    refuse(folder, "model.safetensors", *fragments)


@pytest.mark.parametrize("data", [b"", b"\0" * 4, b"\xff" * 8, (2**40).to_bytes(8, "little")])
def test_a_file_of_another_kind_is_refused(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    refuse(folder, "no whole safetensors file")


def test_bytes_beyond_the_tensors_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    refuse(folder, "no whole safetensors file")


def test_integers_are_no_weights(folder):
    write_file(folder / "model.safetensors", {"a": np.zeros((2,), np.int64)})
    refuse(folder, "tensor 'a' has dtype I64")


def codes(*shape):
    return np.zeros(shape, np.uint8).view(ml_dtypes.float8_e4m3fn)


QUANTISED = [
    ({"a": codes(4, 4)}, "tensor 'a' of shape (4, 4) has no scales"),
    ({"a": codes(4), "a_scale_inv": draw("s", (1,))}, "tensor 'a' of shape (4,)"),
    (
        {"a": codes(4, 4), "a_scale_inv": draw("s", (1, 1))},
        "scales F32 of (1, 1). A matrix of 8-bit floats has a scale for each block of 3 x 4, here "
        "(2, 1)",
    ),
    ({"a": np.zeros((3,), np.uint8)}, "tensor 'a' has dtype U8"),
    ({"a_blocks": np.zeros((1, 2, 3, 16), np.uint8)}, "tensor 'a_blocks' has shape"),
    (
        {
            "a_blocks": np.zeros((1, 2, 3, 16), np.uint8),
            "a_scales": np.zeros((1, 2, 4), np.uint8),
        },
        "scales U8 of (1, 2, 4)",
    ),
]


@pytest.mark.parametrize(("tensors", "fragment"), QUANTISED)
def test_quantised_weights_without_their_scales_are_refused(tmp_path, tensors, fragment):
    write_folder(tmp_path, {**CONFIG, "quantization_config": FP8}, tensors)
    refuse(tmp_path, fragment)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        "awq",
    ],
)
def test_other_ways_to_quantise_are_refused(tmp_path, quantised):
    write_folder(tmp_path, {**CONFIG, "quantization_config": quantised}, TENSORS)
    refuse(tmp_path, "quantised in a way that is not read")


def test_the_size_of_a_folder_is_that_of_its_tensors(folder):
    with Folder(folder) as opened:
        assert opened.total_bytes == 4 * sum(math.prod(x.shape) for x in TENSORS.values())
