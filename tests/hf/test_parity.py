"""Our models against transformers': logits, choices, loss, gradients and greedy texts.

The numbers were written by `tests/golden/make_models.py`; the weights are drawn from their names.
"""

import jax
import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.hf.families import family_of
from moejax.hf.load import parameters_of, without_rule
from moejax.hf.rules import tensors_of
from moejax.moe import router
from moejax.step.state import Batch, flat
from tests.cases import place
from tests.hf.golden import ONE_DEVICE, all_cases, cases_of, loaded
from tests.hf.random_models import draw

# Slow together; whole steps are traced, whose layers have tests.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked_annotations")]

# Of cases that one device and a mesh compute, the mesh's alone runs in `make test`.
ODD = [case for case in all_cases() if "even" not in case.values[1]]
EVEN = [case for case in all_cases("even", always=()) if "even" in case.values[1]]
ON_MESHES = all_cases("even", always=("qwen2_moe", "deepseek_v3", "gpt_oss"))
# Bounds of errors, over the largest logit, the loss, and a gradient's norm.
LOGITS, LOSS, GRADIENTS = 1e-5, 1e-6, 1e-4
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


def logits_at(train_step, state, token_BT, length):
    tokens = jax.device_put(token_BT, train_step.batch_sharding)
    return np.asarray(train_step.next_logits(state, (tokens, length)))


def error_of_logits(train_step, state, case, token_BT):
    """The largest error of logits and of their log-sum-exp, over the largest logit."""
    worst = 0.0
    for index, position in enumerate(case["positions"]):
        logits_BV = logits_at(train_step, state, token_BT, position + 1).astype(np.float64)
        wanted = np.array(case["logits"])[:, index]
        top = logits_BV.max(axis=-1)
        logsum = top + np.log(np.exp(logits_BV - top[:, None]).sum(axis=-1))
        errors = (
            np.abs(logits_BV[:, case["ids"]] - wanted).max(),
            np.abs(logsum - np.array(case["logsumexp"])[:, index]).max(),
        )
        worst = np.max((worst, *errors))  # NaN stays
    return worst / case["largest"]


def check_greedy(train_step, state, case, token_BT):
    prompt = 8
    tokens = np.zeros_like(token_BT)
    tokens[:, :prompt] = token_BT[:1, :prompt]
    for length in range(prompt, token_BT.shape[1]):
        logits_BV = logits_at(train_step, state, tokens, length)
        tokens[:, length] = logits_BV[0].argmax()
    assert tokens[0, prompt:].tolist() == case["greedy"]


def error_of_gradients(train_step, gradients, case):
    """The largest error of a norm, or of a projection, over the norm."""
    family = family_of(case["config"])
    shapes = train_step.abstract
    parameters = parameters_of(train_step.model, shapes.params, shapes.router_bias)
    biases = {path for path in parameters if path.endswith(".moe.bias")}
    zeros = without_rule(family, parameters) | biases
    held = {path: p for path, p in parameters.items() if path not in zeros}
    tensors = tensors_of((*family.rules, *family.experts[0]), held, train_step.cfg.model)
    arrays = flat(gradients)
    # A router whose one weight is normalised has no gradient but rounding errors.
    rounding = np.finfo(np.float32).eps * max(norm for norm, _ in case["gradients"].values())
    assert {tensor.name for tensor in tensors} == set(case["gradients"])
    worst = 0.0
    for tensor in tensors:
        values = np.asarray(arrays[tensor.path])[tensor.index]
        gradient = tensor.view.to_tensor(values).astype(np.float64)
        norm, projection = case["gradients"][tensor.name]
        direction = draw(f"direction of {tensor.name}", gradient.shape).astype(np.float64)
        found = np.sum(gradient * direction) / np.sqrt(np.sum(direction**2))
        errors = (abs(np.linalg.norm(gradient) - norm), abs(found - projection))
        worst = np.max((worst, *(error / (norm + rounding / GRADIENTS) for error in errors)))
    return worst


def error_of_loss(train_step, state, case, token_BT):
    """The relative error of the loss, and the error of its gradients; load must be equal."""
    target_BT = np.concatenate([token_BT[:, 1:], np.full_like(token_BT[:, :1], -1)], axis=1)
    batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
    gradients, parts = train_step.gradients(state, place(train_step, batch))
    load_LE = [
        np.bincount(
            np.array(" ".join(layer).split(), int), minlength=train_step.cfg.moe.num_experts
        )
        for layer in case["choices"]
    ]
    np.testing.assert_array_equal(np.asarray(parts.load_LE), load_LE)
    error = abs(float(parts.nll) - case["loss"]) / case["loss"]
    return error, error_of_gradients(train_step, gradients, case)


def check(train_step, state, case, token_BT):
    assert error_of_logits(train_step, state, case, token_BT) <= LOGITS
    loss, gradients = error_of_loss(train_step, state, case, token_BT)
    assert loss <= LOSS
    assert gradients <= GRADIENTS


@pytest.mark.parametrize(("family", "name"), ODD + EVEN)
def test_one_device_computes_what_transformers_computes(tmp_path, choices, family, name):
    case = cases_of(family)[name]
    train_step, state = loaded(tmp_path, case, ONE_DEVICE)
    token_BT = np.array(case["tokens"], np.int32)
    jax.block_until_ready(logits_at(train_step, state, token_BT, 1))
    jax.effects_barrier()
    found = [[" ".join(map(str, sorted(row))) for row in layer.tolist()] for layer in choices]
    assert found == case["choices"]
    check_greedy(train_step, state, case, token_BT)
    check(train_step, state, case, token_BT)


@pytest.mark.parametrize(("family", "name"), ON_MESHES)
def test_a_mesh_of_expert_and_tensor_axes_computes_the_same(tmp_path, family, name):
    case = cases_of(family)[name]
    train_step, state = loaded(tmp_path, case, MESH)
    check(train_step, state, case, np.array(case["tokens"], np.int32))
