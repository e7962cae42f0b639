"""Activations on the way forward: from stage to stage, and from the last stage to the loss step.

Per device, inside the shard_map of the training mesh.

Letters: those of `layout.layout`; P stages, V virtual stages on each.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.step.pipeline.inputs import build_inputs
from moejax.step.pipeline.model import StagedModel


class Activations(NamedTuple):
    """Hidden states between two ticks, as one stage holds them.

    Attributes:
      input_BtD: of the next forward task: the output of the previous stage.
      inbound: hidden states of the leading layers that pass this stage, on the way to the first;
        None where the embedding alone leads.
      output: of the last forward task, for the loss step: this stage's share of the positions of
        the last stage's output [B, t / P, D]. With several virtual stages this stage's own output
        [B, t, D], which is scattered when a loss step needs it: only one output in V of the last
        stage is that of the last virtual stage.
    """

    input_BtD: jax.Array
    inbound: Any
    output: jax.Array


class ActivationTransfers:
    """The transfers of activations of one model.

    Attributes:
      inputs: source of the first stage's inputs.
      initial: activations before the first tick: real tokens.
    """

    def __init__(self, staged: StagedModel):
        self.staged, self.inputs = staged, build_inputs(staged)
        self.interleaved = staged.virtual_stages > 1
        x_BtD, inbound = self.inputs.initial()
        share = x_BtD.shape[1] // staged.stages
        output = x_BtD if self.interleaved else x_BtD[:, :share]
        self.initial = Activations(x_BtD, inbound, output)
        self.link = staged.link("stage", x_BtD)

    def receive(
        self, activations: Activations, t: jax.Array, *, boundary: bool
    ) -> tuple[jax.Array, Any]:
        """Returns the input [B, t, D] of the forward task at tick t, and the next inbound.

        Args:
          boundary: whether the first stage takes a new micro-batch.
        """
        if not boundary:
            return activations.input_BtD, activations.inbound
        first_BtD, inbound = self.inputs.input_at(activations.inbound, t)
        is_first = self.staged.stage_index == 0
        return jnp.where(is_first, first_BtD, activations.input_BtD), inbound

    def send(self, y_BtD: jax.Array, inbound: Any) -> Activations:
        """Sends the output of a forward task to its next stage, and to the loss step.

        Wire: the encoded output to the next stage; with one virtual stage also a share of it from
        the last to each stage.
        """
        link = self.link
        input_BtD = link.to_next(link.encode_once(y_BtD), around=self.interleaved)
        output = y_BtD if self.interleaved else link.scatter_positions(y_BtD)
        return Activations(input_BtD, inbound, output)

    def last_output(self, activations: Activations) -> jax.Array:
        """Returns this stage's share of the positions of the last stage's output, [B, t / P, D].

        Wire: nothing; with several virtual stages a share of the encoded output, from the last to
        each stage.
        """
        output = activations.output
        return self.link.scatter_positions(output) if self.interleaved else output
