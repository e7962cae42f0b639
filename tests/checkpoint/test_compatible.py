import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.checkpoint.compatible import (
    SHAPES,
    check_resumable,
    check_same_data,
    check_same_weights,
    describe_run,
    fingerprint,
    rate_after,
    rate_notes,
    same_reduction,
)
from moejax.config.fields import fields, get_value
from moejax.config.load import from_dict, to_dict
from moejax.config.schema import Config, LinearConfig, OptimizerConfig
from moejax.errors import InputError
from moejax.step.optimizer import learning_rate
from tests.cases import on_nodes, small_config, step_for


def changed(name, value, cfg=None):
    """A config with one setting changed."""
    nested = to_dict(cfg or Config())
    *groups, last = name.split(".")
    inner = nested
    for group in groups:
        inner = inner[group]
    inner[last] = value
    return from_dict(nested)


# What another value of a setting is, where it is not twice the number or the other truth.
OTHER = {
    "model.ahead_block": ("full", "dense"),
    "moe.slots": 1,
    "moe.slots_from": "last",
    "model.layer_attention": ["full", "window", "full", "window"],
    "model.layer_mlps": ["experts", "dense", "experts", "experts"],
    "model.layers_before_stages": 1,
    "moe.shared_hidden": 7,
    "model.stage_chunks": 2,
    "model.attention": "latent",
    "model.linear.form": "none",
    "model.positions": "none",
    "moe.latent": 8,
    "model.rope_width": 4,
    "model.q_latent": 16,
    "model.kv_latent": 16,
    "model.value_width": 6,
    "model.full_attention_every": 2,
    "model.rope.attention_factor": 1.5,
    "model.rope.mscale": 0.7,
    "model.rope.mscale_all_dim": 0.7,
    "model.qk_norm": "head",
    "model.block_norm": "both",
    "model.full_attention.head_width": 6,
    "model.full_attention.num_kv_heads": 2,
    "model.full_attention.turned_channels": 4,
    "model.score_scale": 0.2,
    "model.moe_every": 2,
    "model.activation": "relu2",
    "model.predict_ahead": 1,
    "model.sliding_window": 8,
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "model.rope.scaling": "yarn",
    "moe.capacity_factor": 2.0,
    "moe.implementation": "blocked",
    "moe.router.score": "sigmoid",
    "moe.router.jitter": 0.1,
    "moe.router.balance_over": "sequence",
    "moe.router.bias_update_rate": 0.01,
    "moe.router.quantile_bins": 100,
    "moe.router.forced": "balanced",
}

REFUSED = {
    "model.width": 64,
    "model.rope.theta": 5e5,
    "moe.router.score": "sigmoid",
    "data.source": "tokens",
    "data.shuffle": False,
    "lora.rank": 4,
    "optimizer.name": "muon",
    "train.batch_sequences": 16,
    "train.seed": 1,
}
ALLOWED = {
    "run_dir": "elsewhere",
    "route": "merge",
    "mesh.nodes": 2,
    "mesh.replica": 2,
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "model.scan_layers": False,
    "moe.implementation": "blocked",
    "lora.base_dtype": "bfloat16",
    "optimizer.learning_rate": 1e-4,
    "train.num_steps": 1000,
    "train.micro_batches": 2,
    "checkpoint.keep": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_checkpoint_depends_on_cannot_change(name):
    with pytest.raises(InputError) as raised:
        check_resumable(to_dict(Config()), changed(name, REFUSED[name]), step=5)
    before, now = (get_value(cfg, name) for cfg in (Config(), changed(name, REFUSED[name])))
    assert f"{name}: {before} -> {now}" in str(raised.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_it_does_not_depend_on_may_change_and_is_told(name):
    told = check_resumable(to_dict(Config()), changed(name, ALLOWED[name]), step=5)
    assert len(told) == 1
    assert told[0].startswith(f"{name}: ")
    assert told[0].endswith(f" -> {ALLOWED[name]}")


def test_a_replica_axis_left_open_is_no_change():
    saved = to_dict(changed("mesh.replica", 4))
    assert check_resumable(saved, changed("mesh.replica", None), step=5) == []
    assert check_resumable(to_dict(Config()), Config(), step=200) == []


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 7, 0.25])
def test_rates_that_are_told_are_those_of_the_step(schedule, warmup):
    cfg = OptimizerConfig(schedule=schedule, warmup_steps=warmup, final_fraction=0.25)
    of_step = learning_rate(cfg, 40, cfg.learning_rate)
    told = [rate_after(cfg, updates, 40) for updates in range(50)]
    np.testing.assert_allclose(told, [of_step(n) for n in range(50)], rtol=1e-5, atol=1e-9)


