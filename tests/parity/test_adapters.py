"""Exports of runs with adapters: peft computes with them what the run computes."""

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.convert.exporting import export_run
from tests.hf.golden import FAMILIES, cases_of, golden_folder
from tests.hf.lora_runs import write_run
from tests.parity import ours

pytestmark = pytest.mark.parity

LOGITS = 1e-5  # of the largest
SHAPE = (4, 24)
ALWAYS = "mixtral"


def families() -> list:
    """Parameters (family, name of its case that fits a mesh)."""
    found = []
    for family in FAMILIES:
        (even,) = [name for name in cases_of(family) if name.startswith("even")]
        marks = () if family == ALWAYS else pytest.mark.exhaustive
        found.append(pytest.param(family, even, marks=marks, id=family))
    return found


@pytest.mark.parametrize(("family", "name"), families())
def test_peft_computes_with_an_adapter_what_the_run_computes(tmp_path, theirs, family, name):
    mesh = MeshConfig(expert=2, tensor=2)
    base = golden_folder(tmp_path / "base", cases_of(family)[name])
    train_step, state = write_run(tmp_path / "run", base, mesh, SHAPE)
    for folder, adapter in (("merged", False), ("adapter", True)):
        export_run(tmp_path / "run", tmp_path / folder, dtype="float32", adapter=adapter)
    token_BT = np.random.default_rng(0).integers(
        0, train_step.cfg.model.vocab_size, SHAPE, dtype=np.int32
    )
    wanted = ours.logits(ours.Ours(family, train_step, state), token_BT)
    bound = LOGITS * np.abs(wanted).max()
    before = theirs.logits(theirs.load(base), token_BT)
    assert np.abs(wanted - before).max() > 1000 * bound, "the adapters change nothing"
    for model in (
        theirs.load(tmp_path / "merged"),
        theirs.with_adapter(theirs.load(base), tmp_path / "adapter"),
    ):
        np.testing.assert_allclose(theirs.logits(model, token_BT), wanted, rtol=0, atol=bound)
