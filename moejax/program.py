"""What model code must know of the run besides its own config: where arrays live, and dtypes."""

from dataclasses import dataclass

from moejax.dims import Layout


@dataclass(frozen=True)
class Program:
    """Static choices of the compiled step. Hashable, so that modules can hold it."""

    layout: Layout
    dtype: str = "float32"
    gradient_dtype: str = "float32"
    grouped_matmul: str = "blocked"
    attention: str | None = None  # implementation of jax.nn.dot_product_attention; None: its choice