def test_a_decayed_run_that_goes_on_with_more_steps_tells_both_rates():
    # Cosine from 1e-3 to a quarter at step 200; of 400 steps that is the middle: five eighths.
    decayed = changed("optimizer.final_fraction", 0.25, changed("optimizer.learning_rate", 1e-3))
    decayed = changed("optimizer.warmup_steps", 0, decayed)
    longer = changed("train.num_steps", 400, decayed)
    (told,) = rate_notes(to_dict(decayed), longer, step=200)
    assert told == (
        "learning rate after step 200: 0.00025 as the checkpoint's run had it, now 0.000625, by "
        "its schedule over 400 steps, not 200"
    )
    assert rate_notes(to_dict(decayed), decayed, step=100) == []
    steady = changed("optimizer.schedule", "constant", decayed)
    assert rate_notes(to_dict(steady), changed("train.num_steps", 400, steady), step=200) == []
    (told,) = rate_notes(to_dict(steady), changed("optimizer.learning_rate", 2e-3, steady), step=9)
    assert told.endswith("0.001 as the checkpoint's run had it, now 0.002")


def test_only_the_refused_changes_are_listed():
    cfg = changed("train.seed", 3, changed("train.num_steps", 300))
    with pytest.raises(InputError, match=r"train\.seed: 0 -> 3") as raised:
        check_resumable(to_dict(Config()), cfg, step=5)
    assert "num_steps" not in str(raised.value)


def test_a_run_does_not_go_back():
    cfg = changed("train.num_steps", 100)
    assert check_resumable(to_dict(Config()), cfg, step=100)
    with pytest.raises(InputError, match=r"step 101, train\.num_steps is 100"):
        check_resumable(to_dict(Config()), cfg, step=101)


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer.clip_norm", None), ("optimizer.schedule", "linear")]
)
def test_an_allowed_change_of_the_optimizer_keeps_its_state(name, value):
    cfg = small_config()
    states = [step_for(c).abstract.optimizer for c in (cfg, changed(name, value, cfg))]
    assert states[0] == states[1]


def test_weights_may_go_into_a_run_with_other_data_and_optimizer():
    cfg = dataclasses.replace(Config(), optimizer=changed("optimizer.name", "muon").optimizer)
    check_same_weights(to_dict(Config()), changed("train.seed", 9, cfg))
    check_same_weights(to_dict(Config()), changed("model.sliding_window", 9))


def test_weights_of_a_benchmark_begin_no_other_run():
    forced = changed("moe.router.forced", "balanced")
    with pytest.raises(InputError, match=r"`moe\.router\.forced` = balanced"):
        check_same_weights(to_dict(forced), Config())
    check_same_weights(to_dict(forced), forced)
    check_same_weights(to_dict(Config()), forced)


def test_weights_of_another_shape_are_refused():
    """Which settings: `test_shapes_lists_what_changes_the_shapes_of_weights_and_nothing_else`."""
    said = r"checkpoint\.init_from.*model\.width: \d+ -> 64, moe\.num_experts: \d+ -> 4\. "
    with pytest.raises(InputError, match=said):
        check_same_weights(
            to_dict(Config()), changed("model.width", 64, changed("moe.num_experts", 4))
        )


def stream(**digests):
    """The content of a run: files by name, and a held-out one."""
    files = [{"name": name, "digest": digest, "tokens": 1000} for name, digest in digests.items()]
    return {"train": files, "held_out": [{"name": "held", "digest": "h", "tokens": 9}]}


DATA = {
    "other content": ({"a": "1", "b": "3"}, "data.train_files: b has other content"),
    "one more": ({"a": "1", "b": "2", "c": "3"}, "data.train_files: c is new"),
    "one less": ({"a": "1"}, "data.train_files: b is gone"),
    "swapped": ({"a": "2", "b": "1"}, "a has other content (1,000 tokens, had 1,000), b has other"),
    "in another order": ({"b": "2", "a": "1"}, "the same files in another order"),
}


@pytest.mark.parametrize("case", DATA)
def test_other_data_is_refused_unless_told_to_go_on(case):
    now, said = DATA[case]
    saved = {"data": stream(a="1", b="2")}
    with pytest.raises(InputError, match="data differs from the checkpoint's") as raised:
        check_same_data(saved, stream(**now), allowed=False)
    assert said in str(raised.value)
    assert "checkpoint.allow_changed_data" in str(raised.value)
    told = check_same_data(saved, stream(**now), allowed=True)
    assert len(told) == 1
    assert said in told[0]


