"""Experts in places: any table gives the same logits and texts, and compiles nothing anew."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moejax
from moejax.config.schema import LoraConfig
from moejax.errors import InputError
from moejax.serve import programs as serve_programs
from moejax.serve.batch import Batch, Request
from moejax.serve.experts import places as places_module
from moejax.serve.experts.places import Places
from moejax.serve.experts.tables import PLANS, Cluster, Table, device_loads
from moejax.serve.programs import build_programs, no_tokens
from moejax.serve.samples import draw_samples
from tests.cases import CERTAIN, skew, small_config, some_of, step_for
from tests.serve.models import on_mesh, random_state
from tests.serve.test_live import Compilations, live_run

CLOSE = 1e-5  # of the largest logit
FORM = {"slots": 8, "positions": 24, "allowed": 64}
LAYERS = {"num_layers": 3, "first_dense_layers": 1, "num_kv_heads": 4}
BIASES = {"expert_bias": True, "router_bias": True}
LORA = {"lora": LoraConfig(rank=2, targets=("moe.w_*", "groups.1.*"))}
CASES = {
    "expert": ((1, 1, 4, 1), "hidden", 1, {}, {}),
    "expert and tensor, biases": ((1, 1, 2, 2), "hidden", 2, BIASES, {}),
    "all axes, adapters": ((1, 2, 2, 2), "hidden", 3, {}, LORA),
    "folded": ((2, 1, 2, 2), "folded", 1, {}, {"route": "merge"}),
    "whole, in two levels": ((1, 1, 4, 2), "whole", 2, {}, {"route": "two_level_merge"}),
    "replicated": ((1, 1, 2, 2), "hidden", 1, {}, {"activations": "replicated"}),
}
REQUESTS = [Request([5, 6, 7, n] * (1 + n // 4), 4, number=n, routing=True) for n in range(8)]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch, unchecked_annotations):
    """Pieces of 8 tokens; annotations are checked elsewhere."""
    monkeypatch.setattr(serve_programs, "SHORT", 8)
    monkeypatch.setattr(serve_programs, "LONG", 8)


def config(name="expert", **moe):
    mesh, weights, slots, more, settings = CASES[name]
    settings = dict(settings)
    activations = settings.pop("activations", "sequence")
    moe = {**moe, **more}
    cfg = small_config(mesh, activations=activations, expert_weights=weights, model=LAYERS, moe=moe)
    nodes = 2 if name == "whole, in two levels" else None
    mesh = dataclasses.replace(cfg.mesh, nodes=nodes)
    return dataclasses.replace(cfg, mesh=mesh, **settings), slots


def built(cfg, slots, **more):
    return build_programs(cfg, step_for(cfg).mesh, "cpu", **FORM | more, expert_slots=slots)


def logits_of(programs, state, length):
    """Logits behind rows of new tokens, from an empty cache."""
    tokens = no_tokens(programs, programs.slots, length)
    draw = np.random.default_rng(1)
    tokens = tokens._replace(
        token_RT=draw.integers(0, 64, tokens.token_RT.shape, np.int32),
        count_R=draw.integers(1, length + 1, tokens.count_R.shape, np.int32),
    )
    found = programs.extend(every=True)(state, tokens, programs.empty_cache())
    return np.asarray(found[0])


def texts(programs, state, count=None):
    return [one.ids for one in draw_samples(Batch(programs, state, count=count), REQUESTS)]


def any_table(draw, E, cluster):
    """Experts anywhere, in any shares, also none; each somewhere."""
    places = E + cluster.P * cluster.slots
    expert_M = np.concatenate([np.arange(E), draw.integers(0, E, places - E)])
    return with_shares(draw.permutation(expert_M), draw)


def with_shares(expert_M, draw):
    share_M = draw.choice([0.0, 1.0, 3.0], len(expert_M)) + 1e-9
    return Table(expert_M, share_M / np.bincount(expert_M, share_M)[expert_M])


def adverse(E, cluster):
    """Homes of the device behind, and one expert in all slots, which get all its choices."""
    per_device = E // cluster.P
    home_PM = np.roll(np.arange(E).reshape(cluster.P, -1), 1, axis=0)
    expert_PM = np.concatenate([home_PM, np.full((cluster.P, cluster.slots), 3)], axis=1)
    share_PM = np.ones(expert_PM.shape)
    share_PM[expert_PM == 3] = 0
    share_PM[:, per_device:] = 1 / (cluster.P * cluster.slots)
    return Table(expert_PM.reshape(-1), share_PM.reshape(-1))


@pytest.mark.parametrize("name", some_of(CASES, "all axes, adapters"))
def test_any_table_gives_the_same_logits_and_texts_and_compiles_nothing(name):
    cfg, slots = config(name)
    state, draw, E = random_state(cfg), np.random.default_rng(0), 8
    plain, programs = built(cfg, 0), built(cfg, slots)
    whole = on_mesh(state, plain)
    wanted = {length: logits_of(plain, whole, length) for length in (1, 8)}
    greedy = texts(plain, whole)
    places = Places(programs)
    placed = places.at_home(on_mesh(state, programs))
    cluster = places.cluster
    tables = [any_table(draw, E, cluster), adverse(E, cluster), any_table(draw, E, cluster)]
    counts = []
    for table in [None, *tables]:
        with Compilations() as compiled:
            if table is not None:
                placed = places.apply(placed, [table, any_table(draw, E, cluster)])
            for length, logits in wanted.items():
                found = logits_of(programs, placed, length)
                assert np.abs(found - logits).max() < CLOSE * np.abs(logits).max(), length
            assert texts(programs, placed) == greedy
        counts.append(compiled.count)
    assert counts[1] == 2, "a copy of a layer, and a move"
    assert counts[2:] == [0, 0]


def test_loads_count_the_choices_of_tokens_alone():
    cfg, slots = config("expert and tensor, biases")
    programs = built(cfg, slots)
    places = Places(programs)
    state = places.at_home(on_mesh(random_state(cfg), programs))
    batch = Batch(programs, state, count=places.count)
    samples = draw_samples(batch, REQUESTS)
    expert_TLK = np.concatenate([one.expert_TLK for one in samples])
    expert_TLK = expert_TLK[expert_TLK[:, 0, 0] >= 0]
    wanted = [np.bincount(expert_TLK[:, n].ravel(), minlength=8) for n in range(2)]
    np.testing.assert_array_equal(places.load_LE, wanted)


def test_overflow_is_counted_and_a_table_for_the_load_prevents_it():
    """Buckets hold 1.25 of a fourth of a device's 128 tokens: 40. All choose expert 0."""
    cfg, slots = config("expert", experts_per_token=1)
    state = random_state(cfg)
    state = state._replace(
        router_bias=jax.tree.map(
            np.asarray, skew(jax.tree.map(jax.numpy.asarray, state.router_bias), {0: 3.0})
        )
    )
    programs = built(cfg, slots, positions=72)
    places = Places(programs)
    placed = places.at_home(on_mesh(state, programs))
    requests = [Request([*range(64)], 1, number=n) for n in range(8)]
    samples = draw_samples(Batch(programs, placed, count=places.count), requests)
    assert places.load_LE.tolist() == [[512] + [0] * 7] * 2
    assert places.overflowed == 2 * 4 * (128 - 40)
    # Rounds hold 10 of each device's rows.
    assert places.rounds == 2 * 9
    placed = places.place(placed, places.load_LE, "greedy")
    assert device_loads(places.tables[0], np.eye(8)[0], places.cluster).tolist() == [0.25] * 4
    assert places.load_LE.sum() == 0
    # Expert 0 goes to a slot of each other device, in both layers.
    assert (places.replanned, places.moved) == (2, 2 * 3)
    again = draw_samples(Batch(programs, placed, count=places.count), requests)
    assert [one.ids for one in again] == [one.ids for one in samples]
    assert (places.overflowed, places.rounds) == (2 * 4 * (128 - 40), 2 * 9), "no more of them"


