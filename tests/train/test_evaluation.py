import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moejax.data import tokens
from moejax.train import evaluation
from moejax.train.evaluation import ASK_EVERY, evaluate, finish
from tests.cases import small_config
from tests.data.token_files import write_marked
from tests.train.running import initial_state, stream


def two_nats(state, batch):
    """A model that needs two nats for every target."""
    return np.float32(2 * np.sum(np.asarray(batch.target_BT) >= 0))


def event_of(folder):
    """The one event that was recorded."""
    (event,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return event


@pytest.mark.parametrize(("length", "limit"), [(300, None), (257, None), (300, 2), (1000, 3)])
def test_nats_are_of_targets_and_bits_of_bytes(running, tmp_path, length, limit):
    # 8 x 16 targets a batch: the last batch of 300 tokens is padded by two thirds.
    held_out = stream(length, num_bytes=517)
    run, shown = running(small_config(), held_out=held_out, evaluate=two_nats)
    evaluate(run, initial_state(), 5, limit=limit)
    event = event_of(tmp_path)
    assert event["event"] == ("final_eval" if limit is None else "eval")
    assert (event["step"], event["nats_per_token"]) == (5, 2)
    bits = 2 / math.log(2) * (length - 1) / 517
    assert event["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert f"{bits:.3f} bits per byte, 2.0000 nats per token" in shown.getvalue()


def test_an_evaluation_is_given_up_when_the_run_shall_stop(running, tmp_path):
    scored = []

    def score(state, batch):
        scored.append(batch)
        return two_nats(state, batch)

    run, shown = running(small_config(), held_out=stream(5000), evaluate=score)
    evaluate(run, initial_state(), 5, limit=None, asked=lambda: len(scored) > 3)
    assert len(scored) == ASK_EVERY
    assert "the evaluation is given up" in shown.getvalue()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_only_marked_targets_count(running, tmp_path):
    pairs = [(b"question", b"answer")] * 20
    held_out = tokens.open_files([str(write_marked(tmp_path, pairs))], "bin", model_vocab=264)
    run, _ = running(small_config(), held_out=held_out, evaluate=two_nats)
    evaluate(run, initial_state(), 5, limit=None)
    event = event_of(tmp_path)
    assert event["nats_per_token"] == 2
    assert event["bits_per_byte"] == pytest.approx(2 / math.log(2), rel=1e-12)


def test_an_evaluation_that_meets_no_target_has_no_mean(running, tmp_path):
    pairs = [(b"q" * 500, b"a")]
    held_out = tokens.open_files([str(write_marked(tmp_path, pairs))], "bin", model_vocab=264)
    run, shown = running(small_config(), held_out=held_out, evaluate=two_nats)
    evaluate(run, initial_state(), 5, limit=1)
    event = event_of(tmp_path)
    assert (event["nats_per_token"], event["bits_per_byte"], event["targets"]) == (None, None, 0)
    assert "(0 tokens): no targets" in shown.getvalue()


def test_all_targets_are_measured_once(running, tmp_path):
    counted = []

    def count(state, batch):
        counted.append(int(np.sum(np.asarray(batch.target_BT) >= 0)))
        return np.float32(0)

    run, _ = running(small_config(), held_out=stream(300), evaluate=count)
    evaluate(run, initial_state(), 1, limit=None)
    assert counted == [128, 128, 43]
    assert "bits_per_byte" not in event_of(tmp_path), "the size of the text is not known"


def logits_of(token, value):
    """What the last positions give: one logit is not 0."""
    logits_BV = np.zeros((8, 64), np.float32)
    logits_BV[:, token] = value
    return SimpleNamespace(addressable_data=lambda _: logits_BV)


@pytest.mark.parametrize(("value", "early"), [(math.nan, True), (math.inf, True), (0.0, False)])
def test_a_sample_of_logits_that_are_not_finite_ends_early(running, value, early):
    cfg = small_config(train={"sample_tokens": 4, "sample_prompt": "a"})
    run, shown = running(cfg, next_logits=lambda state, prompt: logits_of(3, value))
    finish(run, initial_state())
    assert ("the sample ends early" in shown.getvalue()) == early


@pytest.mark.parametrize("held_out", [None, stream(300)], ids=["nothing", "held_out"])
def test_the_last_line_says_where_the_run_is_and_how_to_look_at_it(running, held_out):
    cfg = replace(small_config(train={"sample_tokens": 0}), run_dir="runs/my run")
    run, shown = running(cfg, held_out=held_out, evaluate=two_nats)
    finish(run, initial_state())
    *before, last = shown.getvalue().splitlines()
    where = "'runs/my run'"
    command = f"moejax report {where} --out report.html"
    assert last == f"done: {where} at step 20; look at it: {command}"
    assert any("nothing was held out" in line for line in before) == (held_out is None)


def test_a_sample_begins_as_a_document_and_sees_the_last_tokens(running):
    cfg = small_config(train={"sample_tokens": 40, "sample_prompt": "a"})
    seen = []

    def next_logits(state, prompt):
        window_BT, length = prompt
        seen.append(np.asarray(window_BT)[0, :length].tolist())
        return logits_of(len(seen), 1e4)  # all chance to another token at every step

    run, _ = running(cfg, next_logits=next_logits)
    finish(run, initial_state())
    T = run.train_step.abstract_prompt()[0].shape[1]
    eos_id = run.inputs.tokenizer.eos_id
    tokens = [eos_id, ord("a"), *range(1, 41)]
    assert seen == [tokens[:end][-T:] for end in range(2, 42)]
    assert len(seen[0]) < T == len(seen[-1])


def test_a_token_is_drawn_by_its_chance_at_the_temperature(monkeypatch):
    monkeypatch.setattr(evaluation, "TEMPERATURE", 0.5)
    chance_V, draw = np.array([0.1, 0.6, 0.3]), np.random.default_rng(0)
    drawn = [evaluation._drawn(np.log(chance_V), draw) for _ in range(2000)]
    wanted_V = chance_V**2 / np.sum(chance_V**2)
    np.testing.assert_allclose(np.bincount(drawn) / len(drawn), wanted_V, atol=0.03)
