"""`moejax.Engine`: an imported golden model's logits are those of transformers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers

import moejax
from moejax.convert.importing import import_folder
from moejax.errors import InputError, RunError
from moejax.serve.command import main as generate
from tests.hf.golden import cases_of, golden_folder

LOGITS = 1e-5  # of the largest logit, as in tests/hf/test_parity.py
EXPERTS = ("mesh.expert=2", "mesh.tensor=2", "mesh.replica=2")


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked: whole models are traced, whose layers have tests."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An imported Mixtral with a tokenizer of words, and its golden case."""
    place = tmp_path_factory.mktemp("model")
    case = cases_of("mixtral")["even, llama3 positions"]
    folder = golden_folder(place / "mixtral", case)
    words = {"</s>": 0} | {f"w{number}": number for number in range(1, 96)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))
    import_folder(folder, place / "imported")
    return place / "imported", case


@pytest.fixture(scope="module")
def model(imported):
    return moejax.Engine(imported[0], overrides=EXPERTS)


def test_logits_are_those_of_transformers(model, imported):
    case = imported[1]
    logit_BTV = model.logits(case["tokens"])
    assert logit_BTV.dtype == np.float32
    assert logit_BTV.shape == (*np.shape(case["tokens"]), model.vocab_size)
    found = logit_BTV[:, case["positions"]].astype(np.float64)
    top = found.max(axis=-1, keepdims=True)
    logsumexp = top[..., 0] + np.log(np.exp(found - top).sum(axis=-1))
    bound = LOGITS * case["largest"]
    np.testing.assert_allclose(found[..., case["ids"]], case["logits"], rtol=0, atol=bound)
    np.testing.assert_allclose(logsumexp, case["logsumexp"], rtol=0, atol=bound)


def test_one_sequence_has_the_logits_that_it_has_among_others(model, imported):
    tokens = imported[1]["tokens"]
    several, alone = model.logits(tokens), model.logits(tokens[1][:7])
    assert alone.shape == (7, model.vocab_size)
    bound = LOGITS * imported[1]["largest"]
    np.testing.assert_allclose(alone, several[1, :7], rtol=0, atol=bound)
    # More sequences than go at a time.
    rows = np.array(tokens[:1] * 20)[:, :5]
    many = model.logits(rows)
    assert many.shape == (20, 5, model.vocab_size)
    np.testing.assert_allclose(many, several[:1, :5].repeat(20, 0), rtol=0, atol=bound)


def test_texts_are_those_of_the_command(model, imported, capsys):
    words = ["--run", str(imported[0]), "--prompt", "w3 w40", "--tokens", "6", "--json"]
    assert generate([*words, *(f"--config.{setting}" for setting in EXPERTS)]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert model.generate("w3 w40", tokens=6) == [text["text"]]
    # The likeliest tokens, one after the other, by the logits.
    ids = [3, 40]
    for wanted in text["tokens"]:
        ids.append(int(model.logits(ids)[-1].argmax()))
        assert ids[-1] == wanted
    assert len(ids) > 3
    assert model.generate([]) == []
    stop = text["text"][3:6]
    before = text["text"][: text["text"].index(stop)]
    assert model.generate("w3 w40", tokens=6, stop=stop) == [before]
    assert model.generate("w3 w40", tokens=6, stop=["absent", stop]) == [before]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[1, 2], [3]], "ids have several lengths"),
        ([], r"no token ids\. Got float64 of shape \(0,\)"),
        ([[[1]]], r"no token ids\. Got int64 of shape \(1, 1, 1\)"),
        ([0.5], r"no token ids\. Got float64 of shape \(1,\)"),
        ([3, -1], r"unknown token\. Got id -1"),
        ([3, 10**6], r"unknown token\. Got id 1000000\. Ids are at least 0 and below"),
    ],
)
def test_what_is_no_sequence_of_ids_is_refused(model, ids, said):
    with pytest.raises(InputError, match=said):
        model.logits(ids)


def test_options_are_checked(model, imported):
    with pytest.raises(InputError, match="`tokens` is out of range"):
        model.generate("a", tokens=0)
    with pytest.raises(InputError, match="out of range"):
        model.generate("a", top_p=2.0)
    with pytest.raises(InputError, match=r"no finished checkpoint"):
        moejax.Engine(imported[0].parent / "nowhere")
    with pytest.raises(InputError, match=r"`moe\.capacity_factor` has no effect"):
        moejax.Engine(imported[0], overrides=["moe.capacity_factor=2"])


