"""The outer loop of step.outer, beside sites that run apart and an outer step in float64.

The oracle knows nothing of the outer loop's code: every site is a plain run on its own sequences,
and NumPy averages the sites' weights between steps.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.checkpoint.writer import arrays_of
from moejax.comm.jaxprs import KINDS, inner_jaxprs, opened
from moejax.config.compression import CodecSpec
from moejax.config.schema import CompressionConfig, OuterConfig
from moejax.runtime.processes import ALONE
from moejax.step.outer import OuterLoop, Shared
from moejax.train.faults.replicas import differing_copies
from tests.cases import CERTAIN, place, random_batch, small_config, some_of, step_for

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

# With both betas 0 and an epsilon that no gradient changes, AdamW's step is the gradient over
# epsilon: SGD, whose rate is a power of two.
SGD = {
    "beta1": 0.0,
    "beta2": 0.0,
    "epsilon": 2.0**40,
    "learning_rate": 2.0**37,
    "weight_decay": 0.0,
    "clip_norm": None,
    "schedule": "constant",
}
BIAS = {"bias_update_rate": 0.01}


def outer_config(mesh=(2, 1, 1, 1), *, every=3, codec="none", order="layers", **settings):
    changes = {"optimizer": {"schedule": "constant"}, "router": BIAS, "moe": CERTAIN}
    names = ("rate", "momentum")
    outer = {name: settings.pop(name) for name in names if name in settings}
    cfg = small_config(mesh, **{**changes, **settings})
    return dataclasses.replace(
        cfg,
        outer=OuterConfig(every=every, codec=codec, order=order, **outer),
        compression=CompressionConfig(block=16),
    )


def batches(cfg, count):
    return [random_batch(cfg, seed) for seed in range(count)]


def host(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def run(cfg, data):
    """Returns the state after some steps, and all losses."""
    train_step, losses = step_for(cfg), []
    state = train_step.init()
    for batch in data:
        state, metrics = train_step.step(state, place(train_step, batch))
        losses.append(float(metrics.loss))
    return state, losses


class Oracle:
    """Sites as plain runs of one device, averaged in float64."""

    def __init__(self, cfg):
        self.outer, self.sites = cfg.outer, cfg.mesh.replica
        shared = step_for(cfg).abstract
        self.shardings = [x.sharding for x in jax.tree.leaves((shared.params, shared.router_bias))]
        train = dataclasses.replace(
            cfg.train, batch_sequences=cfg.train.batch_sequences // self.sites
        )
        mesh = dataclasses.replace(cfg.mesh, replica=1, fsdp=1, expert=1, tensor=1)
        self.plain = step_for(dataclasses.replace(cfg, mesh=mesh, train=train, outer=OuterConfig()))
        self.inner = [self.plain.init() for _ in range(self.sites)]
        self.weights = host((self.inner[0].params, self.inner[0].router_bias))
        self.momentum = jax.tree.map(np.zeros_like, self.weights)
        self.losses = []

    def step(self, batch, number):
        before = [host((s.params, s.router_bias)) for s in self.inner]
        rows, losses = len(batch.token_BT) // self.sites, []
        for site in range(self.sites):
            own = jax.tree.map(lambda x, at=site * rows: x[at : at + rows], batch)
            self.inner[site], metrics = self.plain.step(self.inner[site], place(self.plain, own))
            losses.append(float(metrics.loss))
        self.losses.append(np.mean(losses))
        at_once = self.outer.order == "all"
        if at_once and (number + 1) % self.outer.every:
            return
        after = [host((s.params, s.router_bias)) for s in self.inner]
        self.average(after if at_once else before, after, number)

    def average(self, sent, after, number):
        leaves, tree = jax.tree.flatten(self.weights)
        speeds = jax.tree.leaves(self.momentum)
        first_bias = len(jax.tree.leaves(self.weights[0]))
        sent, after = [list(map(jax.tree.leaves, x)) for x in (sent, after)]
        for leaf, outer in enumerate(leaves):
            places = self.places(leaf, outer.shape, number)
            mean = np.mean([x[leaf][places] for x in sent], 0)
            old = outer[places]
            rate, mu = (1, 0) if leaf >= first_bias else (self.outer.rate, self.outer.momentum)
            gradient = old - mean
            speed = mu * speeds[leaf][places] + gradient
            speeds[leaf][places] = speed
            new = old - rate * (gradient + mu * speed)
            outer[places] = new
            for site in range(self.sites):
                moved = after[site][leaf]
                moved[places] = new + moved[places] - sent[site][leaf][places]
        for site, state in enumerate(self.inner):
            params, bias = jax.tree.map(
                lambda x, like: jax.device_put(x.astype(np.float32), like.sharding),
                jax.tree.unflatten(tree, after[site]),
                (state.params, state.router_bias),
            )
            self.inner[site] = state._replace(params=params, router_bias=bias)

    def places(self, leaf, shape, number):
        """Where a step averages an array: a part of each shard."""
        if self.outer.order == "all":
            return np.ones(shape, bool)
        found = np.zeros(shape, bool)
        for index in self.shardings[leaf].devices_indices_map(shape).values():
            found[index] = part_of(found[index].shape, self.outer.every, number)
        return found


def part_of(shape, count, number):
    """Where the part of a step lies: an element's part is a number with a digit a dimension."""
    at, left, cuts = np.zeros(shape, int), count, []
    for size in shape:
        cuts.append(np.gcd(left, size))
        left //= cuts[-1]
    cuts[np.argmax(np.array(shape) // cuts)] *= left
    for index, size, cut in zip(np.indices(shape), shape, cuts, strict=True):
        at = at * cut + index // np.ceil(size / cut).astype(int)
    return at == number % count


def assert_near(got, wanted, bound):
    for path, want in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        have = got
        for key in path:
            have = have[getattr(key, "key", getattr(key, "idx", None))]
        worst = np.max(np.abs(np.asarray(have, np.float64) - want), initial=0)
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: off by {worst:.2e}"


# (mesh, H, order): sites of one device and of several, along every axis.
CASES = [
    ((2, 1, 1, 1), 3, "layers"),
    ((2, 1, 1, 1), 1, "layers"),
    ((2, 1, 1, 1), 3, "all"),
    ((1, 1, 1, 1), 3, "layers"),
    ((4, 1, 2, 1), 2, "layers"),
    ((2, 2, 2, 1), 3, "layers"),
    ((2, 2, 1, 2), 3, "layers"),
    ((2, 1, 2, 2), 2, "all"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", some_of(CASES, CASES[0], CASES[3], CASES[5]), ids=str)
def test_sites_are_plain_runs_averaged_by_nesterov(case):
    mesh, every, order = case
    cfg = outer_config(mesh, every=every, order=order, optimizer=SGD)
    oracle, data = Oracle(cfg), batches(cfg, 5)
    for number, batch in enumerate(data):
        oracle.step(batch, number)
    state, losses = run(cfg, data)
    np.testing.assert_allclose(losses, oracle.losses, rtol=1e-5)
    assert_near((state.params, state.router_bias), oracle.weights, 2e-5)
    for site, plain in enumerate(oracle.inner):
        own = jax.tree.map(lambda x, site=site: x[site], state.sites[:2])
        assert_near(own, host((plain.params, plain.router_bias)), 2e-5)
    assert differing_copies(arrays_of(state), ALONE) is None
    if cfg.mesh.replica > 1:  # sites are not copies of each other
        assert all(np.any(x[0] != x[1]) for x in jax.tree.leaves(host(state.sites.params)))


@pytest.mark.slow
def test_one_step_a_period_with_rate_one_is_data_parallel_training():
    """To the bit if the sites see the same text; else the mean of rounded weights is another one.

    AdamW as in `SGD`: what a weight moves is its gradient times a power of two. Each position has a
    target, because sites count alike, and there is no balance loss, which is no mean over texts.
    """
    router = {"balance_loss": 0.0}
    names = {"rate": 1.0, "momentum": 0.0, "router": router, "optimizer": SGD}
    cfg = outer_config(every=1, order="all", **names)
    half = random_batch(cfg, 0)
    same = jax.tree.map(lambda x: np.concatenate([x[:4], x[:4]]), half)
    other = [x._replace(target_BT=np.abs(x.target_BT)) for x in batches(cfg, 3)]
    for data, bound in (([same] * 3, 0.0), (other, 1e-6)):
        state, losses = run(cfg, data)
        plain, wanted = run(dataclasses.replace(cfg, outer=OuterConfig()), data)
        assert_near(state.params, host(plain.params), bound)
        np.testing.assert_allclose(losses, wanted, rtol=1e-6)
        assert_near(jax.tree.map(lambda x: x[1], state.sites.params), host(plain.params), bound)


def replica_calls(cfg):
    """Collectives of the step whose axes hold the sites, by name, with the bytes they leave."""
    train_step, found = step_for(cfg), []

    def look(jaxpr):
        for eqn in opened(jaxpr).eqns:
            axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
            if eqn.primitive.name in KINDS and "replica" in axes:
                found.append((eqn.primitive.name, sum(x.aval.size for x in eqn.outvars)))
            for inner in inner_jaxprs(eqn):
                look(inner)

    look(train_step.step.trace(train_step.abstract, train_step.abstract_batch()).jaxpr)
    return found


@pytest.mark.parametrize("mesh", [(2, 2, 2, 1), (4, 1, 1, 2)])
def test_only_the_part_and_the_logged_numbers_leave_a_site(mesh):
    router = {"quantile_bins": 8, "jitter": 0.1}
    cfg = outer_config(
        mesh, every=2, router=router, moe={}, train={"micro_batches": 2, "batch_sequences": 16}
    )
    # One gather of half of the shard, in bytes, and one of a few numbers: nothing within backward.
    (part, elements), (logged, few) = replica_calls(cfg)
    assert part == logged == "all_gather"
    shapes = step_for(cfg).abstract.sites.params
    shard = sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(shapes))
    bias = cfg.moe.num_experts
    assert 4 * shard / 2 <= elements / mesh[0] <= 4 * (shard + bias) / 2 + 4 * 32
    assert few / mesh[0] < 64


# The exchange alone, on arrays small enough to be worked out in NumPy.
DIMS = {"matrix": "DHC", "norm": "D"}


def exchange(loop, shared, inner, error, number, sites, moved=0.0):
    """Runs send and receive; `inner` and `error` have a dimension of sites.

    Between the two each site adds `moved` times its number, from one, to its weights.
    """
    mesh = Mesh(np.array(jax.devices()[:sites]), ("replica",))

    def body(shared, inner, error, number):
        own = list(jax.tree.map(lambda x: x[0], (inner, error)))
        part = loop.part(number)
        sent = loop.send(shared, *own, part)
        step = moved * (1 + jax.lax.axis_index("replica"))
        own[0] = jax.tree.map(lambda x: x + step, own[0])
        shared, *own = loop.receive(sent, shared, *own, part)
        each = jax.tree.map(lambda x: x[None], own)
        return jax.tree.map(lambda x: x[None], shared), *each

    own = P("replica")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), own, own, P()), out_specs=own, check_vma=False
    )
    shared, inner, error = jax.jit(mapped)(shared, inner, error, jnp.int32(number))
    for x in jax.tree.leaves(shared):  # the copies at all sites, to the bit
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return jax.tree.map(lambda x: np.asarray(x[0]), shared), inner, error


