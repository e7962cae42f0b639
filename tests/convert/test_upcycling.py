"""`moejax upcycle`: experts that are copies or shards of a dense MLP, and give what it gave."""

import dataclasses
import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint.arrays import StoredWeights
from moejax.checkpoint.find import locate
from moejax.checkpoint.manifest import read_manifest
from moejax.checkpoint.source import find_source, read_weights
from moejax.checkpoint.writer import Checkpoints
from moejax.config.fields import change
from moejax.config.load import load_config, to_dict
from moejax.config.schema import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from moejax.convert import importing
from moejax.convert.command import main as convert
from moejax.convert.upcycle_command import main
from moejax.hf.model import describe_anywhere
from moejax.moe.router import route
from moejax.step.state import Batch, TrainState, flat
from moejax.train.__main__ import main as train
from tests.cases import CERTAIN, place, random_batch, some_of, step_for
from tests.hf.golden import cases_of, golden_folder
from tests.integration.runs import write_tokens
from tests.oracle import oracle_loss

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

HIDDEN = 48  # of the dense MLP
BOUND = 1e-5  # nats, in float32
MODEL = ModelConfig(
    width=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_width=4,
    mlp_hidden=HIDDEN,
    moe_every=None,
    init_deviation=0.3,
)
BLOCK = "groups.0.blocks.0."


def dense_config(**model):
    return Config(
        run_dir="runs/dense",
        model=dataclasses.replace(MODEL, **model),
        data=DataConfig(sequence_length=16),
        train=TrainConfig(batch_sequences=8, num_steps=20),
    )


def weights_of(cfg, read):
    """The parameters and selection biases of a model, of arrays that `read` gives by path."""

    def tree(shapes):
        leaves = [read(path, leaf.shape) for path, leaf in flat(shapes).items()]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return [tree(shapes) for shapes in describe_anywhere(cfg)[1:]]


def drawn(path, shape):
    """Weights of a trained model: no two layers are alike, norms are near one."""
    noise = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(shape)
    return (0.3 * noise + ("norm" in path)).astype(np.float32)


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Writes the run `dense`, of random weights. Returns its config and its parameters."""
    monkeypatch.chdir(tmp_path)

    def write(lora=None, **model):
        cfg = dense_config(**model)
        params, _ = weights_of(cfg, drawn)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(zero, zero, jax.tree.map(jnp.asarray, params), {}, None, None)
        said = dataclasses.replace(cfg, lora=LoraConfig(rank=lora))
        writer = Checkpoints(tmp_path / "dense" / "checkpoints", keep=2)
        try:
            writer.save(7, state, {"config": to_dict(said)})
        finally:
            writer.close()
        return cfg, params

    return write


def upcycled(settings, *words, out="out"):
    """Runs the command, which must succeed. Returns the config and the weights that it wrote."""
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    assert main(["dense", "--out", out, *words, *flags]) == 0
    cfg, read = load_config(f"{out}/config.json"), StoredWeights(Path(out, "0")).read
    return cfg, *weights_of(cfg, lambda path, shape: read(path))


def nats(cfg, params, bias, batch):
    """The oracle's mean nats of the next token, and with a module for it of the token after."""
    parts = oracle_loss(params, bias, batch, cfg)[1]
    return np.array([parts.nll] if parts.ahead is None else [parts.nll, parts.ahead])


def begun(cfg):
    """The step and the state that a run of a config begins with."""
    step, source = step_for(cfg), find_source(cfg, "full")
    assert source is not None
    weights, bias = read_weights(source, step.abstract)
    zero = jnp.zeros((), jnp.int32)
    return step.of_weights(), TrainState(zero, zero, weights, bias, (), None)


def loss(step, state, batch):
    """The mean nats of the next token, by a run's own evaluation."""
    return float(step.evaluate(state, place(step, batch))) / np.sum(batch.target_BT >= 0)


FINE = {"moe.expert_hidden": 16, "moe.num_experts": 12, "moe.experts_per_token": 6}
CASES = {
    "copies": ({}, {}),
    "scaled": (
        {},
        {
            "moe.router.score": "sigmoid",
            "moe.router.weight_scale": 2.5,
            "moe.num_experts": 5,
            "moe.experts_per_token": 3,
        },
    ),
    "shards": ({}, FINE),
    "shards, by sigmoid": ({}, {**FINE, "moe.router.score": "sigmoid"}),
    "shards, all chosen": ({}, {**FINE, "moe.experts_per_token": 12}),
    "shards in groups of the router": (
        {},
        {
            "moe.expert_hidden": 24,
            "moe.num_experts": 16,
            "moe.experts_per_token": 4,
            "moe.router.num_groups": 4,
            "moe.router.groups_per_token": 2,
            "moe.router.weight_scale": 0.5,
        },
    ),
    "every second layer": ({}, {"model.moe_every": 2}),
    "a table of layers": ({}, {"model.layer_mlps": "experts,dense,dense,experts", **FINE}),
    "stages": ({}, {"model.first_dense_layers": 1, "model.stage_chunks": 3}),
    "biases": ({}, {"moe.expert_bias": "true", "moe.router_bias": "true"}),
    "clamped": ({"activation": "clamped_swiglu"}, FINE),
    "one more token ahead": ({"predict_ahead": 1, "tie_embeddings": False}, FINE),
}


