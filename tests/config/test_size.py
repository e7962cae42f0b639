"""moejax/config/checks/size.py: models that no machine could hold are refused by their settings."""

import dataclasses

import pytest

from moejax.config.checks import check, resolve_mesh
from moejax.config.checks.size import parameters_of
from moejax.config.fields import change
from moejax.config.load import load_config
from moejax.config.schema import Config
from moejax.errors import InputError
from tests.cases import small_config, step_for


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.tie_embeddings": False, "model.num_kv_heads": 4, "model.num_layers": 2},
        {"model.num_layers": 5, "model.first_dense_layers": 1, "model.moe_every": 2},
        {"model.moe_every": None, "model.num_layers": 3},
        {"moe.num_shared_experts": 2},
        {"model.attention": "latent", "model.rope_width": 2, "model.kv_latent": 16},
        {
            "model.attention": "latent",
            "model.rope_width": 2,
            "model.kv_latent": 16,
            "model.q_latent": 8,
            "model.value_width": 6,
        },
        {
            "model.attention": "sparse",
            "model.rope_width": 2,
            "model.kv_latent": 16,
            "model.q_latent": 8,
        },
        {"model.predict_ahead": 1},
        {"model.predict_ahead": 1, "model.moe_every": 2, "model.num_layers": 3},
    ],
)
def test_parameters_are_counted_as_the_model_has_them(changes):
    cfg = change(small_config(), changes)
    sizes = step_for(cfg).parameter_sizes().values()
    # Norm scales alone have one dimension.
    assert parameters_of(cfg) == sum(elements for dims, elements in sizes if len(dims) > 1)


@pytest.mark.parametrize("name", ["model.width", "model.vocab_size", "moe.expert_hidden"])
def test_what_nobody_could_train_is_refused_at_once(name):
    with pytest.raises(InputError, match=r"the model has .* parameters"):
        check(change(Config(), {name: 10**14}))


def test_simulated_devices_are_offered_only_where_they_would_fit(monkeypatch):
    cfg = load_config("configs/mixtral_8x7b.py")
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, replica=None))
    for memory, offered in ((2**40, True), (2**35, False)):
        monkeypatch.setattr(
            "moejax.config.checks.mesh.machine_memory", lambda memory=memory: memory
        )
        with pytest.raises(InputError) as caught:
            resolve_mesh(cfg, 1, "cpu")
        assert ("simulated_devices=64" in str(caught.value)) == offered
        assert ("64 real devices" in str(caught.value)) == (not offered)
