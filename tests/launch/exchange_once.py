"""Run by every process of a cluster: one all-to-all over all devices, each element checked."""

import sys
import time

from moejax.runtime.start import join

join()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from moejax.comm import wire  # noqa: E402

size = int(sys.argv[1])
count = jax.device_count()
mesh = jax.make_mesh((count,), ("d",))
sharding = NamedSharding(mesh, P("d"))


def block(index):
    """Rows that say who sends them, from and to whom."""
    rows = np.arange(count * count)[index[0]]
    return np.broadcast_to(rows[:, None], (rows.size, size)).astype(np.float32)


x = jax.make_array_from_callback((count * count, size), sharding, block)
spec = P("d")
exchange = jax.jit(
    jax.shard_map(lambda x: wire.all_to_all(x, ("d",)), mesh=mesh, in_specs=spec, out_specs=spec)
)
compiled = exchange.lower(x).compile()
began = time.perf_counter()
y = jax.block_until_ready(compiled(x))
seconds = time.perf_counter() - began
for shard in y.addressable_shards:
    me = shard.index[0].start // count
    wanted = np.arange(count) * count + me
    assert (np.asarray(shard.data) == wanted[:, None]).all(), f"device {me} got other rows"
print(f"process {jax.process_index()}: {count} devices exchanged in {seconds:.4f} s")
