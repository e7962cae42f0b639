"""Folders of weights: parts of tensors in every dtype, and what is refused."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moejax.hf import reader
from moejax.hf.reader import Folder
from tests.hf.random_models import draw, write_folder
from tests.hf.test_files import CONFIG, TENSORS, refuse


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
    packed = {**TENSORS, "packed": np.zeros((4, 4), np.uint8)}
    write_folder(tmp_path, {**CONFIG, "quantization_config": quantised}, packed)
    refuse(tmp_path, "quantised in a way that is not read")
    # Left behind where weights were dequantised, the key says nothing.
    plain = write_folder(tmp_path / "plain", {**CONFIG, "quantization_config": quantised}, TENSORS)
    with Folder(plain) as opened:
        for name, wanted in TENSORS.items():
            np.testing.assert_array_equal(opened.read(name, whole(wanted.shape)), wanted)


def test_8_bit_floats_of_a_file_that_does_not_say_how_have_blocks_of_128(tmp_path):
    """As DeepSeek quantises, whose files were copied without the key."""
    values = draw("w", (130, 257)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.abs(draw("s", (2, 3))) + 1
    tensors = {"w.weight": values, "w.weight_scale_inv": scales}
    with Folder(write_folder(tmp_path, CONFIG, tensors)) as opened:
        found = opened.read("w.weight", whole(values.shape))
    spread = scales.repeat(128, 0)[:130].repeat(128, 1)[:, :257]
    np.testing.assert_array_equal(found, values.astype(np.float32) * spread)


def test_a_digest_of_samples_is_of_names_shapes_and_first_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "SAMPLE_BYTES", 8)

    def digest(name, **changes):
        tensors = {"x": np.arange(6, dtype=np.float32), "y": np.zeros(1, np.float32)} | changes
        with Folder(write_folder(tmp_path / name, CONFIG, tensors)) as opened:
            return reader.digest_of_samples(opened)

    first, later = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32)
    first[1], later[2] = 9, 9
    own = digest("own")
    assert digest("later", x=later) == own, "no more is read"
    others = [
        digest("first", x=first),
        digest("short", y=np.ones(1, np.float32)),
        digest("shape", x=np.arange(6, dtype=np.float32).reshape(2, 3)),
        digest("more", z=np.zeros(1, np.float32)),
    ]
    assert len({own, *others}) == 5


def test_a_scale_beside_a_plain_weight_is_not_left_out_in_silence(tmp_path):
    """Whether the weight is to be multiplied by it cannot be known, so no parameter takes it."""
    tensors = {"w.weight": draw("w", (4, 4)), "w.weight_scale_inv": draw("s", (1, 1))}
    with Folder(write_folder(tmp_path, CONFIG, tensors)) as opened:
        assert set(opened.weights) == set(tensors)


def test_the_size_of_a_folder_is_that_of_its_tensors(tmp_path):
    folder = write_folder(tmp_path, CONFIG, TENSORS)
    with Folder(folder) as opened:
        assert opened.total_bytes == 4 * sum(math.prod(x.shape) for x in TENSORS.values())


def test_a_file_that_many_threads_read_is_opened_once_and_closed_once(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, CONFIG, {"x": draw("x", (8, 8))})
    opened, plain = [], os.open

    def slowly(path, *arguments):
        time.sleep(0.05)  # the other threads come meanwhile
        opened.append(path)
        return plain(path, *arguments)

    with Folder(folder) as weights, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(reader.os, "open", slowly)
        list(pool.map(lambda row: weights.read("x", ((row, row + 1), (0, 8))), range(8)))
        monkeypatch.undo()
    assert len(opened) == 1
