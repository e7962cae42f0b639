"""The dimension letters, the mesh axes, and which axes hold which dimension.

Arrays carry their shape in their name, one letter a dimension:

    B sequences          E experts (e: on this device)      V vocabulary
    T query positions    K experts chosen per token         L layers (stacked)
    S key positions      F hidden width of an MLP           U gate and up (2)
    D model width        N tokens on this device            P peers on the exchanging axis
    H query heads        A assignments, N * K               Q senders whose rows a device holds
    G key/value heads    R rows after the exchange          J rows of one bucket
    C channels a head    M rows of a matrix product

`t` is this device's share of T. Mesh axes are words, slowest link first:
`replica` (pure data parallel), `fsdp` (weights sharded, gathered on use), `expert`, `tensor`.
"""

import math
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from moejax.config import MeshConfig

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Where every array lives: sizes of the logical axes and the two choices of `MeshConfig`.

    A logical axis is a tuple of mesh axes, so that one which spans nodes can be a slow and a fast
    axis; code asks the layout for the tuple and never spells a mesh axis.
    """

    sizes: tuple[tuple[str, int], ...]
    replica: Axes = ("replica",)
    fsdp: Axes = ("fsdp",)
    expert: Axes = ("expert",)
    tensor: Axes = ("tensor",)
    sequence_sharded: bool = True
    folded: bool = False

    @property
    def mesh_axes(self) -> Axes:
        """All mesh axes, slowest link first."""
        return self.replica + self.fsdp + self.expert + self.tensor

    @property
    def token_axes(self) -> Axes:
        """Axes over which sequences are spread."""
        return self.replica + self.fsdp + self.expert

    @property
    def expert_owner_axes(self) -> Axes:
        """Axes over which the experts of a layer are spread."""
        return self.expert + self.tensor if self.folded else self.expert

    def size(self, axes: Axes) -> int:
        """Devices along `axes` taken together."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def param_axes(self, dims: str) -> tuple[Axes, ...]:
        """The mesh axes that shard each dimension of a parameter named by its letters.

        Experts (first letter E): experts over the expert axis, width over fsdp, hidden over tensor;
        folded: experts over (expert, tensor), hidden whole. Everything else: width over
        (fsdp, expert), heads, hidden and vocabulary over tensor. One dimension: whole everywhere.
        """
        if len(dims) == 1:
            return ((),)
        if dims[0] == "E":
            hidden = () if self.folded else self.tensor
            rules = {"E": self.expert_owner_axes, "D": self.fsdp, "F": hidden}
        else:
            rules = {"D": self.fsdp + self.expert}
            rules |= dict.fromkeys("HGFV", self.tensor)
        return tuple(rules.get(letter, ()) for letter in dims)

    def param_spec(self, dims: str, ndim: int) -> PartitionSpec:
        """The sharding of a parameter; stacked layers add unsharded dimensions in front."""
        axes = self.param_axes(dims)
        return PartitionSpec(*([None] * (ndim - len(axes))), *(a or None for a in axes))

    def token_spec(self) -> PartitionSpec:
        """The sharding of `token_BT`: sequences over the token axes, positions whole."""
        return PartitionSpec(self.token_axes)


def build_layout(mesh: MeshConfig) -> Layout:
    """Returns the layout of a resolved mesh (every axis size known)."""
    assert mesh.replica is not None, "resolve_mesh fills the replica axis first"
    sizes = tuple((axis, getattr(mesh, axis)) for axis in ("replica", "fsdp", "expert", "tensor"))
    return Layout(
        sizes=sizes,
        sequence_sharded=mesh.activations == "sequence",
        folded=mesh.expert_weights == "folded",
    )
