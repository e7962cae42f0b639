"""`moejax.Engine` on weights in memory: those of a run that trains, on every axis of its mesh."""

import dataclasses

import jax
import numpy as np
import pytest

import moejax
from moejax.api import LiveRun
from moejax.config.schema import LoraConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from moejax.train import loop
from tests.cases import CERTAIN, small_config, some_of, step_for
from tests.serve.models import random_state
from tests.train import small_runs

CLOSE = 1e-5  # of the largest logit


@pytest.fixture(autouse=True, scope="module")
def short_runs(unchecked_annotations):
    """Leaves out of runs what is long and not looked at here; annotations are checked elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish", lambda run, state: run.record_saved(run.checkpoints.wait()))
        patch.setattr(loop, "measure_peak", lambda devices, dtype: 1e12)
        yield


def live_run(cfg, tmp_path):
    """A run between two steps, whose weights differ in every element."""
    train_step, drawn = step_for(cfg), random_state(cfg)
    first = train_step.init() if cfg.lora.rank is None else None
    first = first or train_step.first_state(drawn.frozen, drawn.router_bias)
    state = jax.tree.map(
        lambda x, a: jax.device_put(np.asarray(x, a.dtype), a.sharding),
        first._replace(params=drawn.params, router_bias=drawn.router_bias, frozen=drawn.frozen),
        train_step.abstract,
    )
    return LiveRun(3, state._replace(step=state.step + 3), tmp_path, train_step, ALONE)


def logits_of(cfg, state, token_BT):
    """Logits of the forward pass of one device, from the same weights, [B, T, V]."""
    alone = dataclasses.replace(
        cfg, mesh=small_config().mesh, train=dataclasses.replace(cfg.train, micro_batches=1)
    )
    step = step_for(alone)
    host = jax.tree.map(np.asarray, (state.params, state.router_bias, state.frozen))
    placed = step.abstract._replace(
        step=np.int32(0), skipped=np.int32(0), optimizer=(), reduction=None
    )
    placed = placed._replace(params=host[0], router_bias=host[1], frozen=host[2])
    next_logits = step.of_weights().next_logits
    lengths = range(1, token_BT.shape[1] + 1)
    return np.stack([np.asarray(next_logits(placed, (token_BT, n)))[0] for n in lengths])


LAYERS = {"num_layers": 2, "num_kv_heads": 4}
LORA = LoraConfig(rank=2, targets=("moe.w_*", "attention.w_q", "embedding.*"))
AXES = {
    "all axes": ((1, 2, 2, 2), {}, {}),
    "context": ((1, 2, 2, 1), {"context": 2, "context_stripe": 2}, {}),
    "stages": (
        (1, 1, 2, 1),
        {"stage": 2, "fsdp": 2, "stage_keeps": "input"},
        {"train": {"micro_batches": 2}},
    ),
    "stages and copies": (
        (2, 1, 2, 1),
        {"stage": 2, "stage_keeps": "input"},
        {"train": {"micro_batches": 2}},
    ),
    "adapters": ((1, 2, 2, 1), {}, {"lora": LORA}),
}


@pytest.mark.parametrize("name", some_of(AXES, "stages and copies", "context"))
def test_logits_of_a_living_run_are_those_of_its_forward_pass(name, tmp_path):
    shape, axes, more = AXES[name]
    cfg = small_config(shape, model=LAYERS, moe=CERTAIN, train=more.get("train"))
    mesh = dataclasses.replace(cfg.mesh, **axes)
    cfg = dataclasses.replace(cfg, mesh=mesh, lora=more.get("lora", LoraConfig()))
    run = live_run(cfg, tmp_path)
    engine = moejax.Engine(run)
    token_T = np.random.default_rng(2).integers(0, 64, 9)
    token_BT = np.zeros((8, 16), np.int32)
    token_BT[0, :9] = token_T
    wanted_TV = logits_of(cfg, run.state, token_BT)[:9]
    bound = CLOSE * np.abs(wanted_TV).max()
    np.testing.assert_allclose(engine.logits(token_T), wanted_TV, rtol=0, atol=bound)
    # Nothing of the state is lost.
    assert not any(x.is_deleted() for x in jax.tree.leaves(run.state))
    newer = run.state._replace(
        step=run.state.step + 1, params=jax.tree.map(lambda x: 1.1 * x, run.state.params)
    )
    with Compilations() as compiled:
        engine.update(newer)
        found_TV = engine.logits(token_T)
    assert compiled.count == 0
    assert (engine.step, engine.path.name) == (4, "4")
    wanted_TV = logits_of(cfg, newer, token_BT)[:9]
    assert np.abs(found_TV - wanted_TV).max() < CLOSE * np.abs(wanted_TV).max()


class Compilations:
    """Counts what XLA compiles, or reads from a cache of programs, in a block."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def _add(self, event, _, **__):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._add)


