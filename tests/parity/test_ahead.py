"""Multi-token prediction in transformers: its module beside the model, for drafts, on an export."""

from dataclasses import replace

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.step.state import Batch
from tests.cases import place
from tests.hf.golden import cases_of
from tests.parity import ours

pytestmark = [pytest.mark.parity, pytest.mark.exhaustive]

SHAPE = (4, 40)
CASES = [
    ("deepseek_v3", MeshConfig()),
    ("deepseek_v3", MeshConfig(expert=2, tensor=2)),
    ("glm4_moe", MeshConfig()),
]


def losses_ahead(model: ours.Ours, token_BT: np.ndarray) -> list[float]:
    """The mean loss of the tokens after the next, of each sequence alone."""
    found = []
    for row in range(len(token_BT)):
        target_BT = np.full_like(token_BT, -1)
        target_BT[row, :-1] = token_BT[row, 1:]
        batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
        _, parts = model.train_step.gradients(model.state, place(model.train_step, batch))
        found.append(float(parts.ahead))
    return found


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_transformers_module_predicts_the_same(tmp_path, monkeypatch, theirs, family, mesh):
    (name,) = (name for name in cases_of(family) if name.startswith("even"))
    cfg = ours.config_for(cases_of(family)[name], mesh, SHAPE)
    cfg = replace(cfg, model=replace(cfg.model, predict_ahead=1))
    model = ours.random_model(family, cfg)
    ours.export(model, tmp_path / "run", tmp_path / "out")
    token_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, SHAPE, dtype=np.int32)
    theirs.expect_layer(monkeypatch, tmp_path / "out", cfg.model.num_layers)
    loaded = theirs.load(tmp_path / "out")
    wanted = theirs.losses_ahead(loaded, token_BT)
    np.testing.assert_allclose(losses_ahead(model, token_BT), wanted, rtol=1e-6)
