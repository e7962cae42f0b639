"""The dimension letters, the mesh axes, and the mesh axes that shard each dimension.

Arrays carry their shape in their name, one letter a dimension (a digit for a fixed size). The
letters of the model:

    B sequences             H query heads         E experts
    T positions (queries)   G key/value heads     K experts chosen per token
    S positions (keys)      C channels a head     F hidden width of an MLP or expert
    D model width           V vocabulary          U gate and up (2), or 1; W both joined (U * F)
    N tokens                L layers              A rank of an adapter
    Z width of a latent     R channels of a head that rotate
    O model width of the outputs, where inputs have it too (D)
    X positions that a short convolution sees
    I heads of an indexer, J channels of one
    Y one number of a block

Inside shard_map letters count what a device holds: its sequences, and under tensor sharding its
heads (H, G) and hidden width (F). `t` and `v` are its shares where T or V stand for all. Files
that use other letters list them at their top.

Mesh axes are words, slowest link first: `stage` (layers, one pipeline stage after the other),
`replica` (pure data parallel), `fsdp` (weights sharded, gathered on use), `expert` (experts),
`tensor` (heads, hidden width and vocabulary).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import PartitionSpec

from moejax.config.parts import node_parts
from moejax.config.schema import MeshConfig

Axes = tuple[str, ...]
RANK = "A"  # the letter of an adapter's rank


@dataclass(frozen=True)
class Layout:
    """The sharding of every array: sizes of the mesh axes, and the two choices of `MeshConfig`.

    A logical axis is a tuple of mesh axes, because an axis that spans nodes may be split in a slow
    and a fast mesh axis. Code asks the layout for the tuple and never spells a mesh axis.
    """

    sizes: tuple[tuple[str, int], ...]
    replica: Axes = ("replica",)
    fsdp: Axes = ("fsdp",)
    expert: Axes = ("expert",)
    tensor: Axes = ("tensor",)
    # Empty without pipeline stages. Parameters outside the stages, and data, are sharded over it.
    stage: Axes = ()
    # Empty but inside a site of an outer loop: the axes along which the sites lie.
    sites: Axes = ()
    stacked: Axes = ()  # mesh axes that shard the leading dimension of stacked layers
    slow: Axes = ()  # mesh axes whose devices lie on different nodes
    # The last of fsdp and expert whose devices share sequences, in stripes: see `comm.context`.
    context: Axes = ()
    stripe: int = 0  # positions
    sequence_sharded: bool = True
    expert_weights: str = "hidden"
    gathered: bool = False  # devices hold all that they would gather to use: for generation

    @property
    def mesh_axes(self) -> Axes:
        """All mesh axes, slowest link first; inside a site those of the site."""
        return self.stage + self.replica + self.fsdp + self.expert + self.tensor

    @property
    def token_axes(self) -> Axes:
        """Axes that shard the tokens of a batch."""
        return self.stage + self.replica + self.fsdp + self.expert

    @property
    def row_axes(self) -> Axes:
        """Axes that shard the sequences of a batch; those of `context` shard their positions."""
        return self.token_axes[: len(self.token_axes) - len(self.context)]

    @cached_property
    def inside(self) -> "Layout":
        """The layout inside a stage, whose devices hold its layers alone; itself without stages."""
        return replace(self, stage=(), stacked=self.stage) if self.stage else self

    @cached_property
    def site(self) -> "Layout":
        """The layout inside a site of an outer loop: sums over its axes stop at the site."""
        return replace(self, replica=(), sites=self.replica)

    @property
    def expert_owner_axes(self) -> Axes:
        """Axes that shard the experts of a layer."""
        return self.expert + self.tensor if self.expert_weights == "folded" else self.expert

    @property
    def hidden_over_tensor(self) -> bool:
        """True if tensor shards the experts' hidden width; their results are then partial sums."""
        return self.expert_weights == "hidden"

    def between_nodes(self, axes: Axes) -> Axes:
        """The axes among `axes` that cross nodes."""
        return tuple(axis for axis in axes if axis in self.slow)

    def inside_node(self, axes: Axes) -> Axes:
        """The axes among `axes` that stay inside a node."""
        return tuple(axis for axis in axes if axis not in self.slow)

    def size(self, axes: Axes) -> int:
        """Number of devices along all `axes` together."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def param_axes(self, dims: str) -> tuple[Axes, ...]:
        """The mesh axes that shard each dimension of a parameter named by its letters.

        Experts (first letter E): width over fsdp, and by `expert_weights`
          hidden: experts over the expert axis, hidden width over tensor;
          folded: experts over (expert, tensor), hidden width not sharded;
          whole: experts over the expert axis, and tensor ranks hold copies.
        Width is over the stages too, outside of their layers.
        Other parameters: width over (fsdp, expert); heads, hidden width and vocabulary over tensor.
          Matrices from a latent to heads have no width: there the latent is over these axes.
        Factors of adapters: each dimension as in the weight, and the rank is not sharded.
        Parameters of one dimension are not sharded. Where weights are gathered no width is.
        """
        if len(dims) == 1:
            return ((),)
        width = () if self.gathered else self.stage + self.fsdp
        if dims[0] == "E":
            hidden = self.tensor if self.hidden_over_tensor else ()
            rules = {"E": self.expert_owner_axes, "D": width, "F": hidden}
        else:
            # A latent that a matrix ends at is not sharded, nor in a factor of its adapter.
            width = () if self.gathered else width + self.expert
            rules = {"Z" if dims[0] == "Z" else "D": width}
            rules |= dict.fromkeys("HGFV", self.tensor)
        return tuple(rules.get(letter, ()) for letter in dims)

    def is_replicated(self, dims: str) -> bool:
        """Returns whether every device holds all of a parameter."""
        return not any(self.param_axes(dims))

    def param_spec(self, dims: str, ndim: int) -> PartitionSpec:
        """The sharding of a parameter; stacked layers are sharded over `stacked`."""
        axes = self.param_axes(dims)
        return PartitionSpec(*self.stack_spec(ndim - len(axes)), *(a or None for a in axes))

    def stack_spec(self, count: int) -> list[Axes | None]:
        """The sharding of `count` leading dimensions of stacked layers."""
        return [self.stacked or None, *[None] * count][:count]

    def token_spec(self) -> PartitionSpec:
        """The sharding of `token_BT`: sequences over the row axes, positions not sharded."""
        return PartitionSpec(self.row_axes)


def is_product(dims: str) -> bool:
    """Returns whether a parameter multiplies activations: no bias, norm scale or sink does.

    Its products start or end at the model's width, at a latent or at an adapter's rank. Experts
    (first letter E) count as many parameters, so that one dimension besides theirs is a bias.
    """
    own = dims[1:] if dims[0] == "E" else dims
    return len(own) > 1 and not {"D", "Z", RANK}.isdisjoint(own)


def is_index(dims: str) -> bool:
    """Returns whether a parameter is of an indexer, which may have no gradient."""
    return not {"I", "J"}.isdisjoint(dims)


def build_layout(mesh: MeshConfig, *, gathered: bool = False) -> Layout:
    """Returns the layout of a resolved mesh (every axis size known).

    Devices fill nodes in mesh order, so an axis may lie inside a node, cross nodes, or do both. An
    axis that does both is split in a slow and a fast mesh axis.
    """
    assert mesh.replica is not None, "resolve_mesh fills the replica axis first"
    shape = {axis: getattr(mesh, axis) for axis in ("replica", "fsdp", "expert", "tensor")}
    if mesh.stage > 1:
        shape = {"stage": mesh.stage, **shape}
    sizes: list[tuple[str, int]] = []
    names: dict[str, Axes] = {}
    slow: list[str] = []
    for axis, (_, inside) in node_parts(shape, mesh.nodes or 1).items():
        size = shape[axis]
        if inside in (1, size):
            names[axis], split = (axis,), [(axis, size)]
            slow += [axis] if inside < size else []
        else:
            names[axis] = (f"{axis}_slow", f"{axis}_fast")
            split = [(names[axis][0], size // inside), (names[axis][1], inside)]
            slow.append(names[axis][0])
        sizes = split + sizes
    return Layout(
        sizes=tuple(sizes),
        **names,
        slow=tuple(slow),
        context=_context_axes(names["fsdp"] + names["expert"], dict(sizes), mesh.context),
        stripe=mesh.context_stripe if mesh.context > 1 else 0,
        sequence_sharded=mesh.activations == "sequence",
        expert_weights=mesh.expert_weights,
        gathered=gathered,
    )


def _context_axes(axes: Axes, sizes: dict[str, int], count: int) -> Axes:
    """Returns the fewest of the last axes with `count` devices together; none for one device."""
    for start in range(len(axes), -1, -1):
        if math.prod(sizes[axis] for axis in axes[start:]) == count:
            return axes[start:]
    raise ValueError(f"{count} is no product of the last of {axes}: checks.mesh refuses it")
