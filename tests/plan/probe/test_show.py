from dataclasses import replace

from moejax.plan.cluster.topology import Link, same_links
from moejax.plan.probe.show import unsteady
from tests.plan.clusters import cluster


def test_a_fit_that_is_far_off_is_doubted_in_one_line():
    topology = cluster()
    assert unsteady(topology) == []
    host, network = topology.tiers
    links = same_links(Link(1e-4, 1e9)) | {"all_reduce": Link(1e-4, 1e9, error=0.56)}
    (line,) = unsteady(replace(topology, tiers=(replace(host, links=links), network)))
    assert "fit error above 25%: all_reduce over host 56%." in line
