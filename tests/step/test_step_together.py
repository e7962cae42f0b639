"""Mesh, layout, route, routing and kind of model, all at once, against the one-device oracle.

Each value of each stands in at least one case, so a default run compiles few programs.
test_step_meshes and test_step_routes take them one by one, for `make test-all CASES=every`.
"""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from tests.annotations import without_annotations
from tests.cases import CERTAIN, small_config
from tests.step.against_oracle import check_against_oracle
from tests.step.test_step_meshes import KINDS, LAYOUTS, MESHES, ROUTINGS, join_kinds
from tests.step.test_step_routes import REDUCTIONS, ROUTES


@dataclass(frozen=True)
class Case:
    """A step; `kinds` are places in `KINDS`, `path` is the one that layers must take."""

    mesh: tuple[int, int, int, int]
    nodes: int = 1
    layout: tuple[str, str] = ("sequence", "hidden")
    route: str = "split"
    chunks: tuple[int, int] = (1, 1)
    k: int = 2
    score: str = "softmax"
    kinds: tuple[int, ...] = field(default=())
    path: str = "certain"


CASES = [
    Case((1, 1, 1, 8), k=1, score="sigmoid", kinds=(0, 4)),
    Case((1, 1, 8, 1), 2, route="two_level", chunks=(3, 2), score="sigmoid"),
    Case((8, 1, 1, 1), 4, k=8, kinds=(1, 5)),
    Case((1, 8, 1, 1), 2, k=1, kinds=(12,)),
    Case((1, 2, 4, 1), 1, route="merge", chunks=(2, 3), kinds=(2, 6)),
    Case((2, 1, 2, 2), 4, ("replicated", "hidden"), "duplicate", (1, 2), 8, kinds=(10, 11, 12, 13)),
    Case((1, 2, 2, 2), 4, ("sequence", "hidden"), "split", (3, 2), kinds=(3, 7)),
    Case((2, 2, 1, 2), 2, ("replicated", "folded"), k=1, kinds=(12,)),
    Case((1, 1, 4, 2), 1, ("replicated", "hidden"), "duplicate", (2, 2), kinds=(11,)),
    Case((1, 1, 2, 4), 1, ("sequence", "whole"), "merge", (2, 1), kinds=(11,)),
    Case((1, 1, 4, 2), 2, ("sequence", "folded"), "two_level_merge", (2, 2), kinds=(11, 12)),
    Case((2, 4, 1, 1), 4),
    Case((1, 2, 1, 4), kinds=(8, 11)),
    Case((1, 2, 2, 2), 1, chunks=(2, 3), kinds=(9, 12, 13)),
    # Without a capacity buckets overflow, or just do not.
    Case((1, 1, 8, 1), path="rounds"),
    Case((1, 1, 4, 2), 1, route="split", chunks=(3, 2), kinds=(11,), path="rounds"),
    Case((1, 1, 8, 1), 4, route="two_level_merge", chunks=(1, 2), k=8, path="rounds"),
    Case((2, 1, 4, 1), 4, route="two_level", k=8, path="usual"),
]

# Routes and kinds of which others have a case; for `make test-all CASES=every`.
RARE = [CASES[number] for number in (10, 11, 12)]


# Three axes, most kinds of blocks and losses, and overflow rounds: what `make test` runs.
USUAL = [CASES[number] for number in (5, 16)]


def how_often(case):
    """The mark of a case: none, slow or exhaustive."""
    if case in USUAL:
        return ()
    return pytest.mark.exhaustive if case in RARE else pytest.mark.slow


# Annotations are checked once with each layout, and where buckets overflow.
CHECKED = {case.layout: case for case in CASES if case.path == "certain"}.values()


@pytest.fixture
def annotations(case):
    """Leaves annotations unchecked in most cases; layers have tests that check theirs."""
    with nullcontext() if case in CHECKED or case.path != "certain" else without_annotations():
        yield


@pytest.mark.usefixtures("annotations")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=how_often(case)) for case in CASES],
    ids=lambda case: f"{case.route}-{case.mesh}-{case.path}",
)
def test_the_step_gives_the_oracles_loss_and_gradients(case):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices.
    moe = {"num_experts": 16, "experts_per_token": case.k, "implementation": "reference"}
    if case.path == "certain":
        moe |= CERTAIN
    changes = join_kinds(case.kinds)
    activations, expert_weights = case.layout
    cfg = small_config(
        case.mesh,
        activations=activations,
        expert_weights=expert_weights,
        model=changes["model"],
        moe=moe | changes["moe"],
        router={"score": case.score} | changes["router"],
        train=changes["train"],
    )
    cfg = dataclasses.replace(
        cfg,
        route=case.route,
        route_chunks=case.chunks[0],
        route_chunks_backward=case.chunks[1],
        mesh=dataclasses.replace(cfg.mesh, nodes=case.nodes),
    )
    parts = check_against_oracle(cfg, bias=((0, -10.0),), path=case.path)
    assert not parts.load_LE[:, 0].any()


def test_the_cases_together_have_every_value():
    def values(of):
        return {of(case) for case in CASES}

    assert values(lambda case: case.mesh) >= set(MESHES)
    assert values(lambda case: case.layout) >= set(LAYOUTS)
    assert values(lambda case: case.route) == {route for route, *_ in ROUTES}
    assert values(lambda case: case.k) == {k for k, _ in ROUTINGS}
    assert values(lambda case: case.score) == {score for _, score in ROUTINGS}
    assert {kind for case in CASES for kind in case.kinds} == set(range(len(KINDS)))
    assert values(lambda case: case.layout[1]) == {weights for *_, weights in REDUCTIONS}
