"""Arrays into folders and back: the same bits, on any mesh, in files of any size."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.hf import in_flight, writer
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.reader import Folder
from moejax.hf.rules import Tensor
from moejax.hf.views import View
from moejax.hf.writer import (
    OutFile,
    PlacedTensor,
    check_biases,
    plan_files,
    total_elements,
    write_weights,
)
from moejax.runtime.processes import ALONE
from moejax.step.state import flat
from tests.cases import step_for
from tests.hf.golden import OFTEN, all_cases, cases_of, golden_folder, import_weights
from tests.hf.random_models import SELECTION_BIASES, draw_all, write_folder

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

# Tensors that stay in float32: those and, of Kimi Linear, how fast states fade.
WIDE = (*SELECTION_BIASES, "self_attn.A_log", "self_attn.dt_bias")
WIDE += tuple(f"indexer.{name}" for name in ("k_norm.bias", "k_norm.weight", "weights_proj.weight"))
MESH = MeshConfig(fsdp=2, expert=2, tensor=2)
NARROW = {"kimi_linear": MeshConfig(expert=2, tensor=2)}  # a head has six channels


def read_all(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def import_arrays(path, mesh):
    """The family, the train step and the arrays of a folder."""
    step, _, params, router_bias = import_weights(path, mesh)
    family = family_of(json.loads((path / "config.json").read_text()))
    return family, step, flat(params) | flat(router_bias)


def import_golden(place, case):
    """The same of a golden model on one device."""
    return import_arrays(golden_folder(place / "in", case), MeshConfig())


def on_devices(arrays):
    """Reads parts of arrays, as the writer asks for them."""
    return lambda path, index: np.asarray(arrays[path])[index]


def export_arrays(out, family, step, arrays, dtype, file_bytes=10**9):
    out.mkdir()
    shapes = (step.abstract.params, step.abstract.router_bias)
    files = plan_files(family, step.model, *shapes, dtype, file_bytes)
    done = []
    write_weights(files, out, on_devices(arrays), ALONE, done.append)
    assert sum(done) == total_elements(files)
    return files


def assert_same_tensors(got, wanted):
    assert set(got) == set(wanted)
    for name, values in wanted.items():
        assert got[name].dtype == values.dtype, name
        assert got[name].tobytes() == values.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "name"), all_cases(always=OFTEN))
def test_export_gives_back_what_was_imported(tmp_path, family, name, dtype):
    case = cases_of(family)[name]
    tensors = {
        key: x if dtype == "float32" or key.endswith(WIDE) else x.astype(dtype)
        for key, x in draw_all(case["tensors"]).items()
    }
    if case["config"]["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    # A zero with a sign, which sums would lose.
    (last,) = tensors.keys() & {"model.norm.weight", "backbone.norm_f.weight"}
    tensors[last][0] = -0.0
    write_folder(tmp_path / "in", case["config"], tensors)
    table, step, arrays = import_arrays(tmp_path / "in", MeshConfig())
    export_arrays(tmp_path / "out", table, step, arrays, dtype)
    assert_same_tensors(read_all(tmp_path / "out"), tensors)
    with Folder(tmp_path / "in") as folder:
        config = table.write(config_of(folder), folder.config)
    again = write_folder(tmp_path / "again", config, read_all(tmp_path / "out"))
    _, _, arrays_again = import_arrays(again, MeshConfig())
    for path, array in arrays.items():
        assert np.asarray(arrays_again[path]).tobytes() == np.asarray(array).tobytes(), path


@pytest.mark.parametrize(("family", "name"), all_cases("even", always=OFTEN[:2]))
def test_a_mesh_writes_the_same_files(tmp_path, family, name):
    case = cases_of(family)[name]
    path = golden_folder(tmp_path / "in", case)
    for place, mesh in (("one", MeshConfig()), ("many", NARROW.get(family, MESH))):
        files = export_arrays(tmp_path / place, *import_arrays(path, mesh), "bfloat16", 10_000)
        assert len(files) >= 3
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "many").iterdir())
    assert names[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for each in names:
        assert (tmp_path / "one" / each).read_bytes() == (tmp_path / "many" / each).read_bytes()


@pytest.mark.parametrize("limit", [1, 20_000])
@pytest.mark.parametrize(
    ("family", "name"), [("gpt_oss", "even"), ("mixtral", "even, llama3 positions")]
)
def test_experts_are_written_one_by_one(tmp_path, monkeypatch, family, name, limit):
    """Also of gpt-oss, where a tensor holds all experts of a layer."""
    table, step, arrays = import_golden(tmp_path, cases_of(family)[name])
    export_arrays(tmp_path / "whole", table, step, arrays, "bfloat16", 60_000)
    asked, held = defaultdict(int), writer._bytes_held

    def bytes_held(job):
        path = job[1].tensor.path
        asked[path] = max(asked[path], held(job))
        return held(job)

    monkeypatch.setattr(writer, "TOGETHER_BYTES", 0)
    monkeypatch.setattr(in_flight, "LIMIT_BYTES", limit)
    monkeypatch.setattr(writer, "_bytes_held", bytes_held)
    export_arrays(tmp_path / "parts", table, step, arrays, "bfloat16", 60_000)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name
    apart = [p for p, x in arrays.items() if ".moe." in p and np.ndim(x) > 3]
    assert apart
    for path in apart:  # four bytes as it is read, two as it is written
        assert asked[path] <= np.asarray(arrays[path])[0, 0].nbytes * 3 // 2


def test_the_index_says_where_each_tensor_is(tmp_path):
    case = cases_of("olmoe")["top 3"]
    table, step, arrays = import_golden(tmp_path, case)
    files = export_arrays(tmp_path / "out", table, step, arrays, "float32", 100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    found = read_all(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    # A tensor that is larger than a file may be has a file of its own.
    assert all(file.placed[-1].stop <= 100_000 or len(file.placed) == 1 for file in files)
    for file, after in pairwise(files):
        assert file.placed[-1].stop + after.placed[0].stop > 100_000, "it had room for one more"
    with Folder(write_folder_config(tmp_path / "out", case)) as folder:
        assert set(folder.weights) == set(case["tensors"])


@pytest.mark.parametrize("length", range(8))
def test_a_header_ends_at_a_multiple_of_eight_and_says_its_length(length):
    view = View("DV", (2, 3), ("V", "D"))
    placed = PlacedTensor(
        Tensor("m" * (length + 1), "embedding.project", None, view), "bfloat16", 4
    )
    header = OutFile("a", (placed,)).header()
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    facts = json.loads(header[8:])
    assert facts.pop("__metadata__") == {"format": "pt"}
    assert facts == {
        "m" * (length + 1): {"dtype": "BF16", "shape": [3, 2], "data_offsets": [4, 16]}
    }


def write_folder_config(folder, case):
    (folder / "config.json").write_text(json.dumps(case["config"]))
    return folder


def test_one_file_needs_no_index_and_rounds_to_the_nearest(tmp_path):
    case = cases_of("olmoe")["top 3"]
    table, step, arrays = import_golden(tmp_path, case)
    export_arrays(tmp_path / "out", table, step, arrays, "bfloat16")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    wanted = {k: x.astype(ml_dtypes.bfloat16) for k, x in draw_all(case["tensors"]).items()}
    assert_same_tensors(read_all(tmp_path / "out"), wanted)


def test_selection_biases_that_files_cannot_hold_are_refused(tmp_path):
    case = cases_of("olmoe")["top 3"]
    table, step, arrays = import_golden(tmp_path, case)
    shapes = (step.abstract.params, step.abstract.router_bias)
    check_biases(table, step.model, *shapes, on_devices(arrays))
    (path,) = [path for path in arrays if path.endswith(".moe.bias")]
    arrays[path] = arrays[path].at[0, 1].set(0.001)
    with pytest.raises(InputError, match="no tensor for the selection biases"):
        check_biases(table, step.model, *shapes, on_devices(arrays))


def test_a_model_without_a_place_in_the_family_is_refused(tmp_path):
    case = cases_of("olmoe")["top 3"]
    table, step, _ = import_golden(tmp_path, case)
    cfg = replace(step.cfg, moe=replace(step.cfg.moe, num_shared_experts=1))
    step = step_for(cfg)
    with pytest.raises(InputError, match=r"no tensor of this family holds .*mlp\.w_in"):
        plan_files(table, step.model, step.abstract.params, step.abstract.router_bias, "float32")
