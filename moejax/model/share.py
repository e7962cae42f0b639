"""Attention of a stage's share of the positions to all of them.

Per device, inside shard_map. In a loss step every pipeline stage has a share of each sequence's
positions (`comm.links.Link.scatter_positions`). A block that runs there attends from a share: its
queries stay, and keys and values of all positions are gathered over the stages.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from moejax.annotations import Array, Float, Int
from moejax.comm import links, wire
from moejax.kernels.attention.sliced_attention import sliced_attention
from moejax.layout.layout import Layout


@dataclass(frozen=True)
class Share:
    """This stage's share of the positions.

    Attributes:
      layout: layout with the stages.
      segment_BS: document of each position of the sequences.
    """

    layout: Layout
    segment_BS: Int[Array, "B S"]

    @property
    def position_T(self) -> Int[Array, " T"]:
        """Its positions in the sequence."""
        position_S = jnp.arange(self.segment_BS.shape[1])
        return links.share_of_positions(position_S[None], self.layout)[0]

    def attend(
        self,
        q_BTHC: Float[Array, "B T H C"],
        k_BTGC: Float[Array, "B T G C"],
        v_BTGV: Float[Array, "B T G V"],
        **form: Any,
    ) -> Float[Array, "B T H V"]:
        """Returns the result of `attention` for the queries of this share.

        Wire: keys and values of each stage, gathered.

        Args:
          form: further arguments of `sliced_attention`.
        """
        P, here = self.layout.size(self.layout.stage), wire.index(self.layout.stage)
        every = (
            links.gather_positions(k_BTGC, self.layout),
            links.gather_positions(v_BTGV, self.layout),
        )
        parts = links.parts_per_share(self.layout)
        cut = [jnp.split(x, parts, axis=1) for x in (q_BTHC, k_BTGC, v_BTGV)]
        results = [
            sliced_attention(
                *own,
                past=every,
                segment_BS=self.segment_BS,
                number=n * P + here,
                numbers=range(n * P, (n + 1) * P),
                **form,
            )
            for n, own in enumerate(zip(*cut, strict=True))
        ]
        return jnp.concatenate(results, axis=1)
