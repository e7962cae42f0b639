"""Counts a model's parameters and FLOPs from its parameter shapes."""

from dataclasses import dataclass

from moejax.config.schema import Config
from moejax.kernels.costs import causal_pairs


@dataclass(frozen=True)
class Counts:
    """Sizes of a model.

    Attributes:
      total: all parameters of the model, without adapters.
      active: parameters that one token uses: K of E experts, and all others.
      matmul: active parameters that multiply activations (not the embedding lookup, not norms).
      flops_per_token: FLOPs of a train step (forward and backward) per token. A multiply-add counts
        as two. Attention counts the pairs of positions inside the causal mask and the window,
        across documents too. Recomputation is not counted. Frozen weights count with two products
        of three, because they need no gradient, and adapters as products of their own.
      trained: parameters that are trained: all, or those of adapters.
    """

    total: int
    active: int
    matmul: int
    flops_per_token: int
    trained: int


def count(
    cfg: Config,
    sizes: dict[str, tuple[str, int]],
    adapters: dict[str, tuple[str, int]] | None = None,
) -> Counts:
    """Counts from each parameter's dimension letters and number of elements.

    Args:
      sizes: parameter path -> (dimension letters, elements of all stacked layers).
      adapters: the same of the factors of adapters; the parameters of `sizes` are then frozen.
    """
    total = active = matmul = 0
    E, K = cfg.moe.num_experts, cfg.moe.experts_per_token

    def active_of(dims: str, elements: int) -> int:
        return elements * K // E if dims[0] == "E" else elements

    for path, (dims, elements) in sizes.items():
        used = active_of(dims, elements)
        total += elements
        active += used
        lookup = path.endswith("table") and not cfg.model.tie_embeddings
        if "D" in dims and len(dims) > 1 and not lookup:
            matmul += used
    model, T = cfg.model, cfg.data.sequence_length
    pairs = causal_pairs(T, model.sliding_window)
    channels = model.num_layers * model.num_heads * model.head_width
    # Attention: two products forward, four backward, of two FLOPs a channel and pair.
    flops, trained = 12 * channels * pairs // T + 6 * matmul, total
    if adapters:
        trained = sum(elements for _, elements in adapters.values())
        flops += 6 * sum(active_of(*factor) for factor in adapters.values()) - 2 * matmul
    return Counts(total, active, matmul, flops, trained)
