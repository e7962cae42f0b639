"""What model code must know of the run besides its config: where arrays live, routes, dtypes."""

from dataclasses import dataclass

from moejax.config.compression import NO_CODECS, NO_COMPRESSION, Codecs, Compression
from moejax.layout.layout import Layout
from moejax.layout.route import Route


@dataclass(frozen=True)
class StepSpec:
    """Static choices of the compiled step. Hashable, so that modules can hold it."""

    layout: Layout
    route: Route  # of tokens to their experts
    dtype: str = "float32"
    gradient_dtype: str = "float32"
    compression: Compression = NO_COMPRESSION  # the policy
    codecs: Codecs = NO_CODECS  # what the policy says of the steps that the program is for
    micro_bytes: int | None = None  # of a piece in which a gradient is reduced; None: whole
    experts: str = "blocked"  # implementation of kernels.expert_mlp
    attention: str = "blocked"  # implementation of kernels.attention
    # Whether the steps of the token pipeline are held together for a compiler that orders the
    # program statically (GPU, TPU); the CPU runtime starts whatever is ready.
    barriers: bool = False
    # Logits that exist at one time: what fits a CPU's cache, or keeps a GPU's matrix units full.
    logit_elements: int = 2**21