@pytest.mark.parametrize("name", some_of(CASES, "expert"))
def test_texts_do_not_depend_on_when_and_where_experts_move(name):
    """More texts than slots, so that some begin while others are under way; 8 devices."""
    cfg, slots = config(name, **CERTAIN)
    state, E = random_state(cfg), 8
    plain, programs = built(cfg, 0), built(cfg, slots)
    requests = [Request([5, 6, 7, n], 3 + n % 8, number=n, routing=True) for n in range(12)]
    wanted = draw_samples(Batch(plain, on_mesh(state, plain)), requests)
    expert_TLK = np.concatenate([one.expert_TLK for one in wanted])
    expert_TLK = expert_TLK[expert_TLK[:, 0, 0] >= 0]
    load_LE = [np.bincount(expert_TLK[:, n].ravel(), minlength=E) for n in range(2)]
    places = Places(programs)
    held = [places.at_home(on_mesh(state, programs))]

    @settings(max_examples=10)
    @given(st.sets(st.integers(0, 12)), st.integers(0, 2**16))
    def holds(moves, seed):
        draw, calls = np.random.default_rng(seed), itertools.count()
        places.load_LE[:] = 0

        def follow(state, running):
            if next(calls) in moves:
                state = places.apply(state, [any_table(draw, E, places.cluster) for _ in range(2)])
            held[0] = state
            return state

        batch = Batch(programs, held[0], count=places.count, follow=follow)
        found = draw_samples(batch, requests)
        assert [one.ids for one in found] == [one.ids for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=CLOSE)
        np.testing.assert_array_equal(places.load_LE, load_LE)

    holds()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("enough", "left"), [(10, [40, 52]), (17, [72, 68])])
