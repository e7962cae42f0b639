"""Small clusters, and small models to plan on them."""

from dataclasses import replace

from moejax.config.checks.planned import pinned
from moejax.config.schema import Config, PlanConfig
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Host, Link, Tier, Topology, same_links
from moejax.plan.search.space import Limits
from tests.cases import small_config

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
    host: Host | None = None,
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
    )
    tiers = (
        Tier("host", inside, same_links(Link(startup / 10, fast)), compute_share=compute_share),
        Tier("network", nodes, same_links(Link(startup, slow))),
    )
    return Topology(1, "test", "made up", device, tiers, host=host)


def to_plan(batch: int = 32, *, model: dict | None = None, moe: dict | None = None) -> Config:
    """A small config whose plan is free; without `capacity_factor`, so with overflow rounds."""
    shapes = {"vocab_size": 264, "mlp_hidden": 384} | (model or {})
    cfg = small_config(model=shapes, moe=moe or {}, train={"batch_sequences": batch})
    return replace(cfg, plan=PlanConfig(mode="auto"))


def limits_of(cfg: Config, topology: Topology, **changes) -> Limits:
    """The limits of a search on a cluster: what the config sets stays."""
    platform = topology.device.platform
    base = Limits(topology.devices, topology.nodes, platform, pinned=pinned(cfg))
    return replace(base, **changes)
