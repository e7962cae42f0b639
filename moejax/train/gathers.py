"""Whether a step waits for its weights: they are gathered over links between nodes, and long."""

from moejax.plan.cluster.topology import Topology
from moejax.step.train_step import TrainStep
from moejax.train.summary import Summary, human_bytes

# Taken where no cluster is named: an H100 or H200 in a large product, and its network adapter.
FLOPS_PER_S, BYTES_PER_S = 400e12, 50e9


def gather_note(train_step: TrainStep, summary: Summary, topology: Topology | None) -> str | None:
    """Returns a warning if gathers between nodes take longer than all products; else None.

    Args:
      topology: the cluster of the run; None: not known, and that of an H200 is assumed.
    """
    layout = train_step.layout
    sent, gathers = 0.0, 0.0
    for one in summary.collectives:
        across = layout.size(layout.between_nodes(one.axes))
        if one.traffic != "weights" or one.kind != "all_gather" or across == 1:
            continue
        inside = layout.size(layout.inside_node(one.axes))
        count = inside * across
        size = one.calls * one.bytes * (count - 1) / count / inside  # to another node
        sent += size
        if topology is None:
            gathers += size / BYTES_PER_S
        else:
            group = topology.group(inside, across)
            gathers += one.calls * max(topology.seconds(one.kind, one.bytes, *group))
    devices = layout.size(layout.mesh_axes)
    flops = summary.counts.flops_per_token * summary.tokens_per_step / devices
    rate, where = FLOPS_PER_S, f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s and {BYTES_PER_S / 1e9:.0f} GB/s"
    if topology is not None:
        rate = topology.device.product_rate(train_step.cfg.model.dtype, flops)
        where = topology.name
    products = flops / max(rate, 1.0)
    if gathers <= products:
        return None
    return (
        f"the step is bound by its gathers: {human_bytes(sent)} of weights cross nodes for each "
        f"device, {gathers:,.3g} s, and all products take {products:,.3g} s ({where}). Fewer "
        "micro-batches, shards inside a node or pipeline stages send less; moejax plan chooses "
        "them."
    )