def test_a_layer_is_looked_at_by_turns_while_texts_are_under_way(monkeypatch, enough, left):
    """All tokens choose expert 5. Calls of 64, 8, 8, 8, 8, 8, 8 of them; a look halves the load.

    A look knows the calls before. Of 4 devices the layers need 40 choices: the turns of the first
    are calls 0, 3, 6, and it has 0, 80, 64 then; those of the second are 1, 4, and it has 64, 56.
    Or they need 68: of 0, 80, 64 and 64, 88 only 80 and 88 are enough.
    """
    monkeypatch.setattr(places_module, "STEPS", 3)
    monkeypatch.setattr(places_module, "ENOUGH", enough)
    cfg, slots = config("expert", experts_per_token=1)
    state = random_state(cfg)
    biases = skew(jax.tree.map(jax.numpy.asarray, state.router_bias), {5: 3.0})
    state = state._replace(router_bias=jax.tree.map(np.asarray, biases))
    plain, programs = built(cfg, 0), built(cfg, slots)
    requests = [Request([n, 1, 2, 3, 4, 5, 6, 7], 7, number=n) for n in range(8)]
    wanted = draw_samples(Batch(plain, on_mesh(state, plain)), requests)
    places = Places(programs)
    placed = places.compile_moves(places.at_home(on_mesh(state, programs)))
    assert (places.counts, places.load_LE.sum()) == ((0, 0, 0), 0)
    home = device_loads(places.tables[1], np.eye(8)[5], places.cluster)
    assert home.tolist() == [0, 0, 1, 0]
    draw_samples(Batch(programs, placed), requests)  # compiles
    with Compilations() as compiled:
        batch = Batch(programs, placed, count=places.count, follow=places.follow)
        found = draw_samples(batch, requests)
    assert compiled.count == 0
    assert [one.ids for one in found] == [one.ids for one in wanted]
    assert places.load_LE.tolist() == [[0] * 5 + [load, 0, 0] for load in left]
    # Once each layer: expert 5 to a slot of each other device.
    assert (places.replanned, places.moved) == (2, 2 * 3)
    for table in places.tables:
        assert device_loads(table, np.eye(8)[5], places.cluster).tolist() == [0.25] * 4


