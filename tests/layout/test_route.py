import pytest

from moejax.config.compression import NO_CODECS, Codecs, CodecSpec
from moejax.config.schema import MeshConfig
from moejax.layout.layout import Layout, build_layout
from moejax.layout.route import ROUTES, build_route, explain

CROSSING = build_layout(MeshConfig(replica=1, expert=4, tensor=2, nodes=2))
CODECS = Codecs(dispatch=CodecSpec("int8"))


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


@pytest.mark.parametrize("name", ROUTES)
def test_the_first_hop_alone_has_codecs(name):
    first, *others = build_route(name, CROSSING, codecs=CODECS).hops
    assert first.codecs == CODECS
    assert {hop.codecs for hop in others} <= {NO_CODECS}


def test_a_hop_behind_the_first_that_would_have_codecs_is_refused(monkeypatch):
    """Its rows would cross nodes as they are: only the source encodes."""
    monkeypatch.setattr(Layout, "between_nodes", lambda layout, axes: axes[:1])  # each hop crosses
    with pytest.raises(ValueError, match="route two_level: a hop behind the first"):
        build_route("two_level", CROSSING, codecs=CODECS)
    assert len(build_route("two_level", CROSSING).exchanges) == 2
