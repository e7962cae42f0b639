"""What a search says when it finds no plan."""

from collections.abc import Sequence

from moejax.config.schema import Config
from moejax.plan.search.space import Limits


def why_none(
    cfg: Config,
    limits: Limits,
    peaks: Sequence[int],
    memory_budget: float,
    meshes: int = 0,
    traces: int | None = None,
) -> str:
    """Returns why there is no plan, and what to change.

    Args:
      peaks: bytes of a device that each traced plan needs; none: no mesh obeys the rules.
      memory_budget: bytes of a device that a plan may use.
      meshes: number of meshes that obey the rules.
      traces: number of traces of the search, if they were spent; else None.
    """
    where = f"{limits.devices} devices on {nodes_text(limits.nodes)}"
    names = ", ".join(sorted(limits.pinned))
    free = f", or leave {names} to the planner" if names else ""
    if not peaks:
        return (
            f"no plan for {where}. No mesh obeys all rules with train.batch_sequences = "
            f"{cfg.train.batch_sequences} and what is pinned ({names or 'nothing'}). Change the "
            f"batch{free}."
        )
    untried = traces is not None and meshes > len(peaks)
    more = f", or look at more plans: --traces {2 * (traces or 0)}" if untried else ""
    of = "1 mesh" if meshes == 1 else f"{meshes:,} meshes"
    return (
        f"no plan fits {where}. The smallest of {len(peaks)} traced plans, of {of}, "
        f"needs {min(peaks) / 2**30:.1f} GiB of a device; {memory_budget / 2**30:.1f} GiB may be "
        f"used. Offer more devices, a smaller train.batch_sequences or shorter sequences"
        f"{free}{more}."
    )


def nodes_text(nodes: int) -> str:
    """Returns a number of nodes as text."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"