def test_an_engine_moves_experts_in_the_middle_of_a_call(tmp_path, monkeypatch):
    monkeypatch.setattr(places_module, "STEPS", 2)
    monkeypatch.setattr(places_module, "ENOUGH", 1)
    cfg, _ = config("all axes, adapters", **CERTAIN)
    run = live_run(cfg, tmp_path)
    plain, engine = moejax.Engine(run), moejax.Engine(run, expert_slots=1, follow_load=True)
    prompts = [[5, 6, 7, 8], [1, 2, 3], [9] * 7]
    wanted, found = (one.sample(prompts, tokens=12) for one in (plain, engine))
    assert engine._places.replanned > 0, "no load was known before this call"
    for one, other in zip(found, wanted, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(engine.logits(prompts[0]), plain.logits(prompts[0]), atol=1e-4)


def test_an_engine_places_experts_and_takes_newer_weights(tmp_path):
    cfg, _ = config("all axes, adapters", **CERTAIN)
    run = live_run(cfg, tmp_path)
    plain, engine = moejax.Engine(run), moejax.Engine(run, expert_slots=1)
    prompts = [[5, 6, 7, 8], [1, 2, 3], [9] * 7]
    wanted, token_T = plain.logits(prompts[0]), np.array(prompts[0])
    engine.place_experts([[9, 1, 1, 1, 1, 1, 1, 1]] * 2)
    assert np.abs(engine.logits(token_T) - wanted).max() < CLOSE * np.abs(wanted).max()
    table = engine._places.tables[0]
    assert np.sum((table.expert_M == 0) & (table.share_M > 0)) == 2
    with Compilations() as compiled:
        engine.place_experts([[1, 1, 1, 1, 1, 1, 1, 9]] * 2, plan="eplb")
        moved = engine.logits(token_T)
    assert np.abs(moved - wanted).max() < CLOSE * np.abs(wanted).max()
    assert compiled.count == 0
    newer = run.state._replace(
        step=run.state.step + 1, params=jax.tree.map(lambda x: 1.1 * x, run.state.params)
    )
    plain.update(newer)
    engine.update(newer)
    wanted = plain.logits(token_T)
    assert np.abs(engine.logits(token_T) - wanted).max() < CLOSE * np.abs(wanted).max()
    with pytest.raises(InputError, match="have no slots"):
        plain.place_experts()
    for load, plan, message in (
        (np.ones(8), "best", "load does not fit"),
        (np.ones((2, 7)), "best", "load does not fit"),
        (-np.ones((2, 8)), "best", "load does not fit"),
        (np.ones((2, 8)), "worst", "unknown plan"),
    ):
        with pytest.raises(InputError, match=message):
            engine.place_experts(load, plan)


@pytest.mark.exhaustive
def test_an_engine_follows_the_load_of_its_calls(tmp_path):
    cfg, _ = config("expert", **CERTAIN)
    model = dataclasses.replace(cfg.model, num_layers=2)  # one with experts, which is not copied
    run = live_run(dataclasses.replace(cfg, model=model), tmp_path)
    biases = skew(run.state.router_bias, {2: 3.0, 3: 2.0})
    run = dataclasses.replace(run, state=run.state._replace(router_bias=biases))
    plain, engine = moejax.Engine(run), moejax.Engine(run, expert_slots=1, follow_load=True)
    texts = [[5, 6, 7, 8], [1, 2, 3], [9] * 7]
    wanted = plain.score(texts)
    for home in (True, False):  # nothing is known before the first call
        for one, other in zip(engine.score(texts), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        tables = engine._places.tables
        assert all((table.share_M.reshape(4, 3)[:, 2] == 0).all() for table in tables) == home
    assert not any(x.is_deleted() for x in jax.tree.leaves(run.state)), "the run's weights are gone"
    with pytest.raises(InputError, match="`expert_slots` is -1"):
        moejax.Engine(run, expert_slots=-1)


def test_slots_without_other_devices_are_refused():
    cfg = small_config((1, 2, 1, 1), model=LAYERS)
    with pytest.raises(InputError, match="`expert_slots` has no effect"):
        Places(built(cfg, 1))


def test_plans_have_a_cluster_of_nodes():
    places = Places(built(*config("whole, in two levels")))
    assert places.cluster == Cluster(2, 2, 2)
    assert set(PLANS) == {"greedy", "by_node", "first_fit", "eplb"}
