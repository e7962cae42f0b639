import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.config.schema import MeshConfig, OptimizerConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.step.optimizer import Optimizer, is_matrix, learning_rate, square_share

# As the model's: sizes that every mesh below divides.
DIMS = {"table": "VD", "query": "DHC", "out": "HCD", "router": "DE", "up": "EDUF", "down": "EFD"}
DIMS |= {"to_latent": "DZ", "from_latent": "ZHC"}
DIMS |= {"scale": "D", "bias": "HC"}  # of queries, or the scale of a norm over all heads
DIMS |= {"router_bias": "E", "up_bias": "EUF", "down_bias": "ED", "join": "UDO"}
VECTORS = ("scale", "bias", "router_bias", "up_bias", "down_bias")
SIZES = {"V": 16, "D": 16, "H": 8, "C": 4, "E": 8, "U": 2, "F": 8, "Z": 8, "O": 16}
MESHES = [(1, 1, 1, 1), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 8, 1), (1, 1, 1, 8), (8, 1, 1, 1)]


def everywhere(layout):
    """One layout for every parameter."""
    return jax.tree.map(lambda _: layout, DIMS)


def random_tree(seed=0, layers=2):
    """Arrays by name; all but the table have stacked layers in front."""
    rng = np.random.default_rng(seed)
    tree = {}
    for name, dims in DIMS.items():
        stacked = () if name == "table" else (layers,)
        shape = stacked + tuple(SIZES[letter] for letter in dims)
        tree[name] = rng.standard_normal(shape, np.float32)
    return tree


def on_mesh(mesh, function, *trees, out=None, expert_weights="hidden"):
    """Runs per-device code on trees that shard as parameters; `out` are its specs."""
    layout = build_layout(MeshConfig(*mesh, expert_weights=expert_weights))
    specs = {name: layout.param_spec(DIMS[name], x.ndim) for name, x in trees[0].items()}
    mapped = jax.shard_map(
        functools.partial(function, layout=layout),
        mesh=build_mesh(layout, jax.devices()[: math.prod(mesh)]),
        in_specs=(specs,) * len(trees),
        out_specs=specs if out is None else out,
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*trees))


def norm_of(tree, layout):
    return jnp.sqrt(wire.all_reduce(square_share(tree, DIMS, everywhere(layout)), layout.mesh_axes))


def step(optimizer, gradients, state, params, finite=True):
    norm = norm_of(gradients, optimizer.layouts["table"])
    return optimizer.update(gradients, state, params, norm=norm, finite=jnp.asarray(finite))


def first_update(mesh, gradients, params=None, expert_weights="hidden", **settings):
    """What the optimizer adds to the parameters, zero unless given, in its first step."""
    cfg = OptimizerConfig(**{"warmup_steps": 0, "schedule": "constant", **settings})
    params = jax.tree.map(np.zeros_like, gradients) if params is None else params

    def update(gradients, params, layout):
        optimizer = Optimizer(cfg, DIMS, everywhere(layout), 10)
        return step(optimizer, gradients, optimizer.init(params), params)[0]

    new = on_mesh(mesh, update, gradients, params, expert_weights=expert_weights)
    return jax.tree.map(np.subtract, new, params)


@pytest.mark.parametrize(
    ("schedule", "quarter", "middle", "end"),
    [
        ("cosine", 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 0.55, 0.1),
        ("linear", 1 - 0.25 * 0.9, 0.55, 0.1),
        ("constant", 1, 1, 1),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule, quarter, middle, end):
    shape = {0: 0, 5: 0.5, 10: 1, 35: quarter, 60: middle, 110: end, 500: end}
    for warmup in (10, 10 / 110):  # steps, or a share of the run
        cfg = OptimizerConfig(schedule=schedule, warmup_steps=warmup, final_fraction=0.1)
        rate = learning_rate(cfg, 110, 2.0)
        for step, wanted in shape.items():
            assert float(rate(step)) == pytest.approx(2 * wanted, rel=1e-6), step
    none = OptimizerConfig(schedule=schedule, warmup_steps=0)
    assert float(learning_rate(none, 100, 3.0)(0)) == 3.0


def test_matrices_decay_and_norm_scales_and_gate_biases_do_not():
    params = random_tree()
    zero = jax.tree.map(np.zeros_like, params)
    changed = first_update((1, 1, 1, 1), zero, params, learning_rate=0.5, weight_decay=0.1)
    for name, x in params.items():
        wanted = 0 if name in VECTORS else -0.05 * x
        np.testing.assert_allclose(changed[name], wanted, atol=1e-6)


def test_muon_takes_hidden_matrices_alone():
    taken = {name for name, dims in DIMS.items() if is_matrix(dims)}
    assert taken == {"query", "out", "up", "down", "to_latent", "from_latent", "join"}


@pytest.mark.parametrize(
    ("mesh", "expert_weights"), [*((mesh, "hidden") for mesh in MESHES), ((1, 2, 2, 2), "folded")]
)
def test_the_norm_over_shards_is_that_of_the_whole_tree(mesh, expert_weights):
    tree = random_tree()
    found = on_mesh(mesh, norm_of, tree, out=P(), expert_weights=expert_weights)
    whole = math.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree.values()))
    assert float(found) == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 2, 2)])
