"""The traced step as a schedule: what is counted, and that nothing depends on the mesh's size."""

import dataclasses
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from moejax.aot.compiled import CompiledText
from moejax.config.schema import CompressionConfig
from moejax.kernels.experts.expert_mlp import expert_mlp
from moejax.kernels.experts.quantized_rows import dequantize_combine, permute_quantize
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.plan.trace.reader import collectives, read
from moejax.plan.trace.schedule import TRAFFIC, Collective, Op, Schedule, collectives_of, walk
from moejax.step.train_step import build_step
from tests.cases import CERTAIN, small_config, step_for


def schedule_of(cfg, rounds=0):
    train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
    return read(traced.jaxpr, rounds=rounds)


def flops(schedule, scope=None):
    return sum(op.flops * n for op, n in walk(schedule) if scope in (None, op.scope))


def test_products_are_counted_with_their_loops():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]

    traced = jax.make_jaxpr(function)(jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert flops(read(traced)) == 5 * 2 * 4 * 8 * 8


def test_a_product_has_the_name_of_its_part_also_in_backward():
    """And not the letters of `jnp.einsum`."""

    def function(x, w):
        with jax.named_scope("attention"):
            return jnp.sum(jnp.einsum("td,dc->tc", x, w) ** 2)

    traced = jax.make_jaxpr(jax.grad(function, (0, 1)))(jnp.ones((4, 8)), jnp.ones((8, 8)))
    schedule = read(traced)
    assert flops(schedule, "attention") == flops(schedule) == 3 * 2 * 4 * 8 * 8


def test_elementwise_chains_are_one_region_that_reads_and_writes_once():
    def function(x):
        return jnp.exp(jnp.sin(x) * 2 + 1) - x

    (op,) = read(jax.make_jaxpr(function)(jnp.ones((16, 16)))).ops
    assert op.kind == "region"
    assert op.bytes == 2 * 16 * 16 * 4


def test_what_nobody_reads_is_left_out():
    def function(x, w):
        _unread = jnp.sin(x @ w) @ w
        return x @ w

    schedule = read(jax.make_jaxpr(function)(jnp.ones((4, 8)), jnp.ones((8, 8))))
    assert flops(schedule) == 2 * 4 * 8 * 8


def test_experts_that_work_again_for_their_backward_leave_out_what_only_results_need():
    M, D, F, G = 64, 8, 16, 2
    x, w_in, w_out = jnp.ones((M, D)), jnp.ones((G, D, 2, F)), jnp.ones((G, F, D))
    sizes = jnp.full((G,), M // G)

    def gradients(results):
        def function(x, w_in, w_out, dy):
            operate = partial(expert_mlp, sizes_G=sizes, implementation="blocked")
            y, pull = jax.vjp(operate, x, w_in, w_out)
            return (y, pull(dy)) if results else pull(dy)

        return flops(read(jax.make_jaxpr(function)(x, w_in, w_out, x)))

    product = 2 * M * D * F
    assert gradients(results=True) == (3 + 6) * product
    assert gradients(results=False) == (2 + 6) * product


def test_a_region_never_waits_for_what_waits_for_it():
    def function(x, w):
        y = jnp.sin(x)
        z = y @ w
        return jnp.cos(y) + z, z * 2

    schedule = read(jax.make_jaxpr(function)(jnp.ones((8, 8)), jnp.ones((8, 8))))
    for place, op in enumerate(schedule.ops):
        assert all(earlier < place for earlier in op.after)
    assert [op.kind for op in schedule.ops].count("product") == 1


def test_slices_count_what_they_take():
    schedule = read(jax.make_jaxpr(lambda x: x[3:5] + 1)(jnp.ones((100, 10))))
    assert sum(op.bytes for op in schedule.ops) == 2 * (2 * 10 * 4)


def test_writes_in_place_count_what_is_written():
    def function(x, y):
        return jax.lax.dynamic_update_slice(x, y, (2, 0))

    traced = jax.make_jaxpr(function)(jnp.ones((100, 10)), jnp.ones((1, 10)))
    (op,) = read(traced).ops
    assert (op.kind, op.bytes) == ("write", 2 * 10 * 4)


def test_rows_by_index_cost_the_rows_not_the_table():
    """1000 rows of 10 float32; 4 of them read, added to or written. An index takes four bytes."""
    table, rows, index = jnp.ones((1000, 10)), jnp.ones((4, 10)), jnp.zeros(4, jnp.int32)
    moved = 2 * 4 * 10 * 4 + 4 * 4

    def bytes_of(function):
        ops = read(jax.make_jaxpr(function)(table, rows, index)).ops
        return sum(op.bytes for op in ops if op.kind == "gather")

    take = dict(mode="promise_in_bounds", unique_indices=True)
    assert bytes_of(lambda t, r, i: t.at[i].get(**take) * r) == moved
    assert bytes_of(lambda t, r, i: t.at[i].add(r, **take)) == moved
    assert bytes_of(lambda t, r, i: t.at[i].set(r, **take)) == moved


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
def test_rows_that_a_kernel_moves_cost_the_bytes_of_each():
    """A kernel's rows are fetched one by one, however small what they are fetched from."""
    N, K, M, D, block = 16, 4, 80, 1024, 128

    def function(x, source, place):
        q = permute_quantize(x, source, "int8", block=block, implementation="mosaic")
        options = {"dtype": x.dtype, "implementation": "mosaic"}
        return dequantize_combine(q, None, place, "int8", D, **options)

    arrays = jnp.ones((N, D), jnp.bfloat16), jnp.zeros(M, int), jnp.zeros((N, K), int)
    gathers = [op for op in read(jax.make_jaxpr(function)(*arrays)).ops if op.kind == "gather"]
    quantised = D + 4 * (D // block)
    assert [op.bytes for op in gathers] == [M * (2 * D + quantised), N * (K * quantised + 2 * D)]


def test_the_steps_flops_are_the_models():
    """Of one device: attention and output projections, and full buckets of the experts' rows."""
    cfg = small_config(moe={"capacity_factor": 1.0})
    model, tokens = cfg.model, 8 * 16
    schedule = schedule_of(cfg)
    D, F, K = model.width, cfg.moe.expert_hidden, cfg.moe.experts_per_token
    # Forward, and twice that backward.
    assert flops(schedule, "experts") == 3 * 6 * tokens * K * D * F
    # Logits, then their gradients by the tokens and by the weights.
    assert flops(schedule, "loss") == 3 * 2 * tokens * D * model.vocab_size


@pytest.mark.exhaustive
def test_each_remat_step_keeps_more_products_from_being_computed_again():
    executed = {}
    for remat in ("none", "experts", "attention", "token_collectives", "full"):
        schedule = schedule_of(small_config((1, 2, 2, 2), model={"remat": remat}))
        executed[remat] = flops(schedule), flops(schedule, "experts")
    # Queries, keys and values are computed again.
    assert executed["none"][0] <= executed["experts"][0] < executed["attention"][0]
    assert executed["experts"][1] == executed["none"][1]
    # With attention kept, only experts are computed again.
    assert executed["attention"][1] == executed["token_collectives"][1] > executed["experts"][1]
    again = executed["attention"][1] - executed["experts"][1]
    assert executed["attention"][0] - executed["experts"][0] == again
    assert executed["attention"][0] < executed["token_collectives"][0] < executed["full"][0]


def test_loops_run_their_trips_times_the_iterations_of_one():
    """A loop of 2 trips with 3 iterations in each runs its operation 6 times; nested, 12 times."""
    sent = Collective("all_to_all", ("expert",), "float32", 8, 1)
    body = Schedule((Op("product", flops=5.0), Op("collective", collective=sent)), ())
    loop = Op("loop", body=body, trip_count=2, unrolled=3)
    outer = Op("loop", body=Schedule((loop,), ()), trip_count=2)
    for schedule, times in ((Schedule((loop,), ()), 6), (Schedule((outer,), ()), 12)):
        assert [(op.kind, n) for op, n in walk(schedule)] == [
            ("product", times),
            ("collective", times),
        ]
        assert [one.calls for one in collectives_of(schedule)] == [times]


@pytest.mark.slow
def test_every_class_of_traffic_is_named():
    cfg = small_config((2, 1, 2, 2))
    named = {one.traffic for one in collectives_of(schedule_of(cfg))}
    others = {"weights", "stage", "stage_gradient", "update", "context", "outer"}
    assert named >= set(TRAFFIC) - others
    sharded = schedule_of(small_config((1, 4, 2, 1)))
    assert "weights" in {one.traffic for one in collectives_of(sharded)}


LATENT = {"attention": "latent", "kv_latent": 16, "rope_width": 4}


def channels_of(model):
    """Channels that are sent of a position: of its latent, or of its keys and values."""
    small = small_config().model
    return 16 + 4 if model is LATENT else 2 * small.num_kv_heads * small.head_width


@pytest.mark.parametrize(
    ("exchange", "model", "forward", "backward"),
    [
        # Two sequences of 64 positions on 4 devices; of keys and values, or of latents.
        ("gather", {"dtype": "bfloat16"}, 2 * 64 / 2, 2 * 64),  # gradients: train.gradient_dtype
        ("gather", LATENT, 2 * 64, 2 * 64),
        # The last 2 of the 4 stripes of a device: of half of these up, of half down.
        ("gather", {"sliding_window": 3, "dtype": "bfloat16"}, 2 * 4 * 2 / 2, 2 * 4 * 2),
        # A quarter of them, three hops, forward twice; gradients four.
        ("ring", {"remat": "full"}, 2 * 3 * 2 * 16, (3 + 4) * 2 * 16),
    ],
)
def test_keys_of_shared_sequences_are_counted_by_the_formula(exchange, model, forward, backward):
    cfg = small_config((1, 1, 4, 1), model=model, train={"batch_sequences": 2})
    forward, backward = (4 * channels_of(model) * positions for positions in (forward, backward))
    shared = {"context": 4, "context_stripe": 4, "context_exchange": exchange}
    cfg = dataclasses.replace(
        cfg,
        mesh=dataclasses.replace(cfg.mesh, **shared),
        data=dataclasses.replace(cfg.data, sequence_length=64),
    )
    sent = Counter()
    for one in collectives_of(schedule_of(cfg)):
        if one.traffic == "context":
            # A ring is a chain and the way around; each device sends in one of both.
            share = len(one.senders) / 4 if exchange == "ring" else 1
            sent[one.kind] += one.bytes * one.calls * share
    if exchange == "ring" or model.get("sliding_window"):
        assert sent == {"ppermute": forward + backward}
    else:
        assert sent == {"all_gather": forward, "reduce_scatter": backward}


@pytest.mark.parametrize("model", [{}, LATENT])
def test_tensor_ranks_gather_a_part_each(model):
    """Keys of their heads; of latents their positions, which they then gather in their group."""
    cfg = small_config((1, 1, 4, 2), model=model, train={"batch_sequences": 2})
    mesh = dataclasses.replace(cfg.mesh, context=4, context_stripe=1)
    sent = sum(
        one.bytes * one.calls
        for one in collectives_of(schedule_of(dataclasses.replace(cfg, mesh=mesh)))
        if one.traffic == "context" and one.kind == "all_gather" and "expert" in one.axes
    )
    assert sent == 4 * channels_of(model) * 2 * 16 / 2


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_all_devices_agree_on_numbers_three_times_a_step(layers):
    """On targets, on every layer's load, on losses and the norm: no layer waits for all devices."""
    router = {"bias_update_rate": 0.1}
    cfg = small_config(
        (2, 1, 2, 2), model={"num_layers": layers}, moe={"capacity_factor": 1.0}, router=router
    )
    small = [
        (one.traffic, one.calls)
        for one in collectives_of(schedule_of(cfg))
        if one.kind == "all_reduce" and len(one.axes) >= 3 and one.traffic != "dense_gradient"
    ]
    assert small == [("", 1), ("loss", 1), ("update", 1)]


def test_tokens_classes_are_of_equal_size_both_ways():
    """But for one number of each row, which goes back with the gradients of results."""
    sizes = Counter()
    cfg = small_config((1, 1, 8, 1), moe={"capacity_factor": 1.0})
    for one in collectives_of(schedule_of(cfg)):
        sizes[one.traffic] += one.bytes * one.calls
    assert sizes["dispatch"] == sizes["combine"] == sizes["dispatch_backward"] > 0
    numbers = sizes["dispatch"] / cfg.model.width
    assert sizes["combine_backward"] == sizes["dispatch"] + numbers


def test_overflowing_buckets_take_the_branch_that_goes_in_rounds():
    usual, three = (schedule_of(small_config((1, 1, 8, 1)), rounds) for rounds in (0, 3))
    names = [op.scope for op in _loops(three)]
    assert "rounds" in names
    assert "rounds" not in [op.scope for op in _loops(usual)]
    assert all(op.trip_count == 3 for op in _loops(three) if op.scope == "rounds")


def _loops(schedule):
    for op in schedule.ops:
        if op.body is not None:
            yield op
            yield from _loops(op.body)


@pytest.mark.slow
def test_a_thousand_devices_are_read_as_fast_as_eight():
    """Not timed: the program has as many operations, whatever the size of the mesh."""
    moe = {"num_experts": 128, "capacity_factor": 1.0}
    few = small_config((1, 2, 4, 1), moe=moe, model={"width": 128})
    many = small_config(
        (2, 4, 128, 1), moe=moe, model={"width": 512}, train={"batch_sequences": 1024}
    )
    sizes = [sum(1 for _ in walk(schedule_of(cfg))) for cfg in (few, many)]
    assert sizes[1] < 1.2 * sizes[0]


CODECS = {
    "dispatch": "int8",
    "combine": "e4m3",
    "dispatch_backward": "bfloat16",
    "combine_backward": "int4",
    "dense_gradient": "int4+feedback",
    "expert_gradient": "loco",
    "weights": "int8",
}
USUAL = ("combine", "dense_gradient")  # the others are for `make test-all CASES=every`


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in USUAL else pytest.mark.exhaustive)
        for kind in sorted(CODECS)
    ],
)
def test_codecs_are_counted_as_the_compiler_does(kind):
    """The census equals the compiled program's, for every class of traffic with a codec."""
    cfg = small_config((2, 2, 2, 1), moe={"capacity_factor": 2.0}, model={"scan_layers": False})
    mesh = dataclasses.replace(cfg.mesh, nodes=8)
    compression = CompressionConfig(**{kind: CODECS[kind]})
    assert_counted(step_for(dataclasses.replace(cfg, mesh=mesh, compression=compression)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "exchange"),
    [
        pytest.param({}, "gather", marks=pytest.mark.exhaustive),
        pytest.param({"sliding_window": 3}, "gather", marks=pytest.mark.exhaustive),
        (LATENT, "gather"),
        ({}, "ring"),
    ],
)
def test_keys_of_shared_sequences_are_counted_as_the_compiler_does(model, exchange):
    """All of them across two nodes first, and then inside; those before each stripe; along a ring.

    Latents travel and not the keys that they become.
    """
    model = {"scan_layers": False} | model
    cfg = small_config((1, 2, 2, 1), model=model, train={"batch_sequences": 2}, moe=CERTAIN)
    shared = {"context": 4, "context_stripe": 2, "context_exchange": exchange}
    mesh = dataclasses.replace(cfg.mesh, nodes=2, **shared)
    assert_counted(step_for(dataclasses.replace(cfg, mesh=mesh)))


def assert_counted(train_step):
    """The program's collectives are as many, and as many bytes, of each kind as the compiler's."""
    traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
    text = CompiledText(traced.lower().compile().as_text(), dict(train_step.layout.sizes))
    counted, compiled = Counter(), Counter()
    for found, ones in ((counted, collectives(traced.jaxpr)), (compiled, text.exchanges())):
        for one in ones:
            found[one.kind] += one.calls
            found[one.kind, "bytes"] += one.calls * one.bytes
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "ppermute"):
        assert compiled[kind] == counted[kind], kind
        assert compiled[kind, "bytes"] == counted[kind, "bytes"], kind