@pytest.mark.parametrize(("model", "settings"), CASES.values(), ids=CASES)
def test_the_loss_is_that_of_the_dense_model(dense, model, settings):
    """Both by the oracle, which has other code for experts."""
    before, params = dense(**model)
    batch = random_batch(before)
    wanted = nats(before, params, {}, batch)
    cfg, params, bias = upcycled(settings)
    assert cfg.model.expert_layers > 0
    np.testing.assert_allclose(nats(cfg, params, bias, batch), wanted, rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    "mesh", [{}, {"mesh.expert": 2, "mesh.tensor": 2, "mesh.fsdp": 2}], ids=["one", "mesh"]
)
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, id="copies", marks=pytest.mark.exhaustive), pytest.param(FINE, id="shards")],
)
def test_a_run_begins_with_the_loss_and_the_logits_of_the_dense_model(dense, settings, mesh):
    before, params = dense()
    batch = random_batch(before)
    cfg, *_ = upcycled(settings | mesh)
    step, state = begun(cfg)
    assert abs(loss(step, state, batch) - nats(before, params, {}, batch)[0]) < BOUND
    one, zero = step_for(before).of_weights(), state.step
    wanted = one.next_logits(TrainState(zero, zero, params, {}, (), None), (batch.token_BT, 11))
    tokens = jax.device_put(batch.token_BT, step.batch_sharding)
    got = np.asarray(step.next_logits(state, (tokens, 11)))
    bound = BOUND * np.abs(wanted).max()
    np.testing.assert_allclose(got, np.asarray(wanted), rtol=0, atol=bound)


