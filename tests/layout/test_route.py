import pytest

from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout
from moejax.layout.route import ROUTES, build_route, explain

CROSSING = build_layout(MeshConfig(replica=1, expert=4, tensor=2, nodes=2))


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_is_explained_in_one_line(name):
    line = explain(build_route(name, CROSSING))
    assert "\n" not in line
    assert line.startswith(f"{name} (all-to-all expert_slow")
    assert line.endswith(ROUTES[name])


def test_an_explanation_names_hops_chunks_and_trimming():
    line = explain(build_route("two_level", CROSSING, chunks=4, chunks_backward=2))
    assert "(all-to-all expert_slow > all-to-all expert_fast > gather tensor)" in line
    assert line.endswith("; 4 chunks forward, 2 backward")
    assert explain(build_route("split", CROSSING, trim=True)).endswith("; only filled rows travel")


def test_without_an_exchange_there_is_no_route():
    alone = build_layout(MeshConfig(replica=8))
    assert explain(build_route("split", alone)) == "none: every device has all experts"
