"""Run by every process of a cluster: all-gathers between the devices of each process, timed."""

import sys
import time

from moejax.runtime.start import join

processes = join()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from moejax.comm import wire  # noqa: E402

size = int(sys.argv[1])
inside = jax.local_device_count()
mesh = jax.make_mesh((processes.count, inside), ("host", "inside"))
spec = P(("host", "inside"))
x = jax.make_array_from_callback(
    (jax.device_count() * size,),
    NamedSharding(mesh, spec),
    lambda index: np.arange(index[0].start, index[0].stop, dtype=np.float32),
)
gather = jax.jit(
    jax.shard_map(
        lambda x: wire.all_gather(x, ("inside",), dim=0),
        mesh=mesh,
        in_specs=spec,
        out_specs=P("host"),
        check_vma=False,
    )
)
jax.block_until_ready(gather(x))  # compiles and connects
seconds = []
for _ in range(3):
    began = time.perf_counter()
    y = jax.block_until_ready(gather(x))
    seconds.append(time.perf_counter() - began)
for shard in y.addressable_shards:
    first = processes.index * inside * size
    assert (np.asarray(shard.data) == np.arange(first, first + inside * size)).all()
print(f"process {processes.index}: gathered in {min(seconds):.4f} s")
