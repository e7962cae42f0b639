"""What a search says when it finds no plan."""

from collections.abc import Sequence

from moejax.config.schema import Config
from moejax.plan.search.space import Limits


def why_none(cfg: Config, limits: Limits, peaks: Sequence[int], memory_budget: float) -> str:
    """Returns why there is no plan, and what to change.

    Args:
      peaks: bytes of a device that each traced plan needs; none: no mesh obeys the rules.
      memory_budget: bytes of a device that a plan may use.
    """
    where = f"{limits.devices} devices on {nodes_text(limits.nodes)}"
    names = ", ".join(sorted(limits.pinned))
    free = f", or leave what is pinned to the planner: {_free(limits)}" if names else ""
    if not peaks:
        return (
            f"no plan for {where}. No mesh obeys all rules with train.batch_sequences = "
            f"{cfg.train.batch_sequences} and what is pinned ({names or 'nothing'}). Change the "
            f"batch{free}."
        )
    return (
        f"no plan fits {where}. The smallest plan needs {min(peaks) / 2**30:.1f} GiB of a device; "
        f"{memory_budget / 2**30:.1f} GiB may be used. Offer more devices{free}."
    )


def nodes_text(nodes: int) -> str:
    """Returns a number of nodes as text."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _free(limits: Limits) -> str:
    """Returns the flag of `moejax plan` that frees what is pinned."""
    groups = {name.split(".")[0] if name.startswith("mesh.") else name for name in limits.pinned}
    return f"--free {','.join(sorted(groups))} of moejax plan"
