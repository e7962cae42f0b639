"""Counts a model's parameters and FLOPs from the model itself."""

from dataclasses import dataclass

from moejax.config.schema import Config
from moejax.kernels.costs import causal_pairs


@dataclass(frozen=True)
class Counts:
    """Sizes of a model.

    Attributes:
      total: all parameters.
      active: parameters one token uses: K of E experts, everything else.
      matmul: of those, the ones that multiply activations (not the embedding lookup, not norms).
      flops_per_token: of a train step (forward and backward), multiply-adds counted as two, of
        attention the pairs of positions that causality and the window let through; recomputation
        not counted, borders of documents not looked at.
    """

    total: int
    active: int
    matmul: int
    flops_per_token: int


def count(cfg: Config, sizes: dict[str, tuple[str, int]]) -> Counts:
    """Counts from each parameter's dimension letters and number of elements.

    Args:
      sizes: parameter path -> (letters of its dimensions, elements with stacked layers).
    """
    total = active = matmul = 0
    E, K = cfg.moe.num_experts, cfg.moe.experts_per_token
    for path, (dims, elements) in sizes.items():
        used = elements * K // E if dims[0] == "E" else elements
        total += elements
        active += used
        lookup = path.endswith("table") and not cfg.model.tie_embeddings
        if "D" in dims and len(dims) > 1 and not lookup:
            matmul += used
    model, T = cfg.model, cfg.data.sequence_length
    pairs = causal_pairs(T, model.sliding_window)
    channels = model.num_layers * model.num_heads * model.head_width
    # Two products forward, four back, of two FLOPs a channel.
    return Counts(total, active, matmul, 6 * matmul + 12 * channels * pairs // T)
