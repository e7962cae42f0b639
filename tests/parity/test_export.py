"""Exported models in transformers: no key too many or too few, same logits, texts and gradients.

With adapters too, in peft; with multi-token prediction; and a model that was quantised.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from moejax.config.schema import DataConfig, MeshConfig
from moejax.convert.exporting import export_run
from moejax.convert.importing import import_folder
from moejax.data.prepare import command as prepare
from moejax.data.tokenizer import FileTokenizer
from moejax.hf.families import family_named
from moejax.serve.command import main as generate
from moejax.step.state import Batch
from tests.cases import place
from tests.data.chats import CHATML, ONE, write_model
from tests.hf.golden import FAMILIES, ONE_DEVICE, cases_of, golden_folder, load_model
from tests.hf.lora_runs import write_run
from tests.hf.random_models import SELECTION_BIASES, draw, write_folder
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
    "glm4_moe_lite": (FOUR, {"route": "merge"}),
    "deepseek_v32": (FOUR, {"route": "split"}),
    "glm_moe_dsa": (FOUR, {"route": "merge"}),
    "solar_open": (FOUR, {"route": "two_level_merge"}),
    "dots1": (EIGHT, {"route": "merge"}),
    "hy_v3": (FOUR, {"route": "duplicate"}),
    "ernie4_5_moe": (FOUR, {"route": "split"}),
    "hunyuan_v1_moe": (FOUR, {"route": "merge"}),
    "flex_olmo": (EIGHT, {"route": "two_level_merge"}),
    "granitemoe": (FOUR, {"route": "duplicate"}),
    "qwen3_5_moe_text": (FOUR, {"route": "merge"}),
    "kimi_linear": (FOUR, {"route": "split"}),
    "gemma4_text": (FOUR, {"route": "duplicate"}),
    "nemotron_h": (FOUR, {"route": "merge"}),
    "afmoe": (FOUR, {"route": "merge"}),
    "mimo_v2_flash": (FOUR, {"route": "split"}),
    "mistral4": (FOUR, {"route": "duplicate"}),
    # Of dense models: `run_config` makes fsdp of the experts' ranks.
    "llama": (FOUR, {}),
    "mistral": (FOUR, {}),
    "qwen2": (FOUR, {}),
    "qwen3": (FOUR, {}),
}
ALWAYS = ("mixtral", "deepseek_v3")  # grouped and latent attention
# All matrices but attention's last, which peft refuses in Mamba-2.
MAMBA = ("attention.w_q", "attention.w_k", "attention.w_v", "attention.w_gate", "attention.w_step")
MAMBA += ("moe.w_in", "moe.w_out", "mlp.w_in", "mlp.w_out")


def models() -> list:
    """Parameters (family, case, mesh, route settings): of each family two models."""
    found = []
    for family, (mesh, route) in ROUTES.items():
        marks = () if family in ALWAYS else pytest.mark.exhaustive
        for name in cases_of(family):
            even = name.startswith("even")
            on = (mesh, route) if even else (ONE_DEVICE, {})
            label = f"{family}-{route.get('route', 'mesh') if even else 'one device'}"
            found.append(pytest.param(family, name, *on, marks=marks, id=label))
    return found


def tokens(vocabulary, shape=SHAPE):
    return np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.int32)


def assert_close(logits, wanted, times=1):
    bound = times * LOGITS * np.abs(wanted).max()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=bound)


def even_case(family):
    """The name of the family's case that fits a mesh."""
    (name,) = (name for name in cases_of(family) if name.startswith("even"))
    return name


