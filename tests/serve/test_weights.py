"""Weights as generation holds them: each layer's apart, and frozen ones as they multiply."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.config.schema import LoraConfig
from moejax.serve.weights import Separator, targets_apart
from moejax.step.adapters import full_name
from tests.cases import CERTAIN, small_config
from tests.serve.models import on_mesh, programs_for, random_state

LAYERS = {"num_layers": 3, "first_dense_layers": 1, "dtype": "bfloat16"}  # groups of 1 and 2
ROUTER = "groups.1.blocks.0.moe.w_router"


def by_name(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {full_name(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("targets", [("moe.w_*", "embedding.*"), ("embedding.*",)])
@pytest.mark.usefixtures("unchecked_annotations")
def test_layers_are_apart_and_frozen_matrices_in_the_dtype_of_their_products(targets):
    cfg = small_config(model=LAYERS, moe=CERTAIN)
    cfg = dataclasses.replace(cfg, lora=LoraConfig(rank=2, targets=targets))
    programs = programs_for(cfg, 1, 2)
    drawn = random_state(cfg)
    abstract = programs.stored.abstract
    whole = on_mesh(drawn, programs.stored)
    given = by_name(whole.frozen)
    apart = Separator(programs.train_step).take(whole)
    for part in ("params", "frozen"):
        wanted = by_name(getattr(drawn, part))
        found = by_name(getattr(apart, part))
        assert len(found) == sum(2 if name.startswith("groups.1.") else 1 for name in wanted)
        for name, array in found.items():
            number, _, rest = name.removeprefix("groups.").partition(".")
            if name.startswith("groups."):
                layer, group = max(int(number) - 1, 0), min(int(number), 1)
                source = wanted[f"groups.{group}.{rest}"][layer : layer + 1]
            else:
                source = wanted[name]
            is_matrix = part == "frozen" and (".w_" in name or name.startswith("embedding."))
            narrow = is_matrix and not name.endswith("w_router")
            assert str(array.dtype) == ("bfloat16" if narrow else "float32"), name
            np.testing.assert_array_equal(np.asarray(array), source.astype(array.dtype))
    assert given[ROUTER].is_deleted()
    assert given["groups.1.blocks.0.moe.w_in"].is_deleted(), "memory has no room for both"
    assert str(by_name(abstract.frozen)[ROUTER].dtype) == "float32"


def test_targets_name_each_layer_of_a_group():
    lora = LoraConfig(rank=2, targets=("groups.1.*.w_q", "embedding.*"))
    cfg = dataclasses.replace(small_config(model=LAYERS, moe=CERTAIN), lora=lora)
    assert set(targets_apart(programs_for(cfg, 1, 2).stored)) == {
        "embedding.table",
        "groups.1.blocks.0.attention.w_q",
        "groups.2.blocks.0.attention.w_q",
    }
    whole = dataclasses.replace(cfg, lora=LoraConfig())
    assert targets_apart(programs_for(whole, 1, 2).stored) is None
