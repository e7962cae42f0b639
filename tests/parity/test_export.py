"""Exported models in transformers: no key too many or too few, same logits, texts and gradients."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moejax.config.schema import DataConfig, MeshConfig
from moejax.data.prepare import command as prepare
from moejax.data.tokenizer import FileTokenizer
from moejax.serve.command import main as generate
from tests.data.chats import CHATML, ONE, write_model
from tests.hf.golden import cases_of
from tests.parity import ours

pytestmark = pytest.mark.parity

LOGITS, GRADIENTS = 1e-5, 1e-4  # of the largest logit, and of a gradient's norm
SHAPE, PROMPT = (4, 40), 8  # 32 tokens are continued
FOUR, EIGHT = MeshConfig(expert=2, tensor=2), MeshConfig(expert=4, tensor=2, nodes=2)
# Of each family the shapes that are odd on one device, and those that fit a mesh on some route.
ROUTES = {
    "mixtral": (EIGHT, {"route": "two_level_merge"}),
    "deepseek_v3": (FOUR, {"route": "split"}),
    "gpt_oss": (FOUR, {"route": "merge", "route_chunks": 2}),
    "qwen3_moe": (FOUR, {"route": "duplicate"}),
    "qwen2_moe": (FOUR, {"route": "merge"}),
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


def data_of(tmp_path, kind):
    """Settings of a run's data, and the size of its vocabulary."""
    if kind == "bytes":
        return DataConfig(sequence_length=SHAPE[1]), 257
    model = write_model(tmp_path / "model", template=CHATML)
    if kind == "eos":
        model.with_name("tokenizer_config.json").unlink()
    row = {"messages": ONE} if kind == "chat" else {"text": "all of it"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [tmp_path / "rows.jsonl", "--tokenizer", model, "--out", tmp_path / "t"]
    words += ["--eval-fraction", 0, *(["--chat"] if kind == "chat" else [])]
    assert prepare.main(list(map(str, words))) == 0
    files = (str(tmp_path / "t.train.bin"),)
    data = DataConfig("tokens", files, sequence_length=SHAPE[1])
    return data, FileTokenizer(model).vocab_size


@pytest.mark.parametrize("kind", ["bytes", "eos", "bos", "chat"])
def test_an_export_writes_the_text_that_generate_writes(tmp_path, theirs, capsys, kind):
    data, size = data_of(tmp_path, kind)
    case = cases_of("mixtral")["even, llama3 positions"]
    case = case | {"config": case["config"] | {"vocab_size": size}}
    cfg = replace(ours.config_for(case, MeshConfig(), SHAPE), data=data)
    ours.export(ours.random_model("mixtral", cfg), tmp_path / "run", tmp_path / "out")
    prompt, chat = "What is a mesh?", kind == "chat"
    words = ["--run", str(tmp_path / "run"), "--prompt", prompt, "--tokens", "24", "--json"]
    words += ["--config.mesh.replica=8", "--config.train.batch_sequences=8"]
    capsys.readouterr()
    assert generate([*words, *(["--chat"] if chat else [])]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    ids, continuation = theirs.written(tmp_path / "out", prompt, 24, chat=chat)
    assert len(text["tokens"]) > 1
    assert (text["prompt_tokens"], text["text"]) == (len(ids), continuation)