def test_many_changed_files_are_counted():
    now = {f"file{number}": "x" for number in range(9)}
    told = check_same_data({"data": stream(a="1")}, stream(**now), allowed=True)
    assert "and 6 more" in told[0]


def test_the_same_data_is_no_change():
    saved = {"data": stream(a="1", b="2")}
    assert check_same_data(saved, stream(a="1", b="2"), allowed=False) == []
    # Moved together with their settings, or renamed where the glob finds them in the same order.
    assert check_same_data(saved, stream(x="1", y="2"), allowed=False) == []
    # The first format did not say.
    assert check_same_data({}, stream(a="5"), allowed=False) == []


def test_changed_held_out_text_is_a_change():
    now = stream(a="1")
    now["held_out"] = []
    with pytest.raises(InputError, match=r"data\.eval_files: held is gone"):
        check_same_data({"data": stream(a="1")}, now, allowed=False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {"route": "merge"}, True),
        ({}, {"nodes": 4}, False),
        ({}, {"weights": "whole"}, False),
        ({}, {"weights": "folded"}, False),
        ({"mesh": (8, 1, 1, 1)}, {"mesh": (8, 1, 1, 1), "weights": "folded"}, True),
        ({"mesh": (4, 2, 1, 1)}, {"mesh": (4, 1, 2, 1)}, False),
        ({"mesh": (1, 8, 1, 1)}, {"mesh": (8, 1, 1, 1)}, False),
        ({"codec": "none"}, {"codec": "none", "nodes": 4}, True),
        ({"codec": "none"}, {}, False),
        ({"codec": "int8+feedback"}, {"codec": "int4+feedback"}, False),
    ],
    ids=str,
)
def test_a_fingerprint_is_of_what_decides_the_meaning_of_what_codecs_keep(one, other, same):
    first, second = (fingerprint(step_for(on_nodes(**changes))) for changes in (one, other))
    assert (first == second) == same


def test_a_manifest_says_what_a_resume_compares():
    train_step, content = step_for(on_nodes()), stream(a="1")
    said = describe_run(train_step, content)
    assert said["config"] == to_dict(train_step.cfg)
    assert said["reduction"] == fingerprint(train_step) is not None
    assert said["data"] == content
    assert same_reduction(said, train_step)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in fields() if name.startswith(("model.", "moe."))])
def test_shapes_lists_what_changes_the_shapes_of_weights_and_nothing_else(name):
    changes = []
    alone = {"model.linear.": ("gated_delta", "mamba2"), "model.full_attention.": ("full",)}
    alone |= {"model.indexer.": ("sparse",)}
    kinds = alone.get(name.rpartition(".")[0] + ".", ("grouped", "latent"))
    for kind in kinds:
        cfg, described = every_kind_of_layer(kind)
        if name == "model.ahead_block":  # of a model that has one
            cfg = changed("model.predict_ahead", 1, cfg)
            described = shapes_of_weights(cfg)
        before = get_value(cfg, name)
        value = OTHER.get(name, not before if isinstance(before, bool) else (before or 0.5) * 2)
        value = "grouped" if (name, kind) == ("model.attention", "latent") else value
        assert value != before
        changes.append(shapes_of_weights(changed(name, value, cfg)) != described)
    # The same shapes, but another meaning of every norm's weights.
    meaning = name == "model.zero_centered_norms"
    assert any(changes) == (name in SHAPES and not meaning)


@functools.cache
def every_kind_of_layer(attention):
    """A model that has a dense layer, expert layers and shared experts; shapes of its weights."""
    model = {"num_layers": 4, "first_dense_layers": 1, "num_kv_heads": 4, "sliding_window": 5}
    if attention in ("gated_delta", "mamba2"):
        linear = LinearConfig(attention, 2, 4, key_width=6, value_width=4, convolution=3)
        model |= {"linear": linear, "full_attention_every": 2, "sliding_window": None}
    elif attention == "full":
        model |= {"full_attention_every": 2, "attention_sinks": True}
    elif attention == "sparse":
        model |= {"attention": "sparse", "head_width": 8, "rope_width": 2, "kv_latent": 8}
        model |= {"q_latent": 8, "sliding_window": None}
    else:
        model |= {"attention": attention, "head_width": 8, "rope_width": 2, "kv_latent": 8}
    cfg = small_config(model=model, moe={"num_shared_experts": 1, "num_experts": 4})
    return cfg, shapes_of_weights(cfg)


def shapes_of_weights(cfg):
    """Paths and shapes of what `checkpoint.init_from` reads."""
    state = step_for(cfg).abstract
    leaves = jax.tree_util.tree_flatten_with_path((state.params, state.router_bias))[0]
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
