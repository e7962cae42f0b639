"""How a parameter is gathered and its gradient is summed: mesh axes, dtypes and codecs."""

from dataclasses import dataclass

from moejax.comm.codecs.codec import Codec, build_codec, build_plain_codec
from moejax.layout.layout import RANK, Axes, Layout, is_product
from moejax.layout.spec import StepSpec


@dataclass(frozen=True)
class ParamPath:
    """The mesh axes on which a parameter is gathered and its gradient reduced; static.

    Attributes:
      dim: the dimension whose shards are gathered; None if no dimension is gathered.
      gather: mesh axes that shard `dim`.
      copies: mesh axes whose devices hold copies of a shard.
      slow: the axes of `gather` and `copies` that cross nodes.
    """

    dim: int | None
    gather: Axes
    copies: Axes
    slow: Axes

    def split(self, axes: Axes) -> tuple[Axes, Axes]:
        """Splits axes into (across nodes, inside a node)."""
        inside = tuple(axis for axis in axes if axis not in self.slow)
        return tuple(axis for axis in axes if axis in self.slow), inside

    @property
    def gathers_across(self) -> bool:
        """Whether shards lie across nodes."""
        return bool(self.split(self.gather)[0])


@dataclass(frozen=True)
class GatherSpec:
    """How one parameter is gathered and its gradient reduced; static."""

    path: ParamPath
    dtype: str  # of the gathered weight
    gradient_dtype: str
    traffic: str = "dense_gradient"  # class of traffic of the gradient
    micro_bytes: int | None = None  # largest piece of the gradient in a collective; None: all of it
    rows: bool = False  # whether the gradient is scattered by rows: see `reduce._scatter`
    gradient_codec: Codec | None = None  # across nodes, if the `Shard` has its state
    weight_codec: Codec | None = None  # None unless the gather crosses nodes
    # Micro-batches add up gradients of the gathered weight, and the last one reduces the sum.
    unsharded_total: bool = False
    across: str = "flat"  # as of `StepSpec.gather_across`


def path_of(dims: str, layout: Layout) -> ParamPath:
    """Returns the path of a parameter with these dimension letters, e.g. "DHC"."""
    by_dim = layout.param_axes(dims)
    never_gathered = layout.tensor + (layout.expert_owner_axes if dims[0] == "E" else ())
    gathers = {
        dim: tuple(axis for axis in axes if axis not in never_gathered and layout.size((axis,)) > 1)
        for dim, axes in enumerate(by_dim)
    }
    dim, gather = next(((d, axes) for d, axes in gathers.items() if axes), (None, ()))
    sharding = {axis for axes in by_dim for axis in axes}
    copies = tuple(a for a in layout.mesh_axes if a not in sharding and layout.size((a,)) > 1)
    copies = copies if sharding else ()
    return ParamPath(dim, gather, copies, layout.between_nodes(gather + copies))


def build_gather_spec(dims: str, spec: StepSpec, dtype: str | None = None) -> GatherSpec:
    """Returns how a parameter with these dimension letters is gathered and its gradient reduced.

    Args:
      dtype: of the gathered weight; None: that of compute.
    """
    codecs, path, small = spec.codecs, path_of(dims, spec.layout), not compressible(dims)
    gradient_codec = None if small or not path.slow else getattr(codecs, class_of(dims))
    return GatherSpec(
        path,
        dtype or spec.dtype,
        spec.gradient_dtype,
        class_of(dims),
        # Gradients of replicated parameters are summed by `reduce_replicated`, in one piece.
        micro_bytes=None if spec.layout.is_replicated(dims) else spec.micro_bytes,
        rows=spec.scatter_rows,
        gradient_codec=None if gradient_codec is None else build_codec(gradient_codec),
        weight_codec=build_plain_codec(None if small else codecs.weights)
        if spec.layout.between_nodes(path.gather)
        else None,
        unsharded_total=is_gathered_once(dims, spec),
        across=spec.gather_across if path.gathers_across else "flat",
    )


def is_gathered_once(dims: str, spec: StepSpec) -> bool:
    """Whether a parameter is gathered once a step, before the first micro-batch.

    With `mesh.gather_dense=step` dense matrices are. The router's matrix and biases are not: they
    are small, and are gathered in float32.
    """
    dense = class_of(dims) == "dense_gradient" and compressible(dims)
    return spec.gather_dense == "step" and dense and path_of(dims, spec.layout).dim is not None


def crosses_nodes_once(dims: str, spec: StepSpec) -> bool:
    """Whether a parameter is gathered across nodes once a step, and inside the node at each use.

    With `mesh.gather_across=step` every matrix with shards across nodes is, unless it
    `is_gathered_once`.
    """
    once = spec.gather_across == "step" and compressible(dims) and not is_gathered_once(dims, spec)
    return once and path_of(dims, spec.layout).gathers_across


def reduction_hops(dims: str, layout: Layout) -> int:
    """The number of collectives, one after the other, that sum a gradient without a codec.

    Up to three: over the gather axes inside the node, over the gather axes between nodes, over the
    copies between nodes. Not counted: the collectives over copies inside the node.
    """
    path = path_of(dims, layout)
    slow, fast = path.split(path.gather)
    copies, _ = path.split(path.copies)
    return sum(bool(axes) for axes in (fast, slow, copies))


def class_of(dims: str) -> str:
    """The class of traffic of a parameter's gradient: expert_gradient or dense_gradient."""
    return "expert_gradient" if dims[0] == "E" else "dense_gradient"


def compressible(dims: str) -> bool:
    """Whether codecs encode a parameter: matrices, but not the router's.

    Biases, norm scales and factors of adapters are too small to gain.
    """
    return is_product(dims) and dims != "DE" and RANK not in dims


def parts_shape(size: int, dims: str, layout: Layout) -> tuple[int, int, int]:
    """[S, C, n]: the share of a gradient of `size` values that one device sends across nodes.

    One part of n values for each of S shards of the weight and each of C copies of a shard.
    """
    path = path_of(dims, layout)
    (scatter, _), (copies, inside) = path.split(path.gather), path.split(path.copies)
    shards = layout.size(tuple(axis for axes in layout.param_axes(dims) for axis in axes))
    n = -(-size // shards // layout.size(copies + inside))
    return layout.size(scatter), layout.size(copies), n