def test_gradients_beyond_the_limit_are_scaled_down_and_others_left(mesh):
    gradients = random_tree(1)
    norm = float(optax.tree.norm(gradients))
    # An epsilon far above the gradients makes Adam's update proportional to them.
    options = {"epsilon": 1e6, "learning_rate": 1e6, "weight_decay": 0.0}
    free = first_update(mesh, gradients, clip_norm=None, **options)
    below = first_update(mesh, gradients, clip_norm=2 * norm, **options)
    above = first_update(mesh, gradients, clip_norm=norm / 4, **options)
    assert float(optax.tree.norm(free)) == pytest.approx(norm, rel=1e-4)
    for name in DIMS:
        np.testing.assert_array_equal(below[name], free[name])
        np.testing.assert_allclose(above[name], free[name] / 4, rtol=1e-4)


def matrices(name, x):
    """The matrices that Muon sees in an update, inputs first."""
    dims = DIMS[name]
    x = x.reshape(-1, *x.shape[1:])
    if name in ("query", "to_latent", "from_latent"):
        return x.reshape(x.shape[0], SIZES[dims[0]], -1)
    if name == "out":
        return x.reshape(x.shape[0], -1, SIZES["D"])
    if name == "up":
        return np.moveaxis(x, dims.index("U") + 1, 2).reshape(-1, SIZES["D"], SIZES["F"])
    return x.reshape(-1, SIZES["F"], SIZES["D"])


@pytest.mark.slow
def test_muon_makes_every_matrix_of_every_layer_and_expert_nearly_orthogonal():
    options = {"name": "muon", "muon_learning_rate": 1.0, "weight_decay": 0.0}
    changed = first_update((1, 1, 1, 1), random_tree(1), **options)
    for name in ("query", "out", "up", "down", "to_latent", "from_latent"):
        found = matrices(name, -changed[name])
        wanted = max(1.0, found.shape[2] / found.shape[1]) ** 0.5
        values = np.linalg.svd(found, compute_uv=False) / wanted
        # Five Newton-Schulz steps bring singular values near one, not to it (Jordan et al. 2024).
        assert values.min() > 0.6, name
        assert values.max() < 1.3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "expert_weights"),
    [
        ("adamw", (1, 2, 2, 2), "hidden"),
        ("adamw", (1, 1, 8, 1), "folded"),
        ("muon", (1, 1, 8, 1), "hidden"),
        ("muon", (1, 2, 2, 2), "folded"),
    ],
)
def test_an_update_does_not_depend_on_the_mesh(name, mesh, expert_weights):
    gradients, params = random_tree(1), random_tree(2)
    options = {"name": name, "learning_rate": 1.0, "muon_learning_rate": 1.0}
    one = first_update((1, 1, 1, 1), gradients, params, **options)
    many = first_update(mesh, gradients, params, expert_weights, **options)
    for key in DIMS:
        largest = np.abs(one[key]).max()
        np.testing.assert_allclose(many[key], one[key], atol=1e-5 * largest, rtol=0)


def test_muons_other_parameters_follow_adam_without_decay():
    gradients, params = random_tree(1), random_tree()
    options = {"learning_rate": 0.1, "clip_norm": None}
    muon = first_update((1, 1, 1, 1), gradients, params, name="muon", weight_decay=0.5, **options)
    adam = first_update((1, 1, 1, 1), gradients, params, weight_decay=0.0, **options)
    for key in ("table", "router", *VECTORS):
        np.testing.assert_array_equal(muon[key], adam[key])
    assert not np.allclose(muon["query"], adam["query"])


@pytest.mark.slow
def test_momentum_gathers_what_gradients_agree_on():
    """Five steps of a constant gradient leave Adam's step at the learning rate."""
    layout = build_layout(MeshConfig())
    cfg = OptimizerConfig(warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=None)
    optimizer = Optimizer(cfg, DIMS, everywhere(layout), 10)
    params = jax.tree.map(jnp.zeros_like, random_tree(layers=1))
    gradients, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    for _ in range(5):
        before, one = params, jnp.float32(1)
        params, state = optimizer.update(gradients, state, params, norm=one, finite=one > 0)
    for now, then in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
        np.testing.assert_allclose(now - then, -cfg.learning_rate, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(name):
    def two(gradients, broken, params, layout):
        optimizer = Optimizer(OptimizerConfig(name=name), DIMS, everywhere(layout), 10)
        before = step(optimizer, gradients, optimizer.init(params), params)
        return before, step(optimizer, broken, before[1], before[0], finite=False)

    broken = random_tree(2)
    for x in broken.values():
        x[0] = np.nan
    before, after = on_mesh((1, 1, 1, 1), two, random_tree(1), broken, random_tree(), out=P())
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert all(int(x) == 1 for x in jax.tree.leaves(before[1]) if x.ndim == 0)


@pytest.mark.slow
def test_layers_are_updated_as_if_each_were_alone():
    trees = random_tree(1, layers=3), random_tree(2, layers=3)
    options = {"name": "muon", "muon_learning_rate": 1.0, "clip_norm": None}
    whole = first_update((1, 1, 1, 1), *trees, **options)
    last = [{name: x if name == "table" else x[2:] for name, x in tree.items()} for tree in trees]
    alone = first_update((1, 1, 1, 1), *last, **options)
    for name in ("query", "out", "up", "down", "to_latent", "from_latent"):
        np.testing.assert_allclose(whole[name][2], alone[name][0], atol=1e-5)
