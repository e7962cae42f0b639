"""Counts a model's parameters and FLOPs from its parameter shapes."""

from dataclasses import dataclass

from moejax.config.schema import Config
from moejax.kernels.costs import causal_pairs
from moejax.layout.layout import is_product


@dataclass(frozen=True)
class Counts:
    """Sizes of a model.

    Attributes:
      total: all parameters.
      active: parameters that one token uses: K of E experts, and all others.
      matmul: active parameters that multiply activations (not the embedding lookup, not norms), as
        often as they do.
      flops_per_token: FLOPs of a train step (forward and backward) per token. A multiply-add counts
        as two. Attention counts the pairs of positions inside the causal mask and the window,
        across documents too. Recomputation is not counted.
    """

    total: int
    active: int
    matmul: int
    flops_per_token: int


def count(cfg: Config, sizes: dict[str, tuple[str, int]]) -> Counts:
    """Counts from each parameter's dimension letters and number of elements.

    Args:
      sizes: parameter path -> (dimension letters, elements of all stacked layers).
    """
    total = active = matmul = 0
    E, K = cfg.moe.num_experts, cfg.moe.experts_per_token
    for path, (dims, elements) in sizes.items():
        # A vector of experts is the router's bias, which every token meets.
        used = elements * K // E if dims[0] == "E" and len(dims) > 1 else elements
        total += elements
        active += used
        lookup = path.endswith("table") and not cfg.model.tie_embeddings
        if is_product(dims) and not lookup:
            matmul += used
    model, T = cfg.model, cfg.data.sequence_length
    pairs = causal_pairs(T, model.sliding_window)
    channels = model.blocks * model.num_heads * model.head_width
    # The module for multi-token prediction multiplies by the model's output projection once more.
    matmul += model.predict_ahead * model.vocab_size * model.width
    # Attention: two products forward, four backward, of two FLOPs a channel and pair.
    return Counts(total, active, matmul, 6 * matmul + 12 * channels * pairs // T)
