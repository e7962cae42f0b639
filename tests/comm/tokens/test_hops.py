"""Trimmed exchanges: of every bucket all that is filled arrives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.tokens.swap import PIECES, swap
from moejax.layout.route import Hop

MESH = Mesh(np.array(jax.devices()[:2]), ("expert",))


def test_the_filled_rows_of_large_buckets_arrive_and_no_others_need_to():
    """A bucket of more rows than there are steps: each step takes several rows."""
    rows = 3 * (PIECES - 28)  # in whole steps of three, as `usual_sizes` makes them
    hop = Hop("all_to_all", ("expert",))
    body = jax.shard_map(
        lambda x_PIJ, filled: swap(x_PIJ, hop, filled),
        mesh=MESH,
        in_specs=(P("expert"), P()),
        out_specs=P("expert"),
        check_vma=False,
    )
    exchange = jax.jit(body)
    x_PIJ = 1 + jnp.arange(4 * rows, dtype=jnp.float32).reshape(4, 1, rows)  # 2 peers of 2 devices
    wanted = np.asarray(x_PIJ)[[0, 2, 1, 3]]
    for filled in (0, 1, 2, 3, 100, 299, 300):
        got = np.asarray(exchange(x_PIJ, jnp.int32(filled)))
        np.testing.assert_array_equal(got[:, :, :filled], wanted[:, :, :filled])
        whole_steps = -(-filled // 3) * 3
        assert not got[:, :, whole_steps:].any(), "what is not filled stays at the source"