@pytest.mark.parametrize(("family", "name", "mesh", "route"), models())
def test_transformers_computes_the_same_with_an_export(tmp_path, theirs, family, name, mesh, route):
    cfg = ours.config_for(cases_of(family)[name], mesh, SHAPE, **route)
    model = ours.random_model(family, cfg)
    ours.export(model, tmp_path / "run", tmp_path / "out")
    loaded = theirs.load(tmp_path / "out")
    token_BT = tokens(cfg.model.vocab_size)
    assert_close(ours.logits(model, token_BT), theirs.logits(loaded, token_BT))
    prompt = token_BT[0, :PROMPT].tolist()
    text = theirs.continued(loaded, prompt, SHAPE[1] - PROMPT)
    assert ours.continued(model, prompt, SHAPE) == text
    compare_gradients(
        ours.loss_and_gradients(model, token_BT), theirs.loss_and_gradients(loaded, token_BT)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gemma4_text", "mistral4"])
def test_an_export_goes_back_into_the_model_of_images(tmp_path, theirs, family):
    """transformers finds each tensor at its place, and computes the same as before."""
    case = cases_of(family)[even_case(family)]
    whole = theirs.with_images(tmp_path / "in", case["config"])
    import_folder(tmp_path / "in", tmp_path / "imported")
    export_run(tmp_path / "imported", tmp_path / "out", dtype="float32", around=tmp_path / "in")
    again, info = type(whole).from_pretrained(
        tmp_path / "out",
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), info
    wanted, found = whole.state_dict(), again.state_dict()
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name].numpy(), x.numpy(), err_msg=name)
    token_BT = tokens(case["config"]["vocab_size"])
    np.testing.assert_array_equal(
        theirs.logits(again.eval(), token_BT), theirs.logits(whole, token_BT)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gemma4_text", "mistral4"])
def test_a_text_model_out_of_one_of_images_is_computed_and_exported(tmp_path, theirs, family):
    """The folders that transformers writes of both, and an export of what was read."""
    case = cases_of(family)[even_case(family)]
    whole = theirs.with_images(tmp_path / "in", case["config"])
    token_BT = tokens(case["config"]["vocab_size"])
    wanted = theirs.logits(whole, token_BT)
    text = theirs.load(tmp_path / "in")
    table = family_named(family)
    # What transformers makes of such a folder: the text model, or for others than Qwen again both.
    assert type(text).__name__ in (table.architecture, table.around.architecture)
    np.testing.assert_array_equal(theirs.logits(text, token_BT), wanted)
    text.save_pretrained(tmp_path / "text")
    for name in ("in", "text"):
        model = ours.Ours(family, *load_model(tmp_path / name, ONE_DEVICE, SHAPE))
        assert_close(ours.logits(model, token_BT), wanted)
    ours.export(model, tmp_path / "run", tmp_path / "out")
    assert_close(theirs.logits(theirs.load(tmp_path / "out"), token_BT), wanted)


def compare_gradients(got, wanted):
    """Compares (loss, gradients by name)."""
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    found, gradients = got[1], wanted[1]
    biases = {name for name in gradients if name.endswith(SELECTION_BIASES)}
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
    cfg = replace(ours.config_for(case, ONE_DEVICE, SHAPE), data=data)
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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "mixtral" else pytest.mark.exhaustive)
        for family in FAMILIES
    ],
)
def test_peft_computes_with_an_adapter_what_the_run_computes(tmp_path, theirs, family):
    base = golden_folder(tmp_path / "base", cases_of(family)[even_case(family)])
    targets = {"targets": MAMBA} if family == "nemotron_h" else {}
    train_step, state = write_run(tmp_path / "run", base, FOUR, SHAPE, **targets)
    for folder, adapter in (("merged", False), ("adapter", True)):
        export_run(tmp_path / "run", tmp_path / folder, dtype="float32", adapter=adapter)
    token_BT = tokens(train_step.cfg.model.vocab_size)
    wanted = ours.logits(ours.Ours(family, train_step, state), token_BT)
    before = theirs.logits(theirs.load(base), token_BT)
    changed = np.abs(wanted - before).max()
    assert changed > 1000 * LOGITS * np.abs(wanted).max(), "the adapters change nothing"
    for model in (
        theirs.load(tmp_path / "merged"),
        theirs.with_adapter(theirs.load(base), tmp_path / "adapter"),
    ):
        # A few tokens of Qwen3-Next: both folders in transformers differ by 2e-5 from each other.
        assert_close(theirs.logits(model, token_BT), wanted, 3 if family == "qwen3_next" else 1)


def losses_ahead(model, token_BT):
    """The mean loss of the tokens after the next, of each sequence alone."""
    found = []
    for row in range(len(token_BT)):
        target_BT = np.full_like(token_BT, -1)
        target_BT[row, :-1] = token_BT[row, 1:]
        batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
        _, parts = model.train_step.gradients(model.state, place(model.train_step, batch))
        found.append(float(parts.ahead))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "mesh"),
    [("deepseek_v3", ONE_DEVICE), ("deepseek_v3", FOUR), ("glm4_moe", ONE_DEVICE)],
)
def test_transformers_module_for_drafts_predicts_the_same(
    tmp_path, monkeypatch, theirs, family, mesh
):
    cfg = ours.config_for(cases_of(family)[even_case(family)], mesh, SHAPE)
    cfg = replace(cfg, model=replace(cfg.model, predict_ahead=1))
    model = ours.random_model(family, cfg)
    ours.export(model, tmp_path / "run", tmp_path / "out")
    token_BT = tokens(cfg.model.vocab_size)
    theirs.expect_layer(monkeypatch, tmp_path / "out", cfg.model.num_layers)
    wanted = theirs.losses_ahead(theirs.load(tmp_path / "out"), token_BT)
    np.testing.assert_allclose(losses_ahead(model, token_BT), wanted, rtol=1e-6)


WIDTH, HIDDEN, EXPERTS, VOCABULARY = 64, 32, 5, 97  # of the quantised model


def packed(name, rows, columns):
    """Blocks of 4-bit floats and their exponents, [E, rows, columns]."""
    rng = np.random.default_rng(len(name))
    groups = (EXPERTS, rows, columns // 32)
    blocks = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
    scales = rng.integers(122, 126, groups).astype(np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def test_4_bit_experts_of_gpt_oss(tmp_path, theirs):
    case = cases_of("gpt_oss")["top 3"]
    changes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY}
    config = {**case["config"], **changes, "quantization_config": {"quant_method": "mxfp4"}}
    size = {20: WIDTH, 10: HIDDEN, 997: VOCABULARY}
    tensors = {}
    for name, shape in case["tensors"].items():
        if name.endswith("gate_up_proj"):
            tensors |= packed(name, 2 * HIDDEN, WIDTH)
        elif name.endswith("experts.down_proj"):
            tensors |= packed(name, WIDTH, HIDDEN)
        elif name.endswith("gate_up_proj_bias"):
            tensors[name] = draw(name, (EXPERTS, 2 * HIDDEN))
        else:
            tensors[name] = draw(name, tuple(size.get(n, n) for n in shape))
    write_folder(tmp_path / "model", config, tensors)
    token_BT = tokens(VOCABULARY, (2, 24))
    model = ours.Ours("gpt_oss", *load_model(tmp_path / "model", ONE_DEVICE, token_BT.shape))
    wanted = theirs.logits(theirs.load(tmp_path / "model"), token_BT)
    assert_close(ours.logits(model, token_BT), wanted)
