"""The dimension letters, the mesh axes, and which axes hold which dimension.

Arrays carry their shape in their name, one letter a dimension:

    B sequences          E experts (e: on this device)      V vocabulary
    T query positions    K experts chosen per token         L layers (stacked)
    S key positions      F hidden width of an MLP           U gate and up (2)
    D model width        N tokens on this device            P peers on the exchanging axis
    H query heads        A assignments, N * K               Q senders whose rows a device holds
    G key/value heads    R rows after the exchange          J rows of one bucket
    C channels a head    M rows of a matrix product   I parts of a bucket, for chunks

`t` is this device's share of T. Mesh axes are words, slowest link first:
`replica` (pure data parallel), `fsdp` (weights sharded, gathered on use), `expert`, `tensor`.
"""

import math
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from moejax.config.schema import MeshConfig

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
    slow: Axes = ()  # mesh axes whose devices lie on different nodes
    sequence_sharded: bool = True
    expert_weights: str = "hidden"

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
        return self.expert + self.tensor if self.expert_weights == "folded" else self.expert

    @property
    def hidden_over_tensor(self) -> bool:
        """Whether the experts' hidden width is sharded, so that their results are partial sums."""
        return self.expert_weights == "hidden"

    def between_nodes(self, axes: Axes) -> Axes:
        """Those of `axes` that cross nodes."""
        return tuple(axis for axis in axes if axis in self.slow)

    def inside_node(self, axes: Axes) -> Axes:
        """Those of `axes` that stay inside a node."""
        return tuple(axis for axis in axes if axis not in self.slow)

    def size(self, axes: Axes) -> int:
        """Devices along `axes` taken together."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def param_axes(self, dims: str) -> tuple[Axes, ...]:
        """The mesh axes that shard each dimension of a parameter named by its letters.

        Experts (first letter E): experts over the expert axis, width over fsdp, hidden over tensor;
        folded: experts over (expert, tensor), hidden whole; whole: hidden whole, and the tensor
        ranks hold copies. Everything else: width over (fsdp, expert), heads, hidden and vocabulary
        over tensor. One dimension: whole everywhere.
        """
        if len(dims) == 1:
            return ((),)
        if dims[0] == "E":
            hidden = self.tensor if self.hidden_over_tensor else ()
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
    """Returns the layout of a resolved mesh (every axis size known).

    Devices fill nodes in mesh order, so an axis may lie inside a node, cross nodes, or do both; the
    last is split in a slow and a fast mesh axis.
    """
    assert mesh.replica is not None, "resolve_mesh fills the replica axis first"
    shape = {axis: getattr(mesh, axis) for axis in ("replica", "fsdp", "expert", "tensor")}
    room = math.prod(shape.values()) // (mesh.nodes or 1)  # devices of a node not yet spoken for
    sizes: list[tuple[str, int]] = []
    names: dict[str, Axes] = {}
    slow: list[str] = []
    for axis, size in reversed(shape.items()):
        inside = math.gcd(size, room)
        room //= inside
        if inside in (1, size):
            names[axis], found = (axis,), [(axis, size)]
            slow += [axis] if inside < size else []
        else:
            names[axis] = (f"{axis}_slow", f"{axis}_fast")
            found = [(names[axis][0], size // inside), (names[axis][1], inside)]
            slow.append(names[axis][0])
        sizes = found + sizes
    return Layout(
        sizes=tuple(sizes),
        **names,
        slow=tuple(slow),
        sequence_sharded=mesh.activations == "sequence",
        expert_weights=mesh.expert_weights,
    )