def test_experts_are_copies_of_shards_in_turn(dense):
    """And all else is copied to the bit, onto the layers it came from."""
    _, before = dense()
    _, params, bias = upcycled(FINE | {"moe.router.weight_scale": 2.0})
    old, new = before["groups"][0]["blocks"][0], params["groups"][0]["blocks"][0]
    for e in range(12):
        units = slice(16 * (e % 3), 16 * (e % 3) + 16)
        np.testing.assert_array_equal(new["moe"]["w_in"][:, e], old["mlp"]["w_in"][..., units])
        out = old["mlp"]["w_out"][:, units] * np.float32(3 / 2)
        np.testing.assert_array_equal(new["moe"]["w_out"][:, e], out)
    assert set(new) == {*old, "moe"} - {"mlp"}
    for name in ("attention", "attention_norm", "mlp_norm"):
        jax.tree.map(np.testing.assert_array_equal, new[name], old[name])
    for name in ("embedding", "norm"):
        jax.tree.map(np.testing.assert_array_equal, params[name], before[name])
    assert not any(np.any(x) for x in jax.tree.leaves(bias))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_token_chooses_every_shard_equally_often(dense, score):
    """Four experts of each shard, in four groups of three, of which a token chooses two."""
    dense()
    cfg, params, _ = upcycled(FINE | {"moe.router.score": score})
    w_LDE = params["groups"][0]["blocks"][0]["moe"]["w_router"]
    assert abs(np.std(w_LDE) - 0.3) < 0.03, "model.init_deviation"
    assert len({column.tobytes() for w_DE in w_LDE for column in w_DE.T}) == 4 * 4
    x_ND = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    logit_NE = jnp.dot(x_ND, w_LDE[0], precision="highest")
    routing = route(logit_NE, jnp.zeros(12), cfg.moe.router, k=6)
    shards_NK = np.sort(np.asarray(routing.expert_NK) % 3, axis=1)
    assert (shards_NK == [0, 0, 1, 1, 2, 2]).all()
    assert {tuple(sorted({e // 3 for e in row})) for row in routing.expert_NK.tolist()} == {
        (a, b) for a in range(4) for b in range(a + 1, 4)
    }


def experts_of(params):
    return {name: params["groups"][0]["blocks"][0]["moe"][name] for name in ("w_in", "w_out")}


@pytest.mark.parametrize("piece", [64 << 20, 1000])
def test_noise_has_the_share_of_the_deviation_that_was_asked_for(dense, monkeypatch, piece):
    monkeypatch.setattr("moejax.checkpoint.arrays.PIECE_BYTES", piece)
    _, before = dense()
    exact, noisy = (
        experts_of(upcycled(FINE, *words, out=out)[1])
        for words, out in [((), "exact"), (("--noise", "0.05"), "noisy")]
    )
    for name, wanted in exact.items():
        noise = noisy[name] - wanted
        scale = 3.0 if name == "w_out" else 1.0  # G, at weight_scale 1
        for layer, dense_matrix in enumerate(before["groups"][0]["blocks"][0]["mlp"][name]):
            share = noise[layer].std() / (scale * dense_matrix.std())
            # Of 6,144 draws and more; the bound is about five standard errors.
            assert abs(share - 0.05) < 0.0025, (name, layer)
        # No expert, and no layer, has the noise of another.
        rows = noise.reshape(48, -1)
        likeness = np.corrcoef(rows) - np.eye(48)
        assert np.abs(likeness).max() < 6 / np.sqrt(rows.shape[1])


def test_the_same_seed_gives_the_same_numbers(dense):
    dense()
    numbers = {}
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        upcycled({}, "--noise", "0.1", "--seed", str(seed), out=out)
        manifest = read_manifest(Path(out, "0"))
        assert manifest["upcycled_from"].endswith("dense/checkpoints/7")
        numbers[out] = manifest["numbers"]
    assert numbers["a"] == numbers["b"] != numbers["c"]


def test_pieces_of_a_matrix_are_those_of_the_whole(dense, monkeypatch):
    """As of a model whose matrices are larger than a piece."""
    dense()
    exact = upcycled(FINE)[1]
    monkeypatch.setattr("moejax.checkpoint.arrays.PIECE_BYTES", 1000)
    jax.tree.map(np.testing.assert_array_equal, upcycled(FINE, out="pieces")[1], exact)


@pytest.mark.exhaustive
def test_training_goes_on_from_it_and_tells_the_experts_apart(dense, tmp_path):
    dense()
    _, begun, _ = upcycled({"optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 0})
    words = {
        "data.source": "tokens",
        "data.train_files": write_tokens(tmp_path / "tokens.bin"),
        "train.num_steps": 3,
        "train.sample_tokens": 0,
        "mesh.replica": 8,
        "plan": "hand",
        # Compiles no overflow rounds. An upcycled model may be trained with a capacity.
        **{f"moe.{name}": value for name, value in CERTAIN.items()},
    }
    flags = [f"--config.{name}={value}" for name, value in words.items()]
    assert train(["--config", "out/config.json", *flags]) == 0
    lines = [json.loads(line) for line in Path("runs/out/metrics.jsonl").read_text().splitlines()]
    assert any(line["event"] == "step" for line in lines)
    saved = locate("runs/out", "full")
    cfg, read = load_config("runs/out/config.json"), StoredWeights(saved.path).read
    params, _ = weights_of(cfg, lambda path, shape: read(path))
    for name, w_LE in experts_of(params).items():
        same = experts_of(begun)[name]
        assert all((same[:, e] == same[:, 0]).all() for e in range(8))
        assert all(
            (w_LE[layer, e] != w_LE[layer, f]).any()
            for layer in range(4)
            for e in range(8)
            for f in range(e)
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("shards", some_of([1, 2], 2))
def test_a_published_dense_model_begins_with_the_loss_of_transformers(
    tmp_path, monkeypatch, shards
):
    """The whole way: a folder of Qwen3 is imported, turned into experts, and trained a step."""
    monkeypatch.chdir(tmp_path)
    case = cases_of("qwen3")["even, window of the last block, tied"]
    golden_folder(tmp_path / "folder", case)
    assert convert(["import", "folder", "--out", "dense"]) == 0
    hidden = case["config"]["intermediate_size"] // shards
    words = {"moe.num_experts": 4, "moe.expert_hidden": hidden, "data.sequence_length": 40}
    cfg, params, _ = upcycled(words | {"train.batch_sequences": 2})
    assert experts_of(params)["w_out"].shape[1:] == (4, hidden, case["config"]["hidden_size"])
    token_BT = np.array(case["tokens"], np.int32)
    target_BT = np.concatenate([token_BT[:, 1:], np.full_like(token_BT[:, :1], -1)], axis=1)
    batch = Batch(token_BT, target_BT, np.zeros_like(token_BT))
    assert abs(loss(*begun(cfg), batch) - case["loss"]) < BOUND
    files = {f"data.{part}_files": write_tokens(Path(f"{part}.bin")) for part in ("train", "eval")}
    one_step = {"train.num_steps": 1, "train.sample_tokens": 0, "plan": "hand", **files}
    one_step |= {"optimizer.warmup_steps": 0, "mesh.replica": 8, "train.batch_sequences": 8}
    flags = [f"--config.{name}={value}" for name, value in one_step.items()]
    assert train(["--config", "out/config.json", *flags]) == 0
    read = StoredWeights(locate("runs/out", "full").path).read
    trained, _ = weights_of(cfg, lambda path, shape: read(path))
    assert (experts_of(trained)["w_out"] != experts_of(params)["w_out"]).any()


def test_the_written_config_is_that_of_the_dense_run_with_experts(dense):
    before, _ = dense()
    cfg, *_ = upcycled({})
    own = {"run_dir": "runs/out", "checkpoint.init_from": str(Path("out").absolute())}
    made = {"model.moe_every": 1, "moe.expert_hidden": HIDDEN, "model.mlp_hidden": 384}
    assert cfg == change(before, own | made)


BAD = {
    ("--out", "dense"): "output exists",
    ("--noise", "-0.1"): "--noise is -0.1",
    ("--noise", "nan"): "--noise is nan",
    ("--seed", "-1"): "--seed is -1",
    ("--config.moe.expert_hidden=20",): "does not divide the dense MLP's hidden width 48",
    ("--config.moe.expert_hidden=96",): "does not divide the dense MLP's hidden width 48",
    ("--config.moe.expert_hidden=16",): "`moe.num_experts` = 8 is not a multiple of 3",
    ("--config.moe.expert_hidden=16", "--config.moe.num_experts=9"): (
        "`moe.experts_per_token` = 2 is not a multiple of 3"
    ),
    (
        "--config.moe.expert_hidden=24",
        "--config.moe.num_experts=12",
        "--config.moe.router.num_groups=4",
    ): "`moe.num_experts / moe.router.num_groups` = 3 is not a multiple of 2",
    ("--config.moe.router.renormalize=false",): "`moe.router.renormalize` is false",
    ("--config.moe.num_shared_experts=1",): "`moe.num_shared_experts` = 1 adds to",
    ("--config.moe.capacity_factor=2",): "`moe.capacity_factor` = 2.0 may drop",
    ("--config.moe.experts_per_token=1",): "gives the router no gradient",
    ("--config.moe.experts_per_token=9",): "more than `moe.num_experts` = 8",
    ("--config.model.moe_every=none",): "`model.moe_every` is none, so no block has experts",
    ("--config.model.width=64",): "model.width: 32 -> 64",
    ("--config.model.predict_ahead=1",): "model.predict_ahead: 0 -> 1",
    ("--config.model.norm_epsilon=1e-5", "--config.model.moe_every=2"): (
        "model.norm_epsilon: 1e-06 -> 1e-05. All but the experts is copied"
    ),
    ("--config.model.moe_every=2", "--config.model.mlp_hidden=96"): "model.mlp_hidden: 48 -> 96",
    ("--config.model.wide=64",): "unknown field",
}


def refused(capsys, monkeypatch, *words):
    """Runs the command, which must say one line, read no weights and leave nothing."""
    monkeypatch.setattr(importing, "write_pieces", lambda *_: pytest.fail("weights were read"))
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main([*words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moejax: error: ")
    assert said.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return said


def test_what_would_give_another_loss_is_refused(dense, capsys, monkeypatch):
    dense()
    for words, wanted in BAD.items():
        out = () if "--out" in words else ("--out", "out")
        assert wanted in refused(capsys, monkeypatch, "dense", *out, *words), words


def test_checkpoints_of_no_dense_model_are_refused(dense, capsys, monkeypatch):
    dense(lora=4)
    said = refused(capsys, monkeypatch, "dense", "--out", "out")
    assert "holds adapters, no weights: it is of a run with `lora.rank` = 4" in said
    assert "no finished checkpoint at here" in refused(capsys, monkeypatch, "here", "--out", "out")


def test_a_model_with_experts_is_refused(dense, capsys, monkeypatch):
    dense()
    upcycled({})
    assert "has experts already" in refused(capsys, monkeypatch, "out", "--out", "twice")


def test_an_error_on_the_way_leaves_nothing(dense, monkeypatch):
    dense()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "write_pieces", fail)
    assert main(["dense", "--out", "out"]) == 130
    assert sorted(path.name for path in Path().iterdir()) == ["dense"]
