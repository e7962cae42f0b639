"""Small clusters for tests."""

from moejax.plan.cluster.device import CodecRates, Device
from moejax.plan.cluster.topology import Link, Tier, Topology, same_links

GIB = 2**30


def cluster(
    *,
    inside: int = 4,
    nodes: int = 2,
    fast: float = 1e9,
    slow: float = 1e7,
    startup: float = 1e-4,
    memory: int = 8 * GIB,
    platform: str = "cpu",
    compute_share: float = 0.0,
) -> Topology:
    """Nodes of so many devices; rates in bytes a second of a device."""
    device = Device(
        name="test",
        platform=platform,
        memory_bytes=memory,
        products={"float32": ((1e6, 1e9), (1e9, 1e10))},
        copy_bytes_per_s=1e9,
        gather_bytes_per_s=5e8,
        startup_s=1e-5,
        codecs={"int8": CodecRates(1e9, 1e9)},
    )
    tiers = (
        Tier("host", inside, same_links(Link(startup / 10, fast)), compute_share=compute_share),
        Tier("network", nodes, same_links(Link(startup, slow))),
    )
    return Topology(1, "test", "made up", device, tiers)
