"""The files of a folder of weights: what is read, and what is refused by name."""

import json

import numpy as np
import pytest

from moejax.errors import InputError
from moejax.hf.files import SMALL_BYTES, read_json
from moejax.hf.reader import Folder
from tests.hf.random_models import draw, write_file, write_folder

CONFIG = {"model_type": "mixtral"}


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


def test_a_folder_that_is_missing_or_empty_is_refused(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere is no directory")
    refuse(tmp_path, "config.json does not exist")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "config.json is damaged"),
        ("[]", "no JSON object"),
        ('{"a": 1, "a": 2}', "'a'` is there twice"),
        ("[" * 100_000, "config.json is damaged"),
        ("x" * 17_000_000, "has 17,000,000 bytes"),
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


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_configs_that_lead_outside_are_refused(sharded, tmp_path, name):
    (sharded / name).rename(tmp_path / "elsewhere.json")
    (sharded / name).symlink_to(tmp_path / "elsewhere.json")
    refuse(sharded, f"{name} is outside", "elsewhere.json")


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


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"cut": 4}, ["tensor 'b' of shape (4,) ends at byte", "Copy it again"]),
        ({"header": longer}, ["no whole safetensors file"]),
        ({"header": lambda _: b"[" * 100_000}, ["no whole safetensors file"]),
    ],
)
def test_a_damaged_file_is_refused(folder, changes, fragments):
    write_file(folder / "model.safetensors", TENSORS, **changes)
    refuse(folder, "model.safetensors", *fragments)


@pytest.mark.parametrize("data", [b"", b"\0" * 4, (2**40).to_bytes(8, "little")])
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


def test_a_large_config_that_is_whole_is_read(folder):
    """A label for each of 100,000 tokens takes 3 MB."""
    labels = {str(index): f"LABEL_{index:07d}" for index in range(100_000)}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": labels}))
    assert path.stat().st_size > 2_500_000
    assert read_json(path, SMALL_BYTES)["id2label"] == labels
    with pytest.raises(InputError) as raised:
        read_json(path, 1 << 20)
    assert "Copy it again" not in str(raised.value)
    assert "Take out lists" in str(raised.value)