def outer_loop(every=1, rate=1.0, momentum=0.0, codec=None, feedback=False):
    spec = None if codec is None else CodecSpec(codec, feedback, block=8)
    return OuterLoop(("replica",), every, rate, momentum, False, spec, DIMS, ())


def drawn(sites, seed=0, grid=None):
    """Outer and inner weights and one selection bias; on a grid their sums are exact."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.standard_normal(shape)
        return np.float32(x if grid is None else np.round(x * grid) / grid)

    shapes = {"matrix": (3, 5, 2), "norm": (5,)}
    params = {name: draw(*shape) for name, shape in shapes.items()}
    inner = {name: x + draw(sites, *x.shape) / 4 for name, x in params.items()}
    bias = {"router": draw(4)}
    biases = {"router": bias["router"] + draw(sites, 4) / 4}
    momentum = {name: draw(*shape) for name, shape in shapes.items()}
    return Shared(params, bias, momentum), (inner, biases)


@pytest.mark.parametrize("sites", [1, 2, 4])
def test_data_parallel_steps_come_back_exactly_where_sums_are_exact(sites):
    """Weights and steps on a grid of 2^-10: the mean of the sites' steps, without any rounding."""
    shared, inner = drawn(sites, grid=2**10)
    found, own, _ = exchange(outer_loop(), shared, inner, NO_ERROR, 0, sites)
    for name, x in shared.params.items():
        steps = inner[0][name] - x
        np.testing.assert_array_equal(found.params[name], x + steps.mean(0))
        np.testing.assert_array_equal(own[0][name][sites - 1], x + steps.mean(0))


