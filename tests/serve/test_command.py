"""`moejax generate` on the devices of the tests: one checkpoint, a few prompts."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import moejax
from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.writer import Checkpoints
from moejax.config.schema import PlanConfig
from moejax.serve import flags
from moejax.serve.command import main
from moejax.serve.experts import places
from tests.cases import CERTAIN, small_config, step_for

TOKENS = ("--tokens", "5")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one checkpoint; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("run")
    cfg = small_config((2, 1, 2, 2), model={"vocab_size": 264, "mlp_hidden": 384}, moe=CERTAIN)
    train_step = step_for(dataclasses.replace(cfg, plan=PlanConfig(mode="hand")))
    writer = Checkpoints(folder / "checkpoints", keep=2)
    writer.save(3, train_step.init(), describe_run(train_step, {"train": [], "held_out": []}))
    writer.close()
    return folder


def generated(capsys, run, *words, code=0):
    assert main(["--run", str(run), *TOKENS, *map(str, words)]) == code
    return capsys.readouterr()


def test_a_prompt_is_continued_as_text_as_json_and_while_it_grows(run, capsys):
    found = json.loads(generated(capsys, run, "--prompt", "def ", "--json").out)
    (text,) = found["texts"]
    assert (found["step"], found["temperature"]) == (3, 0.0)
    assert (text["prompt"], text["prompt_tokens"]) == ("def ", 5), "eos begins a document"
    assert len(text["tokens"]) == 5 or text["ended"] == "stop"
    shown = generated(capsys, run, "--prompt", "def ")
    assert shown.out == f"def {text['text']}\n"
    assert "tokens in" in shown.err
    assert "mesh: replica 2, expert 2, tensor 2; no call gathers weights\n" in shown.err
    assert generated(capsys, run, "--prompt", "def ", "--stream").out == shown.out


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_text_ends_before_a_stop_string(run, capsys):
    words = ["--prompt", "def ", "--json", "--temperature", "1.3", "--seed", "3"]
    (whole,) = json.loads(generated(capsys, run, *words).out)["texts"]
    # The second of its characters, or of the marks of broken ones, ends it.
    stop = whole["text"][1]
    cut = whole["text"].index(stop)
    (text,) = json.loads(generated(capsys, run, *words, "--stop", stop, "--stop", "no").out)[
        "texts"
    ]
    assert (text["text"], text["ended"]) == (whole["text"][:cut], "stop")
    assert text["tokens"] == whole["tokens"][: len(text["tokens"])]
    shown = generated(capsys, run, *words[:2], *words[3:], "--stop", stop, "--stream").out
    assert shown == f"def {text['text']}\n"


@pytest.mark.usefixtures("unchecked_annotations")
def test_routing_is_written_beside_the_texts(run, capsys, tmp_path):
    (tmp_path / "prompts").write_text("def \nclass\n")
    words = ["--prompts", tmp_path / "prompts", "--json"]
    routing = ("--routing", tmp_path / "routing.npz")
    texts = json.loads(generated(capsys, run, *words, *routing).out)["texts"]
    with np.load(tmp_path / "routing.npz", allow_pickle=False) as found:
        prompts, sizes = found["prompt_tokens_N"].tolist(), found["tokens_N"].tolist()
        assert prompts == [text["prompt_tokens"] for text in texts]
        first = found["id_T"][prompts[0] : sizes[0]].tolist()
        assert (first, found["layer_L"].tolist()) == (texts[0]["tokens"], [0])
        expert_TLK, count = found["expert_TLK"], int(found["num_experts"])
    assert expert_TLK.shape == (sum(sizes), 1, 2)
    unknown = (expert_TLK == -1).all(axis=(1, 2))
    assert unknown.sum() == sum(text["ended"] == "length" for text in texts)
    assert (expert_TLK[~unknown] >= 0).all()
    assert (expert_TLK < count).all()
    assert (
        "routing cannot be written"
        in generated(capsys, run, *words, "--routing", tmp_path / "a.json", code=2).err
    )


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_message_is_written_by_a_chat_template(run, capsys, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    words = ["--chat", "--chat-template", template, "--prompt", "def "]
    (text,) = json.loads(generated(capsys, run, *words, "--json").out)["texts"]
    assert (text["prompt"], text["prompt_tokens"]) == ("def ", len("udef a"))
    assert generated(capsys, run, *words).out == f"def \n{text['text']}\n"
    assert generated(capsys, run, *words, "--stream").out == f"def \n{text['text']}\n"


@pytest.mark.usefixtures("unchecked_annotations")
def test_lines_of_a_file_are_continued_together_and_on_another_mesh(run, capsys, tmp_path):
    (tmp_path / "prompts").write_text("def \n\nclass Word:\nx\n")
    words = ["--prompts", tmp_path / "prompts", "--json", "--temperature", "0.9", "--top-k", "50"]
    found = json.loads(generated(capsys, run, *words).out)["texts"]
    assert [text["prompt"] for text in found] == ["def ", "class Word:", "x"]
    # Draws depend on the number of a prompt, not on what else is in the file.
    alone = [w for w in words if w not in ("--prompts", tmp_path / "prompts")]
    axes = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    (first,) = json.loads(generated(capsys, run, "--prompt", "def ", *alone, *axes).out)["texts"]
    assert first == found[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "x", "--top-p", "1.5"], "`--top-p` is out of range. Got 1.5"),
        (["--prompt", "x", "--tokens", "0"], "`--tokens` is out of range. Got 0"),
        (["--prompt", "x", "--stop", ""], "stop string is no text"),
        (["--prompt", "x", "--stream", "--json"], "`--stream` has no effect with `--json`"),
        (["--prompts", "none.txt", "--stream"], "`--stream` has no effect with `--prompts`"),
        (["--prompt", "x", "--chat"], "no chat template. The tokenizer of bytes has none"),
        (["--prompt", "x", "--chat-template", "x"], "`--chat-template` has no effect"),
        (["--prompt", "x", "--step", "9"], "no checkpoint of step 9"),
        (["--prompt", "x", "--run", "nowhere"], "no finished checkpoint"),
        (["--prompt", "x", "--eos", "</s>"], "`--eos` has no effect"),
        (["--prompt", "x", "--config.moe.capacity_factor=2"], "`moe.capacity_factor` has no"),
        (["--prompt", "x", "--config.model.scan_layers=false"], "`model.scan_layers` has no"),
        (["--prompt", "x", "--config.train.seed=3"], "`train.seed` has no effect"),
        (["--prompt", "x", "--follow-load"], "`--follow-load` has no effect without"),
    ],
)
def test_bad_input_is_one_line(run, capsys, words, said):
    err = generated(capsys, run, *words, code=2).err
    assert err.startswith(f"moejax: error: {said}")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("unchecked_annotations")
def test_hot_experts_move_while_texts_are_written_which_stay_the_same(
    run, capsys, tmp_path, monkeypatch
):
    kept = []

    class Kept(places.Places):
        def __init__(self, *given):
            super().__init__(*given)
            kept.append(self)

    monkeypatch.setattr(flags, "Places", Kept)
    monkeypatch.setattr(flags, "STEPS", 2)
    monkeypatch.setattr(places, "STEPS", 2)
    monkeypatch.setattr(places, "ENOUGH", 1)
    (tmp_path / "prompts").write_text("def \nclass Word:\nx\n")
    words = ["--prompts", tmp_path / "prompts", "--json", "--tokens", "12"]
    wanted = json.loads(generated(capsys, run, *words).out)
    slots = ("--expert-slots", "1", "--follow-load")
    found = generated(capsys, run, *words, *slots)
    assert json.loads(found.out) == wanted
    assert kept[0].replanned > 0
    assert "experts: slots on each device: 1; hot ones move there, a layer's at most every 2 " in (
        found.err
    )
    alone = ("--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    err = generated(capsys, run, *words, *slots, *alone, code=2).err
    assert "`expert_slots` has no effect. Got 1. Copies go to other devices" in err


def test_slots_of_a_model_without_experts_are_refused_before_a_device_is_touched(
    capsys, monkeypatch
):
    dense = small_config(model={"num_layers": 1, "moe_every": None})
    assert not dense.model.has_experts
    monkeypatch.setattr(flags, "choose", lambda *_: SimpleNamespace(cfg=dense))
    monkeypatch.setattr(flags, "place", lambda *_: pytest.fail("a device was touched"))
    words = ("--prompt", "x", "--expert-slots", "1", "--follow-load")
    err = generated(capsys, "dense", *words, code=2).err
    said = "`--expert-slots` has no effect. Got 1. The model has no experts. Leave it out."
    assert err == f"moejax: error: {said}\n"


@pytest.mark.usefixtures("unchecked_annotations")
def test_texts_longer_than_those_of_training_are_warned_about(run, capsys, tmp_path):
    longer = "texts of up to 20 tokens, and the run trained on sequences of 16"
    words = ["--prompt", "x" * 14, "--json"]
    found = generated(capsys, run, *words)
    assert f"warning: {longer}" in found.err
    (text,) = json.loads(found.out)["texts"]
    # A later checkpoint that is damaged is passed over, and told.
    copy = shutil.copytree(run / "checkpoints/3", tmp_path / "run/checkpoints/3").parent
    shutil.copytree(copy / "3", copy / "5")
    (copy / "5/manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=r"checkpoints/5"):
        model = moejax.Engine(tmp_path / "run")
    assert model.step == 3
    with pytest.warns(UserWarning, match=f"^{longer}"):
        assert model.generate("x" * 14, tokens=5) == [text["text"]]
