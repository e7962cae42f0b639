"""The list of known clusters."""

from io import StringIO

from rich.console import Console

from moejax.plan.cluster.file import known_clusters
from moejax.plan.report.clusters import print_cluster, print_clusters


def shown(show, *words):
    text = StringIO()
    show(*words, Console(file=text, width=80))
    return text.getvalue()


def test_every_cluster_is_one_short_line_without_its_sources():
    lines = shown(print_clusters).splitlines()
    assert max(map(len, lines)) <= 80
    for name in known_clusters():
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    assert "data sheet" not in "".join(lines)


def test_one_cluster_tells_its_sources():
    text = shown(print_cluster, "h200:4")
    assert "h200:4: 4 x 8 NVIDIA H200" in text
    assert "source: H200 data sheet" in text