def test_samples_have_ids_chances_and_experts(model, imported):
    prompts = ["w3 w40", [5, 6, 7]]
    rules = [moejax.Sampling(temperature=1.0, seed=4), moejax.Sampling(0.7, top_k=5, seed=5)]
    asked = {"tokens": [3, 5], "n": 2, "prompt_logprobs": True, "routing": True}
    samples = model.sample(prompts, sampling=rules, **asked)
    assert [one.prompt_ids for one in samples] == [[3, 40]] * 2 + [[5, 6, 7]] * 2
    layers, chosen = model._placed.cfg.model.num_layers, model._placed.cfg.moe.experts_per_token
    for one, most in zip(samples, (3, 3, 5, 5), strict=True):
        ids = [*one.prompt_ids, *one.ids]
        assert len(one.ids) == most if one.ended == "length" else len(one.ids) < most
        assert one.text.split() == [f"w{id}" for id in one.ids]
        logit_TV = model.logits(ids).astype(np.float64)
        log_TV = logit_TV - np.log(np.exp(logit_TV).sum(-1, keepdims=True))
        wanted = log_TV[np.arange(len(ids) - 1), ids[1:]]
        found = [*one.prompt_logprobs, *one.logprobs]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(model.score([ids])[0], wanted, rtol=0, atol=1e-5)
        assert one.expert_TLK.shape == (len(ids), layers, chosen)
    # One rule for all, and alone: a draw depends on the seed and on the sample's number.
    (alone,) = model.sample(prompts[:1], tokens=3, sampling=rules[0])
    assert alone.ids == samples[0].ids
    assert alone.expert_TLK is None
    assert model.sample([]) == model.score([]) == []


def test_a_stop_string_ends_a_sample(model):
    rule = moejax.Sampling(temperature=1.0, seed=4)
    how = {"tokens": 5, "sampling": rule, "routing": True}
    (whole,) = model.sample("w3 w40", **how)
    words = whole.text.split()
    assert len(words) == 5
    (found,) = model.sample("w3 w40", stop=[" " + words[2]], **how)
    kept = whole.text.index(" " + words[2])  # the space is of the token behind it
    kept = len(whole.text[:kept].split())
    assert (found.text.split(), found.ended) == (words[:kept], "stop")
    assert found.ids == whole.ids[:kept]
    assert found.logprobs == whole.logprobs[:kept]
    np.testing.assert_array_equal(found.expert_TLK, whole.expert_TLK[: 2 + kept])
    with pytest.raises(InputError, match="stop string is no text"):
        model.sample("w3", stop=[""])


def test_texts_are_ids_and_back(model):
    assert model.encode("w3 w40") == [3, 40]
    assert model.decode([3, 40]) == "w3 w40"
    np.testing.assert_array_equal(model.score(["w3 w40 w5"])[0], model.score([[3, 40, 5]])[0])
    assert model.score([[3]])[0].shape == (0,)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"n": 0}, "`n` is out of range"),
        ({"n": 1.5}, "`n` is out of range. Got 1.5. It is a whole number"),
        ({"tokens": 2.5}, "`tokens` is out of range. Got 2.5. It is a whole number"),
        ({"stop": [1]}, "stop string is no text. Got 1"),
        ({"n": 2}, "`n` has no effect. Got 2 at temperature 0"),
        ({"tokens": [1, 2]}, "tokens do not fit the prompts. Got 2 tokens for 1 prompts"),
        ({"sampling": [moejax.Sampling()] * 3}, "rules do not fit the prompts. Got 3 rules"),
    ],
)
def test_rules_of_samples_are_checked(model, how, said):
    with pytest.raises(InputError, match=said):
        model.sample(["w3"], **how)


@pytest.mark.parametrize("prompts", [[[[3, 4], [5, 6]]], [3, 4]])
def test_a_prompt_is_one_list_of_ids(model, prompts):
    with pytest.raises(
        InputError, match=r"no token ids\..* prompts are a list of them: \[\[1, 2, 3\]\]"
    ):
        model.sample(prompts)


@pytest.mark.parametrize("rule", [{"seed": 1.5}, {"top_k": 2.5}])
def test_numbers_of_rules_are_whole(rule):
    with pytest.raises(InputError, match=r"out of range\. Got .\.5\. It is a whole number"):
        moejax.Sampling(1.0, **rule).check()


def test_a_prompt_that_is_no_text_is_refused(model):
    with pytest.raises(InputError, match="prompt is no text of Unicode"):
        model.sample("w3 \ud800")


@pytest.mark.exhaustive
def test_a_stop_string_in_the_last_token_ends_the_text(model):
    """Its name is the reason, though the text is as long as it may be."""
    samples = model.sample([f"w{number}" for number in range(1, 33)], tokens=2)
    number, whole = next((n, s) for n, s in enumerate(samples, 1) if len(s.text.split()) == 2)
    last = whole.text.split()[-1]
    (cut,) = model.sample([f"w{number}"], tokens=2, stop=last)
    assert (whole.ended, cut.ended) == ("length", "stop")
    assert whole.text.startswith(cut.text)
    assert last not in cut.text


def test_ids_are_no_more_than_the_models_positions(model, monkeypatch):
    vocabulary = dataclasses.replace(model._vocabulary(False), positions=8)
    monkeypatch.setitem(model._vocabularies, False, vocabulary)
    with pytest.raises(InputError, match=r"has 5 tokens, up to 4 continue it\. The model has 8"):
        model.sample([[1] * 5], tokens=4)
    assert model.sample([[1] * 5], tokens=3)


def test_scores_that_are_not_finite_are_told(model, monkeypatch):
    broken = jax.tree.map(
        lambda x: x * np.nan if np.issubdtype(x.dtype, np.floating) else x, model._state
    )
    monkeypatch.setattr(model, "_state", broken)
    with pytest.raises(RunError, match="logits are not finite"):
        model.score([[1, 2, 3]])


def test_another_number_of_prompts_compiles_nothing_anew(model):
    programs = {len(batch): model._programs(8, len(batch), 96) for batch in ("abc", "abcd")}
    assert programs[3] is programs[4]
