"""`moejax eval` of a run that trained adapters: the frozen weights are read beside them."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from moejax.checkpoint.find import locate
from moejax.config.schema import CheckpointConfig, DataConfig, LoraConfig
from moejax.evaluate.command import main
from moejax.train.start import base_of
from tests.cases import CERTAIN, small_config, step_for
from tests.data.token_files import write_text
from tests.evaluate.runs import event_of, save

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base and a run of adapters on it, and what the run says of held-out text."""
    folder = tmp_path_factory.mktemp("adapters")
    train, held_out = (str(write_text(folder, name * 9, name=name)) for name in ("train", "eval"))
    cfg = small_config((1, 2, 2, 2), model={"vocab_size": 264, "mlp_hidden": 384}, moe=CERTAIN)
    data = DataConfig("tokens", (train,), (held_out,), sequence_length=16)
    cfg = dataclasses.replace(cfg, data=data)
    whole = step_for(cfg)
    state = whole.init()
    save(folder / "base", whole, state)
    lora, source = LoraConfig(rank=2), CheckpointConfig(init_from=str(folder / "base"))
    cfg = dataclasses.replace(cfg, lora=lora, checkpoint=source)
    train_step = step_for(cfg)
    state = train_step.first_state(state.params, state.router_bias)
    moved = jax.tree.map(lambda x: x + 0.1, state.params)
    state = state._replace(params=moved)
    base = base_of(cfg, locate(str(folder / "base"), "size"))
    save(folder / "run", train_step, state, base)
    return folder, event_of(cfg, state, folder / "run")


def scored(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out)["nats_per_token"], err


@pytest.mark.exhaustive
def test_adapters_are_scored_on_their_frozen_weights(place, capsys):
    folder, event = place
    nats, said = scored(capsys, "--run", folder / "run")
    assert nats == event["nats_per_token"]
    assert f"frozen weights from {folder}/base/checkpoints/0" in said
    assert abs(nats - scored(capsys, "--run", folder / "base")[0]) > np.finfo(np.float32).eps


def test_weights_beside_a_whole_checkpoint_have_no_effect(place, capsys):
    folder, _ = place
    word = f"--config.checkpoint.init_from={folder / 'base'}"
    assert main(["--run", str(folder / "base"), word]) == 2
    assert "`checkpoint.init_from` has no effect" in capsys.readouterr().err
