"""Exported models in transformers: no key too many or too few, same logits, texts and gradients."""

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from tests.hf.golden import cases_of
from tests.parity import ours

pytestmark = pytest.mark.parity

LOGITS, GRADIENTS = 1e-5, 1e-4  # of the largest logit, and of a gradient's norm
SHAPE, PROMPT = (4, 40), 8  # 32 tokens are continued
FOUR, EIGHT = MeshConfig(expert=2, tensor=2), MeshConfig(expert=4, tensor=2, nodes=2)
# Of each family the shapes that are odd on one device, and those that fit a mesh on some route.
ROUTES = {
    "mixtral": (EIGHT, {"route": "two_level_merge"}),
    "deepseek_v3": (FOUR, {"route": "spread"}),
    "gpt_oss": (FOUR, {"route": "merge", "route_chunks": 2}),
    "qwen3_moe": (FOUR, {"route": "duplicate"}),
    "qwen2_moe": (FOUR, {"route": "gather_home"}),
    "olmoe": (FOUR, {"route": "split", "route_chunks": 2}),
    "glm4_moe": (EIGHT, {"route": "two_level"}),
    "deepseek_v2": (EIGHT, {"route": "split"}),
    "minimax_m2": (EIGHT, {"route": "merge"}),
}
ALWAYS = ("mixtral", "deepseek_v3")  # grouped and latent attention


def models() -> list:
    """Parameters (family, case, mesh, route settings): of each family two models."""
    found = []
    for family, (mesh, route) in ROUTES.items():
        marks = () if family in ALWAYS else pytest.mark.exhaustive
        for name in cases_of(family):
            on = (mesh, route) if name.startswith("even") else (MeshConfig(), {})
            label = f"{family}-{on[1].get('route', 'one device')}"
            found.append(pytest.param(family, name, *on, marks=marks, id=label))
    return found


@pytest.mark.parametrize(("family", "name", "mesh", "route"), models())
def test_transformers_computes_the_same_with_an_export(tmp_path, theirs, family, name, mesh, route):
    cfg = ours.config_for(cases_of(family)[name], mesh, SHAPE, **route)
    model = ours.random_model(family, cfg)
    ours.export(model, tmp_path / "run", tmp_path / "out")
    loaded = theirs.load(tmp_path / "out")
    token_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, SHAPE, dtype=np.int32)
    wanted = theirs.logits(loaded, token_BT)
    bound = LOGITS * np.abs(wanted).max()
    np.testing.assert_allclose(ours.logits(model, token_BT), wanted, rtol=0, atol=bound)
    prompt = token_BT[0, :PROMPT].tolist()
    text = theirs.continued(loaded, prompt, SHAPE[1] - PROMPT)
    assert ours.continued(model, prompt, SHAPE) == text
    compare_gradients(
        ours.loss_and_gradients(model, token_BT), theirs.loss_and_gradients(loaded, token_BT)
    )


def compare_gradients(got, wanted):
    """Compares (loss, gradients by name)."""
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    found, gradients = got[1], wanted[1]
    biases = {name for name in gradients if name.endswith("e_score_correction_bias")}
    assert set(found) == set(gradients) - biases
    # A router whose one weight is normalised has no gradient but rounding errors.
    rounding = np.finfo(np.float32).eps * max(map(np.linalg.norm, gradients.values()))
    for name, values in found.items():
        bound = GRADIENTS * np.linalg.norm(gradients[name]) + rounding
        assert np.linalg.norm(values - gradients[name]) <= bound, name
