"""What of a parameter is gathered on its way into a layer, and summed on its way back."""

from dataclasses import dataclass

from moejax.layout.layout import Axes, Layout


@dataclass(frozen=True)
class ParamPath:
    """How a parameter is gathered and its gradient reduced; static.

    Attributes:
      dim: the dimension whose shards are gathered; None if this device's shard is all it needs.
      gather: mesh axes that shard it.
      copies: mesh axes whose devices hold copies.
      slow: of all those, what crosses nodes.
    """

    dim: int | None
    gather: Axes
    copies: Axes
    slow: Axes

    def split(self, axes: Axes) -> tuple[Axes, Axes]:
        """Axes across nodes, axes inside."""
        inside = tuple(axis for axis in axes if axis not in self.slow)
        return tuple(axis for axis in axes if axis in self.slow), inside


def path_of(dims: str, layout: Layout) -> ParamPath:
    """The way of a parameter that is named by the letters of its dimensions."""
    by_dim = layout.param_axes(dims)
    kept = layout.tensor + (layout.expert_owner_axes if dims[0] == "E" else ())
    gathers = {
        dim: tuple(axis for axis in axes if axis not in kept and layout.size((axis,)) > 1)
        for dim, axes in enumerate(by_dim)
    }
    dim, gather = next(((d, axes) for d, axes in gathers.items() if axes), (None, ()))
    held = {axis for axes in by_dim for axis in axes}
    copies = tuple(a for a in layout.mesh_axes if a not in held and layout.size((a,)) > 1)
    copies = copies if held else ()
    return ParamPath(dim, gather, copies, layout.between_nodes(gather + copies))


def class_of(dims: str) -> str:
    """The class of traffic that a parameter's gradient belongs to."""
    return "expert_gradient" if dims[0] == "E" else "dense_gradient"


def compressible(dims: str) -> bool:
    """The router is never compressed; biases and norm scales are too small to gain."""
    return "D" in dims and len(dims) > 1 and dims != "DE"


def parts_shape(size: int, dims: str, layout: Layout) -> tuple[int, int, int]:
    """[S, C, n] of what crosses nodes of a gradient of `size` values.

    One part of n values to each of S shards of the weight and C copies of a shard.
    """
    path = path_of(dims, layout)
    (scatter, _), (copies, inside) = path.split(path.gather), path.split(path.copies)
    shards = layout.size(tuple(axis for axes in layout.param_axes(dims) for axis in axes))
    n = -(-size // shards // layout.size(copies + inside))
    return layout.size(scatter), layout.size(copies), n
