"""Static choices that model code needs besides its config: layout, route, dtypes, codecs."""

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
    compression: Compression = NO_COMPRESSION  # the policy over all steps of the run
    codecs: Codecs = NO_CODECS  # the policy's codecs for the steps of this program
    # "step": dense matrices are gathered once a step and kept, their gradients reduced once a step.
    gather_dense: str = "use"
    # How weights sharded across nodes are gathered: "flat", or across nodes first, then inside; the
    # first at each "use", once for both "passes" of a micro-batch, or once a "step".
    gather_across: str = "flat"
    # Keys of shared sequences: a "gather" of all, or a "ring" along which those of a device travel.
    context_exchange: str = "gather"
    micro_bytes: int | None = None  # largest piece of a gradient in a collective; None: all of it
    adapter_scale: float = 1.0  # factor of the adapters' products (LoRA)
    # Factor of the indexers' loss, a sum over positions; 0: they are not trained.
    index_loss: float = 0.0
    experts: str = "blocked"  # implementation of kernels.expert_mlp
    attention: str = "blocked"  # implementation of kernels.attention, for whole sequences
    sliced_attention: str = "blocked"  # and of kernels.sliced_attention, for parts of them
    stacked: bool = True  # repeats of a layer group share arrays; else each repeat has its own
    # Whether overflow rounds compute anything. False only where a step is traced to be priced for
    # a routing that overflows no bucket: it must not run.
    rounds: bool = True
    # Values that remat policies keep go to the host's memory; slots of stages are not among them.
    residuals_on_host: bool = False
    # Share of the pairs of positions that lie inside a document, for the price of attention alone.
    documents: float = 1.0
    # Optimization barriers after the steps of the token pipeline, for compilers that order the
    # program statically (GPU, TPU). The CPU runtime starts whatever is ready and needs none.
    barriers: bool = False
    # Gradients are scattered by rows, which XLA for TPUs needs (`comm.weights.reduce`). On GPUs it
    # hides fewer of the reductions.
    scatter_rows: bool = False
    # Slots of the experts hold what a table says (generation); else copies along rings (training).
    tables: bool = False
    # Logits computed at a time: few enough for a CPU's cache, enough for a GPU's matrix units.
    logit_elements: int = 2**21
