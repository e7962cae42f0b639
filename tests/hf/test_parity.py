"""Our models against transformers': logits, choices, loss, gradients and greedy texts.

The numbers were written by `tests/golden/make_models.py`; the weights are drawn from their names.
"""

import jax
import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.moe import router
from tests.hf.golden import OFTEN, ONE_DEVICE, all_cases, cases_of, loaded
from tests.hf.random_models import draw
from tests.parity import ours

# Slow together; whole steps are traced, whose layers have tests.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked_annotations")]

# Of cases that one device and a mesh compute, all but one run in `make test-all CASES=every` alone.
ODD = [case for case in all_cases(always=OFTEN) if "even" not in case.values[1]]
EVEN = [case for case in all_cases("even", always=()) if "even" in case.values[1]]
ON_MESHES = all_cases("even", always=("deepseek_v3",))
# Bounds of errors, over the largest logit, the loss, and a gradient's norm.
LOGITS, LOSS, GRADIENTS = 1e-5, 1e-6, 1e-4
PROMPT = 8  # tokens
MESH = MeshConfig(expert=2, tensor=2)


@pytest.fixture
def choices(monkeypatch):
    """What the routers choose while programs run that are traced from now on, layer by layer."""
    seen, real = [], router.route

    def route(*args, **kwargs):
        routing = real(*args, **kwargs)
        jax.debug.callback(lambda expert: seen.append(np.asarray(expert)), routing.expert_NK)
        return routing

    monkeypatch.setattr(router, "route", route)
    return seen


def error_of_logits(model, case, token_BT):
    """The largest error of logits and of their log-sum-exp, over the largest logit."""
    worst = 0.0
    for index, position in enumerate(case["positions"]):
        logits_BV = ours.logits_at(model, token_BT, position + 1).astype(np.float64)
        wanted = np.array(case["logits"])[:, index]
        top = logits_BV.max(axis=-1)
        logsum = top + np.log(np.exp(logits_BV - top[:, None]).sum(axis=-1))
        errors = (
            np.abs(logits_BV[:, case["ids"]] - wanted).max(),
            np.abs(logsum - np.array(case["logsumexp"])[:, index]).max(),
        )
        worst = np.max((worst, *errors))  # NaN stays
    return worst / case["largest"]


def error_of_gradients(gradients, case):
    """The largest error of a norm, or of a projection, over the norm."""
    # A router whose one weight is normalised has no gradient but rounding errors.
    rounding = np.finfo(np.float32).eps * max(norm for norm, _ in case["gradients"].values())
    assert set(gradients) == set(case["gradients"])
    worst = 0.0
    for name, values in gradients.items():
        gradient = values.astype(np.float64)
        norm, projection = case["gradients"][name]
        direction = draw(f"direction of {name}", gradient.shape).astype(np.float64)
        found = np.sum(gradient * direction) / np.sqrt(np.sum(direction**2))
        errors = (abs(np.linalg.norm(gradient) - norm), abs(found - projection))
        worst = np.max((worst, *(error / (norm + rounding / GRADIENTS) for error in errors)))
    return worst


def error_of_loss(model, case, token_BT):
    """The relative error of the loss, and the error of its gradients; load must be equal."""
    parts, gradients = ours.parts_and_gradients(model, token_BT)
    experts = model.train_step.cfg.moe.num_experts
    load_LE = [
        np.bincount(np.array(" ".join(layer).split(), int), minlength=experts)
        for layer in case["choices"]
    ]
    found = np.asarray(parts.load_LE)  # of a dense model, no layers
    np.testing.assert_array_equal(found, np.reshape(load_LE, (-1, found.shape[-1])))
    error = abs(float(parts.nll) - case["loss"]) / case["loss"]
    return error, error_of_gradients(gradients, case)


def model_of(place, family, case, mesh):
    """A golden model on a mesh, and its tokens."""
    return ours.Ours(family, *loaded(place, case, mesh)), np.array(case["tokens"], np.int32)


def check(model, case, token_BT):
    assert error_of_logits(model, case, token_BT) <= LOGITS
    loss, gradients = error_of_loss(model, case, token_BT)
    assert loss <= LOSS
    assert gradients <= GRADIENTS


@pytest.mark.parametrize(("family", "name"), ODD + EVEN)
def test_one_device_computes_what_transformers_computes(tmp_path, choices, family, name):
    case = cases_of(family)[name]
    model, token_BT = model_of(tmp_path, family, case, ONE_DEVICE)
    jax.block_until_ready(ours.logits_at(model, token_BT, 1))
    jax.effects_barrier()
    found = [[" ".join(map(str, sorted(row))) for row in layer.tolist()] for layer in choices]
    assert found == case["choices"]
    assert ours.continued(model, token_BT[0, :PROMPT].tolist(), token_BT.shape) == case["greedy"]
    check(model, case, token_BT)


@pytest.mark.parametrize(("family", "name"), ON_MESHES)
def test_a_mesh_of_expert_and_tensor_axes_computes_the_same(tmp_path, family, name):
    case = cases_of(family)[name]
    model, token_BT = model_of(tmp_path, family, case, MESH)
    check(model, case, token_BT)
