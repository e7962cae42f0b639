"""Sentences about the memory of hosts: what a plan keeps there, and what that costs."""

from moejax.config.schema import Config
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import HOST_MEMORY
from moejax.plan.price.host import crossover, saved_by_attention, saved_by_product
from moejax.plan.search.search import SearchResult

KEPT = {
    "optimizer": ("moments on the host", "of matrices: a piece of them at a time comes and goes"),
    "experts": ("experts on the host", "weights come while a layer attends, gradients go"),
    "residuals": ("residuals on the host", "what forward keeps for backward goes, and comes back"),
}


def host_parts(cfg: Config) -> dict[str, str]:
    """Returns the arrays that a plan keeps in the host's memory: name, meaning."""
    return dict(KEPT[name] for name, place in vars(cfg.memory).items() if place == "host")


def host_text(plan: PricedPlan, result: SearchResult) -> str | None:
    """Returns both memories of a plan and its copies between them; None if it takes no host's."""
    if not plan.node_bytes:
        return None
    device, host, node = (n / 2**30 for n in (plan.peak.bytes, plan.host_bytes, plan.node_bytes))
    moved, waited = host_seconds(plan)
    return (
        f"memory: {device:,.2f} GiB of a device and {host:,.2f} of its host, whose node needs "
        f"{node:,.1f} of {result.host_budget / 2**30:,.1f} GiB that may be used. Copies between "
        f"them take {moved * 1e3:,.2f} ms of a step; it waits {waited * 1e3:,.2f} ms for them."
    )


def host_seconds(plan: PricedPlan) -> tuple[float, float]:
    """Returns the seconds of copies between host and device in a step, and those exposed."""
    moved = waited = 0.0
    for share, simulated in plan.parts:
        sent = simulated.totals.sent
        moved += share * sum(seconds for (_, name), seconds in sent.items() if name == HOST_MEMORY)
        waited += share * simulated.totals.exposed.get(HOST_MEMORY, 0.0)
    return moved, waited


def residuals_text(result: SearchResult, topology: Topology) -> str | None:
    """Returns KARMA's rule on this cluster, where a plan recomputes or keeps residuals on hosts."""
    cfg, host = result.ranked[0].cfg, topology.host
    keeps = any(plan.cfg.memory.residuals == "host" for plan in result.ranked)
    again = cfg.model.remat != "none" or cfg.mesh.stage_keeps == "input"
    if host is None or not (keeps or again):
        return None
    rate = topology.device.peak(cfg.model.dtype)
    least = crossover(rate, host.to_device, host.from_device)
    kinds = {
        f"a product's result {cfg.model.width:,}": saved_by_product(cfg.model.width),
        f"causal attention's {cfg.data.sequence_length:,}": saved_by_attention(
            cfg.data.sequence_length
        ),
    }
    saved = " and ".join(kinds)
    pays = [name.partition("'s")[0] for name, flops in kinds.items() if flops > least]
    verdict = f"only {' and '.join(pays)} pays" if pays else "neither pays"
    return (
        f"Residuals on the host: of each byte kept, {saved} FLOPs are saved; where nothing hides "
        f"the copies, keeping beats recomputing above {least:,.0f}, so there {verdict}."
    )
