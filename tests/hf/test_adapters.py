"""Adapters as peft reads them, held against its formulas; tests/parity has what it computes."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from moejax.comm.weights.adapters import Adapter, adapter_dims
from moejax.config.schema import LoraConfig
from moejax.errors import InputError
from moejax.hf.adapters import (
    CONFIG,
    WEIGHTS,
    adapter_config,
    factor_tensors,
    write_adapter,
)
from moejax.hf.rules import Rows, Tensor
from moejax.hf.views import View

SIZES = dict(zip("DHCUFEZVA", (6, 2, 4, 2, 5, 3, 8, 7, 2), strict=True))


def view(dims, groups, at=(), paired=None):
    return View(dims, tuple(SIZES[x] for x in dims), tuple(groups.split()), at, paired)


VIEWS = {
    "queries": view("DHC", "HC D"),
    "queries that rotate in pairs": view("DHC", "HC D", paired=("C", SIZES["C"] - 2, 2)),
    "output": view("HCD", "D HC"),
    "gate": view("DUF", "F D", at=(("U", 0),)),
    "up": view("DUF", "F D", at=(("U", 1),)),
    "down": view("FD", "D F"),
    "router": view("DE", "E D"),
    "latent": view("DZ", "Z D", paired=("Z", SIZES["Z"] - 4, 4)),
    "from a latent": view("ZHC", "HC Z"),
    "logits": view("DV", "V D"),
    "fused": view("EDUF", "E UF D"),
    "fused down": view("EFD", "E D F"),
    "fused and transposed": view("EDUF", "E D FU"),
    "fused down and transposed": view("EFD", "E F D"),
}


def draw(dims, rng):
    return rng.normal(size=[SIZES[letter] for letter in dims]).astype(np.float32)


def factors_of(dims, seed=0):
    rng = np.random.default_rng(seed)
    return Adapter(*(draw(letters, rng) for letters in adapter_dims(dims)))


@pytest.mark.parametrize("name", VIEWS)
def test_pefts_product_of_the_tensors_is_the_tensor_of_the_product(name):
    of, adapter = VIEWS[name], factors_of(VIEWS[name].dims)
    letters = adapter_dims(of.dims)
    product = np.einsum(f"{letters.a},{letters.b}->{of.dims}", *adapter)
    places = dict(of.at)
    wanted = of.to_tensor(product[tuple(places.get(x, slice(None)) for x in of.dims)])
    a, b = factor_tensors(of, adapter)
    A, E = SIZES["A"], SIZES["E"]
    if not name.startswith("fused"):
        np.testing.assert_allclose(b @ a, wanted, rtol=1e-5)
        return
    # peft's ParamWrapper.get_delta_weight.
    a_EAx, b_yAE = a.reshape(E, A, -1), b.reshape(-1, A, E)
    swapped = name.endswith("transposed")
    formula = "yAE,EAx->Exy" if swapped else "yAE,EAx->Eyx"
    np.testing.assert_allclose(np.einsum(formula, b_yAE, a_EAx), wanted, rtol=1e-5)


def tensor(name, of):
    return Tensor(name, name, None, of)


def write(folder, tensors, lora, base=None):
    """Writes an adapter whose factors are drawn; parts of a tensor have those of their layer."""

    def read(path, layer):
        name, _, factor = path.rpartition(".")
        (view,) = {tensor.view for tensor in tensors if tensor.path == name}
        return getattr(factors_of(view.dims, seed=len(name) + sum(layer)), factor)

    write_adapter(folder, tensors, read, lora, base=base)


LAYER = "model.layers.3."
TENSORS = [
    Tensor(
        f"{LAYER}self_attn.q_proj.weight", "groups.0.blocks.0.attention.w_q", 3, VIEWS["queries"]
    ),
    tensor(f"{LAYER}block_sparse_moe.experts.gate_up_proj", VIEWS["fused"]),
    tensor(f"{LAYER}block_sparse_moe.experts.down_proj", VIEWS["fused down"]),
    tensor(f"{LAYER}mlp.shared_experts.gate_proj.weight", VIEWS["gate"]),
]


def test_a_file_holds_every_factor_under_pefts_names(tmp_path):
    write(tmp_path, TENSORS, LoraConfig(rank=2, alpha=3.0), base="some/model")
    arrays = load_file(tmp_path / WEIGHTS)
    places = {
        "self_attn.q_proj": TENSORS[0],
        "mlp.experts.base_layer": TENSORS[1],  # inside of the wrapper of the other
        "mlp.experts": TENSORS[2],
        "mlp.shared_experts.gate_proj": TENSORS[3],
    }
    wanted = {}
    for place, of in places.items():
        seed = len(of.path) + (of.repeat or 0)
        for factor, array in zip(
            "AB", factor_tensors(of.view, factors_of(of.view.dims, seed=seed)), strict=True
        ):
            wanted[f"base_model.model.{LAYER}{place}.lora_{factor}.weight"] = array
    assert sorted(arrays) == sorted(wanted)
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, wanted[name])
    with safe_open(tmp_path / WEIGHTS, framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "some/model")
    assert (config["r"], config["lora_alpha"]) == (2, 3.0)
    assert config["target_modules"] == [f"{LAYER}self_attn.q_proj"]
    assert config["target_parameters"] == [
        f"{LAYER}mlp.experts.down_proj",
        f"{LAYER}mlp.experts.gate_up_proj",
        f"{LAYER}mlp.shared_experts.gate_proj.weight",
    ]


def test_one_parameter_of_the_experts_alone_is_not_nested(tmp_path):
    write(tmp_path, TENSORS[1:2], LoraConfig(rank=2), base=None)
    names = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / WEIGHTS)}
    assert names == {f"base_model.model.{LAYER}mlp.experts"}


def test_the_config_has_the_scale_of_training():
    for lora in (LoraConfig(rank=8), LoraConfig(rank=8, alpha=4.0)):
        config = adapter_config([], lora, base=None)
        assert config["lora_alpha"] / config["r"] == lora.scale
        assert not config["use_rslora"]


def test_an_adapter_of_a_tensor_that_is_no_weight_of_a_module_is_refused(tmp_path):
    odd = tensor(f"{LAYER}self_attn.q_proj.matrix", VIEWS["queries"])
    with pytest.raises(InputError, match=r"q_proj\.matrix has no place.*names end in \.weight"):
        write(tmp_path, [*TENSORS, odd], LoraConfig(rank=2), base=None)
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_share_a_tensor_have_one_adapter(tmp_path):
    """Of two parts, each with 4 rows of the first, 3 that no adapter has, and 2 of the second."""
    name = f"{LAYER}linear_attn.in_proj_qkv.weight"
    first = Tensor(name, "w_q", None, VIEWS["queries"], rows=Rows(2, 0, 4, 9))
    second = Tensor(name, "w_other", None, view("DC", "C D"), rows=Rows(2, 7, 2, 9))
    write(tmp_path, [first, second], LoraConfig(rank=2, alpha=3.0))
    arrays, module = load_file(tmp_path / WEIGHTS), name.removesuffix(".weight")
    a, b = (arrays[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
    assert (a.shape, b.shape) == ((4, 6), (18, 4))
    wanted = np.zeros((18, 6))
    for own, places in ((first, (0, 1, 2, 3, 9, 10, 11, 12)), (second, (7, 8, 16, 17))):
        factors = factors_of(own.view.dims, seed=len(own.path))
        own_a, own_b = factor_tensors(own.view, factors)
        wanted[list(places)] = own_b @ own_a
    np.testing.assert_allclose(b @ a, wanted, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_modules"] == [module]
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({module: 4}, {module: 6.0})


def test_an_adapter_that_peft_refuses_in_mamba_is_refused(tmp_path):
    out = tensor("backbone.layers.0.mixer.out_proj.weight", VIEWS["output"])
    with pytest.raises(InputError, match=r"mixer\.out_proj\.weight has no place in peft, which"):
        write(tmp_path, [out], LoraConfig(rank=2))


def test_an_embeddings_adapter_is_refused(tmp_path):
    table = tensor("model.embed_tokens.weight", view("VD", "V D"))
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight has no place"):
        write(tmp_path, [table], LoraConfig(rank=2), base=None)
    assert list(tmp_path.iterdir()) == []
