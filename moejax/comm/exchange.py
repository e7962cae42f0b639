"""Carries buckets of rows along a route, and their results home.

Per device, inside shard_map. A bucket is a fixed number of rows bound for one peer, padded with
zeros: static shapes are what every backend's all-to-all supports.
"""

import jax

from moejax.comm import wire
from moejax.comm.route import Route


def send(x_PJD: jax.Array, route: Route) -> jax.Array:
    """Takes bucket p to peer p. Returns `x_QJD`: one bucket from each sender, in rank order.

    Also carries the metadata that describes a bucket (any array that leads with P).
    Wire per device: all_to_all (P - 1) / P of x's bytes, gather (n - 1) times what it holds.
    """
    for hop in route:
        if hop.kind == "all_to_all":
            x_PJD = wire.all_to_all(x_PJD, hop.axes)
        else:
            x_PJD = wire.all_gather(x_PJD, hop.axes, dim=0)
    return x_PJD


def send_back(y_QJD: jax.Array, route: Route) -> jax.Array:
    """Takes each sender's bucket home, mirroring `send`: gathered rows are summed."""
    for hop in reversed(route):
        if hop.kind == "all_to_all":
            y_QJD = wire.all_to_all(y_QJD, hop.axes)
        else:
            y_QJD = wire.reduce_scatter(y_QJD, hop.axes, dim=0)
    return y_QJD