def config(run_dir):
    """A run on the expert and the tensor axis, and two copies of both."""
    cfg = small_runs.config(run_dir, num_steps=6, eval_every=3)
    return dataclasses.replace(
        cfg, mesh=dataclasses.replace(cfg.mesh, replica=None, expert=2, tensor=2)
    )


def losses(run):
    return run.metrics["loss"].values


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run that samples from itself, what it drew, and the engines that it had."""
    seen, engines = [], []

    def look(run):
        engine = run.engine()
        assert run.engine() is engine
        rule = moejax.Sampling(temperature=1.0, seed=run.step)
        drawn = engine.sample(["def ", [7, 8, 9]], tokens=4, sampling=rule, n=2, routing=True)
        with Compilations() as compiled:
            again = engine.sample(["def ", [7, 8, 9]], tokens=4, sampling=rule, n=2, routing=True)
        assert [one.ids for one in drawn] == [one.ids for one in again]
        assert compiled.count == 0
        score = engine.score([[7, 8, 9]])[0]
        logits = engine.logits([7, 8, 9])
        seen.append((run.step, drawn, score, logits))
        engines.append(engine)

    run_dir = tmp_path_factory.mktemp("run") / "sampled"
    return moejax.run_training(config(run_dir), quiet=True, on_step=look, every=2), seen, engines


def test_a_run_that_samples_has_the_same_losses_and_weights_to_the_bit(sampled, tmp_path):
    run, seen, _ = sampled
    alone = moejax.run_training(config(tmp_path / "alone"), quiet=True)
    assert losses(run) == losses(alone)
    assert run.metrics["loss"].steps == alone.metrics["loss"].steps
    jax.tree.map(np.testing.assert_array_equal, run.state, alone.state)
    assert [step for step, *_ in seen] == [2, 4, 6]


def test_the_weights_are_those_of_each_step(sampled):
    run, seen, engines = sampled
    assert engines[0] is engines[1] is engines[2]
    *_, (step, drawn, score, logits) = seen
    assert any((one[3] != logits).any() for one in seen[:-1])
    ended, read = moejax.Engine(run), moejax.Engine(run.run_dir)
    assert (ended.step, read.step, step) == (6, 6, 6)
    assert ended.path == read.path
    np.testing.assert_array_equal(ended.logits([7, 8, 9]), logits)
    np.testing.assert_array_equal(read.logits([7, 8, 9]), logits)
    rule = moejax.Sampling(temperature=1.0, seed=6)
    again = read.sample(["def ", [7, 8, 9]], tokens=4, sampling=rule, n=2)
    assert [one.ids for one in again] == [one.ids for one in drawn]
    np.testing.assert_array_equal(read.score([[7, 8, 9]])[0], score)


def test_the_memory_of_the_weights_is_the_steps_again(sampled):
    engine = sampled[2][0]
    assert not engine.has_weights
    with pytest.raises(InputError, match=r"engine has no weights\. They were released"):
        engine.logits([1, 2])


def test_an_error_ends_the_run_which_goes_on_from_its_checkpoint(sampled, tmp_path):
    def fail(run):
        raise ValueError(f"no reward at step {run.step}")

    cfg = config(tmp_path / "failed")
    with pytest.raises(ValueError, match="no reward at step 5"):
        moejax.run_training(cfg, quiet=True, on_step=fail, every=5)
    steps = []
    run = moejax.run_training(cfg, quiet=True, on_step=lambda run: steps.append(run.step), every=1)
    assert steps == [5, 6]
    assert losses(run)[-1] == losses(sampled[0])[-1]
    with pytest.raises(InputError, match="`every` is out of range"):
        moejax.run_training(cfg, on_step=fail, every=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.simulated_devices=4", "`mesh.simulated_devices` has no effect"),
        ("model.width=64", "`model.width` has no effect"),
        ("mesh.expert=3", "2 experts on an expert axis of 3"),
    ],
)
def test_settings_that_weights_in_memory_cannot_have_are_refused(sampled, override, message):
    with pytest.raises(InputError, match=message):
        moejax.Engine(sampled[0], overrides=[override])


def test_a_step_of_a_run_in_memory_is_refused(sampled):
    with pytest.raises(InputError, match=r"`step` has no effect\. Got 2 for a run in memory"):
        moejax.Engine(sampled[0], step=2)


@pytest.mark.parametrize(
    "overrides",
    [["mesh.fsdp=4", "mesh.tensor=2"], ["mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"]],
)
def test_weights_in_memory_move_to_a_mesh_that_is_named(sampled, overrides):
    """A run on 2 copies of 2 x 2 devices, expert and tensor."""
    run, token_T = sampled[0], [7, 8, 9, 10]
    trained, moved = moejax.Engine(run), moejax.Engine(run, overrides=overrides)
    wanted = trained.logits(token_T)
    np.testing.assert_allclose(moved.logits(token_T), wanted, rtol=0, atol=CLOSE * wanted.max())
    rule = moejax.Sampling(temperature=1.0, seed=6)
    drawn, again = (e.sample([token_T], tokens=6, sampling=rule) for e in (trained, moved))
    assert drawn[0].ids == again[0].ids
