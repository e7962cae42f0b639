"""Folders onto meshes: every number at its place, and what does not fit refused by name."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.hf.config import check_same_model, config_of
from moejax.hf.load import plan_load
from moejax.hf.model import describe_anywhere
from moejax.hf.reader import Folder
from tests.hf.golden import ONE_DEVICE, cases_of, import_weights
from tests.hf.random_models import draw_all, write_folder

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

CASE = cases_of("mixtral")["even, llama3 positions"]
MESHES = [
    MeshConfig(expert=2, tensor=2, replica=2),
    MeshConfig(fsdp=2, expert=2, tensor=2, expert_weights="folded"),
    MeshConfig(fsdp=4, tensor=2, expert_weights="whole"),
]


def weights(place, case, mesh=ONE_DEVICE, tensors=None):
    """The parameters and selection biases of a folder on a mesh."""
    tensors = draw_all(case["tensors"]) if tensors is None else tensors
    return import_weights(write_folder(place, case["config"], tensors, files=3), mesh)[2:]


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(host(got)), jax.tree.leaves(host(wanted)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return host(weights(tmp_path_factory.mktemp("one"), CASE))


def test_numbers_are_at_their_places(wanted):
    params, bias = wanted
    tensors = draw_all(CASE["tensors"])
    block = params["groups"][0]["blocks"][0]
    expert = "model.layers.1.block_sparse_moe.experts.13."
    np.testing.assert_array_equal(
        block["moe"]["w_in"][1, 13, :, 0], tensors[f"{expert}w1.weight"].T
    )
    np.testing.assert_array_equal(
        block["moe"]["w_in"][1, 13, :, 1], tensors[f"{expert}w3.weight"].T
    )
    np.testing.assert_array_equal(block["moe"]["w_out"][1, 13], tensors[f"{expert}w2.weight"].T)
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(
        block["attention"]["w_q"][1], q.reshape(12, 6, 24).transpose(2, 0, 1)
    )
    assert not any(np.any(x) for x in jax.tree.leaves(bias))


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_holds_the_same(tmp_path, wanted, mesh):
    assert_same(weights(tmp_path, CASE, mesh), wanted)


def fused(tensors):
    """The tensors as transformers 5 holds them in memory."""
    found = dict(tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts."
        w1, w2, w3 = (
            np.stack([found.pop(f"{prefix}{e}.{w}.weight") for e in range(24)])
            for w in ("w1", "w2", "w3")
        )
        mlp = f"model.layers.{layer}.mlp.experts."
        found |= {f"{mlp}gate_up_proj": np.concatenate([w1, w3], axis=1), f"{mlp}down_proj": w2}
    return found


def test_fused_experts_are_read_too(tmp_path, wanted):
    tensors = fused(draw_all(CASE["tensors"]))
    assert_same(weights(tmp_path, CASE, MESHES[0], tensors), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_widened_exactly(tmp_path, wanted, dtype):
    tensors = {k: v.astype(dtype) for k, v in draw_all(CASE["tensors"]).items()}
    params, _ = host(weights(tmp_path, CASE, ONE_DEVICE, tensors))
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(got, want.astype(dtype).astype(np.float32))


def quantised(tensors, names):
    """Some matrices as 8-bit floats with a scale a block of 5 x 7."""
    found = {}
    for name, values in tensors.items():
        if not name.endswith(names):
            found[name] = values
            continue
        found[name] = (8 * values).astype(ml_dtypes.float8_e4m3fn)
        rows, columns = -(-values.shape[0] // 5), -(-values.shape[1] // 7)
        found[f"{name}_scale_inv"] = np.full((rows, columns), 0.125, np.float32)
    return found


def test_8_bit_weights_are_dequantised_on_a_mesh(tmp_path, wanted):
    names = ("q_proj.weight", "w1.weight", "w2.weight", "w3.weight")
    block = {"quant_method": "fp8", "weight_block_size": [5, 7]}
    changed = {**CASE, "config": {**CASE["config"], "quantization_config": block}}
    tensors = quantised(draw_all(CASE["tensors"]), names)
    params, _ = host(weights(tmp_path, changed, MESHES[1], tensors))
    got, want = (tree["groups"][0]["blocks"][0]["moe"]["w_out"] for tree in (params, wanted[0]))
    eighths = (8 * want).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 8
    np.testing.assert_array_equal(got, eighths)


def refuse(folder, *fragments):
    with pytest.raises(InputError) as raised, Folder(folder) as opened:
        plan_load(opened, *describe_anywhere(config_of(opened)))
    for fragment in fragments:
        assert fragment in str(raised.value), raised.value
    assert "\n" not in str(raised.value)


@pytest.fixture
def tensors():
    return draw_all(CASE["tensors"])


def folder_of(place, tensors, **config):
    return write_folder(place, {**CASE["config"], **config}, tensors)


GATE = "model.layers.1.block_sparse_moe.experts.13.w1.weight"


def test_a_missing_expert_is_named_with_its_shape(tmp_path, tensors):
    del tensors[GATE]
    refuse(folder_of(tmp_path, tensors), f"tensor {GATE} is missing", "(8, 24), found none")


def test_many_missing_tensors_are_counted(tmp_path, tensors):
    kept = {name: x for name, x in tensors.items() if ".experts." not in name}
    refuse(folder_of(tmp_path, kept), "experts.0.w1.weight is missing", "So are 143 more")


def test_a_transposed_tensor_is_named_with_both_shapes(tmp_path, tensors):
    tensors[GATE] = np.ascontiguousarray(tensors[GATE].T)
    refuse(folder_of(tmp_path, tensors), GATE, "Expected (8, 24), found (24, 8) (transposed)")


def test_another_shape_is_named(tmp_path, tensors):
    refuse(
        folder_of(tmp_path, tensors, vocab_size=97),
        "tensor model.embed_tokens.weight has another shape. Expected (97, 24), found (96, 24)",
    )


def test_extra_tensors_are_named(tmp_path, tensors):
    tensors |= {f"model.layers.{n}.self_attn.q_norm.weight": np.ones(6, np.float32) for n in (0, 1)}
    refuse(
        folder_of(tmp_path, tensors),
        "tensors that no parameter takes: 'model.layers.0.self_attn.q_norm.weight' of shape (6,)",
    )


def test_more_layers_than_the_config_says_are_refused(tmp_path, tensors):
    refuse(folder_of(tmp_path, tensors, num_hidden_layers=1), "layers.1.", "and 76 more")


def test_buffers_and_copies_are_left_out_by_rule(tmp_path, tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    with Folder(folder_of(tmp_path, tensors)) as opened:
        plan = plan_load(opened, *describe_anywhere(config_of(opened)))
    left = sorted(name for names in plan.left_out.values() for name in names)
    assert left == ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_a_config_that_differs_is_refused_with_the_difference(tmp_path, tensors):
    with Folder(folder_of(tmp_path, tensors)) as opened:
        cfg = config_of(opened)
        check_same_model(opened, cfg)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "rope_theta": 5e5, "rope_parameters": None}))
    with Folder(tmp_path) as opened, pytest.raises(InputError) as raised:
        check_same_model(opened, cfg)
    assert "model.rope.theta: 500000.0 -> 1000000.0" in str(raised.value)
    assert "model.rope.scaling: 'none' -> 'llama3'" in str(raised.value)
