"""Counts a model's parameters and FLOPs from its parameter shapes."""

from dataclasses import dataclass

from moejax.config.pattern import ahead_kind, block_kinds, settings_of
from moejax.config.schema import Config
from moejax.layout.layout import is_index, is_product
from moejax.model.block import MIXERS


@dataclass(frozen=True)
class Counts:
    """Sizes of a model.

    Attributes:
      total: all parameters of the model, without adapters.
      active: parameters that one token uses: K of E experts, and all others.
      matmul: active parameters that multiply activations (not the embedding lookup, not norms), as
        often as they do.
      flops_per_token: FLOPs of a train step (forward and backward) per token. A multiply-add counts
        as two. Attention counts the pairs of positions inside the causal mask and the window,
        across documents too; linear attention its states position by position. Recomputation is not
        counted. Indexers of sparse attention count forward alone, because their choice has no
        gradient. Frozen weights count with two products of three, because they need no gradient,
        and adapters as products of their own.
      trained: number of trained parameters: all, or the adapters'.
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
      adapters: the same for the factors of adapters; the parameters of `sizes` are then frozen.
    """
    total = active = matmul = indexed = 0
    E, K = cfg.moe.num_experts, cfg.moe.experts_per_token

    def active_of(dims: str, elements: int) -> int:
        # A vector of experts is the router's bias, which every token meets.
        return elements * K // E if dims[0] == "E" and len(dims) > 1 else elements

    for path, (dims, elements) in sizes.items():
        used = active_of(dims, elements)
        total += elements
        active += used
        lookup = path.endswith("table") and not cfg.model.tie_embeddings
        if is_product(dims) and not lookup:
            matmul += used
            indexed += used if is_index(dims) else 0
    model, T = cfg.model, cfg.data.sequence_length
    kinds = block_kinds(model)
    # The module for multi-token prediction has a block, and multiplies by the model's output
    # projection once more.
    kinds += [ahead_kind(model)] * model.predict_ahead
    matmul += model.predict_ahead * model.vocab_size * model.width
    mixed = sum(
        MIXERS[kind.mixer].flops(settings_of(model, kind.window), T, kind.window) for kind in kinds
    )
    # Of each product forward there are two backward.
    flops, trained = 3 * mixed // T + 6 * matmul - 4 * indexed, total
    if adapters:
        trained = sum(elements for _, elements in adapters.values())
        flops += 6 * sum(active_of(*factor) for factor in adapters.values())
        flops -= 2 * (matmul - indexed)
    return Counts(total, active, matmul, flops, trained)