@pytest.mark.parametrize("number", range(4))
def test_a_step_averages_its_part_and_leaves_the_others(number):
    shared, inner = drawn(2)
    loop = outer_loop(every=4, rate=0.7, momentum=0.9)
    found, own, _ = exchange(loop, shared, inner, NO_ERROR, number, 2, moved=0.125)
    for name, x in shared.params.items():
        part = np.zeros(x.shape, bool)
        if name == "matrix":  # [3, 5, 2]: halves of the 5, one longer; of each the 2 one by one
            part[:, [slice(3), slice(3, 5)][number // 2], number % 2] = True
        else:  # of 5 values 2, 2, 1, none
            part[2 * number : 2 * number + 2] = True
        gradient = x - np.float64(inner[0][name]).mean(0)
        speed = 0.9 * shared.momentum[name] + gradient
        new = x - 0.7 * (gradient + 0.9 * speed)
        np.testing.assert_allclose(found.params[name][part], new[part], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(found.momentum[name][part], speed[part], rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(found.params[name][~part], x[~part])
        np.testing.assert_array_equal(found.momentum[name][~part], shared.momentum[name][~part])
        for site in range(2):
            mine, step = np.asarray(own[0][name][site]), np.float32(0.125 * (1 + site))
            np.testing.assert_allclose(mine[part], new[part] + step, rtol=2e-5, atol=1e-6)
            np.testing.assert_array_equal(mine[~part], inner[0][name][site][~part] + step)
    mean = inner[1]["router"].mean(0)
    np.testing.assert_allclose(
        found.router_bias["router"],
        np.where(np.arange(4) == number, mean, shared.router_bias["router"]),
        rtol=1e-6,
    )


NO_ERROR = {"matrix": None, "norm": None}


@pytest.mark.parametrize("codec", ["int4", "int8", "bfloat16"])
def test_what_is_sent_and_what_is_kept_add_up(codec):
    loop, sites = outer_loop(every=2, codec=codec, feedback=True), 2
    shared, inner = drawn(sites)
    error = {"matrix": np.zeros((sites, 3, 5, 2), np.float32), "norm": None}
    for number in range(4):
        before = jax.tree.map(np.asarray, (shared, inner, error))
        shared, inner, error = exchange(loop, shared, inner, error, number, sites)
        old, (weights, _), kept = before
        delta = old.params["matrix"] - weights["matrix"]
        sent = old.params["matrix"] - shared.params["matrix"]  # rate 1, no momentum: the mean
        wanted = np.mean(delta + kept["matrix"] - np.asarray(error["matrix"]), 0)
        part = np.zeros((3, 5, 2), bool)
        part[:, :, number % 2] = True
        np.testing.assert_allclose(sent[part], wanted[part], atol=2e-6)
        np.testing.assert_array_equal(error["matrix"][:, ~part], kept["matrix"][:, ~part])
        if number < 2:
            assert np.any(np.asarray(error["matrix"])[:, part] != 0)
            # Norms and biases are not encoded.
            norm = (old.params["norm"] - weights["norm"]).mean(0)
            moved = old.params["norm"] - shared.params["norm"]
            np.testing.assert_allclose(moved, np.where(moved != 0, norm, 0), atol=1e-6)


def test_a_site_with_a_number_that_is_not_finite_does_not_count_and_begins_again():
    shared, (inner, biases) = drawn(3)
    inner["matrix"][1, 0, 2, 1] = np.nan
    loop = outer_loop(codec="int8", feedback=True)
    error = {"matrix": np.zeros((3, 3, 5, 2), np.float32), "norm": None}
    found, own, error = exchange(loop, shared, (inner, biases), error, 0, 3)
    mean = inner["norm"][[0, 2]].mean(0)
    np.testing.assert_allclose(found.params["norm"], mean, rtol=1e-5, atol=1e-6)
    assert np.all(np.isfinite(found.params["matrix"]))
    np.testing.assert_array_equal(own[0]["matrix"][1], found.params["matrix"])
    assert np.all(np.asarray(error["matrix"])[1] == 0)


def test_devices_of_a_site_agree_that_its_part_is_not_finite():
    """One shard of an expert has a number that is not finite; the norm has copies on both."""
    shared, (inner, biases) = drawn(2)
    inner["matrix"][1, 0, 2, 1] = np.nan
    loop = dataclasses.replace(outer_loop(), within=("expert",))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "expert"))
    cut = {"matrix": P(None, None, "expert"), "norm": P()}
    inner_cut = {"matrix": P("replica", None, None, "expert"), "norm": P("replica")}

    def body(shared, inner):
        own, part = jax.tree.map(lambda x: x[0], inner), loop.part(jnp.int32(0))
        sent = loop.send(shared, own, NO_ERROR, part)
        shared, *_ = loop.receive(sent, shared, own, NO_ERROR, part)
        return jax.tree.map(lambda x: x[None, None], shared.params)

    takes = (Shared(cut, {"router": P()}, cut), (inner_cut, {"router": P("replica")}))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=takes, out_specs=P("replica", "expert"), check_vma=False
    )
    found = jax.jit(mapped)(shared, (inner, biases))
    norm = np.broadcast_to(found["norm"][:1, :1], found["norm"].shape)
    np.testing.assert_array_equal(found["norm"], norm)
    np.testing.assert_allclose(norm[0, 0], inner["norm"][0], rtol=1e-6)
    matrix = np.concatenate([found["matrix"][0, 0], found["matrix"][0, 1]], axis=-1)
    np.testing.assert_allclose(matrix, inner["matrix"][0], rtol=1e-5, atol=1e-6)
